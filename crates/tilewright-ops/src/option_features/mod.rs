//! What an action head reads of a decision: the state of the row's first token, and how sure the logits of its options are.
//!
//! `R` rows, row `r` with the options `starts[r]..starts[r + 1]`. With `p = softmax(logits of the row)`, `n` options, `m = max(n, 2)`:
//! `out[r] = (states[firsts[r], :], p1, p1 - p2, -sum p ln max(p, 1e-9) / ln m, m / 255)`, where `p1` and `p2` are the largest and the second largest
//! probability, `p2 = 0` for a single option. A row without options, which pads a pack, has four zeros.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use tilewright_core::{DType, Error, Result};

use crate::check::Check;
use crate::{Device, Tensor};

/// Numbers behind the state.
pub const FEATURES: usize = 4;

/// See the module's words. All float tensors are f32.
pub struct Forward<'a> {
    /// `(S, D)`, read.
    pub states: &'a Tensor,
    /// `(R)` i32, read: a row of `states` each.
    pub firsts: &'a Tensor,
    /// `(L)` or `(L, 1)`, read.
    pub logits: &'a Tensor,
    /// `(R + 1)` i32, read: never falls, ends within `L`.
    pub starts: &'a Tensor,
    /// `(R, D + 4)`, `=`.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("option_features.forward", device);
    let Forward { states, firsts, logits, starts, out } = *args;
    let ((s, d), rows) = (states.shape().as_matrix(), firsts.numel());
    check.typed("states", states, DType::F32, &[s, d])?;
    check.typed("firsts", firsts, DType::I32, &[rows])?;
    check.typed("logits", logits, DType::F32, &logits.shape())?;
    check.typed("starts", starts, DType::I32, &[rows + 1])?;
    check.typed("out", out, DType::F32, &[rows, d + FEATURES])?;
    let inputs = [("states", states), ("firsts", firsts), ("logits", logits), ("starts", starts)];
    check.disjoint(&[("out", out)], &inputs)?;
    match device {
        Device::Cpu(_) => {
            in_range(&check, args, s)?;
            cpu::forward(args, d);
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            in_range(&check, args, s)?;
            cuda::forward(cuda, args, rows, d)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            in_range(&check, args, s)?;
            gpu::forward(gpu, args, rows, d)?;
        }
        Device::Null(null) => {
            let bytes = 2 * out.bytes() + logits.bytes() + firsts.bytes() + starts.bytes();
            null.record(check.op, 8 * logits.numel() as u64, bytes as u64);
        }
    }
    Ok(())
}

/// Every first token is a row of `states`, and options lie in order within the logits.
fn in_range(check: &Check<'_>, args: &Forward<'_>, states: usize) -> Result<()> {
    let (Some(firsts), Some(starts)) = (args.firsts.ids()?, args.starts.ids()?) else { return Ok(()) };
    if let Some(row) = firsts.iter().position(|&i| usize::try_from(i).map_or(true, |i| i >= states)) {
        let what = format!("`firsts` holds {} at {row}, outside 0..{states}, the rows of `states`", firsts[row]);
        return Err(Error::Argument { op: check.op, what });
    }
    let logits = args.logits.numel();
    let last = usize::try_from(starts[starts.len() - 1]);
    if starts[0] < 0 || starts.windows(2).any(|pair| pair[1] < pair[0]) || last.map_or(true, |last| last > logits) {
        let what = format!("`starts` must rise within 0..={logits}, the number of logits");
        return Err(Error::Argument { op: check.op, what });
    }
    Ok(())
}
