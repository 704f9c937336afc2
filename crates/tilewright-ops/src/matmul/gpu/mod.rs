//! Matrix products through Vulkan and Metal, with the epilogues of the op: on the matrix units where factors are of 16 bits and the device
//! multiplies those (`matrix.rs`, by the loop of `slices.rs`), by a plain tiled kernel over operands of any strides and types elsewhere.
//!
//! A group of the plain kernel makes 64 x 64 of the product, 16 sums a unit in registers, from slices of 16 of the sum that lie in shared memory as
//! f32. What lies outside the matrices counts as zero and is neither read nor written.

pub(crate) mod matrix;
pub(crate) mod shape;
pub(crate) mod slices;
#[cfg(all(test, feature = "metal"))]
mod tests;

use tilewright_core::{DType, Result};

use super::{BackwardInput, BackwardWeight, Forward};
use crate::gelu::Gelu;
use crate::runtime::gpu::pace::ROWS;
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, SCRATCH_BYTES};
use crate::{Device, Tensor};
use matrix::Way;
use shape::Blocks;

/// Rows and columns of a group's tile.
const TILE: usize = 64;

/// What is done with a sum, and what the operands hold: part of a kernel's identity.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Epilogue {
    /// Adds `bias[column]`.
    bias: bool,
    /// Writes the sum with its bias to `pre`.
    pre_out: bool,
    /// Applies GELU.
    gelu: bool,
    /// Multiplies by the derivative of GELU at `pre`.
    slope: bool,
    /// Applies `max(x, 0)`.
    relu: bool,
    /// Adds `pre` last.
    add: bool,
    /// Exact GELU, not tanh.
    erf: bool,
    /// Adds to what `out` holds.
    accumulate: bool,
    /// Rounds elements of `a` to the type of `b` first.
    round: bool,
    /// Neighbours in memory of an element of `a` and of `b` lie along the sum.
    along: [bool; 2],
    /// Which of `a`, `b`, `bias`, `pre`, `out` are bf16.
    bf16: [bool; 5],
}

/// What becomes of a sum with its bias; `pre` and `before` are the elements at its place, or anything where the epilogue has no use for them.
#[cube]
fn applied(sum: f32, pre: f32, before: f32, #[comptime] e: Epilogue) -> f32 {
    let mut value = sum;
    if comptime![e.gelu] {
        value = gelu_value(value, e.erf);
    }
    if comptime![e.slope] {
        value *= gelu_slope(pre, e.erf);
    }
    if comptime![e.relu] {
        // By its bits: drivers make a maximum of a comparison, and that of zero and what is no number is zero.
        let bits = u32::reinterpret(value);
        value = select(bits > 0x8000_0000u32 && bits <= 0xFF80_0000u32, 0.0f32, value);
    }
    if comptime![e.add] {
        value += pre;
    }
    if comptime![e.accumulate] {
        value += before;
    }
    value
}

