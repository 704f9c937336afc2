//! Layer normalisation through Vulkan and Metal. Where rows are whole packs of 16 bytes and planes have one size, a plane keeps a row in registers from
//! its only read to its only write; elsewhere a group walks a row, statistics in two passes over it.

use tilewright_core::{DType, Result};

use super::{Backward, Forward, Recompute, block_rows, partial_elements};
use crate::Tensor;
use crate::matmul::gpu::matrix::{Pack, as_packs, pack_at, put_eight, unpack};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// The last step, the same here and there, so that a recomputed value has the bits of the first.
#[cube]
fn affine(value: f32, mean: f32, rstd: f32, weight: f32, bias: f32) -> f32 {
    fma((value - mean) * rstd, weight, bias)
}

/// How a plane holds a row.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Rows {
    /// Units of a plane, and packs of eight elements that each holds.
    plane: usize,
    each: usize,
    /// Whether the stream and the branch are f32, and whether bf16.
    wide: [bool; 2],
    bf16: [bool; 2],
}

/// Packs that a unit holds at most: more would not stay in registers.
const MOST_EACH: usize = 8;

impl Rows {
    /// None where rows are not whole packs, where planes have no one size, or where rows are too long.
    fn of(gpu: &Gpu, c: usize, [stream, own]: [DType; 2], tensors: &[&Tensor]) -> Option<Rows> {
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
    fn rows(&self) -> usize {
        UNITS as usize / self.plane
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

// [`forward_kernel`] by packs, a plane a row.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn forward_rows_kernel(
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
                    if comptime![!r.wide[0] && r.bf16[0]] {
                        eight[i] = f32::reinterpret(kept_bf16(eight[i]) << 16u32);
                    } else if comptime![!r.wide[0]] {
                        eight[i] = kept_f16(eight[i]);
                    }
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

// [`rows_kernel`] by packs, a plane a row.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn backward_rows_kernel(
    dout: &[Pack],
    sum: &[Pack],
    weight: &[Pack],
    mean: &[f32],
    rstd: &[f32],
    dx: &mut [Pack],
    n: usize,
    c: usize,
    #[comptime] accumulate: bool,
    #[comptime] r: Rows,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let lane = UNIT_POS_PLANE as usize;
    // Planes behind the last row do its work once more, so that all meet, and write nothing.
    let place = CUBE_POS * comptime!(r.rows()) + PLANE_POS as usize;
    let (row, alive) = (min(place, n - 1), place < n);
    let (average, scale, width) = (mean[row], rstd[row], f32::cast_from(c));
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
        }
    }
}

#[cube(launch_unchecked)]
fn forward_kernel<S: Numeric, E: Numeric>(
    x: &[S],
    branch: &[E],
    sum: &mut [S],
    weight: &[S],
    bias: &[S],
    out: &mut [E],
    mean: &mut [f32],
    rstd: &mut [f32],
    n: usize,
    c: usize,
    eps: f32,
    #[comptime] residual: bool,
    #[comptime] biased: bool,
    #[comptime] stream_bf16: bool,
    #[comptime] bf16: bool,
    #[define(S, E)] _elems: [ElemType; 2],
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let row = CUBE_POS;
    if row < n {
        let start = row * c;
        let width = f32::cast_from(c);
        if comptime![residual] {
            let mut i = UNIT_POS as usize;
            while i < c {
                let value = widen::<S>(x[start + i], stream_bf16) + widen::<E>(branch[start + i], bf16);
                sum[start + i] = narrow::<S>(value, stream_bf16);
                i += CUBE_DIM as usize;
            }
        }
        // What is normalised is the sum as it was stored: each unit reads again what it wrote.
        let mut total = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < c {
            total += if comptime![residual] {
                widen::<S>(sum[start + i], stream_bf16)
            } else {
                widen::<S>(x[start + i], stream_bf16)
            };
            i += CUBE_DIM as usize;
        }
        let average = group_sum(total, &mut shared) / width;
        let mut squares = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < c {
            let value = if comptime![residual] {
                widen::<S>(sum[start + i], stream_bf16)
            } else {
                widen::<S>(x[start + i], stream_bf16)
            };
            squares += (value - average) * (value - average);
            i += CUBE_DIM as usize;
        }
        let variance = group_sum(squares, &mut shared) / width;
        let scale = 1.0f32 / (variance + eps).sqrt();
        if UNIT_POS == 0 {
            mean[row] = average;
            rstd[row] = scale;
        }
        let mut i = UNIT_POS as usize;
        while i < c {
            let value = if comptime![residual] {
                widen::<S>(sum[start + i], stream_bf16)
            } else {
                widen::<S>(x[start + i], stream_bf16)
            };
            let mut shift = 0.0f32;
            if comptime![biased] {
                shift = widen::<S>(bias[i], stream_bf16);
            }
            out[start + i] =
                narrow::<E>(affine(value, average, scale, widen::<S>(weight[i], stream_bf16), shift), bf16);
            i += CUBE_DIM as usize;
        }
    }
}

