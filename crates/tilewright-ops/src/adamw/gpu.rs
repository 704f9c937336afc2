//! AdamW through Vulkan and Metal: one pass, bound by memory; eight elements a unit at a time where tensors are whole packs of 16 bytes.

use tilewright_core::Result;

use super::{Clip, Round, Rounding, Step, Update};
use crate::DType;
use crate::runtime::gpu::Gpu;
use crate::runtime::gpu::prelude::*;

/// llm.c's noise of a position.
#[cube]
fn noise(position: u32, seed: u32) -> u32 {
    let mut bits = position * 0xd2a8_0a3fu32 + seed;
    bits = bits ^ (bits >> 9u32);
    bits = bits + 0xa884_f197u32;
    bits = bits ^ (bits >> 11u32);
    bits = bits * 0x6c73_6f4bu32;
    bits = bits ^ (bits >> 13u32);
    bits = bits + 0xb79f_3abbu32;
    bits = bits ^ (bits >> 15u32);
    bits = bits * 0x1b56_c4f5u32;
    bits ^ (bits >> 17u32)
}

/// A number rounded to bf16 by the noise of its place; `index` is that of the element in its layer. The noise is that of blocks of 512 elements.
#[cube]
fn stochastic_bf16(x: f32, index: usize, layer: usize, seed: u32) -> u32 {
    let bits = u32::reinterpret(x);
    let y = u32::cast_from(index / 512 * 512 + layer);
    let low = noise(u32::cast_from(index % 512) + y * 198_491_317u32, seed) & 0xFFFFu32;
    let up = (bits >> 16u32) + select((bits & 0xFFFFu32) > low, 1u32, 0u32);
    let quiet = (bits >> 16u32) | 0x40u32;
    select((bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32, quiet, up)
}

/// A parameter rounded to its storage.
#[cube]
fn rounded<E: Numeric>(
    x: f32,
    index: usize,
    layer: usize,
    seed: u32,
    #[comptime] stochastic: bool,
    #[comptime] bf16: bool,
) -> E {
    if comptime![stochastic && bf16] {
        E::cast_from(stochastic_bf16(x, index, layer, seed))
    } else {
        narrow::<E>(x, bf16)
    }
}

/// `(1 - w) a + w b` in two fused operations.
#[cube]
fn lerp(a: f32, b: f32, w: f32) -> f32 {
    fma(w, b, fma(-w, a, a))
}

/// `a / b`, rounded as a division is, `inverse` being `1 / b` within some units in the last place: drivers may be as far off, and divide slowly.
#[cube]
fn quotient(a: f32, b: f32, inverse: f32) -> f32 {
    let q = a * inverse;
    let better = fma(fma(-q, b, a), inverse, q);
    // Where the remainder is no number (an infinite quotient), the quotient itself.
    select(is_number(better), better, q)
}

/// The root, rounded likewise.
#[cube]
fn root(x: f32) -> f32 {
    let r = x.sqrt();
    let better = fma(fma(-r, r, x), 0.5f32 * x.inverse_sqrt(), r);
    // Of zero, and of what is next to it, there is no inverse root.
    select((u32::reinterpret(better) & 0x7FFF_FFFFu32) >= 0x7F80_0000u32, r, better)
}

/// Both moments and the parameter behind a step; `g` is scaled already, and corrections have their inverses beside them.
#[cube]
#[allow(clippy::too_many_arguments)]
fn moved(
    g: f32,
    m: f32,
    v: f32,
    before: f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    correction1: (f32, f32),
    correction2: (f32, f32),
    eps: f32,
    weight_decay: f32,
) -> (f32, f32, f32) {
    let m1 = lerp(g, m, beta1);
    let v1 = lerp(g * g, v, beta2);
    let (step, size) = (quotient(m1, correction1.0, correction1.1), quotient(v1, correction2.0, correction2.1));
    let below = root(size) + eps;
    let ratio = quotient(step, below, 1.0f32 / below);
    (m1, v1, before - lr * (ratio + weight_decay * before))
}

/// What gradients are multiplied by.
#[cube]
fn gradient_scale(norm: &[f32], max_norm: f32, grad_scale: f32, #[comptime] clips: bool) -> f32 {
    if comptime![clips] {
        // The inverse of a huge norm is too small for some devices.
        let q = max_norm / norm[0];
        let better = q + fma(-q, norm[0], max_norm) / norm[0];
        let part = select(is_number(better), better, q);
        grad_scale * select(norm[0] > max_norm, part, 1.0f32)
    } else {
        grad_scale
    }
}

#[cube(launch_unchecked)]
fn update_kernel<E: Numeric, G: Numeric>(
    param: &mut [E],
    master: &mut [f32],
    grad: &mut [G],
    m: &mut [f32],
    v: &mut [f32],
    norm: &[f32],
    max_norm: f32,
    grad_scale: f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    correction1: f32,
    correction2: f32,
    eps: f32,
    weight_decay: f32,
    seed: u32,
    first: usize,
    end: usize,
    layer_len: usize,
    #[comptime] has_master: bool,
    #[comptime] clips: bool,
    #[comptime] stochastic: bool,
    #[comptime] zero_grad: bool,
    #[comptime] bf16: bool,
    #[comptime] grad_bf16: bool,
    #[define(E, G)] _elems: [ElemType; 2],
) {
    let scale = gradient_scale(norm, max_norm, grad_scale, clips);
    let (correction1, correction2) = ((correction1, 1.0f32 / correction1), (correction2, 1.0f32 / correction2));
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = first + ABSOLUTE_POS;
    while i < end {
        let g = widen::<G>(grad[i], grad_bf16) * scale;
        let before = if comptime![has_master] { master[i] } else { widen::<E>(param[i], bf16) };
        let (m1, v1, p) = moved(g, m[i], v[i], before, lr, beta1, beta2, correction1, correction2, eps, weight_decay);
        m[i] = m1;
        v[i] = v1;
        if comptime![has_master] {
            master[i] = p;
        }
        param[i] = rounded::<E>(p, i % layer_len, i / layer_len, seed, stochastic, bf16);
        if comptime![zero_grad] {
            grad[i] = narrow::<G>(0.0f32, grad_bf16);
        }
        i += step;
    }
}

/// Eight numbers whose first is element `at`, a multiple of eight.
#[cube]
fn eight(packs: &mut [Pack], at: usize, values: &mut Array<f32>, #[comptime] wide: bool, #[comptime] bf16: bool) {
    let (pack, next) = pack_at(at, wide);
    unpack(packs[pack], packs[next], values, wide, bf16);
}

// [`update_kernel`] by packs; a layer's length is a multiple of eight.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn update_eights_kernel(
    param: &mut [Pack],
    master: &mut [Pack],
    grad: &mut [Pack],
    m: &mut [Pack],
    v: &mut [Pack],
    norm: &[f32],
    max_norm: f32,
    grad_scale: f32,
    lr: f32,
    beta1: f32,
    beta2: f32,
    correction1: f32,
    correction2: f32,
    eps: f32,
    weight_decay: f32,
    seed: u32,
    first: usize,
    end: usize,
    layer_len: usize,
    #[comptime] has_master: bool,
    #[comptime] clips: bool,
    #[comptime] stochastic: bool,
    #[comptime] zero_grad: bool,
    #[comptime] wide: [bool; 2],
    #[comptime] bf16: [bool; 2],
) {
    let scale = gradient_scale(norm, max_norm, grad_scale, clips);
    let (correction1, correction2) = ((correction1, 1.0f32 / correction1), (correction2, 1.0f32 / correction2));
    let step = CUBE_COUNT * CUBE_DIM as usize * 8;
    let mut at = first + ABSOLUTE_POS * 8;
    while at < end {
        let mut gs = Array::<f32>::new(8usize);
        let mut ms = Array::<f32>::new(8usize);
        let mut vs = Array::<f32>::new(8usize);
        let mut ps = Array::<f32>::new(8usize);
        eight(grad, at, &mut gs, wide[1], bf16[1]);
        eight(m, at, &mut ms, true, false);
        eight(v, at, &mut vs, true, false);
        if comptime![has_master] {
            eight(master, at, &mut ps, true, false);
        } else {
            eight(param, at, &mut ps, wide[0], bf16[0]);
        }
        #[unroll]
        for i in 0..8usize {
            let g = gs[i] * scale;
            let (m1, v1, p) =
                moved(g, ms[i], vs[i], ps[i], lr, beta1, beta2, correction1, correction2, eps, weight_decay);
            ms[i] = m1;
            vs[i] = v1;
            ps[i] = p;
            gs[i] = 0.0f32;
        }
        put_eight(m, at, &ms, true, false);
        put_eight(v, at, &vs, true, false);
        if comptime![has_master] {
            put_eight(master, at, &ps, true, false);
        }
        if comptime![stochastic && bf16[0]] {
            let (index, layer) = (at % layer_len, at / layer_len);
            let mut pack = Pack::new(0u32);
            #[unroll]
            for i in 0..4usize {
                let low = stochastic_bf16(ps[i * 2], index + i * 2, layer, seed);
                let high = stochastic_bf16(ps[i * 2 + 1], index + i * 2 + 1, layer, seed);
                pack.insert(i, low | (high << 16u32));
            }
            param[at / 8] = pack;
        } else {
            put_eight(param, at, &ps, wide[0], bf16[0]);
        }
        if comptime![zero_grad] {
            put_eight(grad, at, &gs, wide[1], bf16[1]);
        }
        at += step;
    }
}

