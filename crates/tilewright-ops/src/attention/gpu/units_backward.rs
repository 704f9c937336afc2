//! Attention's backward pass on the matrix units: gradients of queries by groups that own queries, those of keys and values by groups that own keys. Both
//! make scores and their gradients again, strip by strip.

use tilewright_core::Result;

use super::super::cpu::Sizes;
use super::units::*;
use crate::Tensor;
use crate::matmul::gpu::slices::put_pack;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

// deltas[b, h, t], the sum over the head of dout * out, is left for the keys.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn units_queries_kernel<F: Numeric, S: Numeric>(
    qkv: &[Pack],
    out: &[Pack],
    dout: &[Pack],
    lse: &[f32],
    deltas: &mut [f32],
    dqkv: &mut [Pack],
    t: usize,
    heads: usize,
    lines: usize,
    from: usize,
    to: usize,
    scale: f32,
    #[comptime] u: Units,
    #[define(F, S)] _elems: [ElemType; 2],
) {
    let rows = comptime!(u.rows());
    let others = comptime!(u.others());
    let head = comptime!(u.head);
    // A tile of keys and one of values behind it.
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.both_packs())));
    let second = comptime!(u.tile_packs());
    let mut weights = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.rows() * u.weights_line())));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(PLANES * u.strip()));
    let group = from + CUBE_POS;
    if group < to {
        // The longest first.
        let tiles = (t + rows - 1) / rows;
        let (line, first) = (group % lines, (tiles - 1 - group / lines) * rows);
        let (b, h) = (line / heads, line % heads);
        let c = heads * head;
        let start = b * t * 3 * c + h * head;
        let down = PLANE_POS as usize * comptime!(u.tile[0]);
        let query = first + down + unit_row(u);
        let column = unit_column(u);
        stage_rows::<S>(qkv, &mut memory, start, 3 * c, first, t, rows, u);
        sync_cube();
        let q_own = own_rows::<F, S>(&memory, u);
        sync_cube();
        stage_rows::<S>(dout, &mut memory, b * t * c + h * head, c, first, t, rows, u);
        sync_cube();
        let d_own = own_rows::<F, S>(&memory, u);
        let own = line * t + min(query, t - 1);
        let place = ((b * t + min(query, t - 1)) * heads + h) * head;
        let (log, delta) = (lse[own], row_dot(out, place, dout, place, u));
        if column == 0 && query < t {
            deltas[own] = delta;
        }
        let totals = no_sums(u);
        let end = min(first + rows, t);
        let mut keys = Array::<Pack>::new(comptime!(u.share(u.others())));
        let mut values_of = Array::<Pack>::new(comptime!(u.share(u.others())));
        fetch_rows(qkv, &mut keys, start + c, 3 * c, 0usize, t, others, u);
        fetch_rows(qkv, &mut values_of, start + 2 * c, 3 * c, 0usize, t, others, u);
        let mut key = 0usize;
        while key < end {
            sync_cube();
            put_rows::<S>(&mut memory, &keys, 0usize, others, u);
            put_rows::<S>(&mut memory, &values_of, second, others, u);
            sync_cube();
            // The next tiles are on their way meanwhile.
            if key + others < end {
                fetch_rows(qkv, &mut keys, start + c, 3 * c, key + others, t, others, u);
                fetch_rows(qkv, &mut values_of, start + 2 * c, 3 * c, key + others, t, others, u);
            }
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                let mut weight = Array::<f32>::new(comptime!(u.strips * 8));
                strip::<F, S>(&q_own, &memory, 0usize, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        weight[comptime!(part * 8) + i] = (scale * values[i] - log).exp();
                    }
                }
                sync_plane();
                strip::<F, S>(&d_own, &memory, second, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let from = key + comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let slope = weight[comptime!(part * 8) + i] * (values[i] - delta) * scale;
                        values[i] = select(from + i <= query, slope, 0.0f32);
                    }
                    let place = weights_at(comptime!(some * u.columns() + part * u.width()), u);
                    put_pack::<S>(&mut weights, place, packed(&values, u.bf16), u.words);
                }
                sync_plane();
            }
            gather::<F, S>(&weights, &memory, 0usize, &totals, u);
            key += others;
        }
        let place = start + (first + down) * 3 * c;
        let broken = write_rows(&totals, &mut patch, dqkv, place, 3 * c, t - min(first + down, t), 1.0f32, u);
        if broken > 0u32 {
            let (q_row, d_row) = (start + query * 3 * c, (b * t + query) * c + h * head);
            for j in 0..comptime!(u.head / u.width()) {
                let at = j * comptime!(u.width()) + column;
                let mut values = zeros();
                for key in 0..query + 1 {
                    let other = start + c + key * 3 * c;
                    let p = (scale * row_dot(qkv, q_row, qkv, other, u) - log).exp();
                    let slope = p * (row_dot(dout, d_row, qkv, other + c, u) - delta) * scale;
                    add_eight(&mut values, slope, qkv, other + at, u);
                }
                dqkv[(q_row + at) / 8] = packed(&values, u.bf16);
            }
        }
    }
}

