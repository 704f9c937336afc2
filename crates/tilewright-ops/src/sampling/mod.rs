//! Softmax sampling of one token a row: `p = softmax(logits[..vocab] / temperature)`, the first index whose cumulative probability exceeds `coin`.
//!
//! The maximum is subtracted before any exponential (logits above 88 overflow otherwise). Sums are f32 in index order, as in llm.c; where
//! rounding leaves the whole sum at or below `coin`, the last index of a probability above 0
//! is drawn.

use tilewright_core::{DType, Error, Result};

use crate::check::Check;
use crate::cpu::element::with_element;
use crate::{Device, Tensor};

mod cpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

/// See the module's words.
pub struct Forward<'a> {
    /// `(B, Vp)`, any float storage, read.
    pub logits: &'a Tensor,
    /// Only the first `vocab` columns can be drawn.
    pub vocab: usize,
    /// Above 0 divides the logits; 0 takes the largest logit (the first of equals).
    pub temperature: f32,
    /// Only the `top_k` largest logits can be drawn, of equals the first; 0 is no limit.
    pub top_k: usize,
    /// One uniform number in `[0, 1)` a row.
    pub coins: &'a [f32],
    /// `(B)` i32, `=`.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
///
/// # Errors
/// Besides misfits of shapes and scalars: a row whose first `vocab` logits hold a NaN or have no finite maximum. Nothing is drawn then.
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("sampling.forward", device);
    let Forward { logits, vocab, temperature, coins, out, .. } = *args;
    let (rows, width) = logits.shape().as_matrix();
    check.matrix("logits", logits, rows, width)?;
    check.typed("out", out, DType::I32, &[rows])?;
    check.disjoint(&[("out", out)], &[("logits", logits)])?;
    check.argument(vocab >= 1 && vocab <= width, || {
        format!("`vocab` is {vocab}; it must lie in 1..={width}, the columns of `logits`")
    })?;
    check.argument(i32::try_from(vocab).is_ok(), || format!("`vocab` is {vocab}, beyond the i32 of `out`"))?;
    check.argument(temperature.is_finite() && temperature >= 0.0, || {
        format!("`temperature` is {temperature}; it must be finite and not negative (0 takes the largest logit)")
    })?;
    check.argument(coins.len() == rows, || format!("`coins` holds {} numbers for {rows} rows", coins.len()))?;
    check.argument(coins.iter().all(|c| (0.0..1.0).contains(c)), || {
        format!("`coins` are {coins:?}; each must lie in [0, 1)")
    })?;
    match device {
        Device::Cpu(cpu) => with_element!(logits.dtype(), T => cpu::forward::<T>(cpu, args)),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => on_the_host(args, rows),
        #[cfg(feature = "gpu")]
        Device::Gpu(_) => on_the_host(args, rows),
        Device::Null(null) => {
            null.record(check.op, 4 * (rows * vocab) as u64, (logits.bytes() + out.bytes()) as u64);
            Ok(())
        }
    }
}

/// A row of logits is small: on a GPU it is drawn from on the host.
#[cfg(any(feature = "cuda", feature = "gpu"))]
fn on_the_host(args: &Forward<'_>, rows: usize) -> Result<()> {
    let host = Device::cpu_with_threads(1);
    let (logits, out) = (args.logits, args.out);
    let logits = Tensor::from_f32(&host, tilewright_core::DType::F32, &logits.shape(), &logits.read_f32()?)?;
    let drawn = Tensor::zeros(&host, tilewright_core::DType::I32, &[rows])?;
    forward(&host, &Forward { logits: &logits, out: &drawn, ..*args })?;
    out.write_i32(&drawn.read_i32()?)
}

/// Why a row of logits has no distribution.
fn no_distribution(row: usize, maximum: f32) -> Error {
    let what = if maximum.is_nan() { "hold a NaN".to_owned() } else { format!("have the maximum {maximum}") };
    Error::Argument {
        op: "sampling.forward",
        what: format!("the logits of row {row} {what}, so no token can be drawn; check the model's weights"),
    }
}
