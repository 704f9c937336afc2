//! AdamW on CUDA: one pass bound by memory, the CPU's bits.

use tilewright_core::{DType, Result};

use super::{Clip, Round, Rounding, Step, Update};
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

fn blocks(cuda: &Cuda, layer_len: usize, per_thread: usize, layers: usize) -> usize {
    let most = (32 * cuda.info().multiprocessors as usize).div_ceil(layers.max(1));
    layer_len.div_ceil(256 * per_thread).min(most.max(1))
}

pub(super) fn update(cuda: &Cuda, args: &Update<'_>) -> Result<()> {
    let Update { param, master, grad, m, v, layers, .. } = *args;
    // The clipping factor is made on the device, from the norm that lies there.
    let step = Step::new(args, 1.0);
    let layer_len = param.numel() / layers;
    let mut tensors = vec![param, grad, m, v];
    tensors.extend(master);
    let wide = aligned(&tensors) && layer_len.is_multiple_of(8);
    let kernel =
        SOURCE.kernel(if wide { "update_wide" } else { "update_narrow" }, &[code(param.dtype()), code(grad.dtype())]);
    let (norm, max_norm) = match args.clip {
        Some(Clip { norm, max_norm }) => (Some(norm), max_norm),
        None => (None, 0.0),
    };
    let [stochastic, seed] = seed(args.rounding);
    let list = [
        Arg::Tensor(param),
        Arg::Maybe(master),
        Arg::Tensor(grad),
        Arg::Tensor(m),
        Arg::Tensor(v),
        Arg::Maybe(norm),
        Arg::Float(max_norm),
        Arg::Float(step.grad_scale),
        Arg::Float(step.lr),
        Arg::Float(step.beta1),
        Arg::Float(step.beta2),
        Arg::Float(step.correction1),
        Arg::Float(step.correction2),
        Arg::Float(step.eps),
        Arg::Float(step.weight_decay),
        stochastic,
        seed,
        Arg::Int(i32::from(args.zero_grad)),
        Arg::Long(layer_len as i64),
    ];
    let grid = [blocks(cuda, layer_len, if wide { 4 } else { 1 }, layers), layers, 1];
    cuda.launch("adamw.update", &kernel, grid, 256, 0, &list)
}

pub(super) fn round(cuda: &Cuda, args: &Round<'_>) -> Result<()> {
    let Round { master, param, rounding, layers } = *args;
    let layer_len = param.numel() / layers;
    let kernel = SOURCE.kernel("round_masters", &[code(param.dtype()), code(DType::F32)]);
    let [stochastic, seed] = seed(rounding);
    let list = [Arg::Tensor(master), Arg::Tensor(param), stochastic, seed, Arg::Long(layer_len as i64)];
    cuda.launch("adamw.round", &kernel, [blocks(cuda, layer_len, 1, layers), layers, 1], 256, 0, &list)
}
