//! Encoder attention through Vulkan and Metal: tiles as in [`crate::attention`], rows found on the device; on the matrix units where heads are of 16-bit
//! elements and the device has those.

mod units;

use tilewright_core::Result;

use super::Forward;
use crate::attention::gpu::units::Units;
use crate::attention::gpu::{dot, stage, tile};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// Which of a call's optional arguments there are: part of a kernel's identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Given {
    tokens: bool,
    window: bool,
    positions: bool,
    options: bool,
    bf16: bool,
}

/// Queries of one row that a group owns.
#[derive(CubeType, Clone, Copy)]
struct Tile {
    /// 0 for groups behind the last tile.
    found: u32,
    /// Which of the row's tiles it is.
    index: usize,
    /// The row's first token, and its tokens.
    start: usize,
    length: usize,
    /// Queries `first..last`.
    first: usize,
    last: usize,
}

/// Tile `number` when every row is cut into tiles, in order.
#[cube]
fn tile_of(row_starts: &[i32], query_starts: &[i32], line: usize, number: usize, #[comptime] rows: usize) -> Tile {
    let mut index = number;
    let mut row = 0usize;
    let mut found = 0u32;
    while row < line {
        let count = (usize::cast_from(query_starts[row + 1] - query_starts[row]) + comptime!(rows - 1)) / rows;
        if index < count {
            found = 1u32;
            break;
        }
        index -= count;
        row += 1;
    }
    let row = min(row, line - 1);
    let start = usize::cast_from(row_starts[row]);
    let first = usize::cast_from(query_starts[row]) + index * rows;
    Tile {
        found,
        index,
        start,
        length: usize::cast_from(row_starts[row + 1]) - start,
        first,
        last: min(first + rows, usize::cast_from(query_starts[row + 1])),
    }
}

/// What decides which keys a query sees.
#[derive(CubeType, Clone, Copy)]
struct Query {
    position: i32,
    option: i32,
    /// Whether there is such a query.
    there: bool,
}

/// Query `mine` of a tile.
#[cube]
fn query_of(
    tile: &Tile,
    mine: usize,
    tokens: &[i32],
    positions: &[i32],
    option_ids: &[i32],
    #[comptime] rows: usize,
    #[comptime] given: Given,
) -> Query {
    let mut own = tile.index * rows + min(mine, tile.last - tile.first - 1);
    if comptime![given.tokens] {
        own = usize::cast_from(tokens[min(tile.first + mine, tile.last - 1)]) - tile.start;
    }
    let mut position = i32::cast_from(own);
    if comptime![given.positions] {
        position = positions[tile.start + own];
    }
    let mut option = 0i32;
    if comptime![given.options] {
        option = option_ids[tile.start + own];
    }
    Query { position, option, there: tile.first + mine < tile.last }
}

/// Whether a query sees key `key` of its row.
#[cube]
fn sees(
    tile: &Tile,
    query: &Query,
    key: usize,
    positions: &[i32],
    option_ids: &[i32],
    window: i32,
    #[comptime] given: Given,
) -> bool {
    let other = min(key, tile.length - 1);
    let mut visible = key < tile.length && query.there;
    if comptime![given.window] {
        let mut position = i32::cast_from(other);
        if comptime![given.positions] {
            position = positions[tile.start + other];
        }
        // Compared without a difference that could overflow.
        let (low, high) = (min(position, query.position), max(position, query.position));
        let distance = u32::reinterpret(high) - u32::reinterpret(low);
        visible = visible && distance <= u32::reinterpret(window);
    }
    if comptime![given.options] {
        let option = option_ids[tile.start + other];
        visible = visible && !(query.option > 0 && option > 0 && option != query.option);
    }
    visible
}

