//! The server through real sockets.

mod common;

use std::io::{Read, Write};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use common::{Answer, Running, ask, broken, checkpoint, fake, holds, open, questions, real, request, until};
use serde_json::{Value, json};
use tilewright_decide::PredictOptions;
use tilewright_serve::{Config, Dialect, Keeping, Limits, ModelSource, Timing};

fn plain() -> Running {
    Running::start(Config::default(), vec![real(None, checkpoint())])
}

/// A gate that scoring waits at.
#[derive(Clone, Default)]
struct Held(Arc<(Mutex<bool>, Condvar)>);

impl Held {
    fn source(&self) -> ModelSource {
        let (held, slow) = (self.clone(), holds("SLOW"));
        fake(None, move |rows| {
            if rows.iter().any(&slow) {
                let (lock, changed) = &*held.0;
                let open = lock.lock().unwrap();
                let _open = changed.wait_timeout_while(open, Duration::from_secs(20), |open| !*open).unwrap();
            }
            Ok(())
        })
    }

    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }
}

#[test]
fn each_dialect_has_its_envelope_at_its_own_path_and_the_default_at_the_plain_one() {
    let server = plain();
    let jev = server.post("/v1/systemone", &ask("Send it back"));
    assert_eq!(jev.status, 200);
    assert_eq!(jev.header("content-type"), Some("application/json"));
    assert!(jev.header("x-inference-time-ms").is_some() && jev.header("x-typesafe-request-id").is_some());
    assert_eq!(jev.body, server.post("/jev/v1/systemone", &ask("Send it back")).body);
    let body = jev.json();
    assert_eq!(keys(&body), ["model", "answers", "usage"]);
    assert_eq!(keys(&body["answers"]["refund"]), ["type", "noul"]);
    assert_eq!(keys(&body["answers"]["team"]), ["type", "choice", "probabilities", "confidence"]);
    assert_eq!(keys(&body["answers"]["anger"]), ["type", "score", "legend", "probabilities", "confidence"]);
    assert_eq!(keys(&body["usage"]), ["input_tokens", "output_tokens"]);

    let laya = server.post("/laya/v1/systemone", &ask("Send it back"));
    let mut theirs = laya.json();
    for id in ["team", "anger"] {
        let confidence = theirs["answers"][id].as_object_mut().unwrap().shift_remove("x_jev_confidence").unwrap();
        assert_eq!(confidence, body["answers"][id]["confidence"]);
    }
    let alone = open(checkpoint()).predict(&"Send it back".into(), &questions(), &PredictOptions::default());
    assert_eq!(theirs.to_string(), alone.unwrap().to_json().to_string());
}

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn the_default_dialect_is_configurable() {
    let config = Config { dialect: Dialect::Laya, ..Config::default() };
    let server = Running::start(config, vec![real(None, checkpoint())]);
    assert_eq!(server.post("/v1/systemone", &ask("x")).json()["model"], "laya-rl-agent");
    assert_eq!(server.post("/v1/systemone", &json!({})).status, 400);
    assert!(server.get("/nothing").json()["detail"].is_string());
}

#[test]
fn a_batch_has_results_in_order_and_a_total() {
    let server = plain();
    let body = json!({"states": ["one", "two", {"three": 3}], "questions": questions(), "batch_size": 2});
    let reply = server.post("/v1/systemone/batch", &body).json();
    let mut total = 0;
    for (i, state) in body["states"].as_array().unwrap().iter().enumerate() {
        let alone = server.post("/v1/systemone", &json!({"state": state, "questions": questions()})).json();
        assert_eq!(reply["results"][i], alone);
        total += alone["usage"]["input_tokens"].as_u64().unwrap();
    }
    assert_eq!(reply["total_usage"], json!({"input_tokens": total, "output_tokens": 0}));
}