/// Writes what becomes of a sum.
#[cube]
fn finish<C: Numeric, P: Numeric, O: Numeric>(
    sum: f32,
    column: usize,
    at: usize,
    bias: &[C],
    pre: &mut [P],
    out: &mut [O],
    #[comptime] e: Epilogue,
) {
    let mut value = sum;
    if comptime![e.bias] {
        value += widen::<C>(bias[column], e.bf16[2]);
    }
    if comptime![e.pre_out] {
        pre[at] = narrow::<P>(value, e.bf16[3]);
    }
    let mut beside = 0.0f32;
    if comptime![e.slope || e.add] {
        beside = widen::<P>(pre[at], e.bf16[3]);
    }
    let mut before = 0.0f32;
    if comptime![e.accumulate] {
        before = widen::<O>(out[at], e.bf16[4]);
    }
    out[at] = narrow::<O>(applied(value, beside, before, e), e.bf16[4]);
}

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn product_kernel<A: Numeric, B: Numeric, C: Numeric, P: Numeric, O: Numeric>(
    a: &[A],
    b: &[B],
    bias: &[C],
    pre: &mut [P],
    out: &mut [O],
    m: usize,
    n: usize,
    k: usize,
    a_row: usize,
    a_sum: usize,
    b_row: usize,
    b_sum: usize,
    ld: usize,
    #[comptime] e: Epilogue,
    #[define(A, B, C, P, O)] _elems: [ElemType; 5],
) {
    // A row of 64 and one more, so that units that write down a column meet different banks.
    let mut left = Shared::<[f32]>::new_slice(1040usize);
    let mut right = Shared::<[f32]>::new_slice(1040usize);
    let unit = UNIT_POS as usize;
    let (ty, tx) = (unit / 16, unit % 16);
    let columns = (n + 63) / 64;
    let row0 = CUBE_POS / columns * 64;
    let col0 = CUBE_POS % columns * 64;
    if row0 < m {
        let mut sums = Array::<f32>::new(16usize);
        #[unroll]
        for i in 0..16usize {
            sums[i] = 0.0f32;
        }
        let slices = (k + 15) / 16;
        for slice in 0..slices {
            let first = slice * 16;
            #[unroll]
            for j in 0..4usize {
                let at = j * 256 + unit;
                let mut r = at % 64;
                let mut p = at / 64;
                if comptime![e.along[0]] {
                    r = at / 16;
                    p = at % 16;
                }
                let mut value = 0.0f32;
                if row0 + r < m {
                    if first + p < k {
                        value = widen::<A>(a[(row0 + r) * a_row + (first + p) * a_sum], e.bf16[0]);
                        if comptime![e.round] {
                            value = kept::<B>(value, e.bf16[1]);
                        }
                    }
                }
                left[p * 65 + r] = value;
                let mut r = at % 64;
                let mut p = at / 64;
                if comptime![e.along[1]] {
                    r = at / 16;
                    p = at % 16;
                }
                let mut value = 0.0f32;
                if col0 + r < n {
                    if first + p < k {
                        value = widen::<B>(b[(col0 + r) * b_row + (first + p) * b_sum], e.bf16[1]);
                    }
                }
                right[p * 65 + r] = value;
            }
            sync_cube();
            for p in 0..16usize {
                let x0 = left[p * 65 + ty * 4];
                let x1 = left[p * 65 + ty * 4 + 1];
                let x2 = left[p * 65 + ty * 4 + 2];
                let x3 = left[p * 65 + ty * 4 + 3];
                #[unroll]
                for j in 0..4usize {
                    let y = right[p * 65 + tx + j * 16];
                    sums[j] = fma(x0, y, sums[j]);
                    sums[4 + j] = fma(x1, y, sums[4 + j]);
                    sums[8 + j] = fma(x2, y, sums[8 + j]);
                    sums[12 + j] = fma(x3, y, sums[12 + j]);
                }
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..4usize {
            #[unroll]
            for j in 0..4usize {
                let (row, column) = (row0 + ty * 4 + i, col0 + tx + j * 16);
                if row < m {
                    if column < n {
                        let at = row * ld + column;
                        finish::<C, P, O>(sums[i * 4 + j], column, at, bias, pre, out, e);
                    }
                }
            }
        }
    }
}

// Sums over the rows of a block; a unit a column.
#[cube(launch_unchecked)]
fn columns_kernel<E: Numeric>(
    x: &[E],
    partials: &mut [f32],
    m: usize,
    n: usize,
    rows: usize,
    blocks: usize,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let tiles = (n + 255) / 256;
    let block = CUBE_POS / tiles;
    let column = CUBE_POS % tiles * 256 + UNIT_POS as usize;
    if block < blocks {
        if column < n {
            let mut sum = 0.0f32;
            let mut row = block * rows;
            let end = min(row + rows, m);
            while row < end {
                sum += widen::<E>(x[row * n + column], bf16);
                row += 1;
            }
            partials[block * n + column] = sum;
        }
    }
}

// The same by packs of eight columns: 32 packs, and of each eight units that take every eighth row and meet in shared memory.
#[cube(launch_unchecked)]
fn eights_kernel(
    x: &[Pack],
    partials: &mut [f32],
    m: usize,
    n: usize,
    rows: usize,
    blocks: usize,
    #[comptime] wide: bool,
    #[comptime] bf16: bool,
) {
    let mut shared = Shared::<[f32]>::new_slice(2048usize);
    let tiles = (n + 255) / 256;
    let (block, first) = (CUBE_POS / tiles, CUBE_POS % tiles * 256);
    let unit = UNIT_POS as usize;
    if block < blocks {
        let mut sums = Array::<f32>::new(8usize);
        #[unroll]
        for i in 0..8usize {
            sums[i] = 0.0f32;
        }
        let column = first + unit % 32 * 8;
        if column < n {
            let mut row = block * rows + unit / 32;
            let end = min(block * rows + rows, m);
            while row < end {
                let mut values = Array::<f32>::new(8usize);
                let (pack, next) = pack_at(row * n + column, wide);
                unpack(x[pack], x[next], &mut values, wide, bf16);
                #[unroll]
                for i in 0..8usize {
                    sums[i] += values[i];
                }
                row += 8;
            }
        }
        #[unroll]
        for i in 0..8usize {
            shared[unit / 32 * 256 + unit % 32 * 8 + i] = sums[i];
        }
        sync_cube();
        if first + unit < n {
            let mut sum = 0.0f32;
            #[unroll]
            for i in 0..8usize {
                sum += shared[i * 256 + unit];
            }
            partials[block * n + first + unit] = sum;
        }
    }
}

// Adds the parts of a product in their order, eight numbers a unit at a time.
#[cube(launch_unchecked)]
fn join_kernel(
    partials: &[Pack],
    out: &mut [Pack],
    count: usize,
    parts: usize,
    #[comptime] accumulate: bool,
    #[comptime] wide: bool,
    #[comptime] bf16: bool,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < count {
        let mut sums = Array::<f32>::new(8usize);
        let mut values = Array::<f32>::new(8usize);
        unpack(partials[i * 2], partials[i * 2 + 1], &mut sums, true, false);
        let mut part = 1usize;
        while part < parts {
            let at = (part * count + i) * 2;
            unpack(partials[at], partials[at + 1], &mut values, true, false);
            #[unroll]
            for v in 0..8usize {
                sums[v] += values[v];
            }
            part += 1;
        }
        if comptime![accumulate] {
            let (pack, next) = pack_at(i * 8, wide);
            unpack(out[pack], out[next], &mut values, wide, bf16);
            #[unroll]
            for v in 0..8usize {
                sums[v] += values[v];
            }
        }
        put_eight(out, i * 8, &sums, wide, bf16);
        i += step;
    }
}

#[cube(launch_unchecked)]
fn blocks_kernel<E: Numeric>(
    partials: &[f32],
    out: &mut [E],
    n: usize,
    blocks: usize,
    #[comptime] accumulate: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let column = ABSOLUTE_POS;
    if column < n {
        let mut sum = 0.0f32;
        for block in 0..blocks {
            sum += partials[block * n + column];
        }
        if comptime![accumulate] {
            sum += widen::<E>(out[column], bf16);
        }
        out[column] = narrow::<E>(sum, bf16);
    }
}

/// An operand: a tensor, the distance of its rows (of the product), the distance along the sum.
pub(crate) type Operand<'a> = (&'a Tensor, usize, usize);

