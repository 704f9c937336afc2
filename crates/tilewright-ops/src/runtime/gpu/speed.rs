//! Large calls on a GPU that is no software: some elements against exact sums, and how long they took, printed.

use std::time::{Duration, Instant};

use super::graph::Graph;
use crate::attention::gpu::units::Units;
use crate::attention::gpu::units_backward::{Part, part};
use crate::gelu::Gelu;
use crate::testing::{Random, gpus, is_portable, is_software};
use crate::{DType, Device, Tensor, adamw, attention, embedding, global_norm, layernorm, linear_cross_entropy, matmul};

fn real_gpus() -> Vec<Device> {
    let found: Vec<_> = gpus().into_iter().filter(|d| is_portable(d) && !is_software(d)).collect();
    if found.is_empty() {
        println!("NOT MEASURED: no GPU through Vulkan or Metal was asked for, or it is software");
    }
    found
}

/// Seconds of one call, the best of six runs of twenty; recorded once and replayed where the runtime can, as a step is.
fn seconds(device: &Device, mut call: impl FnMut()) -> f64 {
    // An idle GPU, as it is while the first call's kernels compile, takes more than a second to its clock.
    call();
    device.synchronize().unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(1500) {
        (0..8).for_each(|_| call());
        device.synchronize().unwrap();
    }
    let Device::Gpu(gpu) = device else { unreachable!("filtered") };
    let graph = gpu.records().then(|| {
        Graph::record(gpu.core(), || {
            (0..10).for_each(|_| call());
            Ok(())
        })
        .unwrap()
    });
    let mut best = f64::INFINITY;
    for _ in 0..6 {
        let start = Instant::now();
        match &graph {
            Some(graph) => (0..2).for_each(|_| graph.replay().unwrap()),
            None => (0..20).for_each(|_| call()),
        }
        device.synchronize().unwrap();
        best = best.min(start.elapsed().as_secs_f64() / 20.0);
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
            for which in [Part::Queries, Part::Keys] {
                let took = seconds(&device, || part(gpu, "speed", units, [b, t, heads], which, tensors).unwrap());
                println!("{} attention {dtype}, {which:?} of the backward pass: {:.3} ms", device.name(), took * 1e3);
            }
        }
    }
}

