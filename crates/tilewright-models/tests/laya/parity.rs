//! Every recorded row, on every instruction set: logits, action logits and the states after every layer.
//!
//! What these tests and those of `reference.rs` are worth was tried by breaking the model in each of these ways and looking at the largest
//! differences from the recorded logits and action logits (tiny-en, where nothing else is said); all turned this file red, and `reference.rs` too unless
//! marked with a star.
//!
//! | broken | logit | action logit |
//! |---|---|---|
//! | GELU by tanh | 0.0030 | 0.0030 |
//! | GEGLU: the other half activated | 3.4 | 5.8 |
//! | RoPE interleaved | 2.9 | 5.7 |
//! | sliding layers with the theta of full ones | 1.5 | 2.2 |
//! | sliding theta always 10000 (tiny-multi) | 0.76 | 2.1 |
//! | window one too small | 1.7 | 2.6 |
//! | window not halved | 2.3 | 4.3 |
//! | a norm before layer 0's attention | 1.9 | 4.2 |
//! | queries, keys and values head by head (*: both models read the same rows) | 2.7 | 10.5 |
//! | no type embedding | 5.2 | 6.2 |
//! | the encoder's head count in the decision head | 1.3 | 2.3 |
//! | GELU in the head's MLP | 0.32 | 0.54 |
//! | options hidden from each other in the head too (tiny-parallel) | 0.27 | 0.078 |
//! | number of options not divided by 255 | same | 4.2 |
//! | no features of the options | same | 1.9 |
//! | markers after the third token one too far | 2.1 | 0.59 |
//! | epsilon of the head's norms 1e-3 | 0.0024 | 0.0028 |
//! | selected queries turned by wrong positions (only `reference.rs`: no recorded model has no head layers) | same | same |

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
