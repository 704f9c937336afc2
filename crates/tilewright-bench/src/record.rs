//! Records: one JSON file a run, with everything that was measured and everything that went wrong. `docs/bench-record.schema.json` describes it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tilewright_core::{Error, Result};

use crate::plan::{Arm, CheckRule, CoolDown, Limits, Memory, TensorSpec, WarmUp};
use crate::summary::Summary;

/// Version of the format.
pub const SCHEMA: u32 = 1;
/// Larger files are no record.
const MAX_BYTES: u64 = 256 << 20;

/// What a session may be used for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Picks candidates; nothing may be claimed from it.
    #[default]
    Screen,
    /// May be claimed.
    Confirm,
}

/// How a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Everything was measured.
    Ok,
    /// Interrupted or not finished yet; `--resume` continues it.
    Partial,
    /// Done, but some arm went wrong; `errors` has the rows.
    Error,
    /// Not begun, because the machine was not fit for it.
    RefusedEnvironment,
}

/// What is compared.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    /// Time by the arm's own clock; of a plain command, from start to end.
    #[default]
    Wall,
    /// Processor time of the process, user and system.
    Cpu,
    /// Time by the device's events.
    Device,
    /// Bytes above equal live bytes, as the arms tell.
    PeakMemory,
    /// Resident bytes above equal resident baselines.
    PeakRss,
    /// Largest resident set of a whole process, from its start.
    ProcessRss,
}

impl Measure {
    /// All, in the order of reports.
    pub const ALL: [Measure; 6] =
        [Measure::Wall, Measure::Cpu, Measure::Device, Measure::PeakMemory, Measure::PeakRss, Measure::ProcessRss];

    /// As in records.
    pub fn name(self) -> &'static str {
        match self {
            Measure::Wall => "wall",
            Measure::Cpu => "cpu",
            Measure::Device => "device",
            Measure::PeakMemory => "peak_memory",
            Measure::PeakRss => "peak_rss",
            Measure::ProcessRss => "process_rss",
        }
    }

    /// Whether it is bytes, not nanoseconds.
    pub fn is_memory(self) -> bool {
        matches!(self, Measure::PeakMemory | Measure::PeakRss | Measure::ProcessRss)
    }
}

/// Classes of things that go wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultKind {
    /// The program does not start.
    Start,
    /// It ended though it should not have.
    Crash,
    /// It did not answer in time.
    Timeout,
    /// It said what the protocol does not know.
    Garbage,
    /// A time that is not positive, or longer than passed.
    ImpossibleTime,
    /// Another output for the same input.
    ChangedOutput,
    /// It read other inputs than it was given.
    WrongInput,
    /// Another result than the baseline.
    Parity,
    /// It said itself that it cannot.
    Refused,
    /// By the user.
    Interrupted,
}

/// A record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Record {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Ratios are taken within one session only.
    pub session_id: String,
    /// The plan's name.
    pub plan: String,
    /// What it asks.
    pub description: String,
    /// Of the plan file and of what was set beside it.
    pub plan_sha256: String,
    /// What it may be used for.
    pub kind: Kind,
    /// How it ended.
    pub status: Status,
    /// Why it was refused or is partial.
    pub reason: Option<String>,
    /// Refusals that were overruled with `--force`.
    pub forced: Vec<String>,
    /// UTC.
    pub started: String,
    /// UTC.
    pub finished: Option<String>,
    /// As it was asked for, without paths.
    pub command: String,
    /// What was asked.
    pub settings: Settings,
    /// The machine and the sources.
    pub fingerprint: Fingerprint,
    /// The commands; the control is the last.
    pub arms: Vec<ArmRow>,
    /// The ring of every case.
    pub inputs: Vec<InputRow>,
    /// Indices into `arms`, for every round of every case.
    pub order: BTreeMap<String, Vec<Vec<usize>>>,
    /// Each start of the harness: a resumed run has several.
    pub segments: Vec<Segment>,
    /// The machine before and after each case.
    pub conditions: Vec<Condition>,
    /// Every call.
    pub samples: Vec<Sample>,
    /// What had to hold.
    pub checks: Vec<CheckRow>,
    /// What went wrong.
    pub errors: Vec<ErrorRow>,
    /// Made from the rows above; `bench report` and `bench check` make it anew.
    pub summary: Summary,
}

