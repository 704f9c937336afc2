//! Paired benchmarks of commands: no claim without a paired run.
pub mod rng;
pub mod stats;
