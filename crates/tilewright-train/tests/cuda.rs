//! Training on a GPU: against the processor, between precisions, from a checkpoint, and again. Runs where `TILEWRIGHT_TEST_CUDA` is set and the
//! crate is built with `--features tilewright-ops/cuda`, or where `TILEWRIGHT_TEST_GPU` is and it is built with `tilewright-ops/vulkan` or `metal`;
//! says NOT TESTED elsewhere. A driver that computes on the processor gets a model of two layers.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use tilewright_core::DType;
use tilewright_core::format::checkpoint::{done_path, model_path, state_path};
use tilewright_core::gpt2::PARAMS;
use tilewright_models::plan::{Report, plan_on};
use tilewright_models::{AdamW, Gpt2, Gpt2Config, Options, Recompute};
use tilewright_ops::Device;
use tilewright_train::config::{Data, Model, TrainConfig};
use tilewright_train::loader::{Geometry, Loader, ShardSet};
use tilewright_train::run::{Outcome, RunOptions, Silent, train};

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

/// d12, or what software gets through.
fn config(software: bool) -> Gpt2Config {
    match software {
        false => Gpt2Config::from_descriptor("d12").unwrap(),
        true => {
            Gpt2Config { layers: 2, heads: 2, channels: 64, vocab_size: 500, padded_vocab_size: 512, max_seq_len: 128 }
        }
    }
}

