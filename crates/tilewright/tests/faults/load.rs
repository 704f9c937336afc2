//! More than a server can do, and the same answers whatever it is doing.

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tilewright_bench::load::drive::{self, Rules};
use tilewright_bench::load::http::{Connection, Target};
use tilewright_bench::load::measure::{self, Asked};
use tilewright_bench::load::mix::Mix;
use tilewright_bench::rng::SplitMix;

use super::served::Server;

/// A number that a longer run may raise.
fn setting(name: &str, usual: usize) -> usize {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(usual)
}

#[test]
fn more_than_it_can_do_is_refused_at_once_and_what_was_accepted_is_answered() {
    let mut server = Server::start(&["--max-concurrent", "4"], &[]);
    let seconds = setting("TILEWRIGHT_OVERLOAD_SECONDS", 4) as f64;
    // Large enough that a few of them keep the device busy.
    let definitions: Vec<String> = (0..16)
        .map(|i| format!(r#""q{i}": {{"type": "noul", "instructions": "Is number {i} true of it?"}}"#))
        .collect();
    let body = format!(r#"{{"state": "{}", "questions": {{{}}}}}"#, "many words ".repeat(60), definitions.join(","));
    let mix = Mix::parse(body.as_bytes(), std::path::Path::new("mix")).unwrap();
    let target = Target::parse(&format!("{}/laya/v1/systemone", server.url)).unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let rules = Rules { mix: &mix, timeout: Duration::from_secs(30), stop: &stop };
    let mut connections: Vec<Connection> = (0..64).map(|_| Connection::new(&target, "")).collect();
    let length = Duration::from_secs(1);
    let done = drive::closed_loop(&mut connections[..4], length, 1, &rules);
    // To the last answer: on a machine that does other things, too, a second may pass without any.
    let last = done.outcomes.iter().map(|o| o.done).max().unwrap_or(1);
    let capacity = done.outcomes.len() as f64 / (last as f64 / 1e9);
    let before = server.resident();
    let length = Duration::from_secs_f64(seconds);
    let arrivals = drive::poisson(5.0 * capacity, length, &mix, 2);
    let done = drive::open_loop(&mut connections, &arrivals, &rules);
    let run = measure::run(&Asked { length, ..Asked::default() }, Some(&arrivals), &done);
    let statuses: Vec<&String> = run.statuses.keys().collect();
    assert!(
        statuses.iter().all(|s| ["200", "503"].contains(&s.as_str())) && run.failures.is_empty(),
        "{:?} {:?}",
        run.statuses,
        run.failures
    );
    assert!(run.refused.latency.n > run.due / 3, "{:?}", run.statuses);
    assert!(run.throughput > 0.2 * capacity, "{} of {capacity} a second", run.throughput);
    // On a machine that does other things, too; `lab/serve/overload.sh` holds the figure.
    assert!(run.refused.service.p50_ms < 50.0, "{} ms", run.refused.service.p50_ms);
    let grown = server.resident().saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes more");
    server.is_well();
}

/// Requests of every kind and size.
fn requests(count: usize) -> Vec<Value> {
    let words = [
        "refund", "invoice", "Größe", "login", "東京", "late", "🙂", "password", "broken", "thanks", "cancel",
        "urgent", "ключ", "delivery",
    ];
    let mut rng = SplitMix::new(11);
    let text = |rng: &mut SplitMix, most: usize| {
        let n = 1 + rng.below(most);
        (0..n).map(|_| words[rng.below(words.len())]).collect::<Vec<_>>().join(" ")
    };
    (0..count)
        .map(|_| {
            let state = match rng.below(4) {
                0 => json!(text(&mut rng, 8)),
                1 => json!(text(&mut rng, 200)),
                2 => json!({"message": text(&mut rng, 30), "amount": 12.5, "id": 12345678901234567890u64, "flags": [true, null]}),
                _ => json!([{"role": "user", "content": text(&mut rng, 40)}, {"role": "agent", "content": text(&mut rng, 40)}]),
            };
            let mut questions = serde_json::Map::new();
            for i in 0..1 + rng.below(4) {
                let asked = text(&mut rng, 6);
                let question = match rng.below(4) {
                    0 => json!({"type": "noul", "instructions": asked}),
                    1 => json!({"type": "noul", "instructions": asked, "criteria": {"true": text(&mut rng, 3), "false": "not so"}}),
                    2 => {
                        let options: serde_json::Map<String, Value> = (0..2 + rng.below(9)).map(|o| (format!("{}{o}", words[rng.below(words.len())]), json!(text(&mut rng, 4)))).collect();
                        json!({"type": "choice", "instructions": asked, "criteria": options})
                    }
                    _ => json!({"type": "score", "instructions": {"asked": asked}, "criteria": (0..2 + rng.below(4)).map(|l| format!("level {l}")).collect::<Vec<_>>()}),
                };
                questions.insert(format!("q{i}"), question);
            }
            json!({"state": state, "questions": questions})
        })
        .collect()
}

#[test]
fn answers_are_those_of_decide_byte_for_byte_under_load() {
    let count = setting("TILEWRIGHT_MIXED_REQUESTS", 400);
    let server = Server::start(&["--max-concurrent", "64"], &[]);
    let requests = requests(count);
    let lines: Vec<String> = requests.iter().map(Value::to_string).collect();
    let input = server.folder.path().join("in.jsonl");
    std::fs::write(&input, lines.join("\n") + "\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    let decide = command.args(["decide", "--model"]).arg(&server.model).arg("--batch").arg(&input).output().unwrap();
    assert!(decide.status.success(), "{}", String::from_utf8_lossy(&decide.stderr));
    let rows = String::from_utf8(decide.stdout).unwrap();
    let mut wanted = vec![String::new(); count];
    for row in rows.lines() {
        let row: Value = serde_json::from_str(row).unwrap();
        wanted[row["line"].as_u64().unwrap() as usize - 1] = row["result"].to_string();
    }
    let (next, different, other) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        return;
                    }
                    let answer = server.post("/laya/v1/systemone", &lines[i]);
                    if answer.status != 200 {
                        other.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                    // The server tells one number more, for whoever ports a threshold; without it nothing may differ.
                    let mut value = answer.json();
                    for (_, one) in value["answers"].as_object_mut().unwrap() {
                        one.as_object_mut().unwrap().shift_remove("x_jev_confidence");
                    }
                    let text = value.to_string();
                    if text != wanted[i] && different.fetch_add(1, Ordering::Relaxed) == 0 {
                        eprintln!("request {i}: {}\n     http: {text}\n   decide: {}", lines[i], wanted[i]);
                    }
                }
            });
        }
    });
    assert_eq!((different.into_inner(), other.into_inner()), (0, 0), "of {count}");
    eprintln!("{count} requests, all equal");
}

#[test]
fn a_server_that_is_told_to_stop_answers_what_it_has_begun() {
    let mut server = Server::start(&[], &[]);
    let states: Vec<String> = (0..64).map(|i| format!("\"{} {i}\"", "some words ".repeat(50))).collect();
    let batch = format!(
        r#"{{"states": [{}], "questions": {{"q": {{"type": "noul", "instructions": "?"}}, "r": {{"type": "noul", "instructions": "!"}}}}}}"#,
        states.join(",")
    );
    let answer = std::thread::scope(|scope| {
        let asking = scope.spawn(|| server.post("/laya/v1/systemone/batch", &batch));
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while server.get("/health").json()["in_flight"] != 1 {
            assert!(std::time::Instant::now() < end && !asking.is_finished());
        }
        server.signal(rustix::process::Signal::TERM);
        asking.join().unwrap()
    });
    assert_eq!((answer.status, answer.json()["results"].as_array().unwrap().len()), (200, 64));
    assert!(server.child.wait().unwrap().success());
    assert!(std::net::TcpStream::connect(server.address).is_err(), "nobody listens any longer");
}
