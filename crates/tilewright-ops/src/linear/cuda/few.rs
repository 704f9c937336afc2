//! Layers of at most 64 rows on Hopper by one launch (`few.cu`), with the normalisation of their input where that comes first.

use tilewright_core::{DType, Result};

use super::super::{Activation, Forward};
use super::activation_code;
use crate::layernorm;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::code;
use crate::runtime::cuda::{Arg, Cuda, Moments, Source};

pub(crate) static SOURCE: Source = Source {
    name: "linear/few.cu",
    text: include_str!("few.cu"),
    parameters: &["TW_DTYPE"],
    variants: &[&[1], &[2]],
    exact: false,
};

/// Rows of the one tile.
const ROWS: usize = 64;
/// Blocks of a cluster, which share K.
const RANKS: usize = 4;
/// Terms of a step.
const STEP: usize = 64;
/// The largest K of a normalised input: a quarter of it is 256 columns.
const WIDEST_NORM: usize = 1024;
/// Parts of a row that a normalisation takes moments of, at most.
const PARTS: usize = 32;
/// A block asks for so much memory that a multiprocessor takes one: of an early launch two would share one while others have none.
const ALONE: usize = 116 << 10;

/// Kernels by 32 rows of the weight in a tile.
type Entries = &'static [(usize, &'static str)];
const PLAIN: Entries = &[(1, "plain_1"), (2, "plain_2"), (3, "plain_3"), (4, "plain_4"), (6, "plain_6")];
const NORMED: Entries = &[(1, "normed_1"), (2, "normed_2"), (3, "normed_3"), (4, "normed_4"), (6, "normed_6")];
const GATED: Entries = &[(2, "gated_2"), (4, "gated_4"), (6, "gated_6")];

/// Bytes of shared memory: a quarter of the rows of `x` and of a tile of the weight, in whose place sums come, and room to align them.
fn shared(k: usize, chunks: usize) -> usize {
    let columns = 32 * chunks;
    let sums = if chunks <= 2 { 2 } else { 1 } * ROWS * (columns + 8) * 4;
    let operands = (k / STEP).div_ceil(RANKS) * STEP * 2 * (ROWS + columns);
    operands.max(sums).max(ALONE) + 1024
}

/// The narrowest tiles that leave each cluster one, as far as memory allows. Clusters lie within parts of the chip, so an eighth of them never finds room.
fn choose(
    cuda: &Cuda,
    entries: Entries,
    tiles: impl Fn(usize) -> usize,
    bytes: impl Fn(usize) -> usize,
) -> Option<(usize, &'static str)> {
    let fit = || entries.iter().take_while(|(chunks, _)| bytes(*chunks) <= cuda.info().shared_bytes);
    let clusters = cuda.info().multiprocessors as usize / RANKS * 7 / 8;
    fit().find(|(chunks, _)| tiles(*chunks) <= clusters).or_else(|| fit().last()).copied()
}

/// Runs the layer, normalised by `norm` first, and brings what is read `soon` into the second-level cache; `false`: this kernel does not take it, and nothing was launched.
pub(super) fn forward(
    cuda: &Cuda,
    op: &'static str,
    args: &Forward<'_>,
    norm: Option<&layernorm::Forward<'_>>,
    m: usize,
    soon: (u64, usize),
) -> Result<bool> {
    let Forward { weight, bias, activation, residual, out, .. } = *args;
    let (n, k) = weight.shape();
    let (precision, gated) = (weight.dtype(), activation == Activation::Geglu);
    let columns = if gated { n / 2 } else { n };
    let x = norm.map_or(args.x, |norm| norm.x);
    // A stream in f32 is rounded where it would be normalised.
    let stream = norm.is_some() || x.dtype() != precision;
    let entries = match (stream, gated) {
        (false, false) => PLAIN,
        (true, false) => NORMED,
        (true, true) => GATED,
        (false, true) => return Ok(false),
    };
    let types = if stream {
        norm.is_none_or(|norm| norm.residual.is_none() && norm.out.dtype() == precision)
            && x.dtype() == DType::F32
            && (4 * STEP..=WIDEST_NORM).contains(&k)
    } else {
        x.dtype() == precision
    };
    let mut tensors = vec![x, weight.memory(), out];
    tensors.extend(bias.into_iter().chain(residual));
    tensors.extend(norm.into_iter().flat_map(|norm| [Some(norm.weight), norm.bias]).flatten());
    let suits = cuda.info().capability.0 == 9
        && (1..=ROWS).contains(&m)
        && precision != DType::F32
        && (out.dtype() == precision || out.dtype() == DType::F32)
        && k > 0
        && k.is_multiple_of(STEP)
        && columns.is_multiple_of(8)
        && types
        && aligned(&tensors);
    let tiles = |chunks: usize| columns.div_ceil(if gated { 16 * chunks } else { 32 * chunks });
    let bytes = |chunks: usize| shared(k, chunks);
    let Some((chunks, entry)) = choose(cuda, entries, tiles, bytes).filter(|_| suits) else { return Ok(false) };
    // The rows of a stream that a layer has added to are normalised next.
    let makes = !stream
        && residual.is_some()
        && out.dtype() == DType::F32
        && [1, 2, 4].contains(&chunks)
        && tiles(chunks) <= PARTS;
    let given = norm.and_then(|norm| cuda.moments(norm.x.cuda_address(), m, k));
    let list = [
        Arg::Tensor(x),
        Arg::Maybe(norm.map(|norm| norm.weight)),
        Arg::Maybe(norm.and_then(|norm| norm.bias)),
        Arg::Float(norm.map_or(0.0, |norm| norm.eps)),
        Arg::Tensor(weight.memory()),
        Arg::Maybe(bias),
        Arg::Int(activation_code(activation)),
        Arg::Maybe(residual),
        Arg::Tensor(out),
        Arg::Int(code(out.dtype()) as i32),
        Arg::Int(m as i32),
        Arg::Int(k as i32),
        Arg::Int(columns as i32),
        Arg::Address(soon.0),
        Arg::Long((soon.1 / 16 * 16) as i64),
        Arg::Address(if makes { cuda.sums() } else { 0 }),
        Arg::Address(given.map_or(0, |_| cuda.sums())),
        Arg::Int(given.map_or(0, |given| given.parts as i32)),
        Arg::Int(given.map_or(0, |given| given.width as i32)),
    ];
    let grid = [RANKS * tiles(chunks), 1, 1];
    let threads = if stream { 512 } else { 256 };
    cuda.launch_early(op, &SOURCE.typed(entry, precision), grid, threads, bytes(chunks), &list)?;
    if makes {
        let x = out.cuda_address();
        cuda.keep_moments(Moments { x, rows: m, columns, parts: tiles(chunks), width: 32 * chunks, launches: 0 });
    }
    Ok(true)
}
