//! Gathering rows through Vulkan and Metal: a unit an element.

use tilewright_core::Result;

use super::Forward;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

#[cube(launch_unchecked)]
fn forward_kernel<E: Numeric, O: Numeric>(
    table: &[E],
    index: &[i32],
    out: &mut [O],
    n: usize,
    width: usize,
    #[comptime] table_bf16: bool,
    #[comptime] out_bf16: bool,
    #[define(E, O)] _elems: [ElemType; 2],
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let row = usize::cast_from(index[i / width]);
        out[i] = narrow::<O>(widen::<E>(table[row * width + i % width], table_bf16), out_bf16);
        i += step;
    }
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, width: usize) -> Result<()> {
    const OP: &str = "gather.forward";
    let Forward { table, index, out } = *args;
    let (from, to) = (gpu.storage(OP, table.dtype())?, gpu.storage(OP, out.dtype())?);
    let n = out.numel();
    if n == 0 {
        return Ok(());
    }
    let (table, index, target) = (gpu.arg(OP, table)?, gpu.arg(OP, index)?, gpu.arg(OP, out)?);
    // SAFETY: `out` has `n` elements in rows of `width`, one an index, and each index was checked to be a row of the table.
    unsafe {
        forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.spread(n),
            CubeDim::new_1d(UNITS),
            table,
            index,
            target,
            n,
            width,
            from.bf16,
            to.bf16,
            [from.elem, to.elem],
        );
    }
    gpu.launched(OP, &[out])
}
