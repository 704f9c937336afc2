use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::super::tilewright;
use super::{Folder, case, checkpoint, questions, with_questions};

/// Runs a recorded case with its own options.
fn recorded(name: &str, words: &[&str]) -> (String, String) {
    let case = case(name);
    let input = &case["case"];
    let folder = Folder::new(&[("q.json", input["questions"].to_string()), ("state.json", input["state"].to_string())]);
    let model = checkpoint(input["checkpoint"].as_str().unwrap());
    let mut args = vec!["--model", &model, "--questions", "q.json", "--state-file", "state.json", "--json"];
    args.extend(words);
    let printed: Value = serde_json::from_str(&folder.decide(&args).ok()).unwrap();
    (printed.to_string(), case["expected"]["result"].to_string())
}

#[test]
fn the_json_is_the_recorded_result_to_the_letter() {
    for name in
        ["s01_choice_dict", "s03_score_four_levels", "s06_json_state_five_questions", "s07_conversation_keeps_newest"]
    {
        let (printed, expected) = recorded(name, &[]);
        assert_eq!(printed, expected, "{name}");
    }
}

#[test]
fn the_json_of_the_multilingual_and_the_parallel_checkpoint_is_the_recorded_one_too() {
    for name in ["s11_multilingual_unicode", "s13_parallel_layout"] {
        let (printed, expected) = recorded(name, &[]);
        assert_eq!(printed, expected, "{name}");
    }
}

#[test]
fn a_demo_answers_and_says_that_it_knows_nothing() {
    let folder = Folder::new(&[]);
    let told = folder.decide(&["demo"]).ok();
    assert!(told.contains("its answers mean nothing"), "{told}");
    let next = told.lines().find(|l| l.contains("tilewright decide --model laya-demo --preset triage")).unwrap();
    assert!(next.contains("--state"), "{next}");
    let table =
        folder.decide(&["--model", "laya-demo", "--preset", "triage", "--state", "My card was charged twice"]).ok();
    for id in ["intent: ", "is_urgent: ", "frustration: ", "refund_requested: ", "churn_risk: "] {
        assert!(table.contains(id), "{id} in {table}");
    }
    let again = folder.decide(&["demo"]).complaint();
    assert!(again.contains("laya-demo exists already"), "{again}");
    let other = folder.decide(&["demo", "other", "--seed", "7"]).ok();
    assert!(other.contains("--model other "), "{other}");
    assert!(folder.decide(&["demo", "x", "--shape", "gigantic"]).refused().contains("mmbert-base"));
}

#[test]
fn a_table_has_an_option_a_line_and_no_bars_when_piped() {
    let table =
        with_questions().decide(&["--model", "EN", "--questions", "q.json", "--state", "The invoice is wrong"]).ok();
    let lines: Vec<&str> = table.lines().collect();
    assert!(lines[0].starts_with("urgent: ") && lines[0].contains("(noul, confidence 0."), "{table}");
    assert!(lines[1].trim_start().starts_with("false") && lines[2].trim_start().starts_with("true"), "{table}");
    assert!(table.contains("  0 calm") && table.contains(" on 0 to 2   (score, confidence"), "{table}");
    assert!(!table.contains('█') && !table.contains('·'), "{table}");
}

#[test]
fn a_state_comes_as_text_as_json_from_files_and_from_standard_input() {
    let folder = with_questions();
    folder.write("a.txt", "The invoice is wrong");
    folder.write("a.json", "\"The invoice is wrong\"");
    let ask = |words: &[&str]| {
        let mut all = vec!["--model", "EN", "--questions", "q.json"];
        all.extend(words);
        folder.json(&all)
    };
    let text = ask(&["--state", "The invoice is wrong"]);
    assert_eq!(text, ask(&["--state-file", "a.txt"]));
    assert_eq!(text, ask(&["--state-file", "a.json"]));
    assert_eq!(text, ask(&["--state-json", "\"The invoice is wrong\""]));
    assert_ne!(text["usage"], ask(&["--state-json", "{\"text\": \"The invoice is wrong\"}"])["usage"]);
    let mut child = Command::new(env!("CARGO_BIN_EXE_tilewright"))
        .args(["decide", "--model", &checkpoint("tiny-en"), "--questions", "q.json", "--state-file", "-", "--json"])
        .current_dir(folder.0.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"The invoice is wrong").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(text, serde_json::from_slice::<Value>(&output.stdout).unwrap());
}

