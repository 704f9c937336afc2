//! Linear layers: `out = act(x @ weight^T + bias)` and its three backward forms.
//!
//! Tensors are read as matrices: leading dimensions fold into `M`. Weights are `(N, K)`, as in `nn.Linear` and llm.c. Any float storage for
//! each argument on its own; products are accumulated in f32. Deterministic: the same bits for any number of threads.

use tilewright_core::{Error, Result};

use crate::gelu::Gelu;
use crate::{Device, Tensor};

/// `out (M, N) = gelu(x (M, K) @ weight (N, K)^T + bias (N))`, bias and GELU optional.
pub struct Forward<'a> {
    /// `(M, K)`, read.
    pub x: &'a Tensor,
    /// `(N, K)`, read.
    pub weight: &'a Tensor,
    /// `(N)`, read.
    pub bias: Option<&'a Tensor>,
    /// The activation applied last; `None` is the identity.
    pub gelu: Option<Gelu>,
    /// `(M, N)`, `=`: the value before the activation, saved for backward. Only with `gelu`.
    pub pre_gelu: Option<&'a Tensor>,
    /// `(M, N)`, `=`.
    pub out: &'a Tensor,
}

/// `dx (M, K) (+)= dout (M, N) @ weight (N, K)`, times `gelu'(pre_gelu)` when the input of this layer came out of a GELU.
pub struct BackwardInput<'a> {
    /// `(M, N)`, read.
    pub dout: &'a Tensor,
    /// `(N, K)`, read.
    pub weight: &'a Tensor,
    /// The GELU that produced this layer's input, and its argument `(M, K)`: `dx = (dout @ weight) * gelu'(pre)`.
    pub gelu: Option<(Gelu, &'a Tensor)>,
    /// `(M, K)`, `=` or `+=`.
    pub dx: &'a Tensor,
    /// `+=` instead of `=`.
    pub accumulate: bool,
}

/// `dweight (N, K) (+)= dout (M, N)^T @ x (M, K)` and `dbias (N) (+)= sum over M of dout`.
pub struct BackwardWeight<'a> {
    /// `(M, N)`, read.
    pub dout: &'a Tensor,
    /// `(M, K)`, read.
    pub x: &'a Tensor,
    /// `(N, K)`, `=` or `+=`.
    pub dweight: &'a Tensor,
    /// `(N)`, `=` or `+=`.
    pub dbias: Option<&'a Tensor>,
    /// `+=` instead of `=`, for both.
    pub accumulate: bool,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "matmul.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`BackwardInput`].
pub fn backward_input(device: &Device, args: &BackwardInput<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "matmul.backward_input",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`BackwardWeight`].
pub fn backward_weight(device: &Device, args: &BackwardWeight<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "matmul.backward_weight",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
