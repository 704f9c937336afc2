//! Models with explicit forward and backward over the op library. No autograd, and no `match` on a device: a model runs on whatever its
//! device is, the planner's null device included.

pub mod gpt2;
mod json;
pub mod laya;
pub mod modernbert;
pub mod plan;

pub use gpt2::{AdamW, Decoder, Gpt2, Options, Recompute};
pub use tilewright_core::gpt2::Gpt2Config;
