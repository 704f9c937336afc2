//! Rotary position embedding, half rotation (NeoX): of a head of `hs` channels, channel `t` turns with channel `t + hs/2`.
//!
//! With `m = hs / 2`, `f_t = theta^(-2t / hs)` and `angle = position * f_t`, for `t` in `0..m`:
//! `x[t]' = x[t] cos - x[t + m] sin`, `x[t + m]' = x[t + m] cos + x[t] sin`. Sines and cosines are tabulated once a theta.

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

use tilewright_core::{DType, Error, Result};

use crate::check::Check;
use crate::{Device, Tensor};

/// Rotates heads of `x` in place.
pub struct Forward<'a> {
    /// `(N, W)` f32, on a GPU any float storage, read and written: the first `heads * hs` columns turn, the others stay. Of packed queries, keys and values `(N, 3D)`
    /// these are `2H` heads.
    pub x: &'a Tensor,
    /// Heads to turn, from column 0 on.
    pub heads: usize,
    /// `(N)` i32, read: the position of each row in its sequence; every one is checked to lie in the table before anything is written.
    pub positions: &'a Tensor,
    /// `(P, hs)` f32, read: from [`table`] or [`fill_table`]; `hs` is even.
    pub table: &'a Tensor,
}

/// The table of a theta for positions `0..positions` and heads of `head` channels, in an arena of its own.
pub fn table(device: &Device, theta: f64, positions: usize, head: usize) -> Result<Tensor> {
    let table = Tensor::zeros(device, DType::F32, &[positions, head])?;
    fill_table(&table, theta)?;
    Ok(table)
}

/// Writes the table of a theta into `(P, hs)` f32: row `p` holds the `hs / 2` cosines of position `p`, then its sines.
///
/// The angles are f32, as the published models were trained and run: at position 8,000 one differs from the exact product by up to 2.5e-4.
/// The powers, sines and cosines are computed in f64 and rounded once.
pub fn fill_table(table: &Tensor, theta: f64) -> Result<()> {
    let op = "rope.table";
    let &[positions, head] = table.shape().dims() else {
        return Err(Error::Shape { op, what: "table", got: table.shape(), want: "(P, hs)".into() });
    };
    let check = Check::new(op, table.device());
    check.typed("table", table, DType::F32, &[positions, head])?;
    even(&check, head)?;
    check
        .argument(theta.is_finite() && theta > 0.0, || format!("`theta` is {theta}; it must be positive and finite"))?;
    let half = head / 2;
    let frequencies: Vec<f32> = (0..half)
        .map(|t| {
            let exponent = (2 * t) as f32 / head as f32;
            1.0 / theta.powf(f64::from(exponent)) as f32
        })
        .collect();
    let mut values = vec![0.0; positions * head];
    for (position, row) in values.chunks_exact_mut(head).enumerate() {
        let (cosines, sines) = row.split_at_mut(half);
        for ((c, s), f) in cosines.iter_mut().zip(sines).zip(&frequencies) {
            let angle = f64::from(position as f32 * f);
            (*c, *s) = (angle.cos() as f32, angle.sin() as f32);
        }
    }
    table.write_f32(&values)
}

fn even(check: &Check<'_>, head: usize) -> Result<()> {
    check.argument(head > 0 && head.is_multiple_of(2), || {
        format!("the head size is {head}; rotation takes channels in pairs, so it must be even and above 0")
    })
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("rope.forward", device);
    let Forward { x, heads, positions, table } = *args;
    let (n, width) = x.shape().as_matrix();
    let (longest, head) = table.shape().as_matrix();
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => {}
        #[cfg(feature = "gpu")]
        Device::Gpu(_) => {}
        _ => check.typed("x", x, DType::F32, &x.shape())?,
    }
    check.matrix("x", x, n, width)?;
    check.typed("table", table, DType::F32, &[longest, head])?;
    check.typed("positions", positions, DType::I32, &[n])?;
    even(&check, head)?;
    check.argument(heads.checked_mul(head).is_some_and(|columns| columns <= width), || {
        format!("{heads} heads of {head} do not fit the {width} columns of `x`")
    })?;
    check.disjoint(&[("x", x)], &[("positions", positions), ("table", table)])?;
    match device {
        Device::Cpu(cpu) => {
            in_range(&check, positions, longest)?;
            cpu::forward(cpu, args, width, head);
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            in_range(&check, positions, longest)?;
            cuda::forward(cuda, args, width, head)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            in_range(&check, positions, longest)?;
            gpu::forward(gpu, args, width, head)?;
        }
        Device::Null(null) => {
            let turned = n * heads * head;
            let bytes = 2 * turned * size_of::<f32>() + positions.bytes() + n * head * size_of::<f32>();
            null.record(check.op, 3 * turned as u64, bytes as u64);
        }
    }
    Ok(())
}

/// Every position lies in a table of so many.
pub(crate) fn in_range(check: &Check<'_>, positions: &Tensor, longest: usize) -> Result<()> {
    let Some(positions) = positions.ids()? else { return Ok(()) };
    match positions.iter().position(|&p| usize::try_from(p).map_or(true, |p| p >= longest)) {
        None => Ok(()),
        Some(row) => Err(Error::Argument {
            op: check.op,
            what: format!(
                "`positions` holds {} at row {row}, outside 0..{longest} of `table`; use a shorter row or a longer table",
                positions[row]
            ),
        }),
    }
}