/// `out (M, N) = epilogue(sum over K of a[i][p] b[j][p])`, `out` in rows of `ld` elements.
pub(crate) struct Product<'a> {
    pub(crate) a: Operand<'a>,
    pub(crate) b: Operand<'a>,
    pub(crate) out: (&'a Tensor, usize),
    pub(crate) bias: Option<&'a Tensor>,
    pub(crate) gelu: Option<Gelu>,
    /// Of the shape and the rows of `out`.
    pub(crate) pre_out: Option<&'a Tensor>,
    /// Likewise.
    pub(crate) slope: Option<(Gelu, &'a Tensor)>,
    pub(crate) relu: bool,
    /// Added last; of the shape and the rows of `out`, and not its memory: that is `accumulate`.
    pub(crate) add: Option<&'a Tensor>,
    pub(crate) accumulate: bool,
    /// Rounds elements of `a` to the type of `b` first.
    pub(crate) round: bool,
    /// Lines of `a` end with zeros where they are no whole packs.
    pub(crate) padded: bool,
}

impl<'a> Product<'a> {
    pub(crate) fn plain(a: Operand<'a>, b: Operand<'a>, out: (&'a Tensor, usize)) -> Self {
        let (bias, gelu, pre_out, slope) = (None, None, None, None);
        let (add, relu, accumulate, round, padded) = (None, false, false, false, false);
        Product { a, b, out, bias, gelu, pre_out, slope, relu, add, accumulate, round, padded }
    }

    pub(crate) fn run(&self, gpu: &Gpu, op: &'static str, m: usize, n: usize, k: usize) -> Result<()> {
        let way = Way::of(gpu, self, [m, n, k]).and_then(|way| way.choose(gpu, m, n).map(|blocks| (way, blocks)));
        self.run_as(gpu, op, [m, n, k], way)
    }

    /// On the matrix units with these blocks, which fit, or by the plain kernel; cut into launches of rows that hold the GPU no longer than they may.
    pub(crate) fn run_as(
        &self,
        gpu: &Gpu,
        op: &'static str,
        [m, n, k]: [usize; 3],
        way: Option<(Way, Blocks)>,
    ) -> Result<()> {
        if m * n == 0 {
            return Ok(());
        }
        let flops = 2 * m as u64 * n as u64 * k as u64;
        gpu.by_rows(self.b.0.dtype(), (m, ROWS), flops, |first, count| {
            if count == m {
                return self.launch(gpu, op, [m, n, k], way, k);
            }
            let (a, (out, ld)) = (self.a, self.out);
            // From a row's first element on; what lies behind the last row is never looked at.
            let part = |t: &Tensor, distance: usize| t.slice(first * distance, &[t.numel() - first * distance]);
            let (rows, to) = (part(a.0, a.1)?, part(out, ld)?);
            let pre = self.pre_out.map(|t| part(t, ld)).transpose()?;
            let slope = self.slope.map(|(kind, t)| part(t, ld).map(|t| (kind, t))).transpose()?;
            let add = self.add.map(|t| part(t, ld)).transpose()?;
            let product = Product {
                a: (&rows, a.1, a.2),
                out: (&to, ld),
                pre_out: pre.as_ref(),
                slope: slope.as_ref().map(|(kind, t)| (*kind, t)),
                add: add.as_ref(),
                ..*self
            };
            product.launch(gpu, op, [count, n, k], way, k)
        })
    }

    /// [`Product::run`], in parts of the sum where that is faster; only operands, `out` without a distance between its rows, and `accumulate`.
    fn run_in_parts(&self, device: &Device, gpu: &Gpu, op: &'static str, size: [usize; 3]) -> Result<()> {
        let ([m, n, k], (out, ld)) = (size, self.out);
        if m * n == 0 {
            return Ok(());
        }
        let even = (m * n).is_multiple_of(8) && out.offset.is_multiple_of(16);
        let way = Way::of(gpu, self, size).filter(|_| even && ld == n);
        let Some((way, (blocks, terms))) = way.and_then(|w| w.parts(gpu, size, SCRATCH_BYTES).map(|p| (w, p))) else {
            return self.run(gpu, op, m, n, k);
        };
        self.in_parts(device, gpu, op, size, (way, blocks), terms)
    }

    /// Parts of `terms` terms, a multiple of a slice's: the product of each in f32 first, then their sums in order.
    pub(crate) fn in_parts(
        &self,
        device: &Device,
        gpu: &Gpu,
        op: &'static str,
        [m, n, k]: [usize; 3],
        (way, blocks): (Way, Blocks),
        terms: usize,
    ) -> Result<()> {
        let parts = k.div_ceil(terms);
        let partials = gpu.scratch(op, device, parts * m * n * size_of::<f32>())?;
        let partials = partials.reinterpret(0, DType::F32, &[parts, m, n])?;
        let (a, b, flops) = (self.a, self.b, 2 * m as u64 * n as u64 * k as u64);
        if gpu.rows_at_once(b.0.dtype(), m, ROWS, flops) == m {
            let product = Product { out: (&partials, n), accumulate: false, ..*self };
            product.launch(gpu, op, [m, n, k], Some((way, blocks)), terms)?;
            gpu.expect(b.0.dtype(), flops)?;
        } else {
            // Too long for one launch: the same parts one by one, each cut as it must be.
            for part in 0..parts {
                let (first, count) = (part * terms, terms.min(k - part * terms));
                let behind = |(t, row, sum): Operand<'_>| -> Result<(Tensor, usize, usize)> {
                    Ok((t.slice(first * sum, &[t.numel() - first * sum])?, row, sum))
                };
                let (a, b, to) = (behind(a)?, behind(b)?, partials.slice(part * m * n, &[m, n])?);
                let (a, b) = ((&a.0, a.1, a.2), (&b.0, b.1, b.2));
                let product = Product { a, b, out: (&to, n), accumulate: false, ..*self };
                product.run_as(gpu, op, [m, n, count], Some((way, blocks)))?;
            }
        }
        let out = self.out.0;
        let (from, to) = (as_packs(gpu, op, &partials)?, as_packs(gpu, op, out)?);
        let (wide, bf16) = (out.dtype() == DType::F32, out.dtype() == DType::BF16);
        let (grid, units, count) = (gpu.spread(m * n / 8), CubeDim::new_1d(UNITS), m * n / 8);
        // SAFETY: `parts` times `count` packs of eight are in the scratch, and `count` in `out`.
        unsafe {
            join_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                from,
                to,
                count,
                parts,
                self.accumulate,
                wide,
                bf16,
            );
        }
        gpu.launched(op, &[out])
    }

    fn launch(
        &self,
        gpu: &Gpu,
        op: &'static str,
        [m, n, k]: [usize; 3],
        way: Option<(Way, Blocks)>,
        terms: usize,
    ) -> Result<()> {
        let Product { a, b, out, bias, gelu, pre_out, slope, relu, add, accumulate, round, .. } = *self;
        // What is not there is never read or written; another tensor stands for it.
        let pre = pre_out.or(slope.map(|(_, pre)| pre)).or(add).unwrap_or(out.0);
        let tensors = [a.0, b.0, bias.unwrap_or(b.0), pre, out.0];
        let mut storage = [Storage::of(DType::F32); 5];
        for (storage, t) in storage.iter_mut().zip(tensors) {
            *storage = gpu.storage(op, t.dtype())?;
        }
        let erf = gelu.or(slope.map(|(kind, _)| kind)).is_some_and(is_erf);
        let epilogue = Epilogue {
            bias: bias.is_some(),
            pre_out: pre_out.is_some(),
            gelu: gelu.is_some(),
            slope: slope.is_some(),
            relu,
            add: add.is_some(),
            erf,
            accumulate,
            round,
            along: [a.2 == 1, b.2 == 1],
            bf16: storage.map(|s| s.bf16),
        };
        if let Some((way, blocks)) = way {
            return way.run(gpu, op, blocks, tensors, epilogue, [m, n, k], out.1, terms);
        }
        let [x, y, bias, pre, to] = tensors;
        // SAFETY: the caller's sizes and strides stay inside the tensors; the kernel reads and writes within the sizes only.
        unsafe {
            product_kernel::launch_unchecked(
                gpu.client(),
                gpu.grid(m.div_ceil(TILE) * n.div_ceil(TILE)),
                CubeDim::new_1d(UNITS),
                gpu.arg(op, x)?,
                gpu.arg(op, y)?,
                gpu.arg(op, bias)?,
                gpu.arg(op, pre)?,
                gpu.arg(op, to)?,
                m,
                n,
                k,
                a.1,
                a.2,
                b.1,
                b.2,
                out.1,
                epilogue,
                storage.map(|s| s.elem),
            );
        }
        gpu.launched(op, &[to])
    }
}

