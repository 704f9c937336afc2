//! Features of decisions through Vulkan and Metal: a group a row, whose first unit looks at the few options.

use tilewright_core::Result;

use super::{FEATURES, Forward};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

#[cube(launch_unchecked)]
fn forward_kernel(
    states: &[f32],
    firsts: &[i32],
    logits: &[f32],
    starts: &[i32],
    out: &mut [f32],
    rows: usize,
    d: usize,
    width: usize,
) {
    let row = CUBE_POS;
    if row < rows {
        let state = usize::cast_from(firsts[row]) * d;
        let to = row * width;
        let mut i = UNIT_POS as usize;
        while i < d {
            out[to + i] = states[state + i];
            i += CUBE_DIM as usize;
        }
        if UNIT_POS == 0 {
            let begin = usize::cast_from(starts[row]);
            let end = usize::cast_from(starts[row + 1]);
            let mut most = f32::new(-3.0e38f32);
            let mut numbers = 1u32;
            for j in begin..end {
                most = max(most, logits[j]);
                if !is_number(logits[j]) {
                    numbers = 0u32;
                }
            }
            let mut sum = 0.0f32;
            for j in begin..end {
                sum += (logits[j] - most).exp();
            }
            let mut first = 0.0f32;
            let mut second = 0.0f32;
            let mut entropy = 0.0f32;
            for j in begin..end {
                let p = (logits[j] - most).exp() / sum;
                second = max(second, min(p, first));
                first = max(first, p);
                entropy -= p * max(p, 1.0e-9f32).ln();
            }
            let options = f32::cast_from(max(end - begin, 2usize));
            let counts = begin < end;
            // A driver may drop what is no number from a maximum: it is told by its bits.
            let none = f32::reinterpret(0x7FC0_0000u32);
            let sure = select(counts, entropy / options.ln(), 0.0f32);
            out[to + d] = select(numbers == 1u32, first, none);
            out[to + d + 1] = select(numbers == 1u32, first - second, none);
            out[to + d + 2] = select(numbers == 1u32, sure, none);
            out[to + d + 3] = select(counts, options / 255.0f32, 0.0f32);
        }
    }
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, rows: usize, d: usize) -> Result<()> {
    const OP: &str = "option_features.forward";
    let Forward { states, firsts, logits, starts, out } = *args;
    if rows == 0 {
        return Ok(());
    }
    let (states, firsts, logits) = (gpu.arg(OP, states)?, gpu.arg(OP, firsts)?, gpu.arg(OP, logits)?);
    let (starts, to) = (gpu.arg(OP, starts)?, gpu.arg(OP, out)?);
    // SAFETY: the contract checked that first tokens are rows of the states and that options lie within the logits.
    unsafe {
        let (grid, units) = (gpu.grid(rows), CubeDim::new_1d(UNITS));
        forward_kernel::launch_unchecked(
            gpu.client(),
            grid,
            units,
            states,
            firsts,
            logits,
            starts,
            to,
            rows,
            d,
            d + FEATURES,
        );
    }
    gpu.launched(OP, &[out])
}
