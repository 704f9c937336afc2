//! The global norm on CUDA: partial sums of fixed blocks in the device's scratch, then one block adds them in order.

use tilewright_core::{DType, Error, Result};

use super::Forward;
use crate::Tensor;
use crate::runtime::cuda::launch::{aligned, pack};
use crate::runtime::cuda::source::FLOATS;
use crate::runtime::cuda::{Arg, Cuda, SCRATCH_BYTES, Source};

pub(crate) static SOURCE: Source = Source {
    name: "global_norm/global_norm.cu",
    text: include_str!("global_norm.cu"),
    parameters: &["TW_DTYPE"],
    variants: FLOATS,
    exact: false,
};

/// Tensors of one launch.
const TENSORS: usize = 16;

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "global_norm.forward";
    let some: Vec<&Tensor> = args.tensors.iter().filter(|t| t.numel() > 0).collect();
    let mut blocks = 0;
    let mut rest = &some[..];
    while let Some(first) = rest.first() {
        let count = rest.iter().take(TENSORS).take_while(|t| t.dtype() == first.dtype()).count();
        let (now, later) = rest.split_at(count);
        blocks += squares(cuda, now, blocks)?;
        rest = later;
    }
    let list = [Arg::Address(cuda.scratch()), Arg::Int(blocks as i32), Arg::Tensor(args.out)];
    cuda.launch(OP, &SOURCE.typed("root", DType::F32), [1, 1, 1], 256, 0, &list)
}

/// Partial sums of tensors of one type, behind `before` others; how many.
fn squares(cuda: &Cuda, tensors: &[&Tensor], before: usize) -> Result<usize> {
    const OP: &str = "global_norm.forward";
    let (mut words, mut blocks) = ([0u64; 3 * TENSORS + 1], 0);
    for (i, t) in tensors.iter().enumerate() {
        let (n, wide) = (t.numel() as i64, aligned(&[t]));
        words[i] = t.cuda_address();
        words[TENSORS + i] = if wide { n } else { -n } as u64;
        blocks += t.numel().div_ceil(256 * 8 * if wide { pack(t.dtype()) } else { 1 }).min(2048);
        words[2 * TENSORS + i + 1] = blocks as u64;
    }
    if (before + blocks) * size_of::<f64>() > SCRATCH_BYTES {
        let what = "the tensors need more partial sums than the device's scratch holds; pass fewer".to_owned();
        return Err(Error::Argument { op: OP, what });
    }
    let table = words.map(|word| Arg::Long(word as i64));
    let partial = Arg::Address(cuda.scratch() + (before * size_of::<f64>()) as u64);
    let list = [Arg::Int(tensors.len() as i32), partial];
    let kernel = SOURCE.typed("squares", tensors[0].dtype());
    cuda.launch_with(OP, &kernel, blocks, &table, &list)?;
    Ok(blocks)
}
