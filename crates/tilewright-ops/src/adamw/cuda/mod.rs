//! AdamW on CUDA: one pass bound by memory, the CPU's bits.

use tilewright_core::{DType, Result};

use super::{Clip, Round, Rounding, Step, Update};
use crate::Tensor;
use crate::runtime::cuda::launch::aligned;
use crate::runtime::cuda::source::code;
use crate::runtime::cuda::{Arg, Cuda, Source};

pub(crate) static SOURCE: Source = Source {
    name: "adamw/adamw.cu",
    text: include_str!("adamw.cu"),
    parameters: &["TW_DTYPE", "TW_GRAD"],
    variants: &[&[0, 0], &[0, 1], &[0, 2], &[1, 0], &[1, 1], &[1, 2], &[2, 0], &[2, 1], &[2, 2]],
    exact: true,
};

fn seed(rounding: Rounding) -> [Arg<'static>; 2] {
    match rounding {
        Rounding::Nearest => [Arg::Int(0), Arg::Int(0)],
        Rounding::Stochastic { seed } => [Arg::Int(1), Arg::Int(seed as i32)],
    }
}

/// Tensors of one launch, packs that a thread updates.
const TENSORS: usize = 16;
const ROUNDS: usize = 4;

/// Whether one launch can update both: what the kernel takes once is the same, and what it is compiled for.
fn alike(a: &Update<'_>, b: &Update<'_>) -> bool {
    let scalars = |u: &Update<'_>| [u.lr, u.beta1, u.beta2, u.eps, u.grad_scale].map(f32::to_bits);
    let clip = |u: &Update<'_>| u.clip.as_ref().map(|c| (c.norm.cuda_address(), c.max_norm.to_bits()));
    let kind = |u: &Update<'_>| {
        let stochastic = matches!(u.rounding, Rounding::Stochastic { .. });
        (u.param.dtype(), u.grad.dtype(), u.step, u.zero_grad, stochastic, wide(u))
    };
    scalars(a) == scalars(b) && clip(a) == clip(b) && kind(a) == kind(b)
}

/// Whether four elements can be moved at once.
fn wide(u: &Update<'_>) -> bool {
    let mut tensors = vec![u.param, u.grad, u.m, u.v];
    tensors.extend(u.master);
    aligned(&tensors) && (u.param.numel() / u.layers).is_multiple_of(8)
}

pub(super) fn update(cuda: &Cuda, all: &[Update<'_>]) -> Result<()> {
    let some: Vec<&Update<'_>> = all.iter().filter(|u| u.param.numel() > 0).collect();
    let mut rest = &some[..];
    while let Some(first) = rest.first() {
        let count = rest.iter().take(TENSORS).take_while(|u| alike(first, u)).count();
        let (now, later) = rest.split_at(count);
        update_alike(cuda, now)?;
        rest = later;
    }
    Ok(())
}

fn update_alike(cuda: &Cuda, all: &[&Update<'_>]) -> Result<()> {
    let first = all[0];
    // The clipping factor is made on the device, from the norm that lies there.
    let step = Step::new(first, 1.0);
    let (entry, width) = if wide(first) { ("update_wide", 4) } else { ("update_narrow", 1) };
    let (mut words, mut blocks) = ([0u64; 8 * TENSORS], 0);
    for (i, u) in all.iter().enumerate() {
        let layer_len = u.param.numel() / u.layers;
        let per_layer = layer_len.div_ceil(256 * ROUNDS * width);
        let seed = if let Rounding::Stochastic { seed } = u.rounding { seed } else { 0 };
        let master = u.master.map_or(0, Tensor::cuda_address);
        let [param, grad, m, v] = [u.param, u.grad, u.m, u.v].map(Tensor::cuda_address);
        words[5 * i..5 * i + 5].copy_from_slice(&[param, master, grad, m, v]);
        words[5 * TENSORS + i] = layer_len as u64;
        words[6 * TENSORS + i] = u64::from(u.weight_decay.to_bits()) | u64::from(seed) << 32;
        words[7 * TENSORS + i] = blocks as u64 | (per_layer as u64) << 32;
        blocks += per_layer * u.layers;
    }
    let (norm, max_norm) = match &first.clip {
        Some(Clip { norm, max_norm }) => (Some(*norm), *max_norm),
        None => (None, 0.0),
    };
    // The table is one parameter, whose bytes are read from the place of its first word on: the words behind it fill places of their own.
    let table = words.map(|word| Arg::Long(word as i64));
    let list = [
        Arg::Int(all.len() as i32),
        Arg::Maybe(norm),
        Arg::Float(max_norm),
        Arg::Float(step.grad_scale),
        Arg::Float(step.lr),
        Arg::Float(step.beta1),
        Arg::Float(step.beta2),
        Arg::Float(step.correction1),
        Arg::Float(step.correction2),
        Arg::Float(step.eps),
        Arg::Int(i32::from(matches!(first.rounding, Rounding::Stochastic { .. }))),
        Arg::Int(i32::from(first.zero_grad)),
    ];
    let kernel = SOURCE.kernel(entry, &[code(first.param.dtype()), code(first.grad.dtype())]);
    cuda.launch_with("adamw.update", &kernel, blocks, &table, &list)
}

pub(super) fn round(cuda: &Cuda, args: &Round<'_>) -> Result<()> {
    let Round { master, param, rounding, layers } = *args;
    let layer_len = param.numel() / layers;
    let kernel = SOURCE.kernel("round_masters", &[code(param.dtype()), code(DType::F32)]);
    let [stochastic, seed] = seed(rounding);
    let list = [Arg::Tensor(master), Arg::Tensor(param), stochastic, seed, Arg::Long(layer_len as i64)];
    let most = (32 * cuda.info().multiprocessors as usize).div_ceil(layers.max(1));
    let blocks = layer_len.div_ceil(256).min(most.max(1));
    cuda.launch("adamw.round", &kernel, [blocks, layers, 1], 256, 0, &list)
}
