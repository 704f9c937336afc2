//! Encoder attention on CUDA: by the matrix units where storage and head size allow, by a general kernel for the rest. Blocks find their rows on the device,
//! so a recorded launch serves any rows of as many tokens, and of no longer ones than was promised.

use tilewright_core::{DType, Result};

use super::{Forward, Rotation};
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::{FLOATS, code};
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static GENERAL: Source = Source {
    name: "encoder_attention/general.cu",
    text: concat!(include_str!("rows.cuh"), include_str!("general.cu")),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

pub(crate) static MMA: Source = Source {
    name: "encoder_attention/mma.cu",
    text: concat!(include_str!("rows.cuh"), include_str!("mma.cu")),
    parameters: &["TW_DTYPE", "TW_HEAD"],
    variants: &[&[1, 64], &[2, 64]],
    exact: false,
};

pub(crate) static HOPPER: Source = Source {
    name: "encoder_attention/hopper.cu",
    text: concat!(
        include_str!("rows.cuh"),
        include_str!("hopper.cu"),
        include_str!("../../runtime/cuda/barriers.cuh"),
        include_str!("long_rows.cu")
    ),
    parameters: &["TW_DTYPE", "TW_HEAD"],
    variants: &[&[1, 64], &[2, 64]],
    exact: false,
};

/// Queries a row, on average, from which Hopper's own kernel with its larger tiles is the faster one.
const LONG: usize = 512;

/// Tokens of a row that one block takes as a whole, and turns on the way.
const SHORT: usize = 128;

/// Whether the matrix units take the call.
fn suits_matrix_units(args: &Forward<'_>, head: usize) -> bool {
    let Forward { q, kv, key_column, heads, out, .. } = *args;
    let (q_width, kv_width) = (q.shape().as_matrix().1, kv.shape().as_matrix().1);
    let keys = kv.cuda_address() + (key_column * q.dtype().size()) as u64;
    let whole = [q_width, kv_width, heads * head].iter().all(|w| w.is_multiple_of(8));
    q.dtype() != DType::F32 && head == 64 && whole && keys.is_multiple_of(16) && aligned(&[q, out])
}

/// Whether queries and keys are turned by the kernel itself.
pub(super) fn turns(args: &Forward<'_>, head: usize) -> bool {
    let tables = args.rotation.is_none_or(|rotation| aligned(&[rotation.table]));
    suits_matrix_units(args, head) && args.longest.is_some_and(|longest| longest <= SHORT) && tables
}

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, m: usize, head: usize) -> Result<()> {
    const OP: &str = "encoder_attention.forward";
    let Forward { q, kv, key_column, heads, row_starts, selected, window, positions, option_ids, out, .. } = *args;
    let (q_width, kv_width) = (q.shape().as_matrix().1, kv.shape().as_matrix().1);
    let (dtype, rows) = (q.dtype(), row_starts.numel() - 1);
    let keys = kv.cuda_address() + (key_column * dtype.size()) as u64;
    let mut list = vec![
        Arg::Tensor(q),
        Arg::Long(q_width as i64),
        Arg::Address(keys),
        Arg::Long(kv_width as i64),
        Arg::Tensor(row_starts),
        Arg::Tensor(selected.as_ref().map_or(row_starts, |s| s.starts)),
        Arg::Maybe(selected.as_ref().map(|s| s.tokens)),
        Arg::Maybe(positions),
        Arg::Maybe(option_ids),
        Arg::Int(rows as i32),
        // No two positions are farther apart than 2^32.
        Arg::Long(window.map_or(-1, |w| w.min(1 << 33) as i64)),
        Arg::Tensor(out),
        Arg::Int(heads as i32),
        Arg::Int(head as i32),
        Arg::Float((1.0 / (head as f64).sqrt()) as f32),
    ];
    if turns(args, head) {
        let rotation = args.rotation.as_ref();
        list.extend([
            Arg::Maybe(rotation.map(|r| r.table)),
            Arg::Maybe(rotation.map(|r| r.positions)),
            Arg::Maybe(
                rotation.map(|Rotation { positions, query_positions, .. }| query_positions.unwrap_or(positions)),
            ),
        ]);
        let hopper = cuda.info().capability.0 == 9;
        let kernel = if hopper { &HOPPER } else { &MMA }.kernel("short_rows", &[code(dtype), 64]);
        let shares = if hopper && selected.is_some() { m.div_ceil(SHORT) } else { 1 };
        return cuda.launch_early(OP, &kernel, [rows, heads, shares], 256, 3 * SHORT * head * 2 + 1024, &list);
    }
    let matrix_units = suits_matrix_units(args, head);
    // Its large tiles pay where every key is seen.
    let all = window.is_none() && option_ids.is_none();
    let long = || cuda.info().capability.0 == 9 && m >= HOPPER.number("forward_least", LONG) * rows;
    let (kernel, tile, threads, shared) = if matrix_units && all && long() {
        let [queries, threads] = [("forward_queries", 128), ("forward_threads", 384)].map(|(n, v)| HOPPER.number(n, v));
        // The queries, and a ring of five tiles of 128 keys and values.
        let shared = HOPPER.number("forward_shared", (128 + 5 * 2 * 128) * head * 2 + 1024);
        (HOPPER.kernel("forward", &[code(dtype), 64]), queries, threads, shared)
    } else if matrix_units {
        (MMA.kernel("forward", &[code(dtype), 64]), 64, 128, 4 * 64 * head * 2)
    } else {
        (GENERAL.typed("forward", dtype), 16, 256, (16 * head + 2 * 32 * (head + 1)) * size_of::<f32>())
    };
    // Each row ends with a tile of its own, whatever its length; blocks behind the last tile have nothing to do.
    let tiles = (m + rows * (tile - 1)) / tile;
    cuda.launch(OP, &kernel, [tiles.min(m), heads, 1], threads, shared, &list)
}
