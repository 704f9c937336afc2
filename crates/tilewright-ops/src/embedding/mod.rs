//! Token and position embedding: `out[b, t] = wte[tokens[b, t]] + wpe[position + t]`.

use tilewright_core::{DType, Error, Result};

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

/// Bytes of workspace that [`backward`] needs: positions sorted by token, a buffer to sort them through, and the start of each token's group.
pub fn backward_workspace_bytes(device: &Device, b: usize, t: usize) -> usize {
    #[cfg(feature = "cuda")]
    if device.cuda_sizes().is_some() {
        return cuda::workspace_words(b * t) * size_of::<u32>();
    }
    #[cfg(feature = "gpu")]
    if device.gpu_sizes().is_some() {
        return gpu::workspace_words(b * t) * size_of::<u32>();
    }
    let _ = device;
    workspace_words(b * t) * size_of::<u32>()
}

/// 32-bit words of the workspace for `n` positions; the kernel takes exactly these.
fn workspace_words(n: usize) -> usize {
    3 * n + 1
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("embedding.forward", device);
    let Forward { tokens, wte, wpe, vocab, position, out } = *args;
    let (b, t) = pair(&check, "tokens", "(B, T)", tokens)?;
    let (rows, c) = pair(&check, "wte", "(Vp, C)", wte)?;
    let (positions, _) = pair(&check, "wpe", "(maxT, C)", wpe)?;
    let dtype = wte.dtype();
    check.typed("tokens", tokens, DType::I32, &[b, t])?;
    check.float("wte", wte, &[rows, c])?;
    check.typed("wpe", wpe, dtype, &[positions, c])?;
    check.typed("out", out, dtype, &[b, t, c])?;
    check.argument(vocab <= rows, || format!("`vocab` is {vocab}, but `wte` has {rows} rows"))?;
    check.argument(position.checked_add(t).is_some_and(|end| end <= positions), || {
        format!("positions {position}..{position}+{t} do not fit `wpe` of {positions} rows; use a shorter sequence")
    })?;
    let inputs = [("tokens", tokens), ("wte", wte), ("wpe", wpe)];
    check.disjoint(&[("out", out)], &inputs)?;
    match device {
        Device::Cpu(cpu) => {
            in_range(&check, tokens, t, vocab)?;
            with_element!(dtype, T => cpu::forward::<T>(cpu, args, c));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            in_range(&check, tokens, t, vocab)?;
            cuda::forward(cuda, args, c)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            in_range(&check, tokens, t, vocab)?;
            gpu::forward(gpu, args, c)?;
        }
        Device::Null(null) => null.record(check.op, out.numel() as u64, (tokens.bytes() + 3 * out.bytes()) as u64),
    }
    Ok(())
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let check = Check::new("embedding.backward", device);
    let Backward { tokens, dout, vocab, dwte, dwpe, workspace, .. } = *args;
    let (b, t) = pair(&check, "tokens", "(B, T)", tokens)?;
    let (rows, c) = pair(&check, "dwte", "(Vp, C)", dwte)?;
    let (positions, _) = pair(&check, "dwpe", "(maxT, C)", dwpe)?;
    let dtype = dout.dtype();
    check.typed("tokens", tokens, DType::I32, &[b, t])?;
    check.float("dout", dout, &[b, t, c])?;
    check.typed("dwte", dwte, dtype, &[rows, c])?;
    check.typed("dwpe", dwpe, dtype, &[positions, c])?;
    check.argument(vocab <= rows, || format!("`vocab` is {vocab}, but `dwte` has {rows} rows"))?;
    check.argument(t <= positions, || format!("{t} positions do not fit `dwpe` of {positions} rows"))?;
    check.argument(u32::try_from(b * t).is_ok(), || {
        format!("{b} * {t} positions exceed 2^32 - 1; use a smaller batch")
    })?;
    check.workspace(workspace, backward_workspace_bytes(device, b, t))?;
    check
        .disjoint(&[("dwte", dwte), ("dwpe", dwpe), ("workspace", workspace)], &[("tokens", tokens), ("dout", dout)])?;
    match device {
        Device::Cpu(cpu) => {
            in_range(&check, tokens, t, vocab)?;
            let words = workspace.reinterpret(0, DType::I32, &[workspace_words(b * t)])?;
            with_element!(dtype, T => cpu::backward::<T>(cpu, args, c, &words));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            in_range(&check, tokens, t, vocab)?;
            cuda::backward(cuda, args, c)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            in_range(&check, tokens, t, vocab)?;
            gpu::backward(device, gpu, args, c)?;
        }
        Device::Null(null) => {
            // Each gradient is read twice; at most as many rows of dwte are read and written.
            let bytes = tokens.bytes() + 4 * dout.bytes() + 2 * dwpe.bytes();
            null.record(check.op, 2 * dout.numel() as u64, bytes as u64);
        }
    }
    Ok(())
}

/// The dimensions of an argument of rank 2.
fn pair(check: &Check<'_>, what: &'static str, want: &str, t: &Tensor) -> Result<(usize, usize)> {
    match t.shape().dims() {
        &[rows, cols] => Ok((rows, cols)),
        _ => Err(Error::Shape { op: check.op, what, got: t.shape(), want: want.into() }),
    }
}

/// Every id lies in `0..vocab`; checked before anything is written.
fn in_range(check: &Check<'_>, tokens: &Tensor, t: usize, vocab: usize) -> Result<()> {
    let Some(ids) = tokens.ids()? else { return Ok(()) };
    match ids.iter().position(|&id| usize::try_from(id).map_or(true, |id| id >= vocab)) {
        None => Ok(()),
        Some(i) => Err(Error::Argument {
            op: check.op,
            what: format!(
                "`tokens` holds id {} at (b, t) = ({}, {}), outside 0..{vocab}; check that the data was made with this model's tokenizer",
                ids[i],
                i / t,
                i % t
            ),
        }),
    }
}
