//! From raw samples to verdicts. Nothing here measures; the same record gives the same summary for ever.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::plan::{MemoryMode, Mode};
use crate::record::{Kind, Measure, Phase, Record, Sample};
use crate::stats::{self, LEAST_CONFIRM, Paired, Spread};

/// Fewer pairs say nothing about a time.
const LEAST_PAIRS: usize = 8;
/// Resident memory that grew by more than this beside what the arm tells is a buffer that it does not tell of.
const UNTOLD_BYTES: i64 = 64 << 20;

/// All that is said about a record.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Summary {
    /// Each arm alone.
    pub arms: Vec<ArmSummary>,
    /// Each arm against the baseline.
    pub comparisons: Vec<Comparison>,
}

/// One arm in one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmSummary {
    /// The case.
    pub case: String,
    /// The arm.
    pub arm: String,
    /// What.
    pub measure: Measure,
    /// In nanoseconds or bytes.
    pub spread: Spread,
    /// The first call of the process.
    pub first: Option<f64>,
}

/// What may be said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The arm needs less than the baseline.
    Faster,
    /// The arm needs more.
    Slower,
    /// None that this session could have seen.
    NoDifferenceDetected,
    /// Nothing may be said; `reason` tells why.
    NotComparable,
}

impl Verdict {
    /// In words; memory is less or more, not faster.
    pub fn words(self, measure: Measure) -> &'static str {
        match (self, measure.is_memory()) {
            (Verdict::Faster, false) => "faster",
            (Verdict::Slower, false) => "slower",
            (Verdict::Faster, true) => "less memory",
            (Verdict::Slower, true) => "more memory",
            (Verdict::NoDifferenceDetected, _) => "no difference detected",
            (Verdict::NotComparable, _) => "not comparable",
        }
    }
}

/// One arm against the baseline in one case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// The case.
    pub case: String,
    /// The arm.
    pub arm: String,
    /// What it is compared with.
    pub baseline: String,
    /// What.
    pub measure: Measure,
    /// Whether this is the A/A control.
    pub control: bool,
    /// The statistics; none where there is no ratio to speak of.
    pub paired: Option<Paired>,
    /// Least effect that is believed, as a fraction: of this comparison and of the control, the larger.
    pub floor: f64,
    /// Ratio of the pairs where the baseline went first to those where it went second, less 1.
    pub order_effect: Option<f64>,
    /// Pairs that would find 3 %, nine times in ten.
    pub recommended_pairs: Option<usize>,
    /// What may be said.
    pub verdict: Verdict,
    /// Why not more.
    pub reason: Option<String>,
}

/// The value of a sample for a measure; `None` where it does not count for it.
fn value(record: &Record, s: &Sample, measure: Measure) -> Option<f64> {
    let plain = record.arms[s.arm].arm.mode == Mode::Plain;
    let memory_phase = match record.settings.memory.mode {
        MemoryMode::Fresh => Phase::Memory,
        _ => Phase::Pair,
    };
    let difference = |high: Option<u64>, low: Option<u64>| Some(high?.saturating_sub(low?) as f64).filter(|d| *d > 0.0);
    match measure {
        Measure::Wall => (s.phase == Phase::Pair).then_some(s.wall_ns),
        Measure::Cpu => (s.phase == Phase::Pair).then_some(s.cpu_ns? as f64).filter(|v| *v > 0.0),
        Measure::Device => (s.phase == Phase::Pair).then_some(s.device_ns?),
        Measure::PeakMemory if !plain && s.phase == memory_phase => difference(s.peak_bytes, s.live_bytes),
        Measure::PeakRss if !plain && s.phase == Phase::Pair && record.settings.memory.mode == MemoryMode::Live => {
            difference(s.rss_peak, s.rss_before)
        }
        Measure::ProcessRss if plain && s.phase == Phase::Pair => s.rss_peak.map(|b| b as f64),
        Measure::ProcessRss if !plain && s.phase == Phase::Memory => s.rss_peak.map(|b| b as f64),
        _ => None,
    }
}

/// Everything that the samples of a record say.
pub fn summarise(record: &Record) -> Summary {
    let mut summary = Summary::default();
    for case in &record.settings.cases {
        for measure in Measure::ALL {
            summarise_case(record, &case.name, measure, &mut summary);
        }
    }
    summary
}

