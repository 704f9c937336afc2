//! Softmax sampling of one token a row: `p = softmax(logits[..vocab] / temperature)`, the first index whose cumulative probability exceeds `coin`.
//!
//! The maximum is subtracted before any exponential (logits above 88 overflow otherwise). Sums are f32 in index order, as in llm.c.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// See the module's words.
pub struct Forward<'a> {
    /// `(B, Vp)`, any float storage, read.
    pub logits: &'a Tensor,
    /// Only the first `vocab` columns can be drawn.
    pub vocab: usize,
    /// Above 0 divides the logits; 0 takes the largest logit (the first of equals).
    pub temperature: f32,
    /// Only the `top_k` largest logits can be drawn; 0 is no limit.
    pub top_k: usize,
    /// One uniform number in `[0, 1)` a row.
    pub coins: &'a [f32],
    /// `(B)` i32, `=`.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "sampling.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
