//! `tilewright serve`: typed decisions over HTTP.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use tilewright_serve::{Config, Dialect, Keeping, Limits, Logs, Timing, Tournament};

use crate::decide::models::ModelArgs;

/// Command line of `serve`.
#[derive(clap::Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    models: ModelArgs,
    /// The address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, env = "TILEWRIGHT_HOST", value_name = "ADDRESS", default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port; 0 takes a free one and tells it
    #[arg(long, env = "TILEWRIGHT_PORT", value_name = "N", default_value_t = 8000)]
    port: u16,
    /// How answers of /v1/... are spelled; /jev/v1/... and /laya/v1/... are there in any case
    #[arg(long, value_name = "DIALECT", default_value = "jev", value_parser = ["jev", "laya"])]
    dialect: String,
    #[command(flatten)]
    access: Access,
    #[command(flatten)]
    keeping: KeepingArgs,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    times: TimeArgs,
    #[command(flatten)]
    logs: LogArgs,
}

/// Who may ask, and what is kept of it.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Access")]
struct Access {
    /// File of bearer keys, one a line: NAME:SECRET or NAME:SECRET:REQUESTS_A_SECOND. The variable TILEWRIGHT_KEYS holds more, separated by commas.
    /// Without any, everyone who reaches the port may ask
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// Append a line of JSON for each answered request: who, a hash of what, the hash of the weights, the answers
    #[arg(long, value_name = "FILE")]
    audit: Option<PathBuf>,
}

/// Which checkpoints stay in memory.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Checkpoints")]
struct KeepingArgs {
    /// Checkpoints that stay loaded; of more, the least recently used goes
    #[arg(long, value_name = "N", default_value_t = 2)]
    max_loaded: usize,
    /// Unload a checkpoint that nobody asked for so many seconds; 0 never
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    unload_after: u64,
    /// Load changed checkpoint files anew, looking every so many seconds; 0 never. SIGHUP does it at once
    #[arg(long, value_name = "SECONDS", default_value_t = 5)]
    watch: u64,
    /// The checkpoint for texts that say nothing of their language [default: multilingual, else the first]; if given, also for texts that ask for a
    /// checkpoint which is not served. Without it those are refused
    #[arg(long, value_name = "NAME")]
    default_model: Option<String>,
    /// Let the ids of the questions choose the typed-decisions checkpoint
    #[arg(long)]
    auto_task: bool,
    /// Options of a group when a choice is too large to be read in one pass; 0 refuses such choices
    #[arg(long, value_name = "SIZE", default_value_t = 16)]
    tournament: usize,
    /// Tokens that run together [default: 1024, on a GPU 16384]
    #[arg(long, value_name = "N")]
    pack_tokens: Option<usize>,
}

/// Sizes; the defaults are those of the laya package's server.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Limits")]
struct LimitArgs {
    /// Requests that are answered or wait for it; more are told to come back
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_concurrent: usize,
    /// Open connections
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_connections: usize,
    /// Bytes of a request body
    #[arg(long, value_name = "BYTES", default_value_t = 2 << 20)]
    max_body: usize,
    /// Questions of a request
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_questions: usize,
    /// Options of a choice that is read in one pass
    #[arg(long, value_name = "N", default_value_t = 100)]
    max_options: usize,
    /// States of a batch
    #[arg(long, value_name = "N", default_value_t = 64)]
    max_states: usize,
    /// Characters of a state
    #[arg(long, value_name = "N", default_value_t = 50_000)]
    max_state_chars: usize,
    /// The largest max_len and head_max_len of a request
    #[arg(long, value_name = "N", default_value_t = 8192)]
    max_token_budget: usize,
    /// Tokens that one request puts into a pass
    #[arg(long, value_name = "N", default_value_t = 131_072)]
    max_batch_tokens: usize,
}

/// Times, in seconds.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Times")]
struct TimeArgs {
    /// From a request to its answer; a request may ask for less by the header x-timeout-ms, in milliseconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60.0, value_parser = seconds)]
    time_limit: f64,
    /// Until headers, and then a body, have come
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    read_timeout: f64,
    /// Until a response has been taken
    #[arg(long, value_name = "SECONDS", default_value_t = 10.0, value_parser = seconds)]
    write_timeout: f64,
    /// Until a connection without a request is closed
    #[arg(long, value_name = "SECONDS", default_value_t = 75.0, value_parser = seconds)]
    idle_timeout: f64,
    /// For requests that are under way when the server is told to stop
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, value_parser = seconds)]
    drain: f64,
}

