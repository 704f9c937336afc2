//! The record of a load session: one JSON file. `docs/load-record.schema.json` describes it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tilewright_core::{Error, Result};

use super::histogram::Histogram;
use crate::record::{Fingerprint, Status, write_atomic};
use crate::stats::Paired;
use crate::summary::Verdict;

/// Version of the format.
pub const SCHEMA: u32 = 1;
/// What tells these records from those of `bench run`.
pub const TOOL: &str = "load";
/// Larger files are no record.
const MAX_BYTES: u64 = 256 << 20;

/// A record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadRecord {
    /// [`TOOL`].
    pub tool: String,
    /// [`SCHEMA`].
    pub schema: u32,
    /// How it ended.
    pub status: Status,
    /// Why it is partial.
    pub reason: Option<String>,
    /// UTC.
    pub started: String,
    /// UTC.
    pub finished: Option<String>,
    /// As it was asked for, without paths and without the values of headers.
    pub command: String,
    /// What was asked.
    pub settings: Settings,
    /// The machine that asked; the server's too where it is the same.
    pub fingerprint: Fingerprint,
    /// Load averages at the beginning.
    pub load: Option<[f64; 3]>,
    /// Who was asked. The first is the baseline of a comparison.
    pub servers: Vec<Server>,
    /// The requests.
    pub requests: Vec<RequestRow>,
    /// Everything that was sent, in its order.
    pub runs: Vec<Run>,
    /// What a sweep found.
    pub capacity: Option<Capacity>,
    /// What a comparison found: made from the runs.
    pub comparisons: Vec<Comparison>,
}

/// What was asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// One rate, a search for capacity, or two servers.
    pub mode: Mode,
    /// Requests a second; of a sweep, the first.
    pub rate: Option<f64>,
    /// Connections that are kept busy, instead of a rate.
    pub closed: Option<usize>,
    /// Counted, of each run.
    pub seconds: f64,
    /// Not counted, of the first run of each server.
    pub warm_up_s: f64,
    /// At most.
    pub connections: usize,
    /// For one answer.
    pub timeout_s: f64,
    /// Of arrivals and requests.
    pub seed: u64,
    /// Pairs of a comparison.
    pub pairs: Option<usize>,
    /// A sweep's limit on p99.
    pub p99_ms: Option<f64>,
    /// Of the file of requests.
    pub mix_sha256: String,
}

/// What a session does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// One rate, or one number of busy connections.
    Rate,
    /// Rates up to the highest that the server keeps up with.
    Sweep,
    /// Two servers in alternating blocks.
    Compare,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Server {
    /// What reports call it.
    pub name: String,
    /// Where.
    pub url: String,
}

/// A request of the mix.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RequestRow {
    /// Its name.
    pub name: String,
    /// Instead of the URL's.
    pub path: Option<String>,
    /// Bytes of its body.
    pub bytes: usize,
    /// How often it is drawn.
    pub weight: f64,
}

/// A distribution of latencies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tail {
    /// How many.
    pub n: u64,
    /// Mean.
    pub mean_ms: f64,
    /// The least.
    pub min_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 90 % are no longer.
    pub p90_ms: f64,
    /// 99 % are no longer.
    pub p99_ms: f64,
    /// 99.9 % are no longer.
    pub p999_ms: f64,
    /// The greatest.
    pub max_ms: f64,
    /// The least nanoseconds of each bucket that holds something, and how many it holds.
    pub buckets: Vec<(u64, u64)>,
}

impl Tail {
    /// The histogram, to ask it for other percentiles.
    pub fn histogram(&self) -> Histogram {
        Histogram::from_rows(&self.buckets)
    }
}

/// Answers of one kind.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latencies {
    /// From the time a request was due: what a caller waits, corrected for coordinated omission.
    pub latency: Tail,
    /// From the time it left: what the server took once it was asked. Blind to those who could not even ask.
    pub service: Tail,
}

