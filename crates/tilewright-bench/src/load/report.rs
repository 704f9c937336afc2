//! A load record as text and as one self-contained page.

use std::fmt::Write;

use super::plot::{Axis, Curve, curves, legend};
use super::record::{Comparison, Latencies, LoadRecord, Measure, Mode, Run, Tail};
use crate::record::Status;
use crate::report::STYLE;
use crate::report::plot::{Row, Series, escape, forest, samples};
use crate::summary::Verdict;

/// Requests that leave later than this at the 99th percentile say more of the asking side than of the server.
const LATE_MS: f64 = 20.0;

/// `12.3 ms`, with as many digits as mean something.
fn ms(v: f64) -> String {
    match v {
        v if v >= 10_000.0 => format!("{:.1} s", v / 1e3),
        v if v >= 100.0 => format!("{v:.0} ms"),
        v if v >= 10.0 => format!("{v:.1} ms"),
        v => format!("{v:.2} ms"),
    }
}

fn per_second(v: f64) -> String {
    if v >= 100.0 { format!("{v:.0}/s") } else { format!("{v:.2}/s") }
}

fn percentiles(t: &Tail) -> String {
    let [a, b, c, d, e] = [t.p50_ms, t.p90_ms, t.p99_ms, t.p999_ms, t.max_ms].map(ms);
    format!("p50 {a}  p90 {b}  p99 {c}  p99.9 {d}  max {e}")
}

fn asked(run: &Run) -> String {
    let how = run.rate.map_or_else(|| "busy connections".to_owned(), |r| format!("{} asked", per_second(r)));
    match run.purpose.as_str() {
        "rate" | "closed" | "block" => how,
        other => format!("{other}: {how}"),
    }
}

fn counts(run: &Run) -> String {
    let rows = run.statuses.iter().chain(&run.failures);
    let told: Vec<String> = rows.map(|(what, n)| format!("{n} x {what}")).collect();
    if told.is_empty() { "nothing was sent".to_owned() } else { told.join(", ") }
}

/// What a reader must know before any number.
fn labels(record: &LoadRecord) -> Vec<String> {
    let mut labels = Vec::new();
    match record.status {
        Status::Ok => {}
        Status::Partial => labels.push(format!("PARTIAL: {}", record.reason.as_deref().unwrap_or("not finished"))),
        _ => labels.push(format!("WRONG: {}", record.reason.as_deref().unwrap_or("see below"))),
    }
    if record.settings.closed.is_some() {
        labels.push(
            "closed loop: the next request waits for the last answer, so latencies leave out whoever would have had to wait"
                .to_owned(),
        );
    }
    let late = record.runs.iter().map(|r| r.late.p99_ms).fold(0.0, f64::max);
    if late > LATE_MS {
        let busy = format!(
            "up to {} late at p99 when requests left: all {} connections were busy, or this machine was; latencies include it",
            ms(late),
            record.settings.connections
        );
        labels.push(busy);
    }
    if let Some(words) = record.runs.iter().find_map(|r| r.complaint.as_ref()) {
        labels.push(format!("an answer that was neither 2xx nor a refusal: {words}"));
    }
    labels
}

fn verdict(record: &LoadRecord, c: &Comparison) -> String {
    let name = &record.servers[0].name;
    let words = match (c.verdict, c.measure) {
        (Verdict::Faster, Measure::Throughput) => format!("{name} answers more"),
        (Verdict::Slower, Measure::Throughput) => format!("{name} answers less"),
        (Verdict::Faster, _) => format!("{name} is faster"),
        (Verdict::Slower, _) => format!("{name} is slower"),
        (Verdict::NoDifferenceDetected, _) => "no difference detected".to_owned(),
        (Verdict::NotComparable, _) => "not comparable".to_owned(),
    };
    c.reason.as_ref().map_or_else(|| words.clone(), |r| format!("{words}; {r}"))
}

fn ratio(c: &Comparison) -> String {
    c.paired.map_or_else(|| "-".to_owned(), |p| format!("{:.3} ({:.3} to {:.3})", p.ratio, p.ci95[0], p.ci95[1]))
}

/// Whether the record has two servers, so that rows must name theirs.
fn named(record: &LoadRecord, run: &Run) -> String {
    if record.servers.len() > 1 { format!("{}  ", record.servers[run.server].name) } else { String::new() }
}

/// One run in the terminal.
pub fn text_of_run(run: &Run) -> String {
    let mut out = format!("{}  {} answered  {}\n", asked(run), per_second(run.throughput), counts(run));
    let mut line = |what: &str, t: &Tail| {
        if t.n > 0 {
            let _ = writeln!(out, "    {what:<9} {}", percentiles(t));
        }
    };
    line("latency", &run.answered.latency);
    line("service", &run.answered.service);
    line("refused", &run.refused.latency);
    line("other", &run.other.latency);
    out
}

