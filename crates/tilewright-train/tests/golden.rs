//! GPT-2 d12 against llm.c's own arithmetic; see `data/README.md`. One test, because the model takes 2 GB.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tilewright_core::gpt2::PARAMS;
use tilewright_models::{AdamW, Gpt2, Gpt2Config, Options};
use tilewright_ops::{Device, Tensor};
use tilewright_train::loader::{Geometry, Loader, ShardSet};

const ROWS: usize = 4 * 64;

/// The processor, with `TILEWRIGHT_TEST_CUDA` NVIDIA's GPU, with `TILEWRIGHT_TEST_GPU` that through Vulkan or Metal.
fn device() -> Device {
    let asked = |name| std::env::var_os(name).is_some();
    match (asked("TILEWRIGHT_TEST_CUDA"), asked("TILEWRIGHT_TEST_GPU")) {
        (true, _) => Device::cuda(0).unwrap(),
        (_, true) => Device::gpu(0).unwrap(),
        _ => Device::cpu(),
    }
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(data(name)).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

fn loader(name: &str, seed: Option<u32>) -> Loader {
    Loader::new(ShardSet::open(&[data(name)], Geometry::single(4, 64), 50257).unwrap(), seed, true).unwrap()
}

fn assert_near(got: f64, want: f64, bound: f64, what: &str) {
    assert!((got - want).abs() <= bound, "{what}: {got}, want {want} within {bound:e}");
}

fn sums(tensors: &[Tensor]) -> (f64, f64) {
    let (mut sum, mut squares) = (0.0, 0.0);
    for tensor in tensors {
        for v in tensor.read_f32().unwrap() {
            sum += f64::from(v);
            squares += f64::from(v) * f64::from(v);
        }
    }
    (sum, squares)
}

fn initialisation(model: &Gpt2) {
    let (sum, squares) = sums(model.params());
    assert_near(sum, 19363.2952, 1e-4, "sum of the initial parameters");
    assert_near(squares, 55361.5506, 1e-4, "sum of their squares");
    let first = model.params()[0].slice(0, &[4]).unwrap().read_f32().unwrap();
    for (got, want) in first.iter().zip([0.0385382995, 0.0297456831, 0.0180143435, -0.0421104282]) {
        assert_near(f64::from(*got), want, 5e-9, "wte");
    }
}

fn logits(model: &mut Gpt2, inputs: &[i32], golden: &Value) {
    let logits = model.logits(inputs).unwrap();
    let v = model.config().vocab_size;
    for (i, want) in numbers(&golden["logits_bt0_first10"]).iter().enumerate() {
        assert_near(f64::from(logits[i]), *want, 2e-5, "logits of the first row");
    }
    let sum: f64 = logits.iter().map(|l| f64::from(*l)).sum();
    let squares: f64 = logits.iter().map(|l| f64::from(*l).powi(2)).sum();
    assert_near(sum, golden["logits_sum"].as_f64().unwrap(), 0.2, "sum of the logits");
    assert_near(squares / golden["logits_sumsq"].as_f64().unwrap(), 1.0, 1e-6, "sum of squares of the logits");
    for run in json("golden_slices.json")["logits"].as_array().unwrap() {
        let at = |key: &str| run[key].as_u64().unwrap() as usize;
        let start = (at("b") * 64 + at("t")) * v + at("v");
        for (i, want) in numbers(&run["values"]).iter().enumerate() {
            assert_near(f64::from(logits[start + i]), *want, 2e-5, &format!("logit {i} of {run}"));
        }
    }
}

fn gradients(model: &Gpt2, golden: &Value) {
    let slices = json("golden_slices.json");
    let slices = slices.as_object().unwrap().iter().find(|(k, _)| k.starts_with("grad")).unwrap().1;
    for (info, tensor) in PARAMS.iter().zip(model.grads()) {
        let want = &golden["grads"][info.name];
        let values = tensor.read_f32().unwrap();
        let norm = values.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        assert_near(norm / want["l2"].as_f64().unwrap(), 1.0, 1e-5, &format!("gradient norm of {}", info.name));
        let bound = 1e-5 + 1e-4 * want["maxabs"].as_f64().unwrap();
        for (i, w) in numbers(&want["first3"]).iter().enumerate() {
            assert_near(f64::from(values[i]), *w, bound, &format!("gradient {i} of {}", info.name));
        }
        let mut compared = 0;
        for run in slices.as_array().unwrap().iter().filter(|r| r["tensor"] == info.name) {
            let offset = run["offset"].as_u64().unwrap() as usize;
            for (i, w) in numbers(&run["values"]).iter().enumerate() {
                assert_near(f64::from(values[offset + i]), *w, bound, &format!("{}[{}]", info.name, offset + i));
                compared += 1;
            }
        }
        assert!(compared > 0, "no slice of {}", info.name);
    }
}

/// Up to ten updates on one batch, as llm.c's `test_gpt2` makes them.
fn one_batch_again_and_again(model: &mut Gpt2, steps: usize) {
    let golden = json("golden.json");
    let mut val = loader("synthetic_val.bin", None);
    let batch = val.next_batch().unwrap();
    let (inputs, targets) = (batch.inputs.to_vec(), batch.targets.to_vec());
    logits(model, &inputs, &golden);
    for (step, want) in numbers(&golden["losses"]).iter().enumerate().take(steps) {
        let sum = model.forward_backward(&inputs, &targets, false, 1.0 / ROWS as f32).unwrap();
        let bound = if step == 0 { 1e-5 } else { 5e-4 };
        assert_near(f64::from(sum) / ROWS as f64, *want, bound, &format!("loss of step {step}"));
        if step == 0 {
            gradients(model, &golden);
            let norm = f64::from(model.grad_norm().unwrap());
            assert_near(norm / golden["grad_norm"].as_f64().unwrap(), 1.0, 1e-5, "gradient norm");
        }
        println!("step {step}: loss {:.6}, llm.c's {want:.6}", f64::from(sum) / ROWS as f64);
        model.update(&adamw(step, 0.01)).unwrap();
    }
    if steps < 10 {
        println!("NOT TESTED on software unless TILEWRIGHT_TEST_WHOLE is set: what lies behind step {steps}");
        return;
    }
    let (sum, squares) = sums(model.params());
    assert_near(sum, golden["params_after_10_sum"].as_f64().unwrap(), 0.5, "sum of the parameters after ten updates");
    assert_near(squares, golden["params_after_10_sumsq"].as_f64().unwrap(), 0.1, "sum of their squares");
}

fn adamw(step: usize, weight_decay: f32) -> AdamW {
    AdamW {
        lr: 1e-4,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay,
        decay_all: true,
        step: step as u64 + 1,
        grad_scale: 1.0,
        max_norm: None,
        stochastic_seeds: None,
    }
}

/// The first steps of llm.c's trainer with its shuffled loader, and its first validation.
fn shuffled_trajectory(model: &mut Gpt2) {
    let log = std::fs::read_to_string(data("run_ofast_t2.log")).unwrap();
    let mut val = loader("synthetic_val.bin", None);
    let mut sum = 0.0;
    for _ in 0..5 {
        let batch = val.next_batch().unwrap();
        sum += f64::from(model.loss(batch.inputs, batch.targets).unwrap());
    }
    let first_val = log.lines().find_map(|l| l.strip_prefix("val loss ")).unwrap();
    assert_near(sum / 5.0, first_val.parse().unwrap(), 1e-5, "validation loss before training");
    let mut train = loader("synthetic_train.bin", Some(42));
    for step in 0..5 {
        let batch = train.next_batch().unwrap();
        let got = model.forward_backward(batch.inputs, batch.targets, false, 1.0 / ROWS as f32).unwrap();
        let prefix = format!("step {step}: train loss ");
        let line = log.lines().find_map(|l| l.strip_prefix(&prefix)).unwrap();
        let want: f64 = line.split(' ').next().unwrap().parse().unwrap();
        let bound = if step == 0 { 1e-5 } else { 5e-4 };
        assert_near(f64::from(got) / ROWS as f64, want, bound, &format!("shuffled step {step}"));
        model.update(&adamw(step, 0.0)).unwrap();
    }
}

#[test]
fn d12_follows_llmc() {
    let config = Gpt2Config::from_descriptor("d12").unwrap();
    let device = device();
    let mut model = Gpt2::new(&device, config, Options::training(4, 64)).unwrap();
    model.init_random(42).unwrap();
    initialisation(&model);
    // A driver that computes on the processor takes a minute a step.
    let steps = if device.is_software() && std::env::var_os("TILEWRIGHT_TEST_WHOLE").is_none() { 2 } else { 10 };
    one_batch_again_and_again(&mut model, steps);
    if steps < 10 {
        return;
    }
    model.init_random(42).unwrap();
    model.m().iter().chain(model.v()).for_each(Tensor::zero);
    shuffled_trajectory(&mut model);
}
