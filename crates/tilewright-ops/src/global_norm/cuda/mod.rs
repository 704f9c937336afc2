//! The global norm on CUDA: partial sums of fixed blocks in the device's scratch, then one block adds them in order.

use tilewright_core::{DType, Error, Result};

use super::Forward;
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

pub(super) fn forward(cuda: &Cuda, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "global_norm.forward";
    let mut blocks = 0;
    for t in args.tensors {
        let wide = aligned(&[t]);
        let per_block = 256 * 8 * if wide { pack(t.dtype()) } else { 1 };
        let grid = t.numel().div_ceil(per_block).min(2048);
        if (blocks + grid) * size_of::<f64>() > SCRATCH_BYTES {
            let what = format!(
                "{} tensors need more partial sums than the device's scratch holds; pass fewer",
                args.tensors.len()
            );
            return Err(Error::Argument { op: OP, what });
        }
        let at = Arg::Address(cuda.scratch() + (blocks * size_of::<f64>()) as u64);
        let list = [Arg::Tensor(t), Arg::Long(t.numel() as i64), Arg::Int(i32::from(wide)), at];
        cuda.launch(OP, &SOURCE.typed("squares", t.dtype()), [grid, 1, 1], 256, 0, &list)?;
        blocks += grid;
    }
    let list = [Arg::Address(cuda.scratch()), Arg::Int(blocks as i32), Arg::Tensor(args.out)];
    cuda.launch(OP, &SOURCE.typed("root", DType::F32), [1, 1, 1], 256, 0, &list)
}
