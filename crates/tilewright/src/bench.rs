//! `tilewright bench`: paired benchmarks of commands, their records, reports and claims.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tilewright_bench::claims::{self, Standing};
use tilewright_bench::compare::compare;
use tilewright_bench::load::{self, record::LoadRecord};
use tilewright_bench::record::{Kind, Record, Status, write_atomic};
use tilewright_bench::report;
use tilewright_bench::session::{self, Options, Progress};

/// Command line of `bench`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(clap::Subcommand)]
enum Command {
    /// Carry out a plan: arms in alternation, every sample kept in one record
    Run(RunArgs),
    /// Put a server under load: Poisson arrivals, a sweep for its capacity, or two servers in turn
    Load(Box<crate::bench_load::Args>),
    /// Show records as a table, or as one HTML file
    Report {
        /// Records that `bench run` or `bench load` wrote
        #[arg(required = true)]
        records: Vec<PathBuf>,
        /// Write a self-contained page here
        #[arg(long, value_name = "FILE")]
        html: Option<PathBuf>,
    },
    /// Say what changed from one record to another of the same plan
    Compare {
        /// The record before
        old: PathBuf,
        /// The record after
        new: PathBuf,
    },
    /// Hold the claims file to its records; fails when one no longer carries its claim
    Check {
        /// The claims
        #[arg(default_value = "bench/claims.toml")]
        claims: PathBuf,
    },
}

#[derive(clap::Args)]
struct RunArgs {
    /// The plan, a TOML file such as those in bench/plans
    plan: PathBuf,
    /// Screen (picks candidates) or confirm (may be claimed), instead of the plan's kind
    #[arg(long, value_parser = parse_kind)]
    kind: Option<Kind>,
    /// Pairs, instead of the plan's number
    #[arg(long, value_name = "N")]
    pairs: Option<usize>,
    /// Seed of order and inputs, instead of the plan's
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Only this case; may be given again
    #[arg(long = "case", value_name = "NAME")]
    cases: Vec<String>,
    /// Give a variable of the plan a value
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_set)]
    set: Vec<(String, String)>,
    /// Confirm on a loaded machine too; the record is labelled and carries no claim
    #[arg(long)]
    force: bool,
    /// Go on with a partial record: kind, pairs, seed and cases are taken from it, variables (--set) are not
    #[arg(long, value_name = "RECORD")]
    resume: Option<PathBuf>,
    /// Folder of records
    #[arg(long, value_name = "FOLDER", default_value = "bench/records")]
    out: PathBuf,
}

fn parse_kind(text: &str) -> Result<Kind, String> {
    match text {
        "screen" => Ok(Kind::Screen),
        "confirm" => Ok(Kind::Confirm),
        _ => Err("write screen or confirm".to_owned()),
    }
}

fn parse_set(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    match args.command {
        Command::Run(args) => carry_out(args),
        Command::Load(args) => crate::bench_load::run(*args),
        Command::Report { records, html } => show(&records, html.as_deref()),
        Command::Compare { old, new } => {
            let text = compare(&Record::read(&old)?, &Record::read(&new)?);
            write!(std::io::stdout().lock(), "{text}")?;
            Ok(())
        }
        Command::Check { claims } => check(&claims),
    }
}

fn carry_out(args: RunArgs) -> anyhow::Result<()> {
    let stop = Arc::new(AtomicBool::new(false));
    let heard = stop.clone();
    ctrlc::set_handler(move || {
        // The second one means it.
        if heard.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("\nstopping after this call; what was measured is kept (Ctrl-C again ends at once)");
    })
    .context("listen for Ctrl-C")?;
    let mut command = vec!["tilewright bench run".to_owned(), args.plan.display().to_string()];
    command.extend(std::env::args().skip_while(|w| w != "run").skip(2));
    let options = Options {
        // A variable may hold a path of this machine: the record keeps its name, not its value.
        command: command.iter().map(|w| without_values(w)).collect::<Vec<_>>().join(" "),
        set: args.set.into_iter().collect::<BTreeMap<_, _>>(),
        kind: args.kind,
        pairs: args.pairs,
        seed: args.seed,
        cases: args.cases,
        force: args.force,
        out: args.out,
        resume: args.resume,
    };
    // Values of variables are not in the record; a run that goes on wants them again.
    let set: String = options.set.iter().map(|(name, value)| format!(" --set {name}={value}")).collect();
    let mut line = Line::new();
    let (record, file) = session::run(&args.plan, &options, &stop, &mut |p| line.show(p))?;
    line.end();
    write!(std::io::stdout().lock(), "{}\nrecord: {}\n", report::text(&record), file.display())?;
    match record.status {
        Status::Ok => Ok(()),
        Status::Error => bail!("{} arms went wrong; the record has a row for each", record.errors.len()),
        Status::Partial => {
            bail!(
                "interrupted; go on with `tilewright bench run {}{set} --resume {}`",
                args.plan.display(),
                file.display()
            )
        }
        Status::RefusedEnvironment => bail!(
            "this machine cannot confirm now: {}; wait, use --kind screen, or --force to have it labelled",
            record.reason.unwrap_or_default()
        ),
    }
}

