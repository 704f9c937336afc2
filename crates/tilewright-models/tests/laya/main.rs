//! The Laya model: recorded results, an independent f64 forward pass, and what must not change a result.

mod common;
mod cuda;
mod invariance;
mod parity;
mod plan;
mod reference;
mod refusals;
