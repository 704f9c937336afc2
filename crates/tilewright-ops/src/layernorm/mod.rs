//! Layer normalisation over the last dimension, fused with the residual add before it.
//!
//! `sum = x + branch` (or `x`), `out = (sum - mean) * rstd * weight + bias`, `rstd = 1 / sqrt(var + eps)`, biased variance in two passes.
//! Statistics are f32. Backward: `g = weight * dout; dx += rstd * (g - mean(g) - xhat * mean(g * xhat))`; `dweight += xhat * dout`;
//! `dbias += dout`, `xhat = (sum - mean) * rstd`.

use tilewright_core::{DType, Result};

use crate::check::Check;
use crate::cpu::element::with_element;
use crate::{Device, Tensor};

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

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
    /// `(C)`, `+=` or `=` as `accumulate_params` says: the sum over rows of the new `dx`, which is the gradient of a bias added right before.
    pub dx_sums: Option<&'a Tensor>,
    /// The forward's output made again on the way, for activation recompute.
    pub again: Option<Again<'a>>,
    /// [`backward_workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// What [`Backward`] makes again: the same bits as [`Recompute`].
#[derive(Clone, Copy)]
pub struct Again<'a> {
    /// `(C)`, read.
    pub bias: Option<&'a Tensor>,
    /// `(N, C)`, `=`.
    pub out: &'a Tensor,
}

/// Bytes of workspace that [`backward`] needs for `(N, C)`: one row of `dweight` and one of `dbias` in f32 for each block of rows, and on GPUs one of
/// `dx`. On the processor blocks depend on `N` alone, so that sums are taken in the same order on every machine.
pub fn backward_workspace_bytes(device: &Device, n: usize, c: usize) -> usize {
    #[cfg(feature = "cuda")]
    if device.cuda_sizes().is_some() {
        return cuda::partial_elements(n, c) * size_of::<f32>();
    }
    #[cfg(feature = "gpu")]
    if let Some(gpu) = device.gpu_sizes() {
        return gpu::partial_elements(gpu, n, c) * size_of::<f32>();
    }
    let _ = device;
    partial_elements(n, c) * size_of::<f32>()
}

/// Rows summed into one partial `dweight` and `dbias`: at least 16, and never more than 128 blocks of them.
pub(crate) fn block_rows(n: usize) -> usize {
    n.div_ceil(128).max(16)
}

