//! Token and position embedding: `out[b, t] = wte[tokens[b, t]] + wpe[position + t]`.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// Forward; see the module's words. Float tensors share one dtype.
pub struct Forward<'a> {
    /// `(B, T)` i32, read; every id is checked to lie in `0..vocab`.
    pub tokens: &'a Tensor,
    /// `(Vp, C)`, read.
    pub wte: &'a Tensor,
    /// `(maxT, C)`, read.
    pub wpe: &'a Tensor,
    /// Ids below this are valid; at most `Vp`.
    pub vocab: usize,
    /// Position of the first column; `position + T <= maxT`.
    pub position: usize,
    /// `(B, T, C)`, `=`.
    pub out: &'a Tensor,
}

/// `dwte[tokens[b, t]] += dout[b, t]`, `dwpe[t] (+)= sum over b of dout[b, t]` (position 0). Each row of `dwte` is written by one task, in the
/// order of `(b, t)`: the same bits on every run and for any number of threads, no atomics.
pub struct Backward<'a> {
    /// `(B, T)` i32, read.
    pub tokens: &'a Tensor,
    /// `(B, T, C)`, read.
    pub dout: &'a Tensor,
    /// Ids below this are valid.
    pub vocab: usize,
    /// `(Vp, C)`, always `+=`: the tied head's gradient is already there.
    pub dwte: &'a Tensor,
    /// `(maxT, C)`, `+=` or `=` (rows from `T` on become zero with `=`).
    pub dwpe: &'a Tensor,
    /// `+=` into `dwpe` instead of `=`.
    pub accumulate_dwpe: bool,
    /// [`backward_workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// Bytes of workspace that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, b: usize, t: usize) -> usize {
    let _ = (device, b, t);
    0
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "embedding.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "embedding.backward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