fn summarise_case(record: &Record, case: &str, measure: Measure, summary: &mut Summary) {
    // For each arm its value in each round.
    let mut rounds: Vec<BTreeMap<usize, &Sample>> = vec![BTreeMap::new(); record.arms.len()];
    for sample in record.samples.iter().filter(|s| s.case == case) {
        if value(record, sample, measure).is_some() {
            rounds[sample.arm].insert(sample.pair, sample);
        }
    }
    let of = |s: &Sample| value(record, s, measure).unwrap_or(f64::NAN);
    for (row, samples) in record.arms.iter().zip(&rounds) {
        let values: Vec<f64> = samples.values().map(|s| of(s)).collect();
        if let Some(spread) = stats::spread(&values) {
            let first = record
                .samples
                .iter()
                .find(|s| s.case == case && s.arm == arm_index(record, &row.name) && s.phase == Phase::First);
            let first = first.filter(|_| measure == Measure::Wall).map(|s| s.wall_ns);
            summary.arms.push(ArmSummary { case: case.to_owned(), arm: row.name.clone(), measure, spread, first });
        }
    }
    let baseline = arm_index(record, &record.settings.baseline);
    let Some(base) = rounds.get(baseline) else { return };
    // The control first: its noise is the floor of all others.
    let mut arms: Vec<usize> = (0..record.arms.len()).filter(|a| *a != baseline).collect();
    arms.sort_by_key(|a| !record.arms[*a].control);
    let mut control: Option<Comparison> = None;
    for arm in arms {
        let both: Vec<(&Sample, &Sample)> = base.iter().filter_map(|(r, b)| Some((*b, *rounds[arm].get(r)?))).collect();
        let failed = record
            .errors
            .iter()
            .find(|e| e.case == case && (e.arm == record.arms[arm].name || e.arm == record.settings.baseline));
        if both.is_empty() && (failed.is_none() || measure != record.settings.primary) {
            continue;
        }
        let (a, b): (Vec<f64>, Vec<f64>) = both.iter().map(|(a, b)| (of(a), of(b))).unzip();
        let seed = record.settings.seed;
        let paired = stats::paired(&a, &b, seed);
        let row = &record.arms[arm];
        let mut comparison = Comparison {
            case: case.to_owned(),
            arm: row.name.clone(),
            baseline: record.settings.baseline.clone(),
            measure,
            control: row.control,
            paired,
            floor: paired.map_or(0.0, |p| p.mde),
            order_effect: order_effect(&both, &of),
            recommended_pairs: paired
                .filter(|_| !measure.is_memory())
                .map(|p| stats::recommended_pairs(&p, 0.03, LEAST_CONFIRM)),
            verdict: Verdict::NotComparable,
            reason: None,
        };
        judge(record, &mut comparison, &both, control.as_ref());
        if row.control {
            control = Some(comparison.clone());
        }
        summary.comparisons.push(comparison);
    }
}

fn arm_index(record: &Record, name: &str) -> usize {
    record.arms.iter().position(|a| a.name == name).unwrap_or(usize::MAX)
}

fn order_effect(both: &[(&Sample, &Sample)], of: &dyn Fn(&Sample) -> f64) -> Option<f64> {
    let logs = |first: bool| -> Vec<f64> {
        let pairs = both.iter().filter(|(a, b)| (a.slot < b.slot) == first);
        pairs.map(|(a, b)| (of(a) / of(b)).ln()).collect()
    };
    let (first, second) = (logs(true), logs(false));
    (!first.is_empty() && !second.is_empty()).then(|| (stats::median(&first) - stats::median(&second)).exp() - 1.0)
}

