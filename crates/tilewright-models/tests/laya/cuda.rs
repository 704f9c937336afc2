//! The model on a GPU. Runs where `TILEWRIGHT_TEST_CUDA` is set and the crate is built with `--features tilewright-ops/cuda`, or where
//! `TILEWRIGHT_TEST_GPU` is and it is built with `tilewright-ops/vulkan` or `metal`; says NOT TESTED elsewhere.

use std::path::Path;

use tilewright_core::DType;
use tilewright_core::rng::XorShift;
use tilewright_models::laya::demo::DemoShape;
use tilewright_models::laya::{AgentConfig, OptionLayout, Row, RowScores, Scorer};
use tilewright_models::modernbert::{EncoderConfig, LayerKind};
use tilewright_ops::Device;

use crate::common::{fixtures, open, random_checkpoint, random_row, recorded};

const CHECKPOINTS: [&str; 3] = ["tiny-en", "tiny-multi", "tiny-parallel"];

/// Largest difference of a logit from the recorded one, in f32.
const LOGIT: f64 = 1e-4;

/// Largest differences of a probability that f16 and bf16 are published to make.
const PROBABILITIES: [(DType, f64); 2] = [(DType::F16, 0.019), (DType::BF16, 0.073)];

fn gpu() -> Option<Device> {
    let asked = |name| std::env::var_os(name).is_some();
    match (asked("TILEWRIGHT_TEST_CUDA"), asked("TILEWRIGHT_TEST_GPU")) {
        (true, _) => Some(Device::cuda(0).unwrap()),
        (_, true) => Some(Device::gpu(0).unwrap()),
        _ => {
            println!("NOT TESTED: neither TILEWRIGHT_TEST_CUDA nor TILEWRIGHT_TEST_GPU is set");
            None
        }
    }
}

fn probabilities(logits: &[f64]) -> Vec<f64> {
    let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let p: Vec<f64> = logits.iter().map(|l| (l - most).exp()).collect();
    let sum: f64 = p.iter().sum();
    p.into_iter().map(|p| p / sum).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| f64::from(v)).collect()
}

fn largest(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    // Unlike `f64::max`, this keeps what is not a number.
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |a, b| if a > b { a } else { b })
}

/// Logits of the recorded rows of a checkpoint: each row alone, three times, so that the pass is run, recorded and replayed; then all together.
fn passes(device: &Device, checkpoint: &str, precision: DType) -> Vec<Vec<RowScores>> {
    let mut model = open(&fixtures().join(checkpoint), device, precision);
    let rows: Vec<Row> = recorded().into_iter().filter(|r| r.checkpoint == checkpoint).map(|r| r.row).collect();
    let mut all = Vec::new();
    for _ in 0..3 {
        all.push(rows.iter().map(|row| model.score(std::slice::from_ref(row)).unwrap().remove(0)).collect());
    }
    all.extend((0..3).map(|_| model.score(&rows).unwrap()));
    all
}

#[test]
fn cuda_f32_logits_are_the_recorded_ones() {
    let Some(device) = gpu() else { return };
    for checkpoint in CHECKPOINTS {
        let want: Vec<_> = recorded().into_iter().filter(|r| r.checkpoint == checkpoint).collect();
        let mut worst = (0f64, 0f64);
        for scores in passes(&device, checkpoint, DType::F32) {
            for (got, want) in scores.iter().zip(&want) {
                let logits = largest(&wide(&got.logits), &want.logits);
                let act = largest(&wide(&got.act_logits), &want.act_logits);
                assert!(logits <= LOGIT && act <= LOGIT, "{}: logits {logits:e}, action logits {act:e}", want.name);
                worst = (worst.0.max(logits), worst.1.max(act));
            }
        }
        println!("{checkpoint} in f32: logits {:.1e}, action logits {:.1e}", worst.0, worst.1);
    }
}

