//! Token and position embedding on CUDA.

use tilewright_core::Result;

use super::{Backward, Forward};
use crate::runtime::cuda::launch::{aligned, pack};
use crate::runtime::cuda::source::FLOATS;
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "embedding/embedding.cu",
    text: include_str!("embedding.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, c: usize) -> Result<()> {
    let Forward { tokens, wte, wpe, position, out, .. } = *args;
    let (n, t) = (tokens.numel(), tokens.shape().dims()[1]);
    let wide = aligned(&[wte, wpe, out]) && c.is_multiple_of(pack(out.dtype()));
    let steps = if wide { c / pack(out.dtype()) } else { c };
    let kernel = SOURCE.typed(if wide { "forward_wide" } else { "forward_narrow" }, out.dtype());
    let blocks = (n * steps).div_ceil(256).min(16 * cuda.info().multiprocessors as usize);
    let list = [
        Arg::Tensor(tokens),
        Arg::Tensor(wte),
        Arg::Tensor(wpe),
        Arg::Int(position as i32),
        Arg::Tensor(out),
        Arg::Long(n as i64),
        Arg::Int(t as i32),
        Arg::Int(c as i32),
    ];
    cuda.launch("embedding.forward", &kernel, [blocks, 1, 1], 256, 0, &list)
}

pub(super) fn backward(cuda: &Cuda, args: &Backward<'_>, c: usize) -> Result<()> {
    const OP: &str = "embedding.backward";
    let Backward { tokens, dout, dwte, dwpe, accumulate_dwpe, .. } = *args;
    let (b, t) = (tokens.shape().dims()[0], tokens.shape().dims()[1]);
    let longest = dwpe.shape().dims()[0];
    let positions = SOURCE.typed("positions", dout.dtype());
    let list = [
        Arg::Tensor(dout),
        Arg::Tensor(dwpe),
        Arg::Int(i32::from(accumulate_dwpe)),
        Arg::Int(b as i32),
        Arg::Int(t as i32),
        Arg::Int(longest as i32),
        Arg::Int(c as i32),
    ];
    cuda.launch(OP, &positions, [(longest * c).div_ceil(256).min(1 << 16), 1, 1], 256, 0, &list)?;
    if b * t == 0 || c == 0 {
        return Ok(());
    }
    let words = SOURCE.typed("words", dout.dtype());
    let list =
        [Arg::Tensor(tokens), Arg::Tensor(dout), Arg::Tensor(dwte), Arg::Long((b * t) as i64), Arg::Int(c as i32)];
    // More blocks share the frequent ids better, and each reads all tokens once.
    cuda.launch(OP, &words, [8 * cuda.info().multiprocessors as usize, 1, 1], 512, 0, &list)
}
