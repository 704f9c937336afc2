use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{Folder, checkpoint, exists, questions};

/// Sixty texts with labels drawn from nowhere.
fn labelled() -> Folder {
    let row = |i: usize| {
        let labels =
            json!({"urgent": i.is_multiple_of(2), "team": if i % 4 < 2 { "billing" } else { "it" }, "anger": i % 3});
        json!({"id": format!("row {i}"), "state": format!("message number {i} about card {}", i * 7), "labels": labels})
            .to_string()
            + "\n"
    };
    Folder::new(&[("q.json", questions()), ("rows.jsonl", (0..60).map(row).collect())])
}

const ROWS: [&str; 6] = ["--model", "EN", "--questions", "q.json", "--data", "rows.jsonl"];

fn words<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut all = vec![command];
    all.extend(ROWS);
    all.extend(more);
    all
}

#[test]
fn an_evaluation_warns_of_guessing_before_it_shows_numbers() {
    let folder = labelled();
    let text = folder.decide(&words("eval", &["--resamples", "200"])).ok();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[0], "urgent (noul, 60 rows)");
    assert!(lines[1].starts_with("  !! NEAR CHANCE"), "random weights know nothing: {text}");
    for want in ["accuracy", "Brier score", "calibration error", "answered at 0.9", "error in levels", "guessing gives"]
    {
        assert!(text.contains(want), "{want} in {text}");
    }
}

#[test]
fn an_evaluation_is_the_same_each_time_and_draws_its_diagram() {
    let folder = labelled();
    let more = ["--json", "--svg", "r.svg", "--target", "0.5,0.8"];
    let first: Value = serde_json::from_str(&folder.decide(&words("eval", &more)).ok()).unwrap();
    let second: Value = serde_json::from_str(&folder.decide(&words("eval", &more)).ok()).unwrap();
    assert_eq!(first, second);
    let groups = first["groups"].as_array().unwrap();
    assert_eq!(groups.iter().map(|g| g["name"].as_str().unwrap()).collect::<Vec<_>>(), ["urgent", "team", "anger"]);
    assert_eq!(groups[0]["coverage"][1]["precision"], 0.8);
    assert!(groups[2]["mae"]["value"].as_f64().unwrap() > 0.0);
    assert_eq!(first["provenance"]["model_sha256"].as_str().unwrap().len(), 64);
    assert!(folder.read("r.svg").starts_with("<svg"));
    assert!(folder.decide(&words("eval", &["--target", "90"])).complaint().contains("shares from 0 to 1"));
}

#[test]
fn a_row_that_cannot_be_used_is_named_by_file_and_line() {
    let folder = labelled();
    for (row, want) in [
        ("{", "is no JSON"),
        ("[]", "an object with `state` and `labels`"),
        ("{\"labels\": {\"team\": \"it\"}}", "the row has no `state`"),
        ("{\"state\": \"x\"}", "the row has no `labels`"),
        ("{\"state\": \"x\", \"labels\": {}}", "`labels` is empty"),
        ("{\"state\": \"x\", \"labels\": {\"tema\": \"it\"}}", "asked are urgent, team, anger"),
        ("{\"state\": \"x\", \"labels\": {\"team\": \"sales\"}}", "use one of 'billing', 'it'"),
    ] {
        folder.write("rows.jsonl", &format!("{{\"state\": \"x\", \"labels\": {{\"team\": \"it\"}}}}\n{row}\n"));
        let error = folder.decide(&words("eval", &[])).complaint();
        assert!(error.contains("rows.jsonl, line 2") && error.contains(want), "{row}: {error}");
    }
    folder.write("rows.jsonl", "\n");
    assert!(folder.decide(&words("eval", &[])).complaint().contains("holds no rows"));
}

#[test]
fn a_calibration_is_fitted_written_and_used() {
    let folder = labelled();
    let text = folder.decide(&words("calibrate", &["--least", "20"])).ok();
    assert!(text.contains("choice:2") && text.contains("fitted") && text.contains("wrote calibration.json"), "{text}");
    let file: Value = serde_json::from_str(&folder.read("calibration.json")).unwrap();
    assert_eq!(file["version"], 2);
    assert_eq!(file["temperature"].as_array().unwrap().len(), 3);
    assert_eq!(file["model_sha256"].as_str().unwrap().len(), 64);
    let ask = ["--model", "EN", "--questions", "q.json", "--state", "Where is my card?", "--provenance"];
    let plain = folder.json(&ask);
    let mut with = ask.to_vec();
    with.extend(["--calibration", "calibration.json"]);
    let calibrated = folder.json(&with);
    assert_ne!(plain["answers"]["team"]["probabilities"], calibrated["answers"]["team"]["probabilities"]);
    assert_eq!(calibrated["provenance"]["calibration"].as_str().unwrap().len(), 64);
    let again = folder.decide(&words("calibrate", &[])).complaint();
    assert!(again.contains("calibration.json exists; add --overwrite"), "{again}");
    folder.decide(&words("calibrate", &["--overwrite", "--json"])).ok();
}