/// Keys that some query of the tile may see, from a multiple of `step` on: tiles are counted from the row's start, whatever runs beside it.
#[cube]
fn keys_of(
    tile: &Tile,
    window: i32,
    #[comptime] rows: usize,
    #[comptime] step: usize,
    #[comptime] given: Given,
) -> (usize, usize) {
    let mut from = 0usize;
    let mut to = tile.length;
    if comptime![given.window && !given.tokens && !given.positions] {
        let half = usize::cast_from(window);
        let begin = tile.index * rows;
        from = (begin - min(begin, half)) / step * step;
        to = min(tile.length, begin + (tile.last - tile.first) + min(half, tile.length));
    }
    (from, to)
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn forward_kernel<E: Numeric>(
    q_all: &[E],
    kv_all: &[E],
    row_starts: &[i32],
    query_starts: &[i32],
    tokens: &[i32],
    positions: &[i32],
    option_ids: &[i32],
    out: &mut [E],
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
    #[comptime] rows: usize,
    #[comptime] head: usize,
    #[comptime] given: Given,
    #[define(E)] _elem: ElemType,
) {
    let mut q = Shared::<[f32]>::new_slice(comptime!(rows * (head + 1)));
    let mut kv = Shared::<[f32]>::new_slice(comptime!(16 * (head + 1)));
    let mut scores = Shared::<[f32]>::new_slice(256usize);
    // Whether a query sees a key of the tile: what is hidden is not even multiplied by zero.
    let mut seen = Shared::<[u32]>::new_slice(256usize);
    let mut most = Shared::<[f32]>::new_slice(16usize);
    let mut sums = Shared::<[f32]>::new_slice(16usize);
    let mut fade = Shared::<[f32]>::new_slice(16usize);
    let unit = UNIT_POS as usize;
    let group = from_group + CUBE_POS;
    let h = group / tiles;
    let tile = tile_of(row_starts, query_starts, line, group % tiles, rows);
    if tile.found == 1u32 && group < to_group {
        let (start, length, first, last) = (tile.start, tile.length, tile.first, tile.last);
        let d_all = heads * head;
        stage::<E>(q_all, &mut q, h * head, q_width, first, last, rows, head, given.bf16);
        if unit < rows {
            most[unit] = -1.0e30f32;
            sums[unit] = 0.0f32;
        }
        let (r, j) = (unit / 16, unit % 16);
        let query = query_of(&tile, r, tokens, positions, option_ids, rows, given);
        let (from, to) = keys_of(&tile, window, rows, 16usize, given);
        let mut acc = Array::<f32>::new(4usize);
        #[unroll]
        for i in 0..4usize {
            acc[i] = 0.0f32;
        }
        let base = start * kv_width + key_column + h * head;
        let mut key = from;
        while key < to {
            stage::<E>(kv_all, &mut kv, base, kv_width, key, length, 16usize, head, given.bf16);
            sync_cube();
            if unit < comptime!(rows * 16) {
                let visible = sees(&tile, &query, key + j, positions, option_ids, window, given);
                scores[unit] = scale * dot(&q, &kv, r, j, head);
                seen[unit] = select(visible, 1u32, 0u32);
            }
            sync_cube();
            stage::<E>(kv_all, &mut kv, base + d_all, kv_width, key, length, 16usize, head, given.bf16);
            if unit < rows {
                let before = most[unit];
                let mut largest = before;
                for i in 0..16usize {
                    if seen[unit * 16 + i] == 1u32 {
                        largest = max(largest, scores[unit * 16 + i]);
                    }
                }
                let factor = (before - largest).exp();
                let mut sum = sums[unit] * factor;
                for i in 0..16usize {
                    if seen[unit * 16 + i] == 1u32 {
                        let p = (scores[unit * 16 + i] - largest).exp();
                        scores[unit * 16 + i] = p;
                        sum += p;
                    }
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
                    let (query, d) = (at / head, at % head);
                    let mut value = acc[i] * fade[query];
                    for k in 0..16usize {
                        if seen[query * 16 + k] == 1u32 {
                            value = fma(scores[query * 16 + k], kv[k * comptime!(head + 1) + d], value);
                        }
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
                let (query, d) = (at / head, at % head);
                if first + query < last {
                    out[(first + query) * d_all + h * head + d] = narrow::<E>(acc[i] / sums[query], given.bf16);
                }
            }
        }
    }
}

/// Numbers of a call.
struct Sizes {
    queries: usize,
    /// Tokens of the pack.
    tokens: usize,
    /// Rows of the pack.
    line: usize,
    q_width: usize,
    kv_width: usize,
    key_column: usize,
    /// As an unsigned number: no two positions are farther apart than 2^32.
    window: i32,
    heads: usize,
    scale: f32,
}

impl Sizes {
    /// Each row ends with a tile of its own, whatever its length; groups behind the last tile have nothing to do.
    fn tiles(&self, rows: usize) -> usize {
        ((self.queries + self.line * (rows - 1)) / rows).min(self.queries)
    }
}

pub(crate) fn forward(gpu: &Gpu, args: &Forward<'_>, m: usize, head: usize) -> Result<()> {
    const OP: &str = "encoder_attention.forward";
    let Forward { q, kv, key_column, heads, row_starts, selected, window, positions, option_ids, out, .. } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, q.dtype())?;
    if m == 0 {
        return Ok(());
    }
    let sizes = Sizes {
        queries: m,
        tokens: kv.shape().as_matrix().0,
        line: row_starts.numel() - 1,
        q_width: q.shape().as_matrix().1,
        kv_width: kv.shape().as_matrix().1,
        key_column,
        window: window.map_or(0, |w| u32::try_from(w).unwrap_or(u32::MAX) as i32),
        heads,
        scale: (1.0 / (head as f64).sqrt()) as f32,
    };
    let given = Given {
        tokens: selected.is_some(),
        window: window.is_some(),
        positions: positions.is_some(),
        options: option_ids.is_some(),
        bf16,
    };
    let lists = [
        row_starts,
        selected.as_ref().map_or(row_starts, |s| s.starts),
        selected.as_ref().map_or(row_starts, |s| s.tokens),
        positions.unwrap_or(row_starts),
        option_ids.unwrap_or(row_starts),
    ];
    // As if every row were as long as the longest may be: its tiles may share a launch.
    let longest = args.longest.unwrap_or(sizes.tokens).min(sizes.tokens);
    let seen = match window {
        Some(half) if positions.is_none() => longest.min(half.saturating_mul(2).saturating_add(1)),
        _ => longest,
    };
    let flops = 2 * (m * seen) as u64 * (heads * head) as u64;
    let even = [sizes.q_width, sizes.kv_width, key_column].iter().all(|width| width.is_multiple_of(8));
    if let Some(u) = Units::of(gpu, q.dtype(), head, &[q, kv, out]).filter(|_| even) {
        return units::forward(gpu, OP, u, &sizes, given, [q, kv, out], lists, flops);
    }
    let rows = tile(head);
    let tiles = sizes.tiles(rows);
    let arg = |t| gpu.arg(OP, t);
    let [row_starts, query_starts, tokens, positions, option_ids] = lists;
    // SAFETY: the contract checked that rows, queries, heads and columns lie in their tensors.
    gpu.by_groups(false, tiles * heads, 2 * flops, |from, count| unsafe {
        forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(count),
            CubeDim::new_1d(UNITS),
            arg(q)?,
            arg(kv)?,
            arg(row_starts)?,
            arg(query_starts)?,
            arg(tokens)?,
            arg(positions)?,
            arg(option_ids)?,
            arg(out)?,
            from,
            from + count,
            tiles,
            sizes.line,
            sizes.q_width,
            sizes.kv_width,
            key_column,
            sizes.window,
            heads,
            sizes.scale,
            rows,
            head,
            given,
            elem,
        );
        gpu.launched(OP, &[out])
    })
}
