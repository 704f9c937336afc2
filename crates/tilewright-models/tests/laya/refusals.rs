//! Rows and options that a model cannot take are refused by name before anything runs.

use tilewright_core::{DType, Error};
use tilewright_models::laya::demo::DemoShape;
use tilewright_models::laya::{Laya, LoadOptions, OptionLayout, OptionPositions, QuestionType, Row, Scorer};
use tilewright_ops::Device;

use crate::common::{fixtures, open, recorded};

fn model(checkpoint: &str) -> Laya {
    open(&fixtures().join(checkpoint), &Device::cpu_with_threads(1), DType::F32)
}

fn row() -> Row {
    Row { ids: vec![5; 12], question: QuestionType::Choice, markers: vec![3, 6], positions: None }
}

#[track_caller]
fn refused(model: &mut Laya, bad: Row) -> String {
    // The second of three rows: the message must say so.
    let good = if model.agent().option_layout == OptionLayout::Parallel { recorded_parallel() } else { row() };
    let error = model.score(&[good.clone(), bad, good.clone()]).unwrap_err();
    assert!(matches!(error, Error::Argument { op: "laya.score", .. }), "{error}");
    let message = error.to_string();
    assert!(message.contains("row 1:"), "{message}");
    model.score(&[good]).expect("the model goes on after a refusal");
    message
}

fn recorded_parallel() -> Row {
    recorded().into_iter().find(|r| r.checkpoint == "tiny-parallel").unwrap().row
}

#[test]
fn token_ids_outside_of_the_vocabulary() {
    let mut model = model("tiny-en");
    let v = model.encoder().vocab_size as u32;
    for id in [v, v + 1, i32::MAX as u32, u32::MAX] {
        let mut bad = row();
        bad.ids[7] = id;
        assert!(refused(&mut model, bad).contains(&format!("token id {id} is outside of the vocabulary of {v}")));
        assert!(model.embed(&[vec![0], vec![id]]).unwrap_err().to_string().contains("laya.embed: row 1:"));
    }
    let mut last = row();
    last.ids[7] = v - 1;
    model.score(&[last]).unwrap();
}

#[test]
fn rows_without_tokens_or_longer_than_the_positions() {
    let mut model = model("tiny-en");
    let most = model.encoder().max_positions;
    assert!(refused(&mut model, Row { ids: vec![], ..row() }).contains("no tokens"));
    let message = refused(&mut model, Row { ids: vec![1; most + 1], ..row() });
    assert!(message.contains(&format!("{} tokens exceed the encoder's {most} positions", most + 1)), "{message}");
    assert!(model.embed(&[vec![]]).is_err() && model.embed(&[vec![1; most + 1]]).is_err());
    model.score(&[Row { ids: vec![1; most], ..row() }]).unwrap();
}

#[test]
fn markers_that_are_missing_outside_or_out_of_order() {
    let mut model = model("tiny-en");
    for (markers, what) in [
        (vec![], "no marker"),
        (vec![3, 12], "marker 12 lies outside of the 12 tokens"),
        (vec![u32::MAX], "lies outside"),
        (vec![6, 3], "3 follows 6"),
        (vec![3, 3], "3 follows 3"),
    ] {
        let message = refused(&mut model, Row { markers, ..row() });
        assert!(message.contains(what), "{message}");
    }
    model.score(&[Row { markers: vec![0, 11], ..row() }]).unwrap();
}

#[test]
fn positions_of_the_other_layout() {
    let positions = OptionPositions { position_ids: (0..12).collect(), option_ids: vec![0; 12] };
    let message = refused(&mut model("tiny-en"), Row { positions: Some(positions), ..row() });
    assert!(message.contains("in sequence"), "{message}");
    let message = refused(&mut model("tiny-parallel"), row());
    assert!(message.contains("in parallel"), "{message}");
}

#[test]
fn positions_of_the_wrong_length_or_size() {
    let mut model = model("tiny-parallel");
    let most = model.encoder().max_positions as u32;
    let with = |change: &dyn Fn(&mut OptionPositions)| {
        let mut row = recorded_parallel();
        change(row.positions.as_mut().unwrap());
        row
    };
    let short = with(&|p| p.position_ids.truncate(3));
    assert!(refused(&mut model, short).contains("position ids"));
    let short = with(&|p| p.option_ids.truncate(3));
    assert!(refused(&mut model, short).contains("option ids"));
    let far = with(&|p| p.position_ids[4] = most);
    assert!(refused(&mut model, far).contains(&format!("position id {most} exceeds")));
    let huge = with(&|p| p.option_ids[4] = u32::MAX);
    assert!(refused(&mut model, huge).contains("option id"));
}

#[test]
fn precisions_that_are_no_floats() {
    for precision in [DType::I32, DType::U8] {
        let options = LoadOptions { precision, device: Device::cpu_with_threads(1), ..LoadOptions::default() };
        let error = Laya::open(&fixtures().join("tiny-en"), &options).err().unwrap().to_string();
        assert!(error.contains("cannot be kept") && error.contains("bf16"), "{error}");
    }
}

#[test]
fn sizes_that_the_head_or_the_attention_cannot_divide() {
    let plan = |hidden, heads| {
        let mut encoder = DemoShape::Tiny.encoder();
        (encoder.hidden, encoder.heads) = (hidden, heads);
        Laya::blank(&DemoShape::Tiny.agent(), &encoder, DType::F32, 1, 64).err().map(|e| e.to_string())
    };
    assert_eq!(plan(1024, 16), None);
    assert!(plan(1000, 20).unwrap().contains("decision head"));
    assert!(plan(1024, 2).unwrap().contains("512 channels"));
}