#[test]
fn few_rows_change_no_temperature_and_say_so() {
    let folder = labelled();
    let text = folder.decide(&words("calibrate", &["--least", "1000", "--output", "c.json"])).ok();
    assert!(text.contains("!! noul: ") && text.contains("stay as they were") && text.contains("kept"), "{text}");
    assert!(exists(&folder.path("c.json")));
    for bad in [["--holdout", "1"], ["--least", "0"]] {
        let mut more = bad.to_vec();
        more.extend(["--output", "d.json"]);
        assert!(folder.decide(&words("calibrate", &more)).complaint().contains(bad[0]));
    }
}

#[test]
fn a_calibration_for_another_checkpoint_is_remarked() {
    let folder = labelled();
    folder.decide(&words("calibrate", &["--least", "20"])).ok();
    let words = ["--model", "MULTI", "--questions", "q.json", "--state", "x", "--calibration", "calibration.json"];
    let run = folder.decide(&words);
    assert!(run.err.contains("fitted for another checkpoint"), "{}", run.err);
}

/// Feeds the benchmark's worker.
fn worker(folder: &Folder, commands: &str) -> Vec<Value> {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args([
            "bench-decide",
            "--model",
            &checkpoint("tiny-en"),
            "--questions",
            "q.json",
            "--count",
            "2",
            "--row-tokens",
            "65",
        ])
        .current_dir(folder.0.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn the_benchmarks_worker_answers_rows_of_the_asked_length() {
    let folder = labelled();
    for i in 0..2u8 {
        std::fs::write(folder.path(&i.to_string()), (0..400u32).map(|j| (j * 7) as u8 ^ (i * 13)).collect::<Vec<u8>>())
            .unwrap();
    }
    let input = |i: usize| json!({"index": i, "name": "text", "path": folder.path(&i.to_string()), "shape": [400], "dtype": "u8", "sha256": ""});
    let prepare = json!({"do": "prepare", "seed": 1, "params": {}, "inputs": [input(0), input(1)]});
    let lines = worker(
        &folder,
        &format!(
            "{{\"do\":\"hello\"}}\n{prepare}\n{{\"do\":\"run\",\"input\":0}}\n{{\"do\":\"run\",\"input\":1}}\n{{\"do\":\"run\",\"input\":0}}\n{{\"do\":\"quit\"}}\n"
        ),
    );
    assert_eq!(lines[0]["fingerprint"]["precision"], "f32");
    assert_eq!(lines[1]["inputs"][0]["sha256"].as_str().unwrap().len(), 64);
    assert_eq!(lines[2]["metrics"]["input_tokens"], 130, "two rows of 65: {}", lines[2]);
    assert_eq!(lines[2]["metrics"]["probabilities"].as_array().unwrap().len(), 3, "a statement and two labels");
    assert_ne!(lines[2]["output"], lines[3]["output"]);
    assert_eq!(lines[2]["output"], lines[4]["output"]);
    assert!(lines[2]["ns"].as_u64().unwrap() > 0);
}

#[test]
fn the_benchmarks_worker_tells_what_it_lacks() {
    let folder = labelled();
    let lines = worker(&folder, "{\"do\":\"run\",\"input\":0}\n{\"do\":\"go\"}\n{\"do\":\"quit\"}\n");
    assert!(lines[0]["error"].as_str().unwrap().contains("no input"), "{lines:?}");
    assert!(lines[1]["error"].as_str().unwrap().contains("no request `go`"), "{lines:?}");
}

#[test]
fn numbers_of_resamples_that_give_no_interval_are_refused() {
    let folder = labelled();
    for n in ["0", "1", "99999999999", "x"] {
        assert!(folder.decide(&words("eval", &["--resamples", n])).refused().contains("write 100 to 1000000"), "{n}");
    }
}
