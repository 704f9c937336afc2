//! Gated products of many rows on Hopper, whose GELU never leaves the chip (`gated.cu`).

use tilewright_core::{DType, Result};

use super::super::{Activation, Forward};
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::tiles::{Job, PAIR, TensorMap, tiles};
use crate::runtime::cuda::{Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "linear/gated.cu",
    text: tiles!("gated.cu"),
    parameters: &["TW_TYPE"],
    variants: &[&[1], &[2]],
    exact: false,
};

/// Columns of the result in a tile: as many of each half.
const COLUMNS: usize = 128;

/// Rows from which the tiles pay.
const LEAST: usize = 512;

/// Runs the layer; `false`: this kernel does not take it, and nothing was launched.
pub(super) fn forward(cuda: &Cuda, op: &'static str, args: &Forward<'_>, m: usize) -> Result<bool> {
    let Forward { x, weight, bias, activation, residual, out } = *args;
    let (n, k) = weight.shape();
    let (precision, columns) = (weight.dtype(), n / 2);
    let suits = cuda.info().capability.0 == 9
        && activation == Activation::Geglu
        && m >= LEAST
        && bias.is_none()
        && residual.is_none()
        && precision != DType::F32
        && x.dtype() == precision
        && out.dtype() == precision
        && k > 0
        && k.is_multiple_of(8)
        && columns.is_multiple_of(8)
        && aligned(&[x, weight.memory(), out])
        && TensorMap::available();
    if !suits {
        return Ok(false);
    }
    let job = Job {
        a: TensorMap::new(cuda, op, (x.cuda_address(), precision), (m, k, k), 128)?,
        b: TensorMap::new(cuda, op, (weight.memory().cuda_address(), precision), (n, k, k), 128)?,
        pointers: [out.cuda_address(), 0, 0, 0],
        numbers: [m, columns, k.div_ceil(64), 8, 0, 0, 0, 0],
    };
    let tiles = m.div_ceil(PAIR) * columns.div_ceil(COLUMNS);
    job.launch(cuda, op, &SOURCE.typed("gated", precision), tiles, true)?;
    Ok(true)
}
