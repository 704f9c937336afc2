//! Flash attention through Vulkan and Metal: a group some queries (or keys) of one head, tiles of the others through shared memory.
//!
//! Heads of 16-bit elements go to the matrix units where the device has those (`units.rs`); the kernels here compute in f32, any head size anywhere.
//! A group has [`tile`] rows of its own and meets the other side 16 rows at a time. Scores and their gradients lie in shared memory, one a
//! unit; what is summed over tiles (rows times head size) lies in registers, at most four elements a unit.

pub(crate) mod units;
pub(crate) mod units_backward;

use tilewright_core::{DType, Result};

use super::cpu::{DecodeTensors, Sizes};
use super::{Backward, Forward};
use crate::Tensor;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// Rows that a group owns: as many as keep its sums within four registers a unit.
pub(crate) fn tile(head: usize) -> usize {
    match head {
        0..=64 => 16,
        65..=128 => 8,
        _ => 4,
    }
}

/// Copies `rows` rows of a head into shared memory, in rows of `head + 1`; rows from `end` on become zero.
#[cube]
pub(crate) fn stage<E: Numeric>(
    from: &[E],
    to: &mut Shared<[f32]>,
    start: usize,
    stride: usize,
    first: usize,
    end: usize,
    #[comptime] rows: usize,
    #[comptime] head: usize,
    #[comptime] bf16: bool,
) {
    let mut i = UNIT_POS as usize;
    while i < comptime!(rows * head) {
        let (r, d) = (i / head, i % head);
        let mut value = 0.0f32;
        if first + r < end {
            value = widen::<E>(from[start + (first + r) * stride + d], bf16);
        }
        to[r * comptime!(head + 1) + d] = value;
        i += CUBE_DIM as usize;
    }
}

/// The product of row `i` of one staged tile and row `j` of another.
#[cube]
pub(crate) fn dot(a: &Shared<[f32]>, b: &Shared<[f32]>, i: usize, j: usize, #[comptime] head: usize) -> f32 {
    let mut sum = 0.0f32;
    for d in 0..head {
        sum = fma(a[i * comptime!(head + 1) + d], b[j * comptime!(head + 1) + d], sum);
    }
    sum
}

#[cube(launch_unchecked)]
fn forward_kernel<E: Numeric>(
    qkv: &[E],
    out: &mut [E],
    lse: &mut [f32],
    t: usize,
    heads: usize,
    from: usize,
    to: usize,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] head: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut q = Shared::<[f32]>::new_slice(comptime!(rows * (head + 1)));
    let mut kv = Shared::<[f32]>::new_slice(comptime!(16 * (head + 1)));
    let mut scores = Shared::<[f32]>::new_slice(256usize);
    // Of each row: the largest score so far, the sum of exponentials, the factor that brings earlier sums to the new maximum.
    let mut most = Shared::<[f32]>::new_slice(16usize);
    let mut sums = Shared::<[f32]>::new_slice(16usize);
    let mut fade = Shared::<[f32]>::new_slice(16usize);
    let unit = UNIT_POS as usize;
    let group = from + CUBE_POS;
    if group < to {
        let tiles = (t + comptime!(rows - 1)) / rows;
        let (line, first) = (group / tiles, group % tiles * rows);
        let (b, h) = (line / heads, line % heads);
        let c = heads * head;
        let start = b * t * 3 * c + h * head;
        stage::<E>(qkv, &mut q, start, 3 * c, first, t, rows, head, bf16);
        if unit < rows {
            most[unit] = -1.0e30f32;
            sums[unit] = 0.0f32;
        }
        let mut acc = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            acc[i] = 0.0f32;
        }
        let (r, j) = (unit / 16, unit % 16);
        let end = min(first + rows, t);
        let mut key = 0usize;
        while key < end {
            stage::<E>(qkv, &mut kv, start + c, 3 * c, key, t, 16usize, head, bf16);
            sync_cube();
            if unit < comptime!(rows * 16) {
                scores[unit] = scale * dot(&q, &kv, r, j, head);
            }
            sync_cube();
            stage::<E>(qkv, &mut kv, start + 2 * c, 3 * c, key, t, 16usize, head, bf16);
            if unit < rows {
                // Keys that the row sees: none is counted that it does not, whatever its score.
                let seen = min(first + unit + 1 - min(key, first + unit + 1), 16usize);
                let before = most[unit];
                let mut largest = before;
                for i in 0..seen {
                    largest = max(largest, scores[unit * 16 + i]);
                }
                let factor = (before - largest).exp();
                let mut sum = sums[unit] * factor;
                for i in 0..seen {
                    let p = (scores[unit * 16 + i] - largest).exp();
                    scores[unit * 16 + i] = p;
                    sum += p;
                }
                most[unit] = largest;
                sums[unit] = sum;
                fade[unit] = factor;
            }
            sync_cube();
            #[unroll]
            for i in 0..4usize {
                let at = unit + i * 256;
                if at < comptime!(rows * head) {
                    let (row, d) = (at / head, at % head);
                    let seen = min(first + row + 1 - min(key, first + row + 1), 16usize);
                    let mut value = acc[i] * fade[row];
                    for k in 0..seen {
                        value = fma(scores[row * 16 + k], kv[k * comptime!(head + 1) + d], value);
                    }
                    acc[i] = value;
                }
            }
            sync_cube();
            key += 16;
        }
        #[unroll]
        for i in 0..4usize {
            let at = unit + i * 256;
            if at < comptime!(rows * head) {
                let (row, d) = (at / head, at % head);
                if first + row < t {
                    out[(b * t + first + row) * c + h * head + d] = narrow::<E>(acc[i] / sums[row], bf16);
                }
            }
        }
        if unit < rows {
            if first + unit < t {
                lse[line * t + first + unit] = most[unit] + sums[unit].ln();
            }
        }
    }
}

