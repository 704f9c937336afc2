//! A span a request for an OpenTelemetry collector, and one within it for the work on the device.
//!
//! With the feature `otel`. Who asks names its trace by `traceparent` (W3C Trace Context), and spans are parts of it. They hold times, counts, the names of the key
//! and the checkpoint; never a word of a request. Without the feature nothing of this is in the program, and asking for it is an error.

use std::time::{Duration, SystemTime};

use crate::engine::Spent;

#[cfg(feature = "otel")]
mod export;
#[cfg(not(feature = "otel"))]
mod none;

#[cfg(feature = "otel")]
pub use export::{Telemetry, Trace};
#[cfg(not(feature = "otel"))]
pub use none::{Telemetry, Trace};

/// What an answer tells of its making. A response carries it to the log and to the span.
#[derive(Clone, Debug)]
pub struct Told {
    /// The checkpoints that answered.
    pub model: String,
    /// From the start of the work to its end.
    pub took: Duration,
    /// The engine's share of it.
    pub spent: Spent,
    /// When it ended.
    pub ended: SystemTime,
}
