//! Calibration files and temperatures by language, from the file to the published number.

mod support;

use serde_json::{Value, json};
use support::{Recorded, english};
use tilewright_decide::{Agent, Binning, CalibrationFile, Identity, PredictOptions, bucket};
use tilewright_models::laya::QuestionType;

fn ask(agent: &mut Agent<Recorded>, lang: Option<&str>) -> tilewright_decide::Answer {
    let questions = json!({"q": {"type": "choice", "instructions": "Which?", "criteria": ["a", "b"]}});
    let options = PredictOptions { lang: lang.map(str::to_owned), ..PredictOptions::default() };
    agent.predict(&"s".into(), &questions, &options).unwrap().answers.remove(0)
}

fn fitted() -> CalibrationFile {
    let identity = english().0.identity();
    let mut file = CalibrationFile::new([1.25, 0.9, 2.0], &[("choice:2", 1.5), ("choice:11+", 3.0)], identity);
    file.binning = vec![("choice:2".into(), Binning::new(vec![0.25, 0.75]).unwrap())];
    file
}

#[test]
fn a_file_comes_back_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calibration.json");
    let id = fitted().save(&path).unwrap();
    let loaded = CalibrationFile::load(&path).unwrap();
    assert_eq!(loaded.id.as_deref(), Some(id.as_str()));
    assert_eq!(CalibrationFile { id: None, ..loaded }, fitted());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn a_file_replaces_temperatures_and_binning_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calibration.json");
    fitted().save(&path).unwrap();
    let mut agent = english().0.with_calibration(&CalibrationFile::load(&path).unwrap());
    let answer = ask(&mut agent, None);
    assert_eq!(answer.applied.temperature, 1.5);
    assert_eq!(answer.answer_confidence, 0.75, "the value of the upper bin");
    assert!(answer.to_json()["probabilities"]["a"] != 0.75, "probabilities are not binned");
    assert_eq!(agent.provenance().calibration.as_ref().map(String::len), Some(64));
    let before = agent.calibration().warnings().len();
    let file = CalibrationFile { binning: Vec::new(), ..fitted() };
    let mut agent = agent.with_calibration(&file);
    assert_ne!(ask(&mut agent, None).answer_confidence, 0.75, "a file without binning clears it");
    assert_eq!(agent.calibration().warnings().len(), before, "the same checkpoint is not worth a warning");
}

#[test]
fn a_language_override_goes_without_binning_and_without_the_checkpoints_buckets() {
    let mut agent = english().0.with_calibration(&fitted());
    let answer = ask(&mut agent, Some("de-AT"));
    assert_eq!((answer.applied.temperature, answer.applied.language.as_deref()), (2.5, Some("de")));
    assert_ne!(answer.answer_confidence, 0.75);
    assert_eq!(ask(&mut agent, Some("fr")).applied.temperature, 1.5, "a language without an override changes nothing");
    assert_eq!(ask(&mut agent, Some("")).applied.language, None);
}

#[test]
fn a_file_for_another_checkpoint_is_used_and_warned_about() {
    let mut file = fitted();
    file.identity.as_mut().unwrap().config["head_layers"] = json!(7);
    let mut agent = english().0.with_calibration(&file);
    assert!(agent.calibration().warnings().last().unwrap().contains("head_layers 7 and 2"));
    assert_eq!(ask(&mut agent, None).applied.temperature, 1.5);
    let of = |sha: &str| Identity { model_sha256: Some(sha.into()), ..Identity::default() };
    assert!(of("a").difference(&of("b")).unwrap().contains("weights"));
    assert_eq!(of("a").difference(&of("a")), None);
}

#[test]
fn the_file_is_one_that_the_package_reads() {
    let json = fitted().to_json();
    assert_eq!(json["version"], 2);
    assert_eq!(json["temperature"].to_string(), "[1.25,0.9,2.0]");
    assert_eq!(json["temperature_by_options"].to_string(), r#"{"choice:2":1.5,"choice:11+":3.0}"#);
    assert_eq!(json["binning_map"].to_string(), r#"{"choice:2":{"bins":2,"values":[0.25,0.75]}}"#);
}

#[test]
fn a_file_that_is_missing_or_no_json_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calibration.json");
    assert!(CalibrationFile::load(&path).unwrap_err().to_string().contains("calibration.json"));
    std::fs::write(&path, "{").unwrap();
    let error = CalibrationFile::load(&path).unwrap_err().to_string();
    assert!(error.contains("calibration.json") && error.contains("JSON object"), "{error}");
    std::fs::write(&path, "[]").unwrap();
    assert_eq!(CalibrationFile::load(&path).unwrap_err().to_string(), "calibration JSON must be an object, got list");
}

#[test]
fn bins_are_closed_below_and_the_last_one_on_both_sides() {
    let binning = Binning::new(vec![0.1, 0.2, 0.3, 0.4]).unwrap();
    for (confidence, expected) in [(0.0, 0.1), (0.2499, 0.1), (0.25, 0.2), (0.75, 0.4), (1.0, 0.4)] {
        assert_eq!(binning.apply(confidence), expected);
    }
    for bad in [vec![], vec![1.5], vec![-0.1], vec![f64::NAN]] {
        assert_eq!(Binning::new(bad), None);
    }
}

#[test]
fn buckets_are_by_type_and_number_of_options() {
    let sizes: Vec<&str> = [1, 2, 3, 5, 6, 10, 11, 255].map(|k| bucket(QuestionType::Choice, k)).to_vec();
    let expected = ["2", "2", "3-5", "3-5", "6-10", "6-10", "11+", "11+"].map(|s| format!("choice:{s}"));
    assert_eq!(sizes, expected);
    assert_eq!(bucket(QuestionType::Noul, 2), "noul:2");
}

#[test]
fn language_overrides_inherit_types_and_name_what_they_replace() {
    let overrides = json!({"FR": null, "en-GB": {"temperature": null, "temperature_by_options": {"choice:2": 99}}, "it": {"temperature": ["x", 1, 1]}});
    let agent = Agent::new(Recorded::default(), support::tokenizer("tiny-en"), support::config("tiny-en"));
    let mut agent = agent.with_languages(&overrides).unwrap();
    assert_eq!(ask(&mut agent, Some("fr-CA")).applied.temperature, 1.3, "the type's, not the bucket's 1.7");
    assert_eq!(ask(&mut agent, Some("EN")).applied.temperature, 5.0);
    let warnings = agent.calibration().warnings();
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert!(warnings[1].contains("'en-GB'") && warnings[1].contains("choice:2=99 -> 5"), "{warnings:?}");
    assert!(warnings[2].contains("temperature[0]='x' -> 1"), "{warnings:?}");
    assert!(english().0.with_languages(&json!([])).is_err());
}

#[test]
fn provenance_is_added_only_on_request() {
    let (agent, _) = english();
    let mut agent = agent.with_model(Some("tiny".into()), Some("00ff".into())).with_calibration(&fitted());
    let questions = json!({"q": {"type": "noul", "instructions": "?"}});
    let result = agent.predict(&"s".into(), &questions, &PredictOptions::default()).unwrap();
    assert!(result.to_json().get("provenance").is_none());
    let json = result.to_json_with(agent.provenance());
    let expected: Value = json!({"model": "tiny", "model_sha256": "00ff", "calibration": null});
    assert_eq!(json["provenance"], expected, "a calibration that came from no file has no id");
}
