//! Gathering rows on CUDA: one block a row.

use tilewright_core::Result;

use super::Forward;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::{FLOATS, code};
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "gather/gather.cu",
    text: include_str!("gather.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, width: usize) -> Result<()> {
    let Forward { table, index, out } = *args;
    if width == 0 {
        return Ok(());
    }
    let wide = width.is_multiple_of(4) && aligned(&[table, out]);
    let list = [
        Arg::Tensor(table),
        Arg::Tensor(index),
        Arg::Tensor(out),
        Arg::Int(code(out.dtype()) as i32),
        Arg::Int(width as i32),
        Arg::Int(i32::from(wide)),
    ];
    cuda.launch_early("gather.forward", &SOURCE.typed("forward", table.dtype()), [index.numel(), 1, 1], 256, 0, &list)
}
