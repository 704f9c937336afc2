//! Files that change, and a disk that is full.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::served::{ASK, Server, demo};

/// Puts files into a checkpoint's folder the way a careful program does: written beside, then renamed.
fn exchange(from: &Path, to: &Path) {
    for name in ["model.safetensors", "rl_agent_config.json"] {
        let beside = to.join(format!("{name}.new"));
        std::fs::copy(from.join(name), &beside).unwrap();
        std::fs::rename(&beside, to.join(name)).unwrap();
    }
}

fn until(what: &str, mut is: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_checkpoint_is_exchanged_under_load_and_no_request_is_lost() {
    let mut server = Server::start(&["--watch", "1"], &[]);
    let other = server.folder.path().join("other");
    demo(&other, 7);
    let before = server.post("/laya/v1/systemone", ASK).json();
    let (stop, asked, lost) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let status = server.post("/laya/v1/systemone", ASK).status;
                    asked.fetch_add(1, Ordering::Relaxed);
                    if status != 200 {
                        lost.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
        exchange(&other, &server.model);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            until("the new checkpoint answers", || server.post("/laya/v1/systemone", ASK).json() != before);
        }));
        stop.store(true, Ordering::Relaxed);
        done.unwrap();
    });
    assert!(asked.load(Ordering::Relaxed) > 10);
    assert_eq!(lost.load(Ordering::Relaxed), 0, "of {}", asked.load(Ordering::Relaxed));
    assert_eq!(server.metric("tilewright_model_reloads_total"), 1.0);
    server.is_well();
}

#[test]
fn a_broken_checkpoint_put_in_its_place_is_told_and_the_old_one_stays() {
    let mut server = Server::start(&["--watch", "1"], &[]);
    let before = server.post("/laya/v1/systemone", ASK).json();
    for (what, bytes) in [("garbage", &b"not a checkpoint"[..]), ("nothing", b"")] {
        let beside = server.model.join("model.new");
        std::fs::write(&beside, bytes).unwrap();
        std::fs::rename(&beside, server.model.join("model.safetensors")).unwrap();
        let failures = server.metric("tilewright_model_load_failures_total");
        until(what, || server.metric("tilewright_model_load_failures_total") > failures);
        assert_eq!(server.post("/laya/v1/systemone", ASK).json(), before, "{what}");
        let health = server.get("/health");
        assert_eq!(health.status, 200);
        assert!(health.json()["models"][0]["error"].is_string(), "{what}");
    }
    std::fs::remove_dir_all(&server.model).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!(server.post("/laya/v1/systemone", ASK).json(), before, "no folder at all");
    server.is_well();
}

/// Cuts a file where it lies, as `cp` over it does for a moment.
fn cut(path: &Path, to: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(to).unwrap();
}

#[test]
fn a_checkpoint_cut_in_place_while_it_is_served_is_told_and_the_answers_stay() {
    let mut server = Server::start(&["--watch", "1"], &[]);
    let weights = server.model.join("model.safetensors");
    let content = std::fs::read(&weights).unwrap();
    let before = server.post("/laya/v1/systemone", ASK).json();
    for to in [content.len() as u64 / 2, 100, 0] {
        cut(&weights, to);
        let failures = server.metric("tilewright_model_load_failures_total");
        // Texts that were not asked before: rows of the embedding table that were never looked at.
        for i in 0..50u32 {
            let letters: String = (0..12).filter_map(|k| char::from_u32(0x21 + (i * 97 + k * 31) % 0x1f00)).collect();
            let body =
                serde_json::json!({"state": letters, "questions": {"q": {"type": "noul", "instructions": "Is it?"}}});
            assert_eq!(server.post("/laya/v1/systemone", body.to_string()).status, 200, "{letters}");
        }
        until("the cut is told", || server.metric("tilewright_model_load_failures_total") > failures);
        assert_eq!(server.post("/laya/v1/systemone", ASK).json(), before, "cut to {to}");
        assert!(server.get("/health").json()["models"][0]["error"].is_string());
    }
    let reloads = server.metric("tilewright_model_reloads_total");
    std::fs::write(&weights, &content).unwrap();
    until("it is whole again", || server.metric("tilewright_model_reloads_total") > reloads);
    assert!(server.get("/health").json()["models"][0]["error"].is_null());
    assert_eq!(server.post("/laya/v1/systemone", ASK).json(), before);
    server.is_well();
}

