//! Bodies that are none.

use std::io::Write;
use std::time::{Duration, Instant};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::served::{ASK, Server, read};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// A gzip file of `mib` MiB of blanks, which are JSON as long as they last; not made in memory.
fn bomb(mib: usize) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    let blanks = vec![b' '; 1 << 20];
    (0..mib).for_each(|_| encoder.write_all(&blanks).unwrap());
    encoder.finish().unwrap()
}

#[test]
fn bodies_that_are_no_requests_are_the_callers_fault_in_both_dialects() {
    let mut server = Server::start(&[], &[]);
    let deep = format!(r#"{{"state": {}1{}, "questions": {{}}}}"#, "[".repeat(200_000), "]".repeat(200_000));
    let deep_objects =
        format!(r#"{{"state": {}1{}, "questions": {{}}}}"#, r#"{"a":"#.repeat(100_000), "}".repeat(100_000));
    let surrogate = r#"{"state": "\ud83d", "questions": {"q": {"type": "noul", "instructions": "?"}}}"#;
    let bodies: [(&str, &[u8]); 12] = [
        ("nothing", b""),
        ("half a document", b"{\"state\": \"a\""),
        ("two documents", b"{}{}"),
        (
            "invalid UTF-8",
            b"{\"state\": \"\xc3\x28\", \"questions\": {\"q\": {\"type\": \"noul\", \"instructions\": \"?\"}}}",
        ),
        ("UTF-16", b"\xff\xfe{\0}\0"),
        ("a lone surrogate", surrogate.as_bytes()),
        ("a nul", b"{\"state\": \"a\0b\", \"questions\": {}}"),
        ("deep lists", deep.as_bytes()),
        ("deep objects", deep_objects.as_bytes()),
        ("not a number", b"{\"state\": NaN, \"questions\": {}}"),
        ("a list", b"[]"),
        ("a form", b"state=a&questions=b"),
    ];
    for (what, body) in bodies {
        for path in ["/laya/v1/systemone", "/jev/v1/systemone", "/laya/v1/systemone/batch", "/jev/v1/explain"] {
            let answer = server.post(path, body);
            assert!((400..500).contains(&answer.status), "{what} at {path}: {}", answer.status);
            assert!(!answer.json()["detail"].is_null(), "{what} at {path}");
        }
    }
    server.is_well();
}

#[test]
fn of_keys_given_twice_the_last_counts() {
    let mut server = Server::start(&[], &[]);
    let ask = |state: &str| {
        let body = format!(r#"{{{state}, "questions": {{"q": {{"type": "noul", "instructions": "?"}}}}}}"#);
        server.post("/laya/v1/systemone", body).json()
    };
    let twice = ask(r#""state": "first", "state": "second""#);
    assert_eq!(twice, ask(r#""state": "second""#));
    assert_ne!(twice["answers"], ask(r#""state": "first and longer""#)["answers"]);
    server.is_well();
}

#[test]
fn a_gzip_bomb_is_refused_before_it_unfolds() {
    let mut server = Server::start(&[], &[]);
    assert_eq!(server.post_with("/laya/v1/systemone", "Content-Encoding: gzip\r\n", gzip(ASK.as_bytes())).status, 200);
    let before = server.resident();
    // 512 MiB in half a MiB, and a bomb in a bomb.
    let bomb = bomb(512);
    assert!(bomb.len() < 1 << 20, "{}", bomb.len());
    for body in [bomb.clone(), gzip(&bomb)] {
        let answer = server.post_with("/laya/v1/systemone", "Content-Encoding: gzip\r\n", &body);
        assert!((400..500).contains(&answer.status), "{}", answer.status);
    }
    let answer = server.post_with("/laya/v1/systemone", "Content-Encoding: gzip, gzip\r\n", gzip(&bomb));
    assert!((400..500).contains(&answer.status), "{}", answer.status);
    let half = &gzip(ASK.as_bytes())[..20];
    assert!((400..500).contains(&server.post_with("/laya/v1/systemone", "Content-Encoding: gzip\r\n", half).status));
    let grown = server.resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes more");
    server.is_well();
}

#[test]
fn bodies_larger_than_the_limit_are_refused_with_and_without_a_length() {
    let mut server = Server::start(&["--max-body", "10000"], &[]);
    let large = format!(r#"{{"state": "{}"}}"#, "x".repeat(20_000));
    assert_eq!(server.post("/laya/v1/systemone", &large).status, 413);
    let mut stream = server.connect();
    stream.write_all(b"POST /laya/v1/systemone HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
    for _ in 0..30 {
        if stream.write_all(format!("3e8\r\n{}\r\n", "y".repeat(1000)).as_bytes()).is_err() {
            break;
        }
    }
    assert_eq!(read(&mut stream).map(|a| a.status), Some(413));
    // A length that no memory holds.
    let mut stream = server.connect();
    stream
        .write_all(b"POST /laya/v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 18446744073709551615\r\n\r\n")
        .unwrap();
    assert!(read(&mut stream).is_none_or(|a| (400..500).contains(&a.status)));
    server.is_well();
}

#[test]
fn slow_and_half_sent_bodies_are_cut_off_in_time() {
    let mut server = Server::start(&["--read-timeout", "1"], &[]);
    // Half a body, then nothing: with the connection open, and with it closed.
    let mut waiting = Vec::new();
    for i in 0..40 {
        let mut stream = server.connect();
        stream
            .write_all(b"POST /laya/v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{\"state\":")
            .unwrap();
        if i % 2 == 0 {
            waiting.push(stream);
        }
    }
    // Half a head.
    let mut head = server.connect();
    head.write_all(b"POST /laya/v1/systemone HTTP/1.1\r\nHost:").unwrap();
    let began = Instant::now();
    for mut stream in waiting {
        let answer = read(&mut stream);
        assert!(answer.is_none_or(|a| a.status == 408));
    }
    assert!(read(&mut head).is_none_or(|a| (400..500).contains(&a.status)));
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    // A byte now and then keeps nothing alive.
    let mut stream = server.connect();
    stream.write_all(b"POST /laya/v1/systemone HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n").unwrap();
    let began = Instant::now();
    while stream.write_all(b" ").is_ok() && began.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(100));
    }
    // A second, and five more in which what is still being sent is thrown away, so that the refusal can be read.
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    server.is_well();
}
