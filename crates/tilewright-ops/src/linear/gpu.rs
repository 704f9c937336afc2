//! Linear layers of inference through Vulkan and Metal: a weight lies as rows `(N, K)` in its type, products are the tiled kernel's of
//! [`crate::matmul`]. A gated product goes some rows at a time through the device's scratch.

use tilewright_core::{DType, Result};

use super::{Activation, Forward};
use crate::matmul::gpu::Product;
use crate::runtime::gpu::prelude::*;
use crate::runtime::gpu::{Gpu, SCRATCH_BYTES};
use crate::{Device, Tensor};

const OP: &str = "linear.forward";

#[cube(launch_unchecked)]
fn convert_kernel<A: Numeric, B: Numeric>(
    from: &[A],
    to: &mut [B],
    n: usize,
    #[comptime] from_bf16: bool,
    #[comptime] to_bf16: bool,
    #[define(A, B)] _elems: [ElemType; 2],
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        to[i] = narrow::<B>(widen::<A>(from[i], from_bf16), to_bf16);
        i += step;
    }
}

// out = gelu(z[.., j]) * z[.., j + columns] [+ residual], z with its bias.
#[cube(launch_unchecked)]
fn gate_kernel<E: Numeric>(
    z: &[f32],
    residual: &[f32],
    out: &mut [E],
    rows: usize,
    columns: usize,
    #[comptime] adds: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < rows * columns {
        let at = i / columns * 2 * columns + i % columns;
        let mut value = gelu_value(z[at], true) * z[at + columns];
        if comptime![adds] {
            value += residual[i];
        }
        out[i] = narrow::<E>(value, bf16);
        i += step;
    }
}

/// Writes a weight's rows in its type.
pub(super) fn pack(gpu: &Gpu, op: &'static str, source: &Tensor, precision: DType, memory: &Tensor) -> Result<()> {
    let n = source.numel();
    if n == 0 {
        return Ok(());
    }
    let (from, to) = (gpu.storage(op, source.dtype())?, gpu.storage(op, precision)?);
    let rows = memory.reinterpret(0, precision, &[n])?;
    let (x, y) = (gpu.arg(op, source)?, gpu.arg(op, &rows)?);
    // SAFETY: both have `n` elements.
    unsafe {
        let (grid, units) = (gpu.spread(n), CubeDim::new_1d(UNITS));
        convert_kernel::launch_unchecked(gpu.client(), grid, units, x, y, n, from.bf16, to.bf16, [from.elem, to.elem]);
    }
    gpu.launched(op, &[memory])
}

/// `out = x @ rows^T + bias`, `x` rounded to the type of the weight.
fn plain<'a>((x, out): (&'a Tensor, &'a Tensor), bias: Option<&'a Tensor>, rows: &'a Tensor) -> Product<'a> {
    let (n, k) = rows.shape().as_matrix();
    Product { bias, round: true, ..Product::plain((x, k, 1), (rows, k, 1), (out, n)) }
}

pub(super) fn forward(device: &Device, gpu: &Gpu, args: &Forward<'_>, m: usize) -> Result<()> {
    let Forward { x, weight, bias, activation, residual, out } = *args;
    let (n, k) = weight.shape();
    if m * n == 0 {
        return Ok(());
    }
    let rows = weight.memory().reinterpret(0, weight.dtype(), &[n, k])?;
    if activation != Activation::Geglu {
        let in_place = residual.is_some_and(|r| r.same_memory(out));
        let gelu = if let Activation::Gelu(kind) = activation { Some(kind) } else { None };
        let add = residual.filter(|_| !in_place);
        let product = Product {
            gelu,
            relu: activation == Activation::Relu,
            add,
            accumulate: in_place,
            ..plain((x, out), bias, &rows)
        };
        return product.run(gpu, OP, m, n, k);
    }
    let columns = n / 2;
    let chunk = (SCRATCH_BYTES / (n * size_of::<f32>())).clamp(1, m);
    let own = gpu.storage(OP, out.dtype())?;
    for first in (0..m).step_by(chunk) {
        let count = chunk.min(m - first);
        let z = gpu.scratch(OP, device, count * n * size_of::<f32>())?.reinterpret(0, DType::F32, &[count, n])?;
        plain((&x.slice(first * k, &[count, k])?, &z), bias, &rows).run(gpu, OP, count, n, k)?;
        let part = |t: &Tensor| t.slice(first * columns, &[count, columns]);
        let (to, added) = (part(out)?, residual.map(part).transpose()?);
        let (sums, adds, target) = (gpu.arg(OP, &z)?, gpu.arg(OP, added.as_ref().unwrap_or(&z))?, gpu.arg(OP, &to)?);
        // SAFETY: `z` is `(count, 2 * columns)`, the others `(count, columns)`.
        unsafe {
            let (grid, units) = (gpu.spread(count * columns), CubeDim::new_1d(UNITS));
            let adding = added.is_some();
            gate_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                sums,
                adds,
                target,
                count,
                columns,
                adding,
                own.bf16,
                own.elem,
            );
        }
        gpu.launched(OP, &[&to])?;
    }
    Ok(())
}
