//! Two records of one plan side by side: what changed, and whether the sessions could have seen it.

use crate::record::{Measure, Record};
use crate::report::amount;
use crate::summary::{Comparison, Summary, summarise};

/// The comparison in words, a line each.
pub fn compare(old: &Record, new: &Record) -> String {
    let (before, after) = (summarise(old), summarise(new));
    let mut out = format!("old  {}  {}\nnew  {}  {}\n", old.plan, old.started, new.plan, new.started);
    for (what, a, b) in differences(old, new) {
        out += &format!("differs  {what}: {a} -> {b}\n");
    }
    for measure in Measure::ALL {
        for c in after.comparisons.iter().filter(|c| c.measure == measure && !c.control) {
            let name = format!("{} {} {}", c.case, c.arm, measure.name());
            out += &match find(&before, c) {
                Some(o) => format!("{name}: {}\n", change(o, c)),
                None => format!("{name}: only in the new record\n"),
            };
        }
        for o in before.comparisons.iter().filter(|o| o.measure == measure && !o.control && find(&after, o).is_none()) {
            out += &format!("{} {} {}: only in the old record\n", o.case, o.arm, measure.name());
        }
    }
    out += "medians, which belong to their own sessions and are no ratio of each other:\n";
    for b in &after.arms {
        if let Some(a) = before.arms.iter().find(|a| (&a.case, &a.arm, a.measure) == (&b.case, &b.arm, b.measure)) {
            let [old, new] = [a, b].map(|x| amount(x.spread.median, x.measure));
            out += &format!("  {} {} {}: {old} -> {new}\n", b.case, b.arm, b.measure.name());
        }
    }
    out
}

fn find<'a>(summary: &'a Summary, like: &Comparison) -> Option<&'a Comparison> {
    summary
        .comparisons
        .iter()
        .find(|c| (&c.case, &c.arm, &c.baseline, c.measure) == (&like.case, &like.arm, &like.baseline, like.measure))
}

fn change(old: &Comparison, new: &Comparison) -> String {
    let (Some(a), Some(b)) = (old.paired, new.paired) else {
        let [old, new] = [old, new].map(|c| c.verdict.words(c.measure));
        return format!("no ratio to compare ({old} -> {new})");
    };
    // Two independent sessions: their standard errors add as squares.
    let error = (a.se * a.se + b.se * b.se).sqrt();
    let moved = (b.ratio / a.ratio).ln();
    let [low, middle, high] = [moved - 1.96 * error, moved, moved + 1.96 * error].map(f64::exp);
    let floor = old.floor.max(new.floor);
    let words = match () {
        _ if (low <= 1.0 && 1.0 <= high) || moved.abs() <= (1.0 + floor).ln() => "no change detected",
        _ if moved > 0.0 => "better",
        _ => "WORSE",
    };
    let verdicts = if old.verdict == new.verdict {
        String::new()
    } else {
        format!("; verdict {} -> {}", old.verdict.words(old.measure), new.verdict.words(new.measure))
    };
    format!(
        "{words}: ratio {:.3} -> {:.3}, a factor of {middle:.3} ({low:.3} to {high:.3}){verdicts}",
        a.ratio, b.ratio
    )
}

/// What the machines and programs do not have in common.
fn differences(old: &Record, new: &Record) -> Vec<(String, String, String)> {
    let (a, b) = (&old.fingerprint, &new.fingerprint);
    let word = |o: &Option<String>| o.clone().unwrap_or_else(|| "not told".to_owned());
    let mut rows = vec![
        ("plan".to_owned(), old.plan.clone(), new.plan.clone()),
        ("processor".to_owned(), word(&a.cpu), word(&b.cpu)),
        ("cores".to_owned(), a.cores.to_string(), b.cores.to_string()),
        ("system".to_owned(), a.system.clone(), b.system.clone()),
        ("governor".to_owned(), word(&a.governor), word(&b.governor)),
        ("compiler".to_owned(), word(&a.compiler), word(&b.compiler)),
        ("flags".to_owned(), a.flags.clone(), b.flags.clone()),
        ("commit".to_owned(), word(&a.commit), word(&b.commit)),
        ("environment".to_owned(), format!("{:?}", a.env), format!("{:?}", b.env)),
    ];
    for arm in &new.arms {
        if let Some(before) = old.arms.iter().find(|x| x.name == arm.name) {
            let short = |s: &Option<String>| word(s).chars().take(12).collect::<String>();
            rows.push((format!("program of {}", arm.name), short(&before.program_sha256), short(&arm.program_sha256)));
        }
    }
    rows.retain(|(_, a, b)| a != b);
    rows
}