#[test]
fn cuda_sixteen_bit_probabilities_stay_within_the_published_deviations() {
    let Some(device) = gpu() else { return };
    for (precision, bound) in PROBABILITIES {
        for checkpoint in CHECKPOINTS {
            let want: Vec<_> = recorded().into_iter().filter(|r| r.checkpoint == checkpoint).collect();
            let (mut worst, mut flips) = (0f64, 0);
            for scores in passes(&device, checkpoint, precision) {
                for (got, want) in scores.iter().zip(&want) {
                    let (got, want) = (probabilities(&wide(&got.logits)), probabilities(&want.logits));
                    worst = worst.max(largest(&got, &want));
                    let top = |p: &[f64]| (0..p.len()).max_by(|&a, &b| p[a].total_cmp(&p[b]));
                    flips += usize::from(top(&got) != top(&want));
                }
            }
            println!("deviation of {checkpoint} in {precision}: {worst:.5} in probability, {flips} other answers");
            assert!(worst <= bound, "{checkpoint} in {precision}: {worst}");
        }
    }
}

#[test]
fn cuda_replays_give_the_same_bits() {
    let Some(device) = gpu() else { return };
    for precision in [DType::F32, DType::F16] {
        let all = passes(&device, "tiny-en", precision);
        assert!(all[1] == all[0] && all[2] == all[0], "{precision}: rows alone");
        assert!(all[4] == all[3] && all[5] == all[3], "{precision}: rows together");
    }
}

#[test]
fn cuda_tracing_shows_the_states_of_the_processor() {
    let Some(device) = gpu() else { return };
    for row in recorded().iter().filter(|r| r.row.ids.len() < 200) {
        let folder = fixtures().join(&row.checkpoint);
        let (_, got) = open(&folder, &device, DType::F32).trace(&row.row).unwrap();
        let (_, want) = open(&folder, &Device::cpu(), DType::F32).trace(&row.row).unwrap();
        for (got, want) in got.iter().zip(&want) {
            let error = largest(&wide(&got.values), &wide(&want.values));
            assert!(got.name == want.name && error <= 1e-4, "{} at {}: {error:e}", row.name, got.name);
        }
    }
}

/// Heads of 64, a window and rows beyond it: what the matrix units take.
fn larger(head_layers: usize, layout: OptionLayout) -> (EncoderConfig, AgentConfig) {
    let layers = [LayerKind::Full, LayerKind::Sliding, LayerKind::Sliding, LayerKind::Full, LayerKind::Sliding];
    let encoder = EncoderConfig {
        hidden: 256,
        intermediate: 352,
        heads: 4,
        layers: layers.to_vec(),
        local_attention: 128,
        max_positions: 2048,
        ..DemoShape::Tiny.encoder()
    };
    (encoder, AgentConfig { head_layers, option_layout: layout, ..DemoShape::Tiny.agent() })
}

fn compare(device: &Device, path: &Path, rows: &[Row]) {
    let want = open(path, &Device::cpu(), DType::F32).score(rows).unwrap();
    for (precision, bound) in [(DType::F32, 1e-4), PROBABILITIES[0], PROBABILITIES[1]] {
        let mut model = open(path, device, precision);
        let mut worst = 0f64;
        for _ in 0..3 {
            for (got, want) in model.score(rows).unwrap().iter().zip(&want) {
                let p = |s: &RowScores| probabilities(&wide(&s.logits));
                worst = worst.max(largest(&p(got), &p(want)));
            }
        }
        println!("{} rows of a random checkpoint in {precision}: {worst:.6} in probability", rows.len());
        assert!(worst <= bound, "{precision}: {worst}");
    }
}

#[test]
fn cuda_scores_of_larger_random_checkpoints_are_those_of_the_processor() {
    let Some(device) = gpu() else { return };
    for (head_layers, layout) in
        [(2, OptionLayout::Sequential), (1, OptionLayout::Parallel), (0, OptionLayout::Sequential)]
    {
        let (encoder, agent) = larger(head_layers, layout);
        let (_folder, path) = random_checkpoint(&encoder, &agent, 7);
        let rng = &mut XorShift::new(11);
        let rows: Vec<Row> = [1, 5, 64, 65, 129, 130, 200, 383, 500]
            .into_iter()
            .map(|length| random_row(rng, encoder.vocab_size, length, layout))
            .collect();
        compare(&device, &path, &rows);
        compare(&device, &path, &rows[4..5]);
        // A long one; it is padded, too.
        compare(&device, &path, &[random_row(rng, encoder.vocab_size, 1100, layout)]);
    }
}
