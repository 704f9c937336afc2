//! Clients that leave, stay for nothing, or do not read.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::served::{ASK, Server, read};

#[test]
fn clients_that_are_killed_in_the_middle_leave_nothing_behind() {
    let mut server = Server::start(&[], &[]);
    let mix = server.folder.path().join("mix.jsonl");
    let long = format!(
        r#"{{"state": "{}", "questions": {{"q": {{"type": "noul", "instructions": "?"}}}}}}"#,
        "word ".repeat(2000)
    );
    std::fs::write(&mix, format!("{ASK}\n{long}\n")).unwrap();
    for _ in 0..4 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args([
            "bench",
            "load",
            &format!("{}/v1/systemone", server.url),
            "--closed",
            "16",
            "--seconds",
            "30",
            "--mix",
        ]);
        let mut client = command.arg(&mix).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(400));
        // SIGKILL: nothing is said, nothing is closed in order.
        client.kill().unwrap();
        client.wait().unwrap();
        server.is_well();
    }
}

#[test]
fn a_client_that_does_not_read_is_let_go() {
    let mut server = Server::start(&["--write-timeout", "1", "--idle-timeout", "3"], &[]);
    let mut streams: Vec<TcpStream> = (0..8).map(|_| server.connect()).collect();
    // So many requests at once that their answers fill every buffer on the way.
    let asked =
        format!("POST /laya/v1/explain HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{ASK}", ASK.len()).repeat(400);
    for stream in &mut streams {
        stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        let _ = stream.write_all(asked.as_bytes());
    }
    server.is_well();
    std::thread::sleep(Duration::from_secs(2));
    server.is_well();
}

/// A request whose answer, 6 MB, no buffer of the system holds.
fn large() -> String {
    let option = |i: usize, k: usize| format!("{i} {k} {}", "long name ".repeat(80));
    let question = |i: usize| {
        let criteria: Vec<String> = (0..100).map(|k| option(i, k)).collect();
        (format!("q{i}"), json!({"type": "choice", "instructions": "Which?", "criteria": criteria}))
    };
    let questions: serde_json::Map<_, _> = (0..5).map(question).collect();
    let states: Vec<String> = (0..16).map(|i| format!("state {i}")).collect();
    json!({"states": states, "questions": questions}).to_string()
}