/// A run at one rate, or in one closed loop.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Index into `servers`.
    pub server: usize,
    /// `rate`, `closed`, `sweep`, `at 70 %` or `block`.
    pub purpose: String,
    /// The pair, of a comparison.
    pub pair: Option<usize>,
    /// 0 went first in its pair.
    pub slot: Option<usize>,
    /// Requests a second; none in a closed loop.
    pub rate: Option<f64>,
    /// At its beginning, not counted.
    pub warm_up_s: f64,
    /// Counted.
    pub seconds: f64,
    /// Since the session began.
    pub began_s: f64,
    /// Arrivals that were due.
    pub due: u64,
    /// Of them sent; fewer only after Ctrl-C.
    pub sent: u64,
    /// Answers by status.
    pub statuses: BTreeMap<String, u64>,
    /// Requests without an answer, by the reason.
    pub failures: BTreeMap<String, u64>,
    /// Requests answered with 2xx a second, inside the counted time.
    pub throughput: f64,
    /// Median latency of the first third.
    pub early_p50_ms: f64,
    /// How long after the end the last answer came.
    pub drain_s: f64,
    /// 2xx.
    pub answered: Latencies,
    /// 503 and 429.
    pub refused: Latencies,
    /// Everything else, requests without an answer among them.
    pub other: Latencies,
    /// How late requests left: large where `connections` were too few or the asking machine too busy.
    pub late: Tail,
    /// By seconds.
    pub timeline: Vec<Second>,
    /// An answer that was neither 2xx nor a refusal.
    pub complaint: Option<String>,
}

/// A second of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Second {
    /// From 0.
    pub second: u64,
    /// Whether it lies behind the warm-up.
    pub counted: bool,
    /// Due in it.
    pub due: u64,
    /// Answered in it with 2xx.
    pub answered: u64,
    /// Refused in it.
    pub refused: u64,
    /// Everything else that ended in it.
    pub other: u64,
    /// Median latency of what was answered in it.
    pub p50_ms: f64,
    /// 99th percentile of the same.
    pub p99_ms: f64,
}

/// What a sweep found.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capacity {
    /// The highest rate that was kept up with; none if not even the lowest.
    pub rate: Option<f64>,
    /// The lowest that was not; none if the sweep ended before.
    pub too_much: Option<f64>,
    /// Most answers a second in any run.
    pub peak: f64,
}

/// What two servers are compared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Answers a second.
    Throughput,
    /// Median latency.
    P50,
    /// 99th percentile of latency.
    P99,
}

impl Measure {
    /// All, in the order of reports.
    pub const ALL: [Measure; 3] = [Measure::Throughput, Measure::P50, Measure::P99];

    /// In words.
    pub fn words(self) -> &'static str {
        match self {
            Measure::Throughput => "answers a second",
            Measure::P50 => "median latency",
            Measure::P99 => "p99 latency",
        }
    }
}

/// The second server against the first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Comparison {
    /// By what.
    pub measure: Measure,
    /// `ratio` above 1: the first server is better, by so many times as much throughput or as short a latency.
    pub paired: Option<Paired>,
    /// About the first server.
    pub verdict: Verdict,
    /// Why not more.
    pub reason: Option<String>,
}

impl LoadRecord {
    /// Whether some JSON is one of these rather than a record of `bench run`.
    pub fn is_one(bytes: &[u8]) -> bool {
        // The key is the first one that is written; a probe of the whole text would read it twice.
        let head: Vec<u8> = bytes.iter().copied().filter(|b| !b.is_ascii_whitespace()).take(14).collect();
        head.starts_with(b"{\"tool\":\"load\"")
    }

    /// Reads a record and checks what reports rely on.
    pub fn read(path: &Path) -> Result<LoadRecord> {
        let size = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
        let hint = "give a file that `bench load` wrote, unchanged";
        if size > MAX_BYTES {
            return Err(Error::format(path, 0, format!("{size} bytes are too many for a record"), hint));
        }
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        LoadRecord::parse(&bytes).map_err(|what| Error::format(path, 0, what, hint))
    }

    /// Reads the bytes of a record.
    pub fn parse(bytes: &[u8]) -> std::result::Result<LoadRecord, String> {
        let record: LoadRecord = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        if record.schema != SCHEMA || record.tool != TOOL {
            return Err(format!("`{}` of schema {} is not `{TOOL}` of schema {SCHEMA}", record.tool, record.schema));
        }
        if let Some(i) =
            record.runs.iter().position(|r| r.server >= record.servers.len() || r.timeline.len() > 1_000_000)
        {
            return Err(format!("run {i} names no server of this record, or is too long"));
        }
        Ok(record)
    }

    /// Writes the whole file or nothing.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)
            .map_err(|e| Error::config(format!("the record cannot be told as JSON: {e}"), "report this"))?;
        write_atomic(path, crate::record::lines_per_row(&text).as_bytes())
    }

    /// A name that sorts by time: `20261130T081500Z-load-sweep.json`.
    pub fn file_name(&self) -> PathBuf {
        let stamp: String = self.started.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
        let mode = match self.settings.mode {
            Mode::Rate => "rate",
            Mode::Sweep => "sweep",
            Mode::Compare => "compare",
        };
        format!("{stamp}-load-{mode}.json").into()
    }
}