pub(super) fn forward(gpu: &Gpu, args: &Forward<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    let Forward { x, weight, bias, gelu, pre_gelu, out } = *args;
    let product = Product { bias, gelu, pre_out: pre_gelu, ..Product::plain((x, k, 1), (weight, k, 1), (out, n)) };
    product.run(gpu, "matmul.forward", m, n, k)
}

pub(super) fn backward_input(gpu: &Gpu, args: &BackwardInput<'_>, m: usize, n: usize, k: usize) -> Result<()> {
    let BackwardInput { dout, weight, gelu, dx, accumulate, .. } = *args;
    let product = Product { slope: gelu, accumulate, ..Product::plain((dout, n, 1), (weight, 1, k), (dx, k)) };
    product.run(gpu, "matmul.backward_input", m, k, n)
}

pub(super) fn backward_weight(
    device: &Device,
    gpu: &Gpu,
    args: &BackwardWeight<'_>,
    m: usize,
    n: usize,
    k: usize,
) -> Result<()> {
    let BackwardWeight { dout, x, dweight, dbias, accumulate } = *args;
    if let Some(dbias) = dbias {
        bias_gradient(device, gpu, dout, dbias, accumulate, m, n)?;
    }
    let product = Product { accumulate, ..Product::plain((dout, 1, n), (x, 1, k), (dweight, k)) };
    product.run_in_parts(device, gpu, "matmul.backward_weight", [n, k, m])
}

