//! Encoder attention on the matrix units: tiles as in [`crate::attention::gpu::units`], rows found on the device.

use tilewright_core::Result;

use super::{Given, Sizes, keys_of, query_of, sees, tile_of};
use crate::Tensor;
use crate::attention::gpu::units::*;
use crate::matmul::gpu::slices::put_pack;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

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
    from_group: usize,
    to_group: usize,
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
    // A tile of keys and one of values behind it.
    let mut memory = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.both_packs())));
    let second = comptime!(u.tile_packs());
    let mut weights = Shared::<[Vector<S, Const<4>>]>::new_slice(comptime!(u.vectors(u.rows() * u.weights_line())));
    let mut patch = Shared::<[Quad]>::new_slice(comptime!(PLANES * u.strip()));
    let mut shared = Shared::<[f32]>::new_slice(comptime!(u.units()));
    let group = from_group + CUBE_POS;
    let h = group / tiles;
    let tile = tile_of(row_starts, query_starts, line, group % tiles, rows);
    if tile.found == 1u32 && group < to_group {
        let (start, length, first, last) = (tile.start, tile.length, tile.first, tile.last);
        let d_all = heads * head;
        let down = PLANE_POS as usize * comptime!(u.tile[0]);
        let column = unit_column(u);
        let mine = down + unit_row(u);
        let query = query_of(&tile, mine, tokens, positions, option_ids, rows, given);
        let (from, to) = keys_of(&tile, window, rows, others, given);
        stage_rows::<S>(q_all, &mut memory, h * head, q_width, first, last, rows, u);
        sync_cube();
        let own_q = own_rows::<F, S>(&memory, u);
        let base = start * kv_width + key_column + h * head;
        let mut most = f32::new(-1.0e30f32);
        let mut keys = Array::<Pack>::new(comptime!(u.share(u.others())));
        let mut values_of = Array::<Pack>::new(comptime!(u.share(u.others())));
        fetch_rows(kv_all, &mut keys, base, kv_width, from, length, others, u);
        let mut key = from;
        while key < to {
            sync_cube();
            put_rows::<S>(&mut memory, &keys, 0usize, others, u);
            sync_cube();
            // The next tile is on its way meanwhile.
            fetch_rows(kv_all, &mut keys, base, kv_width, key + others, length, others, u);
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                strip::<F, S>(&own_q, &memory, 0usize, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let here = key + comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let score = scale * values[i];
                        let seen = sees(&tile, &query, here + i, positions, option_ids, window, given);
                        most = select(seen, max(most, score), most);
                    }
                }
                sync_plane();
            }
            key += others;
        }
        let most = row_max(most, &mut shared, u);
        let totals = no_sums(u);
        let mut sum = 0.0f32;
        fetch_rows(kv_all, &mut keys, base, kv_width, from, length, others, u);
        fetch_rows(kv_all, &mut values_of, base + d_all, kv_width, from, length, others, u);
        let mut key = from;
        while key < to {
            sync_cube();
            put_rows::<S>(&mut memory, &keys, 0usize, others, u);
            put_rows::<S>(&mut memory, &values_of, second, others, u);
            sync_cube();
            fetch_rows(kv_all, &mut keys, base, kv_width, key + others, length, others, u);
            fetch_rows(kv_all, &mut values_of, base + d_all, kv_width, key + others, length, others, u);
            #[unroll]
            for some in 0..comptime!(u.others() / u.columns()) {
                strip::<F, S>(&own_q, &memory, 0usize, &mut patch, comptime!(some * u.columns()), u);
                #[unroll]
                for part in 0..comptime!(u.strips) {
                    let here = key + comptime!(some * u.columns() + part * u.width()) + column;
                    let mut values = Array::<f32>::new(8usize);
                    eight(&mut patch, &mut values, part, u);
                    #[unroll]
                    for i in 0..8usize {
                        let seen = sees(&tile, &query, here + i, positions, option_ids, window, given);
                        let p = select(seen, (scale * values[i] - most).exp(), 0.0f32);
                        values[i] = p;
                        sum += p;
                    }
                    let place = weights_at(comptime!(some * u.columns() + part * u.width()), u);
                    put_pack::<S>(&mut weights, place, packed(&values, u.bf16), u.words);
                }
                sync_plane();
            }
            gather::<F, S>(&weights, &memory, second, &totals, u);
            key += others;
        }
        let sum = row_sum(sum, &mut shared, u);
        let left = last - min(first + down, last);
        let place = (first + down) * d_all + h * head;
        let broken = write_rows(&totals, &mut patch, out, place, d_all, left, 1.0f32 / sum, u);
        if broken > 0u32 {
            let own = (first + mine) * q_width + h * head;
            for j in 0..comptime!(u.head / u.width()) {
                let at = j * comptime!(u.width()) + column;
                let mut values = zeros();
                for key in from..to {
                    if sees(&tile, &query, key, positions, option_ids, window, given) {
                        let other = base + key * kv_width;
                        let p = (scale * row_dot(q_all, own, kv_all, other, u) - most).exp() / sum;
                        add_eight(&mut values, p, kv_all, other + d_all + at, u);
                    }
                }
                out[((first + mine) * d_all + h * head + at) / 8] = packed(&values, u.bf16);
            }
        }
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
    flops: u64,
) -> Result<()> {
    let tiles = sizes.tiles(u.rows());
    let arg = |t| gpu.arg(op, t);
    // Scores are made twice.
    // SAFETY: the contract checked that rows, queries, heads and columns lie in their tensors.
    gpu.by_groups(true, tiles * sizes.heads, 3 * flops, |from, count| unsafe {
        units_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(count),
            CubeDim::new_1d(u.units() as u32),
            as_packs(gpu, op, q)?,
            as_packs(gpu, op, kv)?,
            arg(row_starts)?,
            arg(query_starts)?,
            arg(tokens)?,
            arg(positions)?,
            arg(option_ids)?,
            as_packs(gpu, op, out)?,
            from,
            from + count,
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
        gpu.launched(op, &[out])
    })
}
