//! `tilewright train`: settings from flags, then the loop of the `tilewright-train` crate.

pub mod llmc;
mod progress;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::builder::BoolishValueParser;
pub use progress::score_line;
use tilewright_train::config::{Data, Model, TrainConfig};
use tilewright_train::run::{self, Outcome, RunOptions};

use crate::device::DeviceName;

/// Train a GPT-2. Without arguments: a small one on two bundled novels, in a few minutes.
///
/// llm.c's short flags (-i -j -e -o -n -b -t -d -x -l ...) are accepted too.
#[derive(clap::Args, Debug, Default)]
pub struct Args {
    /// Plain text to learn from, with a small vocabulary made for it [default: two bundled novels]
    #[arg(long, value_name = "FILE", conflicts_with = "data", help_heading = "Data")]
    text: Option<PathBuf>,
    /// Training shards, a glob pattern (llm.c: -i)
    #[arg(long, value_name = "GLOB", help_heading = "Data")]
    data: Option<String>,
    /// Validation shards, a glob pattern (-j)
    #[arg(long, value_name = "GLOB", requires = "data", help_heading = "Data")]
    val_data: Option<String>,
    /// Tokens of the vocabulary [default: 50257 for shards, 1024 for text]
    #[arg(long, value_name = "N", help_heading = "Data")]
    vocab_size: Option<usize>,
    /// Visit samples in file order instead of llm.c's shuffled order
    #[arg(long, help_heading = "Data")]
    no_shuffle: bool,
    /// Train on the first validation batch over and over (-a)
    #[arg(long, help_heading = "Data")]
    overfit: bool,

    /// d6 d12 d24 d36 d48 ..., gpt3:c768 ..., or the path of a .bin checkpoint (-e)
    #[arg(long, value_name = "NAME|FILE", help_heading = "Model")]
    model: Option<String>,
    /// Transformer blocks of a model of your own size
    #[arg(long, value_name = "N", conflicts_with = "model", help_heading = "Model")]
    layers: Option<usize>,
    /// Its attention heads
    #[arg(long, value_name = "N", conflicts_with = "model", help_heading = "Model")]
    heads: Option<usize>,
    /// Its width
    #[arg(long, value_name = "N", conflicts_with = "model", help_heading = "Model")]
    channels: Option<usize>,
    /// Storage of parameters and activations: f32, bf16 or f16
    #[arg(long, visible_alias = "precision", value_name = "TYPE", help_heading = "Model")]
    dtype: Option<String>,
    /// Keep f32 master weights beside 16-bit storage, 0 or 1 (-w)
    #[arg(long, value_name = "0|1", value_parser = BoolishValueParser::new(), help_heading = "Model")]
    masters: Option<bool>,
    /// Recompute in the backward pass: 0 nothing, 1 GELU, 2 GELU and layernorm (-r)
    #[arg(long, value_name = "MODE", help_heading = "Model")]
    recompute: Option<u32>,
    /// Seed of the initial weights
    #[arg(long, value_name = "N", help_heading = "Model")]
    seed: Option<u32>,

    /// Where it runs: cpu, cuda, vulkan, metal or gpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t, help_heading = "Model")]
    device: DeviceName,

    /// Rows of a micro-batch (-b)
    #[arg(long, value_name = "B", help_heading = "Optimisation")]
    batch: Option<usize>,
    /// Tokens of a row (-t)
    #[arg(long, value_name = "T", help_heading = "Optimisation")]
    seq_len: Option<usize>,
    /// Tokens of an optimiser step, a multiple of B x T (-d)
    #[arg(long, value_name = "N", help_heading = "Optimisation")]
    total_batch: Option<usize>,
    /// Optimiser steps; -1 is one epoch (-x)
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimisation")]
    steps: Option<i64>,
    /// cosine, linear, constant or wsd (-k)
    #[arg(long, value_name = "CURVE", help_heading = "Optimisation")]
    schedule: Option<String>,
    /// Peak learning rate (-l)
    #[arg(long, help_heading = "Optimisation")]
    lr: Option<f32>,
    /// Warm-up steps (-u)
    #[arg(long, value_name = "N", help_heading = "Optimisation")]
    warmup: Option<usize>,
    /// Last learning rate as a fraction of the peak (-q)
    #[arg(long, value_name = "F", help_heading = "Optimisation")]
    final_lr_fraction: Option<f32>,
    /// AdamW's decay of the first moment
    #[arg(long, help_heading = "Optimisation")]
    beta1: Option<f32>,
    /// AdamW's decay of the second moment
    #[arg(long, help_heading = "Optimisation")]
    beta2: Option<f32>,
    /// Weight decay of matrices and embeddings (-c)
    #[arg(long, value_name = "F", help_heading = "Optimisation")]
    weight_decay: Option<f32>,
    /// Largest gradient norm; 0 does not clip [default: 1]
    #[arg(long, value_name = "NORM", help_heading = "Optimisation")]
    clip: Option<f32>,
    /// Skip updates whose loss lies so many deviations above the last 128 (-sl)
    #[arg(long, value_name = "Z", help_heading = "Optimisation")]
    skip_loss_z: Option<f64>,
    /// Skip updates whose gradient norm does (-sg)
    #[arg(long, value_name = "Z", help_heading = "Optimisation")]
    skip_grad_z: Option<f64>,