#[cube(launch_unchecked)]
fn round_kernel<E: Numeric>(
    master: &[f32],
    param: &mut [E],
    seed: u32,
    first: usize,
    end: usize,
    layer_len: usize,
    #[comptime] stochastic: bool,
    #[comptime] bf16: bool,
    #[define(E)] _elem: ElemType,
) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = first + ABSOLUTE_POS;
    while i < end {
        param[i] = rounded::<E>(master[i], i % layer_len, i / layer_len, seed, stochastic, bf16);
        i += step;
    }
}

fn seed(rounding: Rounding) -> (bool, u32) {
    match rounding {
        Rounding::Nearest => (false, 0),
        Rounding::Stochastic { seed } => (true, seed),
    }
}

pub(super) fn update(gpu: &Gpu, args: &Update<'_>) -> Result<()> {
    const OP: &str = "adamw.update";
    let Update { param, master, grad, m, v, layers, zero_grad, .. } = *args;
    // The clipping factor is made on the device, from the norm that lies there.
    let step = Step::new(args, 1.0);
    let (own, gradient) = (gpu.storage(OP, param.dtype())?, gpu.storage(OP, grad.dtype())?);
    let n = param.numel();
    if n == 0 {
        return Ok(());
    }
    let (norm, max_norm) = args.clip.as_ref().map_or((m, 0.0), |Clip { norm, max_norm }| (*norm, *max_norm));
    let (stochastic, seed) = seed(args.rounding);
    let arg = |t| gpu.arg(OP, t);
    let bytes = 2 * (param.dtype().size() + grad.dtype().size() + 8 + master.map_or(0, |_| 4));
    let written = [param, master.unwrap_or(m), grad, m, v];
    let even = gpu.capabilities().bf16
        && (n / layers).is_multiple_of(8)
        && written.iter().all(|t| t.offset.is_multiple_of(16));
    gpu.by_elements(n, bytes, |first, end| {
        if even {
            let packs = |t| as_packs(gpu, OP, t);
            // SAFETY: all tensors have `n` elements, whole packs of eight as each layer is, but the norm, which has one.
            unsafe {
                update_eights_kernel::launch_unchecked(
                    gpu.client(),
                    gpu.spread((end - first) / 8),
                    CubeDim::new_1d(UNITS),
                    packs(param)?,
                    packs(written[1])?,
                    packs(grad)?,
                    packs(m)?,
                    packs(v)?,
                    arg(norm)?,
                    max_norm,
                    step.grad_scale,
                    step.lr,
                    step.beta1,
                    step.beta2,
                    step.correction1,
                    step.correction2,
                    step.eps,
                    step.weight_decay,
                    seed,
                    first,
                    end,
                    n / layers,
                    master.is_some(),
                    args.clip.is_some(),
                    stochastic,
                    zero_grad,
                    [param, grad].map(|t| t.dtype() == DType::F32),
                    [own.bf16, gradient.bf16],
                );
            }
            return gpu.launched(OP, &[param, m, v]);
        }
        // SAFETY: as above.
        unsafe {
            update_kernel::launch_unchecked(
                gpu.client(),
                gpu.spread(end - first),
                CubeDim::new_1d(UNITS),
                arg(param)?,
                arg(master.unwrap_or(m))?,
                arg(grad)?,
                arg(m)?,
                arg(v)?,
                arg(norm)?,
                max_norm,
                step.grad_scale,
                step.lr,
                step.beta1,
                step.beta2,
                step.correction1,
                step.correction2,
                step.eps,
                step.weight_decay,
                seed,
                first,
                end,
                n / layers,
                master.is_some(),
                args.clip.is_some(),
                stochastic,
                zero_grad,
                own.bf16,
                gradient.bf16,
                [own.elem, gradient.elem],
            );
        }
        gpu.launched(OP, &[param, m, v])
    })
}

pub(super) fn round(gpu: &Gpu, args: &Round<'_>) -> Result<()> {
    const OP: &str = "adamw.round";
    let Round { master, param, rounding, layers } = *args;
    let Storage { elem, bf16 } = gpu.storage(OP, param.dtype())?;
    let n = param.numel();
    if n == 0 {
        return Ok(());
    }
    let (stochastic, seed) = seed(rounding);
    gpu.by_elements(n, 4 + param.dtype().size(), |first, end| {
        let (from, to) = (gpu.arg(OP, master)?, gpu.arg(OP, param)?);
        let (grid, units) = (gpu.spread(end - first), CubeDim::new_1d(UNITS));
        // SAFETY: both tensors have `n` elements.
        unsafe {
            round_kernel::launch_unchecked(
                gpu.client(),
                grid,
                units,
                from,
                to,
                seed,
                first,
                end,
                n / layers,
                stochastic,
                bf16,
                elem,
            );
        }
        gpu.launched(OP, &[param])
    })
}
