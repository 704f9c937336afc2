//! `tilewright decide calibrate`: temperatures from labelled rows.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;

use anyhow::{Result, ensure};
use serde_json::json;
use tilewright_decide::fit::{Example, Fit, FitOptions, Fitted, fit};

use super::labelled::DataArgs;
use super::models::ModelArgs;

/// Command line of `decide calibrate`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    models: ModelArgs,
    #[command(flatten)]
    data: DataArgs,
    /// Write the calibration here
    #[arg(long, value_name = "FILE", default_value = "calibration.json")]
    output: PathBuf,
    /// Replace the file if there is one
    #[arg(long)]
    overwrite: bool,
    /// Share of rows that are not fitted on and tell whether it helped
    #[arg(long, value_name = "SHARE", default_value_t = 0.2)]
    holdout: f64,
    /// Rows that a temperature needs; with fewer it inherits
    #[arg(long, value_name = "N", default_value_t = 50)]
    least: usize,
    /// Seed of the split
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    ensure!((0.0..1.0).contains(&args.holdout), "--holdout takes a share from 0 to below 1, such as 0.2");
    ensure!(args.least > 0, "--least takes 1 or more");
    ensure!(
        args.overwrite || !args.output.exists(),
        "{} exists; add --overwrite, or give another --output",
        args.output.display()
    );
    let mut agent = args.models.open_one(true)?;
    let examples: Vec<Example> =
        args.data.answer(&mut agent)?.iter().map(|row| Example::new(&row.id, &row.answer, row.truth)).collect();
    let options = FitOptions { seed: args.seed, holdout: args.holdout, least: args.least };
    let fitted = fit(&examples, agent.calibration().temperatures(), &options);
    let id = fitted.file(agent.identity()).save(&args.output)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut report = fitted.to_json();
        report["calibration"] = json!({"file": args.output.display().to_string(), "sha256": id});
        writeln!(out, "{report:#}")?;
    } else {
        write!(out, "{}", text(&fitted))?;
        writeln!(out, "\nwrote {}\nnext:", args.output.display())?;
        writeln!(out, "  tilewright decide --model ... --calibration {} ...", args.output.display())?;
    }
    Ok(())
}

fn text(fit: &Fit) -> String {
    let mut s = String::new();
    for warning in &fit.warnings {
        let _ = writeln!(s, "!! {warning}");
    }
    let _ = writeln!(
        s,
        "{:<14}{:>7}{:>9}{:>13}  {:<10}{:>17}{:>19}",
        "", "rows", "held out", "temperature", "", "NLL held out", "ECE held out"
    );
    let types = fit.types.iter().filter(|t| t.rows + t.held_out > 0);
    for Fitted { name, rows, held_out, temperature, origin, quality } in types.chain(&fit.buckets) {
        let _ = write!(s, "{name:<14}{rows:>7}{held_out:>9}{temperature:>13.4}  {:<10}", origin.name());
        if let Some([before, after]) = quality {
            let _ = write!(s, "{:>7.4} -> {:.4}{:>9.4} -> {:.4}", before.nll, after.nll, before.ece, after.ece);
        }
        s.truncate(s.trim_end().len());
        s.push('\n');
    }
    s
}
