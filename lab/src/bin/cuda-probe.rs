//! What the ops reach on a GPU, beside its two ceilings: bytes copied and bf16 matrix products a second.
//!
//! ```text
//! cargo run --release -p lab --features cuda --bin cuda-probe -- [--json FILE] [--quick]
//! ```
//!
//! Times are medians of device time between events, each sample long enough to hide the launch; inputs are random. Production shapes: GPT-2 124M at
//! B=32 T=1024 and the loss heads of `docs`. A row says time, rate, and share of the ceiling that binds it.

use std::rc::Rc;

use serde_json::{Value, json};
use tilewright_ops::attention::{self, Mask};
use tilewright_ops::gelu::Gelu;
use tilewright_ops::layernorm::{self, Residual};
use tilewright_ops::runtime::cuda::{Cuda, Graph};
use tilewright_ops::{DType, Device, Result, Tensor, adamw, embedding, linear_cross_entropy, matmul};

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let json = words.iter().position(|w| w == "--json").and_then(|i| words.get(i + 1)).cloned();
    let quick = words.iter().any(|w| w == "--quick");
    let device = Device::cuda(0)?;
    let Device::Cuda(cuda) = &device else { unreachable!("opened as CUDA") };
    let mut probe =
        Probe { device: device.clone(), cuda: cuda.clone(), rows: Vec::new(), copy: 0.0, matrix: 0.0, seed: 1 };
    println!("{}, TF32 {}", device.name(), if cuda.tf32() { "on" } else { "off" });
    probe.ceilings()?;
    for result in [
        probe.layernorm(32 * 1024, 768),
        probe.attention(32, 1024, 12, 64),
        probe.attention(4, 1024, 12, 64),
        probe.layers(32 * 1024),
        probe.layers(4 * 1024),
        probe.update(),
        probe.embedding(32, 1024),
        probe.head(32_768, 768, 50_257, 50_304),
        if quick { Ok(()) } else { probe.head(8192, 4096, 151_936, 151_936) },
    ] {
        if let Err(error) = result {
            println!("FAILED: {error}");
            probe.rows.push(json!({"failed": error.to_string()}));
        }
    }
    probe.table();
    if let Some(path) = json {
        let all =
            json!({"device": device.name(), "copy_tb_s": probe.copy, "bf16_tflop_s": probe.matrix, "rows": probe.rows});
        std::fs::write(&path, format!("{all:#}\n")).map_err(tilewright_ops::Error::io("write", path.as_ref()))?;
    }
    Ok(())
}

struct Probe {
    device: Device,
    cuda: Rc<Cuda>,
    rows: Vec<Value>,
    /// TB/s, read and written.
    copy: f64,
    /// TFLOP/s.
    matrix: f64,
    seed: u64,
}

impl Probe {
    /// Random values: cheap on the host, repeated every 1,000,003 elements so that large tensors fill quickly and no two rows of a tile are alike: products
    /// of repeating tiles take less power and run faster.
    fn tensor(&mut self, dtype: DType, shape: &[usize], std: f32) -> Result<Tensor> {
        let t = Tensor::zeros(&self.device, dtype, shape)?;
        let n = t.numel();
        let piece = n.min(1_000_003);
        let values: Vec<f32> = (0..piece)
            .map(|_| {
                let sum: f32 = (0..4).map(|_| self.uniform()).sum();
                (sum - 2.0) * std * 1.732
            })
            .collect();
        t.slice(0, &[piece])?.write_f32(&values)?;
        let first = t.slice(0, &[piece])?;
        for start in (piece..n).step_by(piece) {
            let len = piece.min(n - start);
            t.slice(start, &[len])?.copy_from(&first.slice(0, &[len])?)?;
        }
        Ok(t)
    }

    fn uniform(&mut self) -> f32 {
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        (self.seed >> 40) as f32 / 16_777_216.0
    }

    fn ids(&mut self, shape: &[usize], below: usize) -> Result<Tensor> {
        let n = shape.iter().product();
        // Heavy-tailed, as text is.
        let ids: Vec<i32> = (0..n).map(|_| (below as f32 * self.uniform().powi(4)) as i32).collect();
        Tensor::from_i32(&self.device, shape, &ids)
    }

    /// Median device milliseconds of one call, from replays of a graph of many: what a recorded step pays.
    fn time(&self, call: impl Fn() -> Result<()>) -> Result<f64> {
        call()?;
        let once = self.cuda.timed(&call)?;
        let times = ((4.0 / once.max(0.005)) as usize).clamp(1, 50);
        let graph = Graph::record(&self.cuda, || (0..times).try_for_each(|_| call()))?;
        graph.replay()?;
        let mut samples = (0..7)
            .map(|_| self.cuda.timed(|| graph.replay()).map(|t| f64::from(t) / times as f64))
            .collect::<Result<Vec<_>>>()?;
        samples.sort_by(f64::total_cmp);
        Ok(samples[3])
    }

