//! The report as one HTML file: no scripts, no fonts, nothing from elsewhere; reads on a phone, on a desk and on paper.

use std::fmt::Write;

use super::plot::{self, Row, Series, escape};
use super::{amount, kind, labels, rate, ratio, verdict};
use crate::record::{Measure, Phase, Record};
use crate::summary::{Comparison, Summary, Verdict, summarise};

pub(crate) const STYLE: &str = include_str!("style.css");

/// One page about one or more records.
pub fn html(records: &[(String, Record)]) -> String {
    let title = match records {
        [(_, only)] => format!("{}: paired benchmark", only.plan),
        _ => "Paired benchmarks".to_owned(),
    };
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<title>{}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        escape(&title)
    );
    for (file, record) in records {
        page += &article(file, record);
    }
    let _ = write!(
        page,
        "<footer><p>A ratio is the median over pairs of baseline / arm: above 1, the arm needs less. The interval is the 95 % bootstrap interval of that median. \
         Pairs alternate in seeded random order on the same inputs. Ratios hold within one session; times belong to this machine.</p></footer>\n</main>\n</body>\n</html>\n"
    );
    page
}

fn article(file: &str, record: &Record) -> String {
    let summary = summarise(record);
    let mut out = format!("<article>\n<h1>{}</h1>\n", escape(&record.plan));
    if !record.description.is_empty() {
        let _ = writeln!(out, "<p class=\"lead\">{}</p>", escape(&record.description));
    }
    let _ = writeln!(
        out,
        "<p class=\"meta\">{} · {} · {} pairs a case</p>",
        kind(record),
        escape(&record.started),
        record.settings.pairs
    );
    for label in labels(record) {
        let _ = writeln!(out, "<p class=\"label\">{}</p>", escape(&label));
    }
    out += &overview(record, &summary);
    for case in &record.settings.cases {
        let _ = writeln!(out, "<section>\n<h2>{}</h2>", escape(&case.name));
        let _ = writeln!(out, "<p class=\"legend\">{}</p>", legend(record));
        out += &over_time(record, &case.name);
        out += &times(record, &summary, &case.name);
        out += &memory(record, &summary, &case.name);
        out += &troubles(record, &case.name);
        out += "</section>\n";
    }
    out += &fingerprint(file, record);
    out + "</article>\n"
}

fn class(c: &Comparison) -> &'static str {
    match (c.control, c.verdict) {
        (true, Verdict::NoDifferenceDetected) => "control",
        (true, _) => "bad",
        (_, Verdict::Faster) => "faster",
        (_, Verdict::Slower) => "slower",
        (_, Verdict::NoDifferenceDetected) => "same",
        (_, Verdict::NotComparable) => "none",
    }
}

/// The forest plot of what the plan is about, and the verdicts in words.
fn overview(record: &Record, summary: &Summary) -> String {
    let primary: Vec<&Comparison> =
        summary.comparisons.iter().filter(|c| c.measure == record.settings.primary).collect();
    let rows: Vec<Row> = primary
        .iter()
        .filter_map(|c| {
            let p = c.paired?;
            let label =
                if c.control { format!("{} · A/A control", c.case) } else { format!("{} · {}", c.case, c.arm) };
            Some(Row { label, value: ratio(c), interval: [p.ci95[0], p.ratio, p.ci95[1]], class: class(c) })
        })
        .collect();
    let baseline = escape(&record.settings.baseline);
    let mut out = String::new();
    if !rows.is_empty() {
        let caption = format!("How many times as fast as {baseline} ({} time)", record.settings.primary.name());
        let _ = writeln!(
            out,
            "<figure>{}<figcaption>{caption}</figcaption></figure>",
            plot::forest("Ratios with their 95 % intervals", &rows)
        );
    }
    out += "<ul class=\"verdicts\">\n";
    for c in primary.iter().filter(|c| !c.control) {
        let words = escape(&verdict(c));
        let _ = writeln!(out, "<li class=\"{}\"><b>{}</b> {}: {words}</li>", class(c), escape(&c.case), escape(&c.arm));
    }
    out + "</ul>\n"
}

fn legend(record: &Record) -> String {
    let item = |(i, arm): (usize, &crate::record::ArmRow)| {
        format!("<span class=\"key k{}\">{}</span>", i % 6, escape(&arm.name))
    };
    record.arms.iter().enumerate().map(item).collect::<Vec<_>>().join(" ")
}

