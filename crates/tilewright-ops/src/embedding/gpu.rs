//! Token and position embedding through Vulkan and Metal.
//!
//! The backward needs no atomics: positions are sorted by token (stable, so each token's are in order), and the sorted list is cut into chunks,
//! each summed by one group. A token whose positions lie in several chunks is finished by a second kernel, in order.

use tilewright_core::{DType, Result};

use super::{Backward, Forward};
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, SCRATCH_BYTES};
use crate::{Device, Tensor};

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

// A stable radix sort of the positions by 4 bits of their token a pass, in three kernels. A tile is what one group holds: four positions a unit, in
// order, and no more than a unit's own counts of each digit, so that nothing depends on the size of a subgroup.

/// Counts this tile's digits into `counts[digit * 256 + unit]`, and makes each count the number of those before this unit's in the tile. `totals` gets
/// the tile's number of each digit. Shared memory is zeroed here.
#[cube]
fn places(
    tokens: &[i32],
    order: &[u32],
    counts: &mut Shared<[u32]>,
    totals: &mut Shared<[u32]>,
    tile: usize,
    n: usize,
    shift: u32,
    #[comptime] first: bool,
) {
    let unit = UNIT_POS as usize;
    for digit in 0..16usize {
        counts[digit * 256 + unit] = 0u32;
    }
    for j in 0..4usize {
        let i = tile * 1024 + unit * 4 + j;
        if i < n {
            let digit = digit_of(tokens, order, i, shift, first);
            counts[digit * 256 + unit] = counts[digit * 256 + unit] + 1u32;
        }
    }
    sync_cube();
    // Sixteen units share a digit, each with the counts of sixteen units.
    let (digit, part) = (unit / 16, unit % 16);
    let mut before = 0u32;
    for j in 0..16usize {
        let at = digit * 256 + part * 16 + j;
        let own = counts[at];
        counts[at] = before;
        before += own;
    }
    totals[unit] = before;
    sync_cube();
    let mut base = 0u32;
    for j in 0..16usize {
        if j < part {
            base += totals[digit * 16 + j];
        }
    }
    for j in 0..16usize {
        let at = digit * 256 + part * 16 + j;
        counts[at] = counts[at] + base;
    }
    sync_cube();
    if part == 15 {
        totals[digit * 16] = base + before;
    }
    sync_cube();
}

/// The position at place `i` of the order so far.
#[cube]
fn position_of(order: &[u32], i: usize, #[comptime] first: bool) -> usize {
    if comptime![first] { i } else { usize::cast_from(order[i]) }
}

#[cube]
fn digit_of(tokens: &[i32], order: &[u32], i: usize, shift: u32, #[comptime] first: bool) -> usize {
    let token = u32::cast_from(tokens[position_of(order, i, first)]);
    usize::cast_from((token >> shift) & 15u32)
}

// histogram[digit * tiles + tile]
#[cube(launch_unchecked)]
fn sort_count_kernel(
    tokens: &[i32],
    order: &[u32],
    histogram: &mut [u32],
    n: usize,
    tiles: usize,
    shift: u32,
    #[comptime] first: bool,
) {
    let mut counts = Shared::<[u32]>::new_slice(4096usize);
    let mut totals = Shared::<[u32]>::new_slice(256usize);
    let tile = CUBE_POS;
    places(tokens, order, &mut counts, &mut totals, tile, n, shift, first);
    let unit = UNIT_POS as usize;
    if unit < 16 {
        if tile < tiles {
            histogram[unit * tiles + tile] = totals[unit * 16];
        }
    }
}

