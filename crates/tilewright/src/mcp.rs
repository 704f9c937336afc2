//! `tilewright mcp`: typed decisions as tools, on standard input and output.

use anyhow::Result;
use tilewright_serve::{Config, Keeping, Logs, mcp};

use crate::decide::models::ModelArgs;

/// Command line of `mcp`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    models: ModelArgs,
    /// Checkpoints that stay loaded; of more, the least recently used goes
    #[arg(long, value_name = "N", default_value_t = 2)]
    max_loaded: usize,
    /// The checkpoint for texts that say nothing of their language [default: multilingual, else the first]
    #[arg(long, value_name = "NAME")]
    default_model: Option<String>,
    /// What is logged to standard error: error, warn, info, debug, or a filter as in RUST_LOG
    #[arg(long, value_name = "FILTER", default_value = "warn")]
    log: String,
}

const EXAMPLES: &str = "\
A program that hands tools to a language model starts this one; its configuration says how:
  {\"mcpServers\": {\"tilewright\": {\"command\": \"tilewright\", \"args\": [\"mcp\", \"--model\", \"DIR\"]}}}

A running `tilewright serve` has the same tools at /mcp.";

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    tilewright_serve::logs(Logs::Text, &args.log);
    let keeping = Keeping { max_loaded: args.max_loaded, default: args.default_model.clone(), ..Keeping::default() };
    let pack_tokens = args.models.pack_tokens();
    let sources = args.models.sources(false, pack_tokens)?;
    mcp::run(&Config::default(), sources, &keeping, pack_tokens)?;
    Ok(())
}
