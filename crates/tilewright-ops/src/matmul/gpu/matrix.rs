//! Matrix products on the matrix units: 16-bit factors, f32 sums.
//!
//! A group makes 64 x 64 of the product with four planes, each 32 x 32 in fragments of the device's tile. Slices of 32 of the sum lie in
//! shared memory; sums pass through it once, to meet the epilogue of the op.

use tilewright_core::{DType, Result};

use super::{Epilogue, Product, TILE, finish};
use crate::Tensor;
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, MatrixTile};

/// Planes of a group.
const PLANES: u32 = 4;

#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn matrix_kernel<F: Numeric, C: Numeric, P: Numeric, O: Numeric>(
    a: &[F],
    b: &[F],
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
    #[comptime] tile: (usize, usize, usize),
    #[comptime] plane: usize,
    #[define(F, C, P, O)] _elems: [ElemType; 4],
) {
    let tm = comptime!(tile.0);
    let tn = comptime!(tile.1);
    let tk = comptime!(tile.2);
    let units = comptime!(plane * 4);
    // Rows of 32 and eight more, so that rows start in different banks.
    let mut left = Shared::<[F]>::new_slice(2560usize);
    let mut right = Shared::<[F]>::new_slice(2560usize);
    let mut sums = Shared::<[f32]>::new_slice(4096usize);
    let unit = UNIT_POS as usize;
    let own = PLANE_POS as usize;
    let (down, across) = (own / 2 * 32, own % 2 * 32);
    let columns = (n + 63) / 64;
    let row0 = CUBE_POS / columns * 64;
    let col0 = CUBE_POS % columns * 64;
    if row0 < m {
        let mut totals = Sequence::<cmma::Matrix<f32>>::new();
        #[unroll]
        for _ in 0..comptime!((32 / tm) * (32 / tn)) {
            totals.push(cmma::Matrix::<f32>::from_value(
                cmma::MatrixIdent::Accumulator,
                tm,
                tn,
                tk,
                cmma::MatrixLayout::Undefined,
                0.0f32,
            ));
        }
        let slices = (k + 31) / 32;
        for slice in 0..slices {
            let first = slice * 32;
            let mut at = unit;
            while at < 2048 {
                let mut r = at % 64;
                let mut p = at / 64;
                if comptime![e.along[0]] {
                    r = at / 32;
                    p = at % 32;
                }
                let mut value = F::from_int(0);
                if row0 + r < m {
                    if first + p < k {
                        value = a[(row0 + r) * a_row + (first + p) * a_sum];
                    }
                }
                left[r * 40 + p] = value;
                let mut r = at % 64;
                let mut p = at / 64;
                if comptime![e.along[1]] {
                    r = at / 32;
                    p = at % 32;
                }
                let mut value = F::from_int(0);
                if col0 + r < n {
                    if first + p < k {
                        value = b[(col0 + r) * b_row + (first + p) * b_sum];
                    }
                }
                right[r * 40 + p] = value;
                at += units;
            }
            sync_cube();
            #[unroll]
            for step in 0..comptime!(32 / tk) {
                #[unroll]
                for i in 0..comptime!(32 / tm) {
                    let start = (down + i * tm) * 40 + step * tk;
                    let x = cmma::Matrix::<F>::from_slice(
                        cmma::MatrixIdent::A,
                        tm,
                        tn,
                        tk,
                        cmma::MatrixLayout::RowMajor,
                        &left[start..2560],
                        40,
                    );
                    #[unroll]
                    for j in 0..comptime!(32 / tn) {
                        let start = (across + j * tn) * 40 + step * tk;
                        let y = cmma::Matrix::<F>::from_slice(
                            cmma::MatrixIdent::B,
                            tm,
                            tn,
                            tk,
                            cmma::MatrixLayout::ColMajor,
                            &right[start..2560],
                            40,
                        );
                        let total = totals.index(comptime!(i * (32 / tn) + j));
                        cmma::execute(&x, &y, total, total);
                    }
                }
            }
            sync_cube();
        }
        #[unroll]
        for i in 0..comptime!(32 / tm) {
            #[unroll]
            for j in 0..comptime!(32 / tn) {
                let start = (down + i * tm) * 64 + across + j * tn;
                let total = totals.index(comptime!(i * (32 / tn) + j));
                cmma::store(&mut sums[start..4096], total, 64, cmma::MatrixLayout::RowMajor);
            }
        }
        sync_cube();
        let mut at = unit;
        while at < 4096 {
            let (row, column) = (row0 + at / 64, col0 + at % 64);
            if row < m {
                if column < n {
                    finish::<C, P, O>(sums[at], column, row * ld + column, bias, pre, out, e);
                }
            }
            at += units;
        }
    }
}

/// The tile for a product, where the device has one: both factors of one 16-bit type, subgroups of one size.
pub(super) fn tile(gpu: &Gpu, a: &Tensor, b: &Tensor) -> Option<(MatrixTile, usize)> {
    let c = gpu.capabilities();
    let [least, most] = c.subgroup;
    let dtype = a.dtype();
    if dtype != b.dtype()
        || least != most
        || PLANES as usize * most > c.group
        || (dtype == DType::BF16 && !c.bf16_native)
    {
        return None;
    }
    let fits = |t: &MatrixTile| [t.m, t.n, t.k].iter().all(|x| 32usize.is_multiple_of(*x));
    c.tiles.iter().copied().filter(|t| t.factors == dtype && fits(t)).max_by_key(|t| t.m * t.n * t.k).map(|t| (t, most))
}

pub(super) fn run(
    gpu: &Gpu,
    op: &'static str,
    product: &Product<'_>,
    tensors: [&Tensor; 5],
    (tile, plane): (MatrixTile, usize),
    epilogue: Epilogue,
    [m, n, k]: [usize; 3],
) -> Result<()> {
    let native = |dtype| match dtype {
        DType::BF16 => Storage::native_bf16(),
        dtype => Storage::of(dtype).elem,
    };
    let [x, y, bias, pre, to] = tensors;
    let elems = [
        native(x.dtype()),
        Storage::of(bias.dtype()).elem,
        Storage::of(pre.dtype()).elem,
        Storage::of(to.dtype()).elem,
    ];
    // SAFETY: as for the plain kernel.
    unsafe {
        matrix_kernel::launch_unchecked(
            gpu.client(),
            gpu.grid(m.div_ceil(TILE) * n.div_ceil(TILE)),
            CubeDim::new_1d(PLANES * plane as u32),
            gpu.arg(op, x)?,
            gpu.arg(op, y)?,
            gpu.arg(op, bias)?,
            gpu.arg(op, pre)?,
            gpu.arg(op, to)?,
            m,
            n,
            k,
            product.a.1,
            product.a.2,
            product.b.1,
            product.b.2,
            product.out.1,
            epilogue,
            (tile.m, tile.n, tile.k),
            plane,
            elems,
        );
    }
    gpu.launched(op, &[to])
}
