//! `tilewright bench-step`: one training step whenever it is told to, as an arm of `tilewright bench` (`docs/bench-protocol.md`).
//!
//! With a `tokens` tensor of `batch * seq_len + 1` numbers in the plan it trains on those files; without one it draws its own batches.

use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use tilewright_core::DType;
use tilewright_core::rng::XorShift;
use tilewright_models::{AdamW, Gpt2, Gpt2Config, Options, Recompute};
use tilewright_ops::cpu::{Isa, default_threads};

use crate::device::DeviceName;

/// Command line of `bench-step`.
#[derive(clap::Args)]
pub struct Args {
    /// Named model
    #[arg(long, default_value = "d12")]
    model: String,
    /// Rows of the batch
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Tokens of a row
    #[arg(long, default_value_t = 64)]
    seq_len: usize,
    /// Distinct batches, used in turn
    #[arg(long, default_value_t = 8)]
    ring: usize,
    /// Clip the gradient norm; 0 leaves it out
    #[arg(long, default_value_t = 0.0)]
    clip: f32,
    /// Activation recompute: 0 none, 1 GELU, 2 GELU and layernorm
    #[arg(long, default_value_t = 1)]
    recompute: u32,
    /// cpu, cuda, vulkan, metal or gpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceName,
    /// Storage of parameters and activations: f32, bf16 or f16; 16-bit parameters have f32 masters
    #[arg(long, value_name = "TYPE", default_value = "f32", value_parser = storage)]
    precision: DType,
}

fn storage(text: &str) -> Result<DType, String> {
    [DType::F32, DType::BF16, DType::F16]
        .into_iter()
        .find(|dtype| dtype.to_string() == text)
        .ok_or_else(|| "use f32, bf16 or f16".to_owned())
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.ring > 0, "there must be a batch to train on; use --ring 8");
    let config = Gpt2Config::from_descriptor(&args.model)?;
    let options = Options {
        recompute: Recompute::try_from(args.recompute)?,
        dtype: args.precision,
        masters: args.precision != DType::F32,
        ..Options::training(args.batch, args.seq_len)
    };
    let device = args.device.open()?;
    let mut model = Gpt2::new(&device, config, options)?;
    model.init_random(42)?;
    if options.masters {
        // Else the first update would take its weights from zeros, and all later steps would be those of a model of nearly equal weights.
        model.masters_from_params()?;
    }
    let batches = random_batches(args.ring, args.batch * args.seq_len, config.vocab_size);

    let mut batches = batches;
    let mut out = std::io::stdout().lock();
    let mut step = 0;
    for line in std::io::stdin().lock().lines() {
        let request: Value = serde_json::from_str(&line.context("read a request from standard input")?)
            .context("a request is one JSON object a line; see docs/bench-protocol.md")?;
        let answer = match request["do"].as_str().unwrap_or_default() {
            "hello" => json!({
                "ok": "hello",
                "name": concat!("tilewright ", env!("CARGO_PKG_VERSION")),
                "fingerprint": {
                    "revision": env!("TILEWRIGHT_REVISION"), "isa": Isa::from_env().name(), "threads": default_threads(),
                    "dtype": args.precision.to_string(), "device": device.name(), "model": args.model, "recompute": args.recompute,
                },
            }),
            "prepare" => match read_batches(&request, args.batch * args.seq_len, config.vocab_size) {
                Ok((read, told)) => {
                    if !read.is_empty() {
                        batches = read;
                    }
                    json!({"ok": "prepare", "inputs": told, "live_bytes": device.live_bytes() + device.scratch_bytes()})
                }
                Err(error) => json!({"error": format!("{error:#}")}),
            },
            "run" => {
                let index = request["input"].as_u64().unwrap_or(0) as usize;
                let (tokens, targets) = &batches[index % batches.len()];
                step += 1;
                let start = Instant::now();
                let loss = train_step(&mut model, tokens, targets, step, args.clip)?;
                device.synchronize()?;
                let ns = start.elapsed().as_nanos() as u64;
                // All of it was allocated before the first step: what lives is also the most that lived.
                let bytes = device.live_bytes() + device.scratch_bytes();
                json!({"ok": "run", "ns": ns, "live_bytes": bytes, "peak_bytes": bytes, "metrics": {"loss": loss}})
            }
            "quit" => json!({"ok": "quit"}),
            other => json!({"error": format!("no request `{other}`; see docs/bench-protocol.md")}),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
        if request["do"] == "quit" {
            break;
        }
    }
    Ok(())
}

/// The batches of `prepare` by their index, and what is told of each file that was read.
fn read_batches(request: &Value, len: usize, vocab: usize) -> anyhow::Result<(Vec<Batch>, Vec<Value>)> {
    let (mut batches, mut told) = (Vec::new(), Vec::new());
    for input in request["inputs"].as_array().into_iter().flatten() {
        let (name, path) = (input["name"].as_str().unwrap_or_default(), input["path"].as_str().unwrap_or_default());
        let bytes = std::fs::read(path).with_context(|| format!("read input `{name}`"))?;
        told.push(json!({"index": input["index"], "name": name, "sha256": tilewright_bench::inputs::sha256(&bytes)}));
        if name == "tokens" {
            let tokens: Vec<i32> =
                bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
            ensure!(
                tokens.len() == len + 1,
                "`tokens` holds {} numbers; batch * seq_len + 1 is {}",
                tokens.len(),
                len + 1
            );
            ensure!(tokens.iter().all(|t| (0..vocab as i32).contains(t)), "`tokens` holds a number outside 0..{vocab}");
            batches.push((tokens[..len].to_vec(), tokens[1..].to_vec()));
        }
    }
    Ok((batches, told))
}

/// Tokens and the tokens that follow them.
type Batch = (Vec<i32>, Vec<i32>);

/// `count` batches of `len` random tokens and the tokens that follow them.
fn random_batches(count: usize, len: usize, vocab: usize) -> Vec<Batch> {
    let mut rng = XorShift::new(1337);
    let batch = |_| {
        let tokens: Vec<i32> = (0..=len).map(|_| (rng.random_u32() as usize % vocab) as i32).collect();
        (tokens[..len].to_vec(), tokens[1..].to_vec())
    };
    (0..count).map(batch).collect()
}

fn train_step(model: &mut Gpt2, tokens: &[i32], targets: &[i32], step: u64, clip: f32) -> anyhow::Result<f32> {
    let rows = tokens.len() as f32;
    let loss = model.forward_backward(tokens, targets, false, 1.0 / rows)? / rows;
    let max_norm = (clip > 0.0).then_some(clip);
    if max_norm.is_some() {
        model.start_grad_norm()?;
    }
    model.update(&AdamW {
        lr: 3e-4,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        decay_all: false,
        step,
        grad_scale: 1.0,
        max_norm,
        stochastic_seeds: None,
    })?;
    if max_norm.is_some() {
        model.finish_grad_norm()?;
    }
    Ok(loss)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_differ_and_their_targets_follow_the_tokens() {
        let batches = random_batches(4, 32, 50257);
        for (i, (tokens, targets)) in batches.iter().enumerate() {
            assert_eq!(tokens[1..], targets[..31]);
            assert!(batches[..i].iter().all(|(other, _)| other != tokens), "batch {i} repeats");
        }
    }
}
