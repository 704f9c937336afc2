//! `tilewright bench-step`: one training step whenever it is told to, for comparisons with other programs in one run (`bench/peers/compare.py`).
//!
//! Protocol: prints `ready`; every line `run` on standard input does one whole step (forward, backward, optimiser) and is answered with
//! `SECONDS loss=LOSS`; `quit` or the end of the input ends it.

use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use tilewright_core::rng::XorShift;
use tilewright_models::{AdamW, Gpt2, Gpt2Config, Options, Recompute};
use tilewright_ops::Device;

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
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.ring > 0, "there must be a batch to train on; use --ring 8");
    let config = Gpt2Config::from_descriptor(&args.model)?;
    let options =
        Options { recompute: Recompute::try_from(args.recompute)?, ..Options::training(args.batch, args.seq_len) };
    let mut model = Gpt2::new(&Device::cpu(), config, options)?;
    model.init_random(42)?;
    let batches = random_batches(args.ring, args.batch * args.seq_len, config.vocab_size);

    let mut out = std::io::stdout().lock();
    writeln!(out, "ready")?;
    out.flush()?;
    let mut step = 0;
    for line in std::io::stdin().lock().lines() {
        match line.context("read a command from standard input")?.trim() {
            "run" => {
                let (tokens, targets) = &batches[step % batches.len()];
                step += 1;
                let start = Instant::now();
                let loss = train_step(&mut model, tokens, targets, step as u64, args.clip)?;
                writeln!(out, "{:.9} loss={loss:.6}", start.elapsed().as_secs_f64())?;
                out.flush()?;
            }
            "quit" => break,
            other => bail!("the worker knows `run` and `quit`, not `{other}`"),
        }
    }
    Ok(())
}

/// `count` batches of `len` random tokens and the tokens that follow them. The same in `bench/peers/gpt2_cpu_step.py`.
fn random_batches(count: usize, len: usize, vocab: usize) -> Vec<(Vec<i32>, Vec<i32>)> {
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
        model.grad_norm()?;
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
