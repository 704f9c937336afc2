//! The product with the derivative of GELU behind it on Hopper, by `hopper.cu`, with GELU made again and the bias gradient on the way. The library's own
//! forward product with GELU is faster than one of this kind was (0.28 ms for 0.37 at 32768 x 768 x 3072).

use tilewright_core::{DType, Result};

use super::{BackwardInput, finish_sums};
use crate::Tensor;
use crate::gelu::Gelu;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::tiles::{COLUMNS, Job, PAIR, TensorMap, tiles};
use crate::runtime::cuda::{Cuda, SCRATCH_BYTES, Source};

pub(crate) static SOURCE: Source = Source {
    name: "matmul/hopper.cu",
    text: tiles!("hopper.cu"),
    parameters: &["TW_TYPE"],
    variants: &[&[1], &[2]],
    exact: false,
};

/// Rows of a block's tile.
const ROWS: usize = PAIR / 2;
/// Below this the tiles are mostly empty, and the library has smaller ones.
const LEAST_ROWS: usize = 64;

/// Whether the kernel takes a product of `m` rows, `n` columns and `k` terms over these tensors: the chip, whole packs of 16 bytes, one 16-bit type.
fn suits(cuda: &Cuda, tensors: &[&Tensor], m: usize, n: usize, k: usize) -> bool {
    let dtype = tensors[0].dtype();
    cuda.info().capability.0 == 9
        && TensorMap::available()
        && m >= LEAST_ROWS
        && n > 0
        && k > 0
        && n.is_multiple_of(8)
        && k.is_multiple_of(8)
        && dtype != DType::F32
        && tensors.iter().all(|t| t.dtype() == dtype)
        && aligned(tensors)
}

fn address(t: Option<&Tensor>) -> u64 {
    t.map_or(0, Tensor::cuda_address)
}

/// `dx (m, k)`, a product over `n` terms. `false`: not for these arguments, and nothing was launched.
pub(super) fn backward_input(cuda: &Cuda, args: &BackwardInput<'_>, m: usize, n: usize, k: usize) -> Result<bool> {
    const OP: &str = "matmul.backward_input";
    let BackwardInput { dout, weight, gelu, dx, accumulate, activation, dx_sums } = *args;
    let Some((Gelu::Tanh, pre)) = gelu else { return Ok(false) };
    let mut tensors = vec![dout, weight, dx, pre];
    tensors.extend(activation);
    let parts = m.div_ceil(ROWS);
    if accumulate || !suits(cuda, &tensors, m, k, n) || parts * k * size_of::<f32>() > SCRATCH_BYTES {
        return Ok(false);
    }
    let map = |t: &Tensor, rows, columns, box_rows| {
        TensorMap::new(cuda, OP, (t.cuda_address(), t.dtype()), (rows, columns, columns), box_rows)
    };
    let partial = if dx_sums.is_some() { cuda.scratch() } else { 0 };
    let job = Job {
        a: map(dout, m, n, 128)?,
        b: map(weight, n, k, 64)?,
        pointers: [pre.cuda_address(), dx.cuda_address(), address(activation), partial],
        numbers: [m, k, n.div_ceil(64), 0, 0, 0, 0, 0],
    };
    let kernel = SOURCE.typed("backward_gelu", dout.dtype());
    job.launch(cuda, OP, &kernel, m.div_ceil(PAIR) * k.div_ceil(COLUMNS), false)?;
    if let Some((sums, accumulate)) = dx_sums {
        finish_sums(cuda, OP, parts, sums, accumulate, k)?;
    }
    Ok(true)
}