// Each count becomes the sum of those before it; one group, each unit with a run of them.
#[cube(launch_unchecked)]
fn sort_scan_kernel(histogram: &mut [u32], count: usize) {
    let mut sums = Shared::<[u32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let run = (count + 255) / 256;
    let mut own = 0u32;
    for j in 0..run {
        let i = unit * run + j;
        if i < count {
            own += histogram[i];
        }
    }
    sums[unit] = own;
    sync_cube();
    let mut step = 1usize;
    while step < 256usize {
        let mut other = 0u32;
        if unit >= step {
            other = sums[unit - step];
        }
        sync_cube();
        sums[unit] = sums[unit] + other;
        sync_cube();
        step *= 2;
    }
    let mut before = sums[unit] - own;
    for j in 0..run {
        let i = unit * run + j;
        if i < count {
            let here = histogram[i];
            histogram[i] = before;
            before += here;
        }
    }
}

#[cube(launch_unchecked)]
fn sort_place_kernel(
    tokens: &[i32],
    order: &[u32],
    histogram: &[u32],
    sorted: &mut [u32],
    n: usize,
    tiles: usize,
    shift: u32,
    #[comptime] first: bool,
) {
    let mut counts = Shared::<[u32]>::new_slice(4096usize);
    let mut totals = Shared::<[u32]>::new_slice(256usize);
    let tile = CUBE_POS;
    places(tokens, order, &mut counts, &mut totals, tile, n, shift, first);
    let unit = UNIT_POS as usize;
    for j in 0..4usize {
        let i = tile * 1024 + unit * 4 + j;
        if i < n {
            let digit = digit_of(tokens, order, i, shift, first);
            let place = counts[digit * 256 + unit];
            counts[digit * 256 + unit] = place + 1u32;
            sorted[usize::cast_from(histogram[digit * tiles + tile] + place)] =
                u32::cast_from(position_of(order, i, first));
        }
    }
}

// A group sums `rows` places of the sorted list, each unit some channels. partials (chunks, 2, c): the sum of the first token where the chunk before
// has it too, and of the last where it begins here and goes on behind.
#[cube(launch_unchecked)]
fn chunks_kernel<E: Numeric>(
    tokens: &[i32],
    sorted: &[u32],
    dout: &[E],
    dwte: &mut [E],
    partials: &mut [f32],
    n: usize,
    rows: usize,
    c: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let chunk = CUBE_POS;
    let start = chunk * rows;
    if start < n {
        let end = min(start + rows, n);
        let head = tokens[usize::cast_from(sorted[start])];
        let mut continues = false;
        if start > 0 {
            continues = tokens[usize::cast_from(sorted[start - 1])] == head;
        }
        let mut channel = UNIT_POS as usize;
        while channel < c {
            let mut leading = continues;
            let mut sum = 0.0f32;
            let mut id = head;
            for i in start..end {
                sum += widen::<E>(dout[usize::cast_from(sorted[i]) * c + channel], bf16);
                // Behind the last place there is no token.
                let mut next = id;
                let mut goes_on = false;
                if i + 1 < n {
                    next = tokens[usize::cast_from(sorted[i + 1])];
                    goes_on = next == id;
                }
                if !goes_on || i + 1 == end {
                    if leading {
                        partials[chunk * 2 * c + channel] = sum;
                    } else if goes_on {
                        partials[(chunk * 2 + 1) * c + channel] = sum;
                    } else {
                        let at = usize::cast_from(id) * c + channel;
                        dwte[at] = narrow::<E>(widen::<E>(dwte[at], bf16) + sum, bf16);
                    }
                    leading = false;
                    sum = 0.0f32;
                    id = next;
                }
            }
            channel += CUBE_DIM as usize;
        }
    }
}

// Tokens of several chunks: the group of the chunk where one begins adds its partial sums in order.
#[cube(launch_unchecked)]
fn finish_kernel<E: Numeric>(
    tokens: &[i32],
    sorted: &[u32],
    partials: &[f32],
    dwte: &mut [E],
    n: usize,
    rows: usize,
    c: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let chunk = CUBE_POS;
    let start = chunk * rows;
    let next = start + rows;
    if next < n {
        let id = tokens[usize::cast_from(sorted[next])];
        // It must end this chunk, and begin in it.
        let mut begins = tokens[usize::cast_from(sorted[next - 1])] == id;
        if begins && start > 0 {
            if tokens[usize::cast_from(sorted[start - 1])] == id {
                begins = false;
            }
        }
        if begins {
            let mut end = chunk + 1;
            let mut more = true;
            while more {
                end += 1;
                more = false;
                if end * rows < n {
                    more = tokens[usize::cast_from(sorted[end * rows])] == id;
                }
            }
            let mut channel = UNIT_POS as usize;
            while channel < c {
                let mut sum = partials[(chunk * 2 + 1) * c + channel];
                for k in chunk + 1..end {
                    sum += partials[k * 2 * c + channel];
                }
                let at = usize::cast_from(id) * c + channel;
                dwte[at] = narrow::<E>(widen::<E>(dwte[at], bf16) + sum, bf16);
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

/// Positions of a tile of the sort.
const TILE: usize = 4 * UNITS as usize;
/// Bits of a token that a pass of the sort looks at.
const DIGIT: u32 = 4;
/// Places of the sorted list that a group sums, unless the partial sums of so many groups do not fit the scratch.
const ROWS: usize = 32;

/// 32-bit words of workspace for `n` positions: two orders, each at a multiple of 256 bytes, and the counts of the sort.
pub(super) fn workspace_words(n: usize) -> usize {
    2 * n.next_multiple_of(64) + n.div_ceil(TILE) * (1 << DIGIT)
}

pub(super) fn backward(device: &Device, gpu: &Gpu, args: &Backward<'_>, c: usize) -> Result<()> {
    const OP: &str = "embedding.backward";
    let Backward { tokens, dout, vocab, dwte, dwpe, accumulate_dwpe, workspace } = *args;
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
    let sorted = sort(gpu, tokens, vocab, workspace)?;
    let fit = SCRATCH_BYTES / (2 * c * size_of::<f32>());
    let rows = n.div_ceil(fit.max(1)).max(ROWS);
    let chunks = n.div_ceil(rows);
    let partials = gpu.scratch(OP, device, chunks * 2 * c * size_of::<f32>())?;
    let partials = partials.reinterpret(0, DType::F32, &[chunks * 2 * c])?;
    let grid = gpu.grid(chunks);
    let (ids, order) = (gpu.arg(OP, tokens)?, gpu.arg(OP, &sorted)?);
    let (from, to, sums) = (gpu.arg(OP, dout)?, gpu.arg(OP, dwte)?, gpu.arg(OP, &partials)?);
    // SAFETY: the sorted list holds each position once; ids were checked to be rows of `dwte`; two rows of `c` sums lie in the scratch for each chunk.
    unsafe {
        chunks_kernel::launch_unchecked(
            gpu.client(),
            grid.clone(),
            units,
            ids,
            order,
            from,
            to,
            sums,
            n,
            rows,
            c,
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[dwte, &partials])?;
    if chunks < 2 {
        return Ok(());
    }
    let (ids, order) = (gpu.arg(OP, tokens)?, gpu.arg(OP, &sorted)?);
    let (to, sums) = (gpu.arg(OP, dwte)?, gpu.arg(OP, &partials)?);
    // SAFETY: as above; a partial sum is read only where the first kernel wrote it.
    unsafe {
        finish_kernel::launch_unchecked(gpu.client(), grid, units, ids, order, sums, to, n, rows, c, bf16, elem);
    }
    gpu.launched(OP, &[dwte])
}

/// The positions in the order of their tokens, those of one token in their own; they lie in the workspace.
fn sort(gpu: &Gpu, tokens: &Tensor, vocab: usize, workspace: &Tensor) -> Result<Tensor> {
    const OP: &str = "embedding.backward";
    let n = tokens.numel();
    let (tiles, units) = (n.div_ceil(TILE), CubeDim::new_1d(UNITS));
    let words = |start: usize, count: usize| workspace.reinterpret(start * size_of::<u32>(), DType::I32, &[count]);
    let room = n.next_multiple_of(64);
    let orders = [words(0, n)?, words(room, n)?];
    let count = tiles << DIGIT;
    let histogram = words(2 * room, count)?;
    let mut passes = 0;
    // All ids lie below `vocab`: bits above it are nought.
    while passes == 0 || (vocab.max(1) - 1) >> (DIGIT as usize * passes) > 0 {
        let (shift, first) = (DIGIT * passes as u32, passes == 0);
        let (order, to) = (&orders[(passes + 1) % 2], &orders[passes % 2]);
        let (ids, from, sums) = (gpu.arg(OP, tokens)?, gpu.arg(OP, order)?, gpu.arg(OP, &histogram)?);
        // SAFETY: `n` positions in each order, and a count for each digit of each tile; the first pass reads no order.
        unsafe {
            let grid = gpu.grid(tiles);
            sort_count_kernel::launch_unchecked(gpu.client(), grid, units, ids, from, sums, n, tiles, shift, first);
        }
        gpu.launched(OP, &[&histogram])?;
        // SAFETY: as above.
        unsafe {
            let sums = gpu.arg(OP, &histogram)?;
            sort_scan_kernel::launch_unchecked(gpu.client(), gpu.grid(1), units, sums, count);
        }
        gpu.launched(OP, &[&histogram])?;
        let (ids, from, sums) = (gpu.arg(OP, tokens)?, gpu.arg(OP, order)?, gpu.arg(OP, &histogram)?);
        let sorted = gpu.arg(OP, to)?;
        // SAFETY: as above; places are sums of the counts, so each below `n` and taken once.
        unsafe {
            let grid = gpu.grid(tiles);
            sort_place_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                ids,
                from,
                sums,
                sorted,
                n,
                tiles,
                shift,
                first,
            );
        }
        gpu.launched(OP, &[to])?;
        passes += 1;
    }
    Ok(orders[(passes + 1) % 2].clone())
}
