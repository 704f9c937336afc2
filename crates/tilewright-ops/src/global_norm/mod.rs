//! The L2 norm over many tensors: `sqrt(sum of squares)`, reduced in a fixed order, the same bits for any number of threads.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// `out[0] = sqrt(sum over all elements of all tensors of x^2)`.
pub struct Forward<'a> {
    /// Any float tensors, read.
    pub tensors: &'a [Tensor],
    /// `(1)` f32, `=`.
    pub out: &'a Tensor,
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "global_norm.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
