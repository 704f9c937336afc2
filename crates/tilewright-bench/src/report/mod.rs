//! Showing records: a table for the terminal and one self-contained HTML file.

mod html;
pub(crate) mod plot;

pub(crate) use html::STYLE;
pub use html::html;

use crate::record::{Measure, Record, Status};
use crate::summary::{Comparison, Summary, Verdict, summarise};

/// A time or a number of bytes with a fitting unit.
pub fn amount(value: f64, measure: Measure) -> String {
    let (units, step): (&[&str], f64) = if measure.is_memory() {
        (&["B", "KiB", "MiB", "GiB", "TiB"], 1024.0)
    } else {
        (&["ns", "us", "ms", "s"], 1000.0)
    };
    let (mut value, mut unit) = (value, 0);
    while value.abs() >= step && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let digits = match value.abs() {
        _ if unit == 0 => 0,
        v if v < 10.0 => 3,
        v if v < 100.0 => 2,
        _ => 1,
    };
    format!("{value:.digits$} {}", units[unit])
}

/// `1.234 (1.200 to 1.260)`.
fn ratio(c: &Comparison) -> String {
    c.paired.map_or_else(|| "-".to_owned(), |p| format!("{:.3} ({:.3} to {:.3})", p.ratio, p.ci95[0], p.ci95[1]))
}

/// What was wrong with the whole run, in words; nothing for a clean one.
fn labels(record: &Record) -> Vec<String> {
    let mut labels = Vec::new();
    match record.status {
        Status::Ok => {}
        Status::Partial => labels.push(format!("PARTIAL: {}", record.reason.as_deref().unwrap_or("not finished"))),
        Status::Error => labels.push("WITH ERRORS: see the rows below".to_owned()),
        Status::RefusedEnvironment => labels.push(format!("REFUSED: {}", record.reason.as_deref().unwrap_or_default())),
    }
    labels.extend(record.forced.iter().map(|f| format!("FORCED although {f}")));
    let foreign = record.conditions.iter().filter_map(|c| c.foreign_cpu).fold(0.0, f64::max);
    if foreign > 0.05 {
        labels.push(format!(
            "other work used up to {:.0} % of the cores during a case (idle threads of the arms included)",
            100.0 * foreign
        ));
    }
    labels
}

/// How one line says a verdict.
fn verdict(c: &Comparison) -> String {
    let words = match (c.control, c.verdict) {
        (true, Verdict::NoDifferenceDetected) => "A/A holds 1.000",
        (true, Verdict::Faster | Verdict::Slower) => "A/A EXCLUDES 1.000",
        _ => c.verdict.words(c.measure),
    };
    c.reason.as_ref().map_or_else(|| words.to_owned(), |r| format!("{words}: {r}"))
}

/// Effective FLOP/s where the case tells its `flops`, and the share of `peak_flops` where it tells that.
fn rate(record: &Record, case: &str, ns: f64) -> Option<String> {
    let params = &record.settings.cases.iter().find(|c| c.name == case)?.params;
    let flops = params.get("flops")?.as_f64()?;
    let rate = flops / ns;
    let share =
        params.get("peak_flops").and_then(|v| v.as_f64()).map(|p| format!(", {:.1} % of peak", 1e11 * rate / p));
    Some(format!("{rate:.1} GFLOP/s{}", share.unwrap_or_default()))
}

/// The terminal's report.
pub fn text(record: &Record) -> String {
    let summary = summarise(record);
    let mut out = format!("{}  {}  {}\n", record.plan, kind(record), record.started);
    let print = &record.fingerprint;
    out += &format!(
        "{}, {} logical cores, {}\n",
        print.cpu.as_deref().unwrap_or("unknown processor"),
        print.cores,
        print.system
    );
    labels(record).iter().for_each(|l| out += &format!("! {l}\n"));
    for case in &record.settings.cases {
        out += &format!("\n{}\n", case.name);
        for measure in Measure::ALL {
            out += &text_of_measure(record, &summary, &case.name, measure);
        }
        for e in record.errors.iter().filter(|e| e.case == case.name) {
            out += &format!("  error  {} at {}: {}\n", e.arm, e.stage, e.message);
            e.stderr
                .lines()
                .rev()
                .take(3)
                .collect::<Vec<_>>()
                .iter()
                .rev()
                .for_each(|l| out += &format!("         | {l}\n"));
        }
        for k in record.checks.iter().filter(|k| k.case == case.name && (!k.pass || k.pair.is_none())) {
            let word = if k.pass { "check " } else { "FAILED" };
            out += &format!(
                "  {word} {} {}: differs by {:.3e}, allowed {:.3e}\n",
                k.arm, k.metric, k.difference, k.tolerance
            );
        }
    }
    out
}

fn text_of_measure(record: &Record, summary: &Summary, case: &str, measure: Measure) -> String {
    let mut out = String::new();
    let arms: Vec<_> = summary.arms.iter().filter(|a| a.case == case && a.measure == measure).collect();
    let comparisons: Vec<_> = summary.comparisons.iter().filter(|c| c.case == case && c.measure == measure).collect();
    if arms.is_empty() && comparisons.is_empty() {
        return out;
    }
    out += &format!("  {}\n", measure.name());
    let width = record.arms.iter().map(|a| a.name.len()).max().unwrap_or(0);
    for a in arms {
        let s = a.spread;
        let [median, q1, q3] = [s.median, s.q1, s.q3].map(|v| amount(v, measure));
        out += &format!("    {:width$}  {median:>11}  quartiles {q1} .. {q3}  n {}", a.arm, s.n);
        if let Some(rate) = rate(record, case, s.median).filter(|_| measure == Measure::Wall) {
            out += &format!("  {rate}");
        }
        if let Some(first) = a.first {
            out += &format!("  first {}", amount(first, measure));
        }
        out += "\n";
    }
    for c in comparisons {
        out += &format!("    {:width$}  {} x {}  {}\n", c.arm, ratio(c), c.baseline, verdict(c));
        if let (Some(p), false) = (c.paired, measure.is_memory()) {
            out += &format!(
                "    {:width$}  n {}, least detectable {:.2} %, believed above {:.2} %, blocks of {}, lag-1 {:.2}",
                "",
                p.n,
                100.0 * p.mde,
                100.0 * c.floor,
                p.block,
                p.lag1
            );
            if let Some(effect) = c.order_effect {
                out += &format!(", order {:+.2} %", 100.0 * effect);
            }
            if let Some(n) = c.recommended_pairs.filter(|n| *n > p.n && measure == record.settings.primary) {
                out += &format!("; 3 % would want {n} pairs");
            }
            out += "\n";
        }
    }
    out
}

fn kind(record: &Record) -> &'static str {
    match record.kind {
        crate::record::Kind::Screen => "screen (picks candidates, claims nothing)",
        crate::record::Kind::Confirm => "confirmation",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_fitting_units() {
        assert_eq!(amount(999.0, Measure::Wall), "999 ns");
        assert_eq!(amount(1_550_000.0, Measure::Wall), "1.550 ms");
        assert_eq!(amount(65e9, Measure::Cpu), "65.00 s");
        assert_eq!(amount(1_048_576.0, Measure::PeakRss), "1.000 MiB");
    }
}