/// `dbias (N) (+)= sum over M of dout (M, N)`: blocks of rows first, then the blocks in order.
pub(crate) fn bias_gradient(
    device: &Device,
    gpu: &Gpu,
    dout: &Tensor,
    dbias: &Tensor,
    accumulate: bool,
    m: usize,
    n: usize,
) -> Result<()> {
    const OP: &str = "matmul.backward_weight";
    if n == 0 {
        return Ok(());
    }
    let (from, to) = (gpu.storage(OP, dout.dtype())?, gpu.storage(OP, dbias.dtype())?);
    let units = CubeDim::new_1d(UNITS);
    // Blocks depend on the number of rows alone.
    let rows = m.div_ceil(64).max(32);
    let blocks = m.div_ceil(rows);
    let partials = gpu.scratch(OP, device, (blocks * n * size_of::<f32>()).max(4))?;
    let partials = partials.reinterpret(0, DType::F32, &[(blocks * n).max(1)])?;
    let arg = |t: &Tensor| gpu.arg(OP, t);
    // SAFETY: `dout` is `(m, n)`, `dbias` has `n` elements, the scratch a row of `n` for each block.
    unsafe {
        if blocks > 0 {
            let grid = gpu.grid(blocks * n.div_ceil(256));
            let (client, sums) = (gpu.client(), arg(&partials)?);
            if n.is_multiple_of(8) && dout.offset.is_multiple_of(16) && gpu.capabilities().bf16 {
                let (x, wide) = (as_packs(gpu, OP, dout)?, dout.dtype() == DType::F32);
                eights_kernel::launch_unchecked(client, grid, units, x, sums, m, n, rows, blocks, wide, from.bf16);
            } else {
                let x = arg(dout)?;
                columns_kernel::launch_unchecked(
                    client, grid, units, x, sums, m, n, rows, blocks, from.bf16, from.elem,
                );
            }
            gpu.launched(OP, &[&partials])?;
        }
        let (grid, sums, out) = (gpu.grid(n.div_ceil(UNITS as usize)), arg(&partials)?, arg(dbias)?);
        blocks_kernel::launch_unchecked(gpu.client(), grid, units, sums, out, n, blocks, accumulate, to.bf16, to.elem);
    }
    gpu.launched(OP, &[dbias])
}
