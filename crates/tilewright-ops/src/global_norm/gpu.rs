//! The global norm through Vulkan and Metal, in f32 alone: no f64 is needed.
//!
//! One pass with three sums of squares (J. L. Blue, A portable Fortran program to find the Euclidean norm of a vector, 1978): of magnitudes whose squares
//! might overflow, made smaller by a power of two, of those whose squares might underflow, made larger, and of all others as they are. Powers of two are
//! taken off and put on as bits of the exponent: factors a driver may gather, and their product is zero. Partial sums belong to fixed blocks and are
//! added in a fixed tree.

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

/// Exponents that magnitudes of [`LARGE`] on lose, and those below [`SMALL`] gain.
const DOWN: u32 = 80;
const UP: u32 = 84;

/// Bits of infinity; those of what is no number are above.
const INFINITE: u32 = 0x7F80_0000;

/// `x`, which is not negative, times `2^-exponents`; zero where that is no normal number.
#[cube]
fn smaller(x: f32, #[comptime] exponents: u32) -> f32 {
    let bits = u32::reinterpret(x);
    let off = comptime!(exponents << 23);
    f32::reinterpret(select(bits > off + 0x7F_FFFFu32, bits - min(bits, off), 0u32))
}

/// `x`, which is not negative, times `2^exponents`; zero where it is no normal number, infinite where the result would be beyond the largest.
#[cube]
fn larger(x: f32, #[comptime] exponents: u32) -> f32 {
    let bits = u32::reinterpret(x);
    let on = comptime!(exponents << 23);
    let more = min(bits + on, INFINITE);
    f32::reinterpret(select(bits > 0x7F_FFFFu32, more, 0u32))
}

/// Adds the square of `x` to the sum of its kind: 0 the large, 1 those between, 2 the small. 3 becomes 1 where there is an infinity, 2 where there is
/// what is no number.
#[cube]
fn add_square(x: f32, sums: &mut Array<f32>) {
    let bits = u32::reinterpret(x) & 0x7FFF_FFFFu32;
    let size = f32::reinterpret(bits);
    let large = bits >= LARGE;
    let small = bits < SMALL;
    let (down, up) = (smaller(size, DOWN), larger(size, UP));
    sums[0usize] += select(large && bits < INFINITE, down * down, 0.0f32);
    sums[1usize] += select(large || small, 0.0f32, size * size);
    sums[2usize] += select(small, up * up, 0.0f32);
    let odd = select(bits > INFINITE, 2.0f32, select(bits == INFINITE, 1.0f32, 0.0f32));
    sums[3usize] = max(sums[3usize], odd);
}

/// What all units of a group have.
#[cube]
fn group_sums(sums: &mut Array<f32>, shared: &mut Shared<[f32]>) {
    #[unroll]
    for i in 0..3usize {
        sums[i] = group_sum(sums[i], shared);
    }
    sums[3usize] = group_max(sums[3usize], shared);
}

// partials[first + block]: the sums of the block's elements, see `add_square`.
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
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
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
    group_sums(&mut sums, &mut shared);
    if unit < 4 && block < blocks {
        let mut own = sums[0usize];
        #[unroll]
        for i in 1..4usize {
            own = select(unit == i, sums[i], own);
        }
        partials[(first + block) * 4 + unit] = own;
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
    let mut sums = Array::<f32>::new(4usize);
    #[unroll]
    for i in 0..4usize {
        sums[i] = 0.0f32;
    }
    let mut block = unit;
    while block < blocks {
        #[unroll]
        for i in 0..3usize {
            sums[i] += partials[block * 4 + i];
        }
        sums[3usize] = max(sums[3usize], partials[block * 4 + 3]);
        block += CUBE_DIM as usize;
    }
    group_sums(&mut sums, &mut shared);
    if unit == 0 {
        let (large, between, small) = (sums[0usize], sums[1usize], sums[2usize]);
        // Each kind beside the next larger that there is: what is two kinds away is too small to count.
        let high = larger(root(large + smaller(between, comptime!(2 * DOWN))), DOWN);
        let middle = root(between + smaller(small, comptime!(2 * UP)));
        let low = smaller(root(small), UP);
        let norm = select(large > 0.0f32, high, select(between > 0.0f32, middle, low));
        let odd = select(sums[3usize] > 1.5f32, 0x7FC0_0000u32, INFINITE);
        out[0] = select(sums[3usize] > 0.5f32, f32::reinterpret(odd), norm);
    }
}

pub(super) fn forward(device: &Device, gpu: &Gpu, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "global_norm.forward";
    let Forward { tensors, out } = *args;
    let units = CubeDim::new_1d(UNITS);
    let full: Vec<&Tensor> = tensors.iter().filter(|t| t.numel() > 0).collect();
    let blocks: usize = full.iter().map(|t| t.numel().div_ceil(BLOCK)).sum();
    let partials = gpu.scratch(OP, device, 16 * blocks.max(1))?;
    let sums = partials.reinterpret(0, DType::F32, &[4 * blocks.max(1)])?;
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
