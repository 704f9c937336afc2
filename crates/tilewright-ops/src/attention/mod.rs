//! Flash attention: `softmax(scale * q k^T + mask) v` in tiles, never a `T x T` buffer, forward and backward, any `T`, head sizes 3 to 256.
//!
//! `q`, `k` and `v` lie in one `(B, T, 3C)` tensor as llm.c lays them: columns `[0, C)` q, `[C, 2C)` k, `[2C, 3C)` v, head `h` in columns
//! `h*hs..(h+1)*hs` of each third. `lse[b, h, t]` is the natural log of the sum of `exp(scale * q.k)` over the visible keys: all that the
//! backward needs beside the output. `scale` is `1 / sqrt(hs)`. The backward forms `D = sum over d of dout * out` in its workspace, recomputes
//! `P = exp(scale * q.k - lse)`, and gives `dv = P^T dout`, `dS = P * (dout v^T - D)`, `dq = scale * dS k`, `dk = scale * dS^T q`.
//!
//! All float tensors of a call but `lse` share one storage dtype; statistics and accumulation are f32, and a result is rounded once. A
//! masked score has probability exactly zero, even where it is not a number. Deterministic for any number of threads.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use tilewright_core::Result;

use crate::check::Check;
use crate::cpu::element::with_element;
use crate::{DType, Device, Tensor};
use cpu::Sizes;

/// The largest head size.
pub const MAX_HEAD: usize = 256;

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Mask {
    /// Keys at or before the query.
    Causal,
}

/// `out (B, T, C) = attention(qkv (B, T, 3C))`.
pub struct Forward<'a> {
    /// `(B, T, 3C)`, read.
    pub qkv: &'a Tensor,
    /// `H`; divides `C`.
    pub heads: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `(B, T, C)`, `=`, heads side by side.
    pub out: &'a Tensor,
    /// `(B, H, T)` f32, `=`, saved for backward.
    pub lse: &'a Tensor,
    /// [`workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// `dqkv (B, T, 3C)` from `dout (B, T, C)`.
pub struct Backward<'a> {
    /// `(B, T, 3C)`, read.
    pub qkv: &'a Tensor,
    /// `H`.
    pub heads: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `(B, T, C)`, read: the forward's output.
    pub out: &'a Tensor,
    /// `(B, H, T)` f32, read.
    pub lse: &'a Tensor,
    /// `(B, T, C)`, read.
    pub dout: &'a Tensor,
    /// `(B, T, 3C)`, `=`.
    pub dqkv: &'a Tensor,
    /// `(3C)`: the sum over `B` and `T` of `dqkv`, which is the gradient of the bias in `qkv`; `+=` where true, else `=`.
    pub dqkv_sums: Option<(&'a Tensor, bool)>,
    /// [`workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// One new token a row against a cache: writes its `k` and `v` at `position`, then attends to positions `0..=position`.
pub struct Decode<'a> {
    /// `(B, 3C)`, read: the new token's q, k, v.
    pub qkv: &'a Tensor,
    /// `H`.
    pub heads: usize,
    /// Where the new token stands, below `Tmax`.
    pub position: usize,
    /// `(B, Tmax, C)`, row `position` written.
    pub k_cache: &'a Tensor,
    /// `(B, Tmax, C)`, row `position` written.
    pub v_cache: &'a Tensor,
    /// `(B, C)`, `=`.
    pub out: &'a Tensor,
}

/// Bytes of workspace that [`forward`] and [`backward`] need. Depends on the shape and on the device's number of threads.
pub fn workspace_bytes(device: &Device, b: usize, t: usize, c: usize, heads: usize) -> usize {
    let sizes = Sizes { b, t, heads, head: c / heads.max(1) };
    workspace_floats(device, sizes) * size_of::<f32>()
}

