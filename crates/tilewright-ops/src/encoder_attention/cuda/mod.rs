//! Encoder attention on CUDA: by the matrix units where storage and head size allow, by a general kernel for the rest. Blocks find their rows on the device,
//! so a recorded launch serves any rows of as many tokens.

use tilewright_core::{DType, Result};

use super::Forward;
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

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, m: usize, head: usize) -> Result<()> {
    let Forward { q, kv, key_column, heads, row_starts, selected, window, positions, option_ids, out, .. } = *args;
    let (q_width, kv_width) = (q.shape().as_matrix().1, kv.shape().as_matrix().1);
    let (dtype, rows) = (q.dtype(), row_starts.numel() - 1);
    let keys = kv.cuda_address() + (key_column * dtype.size()) as u64;
    let whole = [q_width, kv_width, heads * head].iter().all(|w| w.is_multiple_of(8));
    let matrix_units = dtype != DType::F32 && head == 64 && whole && keys.is_multiple_of(16) && aligned(&[q, out]);
    let (kernel, tile, threads, shared) = if matrix_units {
        (MMA.kernel("forward", &[code(dtype), 64]), 64, 128, 4 * 64 * head * 2)
    } else {
        (GENERAL.typed("forward", dtype), 16, 256, (16 * head + 2 * 32 * (head + 1)) * size_of::<f32>())
    };
    let list = [
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
    // Each row ends with a tile of its own, whatever its length; blocks behind the last tile have nothing to do.
    let tiles = (m + rows * (tile - 1)) / tile;
    cuda.launch("encoder_attention.forward", &kernel, [tiles.min(m), heads, 1], threads, shared, &list)
}
