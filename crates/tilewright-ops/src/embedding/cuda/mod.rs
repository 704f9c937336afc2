//! Token and position embedding on CUDA.

use tilewright_core::{Error, Result};

use super::{Backward, Forward};
use crate::runtime::cuda::launch::{aligned, pack};
use crate::runtime::cuda::source::FLOATS;
use crate::runtime::cuda::{Arg, Cuda, SCRATCH_BYTES, Source};

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

/// Elements of a tile of the sort, and values of a digit of a token.
const TILE: usize = 1024;
const DIGITS: usize = 256;
/// Rows of a chunk, unless the partial sums of so many chunks do not fit the scratch; the kernel's arrays hold `MOST_ROWS`.
const ROWS: usize = 32;
const MOST_ROWS: usize = 64;

/// 32-bit words of workspace for `n` positions: two orders and the counts of the sort.
pub(super) fn workspace_words(n: usize) -> usize {
    2 * n + DIGITS * n.div_ceil(TILE)
}

pub(super) fn backward(cuda: &Cuda, args: &Backward<'_>, c: usize) -> Result<()> {
    const OP: &str = "embedding.backward";
    let Backward { tokens, dout, vocab, dwte, dwpe, accumulate_dwpe, workspace } = *args;
    let (b, t) = (tokens.shape().dims()[0], tokens.shape().dims()[1]);
    let (n, longest) = (b * t, dwpe.shape().dims()[0]);
    let wide = aligned(&[dout, dwte, dwpe]) && c.is_multiple_of(pack(dout.dtype()));
    let columns = if wide { c / pack(dout.dtype()) } else { c };
    let kernel = |entry| SOURCE.typed(entry, dout.dtype());
    let list = [
        Arg::Tensor(dout),
        Arg::Tensor(dwpe),
        Arg::Int(i32::from(accumulate_dwpe)),
        Arg::Int(b as i32),
        Arg::Int(t as i32),
        Arg::Int(longest as i32),
        Arg::Int(c as i32),
    ];
    let positions = kernel(if wide { "positions_wide" } else { "positions_narrow" });
    cuda.launch(OP, &positions, [(longest * columns).div_ceil(256).min(1 << 16), 1, 1], 256, 0, &list)?;
    if n == 0 || c == 0 {
        return Ok(());
    }

    let tiles = n.div_ceil(TILE);
    let count = Arg::Long(n as i64);
    let words = |start: usize| Arg::Address(workspace.cuda_address() + (start * size_of::<i32>()) as u64);
    let (orders, histogram) = ([words(0), words(n)], words(2 * n));
    let (mut order, mut passes) = (Arg::Maybe(None), 0);
    // All ids lie below `vocab`: bytes above it are nought.
    while passes == 0 || (vocab.max(1) - 1) >> (8 * passes) > 0 {
        let (shift, sorted) = (Arg::Int(8 * passes), orders[passes as usize % 2]);
        let list = [Arg::Tensor(tokens), order, histogram, count, shift];
        cuda.launch(OP, &kernel("sort_count"), [tiles, 1, 1], TILE, 0, &list)?;
        cuda.launch(OP, &kernel("sort_scan"), [1, 1, 1], TILE, 0, &[histogram, Arg::Int((tiles * DIGITS) as i32)])?;
        let list = [Arg::Tensor(tokens), order, histogram, sorted, count, shift];
        cuda.launch(OP, &kernel("sort_place"), [tiles, 1, 1], TILE, 0, &list)?;
        (order, passes) = (sorted, passes + 1);
    }

    let fit = SCRATCH_BYTES / (2 * c * size_of::<f32>());
    let rows = n.div_ceil(fit.max(1)).max(ROWS);
    if rows > MOST_ROWS {
        let what = format!("{n} positions of {c} channels need more partial sums than the device's scratch holds");
        return Err(Error::Argument { op: OP, what: format!("{what}; use a smaller batch") });
    }
    let (chunks, partial) = (n.div_ceil(rows), Arg::Address(cuda.scratch()));
    let [rows, channels] = [rows, c].map(|x| Arg::Int(x as i32));
    let list = [Arg::Tensor(tokens), order, Arg::Tensor(dout), Arg::Tensor(dwte), partial, count, rows, channels];
    let sum = kernel(if wide { "chunks_wide" } else { "chunks_narrow" });
    cuda.launch(OP, &sum, [chunks, 1, 1], columns.next_multiple_of(32).min(256), 0, &list)?;
    let list = [Arg::Tensor(tokens), order, Arg::Tensor(dwte), partial, count, rows, channels];
    cuda.launch(OP, &kernel("finish"), [chunks, 1, 1], 256, 0, &list)
}
