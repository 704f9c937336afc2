//! A load session: one rate, a sweep, or two servers in turn; what was measured before Ctrl-C is kept.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright_core::{Error, Result};

use super::drive::{self, Rules};
use super::http::{Connection, Target};
use super::measure::{self, Asked};
use super::mix::Mix;
use super::record::{Capacity, Comparison, LoadRecord, Measure, Mode, RequestRow, Run, SCHEMA, Server, Settings, TOOL};
use crate::record::Status;
use crate::stats::{self, LEAST_CONFIRM};
use crate::summary::Verdict;
use crate::{machine, order, sys};

/// Pairs below which a comparison says nothing.
pub const LEAST_PAIRS: usize = 8;
/// Arrivals of one run at most: their outcomes are kept until its end.
const MOST_ARRIVALS: f64 = 20e6;
/// A sweep is done when the rate that was too much is no more than this above the one that was not.
const FINE_ENOUGH: f64 = 1.1;
/// Runs of a sweep at most.
const MOST_STEPS: usize = 24;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Options {
    /// What the record says of the command line.
    pub command: String,
    /// Names and URLs: one, or two of a comparison.
    pub servers: Vec<Server>,
    /// Lines that every request carries.
    pub headers: String,
    /// What to do.
    pub mode: Mode,
    /// Requests a second.
    pub rate: Option<f64>,
    /// Connections kept busy, instead.
    pub closed: Option<usize>,
    /// Of each run.
    pub seconds: f64,
    /// Before the first run of each server.
    pub warm_up: f64,
    /// At most.
    pub connections: usize,
    /// For one answer.
    pub timeout: f64,
    /// Of arrivals, requests and orders.
    pub seed: u64,
    /// Of a comparison.
    pub pairs: usize,
    /// A sweep's limit on p99 in milliseconds.
    pub p99_ms: Option<f64>,
    /// After a sweep, a run at this share of the capacity.
    pub at: Option<f64>,
}

/// Says what is going on.
pub type Report<'a> = dyn FnMut(&Run, &str) + 'a;

/// Checks what is asked for and carries it out.
pub fn run(mix: &Mix, options: &Options, stop: &AtomicBool, told: &mut Report) -> Result<LoadRecord> {
    check(options)?;
    let targets = options.servers.iter().map(|s| Target::parse(&s.url)).collect::<Result<Vec<_>>>()?;
    let count = options.closed.unwrap_or(options.connections);
    let connections =
        targets.iter().map(|t| (0..count).map(|_| Connection::new(t, &options.headers)).collect()).collect();
    let began = Instant::now();
    let mut session = Session {
        options,
        rules: Rules { mix, timeout: Duration::from_secs_f64(options.timeout), stop },
        connections,
        began,
        record: begin(mix, options),
        told,
    };
    match options.mode {
        Mode::Rate => {
            let purpose = if options.closed.is_some() { "closed" } else { "rate" };
            session.one(0, purpose, options.rate, options.warm_up, None, options.seed);
        }
        Mode::Sweep => session.sweep(),
        Mode::Compare => session.compare(),
    }
    let mut record = session.record;
    record.comparisons = compare(&record);
    record.finished = Some(machine::now());
    record.status = Status::Ok;
    if stop.load(Ordering::Relaxed) {
        record.status = Status::Partial;
        record.reason = Some("interrupted; what was measured until then is here".to_owned());
    } else if record.runs.iter().all(|r| r.answered.latency.n == 0) {
        record.status = Status::Error;
        record.reason = Some("not one request was answered with 2xx".to_owned());
    }
    Ok(record)
}

fn check(options: &Options) -> Result<()> {
    let positive = |name: &str, value: f64, most: f64| {
        if value > 0.0 && value <= most {
            return Ok(());
        }
        Err(Error::config(format!("{name} is {value}"), format!("give a number above 0, {most} at most")))
    };
    if let Some(rate) = options.rate {
        positive("the rate", rate, 1e6)?;
        let arrivals = rate * (options.seconds + options.warm_up);
        if arrivals > MOST_ARRIVALS {
            let what = format!("{arrivals:.0} requests are too many for one run, which keeps them all until its end");
            return Err(Error::config(what, "give a shorter run or a lower rate"));
        }
    }
    if options.rate.is_none() && options.closed.is_none() {
        return Err(Error::config(
            "neither a rate nor a number of busy connections is given",
            "give --rate or --closed",
        ));
    }
    if options.closed.is_some() && options.mode == Mode::Sweep {
        return Err(Error::config("a sweep has no closed loop", "give --rate, where it begins, instead of --closed"));
    }
    positive("the length of a run", options.seconds, 86_400.0)?;
    positive("the time-out", options.timeout, 3_600.0)?;
    if !(0.0..=3_600.0).contains(&options.warm_up) {
        return Err(Error::config(format!("the warm-up is {} s", options.warm_up), "give 0 to 3600"));
    }
    positive("the number of connections", options.closed.unwrap_or(options.connections) as f64, 10_000.0)?;
    if options.mode == Mode::Compare && !(1..=10_000).contains(&options.pairs) {
        return Err(Error::config(format!("{} pairs", options.pairs), "give 1 to 10000"));
    }
    Ok(())
}