/// A sequence length, of software a short one.
fn length(device: &Device, length: usize) -> usize {
    if device.is_software() { length.min(96) } else { length }
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn loader(batch: usize, seq_len: usize) -> Loader {
    let shards = ShardSet::open(&[data("synthetic_train.bin")], Geometry::single(batch, seq_len), 50257).unwrap();
    Loader::new(shards, Some(42), true).unwrap()
}

fn model(device: &Device, batch: usize, seq_len: usize, dtype: DType) -> Gpt2 {
    model_of(config(device.is_software()), device, batch, seq_len, dtype)
}

fn model_of(config: Gpt2Config, device: &Device, batch: usize, seq_len: usize, dtype: DType) -> Gpt2 {
    let options = Options { dtype, masters: dtype != DType::F32, ..Options::training(batch, seq_len) };
    let mut model = Gpt2::new(device, config, options).unwrap();
    model.init_random(42).unwrap();
    if dtype != DType::F32 {
        model.masters_from_params().unwrap();
    }
    model
}

/// Ids below the model's vocabulary.
fn known(model: &Gpt2, ids: &[i32]) -> Vec<i32> {
    ids.iter().map(|id| id % model.config().vocab_size as i32).collect()
}

fn adamw(step: usize) -> AdamW {
    AdamW {
        lr: 3e-4,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        decay_all: false,
        step: step as u64 + 1,
        grad_scale: 1.0,
        max_norm: Some(1.0),
        stochastic_seeds: None,
    }
}

/// Losses of some updates.
fn losses(model: &mut Gpt2, steps: usize) -> Vec<f64> {
    let Options { batch, seq_len, .. } = *model.options();
    let rows = (batch * seq_len) as f32;
    let mut loader = loader(batch, seq_len);
    (0..steps)
        .map(|step| {
            let batch = loader.next_batch().unwrap();
            let (inputs, targets) = (known(model, batch.inputs), known(model, batch.targets));
            let sum = model.forward_backward(&inputs, &targets, false, 1.0 / rows).unwrap();
            model.grad_norm().unwrap();
            model.update(&adamw(step)).unwrap();
            f64::from(sum / rows)
        })
        .collect()
}

fn bytes(model: &Gpt2) -> Vec<u8> {
    let mut all = Vec::new();
    for tensor in model.params().iter().chain(model.m()).chain(model.v()).chain(model.masters()) {
        let at = all.len();
        all.resize(at + tensor.bytes(), 0);
        tensor.read_bytes(0, &mut all[at..]).unwrap();
    }
    all
}

#[test]
fn losses_in_f32_are_those_of_the_processor() {
    let Some(gpu) = gpu() else { return };
    let config = config(gpu.is_software());
    let want = losses(&mut model_of(config, &Device::cpu(), 4, 64, DType::F32), 6);
    let got = losses(&mut model(&gpu, 4, 64, DType::F32), 6);
    for (step, (got, want)) in got.iter().zip(&want).enumerate() {
        println!("step {step}: {got:.6} on the GPU, {want:.6} on the processor");
        assert!((got - want).abs() < 1e-4, "step {step}: {got}, want {want}");
    }
}

#[test]
fn fifty_steps_in_bf16_stay_within_two_percent_of_f32() {
    let Some(gpu) = gpu() else { return };
    let want = losses(&mut model(&gpu, 4, 64, DType::F32), 50);
    let got = losses(&mut model(&gpu, 4, 64, DType::BF16), 50);
    let worst = got.iter().zip(&want).map(|(g, w)| (g - w).abs() / w).fold(0.0, f64::max);
    println!("loss {:.4} to {:.4}, largest deviation of bf16 {:.3} %", want[0], want[49], 100.0 * worst);
    assert!(want[49] < want[0], "it learns");
    assert!(worst < 0.02, "{worst}");
}

#[test]
fn two_runs_give_the_same_bits() {
    let Some(gpu) = gpu() else { return };
    for (dtype, seq_len) in [(DType::BF16, 1024), (DType::F32, 64)] {
        let seq_len = length(&gpu, seq_len);
        let run = || {
            let mut model = model(&gpu, 4, seq_len, dtype);
            let losses = losses(&mut model, 4);
            (losses, bytes(&model))
        };
        let ((first, a), (second, b)) = (run(), run());
        assert_eq!(first, second, "{dtype}");
        assert!(a == b, "{dtype}: the parameters, moments and masters differ");
    }
}

#[test]
fn a_replayed_step_gives_the_bits_of_the_first() {
    let Some(gpu) = gpu() else { return };
    let mut model = model(&gpu, 2, 128, DType::BF16);
    let mut loader = loader(2, 128);
    let batch = loader.next_batch().unwrap();
    let (inputs, targets) = (known(&model, batch.inputs), known(&model, batch.targets));
    let mut first = None;
    for call in 0..4 {
        let sum = model.forward_backward(&inputs, &targets, false, 1.0 / 256.0).unwrap();
        let grads: Vec<Vec<f32>> = model.grads().iter().map(|g| g.read_f32().unwrap()).collect();
        let now = (sum, grads);
        assert!(first.get_or_insert_with(|| now.clone()) == &now, "call {call}");
    }
}

#[test]
fn no_bias_gradient_is_zero_in_any_layer() {
    let Some(gpu) = gpu() else { return };
    for dtype in [DType::BF16, DType::F32] {
        let mut model = model(&gpu, 4, length(&gpu, 1024), dtype);
        losses(&mut model, 1);
        for (info, grad) in PARAMS.iter().zip(model.grads()).filter(|(info, _)| info.name.ends_with('b')) {
            let values = grad.read_f32().unwrap();
            let layers = if info.stacked { model.config().layers } else { 1 };
            for (layer, row) in values.chunks_exact(values.len() / layers).enumerate() {
                let there = row.iter().filter(|g| **g != 0.0).count();
                // A key's bias moves all scores of a query alike, so its exact gradient is nought: a third of qkvb may round to it.
                assert!(2 * there > row.len(), "{dtype} {} of layer {layer}: {there} of {}", info.name, row.len());
            }
        }
    }
}

#[test]
fn micro_batches_give_the_gradients_of_the_whole() {
    let Some(gpu) = gpu() else { return };
    for (dtype, bound) in [(DType::F32, 1e-4), (DType::BF16, 3e-2)] {
        let mut loader = loader(4, 64);
        let batch = loader.next_batch().unwrap();
        let mut whole = model(&gpu, 4, 64, dtype);
        let mut parts = model(&gpu, 2, 64, dtype);
        let (inputs, targets) = (known(&whole, batch.inputs), known(&whole, batch.targets));
        let sum = whole.forward_backward(&inputs, &targets, false, 1.0 / 256.0).unwrap();
        // Twice, so that the second time both micro-batches are replayed.
        for _ in 0..3 {
            let mut pieces = 0.0;
            for (i, (x, y)) in inputs.chunks(128).zip(targets.chunks(128)).enumerate() {
                pieces += parts.forward_backward(x, y, i > 0, 1.0 / 256.0).unwrap();
            }
            assert!((sum - pieces).abs() / sum < 1e-3, "{dtype}: {sum} {pieces}");
            for (info, (a, b)) in PARAMS.iter().zip(whole.grads().iter().zip(parts.grads())) {
                let (a, b) = (a.read_f32().unwrap(), b.read_f32().unwrap());
                let square = |x: &[f32]| x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
                let apart: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a - b).collect();
                let error = (square(&apart) / square(&a)).sqrt();
                assert!(error < bound, "{dtype} {}: {error}", info.name);
            }
        }
    }
}

