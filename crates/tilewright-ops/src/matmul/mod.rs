//! Linear layers: `out = act(x @ weight^T + bias)` and its three backward forms.
//!
//! Tensors are read as matrices: leading dimensions fold into `M`. Weights are `(N, K)`, as in `nn.Linear` and llm.c. Any float storage for
//! each argument on its own; products are accumulated in f32. Deterministic: the same bits for any number of threads.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
pub(crate) mod reference;
#[cfg(test)]
mod tests;

use tilewright_core::Result;

use crate::check::Check;
use crate::gelu::{self, Gelu};
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
    /// `(M, K)`, `=`: `gelu(pre)`, this layer's input made again for activation recompute. Only with `gelu`.
    pub activation: Option<&'a Tensor>,
    /// `(K)`: the sum over `M` of `dx`, which is the gradient of the bias that `pre` contains; `+=` where true, else `=`.
    pub dx_sums: Option<(&'a Tensor, bool)>,
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
    let Forward { x, weight, bias, gelu, pre_gelu, out } = *args;
    let check = Check::new("matmul.forward", device);
    let (m, k) = x.shape().as_matrix();
    let n = weight.shape().as_matrix().0;
    check.matrix("x", x, m, k)?;
    check.matrix("weight", weight, n, k)?;
    if let Some(bias) = bias {
        check.float("bias", bias, &[n])?;
    }
    if let Some(pre) = pre_gelu {
        check.argument(gelu.is_some(), || {
            "`pre_gelu` is saved only with an activation; leave it out or set `gelu`".into()
        })?;
        check.matrix("pre_gelu", pre, m, n)?;
    }
    check.matrix("out", out, m, n)?;
    let outputs = named([Some(("out", out)), pre_gelu.map(|t| ("pre_gelu", t))]);
    let inputs = named([Some(("x", x)), Some(("weight", weight)), bias.map(|t| ("bias", t))]);
    check.disjoint(&outputs, &inputs)?;
    match device {
        Device::Cpu(cpu) => cpu::forward(cpu, args, m, n, k),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(device, cuda, args, m, n, k)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(gpu, args, m, n, k)?,
        Device::Null(null) => null.record(check.op, flops(m, n, k), bytes(&outputs) + bytes(&inputs)),
    }
    Ok(())
}

/// Runs [`BackwardInput`].
pub fn backward_input(device: &Device, args: &BackwardInput<'_>) -> Result<()> {
    let BackwardInput { dout, weight, gelu, dx, accumulate, activation, dx_sums } = *args;
    let check = Check::new("matmul.backward_input", device);
    let (m, n) = dout.shape().as_matrix();
    let k = weight.shape().as_matrix().1;
    check.matrix("dout", dout, m, n)?;
    check.matrix("weight", weight, n, k)?;
    if let Some((_, pre)) = gelu {
        check.matrix("pre_gelu", pre, m, k)?;
    }
    check.matrix("dx", dx, m, k)?;
    if let Some(activation) = activation {
        check.argument(gelu.is_some(), || {
            "`activation` is made again from the argument of one; leave it out or set `gelu`".into()
        })?;
        check.matrix("activation", activation, m, k)?;
    }
    if let Some((sums, _)) = dx_sums {
        check.float("dx_sums", sums, &[k])?;
    }
    let outputs =
        named([Some(("dx", dx)), activation.map(|t| ("activation", t)), dx_sums.map(|(t, _)| ("dx_sums", t))]);
    let inputs = named([Some(("dout", dout)), Some(("weight", weight)), gelu.map(|(_, t)| ("pre_gelu", t))]);
    check.disjoint(&outputs, &inputs)?;
    match device {
        Device::Cpu(cpu) => {
            cpu::backward_input(cpu, args, m, n, k);
            behind(device, args)?;
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::backward_input(device, cuda, args, m, n, k)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            gpu::backward_input(gpu, args, m, n, k)?;
            behind(device, args)?;
        }
        Device::Null(null) => {
            let again = if accumulate { dx.bytes() as u64 } else { 0 };
            null.record(check.op, flops(m, n, k), bytes(&outputs) + again + bytes(&inputs));
        }
    }
    Ok(())
}

/// What [`BackwardInput`] is asked for beside `dx`, by ops of their own: for devices without a kernel that does all at once.
fn behind(device: &Device, args: &BackwardInput<'_>) -> Result<()> {
    if let (Some((kind, pre)), Some(out)) = (args.gelu, args.activation) {
        gelu::forward(device, &gelu::Forward { kind, x: &pre.view(&out.shape())?, out })?;
    }
    args.dx_sums.map_or(Ok(()), |(sums, accumulate)| column_sums(device, args.dx, sums, accumulate))
}

/// `sums (N) (+)= sum over M of x (M, N)`, whose arguments the caller has checked.
pub(crate) fn column_sums(device: &Device, x: &Tensor, sums: &Tensor, accumulate: bool) -> Result<()> {
    let (m, n) = x.shape().as_matrix();
    match device {
        Device::Cpu(cpu) => cpu::bias_gradient(cpu, x, sums, accumulate, m, n),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::bias_gradient(cuda, x, sums, accumulate, m, n)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::bias_gradient(device, gpu, x, sums, accumulate, m, n)?,
        Device::Null(null) => {
            null.record("matmul.column_sums", m as u64 * n as u64, bytes(&[("x", x), ("sums", sums)]));
        }
    }
    Ok(())
}

/// Runs [`BackwardWeight`].
pub fn backward_weight(device: &Device, args: &BackwardWeight<'_>) -> Result<()> {
    let BackwardWeight { dout, x, dweight, dbias, accumulate } = *args;
    let check = Check::new("matmul.backward_weight", device);
    let (m, n) = dout.shape().as_matrix();
    let k = x.shape().as_matrix().1;
    check.matrix("dout", dout, m, n)?;
    check.matrix("x", x, m, k)?;
    check.matrix("dweight", dweight, n, k)?;
    if let Some(dbias) = dbias {
        check.float("dbias", dbias, &[n])?;
    }
    let outputs = named([Some(("dweight", dweight)), dbias.map(|t| ("dbias", t))]);
    let inputs = [("dout", dout), ("x", x)];
    check.disjoint(&outputs, &inputs)?;
    match device {
        Device::Cpu(cpu) => cpu::backward_weight(cpu, args, m, n, k),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::backward_weight(cuda, args, m, n, k)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward_weight(device, gpu, args, m, n, k)?,
        Device::Null(null) => {
            let bias = if dbias.is_some() { m as u64 * n as u64 } else { 0 };
            let outputs = bytes(&outputs) << u32::from(accumulate);
            null.record(check.op, flops(m, n, k) + bias, outputs + bytes(&inputs));
        }
    }
    Ok(())
}

type Named<'a> = (&'static str, &'a Tensor);

fn named<'a, const N: usize>(all: [Option<Named<'a>>; N]) -> Vec<Named<'a>> {
    all.into_iter().flatten().collect()
}

fn bytes(tensors: &[Named<'_>]) -> u64 {
    tensors.iter().map(|(_, t)| t.bytes() as u64).sum()
}

fn flops(m: usize, n: usize, k: usize) -> u64 {
    2 * m as u64 * n as u64 * k as u64
}