/// The terminal's report.
pub fn text(record: &LoadRecord) -> String {
    let mut out = format!("load  {}\n", record.started);
    for server in &record.servers {
        let _ = writeln!(out, "{}  {}", server.name, server.url);
    }
    labels(record).iter().for_each(|l| out += &format!("! {l}\n"));
    // Blocks of a comparison are too many to be read one by one.
    for run in record.runs.iter().filter(|_| record.settings.mode != Mode::Compare) {
        let _ = write!(out, "\n{}{}", named(record, run), text_of_run(run));
    }
    if let Some(c) = &record.capacity {
        out += &format!("\n{}\n", capacity(record));
        let _ = writeln!(out, "most answers in any run: {}", per_second(c.peak));
    }
    for c in &record.comparisons {
        let _ = writeln!(out, "{:<17} {}  {}", c.measure.words(), ratio(c), verdict(record, c));
    }
    out
}

fn capacity(record: &LoadRecord) -> String {
    let Some(c) = &record.capacity else { return String::new() };
    let limit = record.settings.p99_ms.map_or(String::new(), |l| format!(" with p99 within {}", ms(l)));
    match (c.rate, c.too_much) {
        (Some(rate), Some(more)) => {
            format!("kept up with {}{limit}, not with {}", per_second(rate), per_second(more))
        }
        (Some(rate), None) => format!("kept up with {}{limit}, the highest that was asked", per_second(rate)),
        (None, Some(more)) => format!("did not keep up with {}{limit}, the lowest that was asked", per_second(more)),
        (None, None) => "interrupted before anything was found".to_owned(),
    }
}

/// One page about one record; `file` is its name.
pub fn html(file: &str, record: &LoadRecord) -> String {
    let names: Vec<&str> = record.servers.iter().map(|s| s.name.as_str()).collect();
    let title = escape(&names.join(" and "));
    let mut page = format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n<title>{title} under load</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n\
         <h1>{title} under load</h1>\n<p class=\"meta\">{}</p>\n",
        escape(&record.started)
    );
    for label in labels(record) {
        let _ = writeln!(page, "<p class=\"label\">{}</p>", escape(&label));
    }
    match record.settings.mode {
        Mode::Rate => {}
        Mode::Sweep => page += &sweep(record),
        Mode::Compare => page += &comparison(record),
    }
    for run in shown(record) {
        page += &section(record, run);
    }
    page += &all_runs(record);
    page += &fingerprint(file, record);
    page += "<footer><p>Latency counts from the time a request was due, service from the time it could leave. A caller feels the first; the second is \
             blind to everybody who was kept waiting by somebody else's slow answer. Percentiles are of 2xx answers unless another kind is named.</p></footer>\n\
             </main>\n</body>\n</html>\n";
    page
}

/// The runs that are drawn one by one: all of a plain session, the last of a sweep.
fn shown(record: &LoadRecord) -> Vec<&Run> {
    match record.settings.mode {
        Mode::Rate => record.runs.iter().collect(),
        Mode::Sweep => record.runs.last().into_iter().collect(),
        Mode::Compare => Vec::new(),
    }
}

fn figure(drawing: String, keys: String, caption: &str) -> String {
    if drawing.is_empty() {
        return String::new();
    }
    format!("{keys}\n<figure>{drawing}<figcaption>{}</figcaption></figure>\n", escape(caption))
}

/// `99.9` stands at 3: every step to the right is a tenth of what is left.
fn percentile_axis() -> Axis {
    let marks = [0.0, 50.0, 90.0, 99.0, 99.9, 99.99, 99.999, 99.9999];
    let place = |p: f64| -(1.0 - p / 100.0).log10();
    Axis { label: "percentile".into(), log: false, ticks: marks.map(|p| (place(p), format!("{p}"))).to_vec() }
}

/// A tail as points, out to where one value is left.
fn tail_curve(name: &str, colour: usize, tail: &Tail) -> Curve {
    let histogram = tail.histogram();
    let mut points = Vec::new();
    if tail.n > 0 {
        let end = (tail.n as f64).log10().max(0.3);
        points = (0..=96)
            .map(|i| {
                let at = end * f64::from(i) / 96.0;
                (at, (histogram.quantile(1.0 - 10f64.powf(-at)) as f64 / 1e6).min(tail.max_ms))
            })
            .collect();
    }
    Curve { colour, name: name.to_owned(), points, dots: false }
}

fn latency_axis() -> Axis {
    Axis { label: "milliseconds".into(), log: true, ticks: Vec::new() }
}

