//! Encoder attention on the matrix units: tiles as in [`crate::attention::gpu::units`], rows found on the device.

use tilewright_core::Result;

use super::{Given, Sizes};
use crate::Tensor;
use crate::attention::gpu::units::*;
use crate::matmul::gpu::matrix::{Pack, Quad, as_packs, packed, put_pack};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// What decides which keys a query sees.
#[derive(CubeType, Clone, Copy)]
struct Query {
    /// Its row's first token in the pack, and the row's tokens.
    start: usize,
    length: usize,
    position: i32,
    option: i32,
    /// Whether there is such a query.
    there: bool,
}

/// Whether a query sees key `key` of its row.
#[cube]
fn sees(
    query: &Query,
    key: usize,
    positions: &[i32],
    option_ids: &[i32],
    window: i32,
    #[comptime] given: Given,
) -> bool {
    let other = min(key, query.length - 1);
    let mut visible = key < query.length && query.there;
    if comptime![given.window] {
        let mut position = i32::cast_from(other);
        if comptime![given.positions] {
            position = positions[query.start + other];
        }
        // Compared without a difference that could overflow.
        let (low, high) = (min(position, query.position), max(position, query.position));
        let distance = u32::reinterpret(high) - u32::reinterpret(low);
        visible = visible && distance <= u32::reinterpret(window);
    }
    if comptime![given.options] {
        let option = option_ids[query.start + other];
        visible = visible && !(query.option > 0 && option > 0 && option != query.option);
    }
    visible
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn units_kernel<F: Numeric, S: Numeric>(
    q_all: &[Pack],
    kv_all: &[Pack],
    row_starts: &[i32],
    query_starts: &[i32],
    tokens: &[i32],
    positions: &[i32],
    option_ids: &[i32],
    out: &mut [Pack],
    tiles: usize,
    line: usize,
    q_width: usize,
    kv_width: usize,
    key_column: usize,
    window: i32,
    heads: usize,
    scale: f32,
    #[comptime] u: Units,
    #[comptime] given: Given,
    #[define(F, S)] _elems: [ElemType; 2],
) {
    let rows = comptime!(u.rows());
    let others = comptime!(u.others());
    let head = comptime!(u.head);
    let mut k = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.tile_packs())));
    let mut v = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.tile_packs())));
    let mut weights = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.rows() * u.weights_line())));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(PLANES * u.strip()));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(u.units()));
    let h = CUBE_POS / tiles;
    let mut index = CUBE_POS % tiles;
    // The tile of this group when every row is cut into tiles, in order.
    let mut row = 0usize;
    let mut found = 0u32;
    while row < line {
        let count = (usize::cast_from(query_starts[row + 1] - query_starts[row]) + comptime!(u.rows() - 1)) / rows;
        if index < count {
            found = 1u32;
            break;
        }
        index -= count;
        row += 1;
    }
    if found == 1u32 && h < heads {
        let start = usize::cast_from(row_starts[row]);
        let length = usize::cast_from(row_starts[row + 1]) - start;
        let first = usize::cast_from(query_starts[row]) + index * rows;
        let last = min(first + rows, usize::cast_from(query_starts[row + 1]));
        let d_all = heads * head;
        let down = PLANE_POS as usize * comptime!(u.tile[0]);
        let column = unit_column(u);
        let mine = down + unit_row(u);
        let place = min(first + mine, last - 1);
        let mut own = index * rows + min(mine, last - first - 1);
        if comptime![given.tokens] {
            own = usize::cast_from(tokens[place]) - start;
        }
        let mut position = i32::cast_from(own);
        if comptime![given.positions] {
            position = positions[start + own];
        }
        let mut option = 0i32;
        if comptime![given.options] {
            option = option_ids[start + own];
        }
        let query = Query { start, length, position, option, there: first + mine < last };
        let mut from = 0usize;
        let mut to = length;
        if comptime![given.window && !given.tokens && !given.positions] {
            // Keys that some query of the tile may see; tiles are counted from the row's start, whatever runs beside it.
            let half = usize::cast_from(window);
            let begin = index * rows;
            from = (begin - min(begin, half)) / others * others;
            to = min(length, begin + (last - first) + min(half, length));
        }
        stage_rows::<S>(q_all, &mut k, h * head, q_width, first, last, rows, u);
        sync_cube();
        let own_q = own_rows::<F, S>(&k, u);
        let base = start * kv_width + key_column + h * head;
        let mut most = f32::new(-1.0e30f32);
        let mut key = from;
        while key < to {
            sync_cube();
            stage_rows::<S>(kv_all, &mut k, base, kv_width, key, length, others, u);
            sync_cube();
            #[unroll]
            for part in 0..comptime!(u.others() / u.width()) {
                strip::<F, S>(&own_q, &k, &mut patch, comptime!(part * u.width()), u);
                let here = key + comptime!(part * u.width()) + column;
                let mut values = Array::<f32>::new(8usize);
                eight(&mut patch, &mut values, u);
                #[unroll]
                for i in 0..8usize {
                    let score = scale * values[i];
                    let seen = sees(&query, here + i, positions, option_ids, window, given);
                    most = select(seen, max(most, score), most);
                }
                sync_plane();
            }
            key += others;
        }
        let most = row_max(most, &mut shared, u);
        let totals = no_sums(u);
        let mut sum = 0.0f32;
        let mut key = from;
        while key < to {
            sync_cube();
            stage_rows::<S>(kv_all, &mut k, base, kv_width, key, length, others, u);
            stage_rows::<S>(kv_all, &mut v, base + d_all, kv_width, key, length, others, u);
            sync_cube();
            #[unroll]
            for part in 0..comptime!(u.others() / u.width()) {
                strip::<F, S>(&own_q, &k, &mut patch, comptime!(part * u.width()), u);
                let here = key + comptime!(part * u.width()) + column;
                let mut values = Array::<f32>::new(8usize);
                eight(&mut patch, &mut values, u);
                #[unroll]
                for i in 0..8usize {
                    let seen = sees(&query, here + i, positions, option_ids, window, given);
                    let p = select(seen, (scale * values[i] - most).exp(), 0.0f32);
                    values[i] = p;
                    sum += p;
                }
                put_pack::<S>(
                    &mut weights,
                    weights_at(comptime!(part * u.width()), u),
                    packed(&values, u.bf16),
                    u.words,
                );
                sync_plane();
            }
            gather::<F, S>(&weights, &v, &totals, u);
            key += others;
        }
        let sum = row_sum(sum, &mut shared, u);
        let left = last - min(first + down, last);
        write_rows(&totals, &mut patch, out, (first + down) * d_all + h * head, d_all, left, 1.0f32 / sum, u);
    }
}

/// As the plain kernel, for sizes that are not zero.
pub(super) fn forward(
    gpu: &Gpu,
    op: &'static str,
    u: Units,
    sizes: &Sizes,
    given: Given,
    [q, kv, out]: [&Tensor; 3],
    [row_starts, query_starts, tokens, positions, option_ids]: [&Tensor; 5],
) -> Result<()> {
    let tiles = sizes.tiles(u.rows());
    let arg = |t| gpu.arg(op, t);
    // SAFETY: the contract checked that rows, queries, heads and columns lie in their tensors.
    unsafe {
        units_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(tiles * sizes.heads),
            CubeDim::new_1d(u.units() as u32),
            as_packs(gpu, op, q)?,
            as_packs(gpu, op, kv)?,
            arg(row_starts)?,
            arg(query_starts)?,
            arg(tokens)?,
            arg(positions)?,
            arg(option_ids)?,
            as_packs(gpu, op, out)?,
            tiles,
            sizes.line,
            sizes.q_width,
            sizes.kv_width,
            sizes.key_column,
            sizes.window,
            sizes.heads,
            sizes.scale,
            u,
            given,
            u.elems(q.dtype()),
        );
    }
    gpu.launched(op, &[out])
}