#[test]
fn an_explanation_shows_the_rows() {
    let server = plain();
    let reply = server.post("/v1/explain", &ask("x")).json();
    assert_eq!(reply["explanations"][0]["segments"][0]["part"], "special");
    assert_eq!(reply["result"], server.post("/v1/systemone", &ask("x")).json());
}

#[test]
fn what_is_around_the_answers_is_there_too() {
    let server = plain();
    let models = server.get("/v1/models").json();
    assert_eq!(models["models"][0]["name"], "jev-latest");
    assert_eq!(models["models"][1]["name"], "model");
    assert_eq!(models["models"][1]["release_date"].as_str().unwrap().len(), 10);
    let page = server.get("/");
    assert!(page.header("content-type").unwrap().starts_with("text/html"));
    assert!(page.header("content-security-policy").unwrap().contains("default-src 'none'"));
    let health = server.get("/health").json();
    assert_eq!((&health["status"], &health["loaded"]), (&json!("ok"), &json!(["model"])));
    server.post("/v1/systemone", &ask("x"));
    let metrics = String::from_utf8(server.get("/metrics").body).unwrap();
    for line in ["tilewright_requests_total{route=\"/v1/systemone\",status=\"200\"} 1", "tilewright_models_loaded 1"] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
}

#[test]
fn the_description_names_every_route_and_only_schemas_that_exist() {
    let server = plain();
    let document = server.get("/openapi.json").json();
    for prefix in ["", "/jev", "/laya"] {
        for path in ["/v1/systemone", "/v1/systemone/batch", "/v1/explain", "/v1/models"] {
            assert!(document["paths"].get(format!("{prefix}{path}")).is_some(), "{prefix}{path}");
        }
    }
    let text = document.to_string();
    for (at, _) in text.match_indices("#/components/schemas/") {
        let name = text[at + 21..].split('"').next().unwrap();
        assert!(document["components"]["schemas"].get(name).is_some(), "{name}");
    }
}

#[test]
fn faults_of_callers_are_4xx_in_json() {
    let server = plain();
    let post = |path: &str, body: &[u8]| server.send("POST", path, &[], body);
    for (answer, status) in [
        (post("/v1/systemone", b"{"), 422),
        (post("/v1/systemone", b"\xff\xff"), 422),
        (post("/v1/systemone", &[b'['; 100_000]), 422),
        (post("/v1/systemone", b""), 422),
        (post("/v1/systemone", &vec![b' '; (2 << 20) + 1]), 413),
        (post("/laya/v1/systemone", b"{"), 400),
        (server.get("/nothing"), 404),
        (server.get("/v1/systemone"), 405),
        (server.send("POST", "/health", &[], b""), 405),
        (server.send("POST", "/v1/systemone", &[("content-encoding", "br")], b"x"), 415),
    ] {
        assert_eq!(answer.status, status, "{answer:?}");
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert!(answer.json().get("detail").is_some());
    }
    let nothing = server.get("/v1/nothing").json();
    assert!(nothing["detail"]["error_type"].is_string() && nothing["detail"]["message"].is_string());
}

#[test]
fn a_client_in_the_midst_of_a_body_that_is_refused_still_reads_why() {
    let server = plain();
    let body = vec![b' '; 8 << 20];
    for (path, status) in [("/v1/systemone", 413), ("/nothing", 404)] {
        for _ in 0..8 {
            // Both would fail on a reset: the write of what is not wanted, and the read of the answer.
            assert_eq!(server.send("POST", path, &[], &body).status, status);
        }
    }
}

#[test]
fn a_body_may_be_packed_and_a_bomb_is_too_large() {
    let server = plain();
    let gzip = |bytes: &[u8]| {
        let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        out.write_all(bytes).unwrap();
        out.finish().unwrap()
    };
    let headers = [("content-encoding", "gzip")];
    let answer = server.send("POST", "/v1/systemone", &headers, &gzip(ask("x").to_string().as_bytes()));
    assert_eq!(answer.body, server.post("/v1/systemone", &ask("x")).body);
    let bomb = gzip(&vec![b' '; 50 << 20]);
    assert_eq!(server.send("POST", "/v1/systemone", &headers, &bomb).status, 413);
}

