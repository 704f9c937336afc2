use serde_json::json;

use super::{Folder, with_questions};

const TWO: [&str; 6] = ["--model", "english=EN", "--model", "multilingual=MULTI", "--questions", "q.json"];

#[test]
fn of_several_checkpoints_the_text_chooses() {
    let folder = with_questions();
    let ask = |words: &[&str]| {
        let mut all = TWO.to_vec();
        all.extend(words);
        folder.json(&all)["routing"].clone()
    };
    let english = ask(&["--state", "Please refund the duplicate charge"]);
    assert_eq!((&english["model"], &english["reason"]), (&json!("english"), &json!("English Latin text")));
    assert!(english["repo"].as_str().unwrap().ends_with("tiny-en"), "{english}");
    let german = ask(&["--state", "Der Kunde ist nicht zufrieden mit uns"]);
    assert_eq!((&german["model"], &german["detection"]["language"]), (&json!("multilingual"), &json!("de")));
    assert_eq!(ask(&["--state", "Der Kunde ist nicht zufrieden", "--lang", "en"])["reason"], "explicit lang='en'");
    assert_eq!(ask(&["--state", "refund me", "--task", "en"])["model"], "english");
    let mut table = TWO.to_vec();
    table.extend(["--state", "支付失败"]);
    let table = folder.decide(&table).ok();
    assert!(table.starts_with("answered by multilingual: non-Latin script (han"), "{table}");
}

#[test]
fn one_named_checkpoint_is_routed_to_and_another_is_asked_for() {
    let folder = with_questions();
    let words = ["--model", "english=EN", "--questions", "q.json", "--state"];
    let ask = |state: &str| {
        let mut all = words.to_vec();
        all.push(state);
        folder.decide(&all)
    };
    assert!(ask("refund me").ok().contains("using default (english)"));
    let error = ask("支付失败").complaint();
    assert!(error.contains("checkpoint `multilingual`") && error.contains("--model multilingual=DIR"), "{error}");
}

#[test]
fn several_checkpoints_need_names_and_a_strange_one_is_remarked() {
    let folder = with_questions();
    let error = folder
        .decide(&["--model", "EN", "--model", "multilingual=MULTI", "--preset", "guard", "--state", "x"])
        .complaint();
    assert!(error.contains("each needs a name"), "{error}");
    let run = folder.decide(&[
        "--model",
        "enlgish=EN",
        "--model",
        "multilingual=MULTI",
        "--preset",
        "guard",
        "--state",
        "refund me",
    ]);
    assert!(run.err.contains("one edit from the built-in 'english'"), "{}", run.err);
    let error = folder.decide(&["--model", "auto=EN", "--preset", "guard", "--state", "x"]).complaint();
    assert!(error.contains("invalid checkpoint name 'auto'"), "{error}");
    let error =
        folder.decide(&["--model", "en=EN", "--preset", "guard", "--state", "x", "--task", "klingon"]).complaint();
    assert!(error.contains("unknown model 'klingon'"), "{error}");
}

#[test]
fn the_decision_alone_needs_no_checkpoint() {
    let folder = Folder::new(&[]);
    let text = folder.decide(&["--route-only", "--state", "Je voudrais annuler mon abonnement, merci"]).ok();
    assert!(text.starts_with("multilingual: Latin script but language looks like 'fr'"), "{text}");
    let json = folder.json(&["--route-only", "--state-json", "[1, 2]"]);
    assert_eq!(json["detection"]["script"], "unknown");
    let named = folder.decide(&["--route-only", "--model", "papers=EN", "--task", "papers", "--state", "x"]).ok();
    assert!(named.starts_with("papers: explicit task='papers'"), "{named}");
}

#[test]
fn a_checkpoint_without_a_name_answers_everything_without_routing() {
    let folder = with_questions();
    let result = folder.json(&["--model", "MULTI", "--questions", "q.json", "--state", "Please refund the charge"]);
    assert!(result.get("routing").is_none(), "{result}");
}

#[test]
fn one_name_for_two_checkpoints_is_refused() {
    let folder = with_questions();
    for second in ["english=MULTI", "en=MULTI"] {
        let words = ["--model", "english=EN", "--model", second, "--questions", "q.json", "--state", "x"];
        let error = folder.decide(&words).complaint();
        assert!(error.contains("two checkpoints are called") && error.contains("tiny-multi"), "{error}");
    }
}
