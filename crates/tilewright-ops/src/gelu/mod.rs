//! GELU: `x * Phi(x)`, in GPT-2's tanh form or exact with erf. Never one for the other.
//!
//! tanh: `0.5 x (1 + tanh(s (x + 0.044715 x^3)))`, `s = sqrt(2/pi)`; derivative `0.5 (1 + t) + 0.5 x (1 - t^2) s (1 + 3 * 0.044715 x^2)`.
//! exact: `0.5 x (1 + erf(x / sqrt(2)))`; derivative `0.5 (1 + erf(x / sqrt(2))) + x exp(-x^2 / 2) / sqrt(2 pi)`.

use tilewright_core::Result;

use crate::check::Check;
use crate::cpu::element::with_element;
use crate::{Device, Tensor};

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod tests;

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
    let check = Check::new("gelu.forward", device);
    let Forward { kind, x, out } = *args;
    let (dtype, n) = (x.dtype(), x.numel());
    check.float("x", x, &x.shape())?;
    check.typed("out", out, dtype, &x.shape())?;
    check.disjoint(&[("out", out)], &[("x", x)])?;
    match device {
        Device::Cpu(cpu) => with_element!(dtype, T => cpu::forward::<T>(cpu, kind, x, out)),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(cuda, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(gpu, args)?,
        Device::Null(null) => null.record(check.op, 10 * n as u64, 2 * x.bytes() as u64),
    }
    Ok(())
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let check = Check::new("gelu.backward", device);
    let Backward { kind, x, dout, dx } = *args;
    let (dtype, n) = (x.dtype(), x.numel());
    check.float("x", x, &x.shape())?;
    check.typed("dout", dout, dtype, &x.shape())?;
    check.typed("dx", dx, dtype, &x.shape())?;
    check.disjoint(&[("dx", dx)], &[("x", x)])?;
    if !dx.same_memory(dout) {
        check.disjoint(&[("dx", dx)], &[("dout", dout)])?;
    }
    match device {
        Device::Cpu(cpu) => with_element!(dtype, T => cpu::backward::<T>(cpu, kind, x, dout, dx)),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::backward(cuda, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, args)?,
        Device::Null(null) => null.record(check.op, 16 * n as u64, 3 * x.bytes() as u64),
    }
    Ok(())
}
