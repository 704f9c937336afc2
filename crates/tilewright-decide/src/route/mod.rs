//! Which checkpoint answers: detection of script and language, names of checkpoints, and a router that keeps the last used ones loaded.
//!
//! Decisions agree with those of the `laya` package, version 0.4.15, word for word; its tables are in `tables.rs`, with attribution.

mod caps;
pub(crate) mod chars;
mod decision;
mod detect;
mod language;
mod names;
#[cfg(test)]
mod recorded;
mod registry;
mod request;
mod router;
mod script;
mod tables;

pub use decision::{Decision, Hints, LanguageGuess, Rules};
pub use detect::Detection;
pub use names::canonical as canonical_name;
pub use registry::{Registry, Source};
pub use request::Request;
pub use router::{Decider, Router};

use crate::json::round4;