fn workspace_floats(device: &Device, sizes: Sizes) -> usize {
    #[cfg(feature = "cuda")]
    if device.cuda_sizes().is_some() {
        return cuda::workspace_floats(sizes);
    }
    #[cfg(feature = "gpu")]
    if device.gpu_sizes().is_some() {
        return gpu::workspace_floats(sizes);
    }
    cpu::workspace_floats(sizes, device.threads())
}

/// Checks what all three have in common: `qkv` is some rows of `3C` floats, and the heads divide `C`.
fn split_heads(check: &Check<'_>, qkv: &Tensor, heads: usize) -> Result<(usize, usize)> {
    let width = qkv.shape().dims().last().copied().unwrap_or(0);
    check
        .argument(width.is_multiple_of(3), || format!("`qkv` has {width} columns; q, k and v need a multiple of 3"))?;
    let c = width / 3;
    check.argument(heads > 0 && c > 0 && c.is_multiple_of(heads), || {
        format!("`heads` is {heads}, which does not divide C = {c}; choose a divisor")
    })?;
    let head = c / heads;
    check.argument(head <= MAX_HEAD, || {
        format!("the head size is {head} (C = {c}, {heads} heads); at most {MAX_HEAD} is supported, use more heads")
    })?;
    Ok((c, head))
}

/// `B` and `T` of the `(B, T, 3C)` input.
fn batch_and_length(check: &Check<'_>, qkv: &Tensor) -> Result<(usize, usize)> {
    match *qkv.shape().dims() {
        [b, t, _] => Ok((b, t)),
        _ => {
            let want = "(B, T, 3C)".to_owned();
            Err(tilewright_core::Error::Shape { op: check.op, what: "qkv", got: qkv.shape(), want })
        }
    }
}

/// The workspace as f32, exactly as large as needed.
fn workspace(check: &Check<'_>, t: &Tensor, floats: usize) -> Result<Tensor> {
    check.workspace(t, floats * size_of::<f32>())?;
    t.reinterpret(0, DType::F32, &[floats])
}

