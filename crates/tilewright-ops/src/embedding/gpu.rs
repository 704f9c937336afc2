//! Token and position embedding through Vulkan and Metal.
//!
//! The backward gives each row of a gradient to one group: positions are linked to the next one of the same token, and the group of a
//! token's first position walks the chain, so that sums are taken in the order of the positions, without atomics.

use tilewright_core::{DType, Result};

use super::{Backward, Forward};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

#[cube(launch_unchecked)]
fn forward_kernel<E: Numeric>(
    tokens: &[i32],
    wte: &[E],
    wpe: &[E],
    out: &mut [E],
    n: usize,
    t: usize,
    c: usize,
    position: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let (row, channel) = (i / c, i % c);
        let token = usize::cast_from(tokens[row]);
        let place = position + row % t;
        let sum = widen::<E>(wte[token * c + channel], bf16) + widen::<E>(wpe[place * c + channel], bf16);
        out[i] = narrow::<E>(sum, bf16);
        i += step;
    }
}

// links[i]: the next position with the token of position i, or n; links[n + i]: 1 where position i is its token's first.
#[cube(launch_unchecked)]
fn link_kernel(tokens: &[i32], links: &mut [u32], n: usize) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let token = tokens[i];
        let mut next = n;
        let mut j = i + 1;
        while j < n {
            if tokens[j] == token {
                next = j;
                j = n;
            } else {
                j += 1;
            }
        }
        links[i] = u32::cast_from(next);
        let mut first = 1u32;
        let mut j = 0usize;
        while j < i {
            if tokens[j] == token {
                first = 0u32;
                j = i;
            } else {
                j += 1;
            }
        }
        links[n + i] = first;
        i += step;
    }
}

#[cube(launch_unchecked)]
fn tokens_kernel<E: Numeric>(
    tokens: &[i32],
    links: &[u32],
    dout: &[E],
    dwte: &mut [E],
    n: usize,
    c: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let first = CUBE_POS;
    if first < n {
        if links[n + first] == 1u32 {
            let row = usize::cast_from(tokens[first]) * c;
            let mut channel = UNIT_POS as usize;
            while channel < c {
                let mut sum = 0.0f32;
                let mut at = first;
                while at < n {
                    sum += widen::<E>(dout[at * c + channel], bf16);
                    at = usize::cast_from(links[at]);
                }
                dwte[row + channel] = narrow::<E>(widen::<E>(dwte[row + channel], bf16) + sum, bf16);
                channel += CUBE_DIM as usize;
            }
        }
    }
}

#[cube(launch_unchecked)]
fn positions_kernel<E: Numeric>(
    dout: &[E],
    dwpe: &mut [E],
    n: usize,
    b: usize,
    t: usize,
    c: usize,
    #[comptime] accumulate: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let mut sum = 0.0f32;
        if i / c < t {
            for row in 0..b {
                sum += widen::<E>(dout[row * t * c + i], bf16);
            }
        }
        if comptime![accumulate] {
            sum += widen::<E>(dwpe[i], bf16);
        }
        dwpe[i] = narrow::<E>(sum, bf16);
        i += step;
    }
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, c: usize) -> Result<()> {
    const OP: &str = "embedding.forward";
    let Forward { tokens, wte, wpe, position, out, .. } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, out.dtype())?;
    let (n, t) = (out.numel(), tokens.shape().last());
    if n == 0 {
        return Ok(());
    }
    let (tokens, target) = (gpu.arg(OP, tokens)?, gpu.arg(OP, out)?);
    let (wte, wpe) = (gpu.arg(OP, wte)?, gpu.arg(OP, wpe)?);
    // SAFETY: `out` has `n` elements in rows of `c`; ids and positions were checked against the tables.
    unsafe {
        let (grid, units) = (gpu.spread(n), CubeDim::new_1d(UNITS));
        forward_kernel::launch_unchecked(
            gpu.client(),
            grid,
            units,
            tokens,
            wte,
            wpe,
            target,
            n,
            t,
            c,
            position,
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[out])
}

/// 32-bit words of workspace for `n` positions.
pub(super) fn workspace_words(n: usize) -> usize {
    2 * n
}

pub(super) fn backward(gpu: &Gpu, args: &Backward<'_>, c: usize) -> Result<()> {
    const OP: &str = "embedding.backward";
    let Backward { tokens, dout, dwte, dwpe, accumulate_dwpe, workspace, .. } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, dout.dtype())?;
    let (b, t) = (tokens.shape().dims()[0], tokens.shape().dims()[1]);
    let (n, units) = (b * t, CubeDim::new_1d(UNITS));
    let places = if accumulate_dwpe { t * c } else { dwpe.numel() };
    if places > 0 {
        let (from, to) = (gpu.arg(OP, if n == 0 { dwpe } else { dout })?, gpu.arg(OP, dwpe)?);
        // SAFETY: `places` elements lie in `dwpe`, and `b * t * c` in `dout`, of which none is read when `t` is 0.
        unsafe {
            let grid = gpu.spread(places);
            positions_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                from,
                to,
                places,
                b,
                t,
                c,
                accumulate_dwpe,
                bf16,
                elem,
            );
        }
        gpu.launched(OP, &[dwpe])?;
    }
    if n * c == 0 {
        return Ok(());
    }
    let links = workspace.reinterpret(0, DType::I32, &[workspace_words(n)])?;
    let (ids, to) = (gpu.arg(OP, tokens)?, gpu.arg(OP, &links)?);
    // SAFETY: the workspace holds two words a position.
    unsafe { link_kernel::launch_unchecked(gpu.client(), gpu.spread(n), units, ids, to, n) };
    gpu.launched(OP, &[&links])?;
    let (ids, next) = (gpu.arg(OP, tokens)?, gpu.arg(OP, &links)?);
    let (from, to) = (gpu.arg(OP, dout)?, gpu.arg(OP, dwte)?);
    // SAFETY: links are positions below `n`, or `n` at a chain's end; ids were checked to be rows of `dwte`.
    unsafe {
        let grid = gpu.grid(n);
        tokens_kernel::launch_unchecked(gpu.client(), grid, units, ids, next, from, to, n, c, bf16, elem);
    }
    gpu.launched(OP, &[dwte])
}