#[test]
fn keys_are_needed_where_there_are_some_except_for_health() {
    let temp = tempfile::tempdir().unwrap();
    let keys = temp.path().join("keys");
    std::fs::write(&keys, "alice:one\nbob:two:3\n").unwrap();
    let server = Running::start(Config { keys: Some(keys), ..Config::default() }, vec![real(None, checkpoint())]);
    let with =
        |key: &str| server.send("POST", "/v1/systemone", &[("authorization", key)], ask("x").to_string().as_bytes());
    let missing = server.post("/v1/systemone", &ask("x"));
    assert_eq!((missing.status, &missing.json()["detail"]["error_type"]), (401, &json!("authentication_error")));
    assert_eq!(missing.header("www-authenticate"), Some("bearer"));
    assert_eq!(with("Bearer wrong").status, 401);
    assert_eq!(with("Bearer \u{e9}").status, 401);
    assert_eq!(with("Bearer one").status, 200);
    for path in ["/metrics", "/v1/models", "/openapi.json", "/nothing"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    let known = server.send("GET", "/health", &[("authorization", "Bearer one")], b"");
    assert_eq!(known.json()["loaded"], json!(["model"]));
    let statuses: Vec<u16> = (0..6).map(|_| with("Bearer two").status).collect();
    assert_eq!(statuses[..3], [200; 3]);
    assert!(statuses.contains(&429));
    assert_eq!(server.post("/laya/v1/systemone", &ask("x")).json()["detail"], "invalid or missing bearer token");
}

#[test]
fn a_full_server_answers_503_at_once_and_loses_nothing_it_accepted() {
    let held = Held::default();
    let config = Config { limits: Limits { concurrent: 2, ..Limits::default() }, ..Config::default() };
    let server = Running::start(config, vec![held.source()]);
    let mut accepted: Vec<_> = (0..2)
        .map(|_| {
            let mut stream = server.connect();
            stream.write_all(&request("POST", "/v1/systemone", &[], ask("SLOW").to_string().as_bytes())).unwrap();
            stream
        })
        .collect();
    until("both are in", || server.state.service.in_flight() == 2);
    let start = Instant::now();
    let refused = server.post("/v1/systemone", &ask("x"));
    assert!(start.elapsed() < Duration::from_millis(500));
    assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json()["detail"]["error_type"], "overloaded_error");
    held.open();
    for stream in &mut accepted {
        assert_eq!(Answer::read(stream).status, 200);
    }
}

#[test]
fn a_request_may_ask_for_less_time() {
    let held = Held::default();
    let server = Running::start(Config::default(), vec![held.source()]);
    let start = Instant::now();
    let answer = server.send("POST", "/v1/systemone", &[("x-timeout-ms", "60")], ask("SLOW").to_string().as_bytes());
    assert_eq!((answer.status, &answer.json()["detail"]["error_type"]), (503, &json!("timeout_error")));
    assert!(start.elapsed() < Duration::from_secs(5));
    held.open();
}

#[test]
fn a_client_that_leaves_gives_its_place_back_before_the_model_is_done() {
    let held = Held::default();
    let server = Running::start(Config::default(), vec![held.source()]);
    let mut stream = server.connect();
    stream.write_all(&request("POST", "/v1/systemone", &[], ask("SLOW").to_string().as_bytes())).unwrap();
    until("it is in", || server.state.service.in_flight() == 1);
    drop(stream);
    until("its place is free", || server.state.service.in_flight() == 0);
    held.open();
    assert_eq!(server.post("/v1/systemone", &ask("x")).status, 200);
}

