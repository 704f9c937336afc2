//! AdamW in one pass over the parameters: gradient scaling, clipping, moments, decoupled weight decay, master weights, rounding, zeroing.
//!
//! `g *= grad_scale * min(1, max_norm / norm)`; `m = lerp(g, m, beta1)`, `v = lerp(g g, v, beta2)` with `lerp(a, b, w) = fma(w, b, fma(-w, a, a))`;
//! `mhat = m / (1 - beta1^step)`, `vhat = v / (1 - beta2^step)`; `p -= lr * (mhat / (sqrt(vhat) + eps) + weight_decay * p)`, `p` from the master
//! weights where there are any. All arithmetic f32.

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
    update_all(device, std::slice::from_ref(args))
}

/// Runs many, which must not share memory: by few launches on a device that starts work in launches.
pub fn update_all(device: &Device, all: &[Update<'_>]) -> Result<()> {
    for args in all {
        checked(device, args)?;
    }
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::update(cuda, all),
        _ => all.iter().try_for_each(|args| one(device, args)),
    }
}

fn checked(device: &Device, args: &Update<'_>) -> Result<()> {
    let check = Check::new("adamw.update", device);
    let Update { param, master, grad, m, v, .. } = *args;
    let shape = param.shape();
    check.float("param", param, &shape)?;
    check.float("grad", grad, &shape)?;
    check.typed("m", m, DType::F32, &shape)?;
    check.typed("v", v, DType::F32, &shape)?;
    let mut written = vec![("param", param), ("grad", grad), ("m", m), ("v", v)];
    if let Some(master) = master {
        check.typed("master", master, DType::F32, &shape)?;
        written.push(("master", master));
    }
    let mut read = Vec::new();
    if let Some(Clip { norm, max_norm }) = args.clip {
        check.typed("norm", norm, DType::F32, &[1])?;
        check.argument(max_norm.is_finite() && max_norm > 0.0, || {
            format!("`max_norm` is {max_norm}; it must be positive and finite (no clipping is `clip: None`)")
        })?;
        read.push(("norm", norm));
    }
    check.disjoint(&written, &read)?;
    check_scalars(&check, args)?;
    check_layers(&check, param, args.layers)
}

/// Runs one whose arguments are checked.
fn one(device: &Device, args: &Update<'_>) -> Result<()> {
    let Update { param, master, grad, m, v, .. } = *args;
    match device {
        Device::Cpu(cpu) => {
            let step = Step::new(args, args.clip.as_ref().map_or(Ok(1.0), clip_scale)?);
            with_element!(param.dtype(), P => with_element!(grad.dtype(), G => cpu::update::<P, G>(cpu, args, &step)));
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::update(cuda, std::slice::from_ref(args))?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::update(gpu, args)?,
        Device::Null(null) => {
            // Everything is read and written, but `grad` is only read unless it is zeroed, and `param` only written beside a master.
            let all = 2 * (param.bytes() + grad.bytes() + m.bytes() + v.bytes() + master.map_or(0, Tensor::bytes));
            let less = if args.zero_grad { 0 } else { grad.bytes() } + if master.is_some() { param.bytes() } else { 0 };
            null.record("adamw.update", 20 * param.numel() as u64, (all - less) as u64);
        }
    }
    Ok(())
}

/// Runs [`Round`].
pub fn round(device: &Device, args: &Round<'_>) -> Result<()> {
    let check = Check::new("adamw.round", device);
    let Round { master, param, rounding, layers } = *args;
    check.typed("master", master, DType::F32, &master.shape())?;
    check.float("param", param, &master.shape())?;
    check.disjoint(&[("param", param)], &[("master", master)])?;
    check_layers(&check, param, layers)?;
    match device {
        Device::Cpu(cpu) => with_element!(param.dtype(), P => cpu::round::<P>(cpu, master, param, rounding, layers)),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda) => cuda::round(cuda, args)?,
        #[cfg(feature = "gpu")]
        Device::Gpu(gpu) => gpu::round(gpu, args)?,
        Device::Null(null) => null.record(check.op, 0, (master.bytes() + param.bytes()) as u64),
    }
    Ok(())
}

/// The scalars of one update, as the kernel uses them.
#[derive(Clone, Copy, Debug)]
struct Step {
    grad_scale: f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    /// `1 - beta1^step`, by f64 powers: in f32 the difference would lose up to half of its digits.
    correction1: f32,
    /// `1 - beta2^step`.
    correction2: f32,
    eps: f32,
    weight_decay: f32,
}

impl Step {
    fn new(args: &Update<'_>, clip_scale: f32) -> Self {
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(args.step as f64)) as f32;
        Step {
            grad_scale: args.grad_scale * clip_scale,
            lr: args.lr,
            beta1: args.beta1,
            beta2: args.beta2,
            correction1: correction(args.beta1),
            correction2: correction(args.beta2),
            eps: args.eps,
            weight_decay: args.weight_decay,
        }
    }
}

fn clip_scale(clip: &Clip<'_>) -> Result<f32> {
    let mut norm = [0.0];
    clip.norm.read_f32_into(&mut norm)?;
    Ok(if norm[0] > clip.max_norm { clip.max_norm / norm[0] } else { 1.0 })
}

fn check_scalars(check: &Check<'_>, args: &Update<'_>) -> Result<()> {
    check.argument(args.step >= 1, || "`step` is 0; the first update is step 1".into())?;
    for (name, value) in [("beta1", args.beta1), ("beta2", args.beta2)] {
        check.argument((0.0..1.0).contains(&value), || format!("`{name}` is {value}; it must lie in [0, 1)"))?;
    }
    check.argument(args.eps.is_finite() && args.eps >= 0.0, || {
        format!("`eps` is {}; it must be finite and not negative", args.eps)
    })?;
    for (name, value) in [("lr", args.lr), ("weight_decay", args.weight_decay), ("grad_scale", args.grad_scale)] {
        check.argument(value.is_finite(), || format!("`{name}` is {value}; it must be finite"))?;
    }
    Ok(())
}

fn check_layers(check: &Check<'_>, param: &Tensor, layers: usize) -> Result<()> {
    check.argument(layers >= 1 && param.numel().is_multiple_of(layers), || {
        format!("`layers` is {layers}, which does not divide `param` of shape {}", param.shape())
    })
}