#[test]
fn a_presets_text_goes_under_the_field_that_its_questions_read() {
    let folder = Folder::new(&[]);
    let preset = folder.json(&["--model", "EN", "--preset", "triage", "--state", "Refund me"]);
    let spelled = folder.json(&["--model", "EN", "--preset", "triage", "--state-json", "{\"message\": \"Refund me\"}"]);
    assert_eq!(preset, spelled);
    assert!(
        folder.decide(&["--model", "EN", "--preset", "horoscope", "--state", "x"]).refused().contains("moderation")
    );
}

#[test]
fn every_precision_answers_and_f32_is_the_default() {
    let folder = with_questions();
    let ask = |precision: &str| {
        folder.json(&[
            "--model",
            "EN",
            "--questions",
            "q.json",
            "--state",
            "Where is my card?",
            "--precision",
            precision,
        ])
    };
    let f32 = ask("f32");
    assert_eq!(f32, folder.json(&["--model", "EN", "--questions", "q.json", "--state", "Where is my card?"]));
    for precision in ["bf16", "f16"] {
        let other = ask(precision);
        let p = |v: &Value| v["answers"]["urgent"]["noul"].as_f64().unwrap();
        assert!((p(&f32) - p(&other)).abs() < 0.1, "{precision}: {other}");
    }
    assert!(
        folder
            .decide(&["--model", "EN", "--preset", "guard", "--state", "x", "--precision", "int3"])
            .refused()
            .contains("bf16")
    );
}

#[test]
fn a_gate_marks_answers_and_a_bad_threshold_is_a_usage_error() {
    let folder = with_questions();
    let ask =
        |gate: &str| folder.json(&["--model", "EN", "--questions", "q.json", "--state", "x", "--min-confidence", gate]);
    assert_eq!(ask("1.0")["answers"]["team"]["abstention"], "abstained");
    assert_eq!(ask("0")["answers"]["team"]["abstention"], "passed");
    assert_eq!(ask("{\"noul:2\": 1.0}")["answers"]["urgent"]["low_confidence"], true);
    let table =
        folder.decide(&["--model", "EN", "--questions", "q.json", "--state", "x", "--min-confidence", "1"]).ok();
    assert!(table.contains("ABSTAINED: below 1"), "{table}");
    for bad in ["2", "nan", "{}", "{\"choice:9\": 0.5}"] {
        let words = ["--model", "EN", "--questions", "q.json", "--state", "x", "--min-confidence", bad];
        assert!(folder.decide(&words).refused().contains("--min-confidence"), "{bad}");
    }
}

#[test]
fn token_budgets_change_what_is_read_and_the_cut_is_told() {
    let folder = with_questions();
    let long = "The invoice is wrong and I want my money back. ".repeat(30);
    let ask = |words: &[&str]| {
        let mut all = vec!["--model", "EN", "--questions", "q.json", "--state", &long];
        all.extend(words);
        folder.json(&all)["usage"].clone()
    };
    let usual = ask(&[]);
    assert_eq!(usual["truncated"], true);
    assert!(ask(&["--max-len", "100"])["state_tokens_dropped"].as_u64() > usual["state_tokens_dropped"].as_u64());
    assert!(ask(&["--head-max-len", "40"])["input_tokens"].as_u64() <= usual["input_tokens"].as_u64());
    let table = folder.decide(&["--model", "EN", "--questions", "q.json", "--state", &long]).ok();
    assert!(table.contains("tokens of the state were cut for urgent, team, anger; raise --max-len"), "{table}");
    for bad in ["0", "-1", "many"] {
        assert!(
            folder.decide(&["--model", "EN", "--preset", "guard", "--state", "x", "--max-len", bad]).code == Some(2)
        );
    }
    let refused =
        folder.decide(&["--model", "EN", "--questions", "q.json", "--state", "x", "--max-len", "12"]).complaint();
    assert!(refused.contains("option markers fit in max_len=12"), "{refused}");
}

#[test]
fn an_explanation_shows_tokens_cuts_and_logits() {
    let folder = with_questions();
    let words = ["--model", "EN", "--questions", "q.json", "--state", "Where is my card?", "--explain"];
    let text = folder.decide(&words).ok();
    for want in [
        "urgent (noul): a row of ",
        "instructions",
        "option billing",
        "state",
        "logit",
        "temperature ",
        "action logits ",
    ] {
        assert!(text.contains(want), "{want} in {text}");
    }
    let json = folder.json(&words);
    let answer = folder.json(&words[..6]);
    let rows: u64 = json
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|e| e["segments"].as_array().unwrap())
        .map(|s| s["ids"].as_array().unwrap().len() as u64)
        .sum();
    assert_eq!(Some(rows), answer["usage"]["input_tokens"].as_u64(), "the segments are the rows");
    let long = "money ".repeat(300);
    let cut = folder.decide(&["--model", "EN", "--questions", "q.json", "--state", &long, "--explain"]).ok();
    assert!(cut.contains("first "), "{cut}");
}

