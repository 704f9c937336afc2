//! AdamW in one pass over the parameters: gradient scaling, clipping, moments, decoupled weight decay, master weights, rounding, zeroing.
//!
//! `g *= grad_scale * min(1, max_norm / norm)`; `m = lerp(g, m, beta1)`, `v = lerp(g g, v, beta2)` with `lerp(a, b, w) = fma(w, b, fma(-w, a, a))`;
//! `mhat = m / (1 - beta1^step)`, `vhat = v / (1 - beta2^step)`; `p -= lr * (mhat / (sqrt(vhat) + eps) + weight_decay * p)`, `p` from the master
//! weights where there are any. All arithmetic f32.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// Clipping by global norm.
pub struct Clip<'a> {
    /// `(1)` f32, read: the norm of all gradients before `grad_scale`.
    pub norm: &'a Tensor,
    /// Gradients are scaled by `max_norm / norm` when `norm > max_norm`.
    pub max_norm: f32,
}

/// How an updated parameter is rounded to its storage type.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rounding {
    /// To nearest, ties to even.
    Nearest,
    /// llm.c's stochastic rounding to bf16: noise from the element's index within its layer, the layer and this seed. Other storage rounds to nearest.
    Stochastic {
        /// The tensor's seed.
        seed: u32,
    },
}

/// One parameter tensor's update.
pub struct Update<'a> {
    /// Any shape, read and written.
    pub param: &'a Tensor,
    /// f32 master copy, same shape, read and written.
    pub master: Option<&'a Tensor>,
    /// Same shape, read; zeroed when `zero_grad`.
    pub grad: &'a Tensor,
    /// f32, same shape, read and written.
    pub m: &'a Tensor,
    /// f32, same shape, read and written.
    pub v: &'a Tensor,
    /// Learning rate of this step.
    pub lr: f32,
    /// First-moment decay.
    pub beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// Added to the root.
    pub eps: f32,
    /// Decoupled weight decay of this tensor.
    pub weight_decay: f32,
    /// From 1.
    pub step: u64,
    /// Multiplies every gradient.
    pub grad_scale: f32,
    /// Clipping; `None` does not clip.
    pub clip: Option<Clip<'a>>,
    /// Rounding of `param`.
    pub rounding: Rounding,
    /// Layers stacked in this tensor's outermost dimension (1 where it is not a stack): part of the stochastic rounding's noise.
    pub layers: usize,
    /// Leaves the gradient zero.
    pub zero_grad: bool,
}

/// Writes `param` again from `master` with the rounding of an earlier [`Update`]: what a resume does.
pub struct Round<'a> {
    /// f32, read.
    pub master: &'a Tensor,
    /// Same shape, `=`.
    pub param: &'a Tensor,
    /// Rounding of `param`.
    pub rounding: Rounding,
    /// As in [`Update`].
    pub layers: usize,
}

/// Runs [`Update`].
pub fn update(device: &Device, args: &Update<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "adamw.update",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Round`].
pub fn round(device: &Device, args: &Round<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "adamw.round",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
