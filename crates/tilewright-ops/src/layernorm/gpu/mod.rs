//! Layer normalisation through Vulkan and Metal. Where rows are whole packs of 16 bytes and planes have one size, a plane keeps a row in registers from
//! its only read to its only write; elsewhere a group walks a row, statistics in two passes over it.

mod rows;

use tilewright_core::{DType, Result};

use super::{Backward, Forward, Recompute, block_rows};
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;
use crate::{Device, Tensor};
use rows::{Lines, Rows, backward_rows_kernel, forward_rows_kernel};

/// Rows of a block of the parameters' gradients: some 256 groups, which fill a large GPU once.
fn gpu_block_rows(n: usize) -> usize {
    n.div_ceil(256).max(16)
}

/// f32 elements of workspace for the partial sums, whichever kernels run.
pub(super) fn partial_elements(gpu: &Gpu, n: usize, c: usize) -> usize {
    let by_planes = n.div_ceil(gpu_block_rows(n)) * 3 * c.next_multiple_of(8 * gpu.capabilities().subgroup[1].max(1));
    by_planes.max(super::partial_elements(n, c))
}

/// The last step, the same here and there, so that a recomputed value has the bits of the first.
#[cube]
fn affine(value: f32, mean: f32, rstd: f32, weight: f32, bias: f32) -> f32 {
    fma((value - mean) * rstd, weight, bias)
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

// Sums of the blocks, in order: a group has 32 columns of one of the results, and of each eight units that take every eighth block and meet.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn finish_kernel<E: Numeric>(
    partials: &[f32],
    dweight: &mut [E],
    dbias: &mut [E],
    dx_sums: &mut [E],
    c: usize,
    line: usize,
    blocks: usize,
    #[comptime] lines: Lines,
    #[comptime] biased: bool,
    #[comptime] accumulate: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let mut shared = Shared::<[f32]>::new_slice(256usize);
    let unit = UNIT_POS as usize;
    let tiles = (line + 31) / 32;
    let (which, at) = (CUBE_POS / tiles, CUBE_POS % tiles * 32 + unit % 32);
    let mut sum = 0.0f32;
    if which < comptime!(lines.count) && at < line {
        let mut block = unit / 32;
        while block < blocks {
            sum += partials[(block * comptime!(lines.count) + which) * line + at];
            block += 8;
        }
    }
    shared[unit] = sum;
    sync_cube();
    let column = column(at, lines);
    if unit < 32 && which < comptime!(lines.count) && at < line && column < c {
        let mut total = 0.0f32;
        #[unroll]
        for i in 0..8usize {
            total += shared[i * 32 + unit];
        }
        if which == 0 {
            finish::<E>(dweight, column, total, accumulate, bf16);
        } else if which == 1 {
            if comptime![biased] {
                finish::<E>(dbias, column, total, accumulate, bf16);
            }
        } else if comptime![lines.count > 2] {
            finish::<E>(dx_sums, column, total, accumulate, bf16);
        }
    }
}

/// Column of a line's number.
#[cube]
fn column(at: usize, #[comptime] lines: Lines) -> usize {
    if comptime![lines.plane == 0] {
        at
    } else {
        let (pack, rest) = (at / comptime!(8 * lines.plane), at % comptime!(8 * lines.plane));
        (pack * comptime!(lines.plane) + rest % comptime!(lines.plane)) * 8 + rest / comptime!(lines.plane)
    }
}

#[cube]
fn finish<E: Numeric>(out: &mut [E], column: usize, sum: f32, #[comptime] accumulate: bool, #[comptime] bf16: bool) {
    let mut total = sum;
    if comptime![accumulate] {
        total += widen::<E>(out[column], bf16);
    }
    out[column] = narrow::<E>(total, bf16);
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

pub(super) fn backward(device: &Device, gpu: &Gpu, n: usize, c: usize, args: &Backward<'_>) -> Result<()> {
    const OP: &str = "layernorm.backward";
    let Backward {
        dout,
        sum,
        weight,
        mean,
        rstd,
        dx,
        accumulate_dx,
        dweight,
        dbias,
        accumulate_params,
        dx_sums,
        workspace,
        ..
    } = args;
    let Storage { elem, bf16 } = gpu.storage(OP, dout.dtype())?;
    if c == 0 {
        return Ok(());
    }
    if n == 0 {
        if !*accumulate_params {
            dweight.zero();
            [dbias, dx_sums].into_iter().flatten().for_each(|t| t.zero());
        }
        return Ok(());
    }
    let units = CubeDim::new_1d(UNITS);
    let arg = |t: &Tensor| gpu.arg(OP, t);
    let packs = |t: &Tensor| as_packs(gpu, OP, t);
    let by_planes = Rows::of(gpu, c, [dout.dtype(); 2], &[dout, sum, weight, dx]);
    let (rows, lines) = match by_planes {
        Some(r) => (gpu_block_rows(n), r.lines(dx_sums.is_some())),
        None => (block_rows(n), Lines { count: 2, plane: 0 }),
    };
    let (blocks, line) = (n.div_ceil(rows), lines.length(c));
    let partials = workspace.reinterpret(0, DType::F32, &[blocks * lines.count * line])?;
    // SAFETY: as in `forward`; the workspace holds the partial sums of all blocks.
    unsafe {
        if let Some(r) = by_planes {
            backward_rows_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(blocks),
                units,
                packs(dout)?,
                packs(sum)?,
                packs(weight)?,
                arg(mean)?,
                arg(rstd)?,
                packs(dx)?,
                arg(&partials)?,
                n,
                c,
                rows,
                *accumulate_dx,
                lines.count,
                r,
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
            gpu.launched(OP, &[dx])?;
            columns_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(blocks * c.div_ceil(256)),
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
        gpu.launched(OP, &[dx, &partials])?;
        finish_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(lines.count * line.div_ceil(32)),
            units,
            arg(&partials)?,
            arg(dweight)?,
            arg(dbias.unwrap_or(dweight))?,
            arg(dx_sums.unwrap_or(dweight))?,
            c,
            line,
            blocks,
            lines,
            dbias.is_some(),
            *accumulate_params,
            bf16,
            elem,
        );
    }
    gpu.launched(OP, &[dweight])?;
    match dx_sums {
        Some(sums) if lines.count < 3 => crate::matmul::column_sums(device, dx, sums, *accumulate_params),
        _ => Ok(()),
    }
}
