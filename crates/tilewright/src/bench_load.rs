//! `tilewright bench load`: a server under requests that come whether it is ready or not.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail, ensure};
use tilewright_bench::load::mix::Mix;
use tilewright_bench::load::record::{Mode, Server};
use tilewright_bench::load::report;
use tilewright_bench::load::session::{self, Options};
use tilewright_bench::machine;
use tilewright_bench::record::{Status, write_atomic};

/// Command line of `bench load`.
#[derive(clap::Args)]
pub struct Args {
    /// Where requests are posted, such as http://127.0.0.1:8000/v1/systemone
    url: String,
    /// Requests: JSON Lines, a body a line, or {"name", "path", "weight", "body"}
    #[arg(long, value_name = "FILE")]
    mix: PathBuf,
    /// Requests a second, at random times whatever the server does; of a sweep, the first
    #[arg(long, value_name = "PER_SECOND", conflicts_with = "closed")]
    rate: Option<f64>,
    /// Keep so many connections busy instead: what a server can do at most, not what callers feel
    #[arg(long, value_name = "CONNECTIONS")]
    closed: Option<usize>,
    /// Double the rate until the server no longer keeps up, then close in
    #[arg(long, conflicts_with_all = ["compare", "closed"])]
    sweep: bool,
    /// A sweep's rate must also hold this p99
    #[arg(long, value_name = "MS", requires = "sweep")]
    p99_ms: Option<f64>,
    /// After a sweep, a run at this share of the capacity
    #[arg(long, value_name = "SHARE", default_value_t = 0.7)]
    at: f64,
    /// Compare with a second server, in alternating blocks
    #[arg(long, value_name = "URL")]
    compare: Option<String>,
    /// Pairs of blocks of a comparison; 60 confirm
    #[arg(long, value_name = "N", default_value_t = 12)]
    pairs: usize,
    /// Names of the servers in reports, separated by a comma
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    names: Vec<String>,
    /// Seconds that count, of each run or block
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    seconds: f64,
    /// Seconds before that, which do not
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    warm_up: f64,
    /// Connections at most; a request that finds all of them busy leaves late, and its wait counts
    #[arg(long, value_name = "N", default_value_t = 128)]
    connections: usize,
    /// Seconds that an answer may take
    #[arg(long, value_name = "S", default_value_t = 30.0)]
    timeout: f64,
    /// Of arrivals, requests and orders
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// A line that every request carries, such as "X-Tenant: a"; may be given again. Values stay out of the record
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// The environment variable that holds a bearer key
    #[arg(long, value_name = "VARIABLE")]
    key_env: Option<String>,
    /// Folder of records
    #[arg(long, value_name = "FOLDER", default_value = "bench/records")]
    out: PathBuf,
    /// Write a self-contained page here, too
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    let mix = Mix::read(&args.mix)?;
    let options = options(&args)?;
    let stop = Arc::new(AtomicBool::new(false));
    let heard = stop.clone();
    ctrlc::set_handler(move || {
        // The second one means it.
        if heard.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("\nstopping; what was measured is kept (Ctrl-C again ends at once)");
    })
    .context("listen for Ctrl-C")?;
    let many = options.servers.len() > 1;
    let mut told = |run: &tilewright_bench::load::record::Run, name: &str| {
        let name = if many { format!("{name}  ") } else { String::new() };
        eprintln!("{name}{}", report::text_of_run(run).lines().take(2).collect::<Vec<_>>().join("\n"));
    };
    let record = session::run(&mix, &options, &stop, &mut told)?;
    let file = args.out.join(record.file_name());
    record.write(&file)?;
    let name = file.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}record: {}", report::text(&record), file.display())?;
    if let Some(path) = &args.html {
        write_atomic(path, report::html(&name, &record).as_bytes())?;
        writeln!(out, "page: {}", path.display())?;
    }
    match record.status {
        Status::Ok => Ok(()),
        _ => bail!("{}", record.reason.unwrap_or_default()),
    }
}

