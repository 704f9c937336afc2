//! The load tool against servers whose behaviour is known.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tilewright_bench::load::mix::Mix;
use tilewright_bench::load::record::{LoadRecord, Measure, Mode, Run, Server};
use tilewright_bench::load::report;
use tilewright_bench::load::session::{self, Options};
use tilewright_bench::record::Status;
use tilewright_bench::summary::Verdict;

mod support;
use support::{conforms, serve};

fn mix() -> Mix {
    let text = "{\"state\":\"a\"}\n{\"weight\":2,\"body\":{\"state\":\"b\"}}\n";
    Mix::parse(text.as_bytes(), Path::new("mix.jsonl")).unwrap()
}

fn options(urls: &[&str]) -> Options {
    let server = |(i, url): (usize, &&str)| Server { name: format!("s{i}"), url: (*url).to_owned() };
    Options {
        command: "tilewright bench load".to_owned(),
        servers: urls.iter().enumerate().map(server).collect(),
        headers: String::new(),
        mode: if urls.len() > 1 { Mode::Compare } else { Mode::Rate },
        rate: Some(100.0),
        closed: None,
        seconds: 1.0,
        warm_up: 0.0,
        connections: 16,
        timeout: 5.0,
        seed: 1,
        pairs: 8,
        p99_ms: None,
        at: None,
    }
}

fn measure(options: &Options) -> LoadRecord {
    session::run(&mix(), options, &AtomicBool::new(false), &mut |_: &Run, _| {}).unwrap()
}

/// Answers one request at a time, as a model on one device does.
fn one_at_a_time(takes: Duration) -> impl Fn(&[u8]) -> (u16, String) + Send + Sync {
    let gate = Mutex::new(());
    move |_| {
        let _held = gate.lock().unwrap();
        std::thread::sleep(takes);
        (200, "{}".to_owned())
    }
}

#[test]
fn a_server_of_known_delay_has_that_latency() {
    let url = serve(|_| {
        std::thread::sleep(Duration::from_millis(20));
        (200, "{\"ok\":true}".to_owned())
    });
    let record = measure(&Options { seconds: 2.0, warm_up: 0.5, ..options(&[&url]) });
    let run = &record.runs[0];
    assert_eq!((record.status, run.sent, run.statuses["200"]), (Status::Ok, run.due, run.due));
    let p50 = run.answered.latency.p50_ms;
    assert!((20.0..60.0).contains(&p50), "{p50}");
    // 200 expected, with a standard deviation of 14.
    assert!((140..260).contains(&run.due), "{}", run.due);
    assert!((run.throughput / (run.due as f64 / 2.0) - 1.0).abs() < 0.15, "{} {}", run.throughput, run.due);
    assert!(run.timeline.iter().map(|s| s.answered).sum::<u64>() >= run.due, "the warm-up is drawn, too");
}

#[test]
fn a_stall_is_charged_for_everybody_who_had_to_wait() {
    let (gate, count) = (Mutex::new(()), AtomicUsize::new(0));
    let url = serve(move |_| {
        let _held = gate.lock().unwrap();
        let n = count.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(Duration::from_millis(if n == 60 { 600 } else { 1 }));
        (200, String::new())
    });
    let record = measure(&Options { rate: Some(150.0), seconds: 2.0, connections: 2, ..options(&[&url]) });
    let tails = &record.runs[0].answered;
    // Some 90 of 300 requests were due while the server stood still; two connections saw it happen.
    assert!(tails.latency.p90_ms > 150.0, "{:?}", tails.latency.p90_ms);
    assert!(tails.service.p90_ms < 60.0, "what a closed loop would have told: {:?}", tails.service.p90_ms);
    assert!(tails.latency.max_ms > 550.0 && tails.service.max_ms > 550.0);
    assert!(record.runs[0].late.p90_ms > 100.0);
    assert!(report::text(&record).contains("late at p99 when requests left"));
}

#[test]
fn refusals_have_latencies_of_their_own_and_other_answers_are_quoted() {
    let n = AtomicUsize::new(0);
    let url = serve(move |_| match n.fetch_add(1, Ordering::Relaxed) % 10 {
        0..6 => {
            std::thread::sleep(Duration::from_millis(60));
            (200, String::new())
        }
        6..9 => (503, "{\"detail\":\"busy\"}".to_owned()),
        _ => (422, "{\"detail\":\"question 'q': <bad>\"}".to_owned()),
    });
    let record = measure(&options(&[&url]));
    let run = &record.runs[0];
    let [ok, busy, bad] = ["200", "503", "422"].map(|s| run.statuses[s]);
    assert_eq!((run.answered.latency.n, run.refused.latency.n, run.other.latency.n), (ok, busy, bad));
    assert!(run.refused.latency.p50_ms < 30.0 && run.answered.latency.p50_ms >= 60.0);
    assert_eq!(run.complaint.as_deref(), Some("422: {\"detail\":\"question 'q': <bad>\"}"));
    assert!(report::text(&record).contains("422: {\"detail\""));
    assert!(report::html("r.json", &record).contains("&lt;bad&gt;"));
}

