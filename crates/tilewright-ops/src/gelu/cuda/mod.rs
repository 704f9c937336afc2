//! GELU on CUDA: bound by memory, packs of 16 bytes.

use tilewright_core::Result;

use super::{Backward, Forward, Gelu};
use crate::Tensor;
use crate::runtime::cuda::launch::{aligned, pack};
use crate::runtime::cuda::source::FLOATS;
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "gelu/gelu.cu",
    text: include_str!("gelu.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

/// How kernels know the kind.
pub(crate) fn code(kind: Gelu) -> i32 {
    match kind {
        Gelu::Tanh => 0,
        Gelu::Erf => 1,
    }
}

/// Whether packs can be used, and the blocks for `n` elements: enough to fill the chip, each thread with a few packs.
fn shape(cuda: &Cuda, tensors: &[&Tensor]) -> (bool, usize) {
    let wide = aligned(tensors);
    let per_thread = if wide { pack(tensors[0].dtype()) } else { 1 };
    let blocks = tensors[0].numel().div_ceil(256 * per_thread);
    (wide, blocks.min(16 * cuda.info().multiprocessors as usize))
}

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>) -> Result<()> {
    let Forward { kind, x, out } = *args;
    let (wide, blocks) = shape(cuda, &[x, out]);
    let kernel = SOURCE.typed(if wide { "forward_wide" } else { "forward_narrow" }, x.dtype());
    let args = [Arg::Tensor(x), Arg::Tensor(out), Arg::Long(x.numel() as i64), Arg::Int(code(kind))];
    cuda.launch("gelu.forward", &kernel, [blocks, 1, 1], 256, 0, &args)
}

pub(super) fn backward(cuda: &Cuda, args: &Backward<'_>) -> Result<()> {
    let Backward { kind, x, dout, dx } = *args;
    let (wide, blocks) = shape(cuda, &[x, dout, dx]);
    let kernel = SOURCE.typed(if wide { "backward_wide" } else { "backward_narrow" }, x.dtype());
    let n = Arg::Long(x.numel() as i64);
    let args = [Arg::Tensor(x), Arg::Tensor(dout), Arg::Tensor(dx), n, Arg::Int(code(kind))];
    cuda.launch("gelu.backward", &kernel, [blocks, 1, 1], 256, 0, &args)
}
