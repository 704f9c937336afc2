//! GELU: `x * Phi(x)`, in GPT-2's tanh form or exact with erf. Never one for the other.
//!
//! tanh: `0.5 x (1 + tanh(s (x + 0.044715 x^3)))`, `s = sqrt(2/pi)`; derivative `0.5 (1 + t) + 0.5 x (1 - t^2) s (1 + 3 * 0.044715 x^2)`.
//! exact: `0.5 x (1 + erf(x / sqrt(2)))`; derivative `0.5 (1 + erf(x / sqrt(2))) + x exp(-x^2 / 2) / sqrt(2 pi)`.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// Which GELU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gelu {
    /// The tanh form of GPT-2.
    Tanh,
    /// The exact form of ModernBERT.
    Erf,
}

/// `out = gelu(x)`, element by element; any shape, `x` and `out` of one float dtype.
pub struct Forward<'a> {
    /// Which GELU.
    pub kind: Gelu,
    /// Read.
    pub x: &'a Tensor,
    /// Same shape, `=`.
    pub out: &'a Tensor,
}

/// `dx = dout * gelu'(x)`; `dx` may be `dout` itself.
pub struct Backward<'a> {
    /// Which GELU.
    pub kind: Gelu,
    /// The argument of the forward, read.
    pub x: &'a Tensor,
    /// Read.
    pub dout: &'a Tensor,
    /// Same shape, `=`; may be the same memory as `dout`.
    pub dx: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "gelu.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "gelu.backward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