#[cube(launch_unchecked)]
fn units_keys_kernel<F: Numeric, S: Numeric>(
    qkv: &[Pack],
    dout: &[Pack],
    lse: &[f32],
    deltas: &[f32],
    dqkv: &mut [Pack],
    t: usize,
    heads: usize,
    lines: usize,
    from: usize,
    to: usize,
    scale: f32,
    #[comptime] u: Units,
    #[define(F, S)] _elems: [ElemType; 2],
) {
    let rows = comptime!(u.rows());
    let others = comptime!(u.others());
    let head = comptime!(u.head);
    // A tile of queries and one of gradients behind it.
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.both_packs())));
    let second = comptime!(u.tile_packs());
    let mut weights = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.rows() * u.weights_line())));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(PLANES * u.strip()));
    // Of each query of a tile.
    let mut logs = Shared::<[f32]>::new_slice(comptime!(u.others()));
    let mut sums = Shared::<[f32]>::new_slice(comptime!(u.others()));
    let unit = UNIT_POS as usize;
    let group = from + CUBE_POS;
    if group < to {
        // Keys that most queries see come first.
        let (line, first) = (group % lines, group / lines * rows);
        let (b, h) = (line / heads, line % heads);
        let c = heads * head;
        let start = b * t * 3 * c + h * head;
        let down = PLANE_POS as usize * comptime!(u.tile[0]);
        let key = first + down + unit_row(u);
        let column = unit_column(u);
        stage_rows::<S>(qkv, &mut memory, start + c, 3 * c, first, t, rows, u);
        sync_cube();
        let k_own = own_rows::<F, S>(&memory, u);
        sync_cube();
        stage_rows::<S>(qkv, &mut memory, start + 2 * c, 3 * c, first, t, rows, u);
        sync_cube();
        let v_own = own_rows::<F, S>(&memory, u);
        let dk = no_sums(u);
        let dv = no_sums(u);
        let from_query = first / others * others;
        let mut queries = Array::<Pack>::new(comptime!(u.share(u.others())));
        let mut slopes_of = Array::<Pack>::new(comptime!(u.share(u.others())));
        let douts = b * t * c + h * head;
        fetch_rows(qkv, &mut queries, start, 3 * c, from_query, t, others, u);
        fetch_rows(dout, &mut slopes_of, douts, c, from_query, t, others, u);
        let mut query = from_query;
        while query < t {
            sync_cube();
            put_rows::<S>(&mut memory, &queries, 0usize, others, u);
            put_rows::<S>(&mut memory, &slopes_of, second, others, u);
            if unit < others {
                let own = line * t + min(query + unit, t - 1);
                logs[unit] = lse[own];
                sums[unit] = deltas[own];
            }
            sync_cube();
            // The next tiles are on their way meanwhile.
            if query + others < t {
                fetch_rows(qkv, &mut queries, start, 3 * c, query + others, t, others, u);
                fetch_rows(dout, &mut slopes_of, douts, c, query + others, t, others, u);
            }
            // Probabilities of the whole tile stay with their units until the gradients of the scores are there.
            let mut weight = Array::<f32>::new(comptime!(u.others() / u.sharing()));
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                strip::<F, S>(&k_own, &memory, 0usize, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let from = comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let p = (scale * values[i] - logs[from + i]).exp();
                        let place = query + from + i;
                        let seen = place >= key && place < t;
                        values[i] = select(seen, p, 0.0f32);
                        weight[comptime!((some * u.strips + part) * 8) + i] = values[i];
                    }
                    let place = weights_at(comptime!(some * u.columns() + part * u.width()), u);
                    put_pack::<S>(&mut weights, place, packed(&values, u.bf16), u.words);
                }
                sync_plane();
            }
            gather::<F, S>(&weights, &memory, second, &dv, u);
            sync_plane();
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                strip::<F, S>(&v_own, &memory, second, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let from = comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let slope =
                            weight[comptime!((some * u.strips + part) * 8) + i] * (values[i] - sums[from + i]) * scale;
                        let place = query + from + i;
                        let seen = place >= key && place < t;
                        values[i] = select(seen, slope, 0.0f32);
                    }
                    let place = weights_at(comptime!(some * u.columns() + part * u.width()), u);
                    put_pack::<S>(&mut weights, place, packed(&values, u.bf16), u.words);
                }
                sync_plane();
            }
            gather::<F, S>(&weights, &memory, 0usize, &dk, u);
            query += others;
        }
        let place = start + c + (first + down) * 3 * c;
        let left = t - min(first + down, t);
        let broken = write_rows(&dk, &mut patch, dqkv, place, 3 * c, left, 1.0f32, u)
            | write_rows(&dv, &mut patch, dqkv, place + c, 3 * c, left, 1.0f32, u);
        if broken > 0u32 {
            let own = start + c + key * 3 * c;
            for j in 0..comptime!(u.head / u.width()) {
                let at = j * comptime!(u.width()) + column;
                let mut of_key = zeros();
                let mut of_value = zeros();
                for query in key..t {
                    let (q_row, d_row) = (start + query * 3 * c, (b * t + query) * c + h * head);
                    let p = (scale * row_dot(qkv, own, qkv, q_row, u) - lse[line * t + query]).exp();
                    let gradient = row_dot(qkv, own + c, dout, d_row, u);
                    add_eight(&mut of_value, p, dout, d_row + at, u);
                    add_eight(&mut of_key, p * (gradient - deltas[line * t + query]) * scale, qkv, q_row + at, u);
                }
                dqkv[(own + at) / 8] = packed(&of_key, u.bf16);
                dqkv[(own + c + at) / 8] = packed(&of_value, u.bf16);
            }
        }
    }
}

