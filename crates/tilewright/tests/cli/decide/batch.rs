use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::{Folder, checkpoint, exists, questions, with_questions};

fn rows(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

const ASK: [&str; 6] = ["--model", "EN", "--questions", "q.json", "--batch", "in.jsonl"];

fn batch<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let mut all = ASK.to_vec();
    all.extend(more);
    all
}

fn three() -> Folder {
    let lines = "\"first\"\n{\"id\": \"b\", \"state\": {\"text\": \"second\"}}\n\n[{\"role\": \"user\", \"content\": \"third\"}]\n";
    Folder::new(&[("q.json", questions()), ("in.jsonl", lines.into())])
}

#[test]
fn every_line_has_the_answers_that_it_would_have_alone() {
    let folder = three();
    let rows = rows(&folder.decide(&batch(&[])).ok());
    let places: Vec<_> = rows.iter().map(|r| (r["line"].as_u64().unwrap(), r["id"].clone())).collect();
    assert_eq!(places, [(1, json!(1)), (2, json!("b")), (4, json!(4))], "blank lines are passed over");
    let alone = folder.json(&["--model", "EN", "--questions", "q.json", "--state", "first"]);
    assert_eq!(rows[0]["result"], alone);
    let alone = folder.json(&["--model", "EN", "--questions", "q.json", "--state-json", "{\"text\": \"second\"}"]);
    assert_eq!(rows[1]["result"], alone);
}

#[test]
fn rows_do_not_depend_on_how_many_lines_run_together() {
    let folder = three();
    let together = rows(&folder.decide(&batch(&[])).ok());
    let one_by_one = rows(&folder.decide(&batch(&["--batch-size", "1"])).ok());
    for (a, b) in together.iter().zip(&one_by_one) {
        assert_eq!(a["result"], b["result"]);
    }
    assert!(folder.decide(&batch(&["--batch-size", "0"])).complaint().contains("--batch-size 0"));
}

#[test]
fn a_second_run_answers_only_what_is_new() {
    let folder = three();
    let first = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(first.err.contains("answered 3 lines") && first.out.is_empty(), "{}", first.err);
    let before = folder.read("out.jsonl");
    let second = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(second.err.contains("answered 0 lines") && second.err.contains("3 were answered before"), "{}", second.err);
    assert_eq!(folder.read("out.jsonl"), before);
    let more = folder.read("in.jsonl") + "\"fourth\"\n";
    folder.write("in.jsonl", &more);
    folder.decide(&batch(&["--output", "out.jsonl"])).ok();
    let rows = rows(&folder.read("out.jsonl"));
    assert_eq!((rows.len(), rows[3]["line"].as_u64()), (4, Some(5)));
}

#[test]
fn other_questions_or_settings_are_answered_anew() {
    let folder = three();
    folder.decide(&batch(&["--output", "out.jsonl"])).ok();
    let gated = folder.decide(&batch(&["--output", "out.jsonl", "--min-confidence", "0.5"]));
    assert!(gated.err.contains("answered 3 lines"), "{}", gated.err);
    folder.write("q.json", "{\"only\": {\"type\": \"noul\", \"instructions\": \"Is it?\"}}");
    let other = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(other.err.contains("answered 3 lines"), "{}", other.err);
    assert_eq!(folder.read("out.jsonl").lines().count(), 9);
}

#[test]
fn equal_lines_are_answered_as_often_as_they_stand_there() {
    let folder = Folder::new(&[("q.json", questions()), ("in.jsonl", "\"same\"\n\"same\"\n".into())]);
    folder.decide(&batch(&["--output", "out.jsonl"])).ok();
    assert_eq!(folder.read("out.jsonl").lines().count(), 2);
    let again = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(again.err.contains("2 were answered before"), "{}", again.err);
}

#[test]
fn a_bad_line_is_a_row_with_an_error_and_is_tried_again() {
    let folder = three();
    folder.write(
        "in.jsonl",
        "\"good\"\nnot json\n{\"text\": \"x\"}\nnull\n{\"state\": \"y\", \"questions\": {\"q\": 1}}\n\"fine\"\n",
    );
    let run = folder.decide(&batch(&["--output", "out.jsonl"]));
    let error = run.complaint();
    assert!(error.contains("4 of 6 lines could not be answered"), "{error}");
    let all = rows(&folder.read("out.jsonl"));
    let errors: Vec<&str> = all.iter().filter_map(|r| r["error"].as_str()).collect();
    assert!(errors[0].contains("line 2 cannot be read") && errors[0].contains("a text stands in quotes"), "{errors:?}");
    assert!(errors[1].contains("line 3 has no `state`") && errors[2].contains("line 4 is null"), "{errors:?}");
    assert!(errors[3].contains("line 5") && errors[3].contains("definition must be a dict"), "{errors:?}");
    assert!(all[0]["result"].is_object() && all[5]["result"].is_object());
    folder.write("in.jsonl", "\"good\"\n\"mended\"\n\"fine\"\n");
    let run = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(run.err.contains("answered 1 lines"), "{}", run.err);
    let all = rows(&folder.read("out.jsonl"));
    assert_eq!(all.iter().filter(|r| r["result"].is_object()).count(), 3);
    assert_eq!(all.len(), 3, "rows with errors are taken out");
}