/// Finds the verdict, and the reason where it is no verdict.
fn judge(record: &Record, c: &mut Comparison, both: &[(&Sample, &Sample)], control: Option<&Comparison>) {
    let refuse = |c: &mut Comparison, reason: String| {
        c.verdict = Verdict::NotComparable;
        c.reason = Some(reason);
    };
    if let Some(check) = record.checks.iter().find(|k| k.case == c.case && k.arm == c.arm && !k.pass) {
        let reason = format!(
            "`{}` differs from the baseline's by {:.3e}, allowed {:.3e}",
            check.metric, check.difference, check.tolerance
        );
        return refuse(c, reason);
    }
    let error =
        record.errors.iter().find(|e| e.case == c.case && (e.arm == c.arm || e.arm == c.baseline) && e.stage != "quit");
    if let Some(e) = error {
        return refuse(c, format!("{} at {}: {}", e.arm, e.stage, e.message));
    }
    let Some(paired) = c.paired else {
        return refuse(c, "fewer than two pairs".to_owned());
    };
    let least = if c.measure.is_memory() { 2 } else { LEAST_PAIRS };
    if paired.n < least {
        return refuse(c, format!("only {} pairs, fewer than {least}", paired.n));
    }
    if c.measure.is_memory()
        && let Some(reason) = unequal_memory(record, c, both)
    {
        // The bytes stay in the record; a ratio of them would say something that is not so.
        c.paired = None;
        return refuse(c, reason);
    }
    let holds_one = |p: &Paired| p.ci95[0] <= 1.0 && 1.0 <= p.ci95[1];
    if let (Some(control), false) = (control, c.measure.is_memory()) {
        match control.paired {
            Some(p) if holds_one(&p) => c.floor = c.floor.max(p.mde),
            Some(p) if record.settings.strict_control => {
                let reason = format!(
                    "the A/A control found {:.4} ({:.4} to {:.4}) between two processes of {}; run the session again",
                    p.ratio, p.ci95[0], p.ci95[1], c.baseline
                );
                return refuse(c, reason);
            }
            // Two processes of one program differ by this much, so that no smaller effect can be believed.
            Some(p) => c.floor = c.floor.max(p.mde).max((1.0 / p.ci95[0]).max(p.ci95[1]) - 1.0),
            None => {
                let reason = control.reason.clone().unwrap_or_default();
                return refuse(c, format!("the A/A control failed: {reason}"));
            }
        }
    } else if record.settings.control && !c.control && !c.measure.is_memory() {
        return refuse(c, "the A/A control has no pairs".to_owned());
    }
    c.verdict = match paired.ratio {
        _ if holds_one(&paired)
            && !(c.measure.is_memory() && paired.ratio != 1.0 && paired.ci95[0] == paired.ci95[1]) =>
        {
            Verdict::NoDifferenceDetected
        }
        r if r.ln().abs() <= (1.0 + c.floor).ln() && !c.control => {
            c.reason = Some(format!("inside the least believable effect of {:.2} %", 100.0 * c.floor));
            Verdict::NoDifferenceDetected
        }
        r if r > 1.0 => Verdict::Faster,
        _ => Verdict::Slower,
    };
    if record.kind == Kind::Screen && c.reason.is_none() && !c.control && c.verdict != Verdict::NoDifferenceDetected {
        c.reason = Some("a screen: picks candidates, claims nothing".to_owned());
    }
}

/// Why the memory of two arms has no ratio.
fn unequal_memory(record: &Record, c: &Comparison, both: &[(&Sample, &Sample)]) -> Option<String> {
    let tolerance = record.settings.memory.tolerance_bytes;
    if c.measure == Measure::ProcessRss {
        let hidden = both
            .iter()
            .flat_map(|(a, b)| [a, b])
            .find(|s| s.phase == Phase::Pair && s.rss_peak <= s.rss_before.map(|b| b + (1 << 16)));
        return hidden.map(|s| {
            format!(
                "{} needs no more than the harness itself ({} bytes), which hides it",
                record.arms[s.arm].name,
                s.rss_before.unwrap_or(0)
            )
        });
    }
    let before = |s: &Sample| if c.measure == Measure::PeakRss { s.rss_before } else { s.live_bytes };
    for side in [&c.arm, &c.baseline] {
        if let Some(reason) = kept_alive(record, &c.case, side, c.measure) {
            return Some(reason);
        }
    }
    let widest = both.iter().filter_map(|(a, b)| Some((before(a)?, before(b)?))).max_by_key(|(a, b)| a.abs_diff(*b))?;
    (widest.0.abs_diff(widest.1) > tolerance).then(|| {
        format!(
            "unequal baselines: {} has {} bytes live before the window, {} has {}; they may differ by {tolerance}",
            c.arm, widest.1, c.baseline, widest.0
        )
    })
}

/// Whether an arm holds more before a counted call than before its calls began, and whether it tells so.
fn kept_alive(record: &Record, case: &str, arm: &str, measure: Measure) -> Option<String> {
    let index = arm_index(record, arm);
    let of_phase =
        |phase: Phase| record.samples.iter().filter(move |s| s.case == case && s.arm == index && s.phase == phase);
    let first = of_phase(Phase::First).next()?;
    let settled = of_phase(Phase::WarmUp).next().unwrap_or(first);
    let largest = |get: &dyn Fn(&Sample) -> Option<u64>| of_phase(Phase::Pair).filter_map(get).max();
    let tolerance = record.settings.memory.tolerance_bytes as i64;
    if measure == Measure::PeakMemory {
        let (live, now) = (settled.live_bytes?, largest(&|s| s.live_bytes)?);
        let grown = now as i64 - live as i64;
        if grown > tolerance {
            return Some(format!("{arm} keeps {grown} bytes of its warm-up alive ({live} then, {now} now)"));
        }
        let (rss, rss_now) = (first.rss_before?, largest(&|s| s.rss_before)?);
        let untold = rss_now as i64 - rss as i64 - (now as i64 - first.live_bytes? as i64);
        if untold > UNTOLD_BYTES {
            return Some(format!(
                "{arm} holds {untold} resident bytes more than before its first call and does not tell of them"
            ));
        }
    }
    None
}
