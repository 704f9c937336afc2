//! Training: data, schedules, loop, checkpoints and logs.
//!
//! [`run::train`] is a whole run; the other modules are its parts, each usable alone. Nothing here knows of a terminal: the binary
//! watches through [`run::Observer`].

pub mod bpe;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod eval;
pub mod folder;
pub mod loader;
pub mod log;
pub mod outlier;
pub mod run;
pub mod sample;
pub mod schedule;
pub mod stats;
pub mod svg;
pub mod thermal;
pub mod vocab;