fn begin(mix: &Mix, options: &Options) -> LoadRecord {
    let requests = mix.requests.iter().map(|r| RequestRow {
        name: r.name.clone(),
        path: r.path.clone(),
        bytes: r.body.len(),
        weight: r.weight,
    });
    LoadRecord {
        tool: TOOL.to_owned(),
        schema: SCHEMA,
        status: Status::Partial,
        reason: None,
        started: machine::now(),
        finished: None,
        command: options.command.clone(),
        settings: Settings {
            mode: options.mode,
            rate: options.rate,
            closed: options.closed,
            seconds: options.seconds,
            warm_up_s: options.warm_up,
            connections: options.closed.unwrap_or(options.connections),
            timeout_s: options.timeout,
            seed: options.seed,
            pairs: (options.mode == Mode::Compare).then_some(options.pairs),
            p99_ms: options.p99_ms,
            mix_sha256: mix.sha256.clone(),
        },
        fingerprint: machine::fingerprint(),
        load: sys::load(),
        servers: options.servers.clone(),
        requests: requests.collect(),
        runs: Vec::new(),
        capacity: None,
        comparisons: Vec::new(),
    }
}

struct Session<'a, 't> {
    options: &'a Options,
    rules: Rules<'a>,
    connections: Vec<Vec<Connection<'a>>>,
    began: Instant,
    record: LoadRecord,
    told: &'a mut Report<'t>,
}

impl Session<'_, '_> {
    fn stopped(&self) -> bool {
        self.rules.stop.load(Ordering::Relaxed)
    }

    fn one(
        &mut self,
        server: usize,
        purpose: &str,
        rate: Option<f64>,
        warm_up: f64,
        pair: Option<(usize, usize)>,
        seed: u64,
    ) -> &Run {
        let warm_up = Duration::from_secs_f64(warm_up);
        let length = Duration::from_secs_f64(self.options.seconds);
        let purpose = purpose.to_owned();
        let rate = rate.filter(|_| self.options.closed.is_none());
        let asked = Asked { server, purpose, pair, rate, warm_up, length, began: self.began.elapsed() };
        let connections = &mut self.connections[server];
        let run = match rate {
            Some(rate) => {
                let arrivals = drive::poisson(rate, warm_up + length, self.rules.mix, seed);
                let done = drive::open_loop(connections, &arrivals, &self.rules);
                measure::run(&asked, Some(&arrivals), &done)
            }
            None => {
                let done = drive::closed_loop(connections, warm_up + length, seed, &self.rules);
                measure::run(&asked, None, &done)
            }
        };
        (self.told)(&run, &self.options.servers[server].name);
        self.record.runs.push(run);
        &self.record.runs[self.record.runs.len() - 1]
    }

    /// Doubles the rate until the server no longer keeps up (or halves it until it does), then closes in.
    fn sweep(&mut self) {
        let limit = self.options.p99_ms;
        let (mut kept, mut too_much): (Option<f64>, Option<f64>) = (None, None);
        let mut rate = self.options.rate.unwrap_or(1.0);
        for step in 0..MOST_STEPS {
            let warm_up = if step == 0 { self.options.warm_up } else { 0.0 };
            let seed = self.options.seed.wrapping_add(step as u64);
            let run = self.one(0, "sweep", Some(rate), warm_up, None, seed);
            let well = measure::kept_up(run, limit);
            if self.stopped() {
                break;
            }
            if well {
                kept = Some(rate)
            } else {
                too_much = Some(rate)
            }
            rate = match (kept, too_much) {
                (Some(low), Some(high)) if high / low <= FINE_ENOUGH => break,
                (Some(low), Some(high)) => (low * high).sqrt(),
                (Some(low), None) => 2.0 * low,
                (None, Some(high)) => high / 2.0,
                (None, None) => break,
            };
            let arrivals = rate * self.options.seconds;
            if !(1.0..=MOST_ARRIVALS).contains(&arrivals) {
                break;
            }
        }
        let peak = self.record.runs.iter().map(|r| r.throughput).fold(0.0, f64::max);
        self.record.capacity = Some(Capacity { rate: kept, too_much, peak });
        if let (Some(share), Some(capacity), false) = (self.options.at, kept, self.stopped()) {
            let purpose = format!("at {:.0} %", 100.0 * share);
            self.one(0, &purpose, Some(share * capacity), self.options.warm_up, None, self.options.seed);
        }
    }

