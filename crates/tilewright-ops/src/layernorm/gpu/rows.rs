//! Rows of whole packs of 16 bytes on planes of one size: a plane keeps a row in registers from its only read to its only write. Backward, where registers
//! suffice, a unit also sums over the rows of its plane what the parameters' gradients need of its columns.

use tilewright_core::DType;

use super::affine;
use crate::Tensor;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// How a plane holds a row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Rows {
    /// Units of a plane, and packs of eight elements that each holds.
    pub(super) plane: usize,
    each: usize,
    /// Whether the stream and the branch are f32, and whether bf16.
    wide: [bool; 2],
    bf16: [bool; 2],
}

/// Packs that a unit holds at most: more would not stay in registers.
const MOST_EACH: usize = 8;

impl Rows {
    /// None where rows are not whole packs, where planes have no one size, or where rows are too long.
    pub(super) fn of(gpu: &Gpu, c: usize, [stream, own]: [DType; 2], tensors: &[&Tensor]) -> Option<Rows> {
        let [least, most] = gpu.capabilities().subgroup;
        let each = (c / 8).div_ceil(most.max(1));
        let fits = least == most
            && most <= UNITS as usize
            && (UNITS as usize).is_multiple_of(most)
            && c.is_multiple_of(8)
            && (1..=MOST_EACH).contains(&each)
            && gpu.capabilities().bf16
            && tensors.iter().all(|t| t.offset.is_multiple_of(16));
        let all = [stream, own];
        fits.then(|| Rows {
            plane: most,
            each,
            wide: all.map(|t| t == DType::F32),
            bf16: all.map(|t| t == DType::BF16),
        })
    }

    /// Rows of a group.
    pub(super) fn rows(&self) -> usize {
        UNITS as usize / self.plane
    }

    /// What a block of rows leaves behind; sums of `dx` too where a unit's registers suffice for a third.
    pub(super) fn lines(&self, sums: bool) -> Lines {
        Lines { count: if sums && self.each < MOST_EACH - 1 { 3 } else { 2 }, plane: self.plane }
    }
}

/// Partial sums of a block of rows: of `dweight`, of `dbias` and, where there is a third, of `dx`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Lines {
    pub(super) count: usize,
    /// Numbers stand as the units of a plane of so many hold them; 0: by columns.
    pub(super) plane: usize,
}

impl Lines {
    /// Numbers of a line.
    pub(super) fn length(&self, c: usize) -> usize {
        if self.plane == 0 { c } else { c.next_multiple_of(8 * self.plane) }
    }
}

/// The sum of `value` over a plane, the same for all its units, in a fixed tree.
#[cube]
fn row_sum(value: f32, shared: &mut Shared<[f32]>, #[comptime] plane: usize) -> f32 {
    let (unit, lane) = (UNIT_POS as usize, UNIT_POS_PLANE as usize);
    shared[unit] = value;
    sync_plane();
    let mut half = comptime!(plane / 2).runtime();
    while half > 0 {
        if lane < half {
            shared[unit] = shared[unit] + shared[unit + half];
        }
        sync_plane();
        half /= 2;
    }
    let total = shared[unit - lane];
    sync_plane();
    total
}

/// Eight numbers of a row whose first is element `at`, a multiple of eight.
#[cube]
fn read_eight(packs: &[Pack], at: usize, values: &mut Array<f32>, #[comptime] wide: bool, #[comptime] bf16: bool) {
    let (pack, next) = pack_at(at, wide);
    unpack(packs[pack], packs[next], values, wide, bf16);
}

/// What a stored number is, as f32.
#[cube]
fn as_stored(x: f32, #[comptime] wide: bool, #[comptime] bf16: bool) -> f32 {
    if comptime![wide] {
        x
    } else if comptime![bf16] {
        f32::reinterpret(kept_bf16(x) << 16u32)
    } else {
        kept_f16(x)
    }
}

