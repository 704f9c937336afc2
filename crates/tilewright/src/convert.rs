//! `tilewright convert`: checkpoints between llm.c's f32 and bf16 files and Hugging Face folders.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use tilewright_core::DType;
use tilewright_core::format::hf::{HfReader, ImportOptions, VOCAB_MULTIPLE, export_folder};
use tilewright_core::format::model::{ModelReader, write_model};
use tilewright_core::format::{ParamSource, Sink};

use crate::units::grouped;

/// Command line of `convert`.
#[derive(clap::Args)]
#[command(after_help = "Narrowing rounds to the nearest value; widening is exact, and so are all other conversions: \
    going there and back gives the same bytes.")]
pub struct Args {
    /// A model .bin, a .safetensors file, or a folder with model.safetensors
    from: PathBuf,
    /// A name that ends in .bin, or a folder for Hugging Face's files
    to: PathBuf,
    /// What to write; by default the name tells
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// Element type of the result; by default that of the input
    #[arg(long, value_parser = ["f32", "bf16", "f16"])]
    dtype: Option<String>,
    /// Attention heads, for safetensors without a config.json
    #[arg(long)]
    heads: Option<usize>,
    /// Pad the token embedding's rows to a multiple of this, when reading Hugging Face files
    #[arg(long, default_value_t = VOCAB_MULTIPLE, value_name = "ROWS")]
    vocab_multiple: usize,
    /// Replace what is there
    #[arg(long)]
    force: bool,
}

/// What `convert` writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
enum Format {
    /// llm.c's model .bin, f32 or bf16
    Llmc,
    /// A folder with config.json and model.safetensors
    Hf,
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    let source = open(&args)?;
    let dtype = match args.dtype.as_deref() {
        None => source.dtype(),
        Some("f32") => DType::F32,
        Some("bf16") => DType::BF16,
        Some(_) => DType::F16,
    };
    let by_name = if has_ending(&args.to, "bin") { Format::Llmc } else { Format::Hf };
    let written = match args.format.unwrap_or(by_name) {
        Format::Llmc => {
            refuse_existing(&args.to, args.force)?;
            write_model(&*source, Sink::create(&args.to)?, dtype)?;
            args.to.clone()
        }
        Format::Hf => {
            if has_ending(&args.to, "safetensors") {
                bail!("{} is a file name; name the folder for config.json and model.safetensors", args.to.display());
            }
            let file = args.to.join("model.safetensors");
            refuse_existing(&file, args.force)?;
            let create = || format!("create the folder {}", args.to.display());
            std::fs::create_dir_all(&args.to).with_context(create)?;
            export_folder(&*source, &args.to, dtype)?;
            file
        }
    };
    let config = source.config();
    writeln!(
        std::io::stdout().lock(),
        "{}: {} layers, {} heads, {} channels, vocabulary {}, {} parameters, {} -> {dtype}",
        written.display(),
        config.layers,
        config.heads,
        config.channels,
        config.vocab_size,
        grouped(config.parameter_count() as u64),
        source.dtype()
    )?;
    Ok(())
}

fn open(args: &Args) -> anyhow::Result<Box<dyn ParamSource>> {
    let meta = std::fs::metadata(&args.from).with_context(|| format!("open {}", args.from.display()))?;
    if meta.is_dir() || has_ending(&args.from, "safetensors") {
        if args.vocab_multiple == 0 {
            bail!("--vocab-multiple is 0; use 1 for no padding");
        }
        let options = ImportOptions { heads: args.heads, vocab_multiple: args.vocab_multiple };
        return Ok(Box::new(HfReader::open(&args.from, &options)?));
    }
    Ok(Box::new(ModelReader::open(&args.from)?))
}

fn has_ending(path: &Path, ending: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(ending))
}

fn refuse_existing(path: &Path, force: bool) -> anyhow::Result<()> {
    if path.exists() && !force {
        bail!("{} exists; choose another name, or replace it with --force", path.display());
    }
    Ok(())
}
