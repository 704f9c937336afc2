//! Flash attention on CUDA: by the matrix units where storage and head size allow, by a general kernel for the rest.

use tilewright_core::{DType, Result};

use super::cpu::{DecodeTensors, Sizes};
use super::{Backward, Forward};
use crate::matmul::cuda::finish_sums;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::{FLOATS, code};
use crate::runtime::cuda::{Arg, Cuda, Kernel, SCRATCH_BYTES, Source};
use crate::{Device, Tensor};

pub(crate) static GENERAL: Source = Source {
    name: "attention/general.cu",
    text: include_str!("general.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

pub(crate) static MMA: Source = Source {
    name: "attention/mma.cu",
    text: include_str!("mma.cu"),
    parameters: &["TW_DTYPE", "TW_HEAD"],
    variants: &[&[1, 64], &[2, 64], &[1, 128], &[2, 128]],
    exact: false,
};

pub(crate) static HOPPER: Source = Source {
    name: "attention/hopper.cu",
    text: include_str!("hopper.cu"),
    parameters: &["TW_DTYPE", "TW_HEAD"],
    variants: &[&[1, 64], &[2, 64]],
    exact: false,
};

/// Queries of a block of the forward, and rows of a tile, of the kernels on the matrix units.
const MMA_ROWS: usize = 128;
const MMA_TILE: usize = 64;

/// A tile of Hopper's kernels: 64 rows of 64 elements.
const TILE_BYTES: usize = 64 * 64 * 2;

/// Whether the matrix units take it: 16-bit storage, a head size that they have a variant for, rows on 16 bytes.
fn by_matrix_units(s: Sizes, tensors: &[&Tensor]) -> bool {
    tensors[0].dtype() != DType::F32 && matches!(s.head, 64 | 128) && aligned(tensors)
}

/// Whether it is Hopper's own kernels that take it.
fn by_hopper(cuda: &Cuda, s: Sizes) -> bool {
    cuda.info().capability.0 == 9 && s.head == 64
}

/// Heads whose keys and values lie in the second-level cache together (48 of 1024 tokens: 12 MB; with 96 the backward pass took 4 % longer).
fn heads_together(s: Sizes) -> Arg<'static> {
    Arg::Int((48 * 1024 / s.t.max(1)).clamp(1, 1024) as i32)
}

/// A kernel, the rows of its block and its threads.
fn matrix_kernel(entry: &'static str, s: Sizes, dtype: DType) -> (Kernel, usize, usize) {
    let values = [code(dtype), s.head as i64];
    let (rows, threads) = match (entry, s.head) {
        ("forward", 64) => (MMA_ROWS, 128),
        ("forward", _) => (MMA_ROWS, 256),
        _ => (MMA_TILE, 128),
    };
    (MMA.kernel(entry, &values), rows, threads)
}

/// Warps of a block, rows of a block, keys of a tile of the general kernels.
const WARPS: usize = 8;
const ROWS: usize = 16;
const KEYS: usize = 32;

/// f32 elements of workspace: the row products of the backward.
pub(super) fn workspace_floats(s: Sizes) -> usize {
    s.b * s.heads * s.t
}

fn sizes(s: Sizes) -> [Arg<'static>; 4] {
    [s.b, s.heads, s.t, s.head].map(|n| Arg::Int(n as i32))
}

fn scale(head: usize) -> Arg<'static> {
    Arg::Float((1.0 / (head as f64).sqrt()) as f32)
}

pub(super) fn forward(cuda: &Cuda, s: Sizes, args: &Forward<'_>) -> Result<()> {
    let Forward { qkv, out, lse, .. } = *args;
    if by_matrix_units(s, &[qkv, out]) {
        let [b, heads, t, _] = sizes(s);
        let list = [Arg::Tensor(qkv), Arg::Tensor(out), Arg::Tensor(lse), b, heads, t, scale(s.head)];
        if by_hopper(cuda, s) {
            let kernel = HOPPER.kernel("forward", &[code(qkv.dtype()), s.head as i64]);
            let blocks = s.t.div_ceil(MMA_TILE) * s.heads * s.b;
            // Four tiles, and the block's own queries behind them.
            let list = [&list[..], &[heads_together(s)]].concat();
            return cuda.launch("attention.forward", &kernel, [blocks, 1, 1], 128, 5 * TILE_BYTES, &list);
        }
        let (kernel, rows, threads) = matrix_kernel("forward", s, qkv.dtype());
        let grid = [s.t.div_ceil(rows), s.heads, s.b];
        return cuda.launch("attention.forward", &kernel, grid, threads, 4 * MMA_TILE * s.head * 2, &list);
    }
    let kernel = GENERAL.typed("forward", qkv.dtype());
    let shared = (ROWS * s.head + 2 * KEYS * (s.head + 1)) * size_of::<f32>();
    let [b, heads, t, d] = sizes(s);
    let list = [Arg::Tensor(qkv), Arg::Tensor(out), Arg::Tensor(lse), b, heads, t, d, scale(s.head)];
    cuda.launch("attention.forward", &kernel, [s.t.div_ceil(ROWS), s.heads, s.b], 32 * WARPS, shared, &list)
}