#[test]
fn a_long_text_is_read_in_windows() {
    let folder = with_questions();
    let long = "The invoice is wrong and I want my money back. ".repeat(30);
    let result = folder.json(&["--model", "EN", "--questions", "q.json", "--state", &long, "--long"]);
    assert!(result["usage"]["windows"].as_u64() > Some(1), "{result}");
    assert!(result["answers"]["team"]["window"]["count"].as_u64() > Some(1));
    let few = folder.json(&[
        "--model",
        "EN",
        "--questions",
        "q.json",
        "--state",
        &long,
        "--long",
        "--window",
        "60",
        "--stride",
        "60",
    ]);
    assert_eq!(few["answers"]["team"]["window"]["token_start"].as_u64().unwrap() % 60, 0);
    let table = folder.decide(&["--model", "EN", "--questions", "q.json", "--state", &long, "--long"]).ok();
    assert!(table.contains(", window "), "{table}");
    let words = ["--model", "EN", "--questions", "q.json", "--state", "x", "--window", "60"];
    assert!(folder.decide(&words).refused().contains("--long"));
}

#[test]
fn large_choices_are_narrowed_by_tournament_or_shortlist() {
    let labels: Vec<String> = (0..30).map(|i| format!("label {i}")).collect();
    let q = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": labels}}).to_string();
    let folder = Folder::new(&[("q.json", q)]);
    let ask = |words: &[&str]| {
        let mut all = vec!["--model", "EN", "--questions", "q.json", "--state", "the third one"];
        all.extend(words);
        folder.json(&all)
    };
    assert_eq!(ask(&["--tournament"])["tournament"]["q"]["n"], 30);
    assert_eq!(ask(&["--tournament", "5"])["tournament"]["q"]["rounds"], 2);
    let shortlist = ask(&["--shortlist", "4"]);
    assert_eq!(shortlist["answers"]["q"]["probabilities"].as_object().unwrap().len(), 4);
    let words = ["--model", "EN", "--questions", "q.json", "--state", "x", "--tournament", "--shortlist"];
    assert_eq!(folder.decide(&words).code, Some(2));
}

#[test]
fn a_schema_is_filled_in() {
    let schema = json!({"type": "object", "properties": {
        "team": {"enum": ["billing", "it"]}, "urgent": {"type": "boolean"}, "level": {"type": "integer", "minimum": 1, "maximum": 3}
    }});
    let folder = Folder::new(&[
        ("s.json", schema.to_string()),
        ("bad.json", "{\"properties\": {\"a\": {\"type\": \"string\"}}}".into()),
    ]);
    let result = folder.json(&["--model", "EN", "--schema", "s.json", "--state", "My screen is broken"]);
    let values = &result["values"];
    assert!(values["urgent"].is_boolean() && (1..=3).contains(&values["level"].as_i64().unwrap()), "{values}");
    assert!(values["team"] == "billing" || values["team"] == "it");
    let table = folder.decide(&["--model", "EN", "--schema", "s.json", "--state", "My screen is broken"]).ok();
    assert!(table.starts_with("{\n  \"team\": "), "{table}");
    let refused = folder.decide(&["--model", "EN", "--schema", "bad.json", "--state", "x"]).complaint();
    assert!(refused.contains("bad.json") && refused.contains("properties.a"), "{refused}");
}

#[test]
fn provenance_names_weights_and_calibration() {
    let result = with_questions().json(&["--model", "EN", "--questions", "q.json", "--state", "x", "--provenance"]);
    assert_eq!(result["provenance"]["model_sha256"].as_str().unwrap().len(), 64);
    assert!(result["provenance"]["calibration"].is_null());
}

