use std::io::Write;
use std::process::{Command, Stdio};

/// Feeds a worker of the smallest model and gives back exit code, output and complaint.
fn worker(commands: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["bench-step", "--model", "d6", "--batch", "1", "--seq-len", "5", "--clip", "1"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_worker_answers_each_run_with_time_and_loss_until_it_is_told_to_quit() {
    let (code, out, err) = worker(
        "{\"do\":\"hello\",\"protocol\":1}\n{\"do\":\"run\",\"input\":0}\n{\"do\":\"run\",\"input\":1}\n{\"do\":\"quit\"}\n{\"do\":\"run\"}\n",
    );
    assert_eq!(code, Some(0), "{err}");
    let lines: Vec<serde_json::Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 4, "{out}");
    assert!(lines[0]["ok"] == "hello" && lines[0]["fingerprint"]["threads"].as_u64() > Some(0), "{out}");
    for line in &lines[1..3] {
        assert!(line["ok"] == "run" && line["ns"].as_u64() > Some(0), "{line}");
        // A random model knows nothing: ln(50257) = 10.82.
        let loss = line["metrics"]["loss"].as_f64().unwrap();
        assert!((loss - 10.82).abs() < 1.0, "{loss}");
    }
    assert_ne!(lines[1]["metrics"], lines[2]["metrics"], "the batches are distinct");
}

#[test]
fn the_worker_trains_on_the_files_of_the_plan_and_tells_their_digests() {
    let folder = tempfile::tempdir().unwrap();
    let prepare = |numbers: &[i32]| {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        std::fs::write(folder.path().join("x"), bytes).unwrap();
        let path = folder.path().join("x");
        let input = serde_json::json!({"index": 0, "name": "tokens", "path": path, "shape": [numbers.len()], "dtype": "i32", "sha256": ""});
        worker(&format!(
            "{}\n{{\"do\":\"quit\"}}\n",
            serde_json::json!({"do": "prepare", "seed": 1, "params": {}, "inputs": [input]})
        ))
        .1
    };
    assert!(prepare(&[1, 2, 3, 4, 5, 6]).contains("\"sha256\":\""));
    assert!(prepare(&[1, 2, 3]).contains("batch * seq_len + 1 is 6"));
    assert!(prepare(&[1, 2, 3, 4, 5, 60_000]).contains("outside 0..50257"));
}

#[test]
fn the_worker_refuses_other_words() {
    let (code, out, _) = worker("{\"do\":\"go\"}\n");
    assert!(code == Some(0) && out.contains("no request `go`"), "{out}");
    let (code, _, err) = worker("go\n");
    assert!(code == Some(1) && err.contains("bench-protocol.md"), "{err}");
}
