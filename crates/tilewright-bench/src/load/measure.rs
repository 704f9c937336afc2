//! From outcomes to the rows of a record.

use std::collections::BTreeMap;
use std::time::Duration;

use super::drive::{Arrival, Done, Outcome, is_ok, is_refused};
use super::histogram::Histogram;
use super::record::{Latencies, Run, Second, Tail};

/// What a run was asked for.
#[derive(Debug, Clone, Default)]
pub struct Asked {
    /// Index of the server.
    pub server: usize,
    /// In words: `rate`, `sweep`, `at 70 %`, `block`.
    pub purpose: String,
    /// Pair and place in it, of a comparison.
    pub pair: Option<(usize, usize)>,
    /// Requests a second; `None` in a closed loop.
    pub rate: Option<f64>,
    /// At the beginning, not counted.
    pub warm_up: Duration,
    /// Counted.
    pub length: Duration,
    /// Since the session began.
    pub began: Duration,
}

/// Latencies in nanoseconds as a row of milliseconds.
pub fn tail(histogram: &Histogram) -> Tail {
    let ms = |ns: u64| ns as f64 / 1e6;
    let q = |q: f64| ms(histogram.quantile(q));
    Tail {
        n: histogram.count(),
        mean_ms: histogram.mean() / 1e6,
        min_ms: ms(histogram.min()),
        p50_ms: q(0.5),
        p90_ms: q(0.9),
        p99_ms: q(0.99),
        p999_ms: q(0.999),
        max_ms: ms(histogram.max()),
        buckets: histogram.rows(),
    }
}

fn latencies<'a>(outcomes: impl Iterator<Item = &'a Outcome>) -> Latencies {
    let (mut latency, mut service) = (Histogram::default(), Histogram::default());
    for o in outcomes {
        latency.add(o.done.saturating_sub(o.due));
        service.add(o.done.saturating_sub(o.sent));
    }
    Latencies { latency: tail(&latency), service: tail(&service) }
}

/// Makes the row. `arrivals` is what was due, of which Ctrl-C may have kept back the end.
pub fn run(asked: &Asked, arrivals: Option<&[Arrival]>, done: &Done) -> Run {
    let nanos = |d: Duration| d.as_nanos() as u64;
    let (from, to) = (nanos(asked.warm_up), nanos(asked.warm_up + asked.length));
    let counted: Vec<&Outcome> = done.outcomes.iter().filter(|o| o.due >= from).collect();
    let ok = |o: &&Outcome| o.answer.is_ok_and(is_ok);
    let refused = |o: &&Outcome| o.answer.is_ok_and(is_refused);
    let mut statuses = BTreeMap::new();
    let mut failures = BTreeMap::new();
    for o in &counted {
        match o.answer {
            Ok(status) => *statuses.entry(status.to_string()).or_insert(0) += 1,
            Err(failure) => *failures.entry(failure.name().to_owned()).or_insert(0) += 1,
        }
    }
    let mut late = Histogram::default();
    counted.iter().for_each(|o| late.add(o.sent.saturating_sub(o.due)));
    // What was answered inside the window, whenever it was sent: the steady rate, also of a server that lags behind.
    let inside = done.outcomes.iter().filter(ok).filter(|o| (from..to).contains(&o.done)).count();
    let last = counted.iter().copied().filter(ok).map(|o| o.done).max().unwrap_or(to);
    let due = arrivals.map_or(counted.len(), |a| a.iter().filter(|a| a.at >= asked.warm_up).count());
    Run {
        server: asked.server,
        purpose: asked.purpose.clone(),
        pair: asked.pair.map(|p| p.0),
        slot: asked.pair.map(|p| p.1),
        rate: asked.rate,
        warm_up_s: asked.warm_up.as_secs_f64(),
        seconds: asked.length.as_secs_f64(),
        began_s: asked.began.as_secs_f64(),
        due: due as u64,
        sent: counted.len() as u64,
        statuses,
        failures,
        throughput: inside as f64 / asked.length.as_secs_f64(),
        early_p50_ms: early(&counted),
        drain_s: last.saturating_sub(to) as f64 / 1e9,
        answered: latencies(counted.iter().copied().filter(ok)),
        refused: latencies(counted.iter().copied().filter(refused)),
        other: latencies(counted.iter().copied().filter(|o| !ok(o) && !refused(o))),
        late: tail(&late),
        timeline: timeline(&done.outcomes, asked),
        complaint: done.complaint.as_ref().map(|(status, words)| format!("{status}: {words}")),
    }
}

/// The median latency of the first third, before a queue can have grown much.
fn early(counted: &[&Outcome]) -> f64 {
    let mut histogram = Histogram::default();
    for o in counted.iter().take(counted.len().div_ceil(3)).filter(|o| o.answer.is_ok_and(is_ok)) {
        histogram.add(o.done.saturating_sub(o.due));
    }
    histogram.quantile(0.5) as f64 / 1e6
}

