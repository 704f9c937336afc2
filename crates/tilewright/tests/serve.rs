//! `tilewright serve` as a process: answers equal those of `decide`, signals, keys, and a checkpoint that is exchanged.

#![cfg(unix)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

fn program(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(args).env("TILEWRIGHT_THREADS", "1").env_remove("TILEWRIGHT_KEYS").env_remove("RUST_LOG");
    command
}

fn demo(folder: &Path, seed: &str) -> PathBuf {
    let dir = folder.join(format!("demo-{seed}"));
    let run = program(&["decide", "demo", dir.to_str().unwrap(), "--seed", seed]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    dir
}

/// A served checkpoint; killed when the test ends early.
struct Served {
    process: Child,
    address: String,
    log: Arc<Mutex<String>>,
}

impl Served {
    fn start(model: &Path, args: &[&str]) -> Self {
        let mut all = vec!["serve", "--model", model.to_str().unwrap(), "--port", "0"];
        all.extend(args);
        let mut process = program(&all).stderr(Stdio::piped()).spawn().unwrap();
        let log = Arc::new(Mutex::new(String::new()));
        let (lines, copy) = (BufReader::new(process.stderr.take().unwrap()).lines(), log.clone());
        std::thread::spawn(move || {
            lines.map_while(Result::ok).for_each(|line| *copy.lock().unwrap() += &format!("{line}\n"));
        });
        let mut served = Served { process, address: String::new(), log };
        served.until("listening on http://");
        served.until("ready");
        let log = served.log.lock().unwrap().clone();
        served.address = log.lines().find_map(|l| l.strip_prefix("listening on http://")).unwrap().to_owned();
        served
    }

    fn until(&self, what: &str) {
        let start = Instant::now();
        while !self.log.lock().unwrap().contains(what) {
            assert!(start.elapsed() < Duration::from_secs(60), "no `{what}` in\n{}", self.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn post(&self, path: &str, body: &str, key: Option<&str>) -> (u16, String) {
        post(&self.address, path, body, key)
    }

    /// Its exit code after SIGTERM.
    fn stop(&mut self) -> Option<i32> {
        self.signal("-TERM");
        self.process.wait().unwrap().code()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn post(address: &str, path: &str, body: &str, key: Option<&str>) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let key = key.map_or(String::new(), |k| format!("authorization: Bearer {k}\r\n"));
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{key}content-length: {}\r\n\r\n", body.len());
    stream.write_all(&[head.as_bytes(), body.as_bytes()].concat()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
}

/// Requests of all kinds: texts, documents and conversations in several scripts, short and long, with one to four questions.
fn mixed(i: usize) -> Value {
    let words = [
        "refund",
        "Karte",
        "支付失败",
        "broken",
        "déjà",
        "it",
        "now",
        "please",
        "42",
        "[MASK]",
        "\u{1f642}",
        "\"quoted\"",
    ];
    let mut state = (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % n as u64) as usize
    };
    let most = if next(20) == 0 { 400 } else { 40 };
    let n = 1 + next(most);
    let text = (0..n).map(|_| words[next(words.len())]).collect::<Vec<_>>().join(" ");
    let subject = match next(3) {
        0 => json!(text),
        1 => json!({"body": text, "n": next(100), "x": 0.1 * next(100) as f64, "none": null}),
        _ => json!([{"role": "user", "content": text}, {"role": "agent", "content": "yes"}]),
    };
    let all = json!({
        "refund": {"type": "noul", "instructions": "Is a refund requested?"},
        "team": {"type": "choice", "instructions": "Who handles it?", "criteria": {"billing": "money", "it": null, "no one": 0}},
        "labels": {"type": "choice", "instructions": ["Pick", "one"], "criteria": [2, 2.5, true, "x"]},
        "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", {"level": "annoyed"}, "furious"]},
    });
    let first = next(4);
    let count = 1 + next(4);
    let questions: serde_json::Map<_, _> =
        all.as_object().unwrap().iter().cycle().skip(first).take(count).map(|(k, v)| (k.clone(), v.clone())).collect();
    let mut request = json!({"state": subject, "questions": questions});
    if next(5) == 0 {
        request["max_len"] = json!(96 + next(200));
        request["head_max_len"] = json!(80);
    }
    request
}

/// `TILEWRIGHT_REQUESTS=10000` asks that many.
#[test]
fn answers_over_http_equal_those_of_decide_to_the_byte_whatever_else_is_asked() {
    let count = std::env::var("TILEWRIGHT_REQUESTS").ok().and_then(|n| n.parse().ok()).unwrap_or(400);
    let temp = tempfile::tempdir().unwrap();
    let model = demo(temp.path(), "11");
    let lines: Vec<String> = (0..count).map(|i| mixed(i).to_string()).collect();
    let batch = temp.path().join("batch.jsonl");
    std::fs::write(&batch, lines.join("\n")).unwrap();
    let run =
        program(&["decide", "--model", model.to_str().unwrap(), "--batch", batch.to_str().unwrap()]).output().unwrap();
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let decided: Vec<String> = String::from_utf8(run.stdout)
        .unwrap()
        .lines()
        .map(|row| row.split_once("\"result\":").unwrap().1.strip_suffix('}').unwrap().to_owned())
        .collect();
    assert_eq!(decided.len(), count);

    let mut served = Served::start(&model, &["--dialect", "laya", "--log", "warn,tilewright_serve::run=info"]);
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..24 {
            scope.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::SeqCst);
                    let Some(line) = lines.get(i) else { return };
                    let (status, body) = served.post("/v1/systemone", line, None);
                    assert_eq!(status, 200, "{line}: {body}");
                    // What the reference's server adds over HTTP.
                    let mut result: Value = serde_json::from_str(&body).unwrap();
                    assert_eq!(result.to_string(), body, "nothing is lost in reading it");
                    for answer in result["answers"].as_object_mut().unwrap().values_mut() {
                        answer.as_object_mut().unwrap().shift_remove("x_jev_confidence");
                    }
                    assert_eq!(result.to_string(), decided[i], "{line}");
                }
            });
        }
    });
    assert_eq!(served.stop(), Some(0));
}

