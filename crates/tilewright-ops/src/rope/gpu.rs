//! Rotary embedding through Vulkan and Metal: a unit a pair of channels.

use tilewright_core::Result;

use super::Forward;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

#[cube(launch_unchecked)]
fn forward_kernel<E: Numeric>(
    x: &mut [E],
    positions: &[i32],
    table: &[f32],
    rows: usize,
    width: usize,
    heads: usize,
    half: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let pairs = heads * half;
    let n = rows * pairs;
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let (row, pair) = (i / pairs, i % pairs);
        let (head, t) = (pair / half, pair % half);
        let at = row * width + head * 2 * half + t;
        let angle = usize::cast_from(positions[row]) * 2 * half + t;
        let (cosine, sine) = (table[angle], table[angle + half]);
        let (a, b) = (widen::<E>(x[at], bf16), widen::<E>(x[at + half], bf16));
        x[at] = narrow::<E>(a * cosine - b * sine, bf16);
        x[at + half] = narrow::<E>(b * cosine + a * sine, bf16);
        i += step;
    }
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, width: usize, head: usize) -> Result<()> {
    const OP: &str = "rope.forward";
    let Forward { x, heads, positions, table } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, x.dtype())?;
    let (rows, half) = (positions.numel(), head / 2);
    if rows * heads * half == 0 {
        return Ok(());
    }
    let (turned, positions, table) = (gpu.arg(OP, x)?, gpu.arg(OP, positions)?, gpu.arg(OP, table)?);
    // SAFETY: the heads lie inside the rows of `x`, and each position was checked to be a row of the table.
    unsafe {
        forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.spread(rows * heads * half),
            CubeDim::new_1d(UNITS),
            turned,
            positions,
            table,
            rows,
            width,
            heads,
            half,
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[x])
}