#[test]
fn a_server_that_is_told_to_watch_nothing_has_nothing_that_panics() {
    let mut server = Server::start(&["--watch", "0", "--unload-after", "0"], &[]);
    std::thread::sleep(Duration::from_millis(300));
    server.is_well();
}

#[test]
fn a_checkpoint_cut_in_place_while_it_is_loaded_does_not_load_and_does_no_more_harm() {
    let mut server = Server::start(&["--watch", "0"], &[]);
    let weights = server.model.join("model.safetensors");
    let content = std::fs::read(&weights).unwrap();
    let before = server.post("/laya/v1/systemone", ASK).json();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                cut(&weights, 0);
                std::fs::write(&weights, &content).unwrap();
                std::thread::sleep(Duration::from_millis(3));
            }
        });
        let end = Instant::now() + Duration::from_secs(6);
        while Instant::now() < end {
            server.signal(rustix::process::Signal::HUP);
            std::thread::sleep(Duration::from_millis(20));
            // A server that is gone answers nothing; the test ends by its words below.
            if server.child.try_wait().unwrap().is_some() {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    server.is_well();
    let (loads, failures) =
        (server.metric("tilewright_model_reloads_total"), server.metric("tilewright_model_load_failures_total"));
    eprintln!("{loads} loads beside the cutting, {failures} that failed");
    assert!(failures > 0.0 && loads + failures > 5.0, "{loads} loads, {failures} failures");
    server.signal(rustix::process::Signal::HUP);
    until("a load that is not disturbed", || server.metric("tilewright_model_reloads_total") > loads);
    assert_eq!(server.post("/laya/v1/systemone", ASK).json(), before);
}

#[test]
fn a_full_disk_under_the_audit_file_costs_no_answer_and_is_told() {
    if !Path::new("/dev/full").exists() {
        eprintln!("NOT TESTED: a full disk; this system has no /dev/full");
        return;
    }
    let mut server = Server::start(&["--audit", "/dev/full"], &[]);
    for _ in 0..20 {
        assert_eq!(server.post("/laya/v1/systemone", ASK).status, 200);
    }
    until("the failures are counted", || server.metric("tilewright_audit_failures_total") >= 20.0);
    assert_eq!(server.metric("tilewright_audit_ok"), 0.0);
    let health = server.get("/health");
    assert_eq!((health.status, &health.json()["audit"]["ok"]), (200, &false.into()));
    server.is_well();
}

#[test]
fn audit_lines_are_whole_and_a_file_moved_away_is_opened_anew() {
    let mut server = Server::start(&["--audit", "audit.jsonl"], &[]);
    let lines = |name: &str| {
        let text = std::fs::read_to_string(server.folder.path().join(name)).unwrap_or_default();
        assert!(text.is_empty() || text.ends_with('\n'));
        text.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()).collect::<Vec<_>>()
    };
    for _ in 0..3 {
        server.post("/laya/v1/systemone", ASK);
    }
    until("three lines", || lines("audit.jsonl").len() == 3);
    let text = std::fs::read_to_string(server.folder.path().join("audit.jsonl")).unwrap();
    assert!(!text.contains("charged") && text.contains("request_sha256"), "{text}");
    std::fs::rename(server.folder.path().join("audit.jsonl"), server.folder.path().join("old.jsonl")).unwrap();
    server.signal(rustix::process::Signal::HUP);
    until("a new file", || server.folder.path().join("audit.jsonl").exists());
    server.post("/laya/v1/systemone", ASK);
    until("a line in it", || lines("audit.jsonl").len() == 1);
    assert_eq!(lines("old.jsonl").len(), 3);
    server.is_well();
}

#[test]
fn a_key_file_that_breaks_keeps_the_keys_that_were() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "me:secret\n").unwrap();
    let server = Server::start(&["--keys", keys.to_str().unwrap()], &[]);
    let ask = || server.post_with("/laya/v1/systemone", "Authorization: Bearer secret\r\n", ASK).status;
    assert_eq!((ask(), server.post("/laya/v1/systemone", ASK).status), (200, 401));
    let mut file = std::fs::File::create(&keys).unwrap();
    file.write_all(b"nonsense without a colon").unwrap();
    server.signal(rustix::process::Signal::HUP);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(ask(), 200);
    std::fs::write(&keys, "me:other\n").unwrap();
    server.signal(rustix::process::Signal::HUP);
    until("the old key is refused", || ask() == 401);
}
