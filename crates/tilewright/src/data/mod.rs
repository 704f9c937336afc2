//! `tilewright data`: text, JSON lines or a folder of them, tokenized into llm.c's shards.

mod coder;
mod input;
mod output;

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tilewright_ops::cpu::default_threads;

use crate::units::{bytes, grouped, parse_count};
use coder::Coder;
use input::{Format, Input, Piece};
use output::Output;

/// Command line of `data`.
#[derive(clap::Args)]
#[command(
    after_help = "A text file is one document; of JSON lines, every line is one. The end-of-text token stands before each document. \
    The first part of the input becomes the validation split. Text that spells <|endoftext|> is tokenized as ordinary text."
)]
pub struct Args {
    /// Text files, .jsonl files, or folders of .txt, .md and .jsonl files
    #[arg(required = true, value_name = "INPUT")]
    inputs: Vec<PathBuf>,
    /// Where to: writes PREFIX_train_000000.bin ..., PREFIX_val_000000.bin ... and PREFIX_tokenizer.bin
    #[arg(long, short, value_name = "PREFIX")]
    output: PathBuf,
    /// `gpt2`, `bytes` (256 bytes and end-of-text), or tokenizer files (a folder with vocab.json and merges.txt)
    #[arg(long, default_value = "gpt2", value_name = "NAME|FILE")]
    tokenizer: String,
    /// What the inputs are; by default their names tell
    #[arg(long, value_enum)]
    format: Option<Format>,
    /// The field of each JSON line that holds the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Tokens of a shard, such as 100M
    #[arg(long, default_value = "100M", value_parser = parse_count)]
    shard_tokens: u64,
    /// Share of the input that becomes the validation split
    #[arg(long, default_value_t = 0.1, conflicts_with = "val_tokens")]
    val_fraction: f64,
    /// Tokens that become the validation split
    #[arg(long, value_parser = parse_count)]
    val_tokens: Option<u64>,
    /// Replace the shards of an earlier run with the same prefix
    #[arg(long)]
    force: bool,
}

/// Bytes of text that are encoded together, per thread.
const BATCH_BYTES: usize = 1 << 20;

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    if !(0.0..1.0).contains(&args.val_fraction) {
        bail!("--val-fraction is {}; use a share from 0 to below 1, such as 0.1", args.val_fraction);
    }
    let coder = Coder::named(&args.tokenizer)?;
    let input = Input::find(&args.inputs, args.format, &args.field)?;
    for path in input.skipped() {
        eprintln!("skipped: {} (neither .txt, .md nor .jsonl; name the file itself to take it)", path.display());
    }
    let val_bytes = match args.val_tokens {
        Some(_) => 0,
        None => (input.bytes() as f64 * args.val_fraction) as u64,
    };
    let mut output = Output::create(&args.output, args.shard_tokens, args.val_tokens, args.force)?;
    let documents = tokenize(&coder, &input, val_bytes, &mut output)?;
    let tokenizer = output.write_tokenizer(coder.table())?;
    let wanted_val = args.val_tokens.is_some_and(|n| n > 0) || args.val_fraction > 0.0;
    let written = output.commit(wanted_val)?;

    let mut out = std::io::stdout().lock();
    let tokens = written.train + written.val;
    writeln!(
        out,
        "{} documents, {}, {} tokens ({:.2} bytes a token)",
        grouped(documents),
        bytes(input.bytes()),
        grouped(tokens),
        input.bytes() as f64 / tokens as f64
    )?;
    for (path, tokens) in &written.files {
        writeln!(out, "{}  {} tokens", path.display(), grouped(*tokens))?;
    }
    writeln!(out, "{}  {} entries", tokenizer.display(), grouped(coder.table().len() as u64))?;
    written.warnings.iter().for_each(|w| eprintln!("note: {w}"));
    Ok(())
}

/// Encodes everything in order and returns the number of documents.
fn tokenize(coder: &Coder, input: &Input, val_bytes: u64, output: &mut Output) -> anyhow::Result<u64> {
    let threads = default_threads();
    let style = "{bar:40} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left";
    let bar = ProgressBar::new(input.bytes()).with_style(ProgressStyle::with_template(style)?);
    let mut documents = 0;
    let mut batch: Vec<Piece> = Vec::new();
    let mut batched = 0;
    let mut flush = |batch: &mut Vec<Piece>| -> anyhow::Result<()> {
        let read: usize = batch.iter().map(|p| p.consumed).sum();
        for (piece, tokens) in batch.iter().zip(encode_all(coder, batch, threads)?) {
            documents += u64::from(piece.begins_document);
            output.write(&tokens, piece.validation)?;
        }
        bar.inc(read as u64);
        batch.clear();
        Ok(())
    };
    input.pieces(coder.needs_utf8(), val_bytes, &mut |piece| {
        batched += piece.bytes.len();
        batch.push(piece);
        if batched >= BATCH_BYTES * threads || batch.len() >= 1 << 16 {
            batched = 0;
            flush(&mut batch)?;
        }
        Ok(())
    })?;
    flush(&mut batch)?;
    bar.finish_and_clear();
    Ok(documents)
}

/// The tokens of each piece, an end-of-text token before those that begin a document. Which thread encodes a piece does not matter.
fn encode_all(coder: &Coder, pieces: &[Piece], threads: usize) -> anyhow::Result<Vec<Vec<u16>>> {
    let next = AtomicUsize::new(0);
    let work = || -> anyhow::Result<Vec<(usize, Vec<u16>)>> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(piece) = pieces.get(index) else { return Ok(done) };
            let mut tokens = Vec::with_capacity(piece.bytes.len() / 3 + 1);
            if piece.begins_document {
                tokens.push(coder.eot());
            }
            coder.encode(&piece.bytes, &mut tokens)?;
            done.push((index, tokens));
        }
    };
    let mut all = vec![Vec::new(); pieces.len()];
    std::thread::scope(|scope| {
        let helpers: Vec<_> = (1..threads.min(pieces.len())).map(|_| scope.spawn(work)).collect();
        let own = work();
        let theirs = helpers.into_iter().map(|h| h.join().expect("encoding does not panic"));
        for part in [own].into_iter().chain(theirs) {
            for (index, tokens) in part? {
                all[index] = tokens;
            }
        }
        Ok(all)
    })
}

/// What was tried on a file, for messages.
fn describe(path: &std::path::Path) -> impl FnOnce() -> String {
    let path = path.display().to_string();
    move || format!("read {path}")
}

fn open(path: &std::path::Path) -> anyhow::Result<std::fs::File> {
    std::fs::File::open(path).with_context(describe(path))
}
