//! What a server may be told. Defaults of limits are those of the `laya` package's server.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// How answers and errors are spelled.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Dialect {
    /// The exact envelope of Jev, with its formula of `confidence`.
    #[default]
    Jev,
    /// The fields of the `laya` package's results.
    Laya,
}

impl Dialect {
    /// The name in flags and paths.
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Jev => "jev",
            Dialect::Laya => "laya",
        }
    }
}

impl std::str::FromStr for Dialect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        [Dialect::Jev, Dialect::Laya]
            .into_iter()
            .find(|d| d.name() == text)
            .ok_or_else(|| format!("there is no dialect `{text}`; use jev or laya"))
    }
}

/// All settings of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub bind: SocketAddr,
    /// The dialect of paths that name none.
    pub dialect: Dialect,
    /// Sizes.
    pub limits: Limits,
    /// Times.
    pub timing: Timing,
    /// A file of bearer keys. With none, and none in the environment, everyone may ask.
    pub keys: Option<PathBuf>,
    /// Where each answered request leaves a line.
    pub audit: Option<PathBuf>,
    /// Whether logs may hold states and questions.
    pub log_text: bool,
    /// Where spans of requests are sent: a collector's address for traces (OTLP over HTTP). Needs the feature `otel`.
    pub otlp: Option<String>,
    /// Large choices.
    pub tournament: Option<Tournament>,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            bind: SocketAddr::from(([127, 0, 0, 1], 8000)),
            dialect: Dialect::default(),
            limits: Limits::default(),
            timing: Timing::default(),
            keys: None,
            audit: None,
            log_text: false,
            otlp: None,
            tournament: Some(Tournament::default()),
        }
    }
}

/// Sizes beyond which a request is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of a body, also after decompression.
    pub body_bytes: usize,
    /// Bytes of all bodies that are being read or answered.
    pub buffered_bytes: usize,
    /// Questions of a request.
    pub questions: usize,
    /// Options of a choice that is read in one pass.
    pub options: usize,
    /// Options of a choice that is narrowed in groups.
    pub narrowed_options: usize,
    /// Levels of a score.
    pub levels: usize,
    /// Options of all questions that are read in one pass.
    pub total_options: usize,
    /// Characters of a state's text.
    pub state_chars: usize,
    /// States of a batch.
    pub states: usize,
    /// `max_len` and `head_max_len`.
    pub token_budget: usize,
    /// Tokens of all rows that one request puts into a pass.
    pub batch_tokens: usize,
    /// Requests that are being answered or wait for it.
    pub concurrent: usize,
    /// Tokens of rows that wait.
    pub queued_tokens: usize,
    /// Open connections.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            body_bytes: 2 << 20,
            buffered_bytes: 64 << 20,
            questions: 64,
            options: 100,
            narrowed_options: 255,
            levels: 32,
            total_options: 512,
            state_chars: 50_000,
            states: 64,
            token_budget: 8192,
            batch_tokens: 131_072,
            concurrent: 64,
            queued_tokens: 1 << 20,
            connections: 1024,
        }
    }
}

/// Times beyond which a peer or a request is given up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Timing {
    /// Until the headers of a request are complete.
    pub header: Duration,
    /// Until its body is.
    pub body: Duration,
    /// Until a response is taken off our hands.
    pub write: Duration,
    /// A connection without a request.
    pub idle: Duration,
    /// From a request to its answer.
    pub request: Duration,
    /// Until requests that are being answered must be done when the server is told to stop.
    pub drain: Duration,
    /// How often files of loaded checkpoints are looked at; zero never.
    pub watch: Duration,
    /// A checkpoint that nobody asked for so long is unloaded; zero never.
    pub unload: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            header: Duration::from_secs(10),
            body: Duration::from_secs(10),
            write: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            request: Duration::from_secs(60),
            drain: Duration::from_secs(30),
            watch: Duration::from_secs(5),
            unload: Duration::ZERO,
        }
    }
}

/// How a choice with more options than a row has room for is answered: in groups, whose winners meet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tournament {
    /// Choices with more options than this take part; others are read in one pass.
    pub above: usize,
    /// Options of a group.
    pub group: usize,
}

impl Default for Tournament {
    fn default() -> Self {
        Tournament { above: 100, group: tilewright_decide::TOURNAMENT_GROUP }
    }
}