fn options(args: &Args) -> anyhow::Result<Options> {
    let urls: Vec<&String> = std::iter::once(&args.url).chain(&args.compare).collect();
    ensure!(
        args.names.is_empty() || args.names.len() == urls.len(),
        "{} names for {} servers; give one each",
        args.names.len(),
        urls.len()
    );
    let name = |i: usize| match (args.names.get(i), urls.len()) {
        (Some(name), _) => name.clone(),
        (None, 1) => "server".to_owned(),
        (None, _) => ["first", "second"][i].to_owned(),
    };
    let servers = urls.iter().enumerate().map(|(i, url)| Server { name: name(i), url: (*url).clone() }).collect();
    let mode = match (args.sweep, &args.compare) {
        (true, _) => Mode::Sweep,
        (_, Some(_)) => Mode::Compare,
        _ => Mode::Rate,
    };
    ensure!(args.at > 0.0 && args.at <= 1.0, "--at {} is no share of a capacity; give more than 0, 1 at most", args.at);
    Ok(Options {
        command: command(),
        servers,
        headers: headers(args)?,
        mode,
        rate: args.rate.or((args.sweep).then_some(1.0)),
        closed: args.closed,
        seconds: args.seconds,
        warm_up: args.warm_up,
        connections: args.connections,
        timeout: args.timeout,
        seed: args.seed,
        pairs: args.pairs,
        p99_ms: args.p99_ms,
        at: args.sweep.then_some(args.at),
    })
}

fn headers(args: &Args) -> anyhow::Result<String> {
    let mut lines = String::new();
    for header in &args.header {
        let (name, value) = header.split_once(':').context("write a header as NAME: VALUE")?;
        let (name, value) = (name.trim(), value.trim());
        let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
        ensure!(!name.is_empty() && name.bytes().all(token), "`{name}` is no name of a header");
        ensure!(!value.chars().any(char::is_control), "the value of header {name} holds a control character");
        let own = ["content-length", "transfer-encoding", "host", "connection"];
        ensure!(!own.contains(&name.to_ascii_lowercase().as_str()), "header {name} is set by the client itself");
        lines += &format!("{name}: {value}\r\n");
    }
    if let Some(variable) = &args.key_env {
        let key = std::env::var(variable).with_context(|| format!("read the key from the variable {variable}"))?;
        ensure!(!key.chars().any(|c| c.is_control() || c == ' '), "the key in {variable} holds blanks");
        lines += &format!("Authorization: Bearer {key}\r\n");
    }
    Ok(lines)
}

/// The command line as a record may tell it: no values of headers, no paths of this machine.
fn command() -> String {
    let mut words = vec!["tilewright bench load".to_owned()];
    let mut hide = false;
    for word in std::env::args().skip_while(|w| w != "load").skip(1) {
        let told = match word.split_once('=') {
            _ if std::mem::take(&mut hide) => "...".to_owned(),
            Some(("--header", _)) => "--header=...".to_owned(),
            _ => machine::redact(&word),
        };
        hide = word == "--header";
        words.push(told);
    }
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(words: &[&str]) -> Result<Args, clap::Error> {
        let all = ["load", "http://127.0.0.1:1/x", "--mix", "m.jsonl"].iter().chain(words);
        Cli::try_parse_from(all).map(|c| c.args)
    }

    #[test]
    fn a_sweep_begins_with_one_a_second_unless_told() {
        let of = |words: &[&str]| options(&parse(words).unwrap()).unwrap();
        assert_eq!((of(&["--sweep"]).rate, of(&["--sweep"]).mode), (Some(1.0), Mode::Sweep));
        assert_eq!(of(&["--sweep", "--rate", "9"]).rate, Some(9.0));
        assert_eq!((of(&["--rate", "5"]).mode, of(&["--rate", "5"]).at), (Mode::Rate, None));
        let two = of(&["--compare", "http://127.0.0.1:2", "--closed", "4", "--names", "a,b"]);
        assert_eq!((two.mode, two.closed, two.servers[1].name.as_str()), (Mode::Compare, Some(4), "b"));
    }

    #[test]
    fn what_does_not_go_together_is_refused() {
        for words in [&["--rate", "1", "--closed", "2"][..], &["--sweep", "--compare", "http://h"], &["--p99-ms", "5"]]
        {
            assert!(parse(words).is_err(), "{words:?}");
        }
        assert!(options(&parse(&["--names", "a,b"]).unwrap()).is_err());
        assert!(options(&parse(&["--sweep", "--at", "1.5"]).unwrap()).is_err());
    }

    #[test]
    fn headers_cannot_smuggle_lines() {
        let of = |header: &str| headers(&parse(&["--header", header]).unwrap());
        assert_eq!(of("X-A:  b ").unwrap(), "X-A: b\r\n");
        for bad in ["X-A", "X A: b", "X-A: b\r\nC: d", "Content-Length: 3", ": x"] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
    }
}
