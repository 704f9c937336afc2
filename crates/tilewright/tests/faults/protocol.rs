//! What clients of every kind say on the wire, beyond the plainest request.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use super::served::{ASK, Server, read};

/// Sends bytes and reads until the connection ends or nothing comes for a while.
fn exchange(server: &Server, bytes: &[u8]) -> String {
    let mut stream = server.connect();
    stream.write_all(bytes).unwrap();
    rest(&mut stream)
}

fn rest(stream: &mut TcpStream) -> String {
    let mut out = Vec::new();
    let _ = stream.read_to_end(&mut out);
    String::from_utf8_lossy(&out).into_owned()
}

fn head_of(path: &str, lines: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{lines}\r\n")
}

#[test]
fn who_asks_before_sending_a_body_is_told_to_go_on_or_not_to() {
    let mut server = Server::start(&[], &[]);
    let mut stream = server.connect();
    let lines = format!("Expect: 100-continue\r\nConnection: close\r\nContent-Length: {}\r\n", ASK.len());
    stream.write_all(head_of("/v1/systemone", &lines).as_bytes()).unwrap();
    let mut told = [0; 25];
    stream.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(ASK.as_bytes()).unwrap();
    assert!(rest(&mut stream).starts_with("HTTP/1.1 200"));
    // Too large by its own word: refused without the body having been asked for.
    let mut stream = server.connect();
    stream
        .write_all(head_of("/v1/systemone", "Expect: 100-continue\r\nContent-Length: 99999999\r\n").as_bytes())
        .unwrap();
    let answer = read(&mut stream).unwrap();
    assert_eq!(answer.status, 413, "{}", answer.head);
    server.is_well();
}

#[test]
fn connections_are_kept_and_requests_on_them_may_come_in_one_piece() {
    let mut server = Server::start(&[], &[]);
    let mut stream = server.connect();
    let one = format!("{}{ASK}", head_of("/laya/v1/systemone", &format!("Content-Length: {}\r\n", ASK.len())));
    let answers: Vec<_> = (0..5)
        .map(|_| {
            stream.write_all(one.as_bytes()).unwrap();
            read(&mut stream).unwrap()
        })
        .collect();
    assert!(answers.iter().all(|a| a.status == 200 && a.body == answers[0].body));
    let last = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let three = exchange(&server, format!("{one}{one}{last}").as_bytes());
    assert_eq!(three.matches("HTTP/1.1 200 OK").count(), 3, "{three}");
    server.is_well();
}

#[test]
fn a_body_in_chunks_is_read_and_one_that_contradicts_itself_is_not() {
    let mut server = Server::start(&[], &[]);
    let (a, b) = ASK.split_at(20);
    let lines = "Transfer-Encoding: chunked\r\nConnection: close\r\n";
    let chunks = format!("{:x};note=1\r\n{a}\r\n{:X}\r\n{b}\r\n0\r\nX-Trailer: 1\r\n\r\n", a.len(), b.len());
    let answer = exchange(&server, format!("{}{chunks}", head_of("/v1/systemone", lines)).as_bytes());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let broken = exchange(&server, format!("{}zz\r\n{ASK}\r\n", head_of("/v1/systemone", lines)).as_bytes());
    assert!(broken.is_empty() || broken.starts_with("HTTP/1.1 4"), "{broken}");
    // Two lengths for one body are how requests are smuggled past a proxy.
    let both = head_of("/v1/systemone", &format!("{lines}Content-Length: 5\r\n"));
    let answer = exchange(&server, format!("{both}{chunks}").as_bytes());
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "one request, whatever it says: {answer}");
    server.is_well();
}

#[test]
fn the_oldest_version_of_http_is_answered_and_its_connection_closed_unless_it_asks() {
    let mut server = Server::start(&[], &[]);
    let body = format!("Content-Length: {}\r\n\r\n{ASK}", ASK.len());
    let answer = exchange(&server, format!("POST /v1/systemone HTTP/1.0\r\n{body}").as_bytes());
    assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
    let mut stream = server.connect();
    for _ in 0..2 {
        stream
            .write_all(format!("POST /v1/systemone HTTP/1.0\r\nConnection: keep-alive\r\n{body}").as_bytes())
            .unwrap();
        let answer = read(&mut stream).unwrap();
        assert!(answer.status == 200 && answer.head.to_ascii_lowercase().contains("connection: keep-alive"));
    }
    server.is_well();
}

#[test]
fn heads_are_told_without_bodies_and_other_methods_which_are_taken() {
    let mut server = Server::start(&[], &[]);
    for path in ["/", "/health", "/metrics", "/openapi.json", "/v1/models"] {
        let answer =
            exchange(&server, format!("HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        assert!(
            answer.ends_with("\r\n\r\n") && answer.to_ascii_lowercase().contains("content-length: "),
            "{path}: {answer}"
        );
    }
    for method in ["OPTIONS", "PUT", "DELETE", "PATCH", "BREW", "GET"] {
        let ask = format!("{method} /v1/systemone HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        let answer = exchange(&server, ask.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 405"), "{method}: {answer}");
        let lower = answer.to_ascii_lowercase();
        assert!(lower.contains("allow: post") && lower.contains("content-type: application/json"), "{answer}");
    }
    server.is_well();
}

#[test]
fn names_of_headers_are_read_in_any_case_and_targets_in_any_form() {
    let server = Server::start(&[], &[("TILEWRIGHT_KEYS", "me:secret")]);
    for (target, name, scheme) in [
        ("/v1/systemone", "AUTHORIZATION", "Bearer"),
        ("/v1/systemone?x=1", "authorization", "bearer"),
        ("http://x/v1/systemone", "aUtHoRiZaTiOn", "BEARER"),
    ] {
        let ask = format!(
            "POST {target} HTTP/1.1\r\nHOST: x\r\nconnection: CLOSE\r\n{name}: {scheme} secret\r\ncontent-LENGTH: {}\r\n\r\n{ASK}",
            ASK.len()
        );
        let answer = exchange(&server, ask.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 200"), "{name} {scheme}: {answer}");
    }
}

#[test]
fn it_serves_on_the_other_kind_of_address_too() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        eprintln!("NOT TESTED: IPv6; this machine has none");
        return;
    }
    let mut server = Server::start(&["--host", "::1"], &[]);
    assert!(server.address.is_ipv6());
    server.is_well();
}

#[test]
fn a_large_body_by_curl_which_asks_first() {
    let mut server = Server::start(&["--max-state-chars", "2000000"], &[]);
    let file = server.folder.path().join("large.json");
    let words = "a word ".repeat(200_000);
    std::fs::write(&file, ASK.replace("My card was charged twice", &words)).unwrap();
    let mut command = Command::new("curl");
    command.args(["-sS", "-v", "--max-time", "100", "--data-binary"]).arg(format!("@{}", file.display()));
    command.arg(format!("{}/v1/systemone", server.url));
    let Ok(output) = command.output() else {
        eprintln!("NOT TESTED: curl; there is none here");
        return;
    };
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("\"refund\""), "{out}\n{said}");
    assert!(said.contains("HTTP/1.1 100 Continue"), "curl waits for it with a body of this size: {said}");
    std::thread::sleep(Duration::from_millis(10));
    server.is_well();
}