#[test]
fn recompute_modes_give_one_another_s_losses() {
    let Some(gpu) = gpu() else { return };
    let run = |recompute| {
        let options = Options { recompute, dtype: DType::BF16, masters: true, ..Options::training(4, 64) };
        let mut model = Gpt2::new(&gpu, config(gpu.is_software()), options).unwrap();
        model.init_random(42).unwrap();
        model.masters_from_params().unwrap();
        losses(&mut model, 4)
    };
    let all = run(Recompute::None);
    for other in [Recompute::Gelu, Recompute::GeluAndLayernorm] {
        for (a, b) in all.iter().zip(run(other)) {
            assert!((a - b).abs() / a < 2e-3, "{other:?}: {a} {b}");
        }
    }
}

#[test]
fn a_token_outside_the_vocabulary_is_refused_in_a_replay_too() {
    let Some(gpu) = gpu() else { return };
    let config = config(gpu.is_software());
    let vocab = config.vocab_size as i32;
    let mut model = Gpt2::new(&gpu, config, Options::training(1, 8)).unwrap();
    model.init_random(1).unwrap();
    for _ in 0..3 {
        model.forward_backward(&[1; 8], &[2; 8], false, 0.125).unwrap();
        let error =
            model.forward_backward(&[1, 2, 3, vocab, 5, 6, 7, 8], &[2; 8], false, 0.125).unwrap_err().to_string();
        assert!(error.contains(&vocab.to_string()) && error.contains("(0, 3)"), "{error}");
    }
}

#[test]
fn a_resumed_run_writes_the_files_of_an_undisturbed_one() {
    let Some(gpu) = gpu() else { return };
    let dir = tempfile::tempdir().unwrap();
    for dtype in ["bf16", "f32"] {
        let config = TrainConfig {
            data: Data::Shards {
                train: data("synthetic_train.bin").display().to_string(),
                val: Some(data("synthetic_val.bin").display().to_string()),
                vocab_size: 50257,
            },
            model: Model::Sized { layers: 2, heads: 4, channels: if gpu.is_software() { 32 } else { 256 } },
            dtype: dtype.into(),
            batch: 2,
            seq_len: 64,
            total_batch: Some(256),
            steps: Some(12),
            warmup: 2,
            val_every: 4,
            val_batches: Some(2),
            sample_every: 12,
            sample_tokens: 8,
            checkpoint_every: Some(6),
            ..TrainConfig::for_shards(String::new(), None)
        };
        let run = |name: &str, resume: bool| {
            let folder = dir.path().join(format!("{name}-{dtype}"));
            let options = RunOptions { folder: Some(&folder), resume, overwrite: false };
            let outcome = train(&config, &options, &gpu, &AtomicBool::new(false), &mut Silent).unwrap();
            assert!(matches!(outcome, Outcome::Finished(_)));
            folder
        };
        let whole = run("whole", false);
        let parts = run("parts", false);
        // As after a kill behind the first checkpoint: what came later is gone.
        for path in [done_path(&parts, 12), model_path(&parts, 12), state_path(&parts, 12, 0)] {
            std::fs::remove_file(path).unwrap();
        }
        run("parts", true);
        for path in [model_path(&whole, 12), state_path(&whole, 12, 0)] {
            let other = parts.join(path.file_name().unwrap());
            assert!(std::fs::read(&path).unwrap() == std::fs::read(&other).unwrap(), "{dtype} {}", path.display());
        }
    }
}

#[test]
fn the_plan_for_a_gpu_is_what_a_model_holds_there() {
    let Some(device) = gpu() else { return };
    let before = device.live_bytes();
    for (batch, seq_len, dtype) in [(2, 64, DType::BF16), (4, 1024, DType::BF16), (1, 96, DType::F32)] {
        let (config, seq_len) = (config(device.is_software()), length(&device, seq_len));
        let options = Options { dtype, masters: dtype != DType::F32, ..Options::training(batch, seq_len) };
        let planned = plan_on(&device.planner(), &config, &options).unwrap();
        assert_eq!(device.live_bytes(), before, "planning allocates nothing");
        let model = Gpt2::new(&device, config, options).unwrap();
        assert_eq!(Report::of(&model), planned);
        assert_eq!(device.live_bytes() - before + device.scratch_bytes(), planned.peak_bytes());
    }
}

#[test]
fn a_model_that_does_not_fit_is_refused_from_its_plan_with_nothing_allocated() {
    let Some(device) = gpu() else { return };
    let before = device.live_bytes();
    let config = Gpt2Config::from_descriptor("d12").unwrap();
    let error = Gpt2::new(&device, config, Options::training(1 << 14, 1024)).err().expect("it is refused");
    let message = error.to_string();
    assert!(message.contains("B=16384 T=1024") && message.contains("smaller batch"), "{message}");
    assert_eq!(device.live_bytes(), before);
}
