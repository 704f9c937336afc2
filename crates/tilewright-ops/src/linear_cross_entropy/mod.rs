//! The loss of a language model, `-log softmax(hidden @ weight^T)[target]`, and its gradients, without ever holding the `(N, V)` logits.
//!
//! Rows whose target is `ignore_index` have loss 0 and gradient 0, and cost nothing. Rows `vocab..Vp` of the weight are padding: they take part
//! in nothing, and their gradient is exactly 0. Log-sum-exp, softmax and all gradient accumulation are f32. Exact: no gradient is filtered.
//!
//! Three entries: [`forward`] walks vocabulary tiles with an online log-sum-exp and needs a workspace of one tile; [`backward`] recomputes the
//! tiles from `lse` (8 N V D operations in all with the forward); [`forward_backward`] keeps the logits of a bounded chunk of rows and makes loss
//! and gradients in one walk (6 N V D operations), for trainers, which know `dloss` beforehand.
//!
//! Each float tensor may have its own storage type. A gradient stored in 16 bits is summed in f32 and rounded once, which costs one more
//! recompute (2 N V D operations) where its f32 sums would outgrow the workspace: in `forward_backward` for a 16-bit `dweight` and more rows
//! than a chunk, in `backward` when both gradients are 16-bit and `dhidden` is larger than 8 MiB in f32. On Hopper `forward_backward` in bf16 never
//! recomputes: where f32 sums of `dweight` would outgrow the workspace they wait between chunks (of 2048 rows at 152 thousand columns) with one bit more
//! than bf16 has, an error of 2^-9 at most each time, without bias.
//!
//! No workspace grows with `N V`: on the CPU, `forward` holds a strip of logits (266 rows by 224 columns) for each thread and two numbers a row and
//! strip, `backward` a tile (266 by 1024), `forward_backward` at most 140 rows of logits in at most 32 MiB, and never all rows of more than 128.
//! Beside them stand copies of so many hidden rows, and at most 12 bytes a row of the batch. The same inputs give the same bits for any number
//! of threads, and ignoring a row gives the same bits as deleting it.

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

use self::cpu::Layout;
use crate::check::Check;
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
    Layout::forward(device.threads(), n, d, vp).bytes_on(device)
}

/// Bytes of workspace that [`backward`] needs.
pub fn backward_workspace_bytes(device: &Device, n: usize, d: usize, vp: usize) -> usize {
    Layout::backward(device.threads(), n, d, vp).bytes_on(device)
}

/// Bytes of workspace that [`forward_backward`] needs.
pub fn forward_backward_workspace_bytes(device: &Device, n: usize, d: usize, vp: usize) -> usize {
    Layout::training(device.threads(), n, d, vp).bytes_on(device)
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let head = Head::of_forward(args);
    let (n, d, vp) = head.dims();
    forward_with(device, args, &Layout::forward(device.threads(), n, d, vp))
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let head = Head::of_backward(args);
    let (n, d, vp) = head.dims();
    backward_with(device, args, &Layout::backward(device.threads(), n, d, vp))
}

/// Runs [`ForwardBackward`].
pub fn forward_backward(device: &Device, args: &ForwardBackward<'_>) -> Result<()> {
    let head = Head::of_training(args);
    let (n, d, vp) = head.dims();
    forward_backward_with(device, args, &Layout::training(device.threads(), n, d, vp))
}

/// [`forward`] with tiles of the caller's choice, so that tests reach many tiles with few numbers.
fn forward_with(device: &Device, args: &Forward<'_>, layout: &Layout) -> Result<()> {
    let head = Head::of_forward(args);
    let check = Check::new("linear_cross_entropy.forward", device);
    let (n, d, _) = head.check(&check)?;
    per_row(&check, "losses", args.losses, DType::F32, n)?;
    per_row(&check, "lse", args.lse, DType::F32, n)?;
    check.workspace(args.workspace, layout.bytes_on(device))?;
    check.disjoint(
        &[("losses", args.losses), ("lse", args.lse), ("workspace", args.workspace)],
        &[("hidden", args.hidden), ("weight", args.weight), ("targets", args.targets)],
    )?;
    head.check_targets(&check)?;
    match device {
        Device::Cpu(cpu) => cpu::forward(cpu, args, layout),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward(cuda, args, &layout.tiles()),
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward(gpu, args, &layout.portable_tiles()),
        Device::Null(null) => {
            null.record(check.op, flops(2, n, args.vocab, d), head.bytes() + moved(&[args.losses, args.lse]));
            Ok(())
        }
    }
}

/// [`backward`] with tiles of the caller's choice.
fn backward_with(device: &Device, args: &Backward<'_>, layout: &Layout) -> Result<()> {
    let head = Head::of_backward(args);
    let check = Check::new("linear_cross_entropy.backward", device);
    let (n, d, vp) = head.check(&check)?;
    per_row(&check, "lse", args.lse, DType::F32, n)?;
    check.matrix("dhidden", args.dhidden, n, d)?;
    check.matrix("dweight", args.dweight, vp, d)?;
    check.workspace(args.workspace, layout.bytes_on(device))?;
    check.disjoint(
        &[("dhidden", args.dhidden), ("dweight", args.dweight), ("workspace", args.workspace)],
        &[("hidden", args.hidden), ("weight", args.weight), ("targets", args.targets), ("lse", args.lse)],
    )?;
    head.check_targets(&check)?;
    match device {
        Device::Cpu(cpu) => cpu::backward(cpu, args, layout),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::backward(cuda, args, &layout.tiles()),
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::backward(gpu, args, &layout.portable_tiles()),
        Device::Null(null) => {
            let factor = if layout.recomputes_twice(args.dhidden.dtype(), args.dweight.dtype(), n) { 8 } else { 6 };
            let bytes =
                head.bytes() + moved(&[args.lse, args.dhidden]) + updated(args.dweight, args.accumulate_dweight);
            null.record(check.op, flops(factor, n, args.vocab, d), bytes);
            Ok(())
        }
    }
}