// [`forward_kernel`] by packs, a plane a row.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn forward_rows_kernel(
    x: &[Pack],
    branch: &[Pack],
    sum: &mut [Pack],
    weight: &[Pack],
    bias: &[Pack],
    out: &mut [Pack],
    mean: &mut [f32],
    rstd: &mut [f32],
    n: usize,
    c: usize,
    eps: f32,
    #[comptime] residual: bool,
    #[comptime] biased: bool,
    #[comptime] r: Rows,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let lane = UNIT_POS_PLANE as usize;
    // Planes behind the last row do its work once more, so that all meet, and write nothing.
    let place = CUBE_POS * comptime!(r.rows()) + PLANE_POS as usize;
    let (row, alive) = (min(place, n - 1), place < n);
    let width = f32::cast_from(c);
    let mut values = Array::<f32>::new(comptime!(r.each * 8));
    let mut total = 0.0f32;
    #[unroll]
    for j in 0..comptime!(r.each) {
        let at = (j * comptime!(r.plane) + lane) * 8;
        let mut eight = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            eight[i] = 0.0f32;
        }
        if at < c {
            read_eight(x, row * c + at, &mut eight, r.wide[0], r.bf16[0]);
            if comptime![residual] {
                let mut more = Array::<f32>::new(8usize);
                read_eight(branch, row * c + at, &mut more, r.wide[1], r.bf16[1]);
                #[unroll]
                for i in 0..8usize {
                    eight[i] += more[i];
                    // What is normalised is the sum as it is stored.
                    eight[i] = as_stored(eight[i], r.wide[0], r.bf16[0]);
                }
                if alive {
                    put_eight(sum, row * c + at, &eight, r.wide[0], r.bf16[0]);
                }
            }
        }
        #[unroll]
        for i in 0..8usize {
            values[comptime!(j * 8) + i] = eight[i];
            total += eight[i];
        }
    }
    let average = row_sum(total, &mut shared, r.plane) / width;
    let mut squares = 0.0f32;
    #[unroll]
    for j in 0..comptime!(r.each) {
        if (j * comptime!(r.plane) + lane) * 8 < c {
            #[unroll]
            for i in 0..8usize {
                let apart = values[comptime!(j * 8) + i] - average;
                squares += apart * apart;
            }
        }
    }
    let variance = row_sum(squares, &mut shared, r.plane) / width;
    let scale = 1.0f32 / (variance + eps).sqrt();
    if alive && lane == 0 {
        mean[row] = average;
        rstd[row] = scale;
    }
    #[unroll]
    for j in 0..comptime!(r.each) {
        let at = (j * comptime!(r.plane) + lane) * 8;
        if alive && at < c {
            let mut by = Array::<f32>::new(8usize);
            read_eight(weight, at, &mut by, r.wide[0], r.bf16[0]);
            let mut shift = Array::<f32>::new(8usize);
            #[unroll]
            for i in 0..8usize {
                shift[i] = 0.0f32;
            }
            if comptime![biased] {
                read_eight(bias, at, &mut shift, r.wide[0], r.bf16[0]);
            }
            #[unroll]
            for i in 0..8usize {
                by[i] = affine(values[comptime!(j * 8) + i], average, scale, by[i], shift[i]);
            }
            put_eight(out, row * c + at, &by, r.wide[1], r.bf16[1]);
        }
    }
}

/// Writes the sums over a group's planes of what their units hold: a line, the first eight numbers of all units of a plane before the next.
#[cube]
fn gather(own: &Array<f32>, shared: &mut Shared<[f32]>, partials: &mut [f32], start: usize, #[comptime] r: Rows) {
    let (unit, lane, place) = (UNIT_POS as usize, UNIT_POS_PLANE as usize, PLANE_POS as usize);
    let span = comptime!(8 * r.plane);
    #[unroll]
    for j in 0..comptime!(r.each) {
        sync_cube();
        #[unroll]
        for i in 0..8usize {
            shared[place * span + i * comptime!(r.plane) + lane] = own[comptime!(j * 8) + i];
        }
        sync_cube();
        #[unroll]
        for x in 0..comptime!((8 * r.plane).div_ceil(UNITS as usize)) {
            let at = x * comptime!(UNITS as usize) + unit;
            if at < span {
                let mut total = 0.0f32;
                #[unroll]
                for p in 0..comptime!(r.rows()) {
                    total += shared[p * span + at];
                }
                partials[start + j * span + at] = total;
            }
        }
    }
}