#[test]
fn what_is_missing_or_wrong_is_told_with_the_next_thing_to_try() {
    let folder = Folder::new(&[
        ("q.json", questions()),
        ("bad.json", "{\"q\": {\"type\": \"noul\"}}".into()),
        ("no.json", "{".into()),
    ]);
    for (words, want) in [
        (vec!["--preset", "guard", "--state", "x"], "give --model DIR"),
        (vec!["--model", "EN", "--state", "x"], "--questions FILE"),
        (vec!["--model", "EN", "--preset", "guard"], "--state TEXT"),
        (vec!["--model", "nowhere", "--preset", "guard", "--state", "x"], "there is no folder nowhere"),
        (vec!["--model", "EN", "--questions", "none.json", "--state", "x"], "none.json"),
        (vec!["--model", "EN", "--questions", "no.json", "--state", "x"], "no.json is no JSON"),
        (vec!["--model", "EN", "--questions", "bad.json", "--state", "x"], "bad.json cannot be asked"),
        (vec!["--model", "EN", "--preset", "guard", "--state-json", "{"], "for text use --state"),
        (vec!["--model", "EN", "--preset", "guard", "--state-json", "null"], "the state is null"),
        (vec!["--model", "EN", "--preset", "guard", "--state", "x", "--output", "o"], "--output is for --batch"),
        (vec!["--model", "EN", "--preset", "guard", "--state", "x", "--calibration", "q.json"], "q.json"),
    ] {
        let error = folder.decide(&words).complaint();
        assert!(error.contains(want), "{words:?}: {error}");
    }
    for words in [
        vec!["--model", "EN", "--preset", "guard", "--questions", "q.json", "--state", "x"],
        vec!["--model", "EN", "--preset", "guard", "--state", "x", "--state-file", "q.json"],
        vec!["--model", "EN", "--preset", "guard", "--state", "x", "--explain", "--long"],
    ] {
        assert_eq!(folder.decide(&words).code, Some(2), "{words:?}");
    }
}

#[test]
fn inspect_describes_a_checkpoint_and_fails_on_a_broken_one() {
    let text = tilewright(&["inspect", &checkpoint("tiny-en")]).ok();
    for want in ["model.safetensors", "160 tokens, 64 of them for the question", "mask_token", "nothing is missing"] {
        assert!(text.contains(want), "{want} in {text}");
    }
    let json: Value =
        serde_json::from_str(&tilewright(&["inspect", "--json", &checkpoint("tiny-multi")]).ok()).unwrap();
    assert_eq!(json["agent"]["max_len"], 256);
    assert_eq!(json["problems"], json!([]));
    let folder = Folder::new(&[]);
    folder.decide(&["demo", "d"]).ok();
    std::fs::remove_file(folder.path("d/model.safetensors")).unwrap();
    let run = tilewright(&["inspect", &folder.path("d").display().to_string()]);
    assert!(run.out.contains("MISSING") && run.out.contains("problems"), "{}", run.out);
    assert!(run.complaint().contains("would not load"));
    assert!(tilewright(&["inspect", "no/such/folder"]).complaint().contains("no/such/folder"));
}

#[cfg(feature = "hub")]
#[test]
fn a_hub_that_cannot_be_reached_or_named_is_told_with_another_way() {
    let folder = Folder::new(&[]);
    let home = folder.path("home").display().to_string();
    let ask = |spec: &str| {
        let words = ["decide", "--hub", spec, "--preset", "guard", "--state", "x"];
        // Nothing listens on the discard port.
        let environment = [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HOME", &home)];
        super::super::tilewright_in(folder.0.path(), &words, &environment).complaint()
    };
    let error = ask("someone/laya/multilingual@55cf");
    assert!(error.contains("multilingual/rl_agent_config.json of someone/laya cannot be fetched"), "{error}");
    assert!(error.contains("--model DIR"), "{error}");
    assert!(ask("laya").contains("write OWNER/REPO"));
}

#[test]
fn nothing_that_a_request_says_commands_the_terminal() {
    let question = |kind: &str, criteria: Value| json!({"type": kind, "instructions": "Which?", "criteria": criteria});
    let questions = json!({
        "id\u{1b}[2J\n": question("choice", json!(["a\u{1b}[31m\n", "b\u{202e}\u{1b}"])),
        "x\u{1b}": question("score", json!(["low\u{1b}[0m", "high\u{2066}"])),
    });
    let folder = Folder::new(&[("q.json", questions.to_string())]);
    let state = "\u{1b}[2J words ".repeat(200);
    for more in [&["--max-len", "60"][..], &["--explain"]] {
        let words = [&["--model", "EN", "--questions", "q.json", "--state", &state][..], more].concat();
        let out = folder.decide(&words).ok();
        assert!(!out.contains(['\u{1b}', '\u{202e}', '\u{2066}']), "{out:?}");
    }
}

#[test]
fn standard_input_is_not_promised_twice() {
    let folder = with_questions();
    for (a, b) in [("--questions", "--state-file"), ("--questions", "--batch"), ("--schema", "--state-file")] {
        let error = folder.decide(&["--model", "EN", a, "-", b, "-"]).complaint();
        assert!(error.contains("standard input can be read once"), "the second reader would find it empty: {error}");
    }
}