#[test]
fn a_termination_lets_requests_finish_and_ends_with_success() {
    let temp = tempfile::tempdir().unwrap();
    let model = demo(temp.path(), "1");
    let mut served = Served::start(&model, &[]);
    let states: Vec<String> = (0..64).map(|i| format!("{i} {}", "long text ".repeat(60))).collect();
    let body = json!({"states": states, "questions": mixed(3)["questions"]}).to_string();
    let address = served.address.clone();
    let large = std::thread::spawn(move || post(&address, "/v1/systemone/batch", &body, None).0);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(served.stop(), Some(0));
    assert_eq!(large.join().unwrap(), 200);
}

#[test]
fn a_hangup_reads_keys_and_checkpoints_anew() {
    let temp = tempfile::tempdir().unwrap();
    let model = demo(temp.path(), "1");
    let keys = temp.path().join("keys");
    std::fs::write(&keys, "a:one\n").unwrap();
    let mut served = Served::start(&model, &["--keys", keys.to_str().unwrap(), "--watch", "0"]);
    let body = mixed(1).to_string();
    let before = served.post("/v1/systemone", &body, Some("one"));
    assert_eq!(before.0, 200);
    std::fs::write(&keys, "b:two\n").unwrap();
    let other = demo(temp.path(), "2");
    std::fs::remove_dir_all(&model).unwrap();
    std::fs::rename(&other, &model).unwrap();
    served.signal("-HUP");
    served.until("reloaded");
    assert_eq!(served.post("/v1/systemone", &body, Some("one")).0, 401);
    let after = served.post("/v1/systemone", &body, Some("two"));
    assert_eq!(after.0, 200);
    assert_ne!(before.1, after.1);
    assert_eq!(served.stop(), Some(0));
}

#[test]
fn a_changed_checkpoint_is_noticed_and_a_broken_one_is_not_let_in() {
    let temp = tempfile::tempdir().unwrap();
    let model = demo(temp.path(), "1");
    let mut served = Served::start(&model, &["--watch", "1"]);
    let body = mixed(1).to_string();
    let before = served.post("/v1/systemone", &body, None);
    // Cut in place while it is served, as a careless copy does.
    std::fs::write(model.join("model.safetensors"), b"cut").unwrap();
    served.until("the old one stays");
    assert_eq!(served.post("/v1/systemone", &body, None), before);
    for i in 2..20 {
        assert_eq!(served.post("/v1/systemone", &mixed(i).to_string(), None).0, 200);
    }
    let other = demo(temp.path(), "2");
    std::fs::copy(other.join("model.safetensors"), model.join("model.safetensors")).unwrap();
    let start = Instant::now();
    while served.post("/v1/systemone", &body, None) == before {
        assert!(start.elapsed() < Duration::from_secs(30), "not noticed");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(served.stop(), Some(0));
}

#[test]
fn it_listens_on_this_machine_only_and_keeps_texts_out_of_its_log() {
    let temp = tempfile::tempdir().unwrap();
    let model = demo(temp.path(), "1");
    let mut served = Served::start(&model, &["--log", "debug", "--log-format", "json"]);
    assert!(served.address.starts_with("127.0.0.1:"), "{}", served.address);
    let body = json!({"state": "very private words", "questions": {"q": {"type": "noul", "instructions": "secret?"}}});
    assert_eq!(served.post("/v1/systemone", &body.to_string(), None).0, 200);
    assert_eq!(served.post("/v1/systemone", "{\"state\": \"private\"", None).0, 422);
    assert_eq!(served.stop(), Some(0));
    let log = served.log.lock().unwrap();
    assert!(!log.contains("private") && !log.contains("secret"), "{log}");
    let last = log.lines().last().unwrap();
    assert!(serde_json::from_str::<Value>(last).is_ok(), "{last}");
}

#[test]
fn what_cannot_be_served_ends_with_a_reason() {
    let temp = tempfile::tempdir().unwrap();
    let model = demo(temp.path(), "1");
    std::fs::write(model.join("model.safetensors"), b"cut").unwrap();
    for (args, words) in [
        (vec!["serve"], "no checkpoint"),
        (vec!["serve", "--model", "absent"], "there is no folder absent"),
        (vec!["serve", "--port", "0", "--model", model.to_str().unwrap()], "model.safetensors"),
        (vec!["serve", "--port", "0", "--model", model.to_str().unwrap(), "--keys", "absent"], "absent"),
    ] {
        let run = program(&args).output().unwrap();
        let err = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(1), "{err}");
        assert!(err.contains(words) && !err.contains("panicked"), "{err}");
    }
}
