//! A small arm that behaves, or misbehaves, as its first argument says; the tests measure it.
//!
//! `fake-arm MODE [NUMBER]` speaks the line protocol; `fake-arm plain MODE` is a program that speaks nothing.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mode = words.first().map_or("good", String::as_str);
    if mode == "plain" {
        return plain(words.get(1).map_or("good", String::as_str));
    }
    let number: u64 = words.get(1).and_then(|w| w.parse().ok()).unwrap_or(200);
    if mode == "deaf" {
        std::thread::sleep(Duration::from_secs(3600));
    }
    if mode == "early" {
        println!("loading...");
    }
    let mut inputs: BTreeMap<u64, u64> = BTreeMap::new();
    let mut kept: Vec<Vec<u8>> = Vec::new();
    let mut calls = 0;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let request: Value = serde_json::from_str(&line).unwrap_or_default();
        let answer = match request["do"].as_str().unwrap_or_default() {
            "hello" if mode == "refuse" => json!({"error": "no such device here"}),
            "hello" => json!({"ok": "hello", "name": "fake-arm", "fingerprint": {"mode": mode}}),
            "prepare" => {
                let mut told = Vec::new();
                for input in request["inputs"].as_array().into_iter().flatten() {
                    let bytes = std::fs::read(input["path"].as_str().unwrap_or_default()).unwrap_or_default();
                    let sum = bytes.iter().fold(0u64, |s, b| s.wrapping_mul(31).wrapping_add(u64::from(*b)));
                    inputs.insert(input["index"].as_u64().unwrap_or(0), sum);
                    let sha =
                        if mode == "other-input" { "00".to_owned() } else { tilewright_bench::inputs::sha256(&bytes) };
                    told.push(json!({"index": input["index"], "name": input["name"], "sha256": sha}));
                }
                json!({"ok": "prepare", "inputs": told})
            }
            "run" => {
                calls += 1;
                match (mode, calls) {
                    ("crash", 6) => std::process::exit(3),
                    ("abort", 6) => std::process::abort(),
                    ("hang", 6) => std::thread::sleep(Duration::from_secs(3600)),
                    ("garbage", 6) => {
                        println!("Segmentation fault (core dumped)");
                        continue;
                    }
                    ("endless", 6) => loop {
                        if std::io::stdout().write_all(&[b'x'; 4096]).is_err() {
                            return;
                        }
                    },
                    ("chatty", 6) => println!("{}", json!({"ok": "run", "ns": 5})),
                    ("talkative", _) => eprintln!("{}", "step done, ".repeat(20_000)),
                    _ => {}
                }
                let live: u64 = 1 << 20;
                if matches!(mode, "keeps" | "hides") && calls == 1 {
                    kept.push(vec![1; number as usize]);
                }
                if mode == "leaks" && calls > 3 {
                    kept.push(vec![1; number as usize]);
                }
                let kept_bytes: usize = if mode == "hides" { 0 } else { kept.iter().map(Vec::len).sum() };
                let start = Instant::now();
                let sum = spin(if matches!(mode, "keeps" | "hides" | "leaks") { 200 } else { number });
                let ns = start.elapsed().as_nanos() as i64;
                let ns = match (mode, calls) {
                    ("negative", 6) => -ns,
                    ("boaster", 6) => ns * 1000 + 3_000_000_000,
                    _ => ns,
                };
                let index = request["input"].as_u64().unwrap_or(0);
                let input = inputs.get(&index).copied().unwrap_or(index);
                let output = if mode == "fickle" && calls == 9 { format!("{calls}") } else { format!("{input:x}") };
                let loss = (input % 1000) as f64 / 1000.0 + if mode == "wrong" { 0.5 } else { 0.0 };
                let live = live + kept_bytes as u64;
                json!({
                    "ok": "run", "ns": ns, "live_bytes": live, "peak_bytes": live + (2 << 20), "output": output,
                    "metrics": {"loss": loss, "work": sum % 7.0, "logits": [loss, 1.0]},
                })
            }
            "quit" => {
                println!("{}", json!({"ok": "quit"}));
                std::process::exit(if mode == "sulks" { 5 } else { 0 });
            }
            other => json!({"error": format!("unknown request `{other}`")}),
        };
        println!("{answer}");
    }
}

fn plain(mode: &str) {
    match mode {
        "crash" => std::process::exit(3),
        "hang" => std::thread::sleep(Duration::from_secs(3600)),
        "fickle" => println!("{:?}", std::time::SystemTime::now()),
        "large" => {
            let block = vec![1u8; 64 << 20];
            println!("{}", block.iter().map(|b| u64::from(*b)).sum::<u64>());
        }
        _ => println!("{}", spin(2000)),
    }
}

/// Works for about `microseconds`.
fn spin(microseconds: u64) -> f64 {
    let end = Instant::now() + Duration::from_micros(microseconds);
    let mut x = 1.0;
    while Instant::now() < end {
        x = (x * 1.000_000_1f64).sqrt() + 0.5;
    }
    x.floor()
}