/// What is told on standard error.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Logs")]
struct LogArgs {
    /// Lines for people, or JSON
    #[arg(long, value_name = "FORMAT", default_value = "text", value_parser = ["text", "json"])]
    log_format: String,
    /// What is logged: error, warn, info, debug, or a filter as in RUST_LOG
    #[arg(long, value_name = "FILTER", default_value = "info")]
    log: String,
    /// Log the text of requests and answers too
    #[arg(long)]
    log_text: bool,
    /// Send a span of each request to this OpenTelemetry collector, such as http://127.0.0.1:4318 (OTLP over HTTP)
    #[cfg(feature = "otel")]
    #[arg(long, env = "OTEL_EXPORTER_OTLP_ENDPOINT", value_name = "URL")]
    otlp: Option<String>,
}

impl LogArgs {
    /// Where spans go: what the variable for traces alone says as it stands, or the path for traces below the collector's address.
    #[cfg(feature = "otel")]
    fn traces(&self) -> Option<String> {
        let own = std::env::var("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").ok().filter(|url| !url.is_empty());
        let below = |url: &String| format!("{}/v1/traces", url.trim_end_matches('/'));
        own.or_else(|| self.otlp.as_ref().filter(|url| !url.is_empty()).map(below))
    }

    /// Nowhere. Who asks for it by the usual variables is told why.
    #[cfg(not(feature = "otel"))]
    fn traces(&self) -> Option<String> {
        for name in ["OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] {
            if std::env::var_os(name).is_some_and(|url| !url.is_empty()) {
                eprintln!("note: {name} is set, but this program was built without --features otel: no spans are sent");
            }
        }
        None
    }
}

const EXAMPLES: &str = "\
Examples:
  tilewright serve --model laya-demo
  tilewright serve --model english=DIR --model multilingual=DIR --host 0.0.0.0 --keys keys.txt --audit audit.jsonl

  curl -s localhost:8000/v1/systemone -d '{\"state\": \"My card was charged twice\",
    \"questions\": {\"refund\": {\"type\": \"noul\", \"instructions\": \"Is a refund requested?\"}}}'";

fn seconds(text: &str) -> Result<f64, String> {
    let known = text.parse().ok().filter(|s: &f64| (0.001..=86_400.0).contains(s));
    known.ok_or_else(|| format!("`{text}` is no time; write seconds, 0.001 to 86400"))
}

impl Args {
    fn config(&self) -> Result<Config> {
        let (limits, times) = (&self.limits, &self.times);
        ensure!(
            self.keeping.tournament != 1,
            "--tournament 1 narrows nothing; use 2 or more, or 0 to refuse large choices"
        );
        let tournament = (self.keeping.tournament > 0)
            .then_some(Tournament { above: limits.max_options, group: self.keeping.tournament });
        let defaults = Limits::default();
        Ok(Config {
            bind: SocketAddr::new(self.host, self.port),
            dialect: self.dialect.parse::<Dialect>().map_err(anyhow::Error::msg)?,
            limits: Limits {
                body_bytes: limits.max_body,
                buffered_bytes: defaults.buffered_bytes.max(4 * limits.max_body),
                questions: limits.max_questions,
                options: limits.max_options,
                narrowed_options: defaults.narrowed_options.max(limits.max_options),
                total_options: defaults.total_options.max(limits.max_options),
                state_chars: limits.max_state_chars,
                states: limits.max_states,
                token_budget: limits.max_token_budget,
                batch_tokens: limits.max_batch_tokens,
                queued_tokens: defaults.queued_tokens.max(limits.max_batch_tokens),
                concurrent: limits.max_concurrent.max(1),
                connections: limits.max_connections,
                ..defaults
            },
            timing: Timing {
                header: Duration::from_secs_f64(times.read_timeout),
                body: Duration::from_secs_f64(times.read_timeout),
                write: Duration::from_secs_f64(times.write_timeout),
                idle: Duration::from_secs_f64(times.idle_timeout),
                request: Duration::from_secs_f64(times.time_limit),
                drain: Duration::from_secs_f64(times.drain),
                watch: Duration::from_secs(self.keeping.watch),
                unload: Duration::from_secs(self.keeping.unload_after),
            },
            keys: self.access.keys.clone(),
            audit: self.access.audit.clone(),
            log_text: self.logs.log_text,
            otlp: self.logs.traces(),
            tournament,
        })
    }
}

/// Runs the subcommand.
pub fn run(args: &Args) -> Result<()> {
    let format = if args.logs.log_format == "json" { Logs::Json } else { Logs::Text };
    tilewright_serve::logs(format, &args.logs.log);
    let config = args.config()?;
    let keeping = Keeping {
        max_loaded: args.keeping.max_loaded,
        default: args.keeping.default_model.clone(),
        auto_task: args.keeping.auto_task,
    };
    // Records name the weights by their sum, which takes a while to read.
    let pack_tokens = args.keeping.pack_tokens.unwrap_or_else(|| args.models.pack_tokens());
    let sources = args.models.sources(args.access.audit.is_some(), pack_tokens)?;
    tilewright_serve::run(config, sources, &keeping, pack_tokens, |address| {
        eprintln!("listening on http://{address}");
    })?;
    Ok(())
}
