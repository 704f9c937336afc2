//! Flash attention on CUDA: by the matrix units where storage and head size allow, by a general kernel for the rest.

use tilewright_core::{DType, Result};

use super::cpu::{DecodeTensors, Sizes};
use super::{Backward, Forward};
use crate::Tensor;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::{FLOATS, code};
use crate::runtime::cuda::{Arg, Cuda, Kernel, Source};

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

/// Whether the matrix units take it: 16-bit storage, a head size that they have a variant for, rows on 16 bytes.
fn by_matrix_units(s: Sizes, tensors: &[&Tensor]) -> bool {
    tensors[0].dtype() != DType::F32 && matches!(s.head, 64 | 128) && aligned(tensors)
}

/// A kernel, the rows of its block and its threads: Hopper's own where there is one.
fn matrix_kernel(cuda: &Cuda, entry: &'static str, s: Sizes, dtype: DType) -> (Kernel, usize, usize) {
    let values = [code(dtype), s.head as i64];
    if cuda.info().capability.0 == 9 && s.head == 64 {
        return (HOPPER.kernel(entry, &values), MMA_TILE, 128);
    }
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
        let (kernel, rows, threads) = matrix_kernel(cuda, "forward", s, qkv.dtype());
        let grid = [s.t.div_ceil(rows), s.heads, s.b];
        // Four tiles, and on Hopper the block's own queries behind them.
        return cuda.launch("attention.forward", &kernel, grid, threads, 5 * MMA_TILE * s.head * 2, &list);
    }
    let kernel = GENERAL.typed("forward", qkv.dtype());
    let shared = (ROWS * s.head + 2 * KEYS * (s.head + 1)) * size_of::<f32>();
    let [b, heads, t, d] = sizes(s);
    let list = [Arg::Tensor(qkv), Arg::Tensor(out), Arg::Tensor(lse), b, heads, t, d, scale(s.head)];
    cuda.launch("attention.forward", &kernel, [s.t.div_ceil(ROWS), s.heads, s.b], 32 * WARPS, shared, &list)
}

pub(super) fn backward(cuda: &Cuda, s: Sizes, args: &Backward<'_>, delta: &Tensor) -> Result<()> {
    const OP: &str = "attention.backward";
    let Backward { qkv, out, lse, dout, dqkv, .. } = *args;
    debug_assert_eq!(delta.dtype(), DType::F32);
    let [b, heads, t, d] = sizes(s);
    let list = [Arg::Tensor(out), Arg::Tensor(dout), Arg::Tensor(delta), b, heads, t, d];
    let rows = s.b * s.heads * s.t;
    cuda.launch(OP, &GENERAL.typed("products", qkv.dtype()), [rows.div_ceil(WARPS), 1, 1], 32 * WARPS, 0, &list)?;
    if by_matrix_units(s, &[qkv, dout, dqkv]) {
        let list = [
            Arg::Tensor(qkv),
            Arg::Tensor(lse),
            Arg::Tensor(dout),
            Arg::Tensor(delta),
            Arg::Tensor(dqkv),
            b,
            heads,
            t,
            scale(s.head),
        ];
        // Four tiles, and behind them the block's own rows where they do not stay in registers.
        let shared = 6 * MMA_TILE * s.head * 2;
        for entry in ["backward_keys", "backward_queries"] {
            let (kernel, rows, threads) = matrix_kernel(cuda, entry, s, qkv.dtype());
            cuda.launch(OP, &kernel, [s.t.div_ceil(rows), s.heads, s.b], threads, shared, &list)?;
        }
        return Ok(());
    }
    let shared = (2 * ROWS * s.head + 2 * KEYS * (s.head + 1)) * size_of::<f32>();
    let grid = [s.t.div_ceil(ROWS), s.heads, s.b];
    let list = [
        Arg::Tensor(qkv),
        Arg::Tensor(lse),
        Arg::Tensor(dout),
        Arg::Tensor(delta),
        Arg::Tensor(dqkv),
        b,
        heads,
        t,
        d,
        scale(s.head),
    ];
    cuda.launch(OP, &GENERAL.typed("backward_queries", qkv.dtype()), grid, 32 * WARPS, shared, &list)?;
    cuda.launch(OP, &GENERAL.typed("backward_keys", qkv.dtype()), grid, 32 * WARPS, shared, &list)
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