fn section(record: &LoadRecord, run: &Run) -> String {
    let mut out = format!("<section>\n<h2>{}{}</h2>\n", escape(&named(record, run)), escape(&asked(run)));
    let _ = writeln!(
        out,
        "<p class=\"lead\">{} answered with 2xx. {}.</p>",
        escape(&per_second(run.throughput)),
        escape(&counts(run))
    );
    let tails = [
        tail_curve("latency: from when it was due", 0, &run.answered.latency),
        tail_curve("service: from when it left", 2, &run.answered.service),
        tail_curve("refused", 1, &run.refused.latency),
    ];
    out += &figure(
        curves("Latency by percentile", &percentile_axis(), &latency_axis(), &tails),
        legend(&tails),
        "Latency by percentile",
    );
    let by_second = |colour: usize, name: &str, of: fn(&super::record::Second) -> u64| {
        let any = run.timeline.iter().any(|s| of(s) > 0);
        let points = run.timeline.iter().filter(|_| any).map(|s| (s.second as f64, of(s) as f64)).collect();
        Curve { colour, name: name.to_owned(), points, dots: false }
    };
    let lines = [
        by_second(2, "due", |s| s.due),
        by_second(0, "answered", |s| s.answered),
        by_second(1, "refused", |s| s.refused),
        by_second(5, "other", |s| s.other),
    ];
    let seconds = Axis { label: "seconds into the run".into(), ..Axis::default() };
    let requests = Axis { label: "requests in each second".into(), ..Axis::default() };
    out += &figure(
        curves("Requests by second", &seconds, &requests, &lines),
        legend(&lines),
        "What was due and what ended, second by second",
    );
    out += &tails_table(run);
    out + "</section>\n"
}

fn tails_table(run: &Run) -> String {
    let mut out = "<div class=\"scroll\"><table><tr class=\"heads\"><th></th><th>n</th><th>p50</th><th>p90</th><th>p99</th><th>p99.9</th><th>max</th></tr>\n".to_owned();
    let mut row = |name: &str, t: &Tail| {
        if t.n > 0 {
            let _ = writeln!(
                out,
                "<tr><th>{name}</th><td data-is=\"n\">{}</td><td data-is=\"p50\">{}</td><td data-is=\"p90\">{}</td><td data-is=\"p99\">{}</td><td data-is=\"p99.9\">{}</td><td data-is=\"max\">{}</td></tr>",
                t.n,
                ms(t.p50_ms),
                ms(t.p90_ms),
                ms(t.p99_ms),
                ms(t.p999_ms),
                ms(t.max_ms)
            );
        }
    };
    let mut both = |name: &str, l: &Latencies| {
        row(&format!("{name}, latency"), &l.latency);
        row(&format!("{name}, service"), &l.service);
    };
    both("answered", &run.answered);
    both("refused", &run.refused);
    both("other", &run.other);
    row("left late by", &run.late);
    out + "</table></div>\n"
}

fn sweep(record: &LoadRecord) -> String {
    let mut runs: Vec<&Run> = record.runs.iter().filter(|r| r.purpose == "sweep").collect();
    runs.sort_by(|a, b| a.rate.unwrap_or(0.0).total_cmp(&b.rate.unwrap_or(0.0)));
    let curve = |colour: usize, name: &str, of: fn(&Run) -> f64| Curve {
        colour,
        name: name.to_owned(),
        points: runs.iter().filter(|r| of(r) > 0.0).filter_map(|r| Some((r.rate?, of(r)))).collect(),
        dots: true,
    };
    let rates = Axis { label: "requests asked a second".into(), log: true, ticks: Vec::new() };
    let mut out = format!("<p class=\"lead\">{}.</p>\n", escape(&capacity(record)));
    let answered = [
        curve(2, "asked", |r| r.rate.unwrap_or(0.0)),
        curve(0, "answered", |r| r.throughput),
        curve(1, "refused", |r| r.refused.latency.n as f64 / r.seconds),
    ];
    let per = Axis { label: "a second".into(), log: true, ticks: Vec::new() };
    out += &figure(
        curves("Answers by rate", &rates, &per, &answered),
        legend(&answered),
        "What was asked and what was answered",
    );
    let tails = [
        curve(0, "p50", |r| r.answered.latency.p50_ms),
        curve(3, "p90", |r| r.answered.latency.p90_ms),
        curve(1, "p99", |r| r.answered.latency.p99_ms),
    ];
    out + &figure(
        curves("Latency by rate", &rates, &latency_axis(), &tails),
        legend(&tails),
        "Latency by rate, from when a request was due",
    )
}