fn over_time(record: &Record, case: &str) -> String {
    let of_case =
        |arm: usize| record.samples.iter().filter(move |s| s.case == case && s.arm == arm && s.phase == Phase::Pair);
    let most = (0..record.arms.len()).flat_map(of_case).map(|s| s.wall_ns).fold(0.0, f64::max);
    let (unit, scale) = match most {
        m if m < 1e4 => ("ns", 1.0),
        m if m < 1e7 => ("us", 1e3),
        m if m < 1e10 => ("ms", 1e6),
        _ => ("s", 1e9),
    };
    let start = (0..record.arms.len()).flat_map(of_case).map(|s| s.at_ms).fold(f64::INFINITY, f64::min);
    let series: Vec<Series> = (0..record.arms.len())
        .map(|arm| Series {
            colour: arm % 6,
            points: of_case(arm).map(|s| ((s.at_ms - start) / 1e3, s.wall_ns / scale)).collect(),
        })
        .collect();
    let drawing = plot::samples(&format!("{case}: every timed call"), unit, &series);
    if drawing.is_empty() {
        drawing
    } else {
        format!("<figure>{drawing}<figcaption>Every timed call</figcaption></figure>\n")
    }
}

fn times(record: &Record, summary: &Summary, case: &str) -> String {
    let mut out = String::new();
    for measure in Measure::ALL.into_iter().filter(|m| !m.is_memory()) {
        let arms: Vec<_> = summary.arms.iter().filter(|a| a.case == case && a.measure == measure).collect();
        if arms.is_empty() {
            continue;
        }
        let _ = writeln!(
            out,
            "<h3>{} time</h3>\n<div class=\"scroll\"><table><tr class=\"heads\"><th>arm</th><th>median</th><th>quartiles</th><th>ratio (95 %)</th><th>detectable</th><th>verdict</th></tr>",
            measure.name()
        );
        for a in arms {
            let s = a.spread;
            let [median, q1, q3] = [s.median, s.q1, s.q3].map(|v| amount(v, measure));
            let c = summary.comparisons.iter().find(|c| c.case == case && c.measure == measure && c.arm == a.arm);
            let least = c.and_then(|c| c.paired).map_or(String::new(), |p| format!("{:.2} %", 100.0 * p.mde));
            let words = c.map_or_else(|| "baseline".to_owned(), verdict);
            let rate = rate(record, case, s.median)
                .filter(|_| measure == Measure::Wall)
                .map_or(String::new(), |r| format!("<br/>{}", escape(&r)));
            let _ = writeln!(
                out,
                "<tr><th>{}</th><td data-is=\"median\"><span>{median}{rate}</span></td><td data-is=\"quartiles\">{q1} – {q3}</td><td data-is=\"ratio (95 %)\">{}</td><td data-is=\"detectable\">{least}</td><td data-is=\"verdict\">{}</td></tr>",
                escape(&a.arm),
                c.map_or_else(String::new, ratio),
                escape(&words)
            );
        }
        out += "</table></div>\n";
    }
    out
}