#[test]
fn clients_that_take_a_byte_now_and_then_are_cut_off_and_nobody_waits_for_them() {
    let mut server = Server::start(&["--write-timeout", "2"], &[]);
    let body = large();
    let whole = server.post("/laya/v1/systemone/batch", &body);
    assert_eq!(whole.status, 200, "{}", String::from_utf8_lossy(&whole.body));
    let before = server.resident();
    let ask =
        format!("POST /laya/v1/systemone/batch HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let mut streams: Vec<TcpStream> = (0..6).map(|_| server.connect()).collect();
    for stream in &mut streams {
        stream.write_all(ask.as_bytes()).unwrap();
    }
    let open = |server: &Server| server.metric("tilewright_connections_open");
    let end = Instant::now() + Duration::from_secs(60);
    // The one connection that remains is the one that asks.
    while open(&server) > 1.0 {
        assert!(Instant::now() < end, "{} are still open", open(&server));
        for stream in &mut streams {
            let _ = stream.read(&mut [0]);
        }
        assert_eq!(server.post("/laya/v1/systemone", ASK).status, 200, "others are answered meanwhile");
        std::thread::sleep(Duration::from_millis(200));
    }
    // What the system had taken already may still be read; the answer is never whole.
    for stream in &mut streams {
        let mut out = Vec::new();
        let _ = stream.read_to_end(&mut out);
        assert!(out.len() < whole.body.len(), "{} of {} bytes", out.len(), whole.body.len());
    }
    let grown = server.resident().saturating_sub(before);
    assert!(grown < 200 << 20, "{grown} bytes are held on to");
    eprintln!(
        "an answer of {} bytes, {} MiB more resident after six that did not take theirs",
        whole.body.len(),
        grown >> 20
    );
    server.is_well();
}

#[test]
fn a_client_that_reads_slowly_but_in_time_gets_all_of_it() {
    let mut server = Server::start(&["--write-timeout", "20"], &[]);
    let body = large();
    let whole = server.post("/laya/v1/systemone/batch", &body).body;
    let mut stream = server.connect();
    let ask = format!(
        "POST /laya/v1/systemone/batch HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(ask.as_bytes()).unwrap();
    let mut out = Vec::new();
    let mut chunk = vec![0; whole.len() / 20];
    loop {
        match stream.read(&mut chunk).unwrap() {
            0 => break,
            n => out.extend_from_slice(&chunk[..n]),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(out.ends_with(&whole), "{} of {} bytes", out.len(), whole.len());
    server.is_well();
}

#[test]
fn ten_thousand_idle_connections_shut_nobody_out() {
    const MANY: usize = 10_000;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.maximum.is_some_and(|m| m < MANY as u64 + 500) {
        eprintln!("NOT TESTED: 10,000 connections; this system opens {:?} files at most", limit.maximum);
        return;
    }
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    // Once with room for all of them, once with the usual limit, where idle ones make room.
    for (most, many) in [("12000", MANY), ("1024", MANY / 3)] {
        let mut server = Server::start(&["--max-connections", most], &[]);
        let before = server.resident();
        let mut idle = Vec::with_capacity(many);
        for i in 0..many {
            match TcpStream::connect_timeout(&server.address, Duration::from_secs(10)) {
                Ok(mut stream) => {
                    // Some have asked once, some have begun to ask, most never say a word.
                    if i % 10 == 0 {
                        let _ = stream.write_all(b"GET /health HTTP/1.1\r\n");
                    }
                    idle.push(stream);
                }
                Err(e) => panic!("connection {i}: {e}"),
            }
        }
        let began = Instant::now();
        assert_eq!(server.post("/laya/v1/systemone", ASK).status, 200);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        let grown = server.resident().saturating_sub(before);
        assert!(grown < 400 << 20, "{most}: {grown} bytes for {many} connections");
        eprintln!(
            "{most} at most: {many} connections opened, {} KiB each, an answer after {:?}",
            grown / 1024 / many as u64,
            began.elapsed()
        );
        drop(idle);
        server.is_well();
    }
}

/// A table of files that grows while threads share it stops the thread that accepts, on a busy machine for a tenth of a second and more.
#[cfg(target_os = "linux")]
#[test]
fn the_systems_table_of_files_has_room_for_all_connections_from_the_start() {
    let server = Server::start(&["--max-connections", "500"], &[]);
    let size = server.status("FDSize");
    assert!(size >= 500, "{size}");
}

#[test]
fn a_connection_that_ends_at_once_or_speaks_something_else_is_nothing() {
    let mut server = Server::start(&["--read-timeout", "1"], &[]);
    for _ in 0..500 {
        drop(server.connect());
    }
    for bytes in [
        &b"\x16\x03\x01\x02\x00\x01\x00"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0\0\0\0",
        b"GET /health\r\n\r\n",
    ] {
        let mut stream = server.connect();
        stream.write_all(bytes).unwrap();
        let mut out = Vec::new();
        let _ = stream.read_to_end(&mut out);
        assert!(!out.starts_with(b"HTTP/1.1 5"), "{}", String::from_utf8_lossy(&out));
    }
    // A head that never ends, and one of ten thousand lines.
    let mut stream = server.connect();
    let _ = stream.write_all(format!("GET /health HTTP/1.1\r\n{}\r\n", "X-A: b\r\n".repeat(10_000)).as_bytes());
    assert!(read(&mut stream).is_none_or(|a| (400..500).contains(&a.status)));
    let mut stream = server.connect();
    let _ = stream.write_all(format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(1 << 20)).as_bytes());
    assert!(read(&mut stream).is_none_or(|a| (400..500).contains(&a.status)));
    // Requests that two readers would cut in different places.
    let mut stream = server.connect();
    let _ = stream
        .write_all(b"POST /v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}");
    assert!(read(&mut stream).is_none_or(|a| (400..500).contains(&a.status)));
    server.is_well();
}
