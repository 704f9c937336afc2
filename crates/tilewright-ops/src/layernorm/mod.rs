//! Layer normalisation over the last dimension, fused with the residual add before it.
//!
//! `sum = x + branch` (or `x`), `out = (sum - mean) * rstd * weight + bias`, `rstd = 1 / sqrt(var + eps)`, biased variance in two passes.
//! Statistics are f32. Backward: `g = weight * dout; dx += rstd * (g - mean(g) - xhat * mean(g * xhat))`; `dweight += xhat * dout`;
//! `dbias += dout`, `xhat = (sum - mean) * rstd`.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// The residual add fused before the normalisation.
pub struct Residual<'a> {
    /// `(N, C)`, read: the branch's output.
    pub branch: &'a Tensor,
    /// `(N, C)`, `=`: `x + branch`. May be the same memory as `x`.
    pub sum: &'a Tensor,
}

/// Forward; see the module's words. Leading dimensions fold into `N`; the `(N, C)` tensors and parameters share one float dtype.
pub struct Forward<'a> {
    /// `(N, C)`, read.
    pub x: &'a Tensor,
    /// The residual add; `None` normalises `x` itself.
    pub residual: Option<Residual<'a>>,
    /// `(C)`, read.
    pub weight: &'a Tensor,
    /// `(C)`, read; `None` has no bias.
    pub bias: Option<&'a Tensor>,
    /// Added to the variance.
    pub eps: f32,
    /// `(N, C)`, `=`.
    pub out: &'a Tensor,
    /// `(N)` f32, `=`, saved for backward.
    pub mean: &'a Tensor,
    /// `(N)` f32, `=`, saved for backward.
    pub rstd: &'a Tensor,
}

/// Backward; see the module's words.
pub struct Backward<'a> {
    /// `(N, C)`, read.
    pub dout: &'a Tensor,
    /// `(N, C)`, read: what was normalised (`sum` of the forward, or `x` without a residual).
    pub sum: &'a Tensor,
    /// `(C)`, read.
    pub weight: &'a Tensor,
    /// `(N)` f32, read.
    pub mean: &'a Tensor,
    /// `(N)` f32, read.
    pub rstd: &'a Tensor,
    /// `(N, C)`, `+=` or `=`: the gradient of `sum`, which is also that of `x` and of the branch.
    pub dx: &'a Tensor,
    /// `+=` into `dx` instead of `=`.
    pub accumulate_dx: bool,
    /// `(C)`, `+=` or `=`.
    pub dweight: &'a Tensor,
    /// `(C)`, `+=` or `=`.
    pub dbias: Option<&'a Tensor>,
    /// `+=` into `dweight` and `dbias` instead of `=`.
    pub accumulate_params: bool,
    /// [`backward_workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// Bytes of workspace that [`backward`] needs for `(N, C)`.
pub fn backward_workspace_bytes(device: &Device, n: usize, c: usize) -> usize {
    let _ = (device, n, c);
    0
}

/// Normalises again from saved statistics: `out = (sum - mean) * rstd * weight + bias`, the same bits as the forward's `out`. For activation recompute.
pub struct Recompute<'a> {
    /// `(N, C)`, read.
    pub sum: &'a Tensor,
    /// `(C)`, read.
    pub weight: &'a Tensor,
    /// `(C)`, read.
    pub bias: Option<&'a Tensor>,
    /// `(N)` f32, read.
    pub mean: &'a Tensor,
    /// `(N)` f32, read.
    pub rstd: &'a Tensor,
    /// `(N, C)`, `=`.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "layernorm.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "layernorm.backward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Recompute`].
pub fn recompute(device: &Device, args: &Recompute<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "layernorm.recompute",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