fn comparison(record: &LoadRecord) -> String {
    let rows: Vec<Row> = record
        .comparisons
        .iter()
        .filter_map(|c| {
            let p = c.paired?;
            let class = match c.verdict {
                Verdict::Faster => "faster",
                Verdict::Slower => "slower",
                Verdict::NoDifferenceDetected => "same",
                Verdict::NotComparable => "none",
            };
            Some(Row {
                label: c.measure.words().to_owned(),
                value: ratio(c),
                interval: [p.ci95[0], p.ratio, p.ci95[1]],
                class,
            })
        })
        .collect();
    let [first, second] = [0, 1].map(|i| record.servers.get(i).map_or("", |s| s.name.as_str()));
    let mut out = String::new();
    if !rows.is_empty() {
        let caption = format!("How many times as good as {second} {first} is, with 95 % intervals");
        out += &figure(forest("Ratios with their 95 % intervals", &rows), String::new(), &caption);
    }
    out += "<ul class=\"verdicts\">\n";
    for c in &record.comparisons {
        let class = match c.verdict {
            Verdict::Faster => "faster",
            Verdict::Slower => "slower",
            _ => "same",
        };
        let _ =
            writeln!(out, "<li class=\"{class}\"><b>{}</b>: {}</li>", c.measure.words(), escape(&verdict(record, c)));
    }
    out += "</ul>\n";
    let series = |server: usize| Series {
        colour: server,
        points: record.runs.iter().filter(|r| r.server == server).map(|r| (r.began_s, r.throughput)).collect(),
    };
    let keys = format!(
        "<p class=\"legend\"><span class=\"key k0\">{}</span> <span class=\"key k1\">{}</span></p>",
        escape(first),
        escape(second)
    );
    let drawing = samples("Answers a second of every block", "answers a second", &[series(0), series(1)]);
    out += &figure(drawing, keys, "Answers a second of every block");
    // All blocks of a server together: the shape of its tail.
    let tails: Vec<Curve> = (0..record.servers.len())
        .map(|server| {
            let mut all = super::histogram::Histogram::default();
            let of_server = record.runs.iter().filter(|r| r.server == server);
            of_server.for_each(|r| all.merge(&r.answered.latency.histogram()));
            tail_curve(&record.servers[server].name, server, &super::measure::tail(&all))
        })
        .collect();
    out + &figure(
        curves("Latency by percentile", &percentile_axis(), &latency_axis(), &tails),
        legend(&tails),
        "Latency by percentile, all blocks of a server together",
    )
}

fn all_runs(record: &LoadRecord) -> String {
    let mut out = "<section><h2>All runs</h2>\n<div class=\"scroll\"><table><tr class=\"heads\"><th>run</th><th>answered</th><th>p50</th><th>p99</th><th>refused, p99</th><th>answers</th></tr>\n".to_owned();
    for run in &record.runs {
        let refused = if run.refused.latency.n > 0 { ms(run.refused.latency.p99_ms) } else { String::new() };
        let _ = writeln!(
            out,
            "<tr><th>{}{}</th><td data-is=\"answered\">{}</td><td data-is=\"p50\">{}</td><td data-is=\"p99\">{}</td><td data-is=\"refused, p99\">{refused}</td><td data-is=\"answers\">{}</td></tr>",
            escape(&named(record, run)),
            escape(&asked(run)),
            per_second(run.throughput),
            ms(run.answered.latency.p50_ms),
            ms(run.answered.latency.p99_ms),
            escape(&counts(run))
        );
    }
    out + "</table></div></section>\n"
}

fn fingerprint(file: &str, record: &LoadRecord) -> String {
    let (f, s) = (&record.fingerprint, &record.settings);
    let mut rows = vec![
        ("record".to_owned(), file.to_owned()),
        ("command".to_owned(), record.command.clone()),
        ("seed".to_owned(), s.seed.to_string()),
        ("connections".to_owned(), s.connections.to_string()),
        ("time-out".to_owned(), format!("{} s", s.timeout_s)),
        ("requests".to_owned(), format!("{} in the file, SHA-256 {}", record.requests.len(), s.mix_sha256)),
        ("asked from".to_owned(), format!("{}, {} logical cores", f.cpu.as_deref().unwrap_or("not told"), f.cores)),
        ("system".to_owned(), f.system.clone()),
        ("commit".to_owned(), f.commit.clone().unwrap_or_else(|| "none".to_owned())),
    ];
    rows.extend(record.servers.iter().map(|s| (s.name.clone(), s.url.clone())));
    if let Some([load, ..]) = record.load {
        rows.push(("load before".to_owned(), format!("{load:.2}")));
    }
    let mut out = "<details open=\"open\"><summary>How it was measured</summary>\n<dl>\n".to_owned();
    for (name, value) in rows {
        let _ = writeln!(out, "<dt>{}</dt><dd>{}</dd>", escape(&name), escape(&value));
    }
    out + "</dl></details>\n"
}
