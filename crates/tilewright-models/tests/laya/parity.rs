//! Every recorded row, on every instruction set: logits, action logits and the states after every layer.

use serde_json::Value;
use tilewright_core::DType;
use tilewright_models::laya::{Scorer, Stage};

use crate::common::{Recorded, devices, fixtures, floats, instruction_sets, open, recorded};

/// Largest difference of a logit from the recorded one.
const LOGIT: f64 = 2e-5;

/// Largest difference of a state's element from the recorded one.
const STATE: f64 = 1e-4;

const CHECKPOINTS: [&str; 3] = ["tiny-en", "tiny-multi", "tiny-parallel"];

fn largest(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (f64::from(*g) - w).abs()).fold(0.0, f64::max)
}

#[test]
fn there_are_recorded_rows_of_every_checkpoint_and_layout() {
    let all = recorded();
    assert!(all.len() >= 20, "{}", all.len());
    for checkpoint in CHECKPOINTS {
        assert!(all.iter().any(|r| r.checkpoint == checkpoint), "{checkpoint}");
    }
    assert!(all.iter().any(|r| r.row.positions.is_some()));
}

/// Worst difference of logits and action logits over the rows of a checkpoint.
fn logits(checkpoint: &str, precision: DType) -> (f64, f64) {
    let mut worst = (0f64, 0f64);
    for device in instruction_sets() {
        let mut model = open(&fixtures().join(checkpoint), &device, precision);
        for Recorded { name, row, logits, act_logits, .. } in recorded().iter().filter(|r| r.checkpoint == checkpoint) {
            let scores = model.score(std::slice::from_ref(row)).unwrap().pop().unwrap();
            let (a, b) = (largest(&scores.logits, logits), largest(&scores.act_logits, act_logits));
            println!("{name} on {device:?} in {precision}: logits {a:.2e}, action logits {b:.2e}");
            worst = (worst.0.max(a), worst.1.max(b));
        }
    }
    worst
}

#[test]
fn f32_logits_are_the_recorded_ones() {
    for checkpoint in CHECKPOINTS {
        let (a, b) = logits(checkpoint, DType::F32);
        assert!(a <= LOGIT && b <= LOGIT, "{checkpoint}: logits {a:e}, action logits {b:e}");
    }
}

#[test]
fn sixteen_bit_weights_move_logits_by_their_rounding_alone() {
    // Two of the checkpoints are stored as F16, so f16 loses nothing there.
    for checkpoint in &CHECKPOINTS[..2] {
        let (a, b) = logits(checkpoint, DType::F16);
        assert!(a <= LOGIT && b <= LOGIT, "{checkpoint}: logits {a:e}, action logits {b:e}");
    }
    let (a, b) = logits("tiny-parallel", DType::F16);
    assert!(a <= 0.02 && b <= 0.03, "f16: logits {a:e}, action logits {b:e}");
    for checkpoint in CHECKPOINTS {
        let (a, b) = logits(checkpoint, DType::BF16);
        assert!(a > LOGIT && a <= 0.3 && b <= 0.5, "{checkpoint} in bf16: logits {a:e}, action logits {b:e}");
    }
}

/// Largest difference of the states after a stage from the recorded ones; the sums are scaled to the size of an element.
fn stage_error(stage: &Stage, want: &Value, row: &Recorded) -> f64 {
    let tokens = row.row.ids.len();
    let d = stage.values.len() / stage.tokens.len();
    let state = |token: usize| {
        let at = stage.tokens.iter().position(|&t| t == token)?;
        Some(&stage.values[at * d..(at + 1) * d])
    };
    let first = |token: usize| &state(token).expect("a selected token")[..6];
    let mut worst = largest(first(0), &floats(&want["cls"]));
    worst = worst.max(largest(first(row.row.markers[0] as usize), &floats(&want["marker0"])));
    if stage.tokens.len() == tokens {
        let last = state(tokens - 1).unwrap();
        worst = worst.max(largest(&last[d - 6..], &floats(&want["last"])));
        let (sum, squares) = stage.values.iter().fold((0.0, 0.0), |(s, q), &x| {
            let x = f64::from(x);
            (s + x, q + x * x)
        });
        let (want_sum, want_l2) = (want["sum"].as_f64().unwrap(), want["l2"].as_f64().unwrap());
        // Errors of elements add up like a random walk; the record has seven digits.
        let walk = (stage.values.len() as f64).sqrt() + want_sum.abs() * 1e-6 / STATE;
        worst = worst.max((sum - want_sum).abs() / walk).max((squares.sqrt() - want_l2).abs() / (want_l2 * 0.1));
    }
    worst
}

#[test]
fn states_after_every_layer_are_the_recorded_ones() {
    for device in instruction_sets() {
        for checkpoint in CHECKPOINTS {
            let mut model = open(&fixtures().join(checkpoint), &device, DType::F32);
            for row in recorded().iter().filter(|r| r.checkpoint == checkpoint) {
                let (_, stages) = model.trace(&row.row).unwrap();
                let names: Vec<_> = stages.iter().map(|s| s.name.as_str()).collect();
                assert_eq!(names, row.trace.as_object().unwrap().keys().collect::<Vec<_>>(), "{}", row.name);
                for stage in &stages {
                    let error = stage_error(stage, &row.trace[&stage.name], row);
                    assert!(error <= STATE, "{} at {} on {device:?}: {error:e}", row.name, stage.name);
                }
            }
        }
    }
}

#[test]
fn tracing_changes_no_bit() {
    for row in recorded() {
        let mut model = open(&fixtures().join(&row.checkpoint), &devices()[0], DType::F32);
        assert_eq!(model.trace(&row.row).unwrap().0, model.score(&[row.row]).unwrap()[0]);
    }
}