/// What the pass consists of.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Part {
    Queries,
    Keys,
}

/// See [`super::backward`]; the sizes are not zero.
pub(super) fn backward(gpu: &Gpu, op: &'static str, u: Units, sizes: Sizes, tensors: [&Tensor; 6]) -> Result<()> {
    let Sizes { b, t, heads, .. } = sizes;
    [Part::Queries, Part::Keys].into_iter().try_for_each(|p| part(gpu, op, u, [b, t, heads], p, tensors))
}

/// One part; keys need what queries left in `deltas`.
pub(crate) fn part(
    gpu: &Gpu,
    op: &'static str,
    u: Units,
    [b, t, heads]: [usize; 3],
    part: Part,
    [qkv, out, dout, lse, deltas, dqkv]: [&Tensor; 6],
) -> Result<()> {
    let sizes = Sizes { b, t, heads, head: u.head };
    let (lines, client, units) = (b * heads, gpu.client(), CubeDim::new_1d(u.units() as u32));
    let (scale, elems) = (super::scale(u.head), u.elems(qkv.dtype()));
    let products = match part {
        Part::Queries => 3,
        Part::Keys => 4,
    };
    // SAFETY: the tensors have the sizes of the call, checked by the contract.
    gpu.by_groups(true, lines * t.div_ceil(u.rows()), super::flops(sizes, products), |from, count| unsafe {
        let grid = gpu.grid(count);
        let (x, dy, dx) = (as_packs(gpu, op, qkv)?, as_packs(gpu, op, dout)?, as_packs(gpu, op, dqkv)?);
        let (logs, sums, to) = (gpu.arg(op, lse)?, gpu.arg(op, deltas)?, from + count);
        if matches!(part, Part::Queries) {
            let y = as_packs(gpu, op, out)?;
            units_queries_kernel::launch_unchecked(
                client, grid, units, x, y, dy, logs, sums, dx, t, heads, lines, from, to, scale, u, elems,
            );
        } else {
            units_keys_kernel::launch_unchecked(
                client, grid, units, x, dy, logs, sums, dx, t, heads, lines, from, to, scale, u, elems,
            );
        }
        gpu.launched(op, &[dqkv, deltas])
    })
}
