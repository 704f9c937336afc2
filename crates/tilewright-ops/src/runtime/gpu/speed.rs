//! Large calls on a GPU that is no software: some elements against exact sums, and how long they took, printed.

use std::time::{Duration, Instant};

use crate::attention::gpu::units::Units;
use crate::attention::gpu::units_backward::{Part, part};
use crate::testing::{Random, gpus, is_portable, is_software};
use crate::{DType, Device, Tensor, attention, matmul};

fn real_gpus() -> Vec<Device> {
    let found: Vec<_> = gpus().into_iter().filter(|d| is_portable(d) && !is_software(d)).collect();
    if found.is_empty() {
        println!("NOT MEASURED: no GPU through Vulkan or Metal was asked for, or it is software");
    }
    found
}

/// Seconds of one call, the best of five runs of ten.
fn seconds(device: &Device, mut call: impl FnMut()) -> f64 {
    // An idle GPU takes more than a second to its clock.
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1500) {
        (0..8).for_each(|_| call());
        device.synchronize().unwrap();
    }
    let mut best = f64::INFINITY;
    for _ in 0..5 {
        let start = Instant::now();
        for _ in 0..10 {
            call();
        }
        device.synchronize().unwrap();
        best = best.min(start.elapsed().as_secs_f64() / 10.0);
    }
    best
}

fn filled(device: &Device, dtype: DType, shape: &[usize], seed: u64) -> (Tensor, Vec<f32>) {
    let mut rng = Random::new(seed);
    let n = shape.iter().product();
    // A short random pattern, long enough that no rows are alike.
    let pattern: Vec<f32> = (0..65_537).map(|_| rng.normal(0.5)).collect();
    let values: Vec<f32> = (0..n).map(|i| pattern[i % pattern.len()]).collect();
    let t = Tensor::from_f32(device, dtype, shape, &values).unwrap();
    let exact = t.read_f32().unwrap();
    (t, exact)
}

#[test]
fn large_products_are_right_where_they_are_looked_at() {
    for device in real_gpus() {
        for (dtype, size) in [(DType::F32, 2048), (DType::F16, 4096), (DType::BF16, 4096), (DType::BF16, 8192)] {
            let (x, a) = filled(&device, dtype, &[size, size], 1);
            let (weight, b) = filled(&device, dtype, &[size, size], 2);
            let out = Tensor::zeros(&device, dtype, &[size, size]).unwrap();
            let args = matmul::Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out };
            let took = seconds(&device, || matmul::forward(&device, &args).unwrap());
            let tflops = 2.0 * (size as f64).powi(3) / took / 1e12;
            println!("{} matmul.forward {dtype} {size}^3: {:.3} ms, {tflops:.1} TFLOP/s", device.name(), took * 1e3);
            let got = out.read_f32().unwrap();
            for at in [0, 1, size + 7, size * size / 2 + 13, size * size - 1] {
                let (i, j) = (at / size, at % size);
                let want: f64 = (0..size).map(|p| f64::from(a[i * size + p]) * f64::from(b[j * size + p])).sum();
                assert!(
                    (f64::from(got[at]) - want).abs() < 0.3 + 0.01 * want.abs(),
                    "{dtype} [{i}, {j}]: {} {want}",
                    got[at]
                );
            }
        }
    }
}

#[test]
fn attention_at_gpt2_size_is_finite_and_its_time_known() {
    for device in real_gpus() {
        for dtype in [DType::F32, DType::BF16] {
            let (b, t, heads, head) = (4, 1024, 12, 64);
            let c = heads * head;
            let (qkv, _) = filled(&device, dtype, &[b, t, 3 * c], 3);
            let (out, dout) =
                (Tensor::zeros(&device, dtype, &[b, t, c]).unwrap(), filled(&device, dtype, &[b, t, c], 4).0);
            let lse = Tensor::zeros(&device, DType::F32, &[b, heads, t]).unwrap();
            let dqkv = Tensor::zeros(&device, dtype, &[b, t, 3 * c]).unwrap();
            let bytes = attention::workspace_bytes(&device, b, t, c, heads);
            let workspace = Tensor::zeros(&device, DType::U8, &[bytes]).unwrap();
            let mask = attention::Mask::Causal;
            let args = attention::Forward { qkv: &qkv, heads, mask, out: &out, lse: &lse, workspace: &workspace };
            let forward = seconds(&device, || attention::forward(&device, &args).unwrap());
            let (qkv, out, lse, dout, dqkv) = (&qkv, &out, &lse, &dout, &dqkv);
            let args =
                attention::Backward { qkv, heads, mask, out, lse, dout, dqkv, dqkv_sums: None, workspace: &workspace };
            let backward = seconds(&device, || attention::backward(&device, &args).unwrap());
            println!(
                "{} attention {dtype} B=4 T=1024 12x64: forward {:.3} ms, backward {:.3} ms",
                device.name(),
                forward * 1e3,
                backward * 1e3
            );
            assert!(dqkv.read_f32().unwrap().iter().all(|x| x.is_finite()));
            let Device::Gpu(gpu) = &device else { unreachable!("filtered") };
            let Some(units) = Units::of(gpu, dtype, head, &[qkv, out, dout, dqkv]) else { continue };
            let deltas = Tensor::zeros(&device, DType::F32, &[b * heads * t]).unwrap();
            let tensors = [qkv, out, dout, lse, &deltas, dqkv];
            for which in [Part::Deltas, Part::Queries, Part::Keys] {
                let took = seconds(&device, || part(gpu, "speed", units, [b, t, heads], which, tensors).unwrap());
                println!("{} attention {dtype}, {which:?} of the backward pass: {:.3} ms", device.name(), took * 1e3);
            }
        }
    }
}