// [`rows_kernel`] and [`columns_kernel`] by packs, a plane a row at a time: a group has `rows` rows, of which it leaves `lines` lines of sums.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
pub(super) fn backward_rows_kernel(
    dout: &[Pack],
    sum: &[Pack],
    weight: &[Pack],
    mean: &[f32],
    rstd: &[f32],
    dx: &mut [Pack],
    partials: &mut [f32],
    n: usize,
    c: usize,
    rows: usize,
    #[comptime] accumulate: bool,
    #[comptime] lines: usize,
    #[comptime] r: Rows,
) {
    let mut shared = Shared::<[f32]>::new_slice(2048usize);
    let lane = UNIT_POS_PLANE as usize;
    let first = CUBE_POS * rows;
    if first < n {
        let end = min(first + rows, n);
        let mut weights = Array::<f32>::new(comptime!(r.each * 8));
        let mut biases = Array::<f32>::new(comptime!(r.each * 8));
        let mut sums = Array::<f32>::new(comptime!(r.each * 8));
        #[unroll]
        for i in 0..comptime!(r.each * 8) {
            weights[i] = 0.0f32;
            biases[i] = 0.0f32;
            sums[i] = 0.0f32;
        }
        let width = f32::cast_from(c);
        let mut turn = 0usize;
        while turn < rows {
            // Planes behind the last row do its work once more, so that all meet, and write nothing.
            let place = first + turn + PLANE_POS as usize;
            let (row, alive) = (min(place, end - 1), place < end);
            let (average, scale) = (mean[row], rstd[row]);
            let mut slopes = Array::<f32>::new(comptime!(r.each * 8));
            let mut normals = Array::<f32>::new(comptime!(r.each * 8));
            let mut total = 0.0f32;
            let mut product = 0.0f32;
            #[unroll]
            for j in 0..comptime!(r.each) {
                let at = (j * comptime!(r.plane) + lane) * 8;
                #[unroll]
                for i in 0..8usize {
                    slopes[comptime!(j * 8) + i] = 0.0f32;
                    normals[comptime!(j * 8) + i] = 0.0f32;
                }
                if at < c {
                    let mut d = Array::<f32>::new(8usize);
                    let mut by = Array::<f32>::new(8usize);
                    let mut x = Array::<f32>::new(8usize);
                    read_eight(dout, row * c + at, &mut d, r.wide[0], r.bf16[0]);
                    read_eight(weight, at, &mut by, r.wide[0], r.bf16[0]);
                    read_eight(sum, row * c + at, &mut x, r.wide[0], r.bf16[0]);
                    #[unroll]
                    for i in 0..8usize {
                        let g = by[i] * d[i];
                        let normal = (x[i] - average) * scale;
                        total += g;
                        product += g * normal;
                        slopes[comptime!(j * 8) + i] = g;
                        normals[comptime!(j * 8) + i] = normal;
                        weights[comptime!(j * 8) + i] += select(alive, normal * d[i], 0.0f32);
                        biases[comptime!(j * 8) + i] += select(alive, d[i], 0.0f32);
                    }
                }
            }
            let g_mean = row_sum(total, &mut shared, r.plane) / width;
            let gx_mean = row_sum(product, &mut shared, r.plane) / width;
            #[unroll]
            for j in 0..comptime!(r.each) {
                let at = (j * comptime!(r.plane) + lane) * 8;
                if alive && at < c {
                    let mut values = Array::<f32>::new(8usize);
                    #[unroll]
                    for i in 0..8usize {
                        let (g, normal) = (slopes[comptime!(j * 8) + i], normals[comptime!(j * 8) + i]);
                        values[i] = scale * (g - g_mean - normal * gx_mean);
                    }
                    if comptime![accumulate] {
                        let (pack, next) = pack_at(row * c + at, r.wide[0]);
                        let mut before = Array::<f32>::new(8usize);
                        unpack(dx[pack], dx[next], &mut before, r.wide[0], r.bf16[0]);
                        #[unroll]
                        for i in 0..8usize {
                            values[i] += before[i];
                        }
                    }
                    put_eight(dx, row * c + at, &values, r.wide[0], r.bf16[0]);
                    if comptime![lines > 2] {
                        #[unroll]
                        for i in 0..8usize {
                            sums[comptime!(j * 8) + i] += as_stored(values[i], r.wide[0], r.bf16[0]);
                        }
                    }
                }
            }
            turn += comptime!(r.rows());
        }
        let line = comptime!(r.each * 8 * r.plane);
        let start = CUBE_POS * comptime!(lines) * line;
        gather(&weights, &mut shared, partials, start, r);
        gather(&biases, &mut shared, partials, start + line, r);
        if comptime![lines > 2] {
            gather(&sums, &mut shared, partials, start + 2 * line, r);
        }
    }
}
