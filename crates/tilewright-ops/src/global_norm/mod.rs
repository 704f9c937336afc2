//! The L2 norm over many tensors: `sqrt(sum of squares)`, reduced in a fixed order, the same bits for any number of threads.
//!
//! Squares and sums are f64: exact squares, no overflow for any f32, and no digits lost over the hundreds of millions of a model's gradients. Through
//! Vulkan and Metal, where f64 may be missing, they are f32 with three sums of squares, within 4e-7.

use tilewright_core::{DType, Result};

use crate::check::Check;
use crate::cpu::element::with_element;
use crate::{Device, Tensor};

mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(feature = "gpu")]
pub(crate) mod gpu;
#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;

/// `out[0] = sqrt(sum over all elements of all tensors of x^2)`.
pub struct Forward<'a> {
    /// Any float tensors, read.
    pub tensors: &'a [Tensor],
    /// `(1)` f32, `=`.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let check = Check::new("global_norm.forward", device);
    let Forward { tensors, out } = *args;
    check.typed("out", out, DType::F32, &[1])?;
    for t in tensors {
        check.float("tensors", t, &t.shape())?;
        check.disjoint(&[("out", out)], &[("tensors", t)])?;
    }
    match device {
        Device::Cpu(cpu) => {
            let mut sum = 0.0f64;
            for t in tensors {
                sum += with_element!(t.dtype(), T => cpu::sum_of_squares::<T>(cpu, t));
            }
            out.write_f32(&[sum.sqrt() as f32])?;
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(cuda, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(device, gpu, args)?,
        Device::Null(null) => {
            let (elements, bytes) = tensors.iter().fold((0, 0), |(n, b), t| (n + t.numel(), b + t.bytes()));
            null.record(check.op, 2 * elements as u64, (bytes + out.bytes()) as u64);
        }
    }
    Ok(())
}
