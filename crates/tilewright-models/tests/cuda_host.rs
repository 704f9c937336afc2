//! The host's side of the CUDA device without a GPU: a training step and passes of an encoder on the stand-in of the driver and the matrix library
//! (`lab/cuda-standin`), which computes nothing but refuses launches that do not fit their kernel, matrices outside of allocated memory,
//! and replays of graphs whose memory is gone. Run by `.ci/cuda-host`; says NOT TESTED elsewhere.

use tilewright_core::DType;
use tilewright_models::laya::demo::{self, DemoShape};
use tilewright_models::laya::{AgentConfig, Laya, LoadOptions, QuestionType, Row, Scorer};
use tilewright_models::modernbert::{EncoderConfig, LayerKind};
use tilewright_models::plan::plan_on;
use tilewright_models::{AdamW, Gpt2, Gpt2Config, Options, Recompute};
use tilewright_ops::Device;

fn standin() -> Option<Device> {
    if std::env::var_os("TILEWRIGHT_CUDA_STANDIN").is_none() {
        println!("NOT TESTED: TILEWRIGHT_CUDA_STANDIN is not set; run .ci/cuda-host");
        return None;
    }
    let device = Device::cuda(0).unwrap();
    assert!(device.name().contains("stand-in"), "this test is for the stand-in, not for {}", device.name());
    Some(device)
}

/// Heads of 64, which the matrix units take, or of 16, which they do not.
fn config(heads: usize) -> Gpt2Config {
    Gpt2Config { max_seq_len: 256, vocab_size: 1000, padded_vocab_size: 1024, layers: 2, heads, channels: 128 }
}

fn adamw(step: u64) -> AdamW {
    AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        decay_all: false,
        step,
        grad_scale: 1.0,
        max_norm: Some(1.0),
        stochastic_seeds: step.is_multiple_of(2).then_some([7; 16]),
    }
}

fn steps(device: &Device, config: Gpt2Config, options: Options) {
    let mut model = Gpt2::new(device, config, options).unwrap();
    model.init_random(1).unwrap();
    if options.masters {
        model.masters_from_params().unwrap();
    }
    let tokens: Vec<i32> = (0..options.batch * options.seq_len).map(|i| (i * 31 % 1000) as i32).collect();
    // The second run of each part is recorded, later ones are replayed.
    for step in 1..=4 {
        for micro in 0..2 {
            model.forward_backward(&tokens, &tokens, micro > 0, 1.0).unwrap();
        }
        model.grad_norm().unwrap();
        model.update(&adamw(step)).unwrap();
        model.loss(&tokens, &tokens).unwrap();
    }
}

#[test]
fn training_steps_of_every_storage_type_and_recompute_mode_fit_their_kernels_and_memory() {
    let Some(device) = standin() else { return };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for recompute in [Recompute::None, Recompute::Gelu, Recompute::GeluAndLayernorm] {
            for (heads, batch, seq_len) in [(2, 3, 17), (8, 1, 5), (2, 2, 256)] {
                let options =
                    Options { recompute, dtype, masters: dtype != DType::F32, ..Options::training(batch, seq_len) };
                steps(&device, config(heads), options);
            }
        }
    }
    assert_eq!(device.live_bytes(), 0, "every arena is given back");
}

#[test]
fn a_model_takes_what_its_plan_says_and_no_more_in_later_steps() {
    let Some(device) = standin() else { return };
    let options = Options { dtype: DType::BF16, masters: true, ..Options::training(2, 64) };
    let planned = plan_on(&device.planner(), &config(2), &options).unwrap();
    assert_eq!(device.live_bytes(), 0, "planning allocates nothing");
    let mut model = Gpt2::new(&device, config(2), options).unwrap();
    let tokens = vec![1; 128];
    model.forward_backward(&tokens, &tokens, false, 1.0).unwrap();
    let first = device.live_bytes();
    assert_eq!(first + device.scratch_bytes(), planned.peak_bytes());
    for _ in 0..3 {
        model.forward_backward(&tokens, &tokens, false, 1.0).unwrap();
    }
    assert_eq!(device.live_bytes(), first);
}

#[test]
fn a_model_that_exceeds_the_memory_is_refused_before_anything_is_allocated() {
    let Some(device) = standin() else { return };
    let config = Gpt2Config::from_descriptor("d48").unwrap();
    let error =
        Gpt2::new(&device, config, Options::training(64, 1024)).err().expect("48 layers do not fit").to_string();
    assert!(error.contains("memory") || error.contains("bytes"), "{error}");
    assert_eq!(device.live_bytes(), 0);
}

fn row(length: usize, seed: usize) -> Row {
    Row {
        ids: (0..length).map(|i| ((i * 7919 + seed * 104_729 + 13) % 100) as u32).collect(),
        question: QuestionType::ALL[seed % 3],
        markers: (0..length.min(4)).map(|i| i as u32).collect(),
        positions: None,
    }
}

#[test]
fn passes_over_rows_of_any_length_fit_their_kernels_and_memory() {
    let Some(device) = standin() else { return };
    let layers = [LayerKind::Full, LayerKind::Sliding, LayerKind::Sliding, LayerKind::Full];
    let encoder = EncoderConfig {
        hidden: 256,
        intermediate: 352,
        heads: 4,
        layers: layers.to_vec(),
        local_attention: 128,
        max_positions: 2048,
        ..DemoShape::Tiny.encoder()
    };
    for head_layers in [2, 0] {
        let agent = AgentConfig { head_layers, ..DemoShape::Tiny.agent() };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoint");
        demo::write_checkpoint(&path, &encoder, &agent, DType::F32, 3).unwrap();
        for precision in [DType::F32, DType::F16, DType::BF16] {
            let load = LoadOptions { precision, device: device.clone(), ..LoadOptions::default() };
            let mut model = Laya::open(&path, &load).unwrap();
            for lengths in [&[1][..], &[5, 64], &[65, 129, 383, 1], &[500; 3], &[1100], &[130; 9]] {
                let rows: Vec<Row> = lengths.iter().enumerate().map(|(i, &length)| row(length, i)).collect();
                // Run, recorded, replayed.
                for _ in 0..3 {
                    assert_eq!(model.score(&rows).unwrap().len(), rows.len());
                }
            }
        }
    }
    assert_eq!(device.live_bytes(), 0, "every arena is given back");
}

#[test]
fn devices_on_several_threads_at_once_do_not_meet() {
    if standin().is_none() {
        return;
    }
    std::thread::scope(|scope| {
        for seed in 0..6_usize {
            scope.spawn(move || {
                for round in 0..3 {
                    let device = Device::cuda(0).unwrap();
                    let dtype = if (seed + round).is_multiple_of(2) { DType::BF16 } else { DType::F32 };
                    let options = Options { dtype, masters: true, ..Options::training(1 + seed, 32) };
                    steps(&device, config(2), options);
                }
            });
        }
    });
}
