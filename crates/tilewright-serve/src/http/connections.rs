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

#[derive(Debug)]
struct Connection {
    /// Since when it has no request; none while it has one.
    idle: Option<Instant>,
    close: Arc<Notify>,
}

/// The open connections.
#[derive(Debug)]
pub struct Connections {
    most: usize,
    open: Mutex<HashMap<u64, Connection>>,
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

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Connection>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many are open.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Takes a connection in. If all places are taken, the one that is idle longest has to go; none if none is idle.
    fn enter(&self) -> Option<(u64, Arc<Notify>)> {
        let mut open = self.lock();
        if open.len() >= self.most {
            let idle = open.iter().filter_map(|(id, c)| c.idle.map(|since| (since, *id))).min();
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
        let close = Arc::new(Notify::new());
        open.insert(id, Connection { idle: Some(Instant::now()), close: close.clone() });
        self.metrics.connections.add(1);
        Some((id, close))
    }

    fn leave(&self, id: u64) {
        self.lock().remove(&id);
        self.changed.notify_waiters();
    }

    fn set_idle(&self, id: u64, idle: bool) {
        if let Some(connection) = self.lock().get_mut(&id) {
            connection.idle = idle.then(Instant::now);
        }
    }

    /// How long it has been without a request.
    fn idle_for(&self, id: u64) -> Option<Duration> {
        self.lock().get(&id)?.idle.map(|since| since.elapsed())
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
struct Busy(Arc<AppState>, u64);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.connections.set_idle(self.1, true);
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
                Some((id, close)) => {
                    let (router, state, timing, stop) = (router.clone(), state.clone(), timing.clone(), stop.clone());
                    tokio::spawn(async move {
                        serve(stream, router, &state, id, &close, &timing, stop).await;
                        state.connections.leave(id);
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
    state: &Arc<AppState>,
    id: u64,
    close: &Notify,
    timing: &Timing,
    mut stop: watch::Receiver<bool>,
) {
    let _ = stream.set_nodelay(true);
    let of_service = state.clone();
    let unread = Arc::new(AtomicBool::new(false));
    let of_body = unread.clone();
    let service = service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
        let router = router.clone();
        of_service.connections.set_idle(id, false);
        let busy = Busy(of_service.clone(), id);
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
            () = close.notified() => return,
            // Finishes what is under way, then closes.
            _ = stop.wait_for(|stop| *stop), if !stopping => {
                stopping = true;
                Pin::new(&mut connection).graceful_shutdown();
            }
            _ = look.tick() => {
                if state.connections.idle_for(id).is_some_and(|idle| idle >= timing.idle) {
                    return;
                }
            }
        }
    }
    let mut stream = connection.into_parts().io.into_inner();
    if unread.load(Ordering::Relaxed) {
        tokio::select! {
            () = end(&mut stream) => {}
            () = close.notified() => {}
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
        let (a, close_a) = connections.enter().unwrap();
        let (b, _) = connections.enter().unwrap();
        connections.set_idle(a, false);
        let (c, _) = connections.enter().unwrap();
        assert!(connections.lock().contains_key(&a) && !connections.lock().contains_key(&b));
        connections.set_idle(c, false);
        assert!(connections.enter().is_none(), "all work");
        connections.set_idle(a, true);
        connections.enter().unwrap();
        assert_eq!(connections.count(), 2);
        assert_eq!((connections.metrics.evicted.get(), connections.metrics.refused.get()), (2, 1));
        drop(close_a);
    }
}
