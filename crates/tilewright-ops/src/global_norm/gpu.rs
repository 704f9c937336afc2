//! The global norm through Vulkan and Metal, in f32 alone: no f64 is needed.
//!
//! Three passes: the largest magnitude, the sum of the squares of everything divided by the power of two below it, the root. So no square
//! overflows, and what underflows is too small to count. Partial sums belong to fixed blocks and are added in a fixed tree.

use tilewright_core::{DType, Result};

use super::Forward;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;
use crate::{Device, Tensor};

/// Elements of a block: 16 a unit.
const BLOCK: usize = 16 * UNITS as usize;

// The bits of the largest magnitude of each block: as integers they have the order of the magnitudes, infinity and NaN last.
#[cube(launch_unchecked)]
fn largest_kernel<E: Numeric>(
    x: &[E],
    partials: &mut [u32],
    n: usize,
    first: usize,
    blocks: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut shared = Shared::<[u32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let block = CUBE_POS;
    let mut bits = 0u32;
    if block < blocks {
        for j in 0..16usize {
            let i = block * 4096 + j * 256 + unit;
            if i < n {
                bits = max(bits, u32::reinterpret(widen::<E>(x[i], bf16)) & 0x7FFF_FFFFu32);
            }
        }
    }
    shared[unit] = bits;
    sync_cube();
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        if unit < half {
            shared[unit] = max(shared[unit], shared[unit + half]);
        }
        sync_cube();
        half /= 2;
    }
    if unit == 0 {
        if block < blocks {
            partials[first + block] = shared[0];
        }
    }
}

// The bits of the largest of all go to place 0 of `result`.
#[cube(launch_unchecked)]
fn scale_kernel(partials: &[u32], result: &mut [u32], blocks: usize) {
    let mut shared = Shared::<[u32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let mut bits = 0u32;
    let mut i = unit;
    while i < blocks {
        bits = max(bits, partials[i]);
        i += CUBE_DIM as usize;
    }
    shared[unit] = bits;
    sync_cube();
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        if unit < half {
            shared[unit] = max(shared[unit], shared[unit + half]);
        }
        sync_cube();
        half /= 2;
    }
    if unit == 0 {
        result[0] = shared[0];
    }
}

/// Two factors whose product brings a magnitude with these bits to between 1 and 2: one power of two could not be large enough for both ends.
#[cube]
fn factors(bits: u32) -> (f32, f32) {
    let exponent = i32::cast_from(bits >> 23u32) - 127i32;
    let half = exponent / 2i32;
    let rest = exponent - half;
    (f32::reinterpret(u32::cast_from(127i32 - half) << 23u32), f32::reinterpret(u32::cast_from(127i32 - rest) << 23u32))
}

#[cube(launch_unchecked)]
fn squares_kernel<E: Numeric>(
    x: &[E],
    largest: &[u32],
    partials: &mut [f32],
    n: usize,
    first: usize,
    blocks: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let block = CUBE_POS;
    let (a, b) = factors(largest[0]);
    let mut sum = 0.0f32;
    if block < blocks {
        for j in 0..16usize {
            let i = block * 4096 + j * 256 + unit;
            if i < n {
                let y = widen::<E>(x[i], bf16) * a * b;
                sum += y * y;
            }
        }
    }
    let total = group_sum(sum, &mut shared);
    if unit == 0 {
        if block < blocks {
            partials[first + block] = total;
        }
    }
}

#[cube(launch_unchecked)]
fn root_kernel(partials: &[f32], largest: &[u32], out: &mut [f32], blocks: usize) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let mut sum = 0.0f32;
    let mut i = unit;
    while i < blocks {
        sum += partials[i];
        i += CUBE_DIM as usize;
    }
    let total = group_sum(sum, &mut shared);
    if unit == 0 {
        let bits = largest[0];
        let (a, b) = factors(bits);
        // One step of Newton's method: the root of some drivers is off by units in the last place.
        let root = total.sqrt();
        let better = root + 0.5f32 * (total - root * root) / max(root, 1.0e-30f32);
        let norm = better / a / b;
        let finite = select(bits == 0u32, 0.0f32, norm);
        // Infinity and NaN are passed on as they are.
        out[0] = select(bits >= 0x7F80_0000u32, f32::reinterpret(bits), finite);
    }
}

pub(super) fn forward(device: &Device, gpu: &Gpu, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "global_norm.forward";
    let Forward { tensors, out } = *args;
    let units = CubeDim::new_1d(UNITS);
    let full: Vec<&Tensor> = tensors.iter().filter(|t| t.numel() > 0).collect();
    let blocks: usize = full.iter().map(|t| t.numel().div_ceil(BLOCK)).sum();
    let partials = gpu.scratch(OP, device, 256 + 4 * blocks.max(1))?;
    let largest = partials.reinterpret(0, DType::I32, &[1])?;
    let sums = partials.reinterpret(256, DType::F32, &[blocks.max(1)])?;
    for largest_pass in [true, false] {
        let mut first = 0;
        for t in &full {
            let Storage { elem, bf16 } = gpu.storage(OP, t.dtype())?;
            let (n, own) = (t.numel(), t.numel().div_ceil(BLOCK));
            let (x, to) = (gpu.arg(OP, t)?, gpu.arg(OP, &sums)?);
            let grid = gpu.grid(own);
            // SAFETY: each block reads below `n` and writes its own place of `blocks`.
            unsafe {
                if largest_pass {
                    largest_kernel::launch_unchecked(gpu.client(), grid, units, x, to, n, first, own, bf16, elem);
                } else {
                    let scale = gpu.arg(OP, &largest)?;
                    squares_kernel::launch_unchecked(
                        gpu.client(),
                        grid,
                        units,
                        x,
                        scale,
                        to,
                        n,
                        first,
                        own,
                        bf16,
                        elem,
                    );
                }
            }
            gpu.launched(OP, &[&sums])?;
            first += own;
        }
        let (from, one) = (gpu.arg(OP, &sums)?, gpu.grid(1));
        // SAFETY: `blocks` partial results were written above.
        unsafe {
            if largest_pass {
                scale_kernel::launch_unchecked(gpu.client(), one, units, from, gpu.arg(OP, &largest)?, blocks);
            } else {
                let scale = gpu.arg(OP, &largest)?;
                root_kernel::launch_unchecked(gpu.client(), one, units, from, scale, gpu.arg(OP, out)?, blocks);
            }
        }
        gpu.launched(OP, &[out])?;
    }
    Ok(())
}