/// What was asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Pairs of each case.
    pub pairs: usize,
    /// Of order, inputs and resampling.
    pub seed: u64,
    /// Name of the arm that all others are compared with.
    pub baseline: String,
    /// Whether there is an A/A control.
    pub control: bool,
    /// Whether its interval must contain 1.
    pub strict_control: bool,
    /// What verdicts are about.
    pub primary: Measure,
    /// Before the first pair.
    pub warm_up: WarmUp,
    /// Rests.
    pub cool_down: CoolDown,
    /// How memory is compared.
    pub memory: Memory,
    /// When to give up.
    pub limits: Limits,
    /// The rules.
    pub checks: Vec<CheckRule>,
    /// Case, its parameters and its tensors.
    pub cases: Vec<CaseRow>,
}

/// A case as asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CaseRow {
    /// Its name.
    pub name: String,
    /// Given to the arms.
    pub params: BTreeMap<String, Value>,
    /// Distinct inputs.
    pub ring: usize,
    /// What was drawn.
    pub tensors: Vec<TensorSpec>,
}

/// The machine and the sources.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint {
    /// Model of the processor.
    pub cpu: Option<String>,
    /// Logical cores granted.
    pub cores: usize,
    /// System, kernel, architecture.
    pub system: String,
    /// Bytes of memory.
    pub memory_bytes: Option<u64>,
    /// Frequency governor.
    pub governor: Option<String>,
    /// One row a GPU: name, driver, clocks, temperature, power, as `nvidia-smi` tells.
    pub gpus: Vec<String>,
    /// `rustc --version`.
    pub compiler: Option<String>,
    /// `RUSTFLAGS` and the profile of the harness.
    pub flags: String,
    /// Commit of the working folder.
    pub commit: Option<String>,
    /// Whether files differ from it.
    pub dirty: Option<bool>,
    /// Of this harness.
    pub harness: String,
    /// Variables that change speed: threads, instruction sets, math modes.
    pub env: BTreeMap<String, String>,
}

/// A command.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmRow {
    /// As in the plan; the control's ends with `#2`.
    pub name: String,
    /// As in the plan, variables unexpanded.
    pub arm: Arm,
    /// Whether it is the second process of the baseline.
    pub control: bool,
    /// Of the program's file.
    pub program_sha256: Option<String>,
    /// Of arguments that are files.
    pub files_sha256: BTreeMap<String, String>,
    /// What it said to `hello`.
    pub hello: crate::protocol::Hello,
}

/// One tensor of the ring.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRow {
    /// The case.
    pub case: String,
    /// Index into the ring.
    pub index: usize,
    /// The tensor.
    pub name: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Type.
    pub dtype: String,
    /// Of its bytes.
    pub sha256: String,
}

/// One start of the harness.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Segment {
    /// UTC.
    pub started: String,
    /// Load averages.
    pub load: Option<[f64; 3]>,
}

/// The machine around a case.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// The case.
    pub case: String,
    /// `before` or `after`.
    pub when: String,
    /// Load averages.
    pub load: Option<[f64; 3]>,
    /// Mean clock of the cores.
    pub clock_mhz: Option<f64>,
    /// Hottest sensor.
    pub temp_c: Option<f64>,
    /// Share of the cores that others used during the case, the hypervisor among them; told `after`.
    pub foreign_cpu: Option<f64>,
}

/// Where in a session a call stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The first call of a process.
    First,
    /// Not counted.
    WarmUp,
    /// Counted.
    Pair,
    /// A fresh process for memory.
    Memory,
    /// Of a round that was interrupted.
    Cut,
}

/// One call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sample {
    /// The case.
    pub case: String,
    /// Index into `arms`.
    pub arm: usize,
    /// What it counts for.
    pub phase: Phase,
    /// Round, from 0 in each phase.
    pub pair: usize,
    /// Place in the round.
    pub slot: usize,
    /// Index into the ring.
    pub input: usize,
    /// Milliseconds since the harness started.
    pub at_ms: f64,
    /// By the arm's clock; of a plain command, of the whole process.
    pub wall_ns: f64,
    /// By the device.
    pub device_ns: Option<f64>,
    /// Processor time of the process.
    pub cpu_ns: Option<u64>,
    /// From the harness's request to the answer.
    pub round_trip_ns: Option<u64>,
    /// Mean clock after the call.
    pub clock_mhz: Option<f64>,
    /// Hottest sensor after the call.
    pub temp_c: Option<f64>,
    /// Live bytes before, as the arm tells.
    pub live_bytes: Option<u64>,
    /// Most live bytes inside, as the arm tells.
    pub peak_bytes: Option<u64>,
    /// Resident bytes before.
    pub rss_before: Option<u64>,
    /// Most resident bytes inside; of a plain command, of the whole process.
    pub rss_peak: Option<u64>,
    /// Digest of the output.
    pub output: Option<String>,
    /// Numbers told beside the time.
    pub metrics: BTreeMap<String, f64>,
}