#[cube(launch_unchecked)]
fn recompute_kernel<E: Numeric>(
    sum: &[E],
    weight: &[E],
    bias: &[E],
    mean: &[f32],
    rstd: &[f32],
    out: &mut [E],
    n: usize,
    c: usize,
    #[comptime] biased: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut at = ABSOLUTE_POS;
    while at < n * c {
        let (row, i) = (at / c, at % c);
        let mut shift = 0.0f32;
        if comptime![biased] {
            shift = widen::<E>(bias[i], bf16);
        }
        let value = widen::<E>(sum[at], bf16);
        out[at] = narrow::<E>(affine(value, mean[row], rstd[row], widen::<E>(weight[i], bf16), shift), bf16);
        at += step;
    }
}

#[cube(launch_unchecked)]
fn rows_kernel<E: Numeric>(
    dout: &[E],
    sum: &[E],
    weight: &[E],
    mean: &[f32],
    rstd: &[f32],
    dx: &mut [E],
    n: usize,
    c: usize,
    #[comptime] accumulate: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let row = CUBE_POS;
    if row < n {
        let start = row * c;
        let (average, scale, width) = (mean[row], rstd[row], f32::cast_from(c));
        let mut total = 0.0f32;
        let mut product = 0.0f32;
        let mut i = UNIT_POS as usize;
        while i < c {
            let g = widen::<E>(weight[i], bf16) * widen::<E>(dout[start + i], bf16);
            let normal = (widen::<E>(sum[start + i], bf16) - average) * scale;
            total += g;
            product += g * normal;
            i += CUBE_DIM as usize;
        }
        let g_mean = group_sum(total, &mut shared) / width;
        let gx_mean = group_sum(product, &mut shared) / width;
        let mut i = UNIT_POS as usize;
        while i < c {
            let g = widen::<E>(weight[i], bf16) * widen::<E>(dout[start + i], bf16);
            let normal = (widen::<E>(sum[start + i], bf16) - average) * scale;
            let mut value = scale * (g - g_mean - normal * gx_mean);
            if comptime![accumulate] {
                value += widen::<E>(dx[start + i], bf16);
            }
            dx[start + i] = narrow::<E>(value, bf16);
            i += CUBE_DIM as usize;
        }
    }
}

// partials[block][0]: sums of `dweight` over the block's rows; partials[block][1]: of `dbias`. A unit a column.
#[cube(launch_unchecked)]
fn columns_kernel<E: Numeric>(
    dout: &[E],
    sum: &[E],
    mean: &[f32],
    rstd: &[f32],
    partials: &mut [f32],
    n: usize,
    c: usize,
    rows: usize,
    blocks: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let tiles = (c + 255) / 256;
    let block = CUBE_POS / tiles;
    let column = CUBE_POS % tiles * 256 + UNIT_POS as usize;
    if block < blocks {
        if column < c {
            let mut weight = 0.0f32;
            let mut bias = 0.0f32;
            let mut row = block * rows;
            let end = min(row + rows, n);
            while row < end {
                let d = widen::<E>(dout[row * c + column], bf16);
                weight += (widen::<E>(sum[row * c + column], bf16) - mean[row]) * rstd[row] * d;
                bias += d;
                row += 1;
            }
            partials[block * 2 * c + column] = weight;
            partials[block * 2 * c + c + column] = bias;
        }
    }
}