    /// Validate every N steps; 0 never (-v)
    #[arg(long, value_name = "N", help_heading = "Watching")]
    val_every: Option<usize>,
    /// Validation batches at most; -1 is all (-m)
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Watching")]
    val_batches: Option<i64>,
    /// Multiple-choice evaluation file to score at each validation (-h 1)
    #[arg(long, value_name = "FILE", help_heading = "Watching")]
    hellaswag: Option<PathBuf>,
    /// Sample every N steps and at the end; 0 never (-s)
    #[arg(long, value_name = "N", help_heading = "Watching")]
    sample_every: Option<usize>,
    /// Tokens of a sample (-g)
    #[arg(long, value_name = "N", help_heading = "Watching")]
    sample_tokens: Option<usize>,
    /// Text that samples continue
    #[arg(long, value_name = "TEXT", help_heading = "Watching")]
    prompt: Option<String>,
    /// Sampling temperature; 0 takes the likeliest token
    #[arg(long, value_name = "F", help_heading = "Watching")]
    temperature: Option<f32>,
    /// Sample from the N likeliest tokens only; 0 from all
    #[arg(long, value_name = "N", help_heading = "Watching")]
    top_k: Option<usize>,
    /// Peak of this machine, to show how much of it is used
    #[arg(long, value_name = "GFLOP/S", help_heading = "Watching")]
    peak_gflops: Option<f64>,
    /// Rest SECONDS after each minute of work, or above a TEMPERATURE such as 85C until it is five degrees lower
    #[arg(long, value_name = "SECONDS|TEMPERATURE", help_heading = "Watching")]
    cool_down: Option<String>,
    /// No progress bar, one line a step
    #[arg(long, help_heading = "Watching")]
    plain: bool,

    /// Run folder: settings, logs, loss curve, samples, checkpoints (-o) [default: a new one below runs/]
    #[arg(long, value_name = "FOLDER", help_heading = "Files")]
    output: Option<PathBuf>,
    /// Write no files
    #[arg(long, conflicts_with_all = ["output", "resume", "overwrite"], help_heading = "Files")]
    no_output: bool,
    /// Continue the run in --output from its last checkpoint, with its settings (-y 1)
    #[arg(long, requires = "output", help_heading = "Files")]
    resume: bool,
    /// Start afresh in a folder that holds another run's checkpoints, deleting them
    #[arg(long, conflicts_with = "resume", help_heading = "Files")]
    overwrite: bool,
    /// Checkpoint every N steps and at the end; 0 never [default: at the end] (-n)
    #[arg(long, value_name = "N", help_heading = "Files")]
    checkpoint_every: Option<usize>,
    /// Keep the last N checkpoints; 0 all (-nk)
    #[arg(long, value_name = "N", help_heading = "Files")]
    checkpoint_keep: Option<usize>,
    /// Never delete checkpoints of multiples of N (-nm)
    #[arg(long, value_name = "N", help_heading = "Files")]
    checkpoint_major: Option<usize>,
}

/// Puts a flag that was given over a setting.
fn set<T>(slot: &mut T, flag: Option<T>) {
    if let Some(value) = flag {
        *slot = value;
    }
}

/// `-1` is "all", other negative numbers are nothing.
fn all_or(value: i64, flag: &str) -> Result<Option<usize>> {
    match usize::try_from(value) {
        Ok(n) => Ok(Some(n)),
        Err(_) if value == -1 => Ok(None),
        Err(_) => bail!("{flag} {value} makes no sense; use a count, or -1 for all"),
    }
}