/// Multiply-adds of one product over the visible half, counted as two.
fn product_flops(sizes: Sizes) -> u64 {
    let pairs = (sizes.t as u64) * (sizes.t as u64 + 1) / 2;
    2 * pairs * (sizes.b * sizes.heads * sizes.head) as u64
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let Forward { qkv, heads, mask: Mask::Causal, out, lse, workspace: scratch } = *args;
    let check = Check::new("attention.forward", device);
    let (b, t) = batch_and_length(&check, qkv)?;
    let (c, head) = split_heads(&check, qkv, heads)?;
    let sizes = Sizes { b, t, heads, head };
    check.float("qkv", qkv, &[b, t, 3 * c])?;
    check.typed("out", out, qkv.dtype(), &[b, t, c])?;
    check.typed("lse", lse, DType::F32, &[b, heads, t])?;
    let floats = workspace_floats(device, sizes);
    let scratch = workspace(&check, scratch, floats)?;
    check.disjoint(&[("out", out), ("lse", lse), ("workspace", &scratch)], &[("qkv", qkv)])?;
    match device {
        Device::Cpu(cpu) => {
            with_element!(qkv.dtype(), T => cpu::forward::<T>(cpu, sizes, qkv, out, lse, &scratch));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(cuda, sizes, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(gpu, sizes, args)?,
        Device::Null(null) => {
            let bytes = qkv.bytes() + out.bytes() + lse.bytes();
            null.record(check.op, 2 * product_flops(sizes), bytes as u64);
        }
    }
    Ok(())
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let Backward { qkv, heads, mask: Mask::Causal, out, lse, dout, dqkv, dqkv_sums, workspace: scratch } = *args;
    let check = Check::new("attention.backward", device);
    let (b, t) = batch_and_length(&check, qkv)?;
    let (c, head) = split_heads(&check, qkv, heads)?;
    let sizes = Sizes { b, t, heads, head };
    check.float("qkv", qkv, &[b, t, 3 * c])?;
    check.typed("out", out, qkv.dtype(), &[b, t, c])?;
    check.typed("lse", lse, DType::F32, &[b, heads, t])?;
    check.typed("dout", dout, qkv.dtype(), &[b, t, c])?;
    check.typed("dqkv", dqkv, qkv.dtype(), &[b, t, 3 * c])?;
    let floats = workspace_floats(device, sizes);
    let scratch = workspace(&check, scratch, floats)?;
    let mut outputs = vec![("dqkv", dqkv), ("workspace", &scratch)];
    if let Some((sums, _)) = dqkv_sums {
        check.float("dqkv_sums", sums, &[3 * c])?;
        outputs.push(("dqkv_sums", sums));
    }
    check.disjoint(&outputs, &[("qkv", qkv), ("out", out), ("lse", lse), ("dout", dout)])?;
    match device {
        Device::Cpu(cpu) => {
            let tensors = cpu::BackwardTensors { qkv, out, lse, dout, dqkv, workspace: &scratch };
            with_element!(qkv.dtype(), T => cpu::backward::<T>(cpu, sizes, &tensors));
            sums_behind(device, args)?;
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::backward(device, cuda, sizes, args, &scratch)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            gpu::backward(gpu, sizes, args, &scratch)?;
            sums_behind(device, args)?;
        }
        Device::Null(null) => {
            let bytes = qkv.bytes() + out.bytes() + lse.bytes() + dout.bytes() + dqkv.bytes();
            null.record(check.op, 5 * product_flops(sizes), bytes as u64);
        }
    }
    Ok(())
}

/// [`Backward::dqkv_sums`] by a pass of its own: for devices without a kernel that sums on the way.
fn sums_behind(device: &Device, args: &Backward<'_>) -> Result<()> {
    args.dqkv_sums.map_or(Ok(()), |(sums, accumulate)| crate::matmul::column_sums(device, args.dqkv, sums, accumulate))
}

/// Runs [`Decode`].
pub fn decode(device: &Device, args: &Decode<'_>) -> Result<()> {
    let Decode { qkv, heads, position, k_cache, v_cache, out } = *args;
    let check = Check::new("attention.decode", device);
    let (c, head) = split_heads(&check, qkv, heads)?;
    let b = qkv.numel() / (3 * c);
    check.float("qkv", qkv, &[b, 3 * c])?;
    let longest = k_cache.shape().dims().get(1).copied().unwrap_or(0);
    check.typed("k_cache", k_cache, qkv.dtype(), &[b, longest, c])?;
    check.typed("v_cache", v_cache, qkv.dtype(), &[b, longest, c])?;
    check.typed("out", out, qkv.dtype(), &[b, c])?;
    check.argument(position < longest, || {
        format!("`position` is {position}, but the caches hold {longest} positions; start a new context or use longer caches")
    })?;
    check.disjoint(&[("out", out), ("k_cache", k_cache), ("v_cache", v_cache)], &[("qkv", qkv)])?;
    match device {
        Device::Cpu(cpu) => {
            let tensors = cpu::DecodeTensors { heads, head, position, qkv, k_cache, v_cache, out };
            with_element!(qkv.dtype(), T => cpu::decode::<T>(cpu, b, longest, &tensors));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            let tensors = cpu::DecodeTensors { heads, head, position, qkv, k_cache, v_cache, out };
            cuda::decode(cuda, b, longest, &tensors)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            let tensors = cpu::DecodeTensors { heads, head, position, qkv, k_cache, v_cache, out };
            gpu::decode(gpu, b, longest, &tensors)?;
        }
        Device::Null(null) => {
            let keys = position as u64 + 1;
            let cached = 2 * keys * (b * c * qkv.dtype().size()) as u64;
            null.record(check.op, 4 * keys * (b * c) as u64, cached + (qkv.bytes() + out.bytes()) as u64);
        }
    }
    Ok(())
}