#[test]
fn the_seed_decides_what_is_sent() {
    let sent = |seed: u64| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = seen.clone();
        let url = serve(move |body| {
            kept.lock().unwrap().push(body.to_vec());
            (200, String::new())
        });
        measure(&Options { seed, connections: 1, seconds: 0.5, ..options(&[&url]) });
        seen.lock().unwrap().clone()
    };
    let first = sent(5);
    assert!(first.len() > 20 && first.contains(&b"{\"state\":\"b\"}".to_vec()));
    assert_eq!(first, sent(5));
    assert_ne!(first, sent(6));
}

#[test]
fn what_was_measured_before_ctrl_c_is_kept() {
    let url = serve(|_| (200, String::new()));
    let stop = Arc::new(AtomicBool::new(false));
    let later = stop.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(500));
        later.store(true, Ordering::Relaxed);
    });
    let began = Instant::now();
    let long = Options { seconds: 60.0, ..options(&[&url]) };
    let record = session::run(&mix(), &long, &stop, &mut |_: &Run, _| {}).unwrap();
    assert!(began.elapsed() < Duration::from_secs(10));
    let run = &record.runs[0];
    assert_eq!(record.status, Status::Partial);
    assert!(run.sent > 10 && run.sent < run.due && run.answered.latency.n == run.sent, "{} of {}", run.sent, run.due);
    assert!(report::text(&record).contains("PARTIAL"));
}

#[test]
fn a_server_that_holds_on_to_requests_does_not_hold_up_ctrl_c() {
    let url = serve(|_| {
        std::thread::sleep(Duration::from_secs(30));
        (200, String::new())
    });
    let stop = Arc::new(AtomicBool::new(false));
    let later = stop.clone();
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        later.store(true, Ordering::Relaxed);
    });
    let began = Instant::now();
    let patient = Options { timeout: 60.0, ..options(&[&url]) };
    let record = session::run(&mix(), &patient, &stop, &mut |_: &Run, _| {}).unwrap();
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(record.runs[0].failures["interrupted"] > 0);
}

#[test]
fn a_sweep_finds_what_the_server_can_do() {
    // 100 a second at most, less what a sleep oversleeps.
    let url = serve(one_at_a_time(Duration::from_millis(10)));
    let record = measure(&Options {
        mode: Mode::Sweep,
        rate: Some(25.0),
        connections: 64,
        at: Some(0.5),
        seconds: 1.2,
        ..options(&[&url])
    });
    let found = record.capacity.clone().unwrap();
    let (rate, too_much) = (found.rate.unwrap(), found.too_much.unwrap());
    assert!((40.0..125.0).contains(&rate) && too_much <= 201.0 && too_much / rate <= 1.1, "{found:?}");
    assert!(found.peak <= 105.0, "{found:?}");
    let last = record.runs.last().unwrap();
    assert_eq!((last.purpose.as_str(), last.rate), ("at 50 %", Some(rate / 2.0)));
    assert!(report::text(&record).contains("kept up with"));
}

#[test]
fn a_comparison_tells_which_server_does_more() {
    let (fast, slow) =
        (serve(one_at_a_time(Duration::from_millis(4))), serve(one_at_a_time(Duration::from_millis(10))));
    let record = measure(&Options { closed: Some(2), rate: None, seconds: 0.3, ..options(&[&fast, &slow]) });
    let order: Vec<usize> = record.runs.iter().map(|r| r.server).collect();
    assert_eq!((order.len(), order.iter().filter(|s| **s == 0).count()), (16, 8));
    for pair in record.runs.chunks(2) {
        assert_eq!((pair[0].pair, pair[0].slot, pair[1].slot), (pair[1].pair, Some(0), Some(1)));
        assert_ne!(pair[0].server, pair[1].server);
    }
    let throughput = &record.comparisons[0];
    let p = throughput.paired.unwrap();
    assert_eq!((throughput.measure, throughput.verdict, p.n), (Measure::Throughput, Verdict::Faster, 8));
    assert!((1.7..3.2).contains(&p.ratio) && p.ci95[0] <= p.ratio && p.ratio <= p.ci95[1], "{p:?}");
    assert!(throughput.reason.as_ref().unwrap().contains("screen"));
    let text = report::text(&record);
    assert!(text.contains("s0 answers more") && text.contains("closed loop"), "{text}");
}

