//! Layer normalisation on CUDA: one warp a row.

use tilewright_core::{DType, Result};

use super::{Backward, Forward, Recompute};
use crate::runtime::cuda::launch::{aligned, pack};
use crate::runtime::cuda::source::code;
use crate::runtime::cuda::{Arg, Cuda, Kernel, Source};
use crate::{Device, Tensor};

pub(crate) static SOURCE: Source = Source {
    name: "layernorm/layernorm.cu",
    text: include_str!("layernorm.cu"),
    parameters: &["TW_DTYPE", "TW_FLOATS"],
    variants: &[&[0, 0], &[1, 0], &[2, 0], &[1, 24], &[2, 24], &[0, 32], &[1, 32], &[2, 32], &[1, 64], &[2, 64]],
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

/// Warps of a block of the backward pass that keeps whole rows of up to 768 elements.
const WHOLE_WARPS: usize = 12;

/// Rows summed into one partial `dweight` and `dbias`: at least one or two a warp, and never more than 132 or 512 blocks of them. 132 is one for each
/// multiprocessor of the chip that this was tuned on; the number is the same on all, and so are the sums.
fn block_rows(n: usize, whole: bool) -> usize {
    if whole { n.div_ceil(132).max(WHOLE_WARPS) } else { n.div_ceil(512).max(2 * WARPS) }
}

/// f32 elements of the partial sums of `dweight`, `dbias` and `dx`.
pub(super) fn partial_elements(n: usize, c: usize) -> usize {
    n.div_ceil(block_rows(n, true)).max(n.div_ceil(block_rows(n, false))) * 3 * c
}

/// The variant that keeps a row in registers where it fits, else the general one.
fn kernel(entry: &'static str, dtype: DType, c: usize, tensors: &[&Tensor]) -> (Kernel, bool) {
    let whole = c > 0 && c.is_multiple_of(pack(dtype)) && aligned(tensors);
    let floats = match c {
        1..=768 if whole && dtype != DType::F32 => 24,
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

pub(super) fn backward(device: &Device, cuda: &Cuda, n: usize, c: usize, args: &Backward<'_>) -> Result<()> {
    const OP: &str = "layernorm.backward";
    let Backward { dout, sum, weight, mean, rstd, dx, accumulate_dx, dweight, dbias, accumulate_params, .. } = args;
    let mut tensors = vec![*dout, *sum, *weight, *dx];
    if let Some(again) = &args.again {
        tensors.push(again.out);
        tensors.extend(again.bias);
    }
    let (kernel, in_registers) = kernel("backward", dout.dtype(), c, &tensors);
    let whole = kernel.is(&[code(dout.dtype()), 24]);
    let (kernel, warps) =
        if whole { (SOURCE.kernel("backward_whole", &[code(dout.dtype()), 24]), WHOLE_WARPS) } else { (kernel, WARPS) };
    let rows = block_rows(n, whole);
    let blocks = n.div_ceil(rows);
    let parts = if whole && args.dx_sums.is_some() { 3 } else { 2 };
    let partial = args.workspace.reinterpret(0, DType::F32, &[partial_elements(n, c)])?;
    let inputs = [Arg::Tensor(dout), Arg::Tensor(sum), Arg::Tensor(weight)];
    let statistics = [Arg::Tensor(mean), Arg::Tensor(rstd), Arg::Tensor(dx), Arg::Int(i32::from(*accumulate_dx))];
    let sizes = [Arg::Long(n as i64), Arg::Int(c as i32), Arg::Int(rows as i32)];
    let list = if whole {
        let bias = Arg::Maybe(args.again.as_ref().and_then(|a| a.bias));
        let again = Arg::Maybe(args.again.as_ref().map(|a| a.out));
        [&inputs[..], &[bias], &statistics, &[again, Arg::Tensor(&partial), Arg::Int(parts)], &sizes].concat()
    } else {
        [&inputs[..], &statistics, &[Arg::Tensor(&partial)], &sizes].concat()
    };
    let shared = if in_registers { warps * c * size_of::<f32>() } else { 0 };
    cuda.launch(OP, &kernel, [blocks, 1, 1], 32 * warps, shared, &list)?;
    let finish = SOURCE.kernel("finish", &[code(dout.dtype()), 0]);
    let list = [
        Arg::Tensor(&partial),
        Arg::Int(blocks as i32),
        Arg::Int(parts),
        Arg::Tensor(dweight),
        Arg::Maybe(*dbias),
        Arg::Maybe(args.dx_sums),
        Arg::Int(i32::from(*accumulate_params)),
        Arg::Int(c as i32),
    ];
    cuda.launch(OP, &finish, [(parts as usize * c).div_ceil(32), 1, 1], 256, 0, &list)?;
    if whole { Ok(()) } else { super::behind(device, args) }
}