// [`columns_kernel`] by packs of eight columns: 32 packs, and of each eight units that take every eighth row and meet in shared memory.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn eights_kernel(
    dout: &[Pack],
    sum: &[Pack],
    mean: &[f32],
    rstd: &[f32],
    partials: &mut [f32],
    n: usize,
    c: usize,
    rows: usize,
    blocks: usize,
    #[comptime] wide: bool,
    #[comptime] bf16: bool,
) {
    let mut shared = Shared::<[f32]>::new_slice(2048usize);
    let tiles = (c + 255) / 256;
    let (block, first) = (CUBE_POS / tiles, CUBE_POS % tiles * 256);
    let unit = UNIT_POS as usize;
    if block < blocks {
        let mut weights = Array::<f32>::new(8usize);
        let mut biases = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            weights[i] = 0.0f32;
            biases[i] = 0.0f32;
        }
        let column = first + unit % 32 * 8;
        if column < c {
            let mut row = block * rows + unit / 32;
            let end = min(block * rows + rows, n);
            while row < end {
                let mut d = Array::<f32>::new(8usize);
                let mut x = Array::<f32>::new(8usize);
                read_eight(dout, row * c + column, &mut d, wide, bf16);
                read_eight(sum, row * c + column, &mut x, wide, bf16);
                let (average, scale) = (mean[row], rstd[row]);
                #[unroll]
                for i in 0..8usize {
                    weights[i] += (x[i] - average) * scale * d[i];
                    biases[i] += d[i];
                }
                row += 8;
            }
        }
        #[unroll]
        for which in 0..2usize {
            #[unroll]
            for i in 0..8usize {
                let own = if comptime![which == 0] { weights[i] } else { biases[i] };
                shared[unit / 32 * 256 + unit % 32 * 8 + i] = own;
            }
            sync_cube();
            if first + unit < c {
                let mut total = 0.0f32;
                #[unroll]
                for i in 0..8usize {
                    total += shared[i * 256 + unit];
                }
                partials[block * 2 * c + which * c + first + unit] = total;
            }
            sync_cube();
        }
    }
}

#[cube(launch_unchecked)]
fn finish_kernel<E: Numeric>(
    partials: &[f32],
    dweight: &mut [E],
    dbias: &mut [E],
    c: usize,
    blocks: usize,
    #[comptime] biased: bool,
    #[comptime] accumulate: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let column = ABSOLUTE_POS;
    if column < c {
        let mut weight = 0.0f32;
        let mut bias = 0.0f32;
        for block in 0..blocks {
            weight += partials[block * 2 * c + column];
            bias += partials[block * 2 * c + c + column];
        }
        if comptime![accumulate] {
            weight += widen::<E>(dweight[column], bf16);
        }
        dweight[column] = narrow::<E>(weight, bf16);
        if comptime![biased] {
            if comptime![accumulate] {
                bias += widen::<E>(dbias[column], bf16);
            }
            dbias[column] = narrow::<E>(bias, bf16);
        }
    }
}

pub(super) fn forward(gpu: &Gpu, n: usize, c: usize, args: &Forward<'_>) -> Result<()> {
    const OP: &str = "layernorm.forward";
    let Forward { x, residual, weight, bias, eps, out, mean, rstd } = args;
    let (stream, own) = (gpu.storage(OP, x.dtype())?, gpu.storage(OP, out.dtype())?);
    if n * c == 0 {
        // Rows of no columns have statistics.
        mean.zero();
        return rstd.write_f32(&vec![1.0 / eps.sqrt(); n]);
    }
    // What is not there is never read or written; another tensor of the type stands for it.
    let (branch, sum) = residual.as_ref().map_or((*out, *x), |r| (r.branch, r.sum));
    let arg = |t: &Tensor| gpu.arg(OP, t);
    let packs = |t: &Tensor| as_packs(gpu, OP, t);
    let read = [*x, branch, sum, weight, bias.unwrap_or(weight), out];
    if let Some(rows) = Rows::of(gpu, c, [x.dtype(), out.dtype()], &read) {
        // SAFETY: `(n, c)` are the sizes of the tensors, checked by the contract.
        unsafe {
            forward_rows_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(n.div_ceil(rows.rows())),
                CubeDim::new_1d(UNITS),
                packs(x)?,
                packs(branch)?,
                packs(sum)?,
                packs(weight)?,
                packs(bias.unwrap_or(weight))?,
                packs(out)?,
                arg(mean)?,
                arg(rstd)?,
                n,
                c,
                *eps,
                residual.is_some(),
                bias.is_some(),
                rows,
            );
        }
        return gpu.launched(OP, &[out, mean, rstd]);
    }
    // SAFETY: as above.
    unsafe {
        forward_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(n),
            CubeDim::new_1d(UNITS),
            arg(x)?,
            arg(branch)?,
            arg(sum)?,
            arg(weight)?,
            arg(bias.unwrap_or(weight))?,
            arg(out)?,
            arg(mean)?,
            arg(rstd)?,
            n,
            c,
            *eps,
            residual.is_some(),
            bias.is_some(),
            stream.bf16,
            own.bf16,
            [stream.elem, own.elem],
        );
    }
    gpu.launched(OP, &[out, mean, rstd])
}

