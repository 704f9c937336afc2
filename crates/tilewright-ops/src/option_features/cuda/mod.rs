//! Rows and their options on CUDA: one block a row.

use tilewright_core::Result;

use super::Forward;
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "option_features/option_features.cu",
    text: include_str!("option_features.cu"),
    parameters: &[],
    variants: &[&[]],
    exact: true,
};

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>, rows: usize, d: usize) -> Result<()> {
    let Forward { states, firsts, logits, starts, out } = *args;
    let list = [
        Arg::Tensor(states),
        Arg::Tensor(firsts),
        Arg::Tensor(logits),
        Arg::Tensor(starts),
        Arg::Tensor(out),
        Arg::Int(d as i32),
    ];
    cuda.launch_early("option_features.forward", &SOURCE.kernel("forward", &[]), [rows, 1, 1], 128, 0, &list)
}