/// `NAME=/some/path` becomes `NAME=...`.
fn without_values(word: &str) -> String {
    match word.split_once('=') {
        Some((name, value)) if value.contains('/') => format!("{name}=..."),
        _ => word.to_owned(),
    }
}

/// One line that is written over on a terminal, a line now and then otherwise.
struct Line {
    terminal: bool,
    last: Option<Instant>,
    dirty: bool,
}

impl Line {
    fn new() -> Self {
        Line { terminal: std::io::stderr().is_terminal(), last: None, dirty: false }
    }

    fn show(&mut self, p: &Progress) {
        if let Some(error) = p.what.strip_prefix("error: ") {
            self.end();
            eprintln!("{}: {error}", p.case);
            return;
        }
        let every = Duration::from_millis(if self.terminal { 100 } else { 10_000 });
        if self.last.is_some_and(|t| t.elapsed() < every) {
            return;
        }
        self.last = Some(Instant::now());
        let left = p
            .case_left
            .map(|rest| format!(", about {} left of this case", clock(rest.as_secs_f64())))
            .unwrap_or_default();
        let text =
            format!("{} {}  {}/{} calls, {}{left}", p.case, p.what, p.done, p.total, clock(p.elapsed.as_secs_f64()));
        if self.terminal {
            eprint!("\r\x1b[K{text}");
            self.dirty = true;
        } else {
            eprintln!("{text}");
        }
    }

    fn end(&mut self) {
        if std::mem::take(&mut self.dirty) {
            eprint!("\r\x1b[K");
        }
    }
}

fn clock(seconds: f64) -> String {
    let s = seconds.round() as u64;
    if s < 60 { format!("{s} s") } else { format!("{} min {:02} s", s / 60, s % 60) }
}

fn show(files: &[PathBuf], html: Option<&Path>) -> anyhow::Result<()> {
    if let [file] = files
        && LoadRecord::is_one(&std::fs::read(file).with_context(|| format!("read {}", file.display()))?)
    {
        return show_load(file, html);
    }
    let mut records = Vec::new();
    for file in files {
        let name = file.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        records.push((name, Record::read(file)?));
    }
    if let Some(path) = html {
        write_atomic(path, report::html(&records).as_bytes())?;
        println!("{}", path.display());
        return Ok(());
    }
    let text: Vec<String> = records.iter().map(|(_, r)| report::text(r)).collect();
    write!(std::io::stdout().lock(), "{}", text.join("\n"))?;
    Ok(())
}

fn show_load(file: &Path, html: Option<&Path>) -> anyhow::Result<()> {
    let record = LoadRecord::read(file)?;
    let name = file.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    match html {
        Some(path) => {
            write_atomic(path, load::report::html(&name, &record).as_bytes())?;
            println!("{}", path.display());
        }
        None => write!(std::io::stdout().lock(), "{}", load::report::text(&record))?,
    }
    Ok(())
}

fn check(path: &Path) -> anyhow::Result<()> {
    let all = claims::read(path)?.claims;
    ensure!(!all.is_empty(), "{} holds no claim", path.display());
    let folder = path.parent().unwrap_or(Path::new("."));
    let (mut failed, mut open) = (0, 0);
    let mut out = std::io::stdout().lock();
    for claim in &all {
        match claims::check(claim, folder) {
            Standing::Holds(words) => writeln!(out, "holds  {}: {}  [{words}]", claim.id, claim.says)?,
            Standing::Fails(words) => {
                failed += 1;
                writeln!(out, "FAILS  {}: {}  [{words}]", claim.id, claim.says)?;
            }
            Standing::Open => {
                open += 1;
                writeln!(out, "open   {}: not measured, so not to be said", claim.id)?;
            }
        }
    }
    writeln!(out, "{} hold, {failed} fail, {open} open", all.len() - failed - open)?;
    ensure!(failed == 0, "{failed} of {} claims do not hold", all.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_the_command_line_are_read() {
        assert_eq!(parse_kind("confirm"), Ok(Kind::Confirm));
        assert!(parse_kind("sure").is_err());
        assert_eq!(parse_set("A=b=c"), Ok(("A".to_owned(), "b=c".to_owned())));
        assert!(parse_set("A").is_err());
    }

    #[test]
    fn values_that_are_paths_stay_out_of_the_record() {
        assert_eq!(without_values("PY=/opt/x/python"), "PY=...");
        assert_eq!(without_values("--set=N=3"), "--set=N=3");
    }

    #[test]
    fn durations_are_short() {
        assert_eq!((clock(59.4), clock(61.0)), ("59 s".to_owned(), "1 min 01 s".to_owned()));
    }
}
