//! Rows of a table in any order: token embeddings of a (mapped) weight, or the rows of hidden states that a head reads.

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
use crate::cpu::element::with_element;
use crate::{Device, Tensor};

/// `out[i, :] = table[index[i], :]`, widened to f32.
pub struct Forward<'a> {
    /// `(V, D)`, any float storage, read; may lie in a mapped file, of which only the rows asked for are read.
    pub table: &'a Tensor,
    /// `(N)` i32, read; every entry is checked to lie in `0..V` before anything is written.
    pub index: &'a Tensor,
    /// `(N, D)` f32, `=`; on a GPU any float storage.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("gather.forward", device);
    let Forward { table, index, out } = *args;
    let &[rows, width] = table.shape().dims() else {
        return Err(Error::Shape { op: check.op, what: "table", got: table.shape(), want: "(V, D)".into() });
    };
    let n = index.numel();
    check.float("table", table, &[rows, width])?;
    check.typed("index", index, DType::I32, &[n])?;
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => check.float("out", out, &[n, width])?,
        #[cfg(feature = "gpu")]
        Device::Gpu(_) => check.float("out", out, &[n, width])?,
        _ => check.typed("out", out, DType::F32, &[n, width])?,
    }
    check.disjoint(&[("out", out)], &[("table", table), ("index", index)])?;
    match device {
        Device::Cpu(cpu) => {
            in_range(&check, index, rows)?;
            with_element!(table.dtype(), T => cpu::forward::<T>(cpu, args, width));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => {
            in_range(&check, index, rows)?;
            cuda::forward(cuda, args, width)?;
        }
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => {
            in_range(&check, index, rows)?;
            gpu::forward(gpu, args, width)?;
        }
        Device::Null(null) => {
            let read = n * width * table.dtype().size();
            null.record(check.op, 0, (read + index.bytes() + out.bytes()) as u64);
        }
    }
    Ok(())
}

fn in_range(check: &Check<'_>, index: &Tensor, rows: usize) -> Result<()> {
    let Some(index) = index.ids()? else { return Ok(()) };
    match index.iter().position(|&i| usize::try_from(i).map_or(true, |i| i >= rows)) {
        None => Ok(()),
        Some(at) => Err(Error::Argument {
            op: check.op,
            what: format!("`index` holds {} at {at}, outside 0..{rows}, the rows of `table`", index[at]),
        }),
    }
}