fn memory(record: &Record, summary: &Summary, case: &str) -> String {
    let mut out = String::new();
    for measure in Measure::ALL.into_iter().filter(|m| m.is_memory()) {
        let of_arm = |arm: &str| {
            let index = record.arms.iter().position(|a| a.name == arm)?;
            // The counted sample nearest the median would do; any one shows the baseline.
            let s = record
                .samples
                .iter()
                .rev()
                .find(|s| s.case == case && s.arm == index && matches!(s.phase, Phase::Pair | Phase::Memory))?;
            match measure {
                Measure::PeakMemory => s.live_bytes,
                Measure::PeakRss => s.rss_before,
                _ => Some(0),
            }
        };
        let rows: Vec<_> = summary
            .arms
            .iter()
            .filter(|a| a.case == case && a.measure == measure)
            .map(|a| {
                let live = of_arm(&a.arm).unwrap_or(0) as f64;
                let value = if live > 0.0 {
                    format!("{} + {}", amount(live, measure), amount(a.spread.median, measure))
                } else {
                    amount(a.spread.median, measure)
                };
                (a.arm.clone(), live, a.spread.median, value)
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        let caption = match measure {
            Measure::PeakMemory => "Memory as the arms tell: live before the call (pale) and the peak above it",
            Measure::PeakRss => "Resident memory: before the call (pale) and the peak above it",
            _ => "Largest resident set of the whole process",
        };
        let _ = writeln!(
            out,
            "<h3>{}</h3>\n<figure>{}<figcaption>{caption}</figcaption></figure>\n<ul class=\"verdicts\">",
            measure.name().replace('_', " "),
            plot::bars(caption, &rows)
        );
        for c in summary.comparisons.iter().filter(|c| c.case == case && c.measure == measure && !c.control) {
            let of = if c.paired.is_some() { format!(" {} x {}:", ratio(c), c.baseline) } else { String::new() };
            let _ = writeln!(
                out,
                "<li class=\"{}\"><b>{}</b>{} {}</li>",
                class(c),
                escape(&c.arm),
                escape(&of),
                escape(&verdict(c))
            );
        }
        out += "</ul>\n";
    }
    out
}

fn troubles(record: &Record, case: &str) -> String {
    let mut out = String::new();
    for e in record.errors.iter().filter(|e| e.case == case) {
        let _ = writeln!(
            out,
            "<p class=\"label\"><b>{}</b> at {}: {}</p>",
            escape(&e.arm),
            escape(&e.stage),
            escape(&e.message)
        );
        if !e.stderr.is_empty() {
            let _ = writeln!(out, "<pre>{}</pre>", escape(&e.stderr));
        }
    }
    let checks: Vec<_> = record.checks.iter().filter(|k| k.case == case).collect();
    if !checks.is_empty() {
        out += "<h3>checks before timing</h3>\n<div class=\"scroll\"><table><tr class=\"heads\"><th>arm</th><th>metric</th><th>differs by</th><th>allowed</th><th></th></tr>\n";
        for k in checks {
            let word = if k.pass { "holds" } else { "FAILED" };
            let _ = writeln!(
                out,
                "<tr><th>{}</th><td data-is=\"metric\">{}</td><td data-is=\"differs by\">{:.2e}</td><td data-is=\"allowed\">{:.2e}</td><td data-is=\"check\">{word}</td></tr>",
                escape(&k.arm),
                escape(&k.metric),
                k.difference,
                k.tolerance
            );
        }
        out += "</table></div>\n";
    }
    out
}

fn fingerprint(file: &str, record: &Record) -> String {
    let f = &record.fingerprint;
    let mut rows: Vec<(String, String)> = vec![
        ("record".into(), file.to_owned()),
        ("session".into(), record.session_id.clone()),
        ("command".into(), record.command.clone()),
        ("processor".into(), format!("{}, {} logical cores", f.cpu.as_deref().unwrap_or("not told"), f.cores)),
        ("system".into(), f.system.clone()),
        ("governor".into(), f.governor.clone().unwrap_or_else(|| "not told".into())),
        ("compiler".into(), format!("{}; {}", f.compiler.as_deref().unwrap_or("not told"), f.flags)),
        (
            "commit".into(),
            format!(
                "{}{}",
                f.commit.as_deref().unwrap_or("none"),
                if f.dirty == Some(true) { ", with changes" } else { "" }
            ),
        ),
    ];
    rows.extend(f.gpus.iter().map(|g| ("gpu".to_owned(), g.clone())));
    rows.extend(f.env.iter().map(|(k, v)| (k.clone(), v.clone())));
    for c in &record.conditions {
        let load = c.load.map_or_else(|| "not told".to_owned(), |l| format!("{:.2}", l[0]));
        let clock = c.clock_mhz.map_or_else(String::new, |m| format!(", {m:.0} MHz"));
        let temp = c.temp_c.map_or_else(String::new, |t| format!(", {t:.0} C"));
        let foreign = c.foreign_cpu.map_or_else(String::new, |s| format!(", other work {:.1} %", 100.0 * s));
        rows.push((format!("{} {}", c.when, c.case), format!("load {load}{clock}{temp}{foreign}")));
    }
    for a in &record.arms {
        let sha = a.program_sha256.as_deref().map_or("not found", |s| &s[..s.len().min(16)]);
        let told: Vec<String> = a
            .hello
            .fingerprint
            .iter()
            .map(|(k, v)| format!("{k} {}", v.as_str().map_or_else(|| v.to_string(), str::to_owned)))
            .collect();
        let env: String = a.arm.env.iter().map(|(k, v)| format!("{k}={v} ")).collect();
        rows.push((a.name.clone(), format!("{env}{}; program {sha}; {}", a.arm.command.join(" "), told.join(", "))));
    }
    let mut out = "<details open=\"open\"><summary>How it was measured</summary>\n<dl>\n".to_owned();
    for (name, value) in rows {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value));
    }
    out + "</dl></details>\n"
}
