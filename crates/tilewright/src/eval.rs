//! `tilewright eval`: the loss of a model on token shards, and multiple-choice accuracy.

use std::path::PathBuf;

use anyhow::{Result, bail};
use tilewright_core::DType;
use tilewright_core::format::ParamSource;
use tilewright_core::format::eval::read_eval;
use tilewright_core::format::model::ModelReader;
use tilewright_core::fs::AtomicFile;
use tilewright_models::{Gpt2, Options};
use tilewright_train::checkpoint::load_model;
use tilewright_train::eval;
use tilewright_train::loader::{Geometry, Loader, ShardSet};

use crate::device::DeviceName;
use crate::train::score_line;

/// Measure a trained model.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("what").args(["data", "hellaswag"]).required(true).multiple(true)))]
pub struct Args {
    /// Model file, as `train` and `convert` write it
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Token shards, a glob pattern: mean loss and perplexity
    #[arg(long, value_name = "GLOB")]
    data: Option<String>,
    /// Multiple-choice evaluation file: accuracy with its 95 % interval
    #[arg(long, value_name = "FILE")]
    hellaswag: Option<PathBuf>,
    /// Rows of a batch
    #[arg(long, value_name = "B", default_value_t = 4)]
    batch: usize,
    /// Tokens of a row [default: the model's length]
    #[arg(long, value_name = "T")]
    seq_len: Option<usize>,
    /// Batches at most [default: all]
    #[arg(long, value_name = "N")]
    batches: Option<usize>,
    /// Write every token's loss here, one line `position token loss`
    #[arg(long, value_name = "FILE", requires = "data")]
    per_token: Option<PathBuf>,
    /// Where it runs: cpu, cuda, vulkan, metal or gpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceName,
}

/// Runs the subcommand.
pub fn run(args: Args) -> Result<()> {
    let reader = ModelReader::open(&args.model)?;
    let config = *reader.config();
    let seq_len = args.seq_len.unwrap_or(config.max_seq_len);
    if args.batches == Some(0) {
        bail!("--batches 0 measures nothing; leave it out for all");
    }
    // Everything that can be wrong with the inputs is found before the model is loaded.
    let shards = match &args.data {
        Some(pattern) => {
            Some(ShardSet::find(pattern, "--data", Geometry::single(args.batch, seq_len), config.vocab_size)?)
        }
        None => None,
    };
    let questions = match &args.hellaswag {
        Some(path) => {
            let questions = eval::questions(read_eval(path, config.vocab_size)?, path)?;
            eval::check(&questions, seq_len, path)?;
            questions
        }
        None => Vec::new(),
    };
    let device = args.device.open()?;
    let dtype = if reader.dtype() == DType::BF16 { DType::BF16 } else { DType::F32 };
    let mut model = Gpt2::new(&device, config, Options { dtype, ..Options::evaluation(args.batch, seq_len) })?;
    load_model(&mut model, &reader, &args.model)?;
    if let Some(shards) = shards {
        measure(&args, &mut model, shards)?;
    }
    if args.hellaswag.is_some() {
        println!("{}", score_line(&eval::ask(&mut model, &questions)?));
    }
    Ok(())
}

/// Loss and perplexity over the shards, in file order.
fn measure(args: &Args, model: &mut Gpt2, shards: ShardSet) -> Result<()> {
    let all: usize = shards.samples().iter().sum();
    let batches = args.batches.unwrap_or(all).min(all);
    let rows = shards.geometry().batch_tokens();
    let mut per_token = match &args.per_token {
        Some(path) => Some(AtomicFile::create(path)?),
        None => None,
    };
    let mut loader = Loader::new(shards, None, true)?;
    let mut losses = vec![0.0; rows];
    let mut sum = 0.0;
    for i in 0..batches {
        let batch = loader.next_batch()?;
        model.row_losses(batch.inputs, batch.targets, &mut losses)?;
        sum += losses.iter().map(|l| f64::from(*l)).sum::<f64>();
        if let Some(out) = &mut per_token {
            for (j, (target, loss)) in batch.targets.iter().zip(&losses).enumerate() {
                out.write(format!("{} {target} {loss:.6}\n", i * rows + j + 1).as_bytes())?;
            }
        }
    }
    if let Some(out) = per_token {
        out.commit()?;
    }
    let tokens = batches * rows;
    let mean = sum / tokens as f64;
    println!("loss {mean:.6} nats per token | perplexity {:.4} | {tokens} tokens in {batches} batches", mean.exp());
    let left = loader.shards().tokens() - (all * rows) as u64;
    if batches == all && left > loader.shards().len() as u64 {
        println!("note: {left} tokens at the ends of shards fill no batch; a smaller --batch or --seq-len reads more");
    }
    Ok(())
}
