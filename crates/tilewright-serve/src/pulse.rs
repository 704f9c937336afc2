//! Keeps a worker of the runtime that is held up from holding up everyone.
//!
//! A worker that takes events from the sockets runs the tasks they belong to, and until it is done nobody looks for further events, however idle the others are.
//! Tasks take microseconds here. But the system can hold a thread up: one that touches a page of memory which is just being moved waits until that is done,
//! and the thread that moves it may be one of low priority that does not get the processor; 1.5 s were seen. Then all connections stood still, of which one was
//! concerned. So a thread looks at the workers every few milliseconds, and gives the runtime an empty task while one of them makes no headway: whoever takes it
//! also takes over the sockets.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Handle, RuntimeMetrics};

/// From look to look. A worker that is held up is found at the second one.
const LOOK: Duration = Duration::from_millis(5);

/// The same after a while without any work.
const QUIET: Duration = Duration::from_millis(20);

/// So many looks without work are that while.
const QUIET_AFTER: usize = 200;

/// The thread; it ends when this is dropped.
pub(crate) struct Pulse {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Pulse {
    /// Watches the workers of a runtime.
    pub(crate) fn start(runtime: Handle) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let body = move || {
            let metrics = runtime.metrics();
            let mut looks = Looks::default();
            while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(looks.next()) {
                if looks.held_up(|worker| parked(&metrics, worker), metrics.num_workers()) {
                    runtime.spawn(async {});
                }
            }
        };
        let thread = std::thread::Builder::new().name("pulse".into()).spawn(body)?;
        Ok(Pulse { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How often a worker has gone to sleep and has woken: odd while it sleeps.
#[cfg(target_has_atomic = "64")]
fn parked(metrics: &RuntimeMetrics, worker: usize) -> u64 {
    metrics.worker_park_unpark_count(worker)
}

/// Not known, and so always suspected.
#[cfg(not(target_has_atomic = "64"))]
fn parked(_: &RuntimeMetrics, _: usize) -> u64 {
    0
}

/// What the last look saw.
#[derive(Debug, Default)]
struct Looks {
    counts: Vec<u64>,
    quiet: usize,
}

impl Looks {
    fn next(&self) -> Duration {
        if self.quiet < QUIET_AFTER { LOOK } else { QUIET }
    }

    /// Whether a worker has been awake since the last look without a pause.
    fn held_up(&mut self, parked: impl Fn(usize) -> u64, workers: usize) -> bool {
        let counts: Vec<u64> = (0..workers).map(parked).collect();
        let held_up = counts.iter().zip(&self.counts).any(|(now, before)| now == before && now % 2 == 0);
        self.quiet = if counts == self.counts && !held_up { self.quiet.saturating_add(1) } else { 0 };
        self.counts = counts;
        held_up
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{SocketAddr, TcpStream};
    use std::time::Instant;

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    const HELD_UP: Duration = Duration::from_millis(1500);

    /// Gives every byte back; `!` holds the thread up first.
    fn echo(runtime: &tokio::runtime::Runtime) -> SocketAddr {
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    while let Ok(byte) = stream.read_u8().await {
                        if byte == b'!' {
                            std::thread::sleep(HELD_UP);
                        }
                        stream.write_u8(byte).await.unwrap();
                    }
                });
            }
        });
        address
    }

    fn ask(stream: &mut TcpStream) -> Duration {
        let start = Instant::now();
        stream.write_all(b"?").unwrap();
        stream.read_exact(&mut [0]).unwrap();
        start.elapsed()
    }

    /// The longest of some questions while a worker is held up on another connection.
    fn longest(watched: bool) -> Duration {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().worker_threads(2).build().unwrap();
        let address = echo(&runtime);
        let _pulse = watched.then(|| Pulse::start(runtime.handle().clone()).unwrap());
        let (mut held_up, mut other) = (TcpStream::connect(address).unwrap(), TcpStream::connect(address).unwrap());
        ask(&mut held_up);
        ask(&mut other);
        // Both workers sleep again.
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        held_up.write_all(b"!").unwrap();
        std::thread::sleep(Duration::from_millis(50));
        let mut longest = Duration::ZERO;
        while start.elapsed() < HELD_UP - Duration::from_millis(500) {
            longest = longest.max(ask(&mut other));
            std::thread::sleep(Duration::from_millis(1));
        }
        longest
    }

    #[test]
    fn a_worker_that_is_held_up_holds_up_its_own_connection_only() {
        // Half a second, as tests run beside others; without the thread it is more than a second.
        let longest = longest(true);
        assert!(longest < Duration::from_millis(500), "{longest:?}");
    }

    #[test]
    fn a_runtime_alone_lets_one_worker_hold_up_everyone() {
        // Once this fails, the runtime does it by itself and this file can go.
        let longest = longest(false);
        assert!(longest > Duration::from_millis(500), "{longest:?}");
    }

    #[test]
    fn a_worker_awake_at_two_looks_without_a_pause_is_held_up_and_one_asleep_is_not() {
        let mut looks = Looks::default();
        assert!(!looks.held_up(|_| 2, 1), "the first look");
        assert!(looks.held_up(|_| 2, 1));
        assert!(!looks.held_up(|_| 4, 1), "it slept in between");
        assert!(!looks.held_up(|_| 5, 1));
        assert!(!looks.held_up(|_| 5, 1), "it sleeps");
        assert!(!looks.held_up(|worker| [5, 6][worker], 2));
        assert!(looks.held_up(|worker| [7, 6][worker], 2), "one of two");
    }

    #[test]
    fn looks_are_rare_while_nothing_happens() {
        let mut looks = Looks::default();
        (0..=QUIET_AFTER).for_each(|_| assert!(!looks.held_up(|_| 1, 1)));
        assert_eq!(looks.next(), QUIET);
        looks.held_up(|_| 3, 1);
        assert_eq!(looks.next(), LOOK);
    }

    #[test]
    fn the_thread_ends_with_what_holds_it() {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
        let mut pulse = Pulse::start(runtime.handle().clone()).unwrap();
        drop(pulse.stop.take());
        pulse.thread.take().unwrap().join().unwrap();
    }
}
