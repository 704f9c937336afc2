//! The `tilewright` program: one module a subcommand.
//!
//! Every module holds `Args`, which clap parses, and `run`, which does the work. Exit codes: 0 done, 1 the work failed (one line an error
//! and its causes on standard error), 2 the command line was wrong.

mod bench;
mod bench_load;
mod bench_product;
mod bench_step;
mod convert;
mod data;
mod decide;
mod device;
mod doctor;
mod eval;
mod inspect;
mod mcp;
mod plan;
mod sample;
mod serve;
mod train;
mod units;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Transformers on your own machine, every kernel open to inspection.
#[derive(Parser)]
#[command(name = "tilewright", version, propagate_version = true, arg_required_else_help = true)]
struct Cli {
    /// Threads that run kernels; one a logical core unless given
    #[arg(long, global = true, env = "TILEWRIGHT_THREADS", value_name = "N", value_parser = threads)]
    threads: Option<usize>,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a GPT-2: without arguments a small one on bundled novels, in minutes
    Train(Box<train::Args>),
    /// Continue a text with a trained model
    Sample(sample::Args),
    /// Measure a trained model: loss, perplexity, multiple choice
    Eval(eval::Args),
    /// Answer typed questions about a text with a Laya checkpoint
    Decide(Box<decide::Args>),
    /// Answer them over HTTP, for any client of Jev or Laya
    Serve(Box<serve::Args>),
    /// The same as tools of the Model Context Protocol, on standard input and output
    Mcp(mcp::Args),
    /// Look at a Laya checkpoint: sizes, settings, special tokens, and why it would not load
    Inspect(inspect::Args),
    /// Tokenize text into shards that `train` reads
    Data(data::Args),
    /// Tell how much memory a training step needs, before it runs
    Plan(plan::Args),
    /// Convert checkpoints: llm.c f32, llm.c bf16, Hugging Face safetensors
    Convert(convert::Args),
    /// Show what this machine offers and what would run on it
    Doctor(doctor::Args),
    /// Compare commands, builds or kernels in paired runs, and hold claims to their records
    Bench(bench::Args),
    /// One training step whenever told to (for comparisons)
    #[command(hide = true)]
    BenchStep(bench_step::Args),
    /// The matrix products of a layer whenever told to (for comparisons)
    #[command(hide = true)]
    BenchProduct(bench_product::Args),
    /// One call of a Laya checkpoint whenever told to (for comparisons)
    #[command(hide = true)]
    BenchDecide(decide::bench::Args),
}

/// More threads than any machine runs, and fewer than systems refuse.
const MOST_THREADS: usize = 4096;

fn threads(text: &str) -> Result<usize, String> {
    let known = text.parse().ok().filter(|n| (1..=MOST_THREADS).contains(n));
    known.ok_or_else(|| format!("`{text}` is no number of threads; write 1 to {MOST_THREADS}"))
}

fn main() -> ExitCode {
    // llm.c's short flags of `train` have two letters, which clap's cannot.
    let args = match train::llmc::translate(std::env::args_os()) {
        Ok(translated) => translated,
        Err(error) => {
            report(&error);
            return ExitCode::from(2);
        }
    };
    let cli = Cli::parse_from(args.args);
    for notice in args.notices {
        eprintln!("note: {notice}");
    }
    if let Some(threads) = cli.threads {
        // SAFETY: no other thread exists yet.
        unsafe { std::env::set_var("TILEWRIGHT_THREADS", threads.to_string()) };
    }
    let result = match cli.command {
        Command::Train(args) => train::run(*args),
        Command::Sample(args) => sample::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Decide(args) => decide::run(*args),
        Command::Serve(args) => serve::run(&args),
        Command::Mcp(args) => mcp::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Data(args) => data::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Convert(args) => convert::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => bench::run(args),
        Command::BenchStep(args) => bench_step::run(args),
        Command::BenchProduct(args) => bench_product::run(args),
        Command::BenchDecide(args) => decide::bench::run(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // The reader of a pipe had enough: `tilewright doctor | head -1`.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            report(&error);
            ExitCode::FAILURE
        }
    }
}

/// `error: ` and the chain of causes, without those whose words the line above already ends with.
fn report(error: &anyhow::Error) {
    let mut last = error.to_string();
    eprintln!("error: {last}");
    for cause in error.chain().skip(1) {
        let words = cause.to_string();
        if !last.contains(&words) {
            eprintln!("  because: {words}");
        }
        last = words;
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<std::io::Error>());
    io.is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
}