/// f32 elements of the partial sums; the kernel takes exactly these.
fn partial_elements(n: usize, c: usize) -> usize {
    n.div_ceil(block_rows(n)) * 2 * c
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
    let check = Check::new("layernorm.forward", device);
    let Forward { x, residual, weight, bias, eps, out, mean, rstd } = args;
    let (n, c) = rows_of(&check, "x", x)?;
    let dtype = x.dtype();
    parameters(&check, dtype, c, weight, *bias)?;
    let other = out_type(device, dtype, out.dtype());
    rows(&check, "out", out, other, n, c)?;
    check.typed("mean", mean, DType::F32, &[n])?;
    check.typed("rstd", rstd, DType::F32, &[n])?;
    check.argument(eps.is_finite() && *eps > 0.0, || format!("`eps` is {eps}; it must be positive and finite"))?;
    let mut outputs = vec![("out", *out), ("mean", *mean), ("rstd", *rstd)];
    let mut inputs = vec![("x", *x), ("weight", *weight)];
    inputs.extend(bias.map(|b| ("bias", b)));
    if let Some(Residual { branch, sum }) = residual {
        rows(&check, "branch", branch, other, n, c)?;
        rows(&check, "sum", sum, dtype, n, c)?;
        inputs.push(("branch", branch));
        outputs.push(("sum", sum));
        if sum.same_memory(x) {
            inputs.remove(0);
            check.disjoint(&[("out", out), ("mean", mean), ("rstd", rstd)], &[("x", x)])?;
        }
    }
    check.disjoint(&outputs, &inputs)?;
    match device {
        Device::Cpu(cpu) => with_element!(dtype, T => cpu::forward::<T>(cpu, n, c, args)),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(cuda, n, c, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(gpu, n, c, args)?,
        Device::Null(null) => {
            let mut touched: usize = outputs.iter().chain(&inputs).map(|(_, t)| t.bytes()).sum();
            if residual.as_ref().is_some_and(|r| r.sum.same_memory(x)) {
                touched += x.bytes(); // read and written
            }
            null.record(check.op, 8 * (n * c) as u64, touched as u64);
        }
    }
    Ok(())
}

/// The type of `out` and of the branch: that of `x`; on a GPU 16 bits may surround a stream in f32.
fn out_type(device: &Device, x: DType, out: DType) -> DType {
    if device.is_gpu() && x == DType::F32 && out.is_float() { out } else { x }
}

/// Runs [`Recompute`].
pub fn recompute(device: &Device, args: &Recompute<'_>) -> Result<()> {
    let check = Check::new("layernorm.recompute", device);
    let Recompute { sum, weight, bias, mean, rstd, out } = args;
    let (n, c) = rows_of(&check, "sum", sum)?;
    let dtype = sum.dtype();
    parameters(&check, dtype, c, weight, *bias)?;
    check.typed("mean", mean, DType::F32, &[n])?;
    check.typed("rstd", rstd, DType::F32, &[n])?;
    rows(&check, "out", out, dtype, n, c)?;
    let mut inputs = vec![("sum", *sum), ("weight", *weight), ("mean", *mean), ("rstd", *rstd)];
    inputs.extend(bias.map(|b| ("bias", b)));
    check.disjoint(&[("out", out)], &inputs)?;
    match device {
        Device::Cpu(cpu) => with_element!(dtype, T => cpu::recompute::<T>(cpu, n, c, args)),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::recompute(cuda, n, c, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::recompute(gpu, n, c, args)?,
        Device::Null(null) => {
            let touched: usize = inputs.iter().map(|(_, t)| t.bytes()).sum::<usize>() + out.bytes();
            null.record(check.op, 4 * (n * c) as u64, touched as u64);
        }
    }
    Ok(())
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let check = Check::new("layernorm.backward", device);
    let Backward { dout, sum, weight, mean, rstd, dx, dweight, dbias, dx_sums, again, workspace, .. } = args;
    let (n, c) = rows_of(&check, "dout", dout)?;
    let dtype = dout.dtype();
    rows(&check, "sum", sum, dtype, n, c)?;
    rows(&check, "dx", dx, dtype, n, c)?;
    parameters(&check, dtype, c, weight, None)?;
    check.typed("mean", mean, DType::F32, &[n])?;
    check.typed("rstd", rstd, DType::F32, &[n])?;
    check.typed("dweight", dweight, dtype, &[c])?;
    let mut outputs = vec![("dx", *dx), ("dweight", *dweight), ("workspace", *workspace)];
    if let Some(dbias) = dbias {
        check.typed("dbias", dbias, dtype, &[c])?;
        outputs.push(("dbias", dbias));
    }
    if let Some(dx_sums) = dx_sums {
        check.typed("dx_sums", dx_sums, dtype, &[c])?;
        outputs.push(("dx_sums", dx_sums));
    }
    check.workspace(workspace, backward_workspace_bytes(device, n, c))?;
    let mut inputs = vec![("dout", *dout), ("sum", *sum), ("weight", *weight), ("mean", *mean), ("rstd", *rstd)];
    if let Some(Again { bias, out }) = again {
        parameters(&check, dtype, c, weight, *bias)?;
        rows(&check, "again", out, dtype, n, c)?;
        outputs.push(("again", out));
        inputs.extend(bias.map(|b| ("bias", b)));
    }
    check.disjoint(&outputs, &inputs)?;
    match device {
        Device::Cpu(cpu) => {
            let partials = workspace.reinterpret(0, DType::F32, &[partial_elements(n, c)])?;
            with_element!(dtype, T => cpu::backward::<T>(cpu, n, c, args, &partials));
            behind(device, args)?;
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::backward(device, cuda, n, c, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            gpu::backward(device, gpu, n, c, args)?;
            made_again(device, args)?;
        }
        Device::Null(null) => {
            let touched: usize = outputs.iter().chain(&inputs).map(|(_, t)| t.bytes()).sum();
            null.record(check.op, 14 * (n * c) as u64, (touched - workspace.bytes()) as u64);
        }
    }
    Ok(())
}

/// What [`Backward`] is asked for beside gradients, by ops of their own: for devices without a kernel that does all at once.
fn behind(device: &Device, args: &Backward<'_>) -> Result<()> {
    if let Some(sums) = args.dx_sums {
        crate::matmul::column_sums(device, args.dx, sums, args.accumulate_params)?;
    }
    made_again(device, args)
}

/// What [`Backward`] makes again.
fn made_again(device: &Device, args: &Backward<'_>) -> Result<()> {
    let Some(Again { bias, out }) = args.again else { return Ok(()) };
    let Backward { sum, weight, mean, rstd, .. } = *args;
    recompute(device, &Recompute { sum, weight, bias, mean, rstd, out })
}

/// The matrix view of the argument that sets `(N, C)` and the dtype.
fn rows_of(check: &Check<'_>, what: &'static str, t: &Tensor) -> Result<(usize, usize)> {
    let (n, c) = t.shape().as_matrix();
    check.matrix(what, t, n, c)?;
    Ok((n, c))
}

fn rows(check: &Check<'_>, what: &'static str, t: &Tensor, dtype: DType, n: usize, c: usize) -> Result<()> {
    check.matrix(what, t, n, c)?;
    check.typed(what, t, dtype, &t.shape())
}

fn parameters(check: &Check<'_>, dtype: DType, c: usize, weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    check.typed("weight", weight, dtype, &[c])?;
    bias.map_or(Ok(()), |b| check.typed("bias", b, dtype, &[c]))
}