// deltas[b, h, t]: the sum over the head of dout * out.
#[cube(launch_unchecked)]
fn deltas_kernel<E: Numeric>(
    out: &[E],
    dout: &[E],
    deltas: &mut [f32],
    n: usize,
    t: usize,
    heads: usize,
    head: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        let (line, row) = (i / t, i % t);
        let start = ((line / heads * t + row) * heads + line % heads) * head;
        let mut sum = 0.0f32;
        for d in 0..head {
            sum += widen::<E>(out[start + d], bf16) * widen::<E>(dout[start + d], bf16);
        }
        deltas[i] = sum;
        i += step;
    }
}

#[cube(launch_unchecked)]
fn queries_kernel<E: Numeric>(
    qkv: &[E],
    dout: &[E],
    lse: &[f32],
    deltas: &[f32],
    dqkv: &mut [E],
    t: usize,
    heads: usize,
    from: usize,
    to: usize,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] head: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut q = Shared::<[f32]>::new_slice(comptime!(rows * (head + 1)));
    let mut d_out = Shared::<[f32]>::new_slice(comptime!(rows * (head + 1)));
    let mut kv = Shared::<[f32]>::new_slice(comptime!(16 * (head + 1)));
    let mut slopes = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let group = from + CUBE_POS;
    if group < to {
        let tiles = (t + comptime!(rows - 1)) / rows;
        let (line, first) = (group / tiles, group % tiles * rows);
        let (b, h) = (line / heads, line % heads);
        let c = heads * head;
        let start = b * t * 3 * c + h * head;
        stage::<E>(qkv, &mut q, start, 3 * c, first, t, rows, head, bf16);
        stage::<E>(dout, &mut d_out, b * t * c + h * head, c, first, t, rows, head, bf16);
        let mut acc = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            acc[i] = 0.0f32;
        }
        let (r, j) = (unit / 16, unit % 16);
        let own = min(first + r, t - 1);
        let (log, delta) = (lse[line * t + own], deltas[line * t + own]);
        let end = min(first + rows, t);
        let mut key = 0usize;
        while key < end {
            stage::<E>(qkv, &mut kv, start + 2 * c, 3 * c, key, t, 16usize, head, bf16);
            sync_cube();
            let mut gradient = 0.0f32;
            if unit < comptime!(rows * 16) {
                gradient = dot(&d_out, &kv, r, j, head);
            }
            sync_cube();
            stage::<E>(qkv, &mut kv, start + c, 3 * c, key, t, 16usize, head, bf16);
            sync_cube();
            if unit < comptime!(rows * 16) {
                let p = (scale * dot(&q, &kv, r, j, head) - log).exp();
                slopes[unit] = p * (gradient - delta) * scale;
            }
            sync_cube();
            #[unroll]
            for i in 0..4usize {
                let at = unit + i * 256;
                if at < comptime!(rows * head) {
                    let (row, d) = (at / head, at % head);
                    let seen = min(first + row + 1 - min(key, first + row + 1), 16usize);
                    let mut value = acc[i];
                    for k in 0..seen {
                        value = fma(slopes[row * 16 + k], kv[k * comptime!(head + 1) + d], value);
                    }
                    acc[i] = value;
                }
            }
            sync_cube();
            key += 16;
        }
        #[unroll]
        for i in 0..4usize {
            let at = unit + i * 256;
            if at < comptime!(rows * head) {
                let (row, d) = (at / head, at % head);
                if first + row < t {
                    dqkv[start + (first + row) * 3 * c + d] = narrow::<E>(acc[i], bf16);
                }
            }
        }
    }
}

