//! The formulas for one element: in f64, and step by step in f32 as the contract spells them.

use tilewright_core::bf16;
use tilewright_core::rng::{noise2d, stochastic_round_bf16};

/// The scalars of an update; `scale` is that of gradient scaling and clipping together.
#[derive(Clone, Copy)]
pub(crate) struct Scalars {
    pub(crate) scale: f32,
    pub(crate) lr: f32,
    pub(crate) beta1: f32,
    pub(crate) beta2: f32,
    pub(crate) eps: f32,
    pub(crate) weight_decay: f32,
    pub(crate) step: u64,
}

/// `(p, m, v)` after one update, in f64.
pub(crate) fn exact(s: &Scalars, p: f64, grad: f64, m: f64, v: f64) -> (f64, f64, f64) {
    let [scale, lr, beta1, beta2, eps, decay] = [s.scale, s.lr, s.beta1, s.beta2, s.eps, s.weight_decay].map(f64::from);
    let g = grad * scale;
    let m = beta1 * m + (1.0 - beta1) * g;
    let v = beta2 * v + (1.0 - beta2) * g * g;
    let mhat = m / (1.0 - beta1.powf(s.step as f64));
    let vhat = v / (1.0 - beta2.powf(s.step as f64));
    (p - lr * (mhat / (vhat.sqrt() + eps) + decay * p), m, v)
}

/// The same with every operation rounded to f32, in the order of the contract.
pub(crate) fn single(s: &Scalars, p: f32, grad: f32, m: f32, v: f32) -> (f32, f32, f32) {
    let lerp = |a: f32, b: f32, w: f32| f32::mul_add(w, b, f32::mul_add(-w, a, a));
    let correction = |beta: f32| (1.0 - f64::from(beta).powf(s.step as f64)) as f32;
    let g = grad * s.scale;
    let (m, v) = (lerp(g, m, s.beta1), lerp(g * g, v, s.beta2));
    let (mhat, vhat) = (m / correction(s.beta1), v / correction(s.beta2));
    (p - s.lr * (mhat / (vhat.sqrt() + s.eps) + s.weight_decay * p), m, v)
}

/// llm.c's rounding of element `index` of layer `layer`: a grid of 512 threads a block, the layer as the block's second coordinate.
pub(crate) fn stochastic(value: f32, index: usize, layer: usize, seed: u32) -> bf16 {
    let (thread, block) = (index % 512, index / 512);
    stochastic_round_bf16(value, noise2d(thread as u32, (block * 512 + layer) as u32, seed))
}