    /// Both servers get the same arrivals in a pair, one after the other, in seeded balanced order.
    fn compare(&mut self) {
        for (pair, order) in order::rounds(2, self.options.pairs, self.options.seed).into_iter().enumerate() {
            for (slot, server) in order.into_iter().enumerate() {
                let warm_up = if pair == 0 { self.options.warm_up } else { 0.0 };
                let seed = self.options.seed.wrapping_add(pair as u64);
                self.one(server, "block", self.options.rate, warm_up, Some((pair, slot)), seed);
                if self.stopped() {
                    return;
                }
            }
        }
    }
}

/// The first server against the second, by the statistics of paired benchmarks.
pub fn compare(record: &LoadRecord) -> Vec<Comparison> {
    if record.settings.mode != Mode::Compare {
        return Vec::new();
    }
    let of = |server: usize, pair: usize| record.runs.iter().find(|r| r.server == server && r.pair == Some(pair));
    // A block that was cut off is no measurement, and neither is its partner.
    let whole = |r: &&Run| r.sent == r.due && !r.failures.contains_key("interrupted");
    let pairs = record.runs.iter().filter_map(|r| r.pair).max().map_or(0, |p| p + 1);
    let both: Vec<(&Run, &Run)> =
        (0..pairs).filter_map(|p| Some((of(0, p).filter(whole)?, of(1, p).filter(whole)?))).collect();
    Measure::ALL.into_iter().map(|measure| judge(record, measure, &both)).collect()
}

fn judge(record: &LoadRecord, measure: Measure, both: &[(&Run, &Run)]) -> Comparison {
    // All as times, so that a ratio above 1 is always good for the first server.
    let value = |r: &Run| match measure {
        Measure::Throughput => 1.0 / r.throughput,
        Measure::P50 => r.answered.latency.p50_ms,
        Measure::P99 => r.answered.latency.p99_ms,
    };
    let first: Vec<f64> = both.iter().map(|(a, _)| value(a)).collect();
    let second: Vec<f64> = both.iter().map(|(_, b)| value(b)).collect();
    let paired = stats::paired(&second, &first, record.settings.seed);
    let none = |reason: String| Comparison { measure, paired, verdict: Verdict::NotComparable, reason: Some(reason) };
    let Some(p) = paired else {
        return none("fewer than two pairs in which both servers answered".to_owned());
    };
    if p.n < LEAST_PAIRS {
        return none(format!("only {} pairs, fewer than {LEAST_PAIRS}", p.n));
    }
    let bad = |server: usize| {
        let of_server = both.iter().map(|(a, b)| if server == 0 { a } else { b });
        let (ok, sent) = of_server.fold((0, 0), |(ok, sent), r| (ok + r.answered.latency.n, sent + r.sent));
        1.0 - ok as f64 / (sent as f64).max(1.0)
    };
    if measure != Measure::Throughput
        && let Some(server) = (0..2).find(|s| bad(*s) > 0.01)
    {
        let reason = format!(
            "{:.1} % of the requests to {} were not answered",
            100.0 * bad(server),
            record.servers[server].name
        );
        return none(reason);
    }
    let holds_one = p.ci95[0] <= 1.0 && 1.0 <= p.ci95[1];
    let verdict = match p.ratio {
        r if holds_one || r.max(1.0 / r) < 1.0 + p.mde => Verdict::NoDifferenceDetected,
        r if r > 1.0 => Verdict::Faster,
        _ => Verdict::Slower,
    };
    let reason = (p.n < LEAST_CONFIRM).then(|| format!("a screen: {} pairs, fewer than {LEAST_CONFIRM}", p.n));
    Comparison { measure, paired, verdict, reason }
}