    /// One row: `flops` and `bytes` that the call cannot do without.
    fn row(&mut self, name: &str, ms: f64, flops: f64, bytes: f64) {
        let (tflops, tbytes) = (flops / ms / 1e9, bytes / ms / 1e9);
        let floor = (flops / self.matrix / 1e9).max(bytes / self.copy / 1e9);
        let row = json!({"name": name, "ms": ms, "tflop_s": tflops, "tb_s": tbytes, "share_of_ceiling": floor / ms});
        self.rows.push(row);
    }

    fn table(&self) {
        println!("ceilings: copy {:.2} TB/s, bf16 8192^3 {:.0} TFLOP/s", self.copy, self.matrix);
        println!("{:<44} {:>9} {:>9} {:>7} {:>6}", "op", "ms", "TFLOP/s", "TB/s", "%");
        for row in &self.rows {
            let number = |key: &str| row[key].as_f64().unwrap_or(f64::NAN);
            let name = row["name"].as_str().unwrap_or("failed");
            let share = 100.0 * number("share_of_ceiling");
            println!(
                "{name:<44} {:>9.4} {:>9.1} {:>7.2} {share:>6.1}",
                number("ms"),
                number("tflop_s"),
                number("tb_s")
            );
        }
    }

    fn ceilings(&mut self) -> Result<()> {
        let n = 1 << 30;
        let (from, to) = (self.tensor(DType::F32, &[n], 1.0)?, Tensor::zeros(&self.device, DType::F32, &[n])?);
        let ms = self.time(|| to.copy_from(&from))?;
        self.copy = 2.0 * from.bytes() as f64 / ms / 1e9;
        let size = 8192;
        let (x, w) = (self.tensor(DType::BF16, &[size, size], 1.0)?, self.tensor(DType::BF16, &[size, size], 0.02)?);
        let out = Tensor::zeros(&self.device, DType::BF16, &[size, size])?;
        let ms = self.time(|| product(&self.device, &x, &w, None, None, &out))?;
        self.matrix = 2.0 * (size as f64).powi(3) / ms / 1e9;
        Ok(())
    }