#[cube(launch_unchecked)]
fn keys_kernel<E: Numeric>(
    qkv: &[E],
    dout: &[E],
    lse: &[f32],
    deltas: &[f32],
    dqkv: &mut [E],
    t: usize,
    heads: usize,
    from: usize,
    to: usize,
    scale: f32,
    #[comptime] rows: usize,
    #[comptime] head: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut k = Shared::<[f32]>::new_slice(comptime!(rows * (head + 1)));
    let mut v = Shared::<[f32]>::new_slice(comptime!(rows * (head + 1)));
    let mut other = Shared::<[f32]>::new_slice(comptime!(16 * (head + 1)));
    let mut weights = Shared::<[f32]>::new_slice(256usize);
    let mut slopes = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let group = from + CUBE_POS;
    if group < to {
        let tiles = (t + comptime!(rows - 1)) / rows;
        let (line, first) = (group / tiles, group % tiles * rows);
        let (b, h) = (line / heads, line % heads);
        let c = heads * head;
        let start = b * t * 3 * c + h * head;
        stage::<E>(qkv, &mut k, start + c, 3 * c, first, t, rows, head, bf16);
        stage::<E>(qkv, &mut v, start + 2 * c, 3 * c, first, t, rows, head, bf16);
        let mut dk = Array::<f32>::new(4usize);
        let mut dv = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            dk[i] = 0.0f32;
            dv[i] = 0.0f32;
        }
        // A row of the group is a key, a column a query, which sees the key from its own place on.
        let (r, j) = (unit / 16, unit % 16);
        let mut query = first / 16 * 16;
        while query < t {
            stage::<E>(qkv, &mut other, start, 3 * c, query, t, 16usize, head, bf16);
            sync_cube();
            let place = min(query + j, t - 1);
            let seen = query + j < t && query + j >= first + r;
            let mut p = 0.0f32;
            if unit < comptime!(rows * 16) {
                p = select(seen, (scale * dot(&k, &other, r, j, head) - lse[line * t + place]).exp(), 0.0f32);
                weights[unit] = p;
            }
            sync_cube();
            stage::<E>(dout, &mut other, b * t * c + h * head, c, query, t, 16usize, head, bf16);
            sync_cube();
            if unit < comptime!(rows * 16) {
                let gradient = dot(&v, &other, r, j, head);
                slopes[unit] = select(seen, p * (gradient - deltas[line * t + place]) * scale, 0.0f32);
            }
            #[unroll]
            for i in 0..4usize {
                let at = unit + i * 256;
                if at < comptime!(rows * head) {
                    let (row, d) = (at / head, at % head);
                    // Queries before the key do not see it: what they hold is not even multiplied by zero.
                    let begin = min(first + row - min(query, first + row), 16usize);
                    let mut value = dv[i];
                    for q in begin..16usize {
                        value = fma(weights[row * 16 + q], other[q * comptime!(head + 1) + d], value);
                    }
                    dv[i] = value;
                }
            }
            sync_cube();
            stage::<E>(qkv, &mut other, start, 3 * c, query, t, 16usize, head, bf16);
            sync_cube();
            #[unroll]
            for i in 0..4usize {
                let at = unit + i * 256;
                if at < comptime!(rows * head) {
                    let (row, d) = (at / head, at % head);
                    let begin = min(first + row - min(query, first + row), 16usize);
                    let mut value = dk[i];
                    for q in begin..16usize {
                        value = fma(slopes[row * 16 + q], other[q * comptime!(head + 1) + d], value);
                    }
                    dk[i] = value;
                }
            }
            sync_cube();
            query += 16;
        }
        #[unroll]
        for i in 0..4usize {
            let at = unit + i * 256;
            if at < comptime!(rows * head) {
                let (row, d) = (at / head, at % head);
                if first + row < t {
                    dqkv[start + (first + row) * 3 * c + c + d] = narrow::<E>(dk[i], bf16);
                    dqkv[start + (first + row) * 3 * c + 2 * c + d] = narrow::<E>(dv[i], bf16);
                }
            }
        }
    }
}

