//! Connections: accepted, counted, closed when they are idle too long, when another needs the place, or when the server stops.

use std::collections::HashMap;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tower::ServiceExt;

use super::AppState;
use super::ending::{Watched, end};
use super::timed::Timed;
use crate::config::Timing;
use crate::metrics::Metrics;

/// Bytes of the headers of a request.
const HEADER_BYTES: usize = 32 * 1024;

/// What a refused connection is told.
const REFUSAL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
connection: close\r\ncontent-length: 87\r\n\r\n\
{\"detail\":{\"error_type\":\"overloaded_error\",\"message\":\"too many connections are open\"}}\n";

/// An open connection. Requests mark it without the lock of all: a thread that the system holds up in between would hold up all others.
#[derive(Debug)]
struct Connection {
    id: u64,
    opened: Instant,
    /// Milliseconds after `opened` since when it has no request; [`BUSY`] while it has one.
    idle: AtomicU64,
    close: Notify,
}

/// Of a connection with a request.
const BUSY: u64 = u64::MAX;

impl Connection {
    fn set_idle(&self, idle: bool) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(BUSY - 1);
        self.idle.store(if idle { now } else { BUSY }, Ordering::Relaxed);
    }

    /// Since when it has no request; none while it has one.
    fn idle_since(&self) -> Option<Instant> {
        let since = self.idle.load(Ordering::Relaxed);
        (since != BUSY).then(|| self.opened + Duration::from_millis(since))
    }
}

/// The open connections.
#[derive(Debug)]
pub struct Connections {
    most: usize,
    open: Mutex<HashMap<u64, Arc<Connection>>>,
    next: AtomicU64,
    changed: Notify,
    metrics: Arc<Metrics>,
}

impl Connections {
    /// At most `most`.
    pub fn new(most: usize, metrics: Arc<Metrics>) -> Self {
        Connections {
            most: most.max(1),
            open: Mutex::default(),
            next: AtomicU64::new(0),
            changed: Notify::new(),
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Arc<Connection>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are open.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Takes a connection in. If all places are taken, the one that is idle longest has to go; none if none is idle.
    fn enter(&self) -> Option<Arc<Connection>> {
        let mut open = self.lock();
        if open.len() >= self.most {
            let idle = open.values().filter_map(|c| c.idle_since().map(|since| (since, c.id))).min();
            let Some((_, id)) = idle else {
                self.metrics.refused.add(1);
                return None;
            };
            if let Some(gone) = open.remove(&id) {
                gone.close.notify_one();
                self.metrics.evicted.add(1);
            }
        }
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let connection =
            Arc::new(Connection { id, opened: Instant::now(), idle: AtomicU64::new(0), close: Notify::new() });
        open.insert(id, connection.clone());
        self.metrics.connections.add(1);
        Some(connection)
    }

    fn leave(&self, id: u64) {
        self.lock().remove(&id);
        self.changed.notify_waiters();
    }

    /// Waits until none is open.
    pub async fn closed(&self) {
        loop {
            let changed = self.changed.notified();
            if self.count() == 0 {
                return;
            }
            // A look now and then, whatever happens in between.
            let _ = tokio::time::timeout(Duration::from_millis(100), changed).await;
        }
    }
}

/// Busy while it lives.
struct Busy(Arc<Connection>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set_idle(true);
    }
}

/// Accepts until `stop` says so. Connections that are open then finish their request.
pub async fn listen(
    listener: TcpListener,
    router: Router,
    state: Arc<AppState>,
    timing: Timing,
    mut stop: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.wait_for(|stop| *stop) => return,
        };
        match accepted {
            Ok((stream, _)) => match state.connections.enter() {
                Some(place) => {
                    let (router, state, timing, stop) = (router.clone(), state.clone(), timing.clone(), stop.clone());
                    tokio::spawn(async move {
                        serve(stream, router, &place, &timing, stop).await;
                        state.connections.leave(place.id);
                    });
                }
                None => {
                    tokio::spawn(refuse(stream));
                }
            },
            // The peer was gone again.
            Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
            // No file descriptor left: those in use come back.
            Err(error) => {
                tracing::error!(%error, "accept");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn refuse(mut stream: TcpStream) {
    let write = async {
        let _ = stream.write_all(REFUSAL).await;
        end(&mut stream).await;
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), write).await;
}

async fn serve(
    stream: TcpStream,
    router: Router,
    place: &Arc<Connection>,
    timing: &Timing,
    mut stop: watch::Receiver<bool>,
) {
    let _ = stream.set_nodelay(true);
    let of_service = place.clone();
    let unread = Arc::new(AtomicBool::new(false));
    let of_body = unread.clone();
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let router = router.clone();
        of_service.set_idle(false);
        let busy = Busy(of_service.clone());
        let request = request.map(|body| Body::new(Watched::new(body, of_body.clone())));
        // Boxed, since a connection whose stream is wanted back must not be pinned.
        Box::pin(async move {
            let response = router.oneshot(request).await;
            drop(busy);
            response
        })
    });
    let io = TokioIo::new(Timed::new(stream, timing.write));
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(timing.header)
        .max_buf_size(HEADER_BYTES)
        .serve_connection(io, service);
    let mut stopping = *stop.borrow();
    let mut look = tokio::time::interval(timing.idle.clamp(Duration::from_millis(20), Duration::from_secs(5)));
    loop {
        tokio::select! {
            result = poll_fn(|cx| connection.poll_without_shutdown(cx)) => match result {
                Ok(()) => break,
                Err(error) => {
                    tracing::debug!(%error, "connection");
                    return;
                }
            },
            () = place.close.notified() => return,
            // Finishes what is under way, then closes.
            _ = stop.wait_for(|stop| *stop), if !stopping => {
                stopping = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            _ = look.tick() => {
                if place.idle_since().is_some_and(|since| since.elapsed() >= timing.idle) {
                    return;
                }
            }
        }
    }
    let mut stream = connection.into_parts().io.into_inner();
    if unread.load(Ordering::Relaxed) {
        tokio::select! {
            () = end(&mut stream) => {}
            () = place.close.notified() => {}
        }
    } else {
        let _ = stream.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_tells_its_length() {
        let text = std::str::from_utf8(REFUSAL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }

    #[test]
    fn who_is_idle_longest_makes_room_and_who_works_stays() {
        let connections = Connections::new(2, Arc::default());
        let a = connections.enter().unwrap();
        let b = connections.enter().unwrap();
        a.set_idle(false);
        let c = connections.enter().unwrap();
        assert!(connections.lock().contains_key(&a.id) && !connections.lock().contains_key(&b.id));
        c.set_idle(false);
        assert!(connections.enter().is_none(), "all work");
        a.set_idle(true);
        connections.enter().unwrap();
        assert_eq!(connections.count(), 2);
        assert_eq!((connections.metrics.evicted.get(), connections.metrics.refused.get()), (2, 1));
    }

    #[test]
    fn a_connection_tells_since_when_it_is_idle() {
        let connections = Connections::new(1, Arc::default());
        let place = connections.enter().unwrap();
        assert_eq!(place.idle_since(), Some(place.opened), "it has asked nothing yet");
        let busy = Busy(place.clone());
        place.set_idle(false);
        assert_eq!(place.idle_since(), None);
        std::thread::sleep(Duration::from_millis(5));
        drop(busy);
        assert!(place.idle_since().unwrap() >= place.opened + Duration::from_millis(5));
    }
}