    fn layernorm(&mut self, n: usize, c: usize) -> Result<()> {
        let [x, branch, dout] = [1.0, 1.0, 1.0].map(|std| self.tensor(DType::BF16, &[n, c], std));
        let (x, branch, dout) = (x?, branch?, dout?);
        let (weight, bias) = (self.tensor(DType::BF16, &[c], 1.0)?, self.tensor(DType::BF16, &[c], 1.0)?);
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&self.device, dtype, shape);
        let (sum, out, dx) = (zeros(DType::BF16, &[n, c])?, zeros(DType::BF16, &[n, c])?, zeros(DType::BF16, &[n, c])?);
        let (mean, rstd) = (zeros(DType::F32, &[n])?, zeros(DType::F32, &[n])?);
        let (dweight, dbias) = (zeros(DType::BF16, &[c])?, zeros(DType::BF16, &[c])?);
        let workspace = zeros(DType::U8, &[layernorm::backward_workspace_bytes(&self.device, n, c)])?;
        let device = self.device.clone();
        let ms = self.time(|| {
            let residual = Some(Residual { branch: &branch, sum: &sum });
            let (x, weight, bias) = (&x, &weight, Some(&bias));
            layernorm::forward(
                &device,
                &layernorm::Forward { x, residual, weight, bias, eps: 1e-5, out: &out, mean: &mean, rstd: &rstd },
            )
        })?;
        let one = x.bytes() as f64;
        self.row(&format!("layernorm+residual forward {n}x{c}"), ms, 0.0, 4.0 * one);
        let ms = self.time(|| {
            layernorm::backward(
                &device,
                &layernorm::Backward {
                    dout: &dout,
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
                },
            )
        })?;
        self.row(&format!("layernorm backward {n}x{c}"), ms, 0.0, 4.0 * one);
        Ok(())
    }

    fn attention(&mut self, b: usize, t: usize, heads: usize, head: usize) -> Result<()> {
        let c = heads * head;
        let (qkv, dout) = (self.tensor(DType::BF16, &[b, t, 3 * c], 1.0)?, self.tensor(DType::BF16, &[b, t, c], 1.0)?);
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&self.device, dtype, shape);
        let (out, dqkv, lse) =
            (zeros(DType::BF16, &[b, t, c])?, zeros(DType::BF16, &[b, t, 3 * c])?, zeros(DType::F32, &[b, heads, t])?);
        let workspace = zeros(DType::U8, &[attention::workspace_bytes(&self.device, b, t, c, heads)])?;
        let device = self.device.clone();
        let (qkv, out, lse, workspace, mask) = (&qkv, &out, &lse, &workspace, Mask::Causal);
        let product = 2.0 * (b * heads * head) as f64 * (t * (t + 1) / 2) as f64;
        let ms =
            self.time(|| attention::forward(&device, &attention::Forward { qkv, heads, mask, out, lse, workspace }))?;
        self.row(&format!("attention forward B={b} T={t}"), ms, 2.0 * product, (qkv.bytes() + out.bytes()) as f64);
        let ms = self.time(|| {
            let args = attention::Backward {
                qkv,
                heads,
                mask,
                out,
                lse,
                dout: &dout,
                dqkv: &dqkv,
                dqkv_sums: None,
                workspace,
            };
            attention::backward(&device, &args)
        })?;
        let bytes = (2 * qkv.bytes() + 2 * out.bytes()) as f64;
        self.row(&format!("attention backward B={b} T={t}"), ms, 5.0 * product, bytes);
        Ok(())
    }

    /// The linear layers of one block of GPT-2 124M.
    fn layers(&mut self, m: usize) -> Result<()> {
        for (name, n, k) in [("qkv", 2304, 768), ("attproj", 768, 768), ("fc", 3072, 768), ("fcproj", 768, 3072)] {
            let (x, w) = (self.tensor(DType::BF16, &[m, k], 1.0)?, self.tensor(DType::BF16, &[n, k], 0.02)?);
            let (bias, dout) = (self.tensor(DType::BF16, &[n], 1.0)?, self.tensor(DType::BF16, &[m, n], 1.0)?);
            let zeros = |shape: &[usize]| Tensor::zeros(&self.device, DType::BF16, shape);
            let (out, pre, dx, dw, db) =
                (zeros(&[m, n])?, zeros(&[m, n])?, zeros(&[m, k])?, zeros(&[n, k])?, zeros(&[n])?);
            let device = self.device.clone();
            let flops = 2.0 * m as f64 * n as f64 * k as f64;
            let gelu = name == "fc";
            let ms = self.time(|| product(&device, &x, &w, Some(&bias), gelu.then_some(&pre), &out))?;
            self.row(&format!("{name} forward M={m}{}", if gelu { " +GELU" } else { "" }), ms, flops, 0.0);
            let pre = if name == "fcproj" { Some((Gelu::Tanh, &x)) } else { None };
            let ms = self.time(|| {
                let args = matmul::BackwardInput {
                    dout: &dout,
                    weight: &w,
                    gelu: pre,
                    dx: &dx,
                    accumulate: false,
                    activation: None,
                    dx_sums: None,
                };
                matmul::backward_input(&device, &args)
            })?;
            self.row(&format!("{name} dinput M={m}{}", if pre.is_some() { " +dGELU" } else { "" }), ms, flops, 0.0);
            let ms = self.time(|| {
                let args =
                    matmul::BackwardWeight { dout: &dout, x: &x, dweight: &dw, dbias: Some(&db), accumulate: false };
                matmul::backward_weight(&device, &args)
            })?;
            self.row(&format!("{name} dweight+dbias M={m}"), ms, flops, 0.0);
        }
        Ok(())
    }

    fn update(&mut self) -> Result<()> {
        let n = 124_475_904;
        let (param, grad) = (self.tensor(DType::BF16, &[n], 0.02)?, self.tensor(DType::BF16, &[n], 1e-3)?);
        let zeros = || Tensor::zeros(&self.device, DType::F32, &[n]);
        let (master, m, v) = (zeros()?, zeros()?, zeros()?);
        let norm = Tensor::from_f32(&self.device, DType::F32, &[1], &[1.0])?;
        let device = self.device.clone();
        let ms = self.time(|| {
            adamw::update(
                &device,
                &adamw::Update {
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
                    step: 1,
                    grad_scale: 1.0,
                    clip: Some(adamw::Clip { norm: &norm, max_norm: 1.0 }),
                    rounding: adamw::Rounding::Stochastic { seed: 1 },
                    layers: 1,
                    zero_grad: false,
                },
            )
        })?;
        self.row("AdamW 124.5 M, bf16, masters", ms, 0.0, (4 * 6 + 2 + 2) as f64 * n as f64);
        let tensors = [grad.clone()];
        let ms = self.time(|| {
            let args = tilewright_ops::global_norm::Forward { tensors: &tensors, out: &norm };
            tilewright_ops::global_norm::forward(&device, &args)
        })?;
        self.row("global norm 124.5 M bf16", ms, 0.0, grad.bytes() as f64);
        Ok(())
    }

    fn embedding(&mut self, b: usize, t: usize) -> Result<()> {
        let (c, vp) = (768, 50_304);
        let tokens = self.ids(&[b, t], 50_257)?;
        let (wte, wpe) = (self.tensor(DType::BF16, &[vp, c], 0.02)?, self.tensor(DType::BF16, &[t, c], 0.02)?);
        let dout = self.tensor(DType::BF16, &[b, t, c], 1.0)?;
        let zeros = |shape: &[usize]| Tensor::zeros(&self.device, DType::BF16, shape);
        let (out, dwte, dwpe) = (zeros(&[b, t, c])?, zeros(&[vp, c])?, zeros(&[t, c])?);
        let workspace =
            Tensor::zeros(&self.device, DType::U8, &[embedding::backward_workspace_bytes(&self.device, b, t)])?;
        let (device, tokens, vocab) = (self.device.clone(), &tokens, 50_257);
        let forward = || {
            let args = embedding::Forward { tokens, wte: &wte, wpe: &wpe, vocab, position: 0, out: &out };
            embedding::forward(&device, &args)
        };
        let backward = || {
            let (dout, dwte, dwpe, workspace) = (&dout, &dwte, &dwpe, &workspace);
            let args = embedding::Backward { tokens, dout, vocab, dwte, dwpe, accumulate_dwpe: false, workspace };
            embedding::backward(&device, &args)
        };
        let one = out.bytes() as f64;
        let ms = self.time(forward)?;
        self.row(&format!("embedding forward B={b} T={t}"), ms, 0.0, 2.0 * one);
        let ms = self.time(backward)?;
        self.row(&format!("embedding backward B={b} T={t}"), ms, 0.0, 3.0 * one);
        Ok(())
    }

    fn head(&mut self, n: usize, d: usize, vocab: usize, vp: usize) -> Result<()> {
        let hidden = self.tensor(DType::BF16, &[n, d], 1.0)?;
        let weight = self.tensor(DType::BF16, &[vp, d], 1.0 / (d as f32).sqrt())?;
        let targets = self.ids(&[n], vocab)?;
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(&self.device, dtype, shape);
        let (losses, lse) = (zeros(DType::F32, &[n])?, zeros(DType::F32, &[n])?);
        let (dhidden, dweight) = (zeros(DType::BF16, &[n, d])?, zeros(DType::BF16, &[vp, d])?);
        let forward_bytes = linear_cross_entropy::forward_workspace_bytes(&self.device, n, d, vp);
        let both_bytes = linear_cross_entropy::forward_backward_workspace_bytes(&self.device, n, d, vp);
        let workspace = zeros(DType::U8, &[forward_bytes.max(both_bytes)])?;
        let device = self.device.clone();
        let (hidden, weight, targets, losses, workspace) = (&hidden, &weight, &targets, &losses, &workspace);
        let nvd = n as f64 * vocab as f64 * d as f64;
        let forward = || {
            let args = linear_cross_entropy::Forward {
                hidden,
                weight,
                vocab,
                targets,
                ignore_index: -100,
                losses,
                lse: &lse,
                workspace,
            };
            linear_cross_entropy::forward(&device, &args)
        };
        let ms = self.time(forward)?;
        self.row(&format!("LCE forward {n}x{d}x{vocab}, {} MB", forward_bytes >> 20), ms, 2.0 * nvd, 0.0);
        let both = || {
            let args = linear_cross_entropy::ForwardBackward {
                hidden,
                weight,
                vocab,
                targets,
                ignore_index: -100,
                losses,
                dloss: 1.0 / n as f32,
                dhidden: &dhidden,
                dweight: &dweight,
                accumulate_dweight: false,
                workspace,
            };
            linear_cross_entropy::forward_backward(&device, &args)
        };
        let ms = self.time(both)?;
        self.row(&format!("LCE fwd+bwd {n}x{d}x{vocab}, {} MB", both_bytes >> 20), ms, 6.0 * nvd, 0.0);
        Ok(())
    }
}

/// `out = [gelu](x @ w^T + bias)`.
fn product(
    device: &Device,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    pre: Option<&Tensor>,
    out: &Tensor,
) -> Result<()> {
    let gelu = pre.map(|_| Gelu::Tanh);
    matmul::forward(device, &matmul::Forward { x, weight, bias, gelu, pre_gelu: pre, out })
}