pub(super) fn backward(device: &Device, cuda: &Cuda, s: Sizes, args: &Backward<'_>, delta: &Tensor) -> Result<()> {
    const OP: &str = "attention.backward";
    let Backward { qkv, out, lse, dout, dqkv, dqkv_sums, .. } = *args;
    debug_assert_eq!(delta.dtype(), DType::F32);
    let [b, heads, t, d] = sizes(s);
    let list = [Arg::Tensor(out), Arg::Tensor(dout), Arg::Tensor(delta), b, heads, t, d];
    let rows = s.b * s.heads * s.t;
    let tensors = [qkv, lse, dout, delta, dqkv].map(Arg::Tensor);
    if by_matrix_units(s, &[qkv, out, dout, dqkv]) && by_hopper(cuda, s) {
        // Eight lanes a row.
        let kernel = HOPPER.kernel("row_products", &[code(qkv.dtype()), s.head as i64]);
        cuda.launch(OP, &kernel, [rows.div_ceil(32), 1, 1], 256, 0, &list[..6])?;
        let (blocks, width) = (s.t.div_ceil(MMA_TILE), 3 * s.heads * s.head);
        let fits = s.b * blocks * width * size_of::<f32>() <= SCRATCH_BYTES;
        let sums = dqkv_sums.filter(|_| fits);
        let partial = [Arg::Address(if sums.is_some() { cuda.scratch() } else { 0 })];
        let list = [&tensors[..], &partial, &[b, heads, t, scale(s.head), heads_together(s)]].concat();
        let kernel = HOPPER.kernel("backward", &[code(qkv.dtype()), s.head as i64]);
        // Four tiles, and the block's own rows of two tensors behind them.
        cuda.launch(OP, &kernel, [2 * blocks * s.heads * s.b, 1, 1], 128, 6 * TILE_BYTES, &list)?;
        return match sums {
            Some((sums, accumulate)) => finish_sums(cuda, OP, s.b * blocks, sums, accumulate, width),
            None => super::sums_behind(device, args),
        };
    }
    cuda.launch(OP, &GENERAL.typed("products", qkv.dtype()), [rows.div_ceil(WARPS), 1, 1], 32 * WARPS, 0, &list)?;
    if by_matrix_units(s, &[qkv, dout, dqkv]) {
        let list = [&tensors[..], &[b, heads, t, scale(s.head)]].concat();
        // Four tiles, and behind them the block's own rows where they do not stay in registers.
        let shared = 6 * MMA_TILE * s.head * 2;
        for entry in ["backward_keys", "backward_queries"] {
            let (kernel, rows, threads) = matrix_kernel(entry, s, qkv.dtype());
            cuda.launch(OP, &kernel, [s.t.div_ceil(rows), s.heads, s.b], threads, shared, &list)?;
        }
        return super::sums_behind(device, args);
    }
    let shared = (2 * ROWS * s.head + 2 * KEYS * (s.head + 1)) * size_of::<f32>();
    let grid = [s.t.div_ceil(ROWS), s.heads, s.b];
    let list = [&tensors[..], &[b, heads, t, d, scale(s.head)]].concat();
    cuda.launch(OP, &GENERAL.typed("backward_queries", qkv.dtype()), grid, 32 * WARPS, shared, &list)?;
    cuda.launch(OP, &GENERAL.typed("backward_keys", qkv.dtype()), grid, 32 * WARPS, shared, &list)?;
    super::sums_behind(device, args)
}

pub(super) fn decode(cuda: &Cuda, b: usize, longest: usize, args: &DecodeTensors<'_>) -> Result<()> {
    let DecodeTensors { heads, head, position, qkv, k_cache, v_cache, out } = *args;
    let list = [
        Arg::Tensor(qkv),
        Arg::Tensor(k_cache),
        Arg::Tensor(v_cache),
        Arg::Tensor(out),
        Arg::Int(heads as i32),
        Arg::Int(head as i32),
        Arg::Int(position as i32),
        Arg::Int(longest as i32),
        scale(head),
    ];
    cuda.launch("attention.decode", &GENERAL.typed("decode", qkv.dtype()), [heads, b, 1], 32 * WARPS, 0, &list)
}