/// What a GPT-2 124M step of B=4 T=1024 in bf16 is made of, beside attention: milliseconds of a call, and of all such calls of a step.
#[test]
fn the_parts_of_a_gpt2_step_and_their_time() {
    const DTYPE: DType = DType::BF16;
    for device in real_gpus() {
        let (b, t, c, layers, vocab, vp) = (4, 1024, 768, 12, 50_257, 50_304);
        let n = b * t;
        let make = |shape: &[usize], seed| filled(&device, DTYPE, shape, seed).0;
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
        let mut total = 0.0;
        let mut part = |name: &str, calls: usize, call: &mut dyn FnMut()| {
            let Device::Gpu(gpu) = &device else { unreachable!("filtered") };
            let before = gpu.launches();
            call();
            let launches = gpu.launches() - before;
            let took = seconds(&device, call) * 1e3;
            total += took * calls as f64;
            println!("PART {name}: {took:.4} ms ({launches} launches), {calls} calls {:.2} ms", took * calls as f64);
        };
        let none = zeros(DType::F32, &[64]);
        part("one small launch", 1, &mut || none.zero());
        for (name, k, m) in [("qkv", c, 3 * c), ("attention projection", c, c), ("up", c, 4 * c), ("down", 4 * c, c)] {
            let (x, weight, bias) = (make(&[n, k], 1), make(&[m, k], 2), make(&[m], 3));
            let (out, pre) = (make(&[n, m], 4), zeros(DTYPE, &[n, m]));
            let (dx, dweight) = (zeros(DTYPE, &[n, k]), zeros(DTYPE, &[m, k]));
            let wide = name == "up";
            let (gelu, pre_gelu) = (wide.then_some(Gelu::Tanh), wide.then_some(&pre));
            let forward = matmul::Forward { x: &x, weight: &weight, bias: Some(&bias), gelu, pre_gelu, out: &out };
            part(&format!("{name} forward"), layers, &mut || matmul::forward(&device, &forward).unwrap());
            let input = matmul::BackwardInput {
                dout: &out,
                weight: &weight,
                gelu: (name == "down").then_some((Gelu::Tanh, &x)),
                dx: &dx,
                accumulate: false,
                activation: None,
                dx_sums: None,
            };
            part(&format!("{name} input gradient"), layers, &mut || matmul::backward_input(&device, &input).unwrap());
            let (dout, accumulate) = (&out, false);
            let weights = matmul::BackwardWeight { dout, x: &x, dweight: &dweight, dbias: None, accumulate };
            part(&format!("{name} weight gradient"), layers, &mut || {
                matmul::backward_weight(&device, &weights).unwrap();
            });
            let sums = zeros(DTYPE, &[m]);
            part(&format!("{name} bias gradient"), layers, &mut || {
                let Device::Gpu(gpu) = &device else { unreachable!("filtered") };
                matmul::gpu::bias_gradient(&device, gpu, &out, &sums, false, n, m).unwrap();
            });
        }
        let (x, branch, sum, out) = (make(&[n, c], 1), make(&[n, c], 2), make(&[n, c], 3), make(&[n, c], 4));
        let (weight, bias) = (make(&[c], 5), make(&[c], 6));
        let (mean, rstd) = (zeros(DType::F32, &[n]), zeros(DType::F32, &[n]));
        let forward = layernorm::Forward {
            x: &x,
            residual: Some(layernorm::Residual { branch: &branch, sum: &sum }),
            weight: &weight,
            bias: Some(&bias),
            eps: 1e-5,
            out: &out,
            mean: &mean,
            rstd: &rstd,
        };
        part("layernorm forward", 2 * layers + 1, &mut || layernorm::forward(&device, &forward).unwrap());
        let (dweight, dbias, dx) = (zeros(DTYPE, &[c]), zeros(DTYPE, &[c]), zeros(DTYPE, &[n, c]));
        let workspace = zeros(DType::U8, &[layernorm::backward_workspace_bytes(&device, n, c)]);
        let backward = layernorm::Backward {
            dout: &out,
            sum: &sum,
            weight: &weight,
            mean: &mean,
            rstd: &rstd,
            dx: &dx,
            accumulate_dx: true,
            dweight: &dweight,
            dbias: Some(&dbias),
            accumulate_params: false,
            dx_sums: None,
            again: None,
            workspace: &workspace,
        };
        part("layernorm backward", 2 * layers + 1, &mut || layernorm::backward(&device, &backward).unwrap());
        let (wte, wpe, dwte, dwpe) =
            (make(&[vp, c], 1), make(&[t, c], 2), zeros(DTYPE, &[vp, c]), zeros(DTYPE, &[t, c]));
        let ids: Vec<i32> = (0..n).map(|i| (i * 7919 % vocab) as i32).collect();
        let tokens = Tensor::from_i32(&device, &[b, t], &ids).unwrap();
        let targets = Tensor::from_i32(&device, &[n], &ids).unwrap();
        let encoded = zeros(DTYPE, &[b, t, c]);
        let forward = embedding::Forward { tokens: &tokens, wte: &wte, wpe: &wpe, vocab, position: 0, out: &encoded };
        part("embedding forward", 1, &mut || embedding::forward(&device, &forward).unwrap());
        let workspace = zeros(DType::U8, &[embedding::backward_workspace_bytes(&device, b, t)]);
        let (dout, accumulate_dwpe) = (&encoded, false);
        let (dwte, dwpe, workspace) = (&dwte, &dwpe, &workspace);
        let backward = embedding::Backward { tokens: &tokens, dout, vocab, dwte, dwpe, accumulate_dwpe, workspace };
        part("embedding backward", 1, &mut || embedding::backward(&device, &backward).unwrap());
        let losses = zeros(DType::F32, &[n]);
        let bytes = linear_cross_entropy::forward_backward_workspace_bytes(&device, n, c, vp);
        let workspace = zeros(DType::U8, &[bytes]);
        let bytes = linear_cross_entropy::forward_workspace_bytes(&device, n, c, vp);
        let less = zeros(DType::U8, &[bytes]);
        let head = linear_cross_entropy::Forward {
            hidden: &x,
            weight: &wte,
            vocab,
            targets: &targets,
            ignore_index: -1,
            losses: &losses,
            lse: &mean,
            workspace: &less,
        };
        part("head forward", 0, &mut || linear_cross_entropy::forward(&device, &head).unwrap());
        let head = linear_cross_entropy::ForwardBackward {
            hidden: &x,
            weight: &wte,
            vocab,
            targets: &targets,
            ignore_index: -1,
            losses: &losses,
            dloss: 1.0 / n as f32,
            dhidden: &dx,
            dweight: dwte,
            accumulate_dweight: false,
            workspace: &workspace,
        };
        part("head", 1, &mut || linear_cross_entropy::forward_backward(&device, &head).unwrap());
        let parameters = 124_475_904 / 16;
        let (param, grad) = (zeros(DTYPE, &[parameters]), zeros(DTYPE, &[parameters]));
        let [master, m, v] = [(); 3].map(|()| zeros(DType::F32, &[parameters]));
        let norm = zeros(DType::F32, &[1]);
        let update = adamw::Update {
            param: &param,
            master: Some(&master),
            grad: &grad,
            m: &m,
            v: &v,
            lr: 1e-4,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            step: 3,
            grad_scale: 1.0,
            clip: Some(adamw::Clip { norm: &norm, max_norm: 1.0 }),
            rounding: adamw::Rounding::Stochastic { seed: 7 },
            layers: 1,
            zero_grad: false,
        };
        part("AdamW, a sixteenth", 16, &mut || adamw::update(&device, &update).unwrap());
        let sixteen = [(); 16].map(|()| grad.clone());
        let forward = global_norm::Forward { tensors: &sixteen, out: &norm };
        part("global norm", 1, &mut || global_norm::forward(&device, &forward).unwrap());
        println!("PART all of these: {total:.2} ms");
        assert!(losses.read_f32().unwrap().iter().all(|x| x.is_finite()));
    }
}
