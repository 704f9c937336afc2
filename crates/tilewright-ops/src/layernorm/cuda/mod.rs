//! Layer normalisation on CUDA: one warp a row.

use tilewright_core::{DType, Result};

use super::{Backward, Forward, Recompute};
use crate::Tensor;
use crate::runtime::cuda::launch::{aligned, pack};
use crate::runtime::cuda::source::code;
use crate::runtime::cuda::{Arg, Cuda, Kernel, Source};

pub(crate) static SOURCE: Source = Source {
    name: "layernorm/layernorm.cu",
    text: include_str!("layernorm.cu"),
    parameters: &["TW_DTYPE", "TW_FLOATS"],
    variants: &[&[0, 0], &[1, 0], &[2, 0], &[0, 32], &[1, 32], &[2, 32], &[1, 64], &[2, 64]],
    exact: false,
};

/// A stream in f32 between branches in 16 bits.
pub(crate) static MIXED: Source = Source {
    name: "layernorm/mixed.cu",
    text: include_str!("mixed.cu"),
    parameters: &["TW_DTYPE", "TW_FLOATS"],
    variants: &[&[1, 24], &[2, 24], &[1, 32], &[2, 32], &[1, 64], &[2, 64]],
    exact: false,
};

/// Warps, and so rows at a time, of a block.
const WARPS: usize = 8;

/// Rows summed into one partial `dweight` and `dbias`: at least two a warp, and never more than 512 blocks of them.
pub(super) fn block_rows(n: usize) -> usize {
    n.div_ceil(512).max(2 * WARPS)
}

/// f32 elements of the partial sums.
pub(super) fn partial_elements(n: usize, c: usize) -> usize {
    n.div_ceil(block_rows(n)) * 2 * c
}

/// The variant that keeps a row in registers where it fits, else the general one.
fn kernel(entry: &'static str, dtype: DType, c: usize, tensors: &[&Tensor]) -> (Kernel, bool) {
    let whole = c > 0 && c.is_multiple_of(pack(dtype)) && aligned(tensors);
    let floats = match c {
        1..=1024 if whole => 32,
        // In f32 the backward's sums would not fit the registers.
        1025..=2048 if whole && dtype != DType::F32 => 64,
        _ => 0,
    };
    (SOURCE.kernel(entry, &[code(dtype), floats]), floats > 0)
}

pub(super) fn forward(cuda: &Cuda, n: usize, c: usize, args: &Forward<'_>) -> Result<()> {
    let Forward { x, residual, weight, bias, eps, out, mean, rstd } = args;
    let (branch, sum) = (residual.as_ref().map(|r| r.branch), residual.as_ref().map(|r| r.sum));
    let mut tensors = vec![*x, *weight, *out];
    tensors.extend([branch, sum, *bias].into_iter().flatten());
    let mixed = x.dtype() != out.dtype();
    let whole = c.is_multiple_of(4) && c <= 2048 && aligned(&tensors);
    let floats = if c <= 768 { 24 } else { 32 << u32::from(c > 1024) };
    let kernel = match (mixed, whole) {
        (true, true) => MIXED.kernel("forward", &[code(out.dtype()), floats]),
        (true, false) => MIXED.kernel("forward_any", &[code(out.dtype()), 32]),
        (false, _) => kernel("forward", x.dtype(), c, &tensors).0,
    };
    let args = [
        Arg::Tensor(x),
        Arg::Maybe(branch),
        Arg::Maybe(sum),
        Arg::Tensor(weight),
        Arg::Maybe(*bias),
        Arg::Float(*eps),
        Arg::Tensor(out),
        Arg::Tensor(mean),
        Arg::Tensor(rstd),
        Arg::Long(n as i64),
        Arg::Int(c as i32),
    ];
    let grid = [n.div_ceil(WARPS), 1, 1];
    if mixed {
        return cuda.launch_early("layernorm.forward", &kernel, grid, 32 * WARPS, 0, &args);
    }
    cuda.launch("layernorm.forward", &kernel, grid, 32 * WARPS, 0, &args)
}

pub(super) fn recompute(cuda: &Cuda, n: usize, c: usize, args: &Recompute<'_>) -> Result<()> {
    let Recompute { sum, weight, bias, mean, rstd, out } = args;
    let mut tensors = vec![*sum, *weight, *out];
    tensors.extend(*bias);
    let (kernel, _) = kernel("recompute", sum.dtype(), c, &tensors);
    let args = [
        Arg::Tensor(sum),
        Arg::Tensor(weight),
        Arg::Maybe(*bias),
        Arg::Tensor(mean),
        Arg::Tensor(rstd),
        Arg::Tensor(out),
        Arg::Long(n as i64),
        Arg::Int(c as i32),
    ];
    cuda.launch("layernorm.recompute", &kernel, [n.div_ceil(WARPS), 1, 1], 32 * WARPS, 0, &args)
}

pub(super) fn backward(cuda: &Cuda, n: usize, c: usize, args: &Backward<'_>) -> Result<()> {
    const OP: &str = "layernorm.backward";
    let Backward { dout, sum, weight, mean, rstd, dx, accumulate_dx, dweight, dbias, accumulate_params, workspace } =
        args;
    let (kernel, whole) = kernel("backward", dout.dtype(), c, &[dout, sum, weight, dx]);
    let rows = block_rows(n);
    let blocks = n.div_ceil(rows);
    let partial = workspace.reinterpret(0, DType::F32, &[partial_elements(n, c)])?;
    let list = [
        Arg::Tensor(dout),
        Arg::Tensor(sum),
        Arg::Tensor(weight),
        Arg::Tensor(mean),
        Arg::Tensor(rstd),
        Arg::Tensor(dx),
        Arg::Int(i32::from(*accumulate_dx)),
        Arg::Tensor(&partial),
        Arg::Long(n as i64),
        Arg::Int(c as i32),
        Arg::Int(rows as i32),
    ];
    let shared = if whole { WARPS * c * size_of::<f32>() } else { 0 };
    cuda.launch(OP, &kernel, [blocks, 1, 1], 32 * WARPS, shared, &list)?;
    let finish = SOURCE.kernel("finish", &[code(dout.dtype()), 0]);
    let list = [
        Arg::Tensor(&partial),
        Arg::Int(blocks as i32),
        Arg::Tensor(dweight),
        Arg::Maybe(*dbias),
        Arg::Int(i32::from(*accumulate_params)),
        Arg::Int(c as i32),
    ];
    cuda.launch(OP, &finish, [(2 * c).div_ceil(32), 1, 1], 256, 0, &list)
}
