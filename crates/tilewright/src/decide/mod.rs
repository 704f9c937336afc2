//! `tilewright decide`: typed questions about a text or a JSON document, answered by a Laya checkpoint.

mod batch;
mod calibrate;
mod demo;
mod eval;
mod explain;
#[cfg(feature = "hub")]
mod hub;
mod input;
mod labelled;
mod predict;
mod table;

pub mod bench;
pub mod models;

use anyhow::Result;

/// Answer typed questions about a text with a Laya checkpoint.
#[derive(clap::Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    predict: predict::Args,
}

#[derive(clap::Subcommand, Debug)]
enum Command {
    /// Measure answers on labelled rows: accuracy, Brier score, calibration error, coverage
    Eval(eval::Args),
    /// Fit temperatures to labelled rows and write a calibration file
    Calibrate(calibrate::Args),
    /// Write a checkpoint with random weights, to try the program with
    Demo(demo::Args),
}

const EXAMPLES: &str = "\
Examples:
  tilewright decide demo
  tilewright decide --model laya-demo --preset triage --state 'My card was charged twice'
  tilewright decide --model laya-demo --questions questions.json --state-file ticket.json --json
  tilewright decide --model english=DIR --model multilingual=DIR --preset triage --batch tickets.jsonl --output answers.jsonl

A file of questions is a JSON object of definitions by id:
  {\"urgent\": {\"type\": \"noul\", \"instructions\": \"Is it urgent?\"},
   \"team\": {\"type\": \"choice\", \"instructions\": \"Who handles it?\", \"criteria\": {\"billing\": \"money\", \"it\": \"computers\"}},
   \"anger\": {\"type\": \"score\", \"instructions\": \"How angry?\", \"criteria\": [\"calm\", \"annoyed\", \"furious\"]}}";

/// Runs the subcommand.
pub fn run(args: Args) -> Result<()> {
    match args.command {
        Some(Command::Eval(args)) => eval::run(&args),
        Some(Command::Calibrate(args)) => calibrate::run(&args),
        Some(Command::Demo(args)) => demo::run(&args),
        None => {
            let mut args = args.predict;
            // What came over the network is named in every answer.
            args.how.provenance |= args.models.is_from_hub();
            predict::run(&args)
        }
    }
}
