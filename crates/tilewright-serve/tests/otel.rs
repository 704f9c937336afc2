//! Spans as a collector gets them: a receiver of OTLP over HTTP that reads protobuf by hand.
#![cfg(feature = "otel")]

mod common;

use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use common::{Running, ask, checkpoint, real};
use tilewright_serve::Config;

/// One field of a protobuf message.
#[derive(Clone, Debug)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

/// The fields of a message, in their order.
fn fields(mut bytes: &[u8]) -> Vec<(u64, Field)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = bytes[0];
            *bytes = &bytes[1..];
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                break;
            }
        }
        value
    }
    fn fixed<const N: usize>(bytes: &mut &[u8]) -> [u8; N] {
        let (head, rest) = bytes.split_at(N);
        *bytes = rest;
        head.try_into().unwrap()
    }
    let mut all = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let field = match key & 7 {
            0 => Field::Number(varint(&mut bytes)),
            1 => Field::Number(u64::from_le_bytes(fixed(&mut bytes))),
            5 => Field::Number(u32::from_le_bytes(fixed(&mut bytes)).into()),
            2 => {
                let n = varint(&mut bytes) as usize;
                let (head, rest) = bytes.split_at(n);
                bytes = rest;
                Field::Bytes(head.to_vec())
            }
            other => panic!("wire type {other}"),
        };
        all.push((key >> 3, field));
    }
    all
}

fn parts(bytes: &[u8], number: u64) -> Vec<Vec<u8>> {
    let of = |(n, field): (u64, Field)| match field {
        Field::Bytes(bytes) if n == number => Some(bytes),
        _ => None,
    };
    fields(bytes).into_iter().filter_map(of).collect()
}

fn number(bytes: &[u8], number: u64) -> u64 {
    let of = |(n, field): (u64, Field)| match field {
        Field::Number(value) if n == number => Some(value),
        _ => None,
    };
    fields(bytes).into_iter().find_map(of).unwrap_or(0)
}

fn text(bytes: &[u8], number: u64) -> String {
    parts(bytes, number).first().map(|b| String::from_utf8(b.clone()).unwrap()).unwrap_or_default()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[derive(Clone, Debug)]
struct Span {
    trace: String,
    id: String,
    parent: String,
    name: String,
    kind: u64,
    times: (u64, u64),
    attributes: Vec<(String, Vec<u8>)>,
    failed: bool,
}

impl Span {
    fn read(bytes: &[u8]) -> Span {
        let id = |n: u64| parts(bytes, n).first().map(|b| hex(b)).unwrap_or_default();
        Span {
            trace: id(1),
            id: id(2),
            parent: id(4),
            name: text(bytes, 5),
            kind: number(bytes, 6),
            times: (number(bytes, 7), number(bytes, 8)),
            attributes: parts(bytes, 9).iter().map(|a| (text(a, 1), parts(a, 2).remove(0))).collect(),
            failed: parts(bytes, 15).first().is_some_and(|status| number(status, 3) == 2),
        }
    }

    fn value(&self, key: &str) -> &[u8] {
        &self.attributes.iter().find(|(k, _)| k == key).unwrap_or_else(|| panic!("no {key} in {self:?}")).1
    }

    fn text(&self, key: &str) -> String {
        text(self.value(key), 1)
    }

    fn integer(&self, key: &str) -> u64 {
        number(self.value(key), 3)
    }

    fn double(&self, key: &str) -> f64 {
        f64::from_bits(number(self.value(key), 4))
    }
}

/// A collector: its address, and the bodies that it got.
fn collector() -> (String, Receiver<Vec<u8>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}/v1/traces", listener.local_addr().unwrap());
    let (tell, told) = channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, tell) = (stream.unwrap(), tell.clone());
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let mut chunk = [0; 4096];
                loop {
                    if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
                        let head = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
                        assert!(
                            head.starts_with("post /v1/traces ") && head.contains("application/x-protobuf"),
                            "{head}"
                        );
                        let length = head.lines().find_map(|l| l.strip_prefix("content-length:")).unwrap();
                        let all = end + 4 + length.trim().parse::<usize>().unwrap();
                        if bytes.len() >= all {
                            let rest = bytes.split_off(all);
                            let _ = tell.send(bytes.split_off(end + 4));
                            bytes = rest;
                            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
                            continue;
                        }
                    }
                    match stream.read(&mut chunk) {
                        Ok(n) if n > 0 => bytes.extend_from_slice(&chunk[..n]),
                        _ => return,
                    }
                }
            });
        }
    });
    (address, told)
}

