//! `tilewright decide eval`: how good the answers are on labelled rows.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use tilewright_decide::evaluate::{Bin, Estimate, Group, Options, Scored, evaluate, reliability_svg};

use super::labelled::DataArgs;
use super::models::ModelArgs;

/// Command line of `decide eval`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    models: ModelArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Tell how many answers can be kept at these accuracies, and the confidence they need
    #[arg(long, value_name = "SHARE", value_delimiter = ',', default_values_t = [0.9, 0.95, 0.99])]
    target: Vec<f64>,
    /// Resamples of the intervals
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = resamples)]
    resamples: usize,
    /// Seed of the resampling
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Write the reliability diagram here
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

fn resamples(text: &str) -> Result<usize, String> {
    let known = text.parse().ok().filter(|n| (100..=1_000_000).contains(n));
    known.ok_or_else(|| format!("`{text}` resamples give no intervals of use; write 100 to 1000000"))
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    ensure!(args.target.iter().all(|t| (0.0..=1.0).contains(t)), "--target takes shares from 0 to 1, such as 0.95");
    let mut agent = args.models.open_one(args.json)?;
    let rows: Vec<Scored> =
        args.data.answer(&mut agent)?.iter().map(|row| Scored::new(&row.answer, row.truth)).collect();
    let options = Options { resamples: args.resamples, seed: args.seed, precisions: args.target.clone() };
    let groups = evaluate(&rows, &options);
    if let Some(path) = &args.svg {
        let panels: Vec<(&str, &[Bin])> = groups.iter().map(|g| (g.name.as_str(), &g.bins[..])).collect();
        let svg = reliability_svg("How often answers of each confidence are right", &panels);
        tilewright_core::fs::write_atomic(path, svg.as_bytes())?;
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        let groups: Vec<Value> = groups.iter().map(Group::to_json).collect();
        let report = json!({"groups": groups, "resamples": args.resamples, "seed": args.seed, "provenance": agent.provenance().to_json()});
        writeln!(out, "{report:#}")?;
    } else {
        for (i, group) in groups.iter().enumerate() {
            write!(out, "{}{}", if i > 0 { "\n" } else { "" }, text(group))?;
        }
        if let Some(path) = &args.svg {
            writeln!(out, "\nwrote {}", path.display())?;
        }
    }
    Ok(())
}

/// The measures of a group; what speaks against them stands first.
fn text(group: &Group) -> String {
    let mut s = format!("{} ({}, {} rows)\n", group.name, group.kind.name(), group.rows);
    for warning in &group.warnings {
        let _ = writeln!(s, "  !! {warning}");
    }
    let mut line = |name: &str, e: Estimate| {
        let _ = writeln!(s, "  {name:<22}{:.4}   95 % interval {:.4} to {:.4}", e.value, e.low, e.high);
    };
    line("accuracy", group.accuracy);
    line("Brier score", group.brier);
    line("NLL", group.nll);
    line("calibration error", group.ece);
    if let Some(mae) = group.mae {
        line("error in levels", mae);
    }
    for (coverage, share) in &group.coverage {
        let name = format!("answered at {}", coverage.precision);
        let _ = match coverage.threshold {
            Some(threshold) => writeln!(
                s,
                "  {name:<22}{:.4}   95 % interval {:.4} to {:.4}, with --min-confidence {threshold}",
                share.value, share.low, share.high
            ),
            None => writeln!(s, "  {name:<22}none: no confidence is right that often"),
        };
    }
    let _ = writeln!(
        s,
        "  {:<22}{:.4} by the commonest label, {:.4} by lot",
        "guessing gives", group.chance.majority, group.chance.uniform
    );
    s
}
