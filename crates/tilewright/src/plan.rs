//! `tilewright plan`: the memory of a training step, before it runs. The figures come from the code that allocates, run on the null device.

use std::io::Write;
use std::path::Path;

use anyhow::bail;
use serde_json::json;
use tilewright_core::DType;
use tilewright_core::format::ParamSource;
use tilewright_core::format::model::ModelReader;
use tilewright_core::gpt2::VOCAB_SIZE;
use tilewright_models::plan::{self, Report};
use tilewright_models::{Gpt2Config, Options, Recompute};
use tilewright_ops::Device;
use tilewright_ops::cpu::{default_threads, memory};

use crate::device::DeviceName;
use crate::units::{bytes, grouped, parse_bytes};

/// Stands for what is free where the model would run, until that is known.
const FREE: u64 = u64::MAX;

/// The longest sampling cache that `train` plans.
const SAMPLE_WINDOW: usize = 1024;

/// Command line of `plan`.
#[derive(clap::Args)]
#[command(after_help = "Models: d6 d12 d24 d36 d48 d60 d72 d84 (GPT-2 by depth), \
    gpt3:c384 c768 c1024 c1536 c2048 c2560 c4096 c5120 c12288 (GPT-3 by width)")]
pub struct Args {
    /// Named model, or the path of a .bin checkpoint
    #[arg(long, default_value = "d12", value_name = "NAME|FILE")]
    model: String,
    /// Transformer blocks of a model of your own size, as in `train`
    #[arg(long, value_name = "N", conflicts_with = "model", requires_all = ["heads", "channels", "seq_len"])]
    layers: Option<usize>,
    /// Its attention heads
    #[arg(long, value_name = "N", requires = "layers")]
    heads: Option<usize>,
    /// Its width
    #[arg(long, value_name = "N", requires = "layers")]
    channels: Option<usize>,
    /// Tokens of the vocabulary; those of the model unless given
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Rows of a micro-batch
    #[arg(long, default_value_t = 4)]
    batch: usize,
    /// Tokens of a row; the model's longest unless given
    #[arg(long)]
    seq_len: Option<usize>,
    /// Activation recompute: 0 none, 1 GELU, 2 GELU and layernorm
    #[arg(long, default_value_t = 1)]
    recompute: u32,
    /// Storage of parameters, gradients and activations
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16", "f16"])]
    dtype: String,
    /// Keep f32 master weights; default with 16-bit storage
    #[arg(long, overrides_with = "no_masters")]
    masters: bool,
    /// Keep no f32 master weights
    #[arg(long)]
    no_masters: bool,
    /// Positions of the sampling cache; by default what `train` plans, 0 when it does not sample
    #[arg(long, value_name = "TOKENS")]
    decode_len: Option<usize>,
    /// Plan for measuring losses only: no gradients, no optimiser
    #[arg(long)]
    eval: bool,
    /// Find the largest batch that fits this much memory, such as 24GiB; `free` takes what this machine has free
    #[arg(long, value_name = "SIZE", conflicts_with = "batch", value_parser = parse_memory)]
    memory: Option<u64>,
    /// List every buffer
    #[arg(long)]
    buffers: bool,
    /// Where it would run: cpu, cuda, vulkan, metal or gpu, or cuda:N. A GPU is opened, and nothing of the model is allocated on it
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceName,
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    let (name, config) = model(&args)?;
    let dtype = match args.dtype.as_str() {
        "bf16" => DType::BF16,
        "f16" => DType::F16,
        _ => DType::F32,
    };
    let mut options = Options {
        batch: args.batch,
        seq_len: args.seq_len.unwrap_or(config.max_seq_len),
        recompute: Recompute::try_from(args.recompute)?,
        dtype,
        train: !args.eval,
        masters: !args.eval && (args.masters || (dtype != DType::F32 && !args.no_masters)),
        decode_len: args.decode_len.unwrap_or(if args.eval { 0 } else { config.max_seq_len.min(SAMPLE_WINDOW) }),
    };
    let place = Place::of(args.device)?;
    let report = match args.memory {
        None => plan::plan_on(&place.planner, &config, &options)?,
        Some(limit) => {
            let limit = if limit == FREE { place.free } else { limit };
            let most = usize::try_from(limit).unwrap_or(usize::MAX);
            let Some((batch, report)) = plan::largest_batch_on(&place.planner, &config, &options, most)? else {
                let least =
                    plan::plan_on(&place.planner, &config, &Options { batch: 1, ..options })?.peak_bytes() as u64;
                bail!(
                    "not even a batch of 1 fits into {}: {} at T={} needs {}; use a smaller --model or --seq-len, --recompute 2 or --dtype bf16",
                    bytes(limit),
                    name,
                    options.seq_len,
                    bytes(least)
                );
            };
            options.batch = batch;
            report
        }
    };
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", as_json(&name, &options, &place, &report))?;
    } else {
        write!(out, "{}", as_text(&args, &name, &config, &options, &place, &report))?;
    }
    Ok(())
}