// One query against the cache, whose row `position` it fills first.
#[cube(launch_unchecked)]
fn decode_kernel<E: Numeric>(
    qkv: &[E],
    k_cache: &mut [E],
    v_cache: &mut [E],
    out: &mut [E],
    heads: usize,
    head: usize,
    position: usize,
    longest: usize,
    groups: usize,
    scale: f32,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let mut scores = Shared::<[f32]>::new_slice(256usize);
    let mut q = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    if CUBE_POS < groups {
        let (b, h) = (CUBE_POS / heads, CUBE_POS % heads);
        let c = heads * head;
        let start = b * 3 * c + h * head;
        let cache = b * longest * c + h * head;
        if unit < head {
            q[unit] = widen::<E>(qkv[start + unit], bf16);
            k_cache[cache + position * c + unit] = qkv[start + c + unit];
            v_cache[cache + position * c + unit] = qkv[start + 2 * c + unit];
        }
        sync_cube();
        let mut most = f32::new(-1.0e30f32);
        let mut sum = 0.0f32;
        let mut acc = 0.0f32;
        let mut key = 0usize;
        while key <= position {
            let here = key + unit;
            let mut score = f32::new(-1.0e30f32);
            if here < position {
                score = 0.0f32;
                for d in 0..head {
                    score = fma(q[d], widen::<E>(k_cache[cache + here * c + d], bf16), score);
                }
                score *= scale;
            } else if here == position {
                // Its own key, from where another unit may just have put it.
                score = 0.0f32;
                for d in 0..head {
                    score = fma(q[d], widen::<E>(qkv[start + c + d], bf16), score);
                }
                score *= scale;
            }
            let largest = max(most, group_max(score, &mut shared));
            let p = select(here <= position, (score - largest).exp(), 0.0f32);
            scores[unit] = p;
            let factor = (most - largest).exp();
            sum = sum * factor + group_sum(p, &mut shared);
            most = largest;
            if unit < head {
                acc *= factor;
                let count = min(position + 1 - key, 256usize);
                for i in 0..count {
                    if key + i == position {
                        acc = fma(scores[i], widen::<E>(qkv[start + 2 * c + unit], bf16), acc);
                    } else {
                        acc = fma(scores[i], widen::<E>(v_cache[cache + (key + i) * c + unit], bf16), acc);
                    }
                }
            }
            sync_cube();
            key += 256;
        }
        if unit < head {
            out[b * c + h * head + unit] = narrow::<E>(acc / sum, bf16);
        }
    }
}

/// One number a query for the backward.
pub(super) fn workspace_floats(sizes: Sizes) -> usize {
    sizes.b * sizes.heads * sizes.t
}

fn scale(head: usize) -> f32 {
    (1.0 / (head as f64).sqrt()) as f32
}

/// Operations of so many products of all queries and all keys. What is masked counts too: the rows that see most may share a launch.
fn flops(sizes: Sizes, products: u64) -> u64 {
    2 * products * (sizes.t * sizes.t) as u64 * (sizes.b * sizes.heads * sizes.head) as u64
}