#[test]
fn a_failing_model_is_a_500_without_its_words() {
    let bad = holds("POISON");
    let source = fake(None, move |rows| if rows.iter().any(&bad) { Err(broken()) } else { Ok(()) });
    let server = Running::start(Config::default(), vec![source]);
    let answer = server.post("/v1/systemone", &ask("POISON"));
    assert_eq!(answer.status, 500);
    assert!(!String::from_utf8_lossy(&answer.body).contains("planned"));
    assert_eq!(server.post("/v1/systemone", &ask("water")).status, 200);
}

#[test]
fn a_stop_lets_what_is_under_way_finish_and_nothing_new_in() {
    let held = Held::default();
    let mut server = Running::start(Config::default(), vec![held.source()]);
    let mut kept = server.connect();
    kept.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    let mut stream = server.connect();
    stream.write_all(&request("POST", "/v1/systemone", &[], ask("SLOW").to_string().as_bytes())).unwrap();
    until("it is in", || server.state.service.in_flight() == 1);
    server.tell_to_stop();
    until("it is stopping", || server.state.service.is_draining());
    until("nothing new is let in", || std::net::TcpStream::connect(server.address).is_err());
    held.open();
    assert_eq!(Answer::read(&mut stream).status, 200);
    server.wait();
    let mut rest = Vec::new();
    let _ = kept.read_to_end(&mut rest);
    assert!(rest.starts_with(b"HTTP/1.1 200"), "the idle connection was closed in order");
}

#[test]
fn a_stop_waits_no_longer_than_it_may() {
    let held = Held::default();
    let timing = Timing { drain: Duration::from_millis(100), ..Timing::default() };
    let mut server = Running::start(Config { timing, ..Config::default() }, vec![held.source()]);
    let mut stream = server.connect();
    stream.write_all(&request("POST", "/v1/systemone", &[], ask("SLOW").to_string().as_bytes())).unwrap();
    until("it is in", || server.state.service.in_flight() == 1);
    let start = Instant::now();
    server.tell_to_stop();
    std::thread::sleep(Duration::from_millis(300));
    held.open();
    server.wait();
    assert!(start.elapsed() < Duration::from_secs(10));
}

fn quick() -> Config {
    let ms = Duration::from_millis;
    let timing = Timing { header: ms(200), body: ms(200), write: ms(200), idle: ms(200), ..Timing::default() };
    Config { timing, ..Config::default() }
}

/// Reads until the connection ends; how long that took.
fn until_closed(stream: &mut std::net::TcpStream) -> (Vec<u8>, Duration) {
    let start = Instant::now();
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    (bytes, start.elapsed())
}

#[test]
fn slow_headers_slow_bodies_and_silent_connections_are_cut_off() {
    let server = Running::start(quick(), vec![real(None, checkpoint())]);
    let mut headers = server.connect();
    headers.write_all(b"GET /health HTTP/1.1\r\nhost:").unwrap();
    let mut body = server.connect();
    body.write_all(b"POST /v1/systemone HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"state\"").unwrap();
    let mut silent = server.connect();
    let mut again = server.connect();
    again.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").unwrap();
    for (name, stream, starts) in [
        ("headers", &mut headers, ""),
        ("body", &mut body, "HTTP/1.1 408"),
        ("silent", &mut silent, ""),
        ("kept alive", &mut again, "HTTP/1.1 200"),
    ] {
        let (bytes, took) = until_closed(stream);
        assert!(took < Duration::from_secs(10), "{name}");
        assert!(String::from_utf8_lossy(&bytes).starts_with(starts), "{name}: {}", String::from_utf8_lossy(&bytes));
    }
    assert_eq!(server.post("/v1/systemone", &ask("x")).status, 200);
}

#[test]
fn a_half_sent_body_harms_nobody() {
    let server = plain();
    for _ in 0..20 {
        let mut stream = server.connect();
        stream.write_all(b"POST /v1/systemone HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"state\"").unwrap();
        stream.shutdown(std::net::Shutdown::Both).unwrap();
    }
    assert_eq!(server.post("/v1/systemone", &ask("x")).status, 200);
    until("all are gone", || server.state.connections.count() <= 1);
}

