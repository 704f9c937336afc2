//! The global norm through Vulkan and Metal, in f32 alone: no f64 is needed.
//!
//! One pass with three sums of squares (J. L. Blue, A portable Fortran program to find the Euclidean norm of a vector, 1978): of magnitudes whose squares
//! might overflow, made smaller by a power of two, of those whose squares might underflow, made larger, and of all others as they are. Partial sums
//! belong to fixed blocks and are added in a fixed tree.

use tilewright_core::{DType, Result};

use super::Forward;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;
use crate::{Device, Tensor};

/// Runs of eight elements that a unit reads.
const RUNS: usize = 16;

/// Elements of a block.
const BLOCK: usize = RUNS * 8 * UNITS as usize;

/// Bits of 2^48: the squares of so many as memory holds of what is smaller do not overflow.
const LARGE: u32 = 0x5780_0000;

/// Bits of 2^-40: squares of what is not smaller have all their digits.
const SMALL: u32 = 0x2B80_0000;

/// 2^-80 and 2^84: what magnitudes of [`LARGE`] on and below [`SMALL`] are multiplied by.
const FACTORS: [f32; 2] = [8.271_806e-25, 1.934_281_4e25];

/// Adds the square of `x` to the sum of its kind: 0 the large, 1 those between and what is no number, 2 the small.
#[cube]
fn add_square(x: f32, sums: &mut Array<f32>) {
    let bits = u32::reinterpret(x) & 0x7FFF_FFFFu32;
    let number = bits <= 0x7F80_0000u32;
    let large = number && bits >= LARGE;
    let small = bits < SMALL;
    let (down, up) = (x * FACTORS[0], x * FACTORS[1]);
    sums[0usize] += select(large, down * down, 0.0f32);
    sums[1usize] += select(large || small, 0.0f32, x * x);
    sums[2usize] += select(small, up * up, 0.0f32);
}

// partials[first + block]: the three sums of the block's elements.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn squares_kernel<E: Numeric>(
    packs: &[Pack],
    ones: &[E],
    partials: &mut [f32],
    n: usize,
    first: usize,
    blocks: usize,
    #[comptime] even: bool,
    #[comptime] wide: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let block = CUBE_POS;
    let mut sums = Array::<f32>::new(3usize);
    #[unroll]
    for i in 0..3usize {
        sums[i] = 0.0f32;
    }
    if block < blocks {
        for some in 0..comptime!(RUNS / 4) {
            // Four reads at a time are on their way.
            #[unroll]
            for j in 0..4usize {
                let start = (block * RUNS + some * 4 + j) * comptime!(UNITS as usize);
                if comptime![even] {
                    let run = start + unit;
                    if run < n / 8 {
                        let mut values = Array::<f32>::new(8usize);
                        let (pack, next) = pack_at(run * 8, wide);
                        unpack(packs[pack], packs[next], &mut values, wide, bf16);
                        #[unroll]
                        for i in 0..8usize {
                            add_square(values[i], &mut sums);
                        }
                    }
                } else {
                    // Neighbours read neighbours.
                    for i in 0..8usize {
                        let at = start * 8 + i * comptime!(UNITS as usize) + unit;
                        if at < n {
                            add_square(widen::<E>(ones[at], bf16), &mut sums);
                        }
                    }
                }
            }
        }
        if comptime![even] {
            // What is behind the last eight.
            let at = n / 8 * 8 + unit;
            if block + 1 == blocks && at < n {
                add_square(widen::<E>(ones[at], bf16), &mut sums);
            }
        }
    }
    #[unroll]
    for i in 0..3usize {
        let total = group_sum(sums[i], &mut shared);
        if unit == 0 {
            if block < blocks {
                partials[(first + block) * 3 + i] = total;
            }
        }
    }
}

/// The root, by one step of Newton's method: that of some drivers is off by units in the last place.
#[cube]
fn root(x: f32) -> f32 {
    let root = x.sqrt();
    root + 0.5f32 * (x - root * root) / max(root, 1.0e-30f32)
}

#[cube(launch_unchecked)]
fn root_kernel(partials: &[f32], out: &mut [f32], blocks: usize) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let mut sums = Array::<f32>::new(3usize);
    #[unroll]
    for i in 0..3usize {
        sums[i] = 0.0f32;
    }
    let mut block = unit;
    while block < blocks {
        #[unroll]
        for i in 0..3usize {
            sums[i] += partials[block * 3 + i];
        }
        block += CUBE_DIM as usize;
    }
    #[unroll]
    for i in 0..3usize {
        sums[i] = group_sum(sums[i], &mut shared);
    }
    if unit == 0 {
        let (large, between, small) = (sums[0usize], sums[1usize], sums[2usize]);
        // Each kind's norm as it is, and all of them in units of the largest: a driver may gather factors, and two of these overflow.
        let (high, middle, low) = (root(large) / FACTORS[0], root(between), root(small) / FACTORS[1]);
        let top = max(high, max(middle, low));
        let (x, y, z) = (high / top, middle / top, low / top);
        let norm = select(high + middle + low > top, top * root(x * x + y * y + z * z), top);
        // Infinity and what is no number are passed on as they are, and a norm beyond the largest number is infinite.
        let odd = large + between;
        let result = select((u32::reinterpret(top) & 0x7FFF_FFFFu32) >= 0x7F80_0000u32, top, norm);
        out[0] = select((u32::reinterpret(odd) & 0x7FFF_FFFFu32) >= 0x7F80_0000u32, odd, result);
    }
}

pub(super) fn forward(device: &Device, gpu: &Gpu, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "global_norm.forward";
    let Forward { tensors, out } = *args;
    let units = CubeDim::new_1d(UNITS);
    let full: Vec<&Tensor> = tensors.iter().filter(|t| t.numel() > 0).collect();
    let blocks: usize = full.iter().map(|t| t.numel().div_ceil(BLOCK)).sum();
    let partials = gpu.scratch(OP, device, 12 * blocks.max(1))?;
    let sums = partials.reinterpret(0, DType::F32, &[3 * blocks.max(1)])?;
    let mut first = 0;
    for t in full {
        let Storage { elem, bf16 } = gpu.storage(OP, t.dtype())?;
        let (n, own) = (t.numel(), t.numel().div_ceil(BLOCK));
        let even = t.offset.is_multiple_of(16) && gpu.capabilities().bf16;
        let wide = t.dtype() == DType::F32;
        let (packs, ones, to) = (as_packs(gpu, OP, t)?, gpu.arg(OP, t)?, gpu.arg(OP, &sums)?);
        let (client, grid) = (gpu.client(), gpu.grid(own));
        // SAFETY: each block reads below `n` and writes its own place of `blocks`.
        unsafe {
            squares_kernel::launch_unchecked(
                client, grid, units, packs, ones, to, n, first, own, even, wide, bf16, elem,
            );
        }
        gpu.launched(OP, &[&sums])?;
        first += own;
    }
    // SAFETY: `blocks` partial results were written above.
    unsafe {
        let (from, to) = (gpu.arg(OP, &sums)?, gpu.arg(OP, out)?);
        root_kernel::launch_unchecked(gpu.client(), gpu.grid(1), units, from, to, blocks);
    }
    gpu.launched(OP, &[out])
}
