//! Rotary embedding on CUDA: bound by memory, groups of four channels where they are aligned.

use tilewright_core::Result;

use super::Forward;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::FLOATS;
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "rope/rope.cu",
    text: include_str!("rope.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, width: usize, head: usize) -> Result<()> {
    let Forward { x, heads, positions, table } = *args;
    let (rows, half) = (positions.numel(), head / 2);
    let wide = half.is_multiple_of(4) && width.is_multiple_of(4) && aligned(&[x, table]);
    let groups = heads * half / if wide { 4 } else { 1 };
    let list = [
        Arg::Tensor(x),
        Arg::Long(width as i64),
        Arg::Int(heads as i32),
        Arg::Tensor(positions),
        Arg::Tensor(table),
        Arg::Int(half as i32),
        Arg::Int(i32::from(wide)),
    ];
    let threads = groups.next_multiple_of(32).clamp(32, 256);
    cuda.launch("rope.forward", &SOURCE.typed("forward", x.dtype()), [rows, 1, 1], threads, 0, &list)
}