/// [`forward_backward`] with tiles of the caller's choice.
fn forward_backward_with(device: &Device, args: &ForwardBackward<'_>, layout: &Layout) -> Result<()> {
    let head = Head::of_training(args);
    let check = Check::new("linear_cross_entropy.forward_backward", device);
    let (n, d, vp) = head.check(&check)?;
    per_row(&check, "losses", args.losses, DType::F32, n)?;
    check.matrix("dhidden", args.dhidden, n, d)?;
    check.matrix("dweight", args.dweight, vp, d)?;
    check.workspace(args.workspace, layout.bytes_on(device))?;
    check.disjoint(
        &[("losses", args.losses), ("dhidden", args.dhidden), ("dweight", args.dweight), ("workspace", args.workspace)],
        &[("hidden", args.hidden), ("weight", args.weight), ("targets", args.targets)],
    )?;
    head.check_targets(&check)?;
    match device {
        Device::Cpu(cpu) => cpu::forward_backward(cpu, args, layout),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::forward_backward(cuda, args, &layout.tiles()),
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::forward_backward(gpu, args, &layout.portable_tiles()),
        Device::Null(null) => {
            let factor = if layout.recomputes_for_dweight(args.dweight.dtype(), n) { 8 } else { 6 };
            let bytes =
                head.bytes() + moved(&[args.losses, args.dhidden]) + updated(args.dweight, args.accumulate_dweight);
            null.record(check.op, flops(factor, n, args.vocab, d), bytes);
            Ok(())
        }
    }
}

/// What the three entries share.
#[derive(Clone, Copy)]
struct Head<'a> {
    hidden: &'a Tensor,
    weight: &'a Tensor,
    vocab: usize,
    targets: &'a Tensor,
    ignore_index: i32,
}

impl<'a> Head<'a> {
    fn of_forward(a: &Forward<'a>) -> Self {
        Head { hidden: a.hidden, weight: a.weight, vocab: a.vocab, targets: a.targets, ignore_index: a.ignore_index }
    }

    fn of_backward(a: &Backward<'a>) -> Self {
        Head { hidden: a.hidden, weight: a.weight, vocab: a.vocab, targets: a.targets, ignore_index: a.ignore_index }
    }

    fn of_training(a: &ForwardBackward<'a>) -> Self {
        Head { hidden: a.hidden, weight: a.weight, vocab: a.vocab, targets: a.targets, ignore_index: a.ignore_index }
    }

    /// `(N, D, Vp)` as the tensors have them.
    fn dims(&self) -> (usize, usize, usize) {
        let (n, d) = self.hidden.shape().as_matrix();
        (n, d, self.weight.shape().as_matrix().0)
    }

    fn check(&self, check: &Check<'_>) -> Result<(usize, usize, usize)> {
        let (n, d, vp) = self.dims();
        check.matrix("hidden", self.hidden, n, d)?;
        check.matrix("weight", self.weight, vp, d)?;
        check.argument(d > 0, || "`hidden` has rows of width 0; give it at least one column".into())?;
        check.argument((1..=vp).contains(&self.vocab), || {
            format!("`vocab` is {}, allowed is 1 to the {vp} rows of `weight`", self.vocab)
        })?;
        per_row(check, "targets", self.targets, DType::I32, n)?;
        Ok((n, d, vp))
    }

    /// Reads every target before anything is written.
    fn check_targets(&self, check: &Check<'_>) -> Result<()> {
        if let Device::Null(_) = check.device {
            return Ok(());
        }
        let Some(targets) = self.targets.ids()? else { return Ok(()) };
        let bad = |&t: &i32| t != self.ignore_index && !usize::try_from(t).is_ok_and(|t| t < self.vocab);
        match targets.iter().position(bad) {
            None => Ok(()),
            Some(row) => Err(Error::Argument {
                op: check.op,
                what: format!(
                    "`targets` row {row} is {}, allowed are 0 to {} and ignore_index {}",
                    targets[row],
                    self.vocab - 1,
                    self.ignore_index
                ),
            }),
        }
    }

    fn bytes(&self) -> u64 {
        moved(&[self.hidden, self.weight, self.targets])
    }
}

/// One element a row, in whatever shape the caller keeps its batch.
fn per_row(check: &Check<'_>, what: &'static str, t: &Tensor, dtype: DType, n: usize) -> Result<()> {
    check.typed(what, t, dtype, t.shape().dims())?;
    if t.numel() != n {
        let want = format!("{n} elements, one a row of `hidden`");
        return Err(Error::Shape { op: check.op, what, got: t.shape(), want });
    }
    Ok(())
}

fn moved(tensors: &[&Tensor]) -> u64 {
    tensors.iter().map(|t| t.bytes() as u64).sum()
}

/// A buffer that is written, and read before when accumulated into.
fn updated(t: &Tensor, accumulate: bool) -> u64 {
    t.bytes() as u64 * if accumulate { 2 } else { 1 }
}

fn flops(factor: u64, n: usize, v: usize, d: usize) -> u64 {
    factor * n as u64 * v as u64 * d as u64
}