pub(super) fn forward(gpu: &Gpu, sizes: Sizes, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "attention.forward";
    let (Sizes { b, t, heads, head }, Forward { qkv, out, lse, .. }) = (sizes, args);
    let Storage { elem, bf16 } = gpu.storage(OP, qkv.dtype())?;
    let rows = tile(head);
    let groups = b * heads * t.div_ceil(rows);
    if groups == 0 {
        return Ok(());
    }
    if let Some(units) = units::Units::of(gpu, qkv.dtype(), head, &[qkv, out]) {
        return units::forward(gpu, OP, units, sizes, [qkv, out, lse]);
    }
    // SAFETY: the tensors have the sizes of the call, checked by the contract.
    gpu.by_groups(false, groups, flops(sizes, 2), |from, count| unsafe {
        forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(count),
            CubeDim::new_1d(UNITS),
            gpu.arg(OP, qkv)?,
            gpu.arg(OP, out)?,
            gpu.arg(OP, lse)?,
            t,
            heads,
            from,
            from + count,
            scale(head),
            rows,
            head,
            bf16,
            elem,
        );
        gpu.launched(OP, &[out, lse])
    })
}

pub(super) fn backward(gpu: &Gpu, sizes: Sizes, args: &Backward<'_>, deltas: &Tensor) -> Result<()> {
    const OP: &str = "attention.backward";
    let (Sizes { b, t, heads, head }, Backward { qkv, out, lse, dout, dqkv, .. }) = (sizes, args);
    let Storage { elem, bf16 } = gpu.storage(OP, qkv.dtype())?;
    let (rows, n) = (tile(head), workspace_floats(sizes));
    if n == 0 {
        return Ok(());
    }
    debug_assert_eq!(deltas.dtype(), DType::F32);
    if let Some(units) = units::Units::of(gpu, qkv.dtype(), head, &[qkv, out, dout, dqkv]) {
        return units_backward::backward(gpu, OP, units, sizes, [qkv, out, dout, lse, deltas, dqkv]);
    }
    let groups = b * heads * t.div_ceil(rows);
    let arg = |t: &Tensor| gpu.arg(OP, t);
    // SAFETY: as in `forward`; the workspace holds a number a query and head.
    unsafe {
        let (grid, units) = (gpu.spread(n), CubeDim::new_1d(UNITS));
        let (y, dy, to) = (arg(out)?, arg(dout)?, arg(deltas)?);
        deltas_kernel::launch_unchecked(gpu.client(), grid, units, y, dy, to, n, t, heads, head, bf16, elem);
    }
    gpu.launched(OP, &[deltas])?;
    for (of_queries, products) in [(true, 3), (false, 4)] {
        // SAFETY: as above.
        gpu.by_groups(false, groups, flops(sizes, products), |from, count| unsafe {
            let (client, grid, units) = (gpu.client(), gpu.grid(count), CubeDim::new_1d(UNITS));
            let (x, dy, logs, sums, dx) = (arg(qkv)?, arg(dout)?, arg(lse)?, arg(deltas)?, arg(dqkv)?);
            let (to, scale) = (from + count, scale(head));
            if of_queries {
                queries_kernel::launch_unchecked(
                    client, grid, units, x, dy, logs, sums, dx, t, heads, from, to, scale, rows, head, bf16, elem,
                );
            } else {
                keys_kernel::launch_unchecked(
                    client, grid, units, x, dy, logs, sums, dx, t, heads, from, to, scale, rows, head, bf16, elem,
                );
            }
            gpu.launched(OP, &[dqkv])
        })?;
    }
    Ok(())
}

pub(super) fn decode(gpu: &Gpu, b: usize, longest: usize, args: &DecodeTensors<'_>) -> Result<()> {
    const OP: &str = "attention.decode";
    let DecodeTensors { heads, head, position, qkv, k_cache, v_cache, out } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, qkv.dtype())?;
    let groups = b * heads;
    if groups == 0 {
        return Ok(());
    }
    let (from, keys) = (gpu.arg(OP, qkv)?, gpu.arg(OP, k_cache)?);
    let (values, to) = (gpu.arg(OP, v_cache)?, gpu.arg(OP, out)?);
    // SAFETY: the tensors have the sizes of the call, and `position` lies in the caches.
    unsafe {
        decode_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(groups),
            CubeDim::new_1d(UNITS),
            from,
            keys,
            values,
            to,
            heads,
            head,
            position,
            longest,
            groups,
            scale(head),
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[out, k_cache, v_cache])
}
