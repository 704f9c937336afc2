//! Sending: an open loop, where requests leave when they are due whatever the server does, and a closed one, where each waits for the last.
//!
//! One thread a connection. In the open loop every free thread takes the next arrival, waits for its time and sends it. Where all connections are
//! busy an arrival leaves late, and its latency still counts from the time it was due: a server that stalls is charged for everybody who had to wait,
//! not only for the few whose requests it held.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::http::{Connection, Failure};
use super::mix::Mix;
use crate::rng::SplitMix;

/// Stack of a sending thread: it keeps nothing on it but one read's buffer.
const STACK: usize = 128 << 10;
/// How long a waiting thread sleeps at most before it looks for Ctrl-C.
const NAP: Duration = Duration::from_millis(100);

/// A request that is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrival {
    /// Since the start of the run.
    pub at: Duration,
    /// Index into the mix.
    pub request: usize,
}

/// What became of a request. Times are nanoseconds since the start of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// When it was due.
    pub due: u64,
    /// When it left.
    pub sent: u64,
    /// When the last byte of the answer was there, or the failure.
    pub done: u64,
    /// Index into the mix.
    pub request: usize,
    /// The status of the answer.
    pub answer: Result<u16, Failure>,
}

/// What a run needs beside its arrivals.
#[derive(Debug)]
pub struct Rules<'a> {
    /// What is asked.
    pub mix: &'a Mix,
    /// For one answer.
    pub timeout: Duration,
    /// Set by Ctrl-C.
    pub stop: &'a AtomicBool,
}

/// What came of a run.
#[derive(Debug, Default)]
pub struct Done {
    /// In the order they were due.
    pub outcomes: Vec<Outcome>,
    /// An answer that was neither 2xx nor a refusal, with the beginning of its body.
    pub complaint: Option<(u16, String)>,
}

/// Arrivals of a Poisson process: gaps are exponential, so that they come in bunches as independent callers do.
pub fn poisson(rate: f64, length: Duration, mix: &Mix, seed: u64) -> Vec<Arrival> {
    let mut gaps = SplitMix::for_purpose(seed, "arrivals");
    let mut requests = SplitMix::for_purpose(seed, "requests");
    let mut arrivals = Vec::with_capacity((rate * length.as_secs_f64() * 1.1) as usize);
    let mut at = 0.0;
    loop {
        at += -(1.0 - gaps.uniform()).ln() / rate;
        if at >= length.as_secs_f64() {
            return arrivals;
        }
        arrivals.push(Arrival { at: Duration::from_secs_f64(at), request: mix.draw(&mut requests) });
    }
}

/// Sends every arrival when it is due.
pub fn open_loop(connections: &mut [Connection], arrivals: &[Arrival], rules: &Rules) -> Done {
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    each(connections, |connection, done| {
        while let Some(arrival) = arrivals.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !sleep_until(start + arrival.at, rules.stop) {
                return;
            }
            send(connection, arrival.request, Some(arrival.at), start, rules, done);
        }
    })
}

/// Keeps every connection busy for `length`: the next request leaves when the last is answered.
pub fn closed_loop(connections: &mut [Connection], length: Duration, seed: u64, rules: &Rules) -> Done {
    let draws = std::sync::Mutex::new(SplitMix::for_purpose(seed, "requests"));
    let start = Instant::now();
    each(connections, |connection, done| {
        while start.elapsed() < length && !rules.stop.load(Ordering::Relaxed) {
            let Ok(request) = draws.lock().map(|mut rng| rules.mix.draw(&mut rng)) else { return };
            let failed = send(connection, request, None, start, rules, done);
            if failed {
                // A server that is not there would otherwise be asked a million times a second.
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    })
}

fn each(connections: &mut [Connection], work: impl Fn(&mut Connection, &mut Done) + Sync) -> Done {
    let mut all = Done::default();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = connections
            .iter_mut()
            .filter_map(|connection| {
                let body = move || {
                    let mut done = Done::default();
                    work(connection, &mut done);
                    done
                };
                // A system that gives fewer threads gives fewer connections; arrivals that leave late are counted.
                std::thread::Builder::new().stack_size(STACK).spawn_scoped(scope, body).ok()
            })
            .collect();
        for thread in threads {
            if let Ok(done) = thread.join() {
                all.outcomes.extend(done.outcomes);
                all.complaint = all.complaint.take().or(done.complaint);
            }
        }
    });
    all.outcomes.sort_by_key(|o| (o.due, o.sent));
    all
}

/// Sends one request and notes what became of it; whether it failed.
fn send(
    connection: &mut Connection,
    request: usize,
    due: Option<Duration>,
    start: Instant,
    rules: &Rules,
    done: &mut Done,
) -> bool {
    let what = &rules.mix.requests[request];
    let nanos = |d: Duration| d.as_nanos() as u64;
    let sent = nanos(start.elapsed());
    let reply = connection.post(what.path.as_deref(), &what.body, rules.timeout, rules.stop);
    let answer = reply.map(|r| r.status);
    if let Ok(status) = answer
        && !is_ok(status)
        && !is_refused(status)
        && done.complaint.is_none()
    {
        let words: String = String::from_utf8_lossy(&connection.body).chars().take(300).collect();
        done.complaint = Some((status, words));
    }
    done.outcomes.push(Outcome { due: due.map_or(sent, nanos), sent, done: nanos(start.elapsed()), request, answer });
    answer.is_err()
}

/// Answered.
pub fn is_ok(status: u16) -> bool {
    (200..300).contains(&status)
}

/// The server said that it has too much to do.
pub fn is_refused(status: u16) -> bool {
    status == 503 || status == 429
}

/// `false` when Ctrl-C came first.
fn sleep_until(when: Instant, stop: &AtomicBool) -> bool {
    loop {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        let left = when.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(NAP));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mix() -> Mix {
        Mix::parse(b"{\"a\":1}\n{\"weight\":3,\"body\":{}}", std::path::Path::new("m")).unwrap()
    }

    #[test]
    fn gaps_of_arrivals_are_exponential() {
        let arrivals = poisson(500.0, Duration::from_secs(40), &mix(), 3);
        let n = arrivals.len() as f64;
        // 20,000 expected, with a standard deviation of 141.
        assert!((n - 20_000.0).abs() < 600.0, "{n}");
        let gaps: Vec<f64> = arrivals.windows(2).map(|w| (w[1].at - w[0].at).as_secs_f64()).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|g| (g - mean) * (g - mean)).sum::<f64>() / gaps.len() as f64;
        assert!((variance.sqrt() / mean - 1.0).abs() < 0.03, "an exponential's deviation is its mean");
        let short = gaps.iter().filter(|g| **g < mean * std::f64::consts::LN_2).count() as f64 / gaps.len() as f64;
        assert!((short - 0.5).abs() < 0.02, "{short}");
    }

    #[test]
    fn the_seed_decides_times_and_requests() {
        let draw = |seed| poisson(100.0, Duration::from_secs(2), &mix(), seed);
        assert_eq!(draw(1), draw(1));
        assert_ne!(draw(1), draw(2));
        // Twice the rate compresses the same gaps, and draws the same requests.
        let faster = poisson(200.0, Duration::from_secs(1), &mix(), 1);
        assert_eq!(faster.len(), draw(1).len());
        assert!(
            faster.iter().zip(draw(1)).all(|(f, s)| f.request == s.request && s.at.abs_diff(f.at * 2).as_nanos() < 10)
        );
    }
}