/// The settings: those of the folder on a resume, else the defaults for the kind of data, with every given flag on top.
fn settings(args: &Args) -> Result<TrainConfig> {
    let saved = args.output.as_ref().map(|o| o.join("config.json")).filter(|p| args.resume && p.exists());
    let mut config = match saved {
        Some(path) => {
            let text = std::fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
            TrainConfig::from_json(&text, &path)?
        }
        None if args.data.is_some() => TrainConfig::for_shards(String::new(), None),
        None => TrainConfig::for_text(None),
    };
    if let Some(train) = &args.data {
        let vocab_size = match config.data {
            Data::Shards { vocab_size, .. } => vocab_size,
            Data::Text { .. } => tilewright_core::gpt2::VOCAB_SIZE,
        };
        config.data = Data::Shards { train: train.clone(), val: args.val_data.clone(), vocab_size };
    }
    if let Some(text) = &args.text {
        match &mut config.data {
            Data::Text { path, .. } => *path = Some(text.clone()),
            Data::Shards { .. } => bail!("the run in --output was trained on shards; leave --text out"),
        }
    }
    if let Some(size) = args.vocab_size {
        let (Data::Text { vocab_size, .. } | Data::Shards { vocab_size, .. }) = &mut config.data;
        *vocab_size = size;
    }
    if let Some(model) = &args.model {
        let is_file = model.ends_with(".bin");
        config.model = if is_file { Model::File(model.into()) } else { Model::Named(model.clone()) };
    }
    if args.layers.is_some() || args.heads.is_some() || args.channels.is_some() {
        let (mut layers, mut heads, mut channels) = match config.model {
            Model::Sized { layers, heads, channels } => (layers, heads, channels),
            _ => (4, 6, 192),
        };
        set(&mut layers, args.layers);
        set(&mut heads, args.heads);
        set(&mut channels, args.channels);
        config.model = Model::Sized { layers, heads, channels };
    }
    config.shuffle &= !args.no_shuffle;
    config.overfit |= args.overfit;
    set(&mut config.dtype, args.dtype.clone());
    set(&mut config.masters, args.masters);
    set(&mut config.recompute, args.recompute);
    set(&mut config.seed, args.seed);
    set(&mut config.batch, args.batch);
    set(&mut config.seq_len, args.seq_len);
    set(&mut config.total_batch, args.total_batch.map(Some));
    if let Some(steps) = args.steps {
        config.steps = all_or(steps, "--steps")?;
        // A default made for a longer run must not swallow a short one; a resumed run keeps the schedule that it began with.
        if !args.resume {
            config.warmup = config.warmup.min(config.steps.map_or(usize::MAX, |s| s / 10));
        }
    }
    if let Some(curve) = &args.schedule {
        config.schedule = curve.parse()?;
    }
    set(&mut config.lr, args.lr);
    set(&mut config.warmup, args.warmup);
    set(&mut config.final_lr_fraction, args.final_lr_fraction);
    set(&mut config.beta1, args.beta1);
    set(&mut config.beta2, args.beta2);
    set(&mut config.weight_decay, args.weight_decay);
    set(&mut config.clip, args.clip);
    set(&mut config.skip_loss_z, args.skip_loss_z);
    set(&mut config.skip_grad_z, args.skip_grad_z);
    set(&mut config.val_every, args.val_every);
    if let Some(batches) = args.val_batches {
        config.val_batches = all_or(batches, "--val-batches")?;
    }
    set(&mut config.eval_file, args.hellaswag.clone().map(Some));
    set(&mut config.sample_every, args.sample_every);
    set(&mut config.sample_tokens, args.sample_tokens);
    set(&mut config.prompt, args.prompt.clone().map(Some));
    set(&mut config.temperature, args.temperature);
    set(&mut config.top_k, args.top_k);
    set(&mut config.peak_gflops, args.peak_gflops.map(Some));
    set(&mut config.cool_down, args.cool_down.clone().map(Some));
    set(&mut config.checkpoint_every, args.checkpoint_every.map(Some));
    set(&mut config.checkpoint_keep, args.checkpoint_keep);
    set(&mut config.checkpoint_major, args.checkpoint_major);
    config.validate()?;
    Ok(config)
}

/// The first free folder of a name below `runs/`.
fn new_folder(config: &TrainConfig) -> PathBuf {
    let name = match &config.data {
        Data::Text { path: None, .. } => "austen".to_owned(),
        Data::Text { path: Some(path), .. } => {
            path.file_stem().map_or_else(|| "text".into(), |s| s.to_string_lossy().into_owned())
        }
        Data::Shards { .. } => match &config.model {
            Model::Named(name) => name.replace(':', "-"),
            _ => "gpt2".into(),
        },
    };
    let free = |n: usize| PathBuf::from("runs").join(if n == 1 { name.clone() } else { format!("{name}-{n}") });
    (1..).map(free).find(|path| !path.exists()).expect("some number is free")
}

/// Runs the subcommand.
pub fn run(args: Args) -> Result<()> {
    let config = settings(&args)?;
    let folder = (!args.no_output).then(|| args.output.clone().unwrap_or_else(|| new_folder(&config)));
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    // The second Ctrl-C ends the program at once; checkpoints are atomic, so that is safe too.
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
        eprintln!("\nfinishing this step; press Ctrl-C again to stop at once");
    })
    .context("cannot listen for Ctrl-C")?;
    let device = args.device.open()?;
    let options = RunOptions { folder: folder.as_deref(), resume: args.resume, overwrite: args.overwrite };
    let bar = std::io::stderr().is_terminal() && std::io::stdout().is_terminal() && !args.plain;
    let mut progress = progress::Progress::new(bar);
    let outcome = run::train(&config, &options, &device, &stop, &mut progress)?;
    progress.finish();
    match &outcome {
        Outcome::Stopped { step, checkpoint } => {
            println!("stopped after {step} steps");
            match (checkpoint, &folder) {
                (true, Some(folder)) => {
                    println!("continue with: tilewright train --resume --output {}", folder.display())
                }
                _ => println!("no checkpoint was written, so this run cannot be continued"),
            }
        }
        Outcome::Finished(summary) => progress::farewell(&config, folder.as_deref(), summary),
    }
    Ok(())
}

#[cfg(test)]
mod tests;