/// All spans of a server that has stopped, and the bytes in which they came.
fn received(told: &Receiver<Vec<u8>>) -> (Vec<Span>, Vec<u8>) {
    let (mut spans, mut all) = (Vec::new(), Vec::new());
    while let Ok(body) = told.recv_timeout(Duration::from_millis(500)) {
        for resource in parts(&body, 1) {
            for scope in parts(&resource, 2) {
                spans.extend(parts(&scope, 2).iter().map(|span| Span::read(span)));
            }
        }
        all.extend(body);
    }
    (spans, all)
}

fn traced(endpoint: &str) -> Running {
    Running::start(Config { otlp: Some(endpoint.to_owned()), ..Config::default() }, vec![real(None, checkpoint())])
}

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[test]
fn a_request_is_a_span_of_the_callers_trace_and_says_where_its_time_went() {
    let (endpoint, told) = collector();
    let mut server = traced(&endpoint);
    let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
    let body = ask("a very private text").to_string();
    let answer = server.send("POST", "/laya/v1/systemone", &[("traceparent", &parent)], body.as_bytes());
    assert_eq!(answer.status, 200);
    server.tell_to_stop();
    server.wait();
    let (spans, bytes) = received(&told);
    let span = spans.iter().find(|s| s.name == "POST /v1/systemone").unwrap_or_else(|| panic!("{spans:?}"));
    assert_eq!((span.trace.as_str(), span.parent.as_str(), span.kind), (TRACE, "b7ad6b7169203331", 2));
    assert_eq!(
        (span.text("http.request.method").as_str(), span.text("http.route").as_str()),
        ("POST", "/v1/systemone")
    );
    assert_eq!(span.integer("http.response.status_code"), 200);
    assert_eq!(span.text("tilewright.request_id"), answer.header("x-request-id").unwrap());
    let work = spans.iter().find(|s| s.name == "decide").unwrap();
    assert_eq!((&work.trace, &work.parent, work.kind), (&span.trace, &span.id, 1));
    assert!(work.times.0 >= span.times.0 && work.times.1 <= span.times.1 && work.times.0 < work.times.1);
    assert!(work.double("tilewright.compute_seconds") > 0.0 && work.double("tilewright.queue_seconds") >= 0.0);
    assert!(work.integer("tilewright.tokens") > 10 && work.integer("tilewright.packs") == 1);
    assert_eq!(work.text("tilewright.model"), "model");
    let bytes = String::from_utf8_lossy(&bytes).into_owned();
    assert!(bytes.contains("tilewright") && !bytes.contains("private"), "no word of a request leaves the server");
}

#[test]
fn a_request_without_a_trace_begins_one_and_one_that_is_not_sampled_stays_out() {
    let (endpoint, told) = collector();
    let mut server = traced(&endpoint);
    assert_eq!(server.post("/v1/systemone", &serde_json::json!({})).status, 422);
    let unsampled = format!("00-{TRACE}-b7ad6b7169203331-00");
    server.send("GET", "/v1/models", &[("traceparent", &unsampled)], b"");
    server.send("GET", "/v1/models", &[("traceparent", "nonsense")], b"");
    server.send("BREW", "/tea/for/two", &[], b"");
    server.tell_to_stop();
    server.wait();
    let (spans, _) = received(&told);
    let of = |name: &str| spans.iter().filter(|s| s.name == name).collect::<Vec<_>>();
    let refused = of("POST /v1/systemone");
    assert!(refused.len() == 1 && refused[0].parent.is_empty() && refused[0].trace.len() == 32, "{refused:?}");
    assert!(refused[0].integer("http.response.status_code") == 422 && !refused[0].failed);
    assert_eq!(of("GET /v1/models").len(), 1, "the unsampled one is not among them");
    assert_eq!(of("_OTHER other").len(), 1, "names stay few");
    assert!(spans.iter().all(|s| s.trace != TRACE));
}

#[test]
fn a_collector_that_is_not_there_costs_no_answer() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut server = traced(&format!("http://{gone}/v1/traces"));
    for _ in 0..20 {
        assert_eq!(server.post("/v1/systemone", &ask("x")).status, 200);
    }
    server.tell_to_stop();
    server.wait();
}
