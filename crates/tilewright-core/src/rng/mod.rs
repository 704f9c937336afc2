//! Random numbers, bit-compatible with llm.c and PyTorch.
//!
//! [`Mt19937`] initialises models and shuffles data, [`XorShift`] samples tokens and seeds stochastic rounding, and [`noise2d`] is the position-hashed noise
//! that stochastic rounding compares against.

mod mt19937;
mod noise;
mod normal;
mod xorshift;

pub use mt19937::{MT_RECORD_BYTES, Mt19937};
pub use noise::{noise1d, noise2d, stochastic_round_bf16};
pub use xorshift::XorShift;