#[test]
fn idle_connections_make_room_for_who_asks() {
    let config = Config { limits: Limits { connections: 20, ..Limits::default() }, ..Config::default() };
    let server = Running::start(config, vec![real(None, checkpoint())]);
    let idle: Vec<_> = (0..200).map(|_| server.connect()).collect();
    assert_eq!(server.post("/v1/systemone", &ask("x")).status, 200);
    assert!(server.state.connections.count() <= 21);
    assert!(server.state.service.metrics.evicted.get() >= 180);
    drop(idle);
}

#[test]
fn answers_are_recorded_with_hashes_and_without_the_text_of_the_request() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("audit.jsonl");
    let config = Config { audit: Some(path.clone()), ..Config::default() };
    let server = Running::start(config, vec![real(None, checkpoint())]);
    let answer = server.post("/v1/systemone", &ask("a very private text"));
    server.post("/v1/systemone", &json!({}));
    server.state.audit.as_ref().unwrap().flush();
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 1, "what was refused has no answer to record");
    assert!(!text.contains("private"));
    let record: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(record["id"], answer.header("x-request-id").unwrap());
    assert_eq!(record["request_sha256"].as_str().unwrap().len(), 64);
    assert_eq!(record["results"][0]["model_sha256"].as_str().unwrap().len(), 64);
    assert_eq!(record["results"][0]["answers"]["refund"]["noul"], answer.json()["answers"]["refund"]["noul"]);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_of_the_audit_file_is_told_and_answers_go_on() {
    let config = Config { audit: Some("/dev/full".into()), ..Config::default() };
    let server = Running::start(config, vec![real(None, checkpoint())]);
    for _ in 0..3 {
        assert_eq!(server.post("/v1/systemone", &ask("x")).status, 200);
    }
    server.state.audit.as_ref().unwrap().flush();
    let health = server.get("/health").json();
    assert_eq!((&health["status"], &health["audit"]["ok"]), (&json!("ok"), &json!(false)));
    assert_eq!(health["audit"]["failures"], 3);
    let metrics = String::from_utf8(server.get("/metrics").body).unwrap();
    assert!(metrics.contains("tilewright_audit_ok 0") && metrics.contains("tilewright_audit_failures_total 3"));
}

#[test]
fn several_checkpoints_are_chosen_by_language_and_routing_is_told_in_laya_only() {
    let sources = ["english", "multilingual"].map(|name| real(Some(name), checkpoint())).to_vec();
    let server = Running::start_with(Config::default(), sources, Keeping::default());
    let laya = server.post("/laya/v1/systemone", &ask("the card is not here")).json();
    assert_eq!(laya["routing"]["model"], "english");
    let jev = server.post("/v1/systemone", &ask("支付失败"));
    assert_eq!(
        (jev.header("x-tilewright-model"), &jev.json()["model"]),
        (Some("multilingual"), &json!("multilingual"))
    );
    assert!(jev.json().get("routing").is_none());
    let unknown = server.post("/v1/systemone", &json!({"state": "x", "questions": questions(), "task": "nothing"}));
    assert_eq!(unknown.status, 422);
}

#[test]
fn a_server_that_cannot_load_its_checkpoint_ends_with_the_reason() {
    let temp = tempfile::tempdir().unwrap();
    let source = real(None, &temp.path().join("absent"));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let error = runtime.block_on(async {
        let mut config = Config::default();
        config.bind.set_port(0);
        let server = tilewright_serve::Server::bind(config, vec![source], &Keeping::default(), 1024).await.unwrap();
        server.run(std::future::pending()).await.unwrap_err()
    });
    assert!(error.to_string().contains("absent"), "{error}");
}