pub(super) fn recompute(gpu: &Gpu, n: usize, c: usize, args: &Recompute<'_>) -> Result<()> {
    const OP: &str = "layernorm.recompute";
    let Recompute { sum, weight, bias, mean, rstd, out } = args;
    let Storage { elem, bf16 } = gpu.storage(OP, sum.dtype())?;
    if n * c == 0 {
        return Ok(());
    }
    let arg = |t: &Tensor| gpu.arg(OP, t);
    // SAFETY: as in `forward`.
    unsafe {
        recompute_kernel::launch_unchecked(
            gpu.client(),
            gpu.spread(n * c),
            CubeDim::new_1d(UNITS),
            arg(sum)?,
            arg(weight)?,
            arg(bias.unwrap_or(weight))?,
            arg(mean)?,
            arg(rstd)?,
            arg(out)?,
            n,
            c,
            bias.is_some(),
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[out])
}

pub(super) fn backward(gpu: &Gpu, n: usize, c: usize, args: &Backward<'_>) -> Result<()> {
    const OP: &str = "layernorm.backward";
    let Backward {
        dout, sum, weight, mean, rstd, dx, accumulate_dx, dweight, dbias, accumulate_params, workspace, ..
    } = args;
    let Storage { elem, bf16 } = gpu.storage(OP, dout.dtype())?;
    if c == 0 {
        return Ok(());
    }
    let units = CubeDim::new_1d(UNITS);
    let arg = |t: &Tensor| gpu.arg(OP, t);
    let (rows, blocks) = (block_rows(n), n.div_ceil(block_rows(n)));
    let partials = workspace.reinterpret(0, DType::F32, &[partial_elements(n, c)])?;
    if n == 0 {
        if !*accumulate_params {
            dweight.zero();
            dbias.iter().for_each(|t| t.zero());
        }
        return Ok(());
    }
    let packs = |t: &Tensor| as_packs(gpu, OP, t);
    // SAFETY: as in `forward`; the workspace holds the partial sums of all blocks.
    unsafe {
        if let Some(rows) = Rows::of(gpu, c, [dout.dtype(); 2], &[dout, sum, weight, dx]) {
            backward_rows_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(n.div_ceil(rows.rows())),
                units,
                packs(dout)?,
                packs(sum)?,
                packs(weight)?,
                arg(mean)?,
                arg(rstd)?,
                packs(dx)?,
                n,
                c,
                *accumulate_dx,
                rows,
            );
        } else {
            rows_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(n),
                units,
                arg(dout)?,
                arg(sum)?,
                arg(weight)?,
                arg(mean)?,
                arg(rstd)?,
                arg(dx)?,
                n,
                c,
                *accumulate_dx,
                bf16,
                elem,
            );
        }
        gpu.launched(OP, &[dx])?;
        let grid = gpu.grid(blocks * c.div_ceil(256));
        if c.is_multiple_of(8) && gpu.capabilities().bf16 && [dout, sum].iter().all(|t| t.offset.is_multiple_of(16)) {
            eights_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                packs(dout)?,
                packs(sum)?,
                arg(mean)?,
                arg(rstd)?,
                arg(&partials)?,
                n,
                c,
                rows,
                blocks,
                dout.dtype() == DType::F32,
                bf16,
            );
        } else {
            columns_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                arg(dout)?,
                arg(sum)?,
                arg(mean)?,
                arg(rstd)?,
                arg(&partials)?,
                n,
                c,
                rows,
                blocks,
                bf16,
                elem,
            );
        }
        gpu.launched(OP, &[&partials])?;
        finish_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(c.div_ceil(UNITS as usize)),
            units,
            arg(&partials)?,
            arg(dweight)?,
            arg(dbias.unwrap_or(dweight))?,
            c,
            blocks,
            dbias.is_some(),
            *accumulate_params,
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[dweight])
}