/// Where a model would run.
struct Place {
    planner: Device,
    /// For the heading: threads, or the GPU.
    name: String,
    threads: usize,
    /// Bytes that nobody holds there; `u64::MAX` when not known.
    free: u64,
}

impl Place {
    fn of(device: DeviceName) -> anyhow::Result<Self> {
        let threads = default_threads();
        if device == DeviceName::Cpu {
            let name = format!("{threads} threads");
            return Ok(Place { planner: Device::null(threads), name, threads, free: memory::available() });
        }
        let device = device.open()?;
        // The device's own scratch is part of the plan and is held already.
        let free = device.free_bytes()?.map_or(u64::MAX, |free| (free + device.scratch_bytes()) as u64);
        Ok(Place { planner: device.planner(), name: device.name(), threads: 1, free })
    }
}

/// The model that is planned, and what to call it.
fn model(args: &Args) -> anyhow::Result<(String, Gpt2Config)> {
    let (name, mut config) = match (args.layers, args.heads, args.channels, args.seq_len) {
        (Some(layers), Some(heads), Some(channels), Some(max_seq_len)) => {
            let vocab_size = VOCAB_SIZE;
            let config = Gpt2Config { max_seq_len, vocab_size, padded_vocab_size: vocab_size, layers, heads, channels };
            ("own size".to_owned(), config)
        }
        _ if args.model.ends_with(".bin") => (args.model.clone(), *ModelReader::open(Path::new(&args.model))?.config()),
        _ => (args.model.clone(), Gpt2Config::from_descriptor(&args.model)?),
    };
    if args.layers.is_some() || args.vocab_size.is_some() {
        config.vocab_size = args.vocab_size.unwrap_or(config.vocab_size);
        config.padded_vocab_size = config.vocab_size.next_multiple_of(128);
    }
    config.validate()?;
    Ok((name, config))
}

fn parse_memory(text: &str) -> Result<u64, String> {
    if text == "free" { Ok(FREE) } else { parse_bytes(text) }
}

fn as_text(args: &Args, name: &str, config: &Gpt2Config, options: &Options, place: &Place, report: &Report) -> String {
    let mut text = format!(
        "{}: {} layers, {} heads, {} channels, {} parameters\nB={} T={} stored as {}, {}{}\n\n",
        name,
        config.layers,
        config.heads,
        config.channels,
        grouped(report.parameter_count as u64),
        options.batch,
        options.seq_len,
        options.dtype,
        place.name,
        if args.memory.is_some() { ": the largest batch that fits" } else { "" },
    );
    let mut row =
        |name: &str, n: usize| text += &format!("{name:<26}{:>20}  {:>9}\n", grouped(n as u64), bytes(n as u64));
    for section in &report.sections {
        row(section.name, section.bytes);
        if args.buffers {
            section.buffers.iter().for_each(|b| row(&format!("  {}", b.name), b.bytes));
        }
    }
    row("peak", report.peak_bytes());
    if place.free != u64::MAX {
        let verdict = if report.peak_bytes() as u64 <= place.free { "fits" } else { "does not fit" };
        let there = if args.device == DeviceName::Cpu { "on this machine" } else { "on the device" };
        text += &format!("\nfree {there}: {}; this {verdict}\n", bytes(place.free));
    }
    text
}

fn as_json(name: &str, options: &Options, place: &Place, report: &Report) -> serde_json::Value {
    let sections: Vec<_> = report
        .sections
        .iter()
        .map(|s| {
            let buffers: Vec<_> = s.buffers.iter().map(|b| json!({"name": b.name, "bytes": b.bytes})).collect();
            json!({"name": s.name, "bytes": s.bytes, "buffers": buffers})
        })
        .collect();
    json!({
        "model": name,
        "batch": options.batch,
        "seq_len": options.seq_len,
        "dtype": options.dtype.name(),
        "masters": options.masters,
        "device": place.name,
        "threads": place.threads,
        "parameters": report.parameter_count,
        "sections": sections,
        "peak_bytes": report.peak_bytes(),
    })
}