#[test]
fn both_servers_of_a_pair_get_the_same_requests() {
    let record_bodies = || {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let kept = seen.clone();
        let url = serve(move |body| {
            kept.lock().unwrap().push(body.to_vec());
            (200, String::new())
        });
        (url, seen)
    };
    let ((a, of_a), (b, of_b)) = (record_bodies(), record_bodies());
    let few = Options { pairs: 2, seconds: 0.3, connections: 1, ..options(&[&a, &b]) };
    let record = measure(&few);
    assert_eq!(*of_a.lock().unwrap(), *of_b.lock().unwrap());
    let reason = record.comparisons[0].reason.clone().unwrap();
    assert!(record.comparisons[0].verdict == Verdict::NotComparable && reason.contains("only 2 pairs"), "{reason}");
}

#[test]
fn nobody_at_the_address_is_an_error_with_its_count() {
    let record = measure(&Options { seconds: 0.3, ..options(&["http://127.0.0.1:9/x"]) });
    assert_eq!(record.status, Status::Error);
    assert_eq!(record.runs[0].failures["connect"], record.runs[0].due);
    assert!(report::text(&record).contains("WRONG: not one request"));
}

#[test]
fn what_cannot_be_asked_is_refused_before_anything_is_sent() {
    let good = options(&["http://127.0.0.1:9/x"]);
    for (bad, words) in [
        (Options { rate: None, ..good.clone() }, "--rate or --closed"),
        (Options { rate: Some(f64::NAN), ..good.clone() }, "the rate"),
        (Options { rate: Some(1e6), seconds: 1e3, ..good.clone() }, "too many"),
        (Options { seconds: 0.0, ..good.clone() }, "length"),
        (Options { timeout: -1.0, ..good.clone() }, "time-out"),
        (Options { warm_up: f64::NAN, ..good.clone() }, "warm-up"),
        (Options { connections: 0, ..good.clone() }, "connections"),
        (Options { mode: Mode::Sweep, rate: None, closed: Some(2), ..good.clone() }, "closed loop"),
        (Options { servers: vec![Server { name: "x".into(), url: "ftp://x".into() }], ..good.clone() }, "http://"),
    ] {
        let error = session::run(&mix(), &bad, &AtomicBool::new(false), &mut |_: &Run, _| {}).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn records_follow_the_published_schema_and_come_back_as_they_were() {
    let (a, b) = (serve(|_| (200, String::new())), serve(|_| (503, String::new())));
    let two = measure(&Options { pairs: 2, seconds: 0.2, ..options(&[&a, &b]) });
    let sweep =
        measure(&Options { mode: Mode::Sweep, rate: Some(4000.0), seconds: 0.1, at: Some(0.7), ..options(&[&b]) });
    let schema = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/load-record.schema.json");
    let schema: serde_json::Value = serde_json::from_slice(&std::fs::read(schema).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for record in [two, sweep] {
        let path = folder.path().join(record.file_name());
        record.write(&path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(LoadRecord::is_one(&bytes));
        let mut problems = Vec::new();
        conforms(&schema, &schema, &serde_json::from_slice(&bytes).unwrap(), "record", &mut problems);
        assert_eq!(problems, Vec::<String>::new());
        let again = LoadRecord::read(&path).unwrap();
        assert_eq!(again, record);
        let page = report::html("x.json", &again);
        assert!(
            !page.contains("NaN") && !page.contains("<script") && !page.contains("src=") && !page.contains("@import")
        );
    }
}

#[test]
fn broken_records_are_refused_and_never_panic() {
    let url = serve(|_| (200, String::new()));
    let record = measure(&Options { seconds: 0.2, ..options(&[&url]) });
    let text = serde_json::to_string(&record).unwrap();
    for (from, to, words) in [
        ("\"server\":0", "\"server\":7", "names no server"),
        ("\"schema\":1", "\"schema\":2", "schema 2"),
        ("\"tool\":\"load\"", "\"tool\":\"lead\"", "lead"),
        ("\"runs\":", "\"rums\":", "rums"),
    ] {
        let error = LoadRecord::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err();
        assert!(error.contains(words), "{error}");
    }
    // Numbers that no run has must still make a page.
    let odd = text.replace("\"p50_ms\":", "\"p50_ms\":-1e300,\"p50_ms\":");
    assert!(LoadRecord::parse(odd.as_bytes()).is_err(), "a key given twice");
    let mut odd = record.clone();
    odd.runs[0].answered.latency.buckets = vec![(u64::MAX, u64::MAX / 2), (0, 1)];
    odd.runs[0].seconds = 0.0;
    odd.runs[0].timeline.clear();
    report::text(&odd);
    report::html("x", &odd);
}
