//! The loss of a language model, `-log softmax(hidden @ weight^T)[target]`, and its gradients, without ever holding the `(N, V)` logits.
//!
//! Rows whose target is `ignore_index` have loss 0 and gradient 0, and cost nothing. Rows `vocab..Vp` of the weight are padding: they take part
//! in nothing, and their gradient is exactly 0. Log-sum-exp, softmax and all gradient accumulation are f32. Exact: no gradient is filtered.
//!
//! Three entries: [`forward`] walks vocabulary tiles with an online log-sum-exp and needs a workspace of one tile; [`backward`] recomputes the
//! tiles from `lse` (8 N V D operations in all with the forward); [`forward_backward`] keeps the logits of a bounded chunk of rows and makes loss
//! and gradients in one walk (6 N V D operations), for trainers, which know `dloss` beforehand.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// Loss only.
pub struct Forward<'a> {
    /// `(N, D)`, read; leading dimensions fold.
    pub hidden: &'a Tensor,
    /// `(Vp, D)`, read.
    pub weight: &'a Tensor,
    /// `V <= Vp`.
    pub vocab: usize,
    /// `N` elements, i32, read; each `ignore_index` or in `0..vocab`.
    pub targets: &'a Tensor,
    /// The target of rows that do not count; conventionally -100.
    pub ignore_index: i32,
    /// `N` elements, f32, `=`: `lse - logit[target]`, natural log; 0 for ignored rows.
    pub losses: &'a Tensor,
    /// `N` elements, f32, `=`: log-sum-exp of the row's logits, saved for backward; 0 for ignored rows.
    pub lse: &'a Tensor,
    /// [`forward_workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// Gradients from a saved `lse`; `dlogits = (softmax - onehot) * dloss`.
pub struct Backward<'a> {
    /// As in the forward.
    pub hidden: &'a Tensor,
    /// As in the forward.
    pub weight: &'a Tensor,
    /// As in the forward.
    pub vocab: usize,
    /// As in the forward.
    pub targets: &'a Tensor,
    /// As in the forward.
    pub ignore_index: i32,
    /// `N` elements, f32, read.
    pub lse: &'a Tensor,
    /// The gradient of the total with respect to each row's loss: `1 / (B T accum)` for a mean over micro-batches.
    pub dloss: f32,
    /// `(N, D)`, `=`.
    pub dhidden: &'a Tensor,
    /// `(Vp, D)`, `=` or `+=`.
    pub dweight: &'a Tensor,
    /// `+=` into `dweight` instead of `=`.
    pub accumulate_dweight: bool,
    /// [`backward_workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// Loss and gradients in one walk; the fields of [`Forward`] and [`Backward`].
pub struct ForwardBackward<'a> {
    /// As in the forward.
    pub hidden: &'a Tensor,
    /// As in the forward.
    pub weight: &'a Tensor,
    /// As in the forward.
    pub vocab: usize,
    /// As in the forward.
    pub targets: &'a Tensor,
    /// As in the forward.
    pub ignore_index: i32,
    /// `N` elements, f32, `=`.
    pub losses: &'a Tensor,
    /// As in the backward.
    pub dloss: f32,
    /// `(N, D)`, `=`.
    pub dhidden: &'a Tensor,
    /// `(Vp, D)`, `=` or `+=`.
    pub dweight: &'a Tensor,
    /// `+=` into `dweight` instead of `=`.
    pub accumulate_dweight: bool,
    /// [`forward_backward_workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// Bytes of workspace that [`forward`] needs.
pub fn forward_workspace_bytes(device: &Device, n: usize, d: usize, vp: usize) -> usize {
    let _ = (device, n, d, vp);
    0
}

/// Bytes of workspace that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, n: usize, d: usize, vp: usize) -> usize {
    let _ = (device, n, d, vp);
    0
}

/// Bytes of workspace that [`forward_backward`] needs.
pub fn forward_backward_workspace_bytes(device: &Device, n: usize, d: usize, vp: usize) -> usize {
    let _ = (device, n, d, vp);
    0
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "linear_cross_entropy.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "linear_cross_entropy.backward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`ForwardBackward`].
pub fn forward_backward(device: &Device, args: &ForwardBackward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "linear_cross_entropy.forward_backward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