/// One row a second, of the warm-up too: what was due in it, and what ended in it.
fn timeline(outcomes: &[Outcome], asked: &Asked) -> Vec<Second> {
    const SECOND: u64 = 1_000_000_000;
    let end = outcomes.iter().map(|o| o.done / SECOND + 1).max().unwrap_or(0) as usize;
    let mut rows: Vec<(Second, Histogram)> = (0..end)
        .map(|second| {
            let counted = second as f64 >= asked.warm_up.as_secs_f64();
            (Second { second: second as u64, counted, ..Second::default() }, Histogram::default())
        })
        .collect();
    for o in outcomes {
        if let Some((row, _)) = rows.get_mut((o.due / SECOND) as usize) {
            row.due += 1;
        }
        let Some((row, histogram)) = rows.get_mut((o.done / SECOND) as usize) else { continue };
        match o.answer {
            Ok(status) if is_ok(status) => {
                row.answered += 1;
                histogram.add(o.done.saturating_sub(o.due));
            }
            Ok(status) if is_refused(status) => row.refused += 1,
            _ => row.other += 1,
        }
    }
    let told = |(row, histogram): (Second, Histogram)| Second {
        p50_ms: histogram.quantile(0.5) as f64 / 1e6,
        p99_ms: histogram.quantile(0.99) as f64 / 1e6,
        ..row
    };
    rows.into_iter().map(told).collect()
}

/// Whether a server kept up with what was due: nearly all of it answered, and no queue that was still growing at the end.
///
/// A queue that takes longer to empty than a twentieth of the run and two ordinary answers was not there by chance.
pub fn kept_up(run: &Run, p99_ms: Option<f64>) -> bool {
    let answered = run.answered.latency.n as f64;
    answered >= 0.99 * run.due as f64
        && run.due > 0
        && run.drain_s <= 0.05 * run.seconds + 2.0 * run.early_p50_ms / 1e3
        && p99_ms.is_none_or(|limit| run.answered.latency.p99_ms <= limit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::http::Failure;

    const MS: u64 = 1_000_000;

    fn outcome(due: u64, sent: u64, done: u64, answer: Result<u16, Failure>) -> Outcome {
        Outcome { due: due * MS, sent: sent * MS, done: done * MS, request: 0, answer }
    }

    fn asked(warm_up: u64, length: u64) -> Asked {
        Asked { warm_up: Duration::from_secs(warm_up), length: Duration::from_secs(length), ..Asked::default() }
    }

    #[test]
    fn outcomes_are_counted_by_what_they_are_and_latency_begins_when_due() {
        let outcomes = vec![
            outcome(100, 100, 110, Ok(200)),
            outcome(200, 700, 720, Ok(200)),
            outcome(300, 300, 302, Ok(503)),
            outcome(400, 400, 401, Ok(422)),
            outcome(500, 500, 900, Err(Failure::Timeout)),
        ];
        let run = run(&asked(0, 1), None, &Done { outcomes, complaint: None });
        assert_eq!(run.statuses, BTreeMap::from([("200".into(), 2), ("422".into(), 1), ("503".into(), 1)]));
        assert_eq!(run.failures, BTreeMap::from([("timeout".into(), 1)]));
        assert_eq!((run.answered.latency.max_ms, run.answered.service.max_ms), (520.0, 20.0));
        assert_eq!((run.refused.latency.n, run.other.latency.n), (1, 2));
        assert_eq!((run.late.max_ms, run.throughput), (500.0, 2.0));
    }

    #[test]
    fn the_warm_up_is_shown_and_not_counted() {
        let outcomes = (0..40).map(|i| outcome(i * 50, i * 50, i * 50 + 5, Ok(200))).collect();
        let run = run(&asked(1, 1), None, &Done { outcomes, complaint: None });
        assert_eq!((run.due, run.answered.latency.n, run.throughput), (20, 20, 20.0));
        assert_eq!(run.timeline.iter().map(|s| (s.counted, s.due)).collect::<Vec<_>>(), [(false, 20), (true, 20)]);
    }

    #[test]
    fn a_growing_queue_has_not_kept_up_and_a_slow_answer_has() {
        // 100 requests in a second; each waits a little longer than the last.
        let growing = |step: u64| {
            let outcomes = (0..100).map(|i| outcome(i * 10, i * 10, i * 10 + 20 + i * step, Ok(200))).collect();
            run(&asked(0, 1), None, &Done { outcomes, complaint: None })
        };
        assert!(kept_up(&growing(0), None));
        assert!(!kept_up(&growing(5), None));
        assert!(!kept_up(&growing(0), Some(15.0)) && kept_up(&growing(0), Some(25.0)));
        let refusing = (0..100).map(|i| outcome(i * 10, i * 10, i * 10 + 1, Ok(if i % 20 == 0 { 503 } else { 200 })));
        let refusing = run(&asked(0, 1), None, &Done { outcomes: refusing.collect(), complaint: None });
        assert!(!kept_up(&refusing, None), "5 % were refused");
        assert!(!kept_up(&run(&asked(0, 1), None, &Done::default()), None), "nothing was asked");
    }

    #[test]
    fn arrivals_that_ctrl_c_kept_back_are_due_and_not_sent() {
        let arrivals: Vec<Arrival> =
            (0..10).map(|i| Arrival { at: Duration::from_millis(i * 100), request: 0 }).collect();
        let outcomes = (0..4).map(|i| outcome(i * 100, i * 100, i * 100 + 1, Ok(200))).collect();
        let run = run(&asked(0, 1), Some(&arrivals), &Done { outcomes, complaint: None });
        assert_eq!((run.due, run.sent), (10, 4));
    }
}
