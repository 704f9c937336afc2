//! GELU through Vulkan and Metal: element by element, bound by memory.

use tilewright_core::Result;

use super::{Backward, Forward};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

#[cube(launch_unchecked)]
fn forward_kernel<E: Numeric>(
    x: &[E],
    out: &mut [E],
    n: usize,
    #[comptime] erf: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        out[i] = narrow::<E>(gelu_value(widen::<E>(x[i], bf16), erf), bf16);
        i += step;
    }
}

// `dx` may be `dout` itself: each element is read before it is written, by the unit that writes it.
#[cube(launch_unchecked)]
fn backward_kernel<E: Numeric>(
    x: &[E],
    dout: &[E],
    dx: &mut [E],
    n: usize,
    #[comptime] erf: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let slope = gelu_slope(widen::<E>(x[i], bf16), erf);
        dx[i] = narrow::<E>(widen::<E>(dout[i], bf16) * slope, bf16);
        i += step;
    }
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "gelu.forward";
    let Forward { kind, x, out } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, x.dtype())?;
    let (n, erf) = (x.numel(), is_erf(kind));
    if n == 0 {
        return Ok(());
    }
    let [x, to] = [gpu.arg(OP, x)?, gpu.arg(OP, out)?];
    // SAFETY: both tensors have `n` elements.
    unsafe {
        forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.spread(n),
            CubeDim::new_1d(UNITS),
            x,
            to,
            n,
            erf,
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[out])
}

pub(super) fn backward(gpu: &Gpu, args: &Backward<'_>) -> Result<()> {
    const OP: &str = "gelu.backward";
    let Backward { kind, x, dout, dx } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, x.dtype())?;
    let (n, erf) = (x.numel(), is_erf(kind));
    if n == 0 {
        return Ok(());
    }
    let [x, dout, to] = [gpu.arg(OP, x)?, gpu.arg(OP, dout)?, gpu.arg(OP, dx)?];
    // SAFETY: all tensors have `n` elements.
    unsafe {
        let (grid, units) = (gpu.spread(n), CubeDim::new_1d(UNITS));
        backward_kernel::launch_unchecked(gpu.client(), grid, units, x, dout, to, n, erf, bf16, elem);
    }
    gpu.launched(OP, &[dx])
}