/// A parity check.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckRow {
    /// The case.
    pub case: String,
    /// The arm.
    pub arm: String,
    /// What was compared.
    pub metric: String,
    /// Largest difference from the baseline.
    pub difference: f64,
    /// Allowed.
    pub tolerance: f64,
    /// Whether it held.
    pub pass: bool,
    /// The pair it belongs to; none before timing.
    pub pair: Option<usize>,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ErrorRow {
    /// The case.
    pub case: String,
    /// The arm.
    pub arm: String,
    /// When: `start`, `parity`, `warm_up`, `pair 12`, `memory`, `quit`.
    pub stage: String,
    /// The class.
    pub kind: FaultKind,
    /// In words.
    pub message: String,
    /// The end of the arm's standard error.
    pub stderr: String,
}

impl Record {
    /// Reads a record; whatever the file holds, the answer is a record or an error that says where.
    pub fn read(path: &Path) -> Result<Record> {
        let size = std::fs::metadata(path).map_err(Error::io("read", path))?.len();
        if size > MAX_BYTES {
            return Err(Error::format(
                path,
                0,
                format!("{size} bytes are too many for a record"),
                "give a file that `bench run` wrote",
            ));
        }
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        Record::parse(&bytes).map_err(|e| match e {
            Error::Format { offset, what, hint, .. } => Error::format(path, offset, what, hint),
            e => e,
        })
    }

    /// Reads the bytes of a record and checks what the statistics rely on.
    pub fn parse(bytes: &[u8]) -> Result<Record> {
        let bad = |offset: usize, what: String| {
            Error::format(Path::new("record"), offset as u64, what, "give a file that `bench run` wrote, unchanged")
        };
        let record: Record = serde_json::from_slice(bytes).map_err(|e| {
            let line_start =
                bytes.split_inclusive(|b| *b == b'\n').take(e.line().saturating_sub(1)).map(<[u8]>::len).sum::<usize>();
            bad(line_start + e.column(), e.to_string())
        })?;
        if record.schema != SCHEMA {
            return Err(bad(0, format!("schema {} is not {SCHEMA}", record.schema)));
        }
        let arms = record.arms.len();
        let has = |case: &str| record.settings.cases.iter().any(|c| c.name == case);
        for (i, s) in record.samples.iter().enumerate() {
            let number = |n: f64| n.is_finite() && n > 0.0;
            if s.arm >= arms || !has(&s.case) || !number(s.wall_ns) || !s.device_ns.is_none_or(number) {
                return Err(bad(
                    0,
                    format!("sample {i} names no arm or case of this record, or its time is not above 0"),
                ));
            }
            if s.pair >= 1_000_000 {
                return Err(bad(0, format!("sample {i} stands in round {}", s.pair)));
            }
        }
        for (case, order) in &record.order {
            if !has(case) || order.iter().flatten().any(|a| *a >= arms) {
                return Err(bad(0, format!("the order of case `{case}` names no case or arm of this record")));
            }
        }
        Ok(record)
    }

    /// Writes it to a temporary file beside `path`, then renames: a reader sees the old file or the new one.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)
            .map_err(|e| Error::config(format!("the record cannot be told as JSON: {e}"), "report this"))?;
        write_atomic(path, lines_per_row(&text).as_bytes())
    }

    /// A name that sorts by time: `20261130T081500Z-plan-screen.json`.
    pub fn file_name(&self) -> PathBuf {
        let stamp: String = self.started.chars().filter(|c| c.is_ascii_alphanumeric()).collect();
        let kind = if self.kind == Kind::Confirm { "confirm" } else { "screen" };
        format!("{stamp}-{}-{kind}.json", self.plan).into()
    }
}

/// Writes a whole file or nothing.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
    let mut file = tempfile::Builder::new().suffix(".tmp").tempfile_in(folder).map_err(Error::io("write", path))?;
    file.write_all(bytes).and_then(|()| file.as_file().sync_all()).map_err(Error::io("write", path))?;
    // A temporary file is private; a record is for all who may read the folder.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let _ = file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644));
    }
    file.persist(path).map_err(|e| Error::io("rename", path)(e.error))?;
    Ok(())
}

/// Breaks compact JSON after every row, so that records of many samples are small, readable and show well in a diff.
pub(crate) fn lines_per_row(json: &str) -> String {
    let mut out = String::with_capacity(json.len() + json.len() / 64);
    let (mut depth, mut in_text, mut escaped) = (0, false, false);
    for c in json.chars() {
        out.push(c);
        match c {
            _ if escaped => escaped = false,
            '\\' if in_text => escaped = true,
            '"' => in_text = !in_text,
            _ if in_text => {}
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth <= 2 => out.push('\n'),
            _ => {}
        }
    }
    out + "\n"
}
