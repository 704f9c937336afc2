//! The Model Context Protocol as clients speak it: JSON-RPC in lines on standard input and output, and as posts to `/mcp`.
#![cfg(unix)]

#[path = "../served/mod.rs"]
mod served;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::{Value, json};
use served::{ASK, Server, demo};

/// A conversation over standard input and output.
struct Conversation {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<String>,
    next: u64,
    folder: tempfile::TempDir,
}

impl Conversation {
    fn start() -> Conversation {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("demo");
        demo(&model, 1337);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args(["--threads", "1", "mcp", "--model"]).arg(&model);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let to = child.stdin.take();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let (tell, from) = channel();
        std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| tell.send(line)));
        Conversation { child, to, from, next: 0, folder }
    }

    fn say(&mut self, message: &Value) {
        writeln!(self.to.as_mut().unwrap(), "{message}").unwrap();
    }

    fn hear(&mut self) -> Value {
        let line = self.from.recv_timeout(Duration::from_secs(30)).expect("an answer");
        serde_json::from_str(&line)
            .unwrap_or_else(|e| panic!("{e}: nothing but messages may stand on standard output: {line}"))
    }

    /// A request and its answer.
    fn ask(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        self.say(&json!({"jsonrpc": "2.0", "id": self.next, "method": method, "params": params}));
        let answer = self.hear();
        assert_eq!((answer["jsonrpc"].as_str(), answer["id"].as_u64()), (Some("2.0"), Some(self.next)), "{answer}");
        answer
    }

    fn greet(&mut self) -> Value {
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}});
        let answer = self.ask("initialize", params)["result"].clone();
        self.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        answer
    }

    /// What a tool says, and whether it is an error.
    fn tool(&mut self, name: &str, arguments: Value) -> (Value, bool) {
        let answer = self.ask("tools/call", json!({"name": name, "arguments": arguments}));
        told(&answer)
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn told(answer: &Value) -> (Value, bool) {
    let result = &answer["result"];
    let text = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}"));
    (serde_json::from_str(text).unwrap(), result["isError"] == true)
}

fn ask() -> Value {
    serde_json::from_str(ASK).unwrap()
}

#[test]
fn a_client_is_greeted_and_told_of_the_tools() {
    let mut talk = Conversation::start();
    let greeting = talk.greet();
    assert_eq!(
        (greeting["serverInfo"]["name"].as_str(), &greeting["protocolVersion"]),
        (Some("tilewright"), &json!("2025-06-18"))
    );
    assert!(
        greeting["capabilities"]["tools"].is_object()
            && greeting["instructions"].as_str().unwrap().contains("laya_predict")
    );
    let tools = talk.ask("tools/list", json!({}))["result"]["tools"].clone();
    let names: Vec<&str> = tools.as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    // Those of the laya package's server.
    let all = "predict predict_batch predict_long route route_batch decide shortlist tournament preset status";
    assert_eq!(names, all.split(' ').map(|n| format!("laya_{n}")).collect::<Vec<_>>());
    assert!(tools.as_array().unwrap().iter().all(|t| t["inputSchema"]["type"] == "object"));
    assert_eq!(talk.ask("ping", json!({}))["result"], json!({}));
}

#[test]
fn every_tool_answers() {
    let mut talk = Conversation::start();
    talk.greet();
    let (answer, failed) = talk.tool("laya_predict", ask());
    assert!(!failed && answer["answers"]["refund"]["noul"].is_number(), "{answer}");
    // The same numbers as the command line's.
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args([
        "decide",
        "--json",
        "--state",
        "My card was charged twice",
        "--questions",
        "q.json",
        "--model",
        "demo",
    ]);
    std::fs::write(talk.folder.path().join("q.json"), ask()["questions"].to_string()).unwrap();
    let output = command.current_dir(talk.folder.path()).output().unwrap();
    let decided: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer["answers"]["refund"], decided["answers"]["refund"]);

    let mut other = ask();
    other["state"] = json!({"text": "another", "n": 1.5});
    let (batch, failed) =
        talk.tool("laya_predict_batch", json!({"requests": [ask(), other, {"state": "x"}], "min_confidence": 0.5}));
    assert!(!failed && batch["results"].as_array().unwrap().len() == 3, "{batch}");
    assert!(batch["results"][0]["answers"]["refund"]["abstention"].is_string(), "{batch}");
    assert!(batch["results"][2]["error"].is_string(), "one that cannot be answered says so in its place");

    let long = json!({"state": "many words ".repeat(800), "questions": ask()["questions"], "window": 64});
    let (answer, failed) = talk.tool("laya_predict_long", long);
    assert!(!failed && answer["usage"]["windows"].as_u64() > Some(1), "{answer}");

    let (route, failed) = talk.tool("laya_route", json!({"state": "hello"}));
    assert!(!failed && route["reason"].is_string(), "{route}");

    let requests = json!({"requests": [{"state": "hello"}, {"state": {"text": "Hallo"}}, {"questions": {}}]});
    let (routes, failed) = talk.tool("laya_route_batch", requests);
    assert!(!failed && routes["decisions"][1]["reason"].is_string(), "{routes}");
    assert!(routes["decisions"][2]["message"].as_str().unwrap().contains("state"), "{routes}");
    assert_eq!(routes["model_counts"], json!({"model": 2}));

    let queues: Vec<String> = (0..120).map(|i| format!("queue {i}")).collect();
    let many = json!({"queue": {"type": "choice", "instructions": "Which?", "criteria": queues, "option_order": (0..120).collect::<Vec<_>>()}});
    let (short, failed) = talk.tool("laya_shortlist", json!({"state": "queue 7", "questions": many, "k": 5}));
    assert!(!failed, "{short}");
    let kept = short["shortlist"]["queue"]["labels"].as_array().unwrap();
    assert!(kept.len() == 5 && kept.contains(&short["answers"]["queue"]["choice"]), "{short}");
    assert_eq!((&short["shortlist"]["queue"]["k"], &short["shortlist"]["queue"]["n"]), (&json!(5), &json!(120)));
    assert!(short["warnings"][0].as_str().unwrap().contains("option_order"), "{short}");
    let (won, failed) = talk.tool("laya_tournament", json!({"state": "queue 7", "questions": many, "group_size": 6}));
    assert!(!failed, "{won}");
    let finalists = won["tournament"]["queue"]["labels"].as_array().unwrap();
    assert!(finalists.len() <= 6 && finalists.contains(&won["answers"]["queue"]["choice"]), "{won}");
    assert_eq!((&won["tournament"]["queue"]["n"], &won["tournament"]["queue"]["rounds"]), (&json!(120), &json!(2)));

    let schema = json!({"type": "object", "properties": {"team": {"enum": ["billing", "support"]}, "urgent": {"type": "boolean"}}});
    let (decided, failed) = talk.tool("laya_decide", json!({"state": "My card was charged twice", "schema": schema}));
    let text = decided.to_string();
    assert!(
        !failed && text.contains("\"urgent\"") && (text.contains("billing") || text.contains("support")),
        "{decided}"
    );

    for state in [json!("Where is my parcel?"), json!({"message": "Where is my parcel?"})] {
        let (answer, failed) = talk.tool("laya_preset", json!({"preset": "triage", "state": state}));
        assert!(!failed && answer["answers"].as_object().unwrap().len() == 5, "{answer}");
    }
    let (status, failed) = talk.tool("laya_status", json!({}));
    assert!(!failed && status["models"][0]["loaded"] == true, "{status}");
}