#[test]
fn bytes_that_are_no_text_are_an_error_of_their_line() {
    let folder = three();
    std::fs::write(folder.path("in.jsonl"), b"\"good\"\n\"\xff\"\n").unwrap();
    let run = folder.decide(&batch(&[]));
    assert_eq!(run.code, Some(1));
    assert!(rows(&run.out)[1]["error"].as_str().unwrap().contains("it is no UTF-8"), "{}", run.out);
}

#[test]
fn a_row_that_was_cut_off_is_written_again() {
    let folder = three();
    folder.decide(&batch(&["--output", "out.jsonl"])).ok();
    let whole = folder.read("out.jsonl");
    folder.write("out.jsonl", &whole[..whole.len() - 40]);
    let run = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(run.err.contains("answered 1 lines"), "{}", run.err);
    assert_eq!(folder.read("out.jsonl"), whole);
}

#[test]
fn a_file_of_something_else_is_not_written_to() {
    let folder = three();
    folder.write("out.jsonl", "my diary\n");
    let error = folder.decide(&batch(&["--output", "out.jsonl"])).complaint();
    assert!(error.contains("out.jsonl, line 1 is no row of answers"), "{error}");
    assert_eq!(folder.read("out.jsonl"), "my diary\n");
}

#[test]
fn lines_may_bring_questions_languages_and_limits_of_their_own() {
    let lines = json!({"state": "x", "questions": {"mine": {"type": "noul", "instructions": "Is it?"}}, "lang": "de", "max_len": 50});
    let folder = Folder::new(&[("in.jsonl", format!("{lines}\n\"no questions\"\n"))]);
    let run = folder.decide(&["--model", "EN", "--batch", "in.jsonl"]);
    assert_eq!(run.code, Some(1));
    let rows = rows(&run.out);
    assert!(rows[0]["result"]["answers"]["mine"]["noul"].is_number(), "{}", run.out);
    assert!(rows[1]["error"].as_str().unwrap().contains("line 2 asks nothing"), "{}", run.out);
}

#[test]
fn lines_are_routed_each_for_itself() {
    let folder = with_questions();
    folder
        .write("in.jsonl", "\"Please refund the charge\"\n\"Der Kunde ist nicht zufrieden\"\n\"Where is the card?\"\n");
    let words =
        ["--model", "english=EN", "--model", "multilingual=MULTI", "--questions", "q.json", "--batch", "in.jsonl"];
    let rows = rows(&folder.decide(&words).ok());
    let models: Vec<_> = rows.iter().map(|r| r["result"]["routing"]["model"].as_str().unwrap()).collect();
    assert_eq!(models, ["english", "multilingual", "english"]);
}

#[test]
fn long_texts_schemas_and_tournaments_go_through_batches_too() {
    let folder = three();
    let long = rows(&folder.decide(&batch(&["--long"])).ok());
    assert_eq!(long[0]["result"]["usage"]["windows"], 1);
    folder.write("s.json", "{\"properties\": {\"ok\": {\"type\": \"boolean\"}}}");
    let schema = rows(&folder.decide(&["--model", "EN", "--schema", "s.json", "--batch", "in.jsonl"]).ok());
    assert!(schema[2]["result"]["values"]["ok"].is_boolean());
    let provenance = rows(&folder.decide(&batch(&["--provenance"])).ok());
    assert!(provenance[0]["result"]["provenance"]["model_sha256"].is_string());
}

#[test]
fn standard_input_is_read_and_answered() {
    let folder = with_questions();
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args(["decide", "--model", &checkpoint("tiny-en"), "--questions", "q.json", "--batch", "-"])
        .current_dir(folder.0.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"\"one\"\n\"two\"").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(rows(&String::from_utf8(output.stdout).unwrap()).len(), 2);
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_stops_with_whole_rows_and_goes_on_later() {
    let lines: String = (0..4000).map(|i| format!("\"message number {i}\"\n")).collect();
    let folder = Folder::new(&[("q.json", questions()), ("in.jsonl", lines)]);
    let model = checkpoint("tiny-en");
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args(["decide", "--model", &model, "--questions", "q.json", "--batch", "in.jsonl", "--output", "out.jsonl"])
        .args(["--batch-size", "4"])
        .current_dir(folder.0.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while !exists(&folder.path("out.jsonl")) || folder.read("out.jsonl").is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let code = child.wait().unwrap().code();
    let text = folder.read("out.jsonl");
    let answered = rows(&text).len();
    assert!(text.ends_with('\n') && answered > 0);
    // A fast machine may have been done before the signal came.
    assert!(code == Some(130) || answered == 4000, "{code:?} after {answered}");
    folder.write(
        "in.jsonl",
        &folder.read("in.jsonl").lines().take(answered + 3).map(|l| format!("{l}\n")).collect::<String>(),
    );
    let run = folder.decide(&batch(&["--output", "out.jsonl"]));
    assert!(run.err.contains(&format!("{answered} were answered before")), "{}", run.err);
}

#[test]
fn a_byte_order_mark_before_the_first_line_is_passed_over() {
    let folder = three();
    folder.write("in.jsonl", "\u{feff}\"good\"\n\"\u{feff}\"\n");
    let rows = rows(&folder.decide(&batch(&[])).ok());
    let alone = folder.json(&["--model", "EN", "--questions", "q.json", "--state", "good"]);
    assert_eq!(rows[0]["result"], alone);
}

#[cfg(unix)]
#[test]
fn an_output_that_is_no_file_is_written_and_not_read() {
    let run = three().decide(&batch(&["--output", "/dev/full"]));
    assert!(run.complaint().contains("No space left"), "an endless device is not read for rows to go on from");
}
