//! Linear layers of inference: weights packed once into the order in which the kernels read them, and kept as f32, bf16 or f16.
//!
//! `out (M, N) = activation(x (M, K) @ weight (N, K)^T + bias (N)) + residual (M, N)`; with [`Activation::Geglu`], whose weight is packed as
//! [`Layout::Gated`], `out (M, N/2) = gelu(a) * b + residual`, where `a` is the first half of the columns of the product and `b` the last, and
//! gelu is the exact one. `x`, `bias`, `residual` and `out` are f32 and leading dimensions fold into `M`.
//!
//! What the precision of the weight means, on every instruction set:
//!
//! | precision | weight | x | products and sums |
//! |---|---|---|---|
//! | f32 | as given | as given | f32 |
//! | f16 | rounded to f16 | as given | f32 |
//! | bf16 | rounded to bf16 | rounded to bf16 | exact products, f32 sums |
//!
//! GPUs round `x` to the type of the weight for f16 too, and take `x` and `out` of any float type, so that what lies between two layers can be kept in
//! 16 bits; a sum that is activated or gated is then rounded to the type of `out` before.
//!
//! Processors with AVX512-BF16 multiply bf16 in hardware, in pairs: a sum of two products is added to each partial sum, denormal numbers count as
//! zero, and the bits therefore differ from those of other instruction sets by rounding, as f32 bits also do.
//!
//! **Batch invariance.** On processors a row of `out` has the same bits whatever `M` is, wherever the row stands, and for any number of threads: every element is
//! a sum over blocks of K which depend on K alone, each block one chain of multiply-adds.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod tests;
mod weight;

use tilewright_core::{DType, Error, Result};

use crate::check::Check;
use crate::gelu::Gelu;
use crate::{Device, Tensor, layernorm};
pub use weight::{Layout, Weight};

/// What is applied to the product and its bias.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// The identity.
    None,
    /// GELU.
    Gelu(Gelu),
    /// `max(x, 0)`.
    Relu,
    /// `gelu(a) * b` with the exact GELU, of a weight packed as [`Layout::Gated`].
    Geglu,
}

/// `out = activation(x @ weight^T + bias) + residual`.
pub struct Forward<'a> {
    /// `(M, K)` f32, read.
    pub x: &'a Tensor,
    /// `(N, K)`, packed.
    pub weight: &'a Weight,
    /// `(N)` f32, read.
    pub bias: Option<&'a Tensor>,
    /// Applied to the product and its bias.
    pub activation: Activation,
    /// Of the shape of `out`, f32, read; added last. May be the same memory as `out`.
    pub residual: Option<&'a Tensor>,
    /// `(M, N)` f32, or `(M, N/2)` for [`Activation::Geglu`], `=`.
    pub out: &'a Tensor,
}

/// A layer normalisation and the layer that reads its result.
pub struct Normed<'a> {
    /// Its `out` is the layer's `x`. A device that does both at once leaves `out`, `mean` and `rstd` as they were.
    pub norm: layernorm::Forward<'a>,
    /// The layer.
    pub layer: Forward<'a>,
}

/// Says that a layer with this weight comes soon, so that a device may bring it nearer while it runs the next layer. Changes no result.
#[cfg_attr(not(feature = "cuda"), allow(unused_variables))]
pub fn soon(device: &Device, weight: &Weight) {
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        cuda.expect(weight.memory());
    }
}

/// Runs [`Normed`].
pub fn normed(device: &Device, args: &Normed<'_>) -> Result<()> {
    let Normed { norm, layer } = args;
    let check = Check::new("linear.normed", device);
    check.argument(layer.x.same_memory(norm.out), || "`layer.x` is not `norm.out`; pass one tensor as both".into())?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = device {
        let m = checked(&check, layer)?;
        let k = layer.weight.shape().1;
        check.matrix("norm.x", norm.x, m, k)?;
        check.typed("norm.weight", norm.weight, DType::F32, &[k])?;
        if let Some(bias) = norm.bias {
            check.typed("norm.bias", bias, DType::F32, &[k])?;
        }
        if m > 0 && cuda::normed(cuda, args, m)? {
            return Ok(());
        }
    }
    layernorm::forward(device, norm)?;
    forward(device, layer)
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let Forward { residual, out, .. } = *args;
    let check = Check::new("linear.forward", device);
    let m = checked(&check, args)?;
    match device {
        Device::Cpu(cpu) => cpu::forward(cpu, args, m),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(cuda, args, m)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(device, gpu, args, m)?,
        Device::Null(null) => {
            let (n, k) = args.weight.shape();
            let moved: usize = inputs(args).iter().map(|(_, t)| t.bytes()).sum();
            let again = residual.map_or(0, |t| if t.same_memory(out) { t.bytes() } else { 0 });
            null.record(check.op, 2 * m as u64 * n as u64 * k as u64, (moved + again + out.bytes()) as u64);
        }
    }
    Ok(())
}

/// What is read, without a residual that is the output itself.
fn inputs<'a>(args: &Forward<'a>) -> Vec<(&'static str, &'a Tensor)> {
    let Forward { x, weight, bias, residual, out, .. } = *args;
    let mut inputs = vec![("x", x), ("weight", weight.memory())];
    inputs.extend(bias.map(|t| ("bias", t)));
    inputs.extend(residual.filter(|t| !t.same_memory(out)).map(|t| ("residual", t)));
    inputs
}

/// Checks the call and tells `M`.
fn checked(check: &Check<'_>, args: &Forward<'_>) -> Result<usize> {
    let Forward { x, weight, bias, activation, residual, out } = *args;
    let (n, k) = weight.shape();
    let m = x.shape().as_matrix().0;
    input_or_output(check, "x", x, m, k)?;
    check.on_device("weight", weight.memory())?;
    check.argument((activation == Activation::Geglu) == (weight.layout() == Layout::Gated), || {
        "`Activation::Geglu` and a weight packed as `Layout::Gated` go together; pack the weight as `Plain` for other activations".into()
    })?;
    let columns = if activation == Activation::Geglu { n / 2 } else { n };
    if let Some(bias) = bias {
        check.typed("bias", bias, DType::F32, &[n])?;
    }
    if let Some(residual) = residual {
        matrix(check, "residual", residual, m, columns)?;
    }
    input_or_output(check, "out", out, m, columns)?;
    check.disjoint(&[("out", out)], &inputs(args))?;
    Ok(m)
}

/// `x` or `out`: f32, or on a GPU any float type.
fn input_or_output(check: &Check<'_>, what: &'static str, t: &Tensor, rows: usize, cols: usize) -> Result<()> {
    match check.device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => check.matrix(what, t, rows, cols),
        #[cfg(feature = "gpu")]
        Device::Gpu(_) => check.matrix(what, t, rows, cols),
        _ => matrix(check, what, t, rows, cols),
    }
}

/// An f32 matrix of the call.
fn matrix(check: &Check<'_>, what: &'static str, t: &Tensor, rows: usize, cols: usize) -> Result<()> {
    if t.dtype() != DType::F32 {
        return Err(Error::DType { op: check.op, what, got: t.dtype(), want: "f32".into() });
    }
    check.matrix(what, t, rows, cols)
}