#[test]
fn what_a_caller_did_wrong_is_told_in_the_result() {
    let mut talk = Conversation::start();
    talk.greet();
    for (name, arguments, words) in [
        ("laya_predict", json!({"questions": {}}), "state"),
        ("laya_predict", json!({"state": "a", "questions": {"q": {"type": "maybe", "instructions": "?"}}}), "type"),
        ("laya_predict", json!({"state": "a", "questions": ask()["questions"], "max_len": 1.5}), "max_len"),
        ("laya_predict_batch", json!({"requests": []}), "requests"),
        ("laya_predict_long", json!({"state": "a", "questions": ask()["questions"], "window": 0}), "window"),
        (
            "laya_decide",
            json!({"state": "a", "schema": {"type": "object", "properties": {"x": {"type": "string"}}}}),
            "x",
        ),
        ("laya_preset", json!({"preset": "horoscope", "state": "a"}), "triage"),
        ("laya_route", json!({}), "state"),
        ("laya_route_batch", json!({"requests": []}), "requests"),
        ("laya_shortlist", json!({"state": "a", "questions": ask()["questions"], "k": 0}), "k"),
        ("laya_tournament", json!({"state": "a", "questions": ask()["questions"], "group_size": 1}), "group_size"),
    ] {
        let (answer, failed) = talk.tool(name, arguments);
        assert!(
            failed && answer["error"].is_string() && answer["message"].as_str().unwrap().contains(words),
            "{name}: {answer}"
        );
    }
    assert!(
        talk.ask("tools/call", json!({"name": "laya_dance", "arguments": {}}))["error"]["message"]
            .as_str()
            .unwrap()
            .contains("laya_dance")
    );
    assert!(talk.ask("no/such", json!({}))["error"]["code"].is_i64());
    // It is still there, and ends with its client.
    assert!(!talk.tool("laya_predict", ask()).1);
    drop(talk.to.take());
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while talk.child.try_wait().unwrap().is_none() {
        assert!(std::time::Instant::now() < end, "it must end when its input does");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_same_tools_are_there_over_http_without_a_session() {
    let mut server = Server::start(&[], &[]);
    let lines = "Accept: application/json, text/event-stream\r\nContent-Type: application/json\r\n";
    let post = |server: &Server, lines: &str, message: Value| server.post_with("/mcp", lines, message.to_string());
    let greeting = json!({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params":
        {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}});
    let answer = post(&server, lines, greeting);
    assert_eq!((answer.status, answer.json()["result"]["serverInfo"]["name"].as_str()), (200, Some("tilewright")));
    let with_version = format!("{lines}MCP-Protocol-Version: 2025-06-18\r\n");
    let call = json!({"jsonrpc": "2.0", "id": "two", "method": "tools/call", "params": {"name": "laya_predict", "arguments": ask()}});
    let answer = post(&server, &with_version, call.clone());
    assert_eq!((answer.status, answer.json()["id"].as_str()), (200, Some("two")));
    let http = server.post("/laya/v1/systemone", ASK).json();
    assert_eq!(told(&answer.json()).0, http);
    // A page of another origin may not use who looks at it.
    let from_a_page = format!("{with_version}Origin: http://evil.example\r\n");
    assert_eq!(post(&server, &from_a_page, call).status, 403);
    assert!((400..500).contains(&server.post_with("/mcp", lines, "{").status));
    server.is_well();
    let locked = Server::start(&[], &[("TILEWRIGHT_KEYS", "me:secret")]);
    assert_eq!(post(&locked, lines, json!({"jsonrpc": "2.0", "id": 1, "method": "ping"})).status, 401);
}
