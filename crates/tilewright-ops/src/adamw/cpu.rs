//! One pass over the parameters, bound by memory: a task takes its chunk in blocks that stay in the first cache from load to store.

use tilewright_core::rng::{noise2d, stochastic_round_bf16};
use tilewright_core::{DType, bf16};

use super::{Rounding, Step, Update};
use crate::Tensor;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// llm.c's thread block: the noise of stochastic rounding is a function of the place in it.
const BLOCK: usize = 512;

/// Elements of a task.
const CHUNK: usize = 32 * BLOCK;

pub(super) fn update<P: Element, G: Element>(cpu: &Cpu, args: &Update<'_>, step: &Step) {
    let (isa, rounding, zero_grad) = (cpu.isa(), args.rounding, args.zero_grad);
    // SAFETY: the contract checked dtypes, shapes and overlaps; no other op runs meanwhile.
    let param = Disjoint::new(unsafe { args.param.slice_of_mut::<P>() });
    let master = args.master.map(|t| Disjoint::new(unsafe { t.slice_of_mut::<f32>() }));
    let grad = Disjoint::new(unsafe { args.grad.slice_of_mut::<G>() });
    let m = Disjoint::new(unsafe { args.m.slice_of_mut::<f32>() });
    let v = Disjoint::new(unsafe { args.v.slice_of_mut::<f32>() });
    chunks(cpu, args.param.numel(), args.layers, |place| {
        let Place { start, end, .. } = place;
        // SAFETY: chunks are disjoint.
        let master = master.as_ref().map(|t| unsafe { t.part(start, end) });
        let (param, grad) = unsafe { (param.part(start, end), grad.part(start, end)) };
        let (m, v) = unsafe { (m.part(start, end), v.part(start, end)) };
        update_chunk(isa, step, rounding, zero_grad, place, param, master, grad, m, v);
    });
}

pub(super) fn round<P: Element>(cpu: &Cpu, master: &Tensor, param: &Tensor, rounding: Rounding, layers: usize) {
    let isa = cpu.isa();
    // SAFETY: as in `update`.
    let param = Disjoint::new(unsafe { param.slice_of_mut::<P>() });
    let master = unsafe { master.slice_of::<f32>() };
    chunks(cpu, master.len(), layers, |place| {
        // SAFETY: chunks are disjoint.
        let param = unsafe { param.part(place.start, place.end) };
        round_chunk(isa, rounding, place, &master[place.start..place.end], param);
    });
}

/// A chunk: elements `start..end` of the tensor, the first of which is element `index` of its layer.
#[derive(Clone, Copy)]
struct Place {
    start: usize,
    end: usize,
    layer: usize,
    index: usize,
}

/// Runs a task for each chunk; chunks start at multiples of [`BLOCK`] in their layer.
fn chunks(cpu: &Cpu, n: usize, layers: usize, task: impl Fn(Place) + Sync) {
    let layer_len = n / layers;
    let layer_chunks = layer_len.div_ceil(CHUNK);
    cpu.pool().run(layers * layer_chunks, &|i, _| {
        let (layer, index) = (i / layer_chunks, i % layer_chunks * CHUNK);
        let start = layer * layer_len + index;
        task(Place { start, end: start + CHUNK.min(layer_len - index), layer, index });
    });
}

per_isa! {
    fn update_chunk[P: Element, G: Element](
        step: &Step, rounding: Rounding, zero_grad: bool, place: Place, param: &mut [P], master: Option<&mut [f32]>,
        grad: &mut [G], m: &mut [f32], v: &mut [f32],
    ) {
        let step = *step;
        let mut master = master;
        let mut values = [0.0f32; BLOCK];
        for start in (0..param.len()).step_by(BLOCK) {
            let block = start..param.len().min(start + BLOCK);
            let (param, grad) = (&mut param[block.clone()], &mut grad[block.clone()]);
            let (m, v) = (&mut m[block.clone()], &mut v[block.clone()]);
            let values = &mut values[..block.len()];
            match &master {
                Some(master) => values.copy_from_slice(&master[block.clone()]),
                None => {
                    for (value, p) in values.iter_mut().zip(&*param) {
                        *value = p.to_f32();
                    }
                }
            }
            update_block(&step, values, grad, m, v);
            if zero_grad {
                grad.fill(G::default());
            }
            if let Some(master) = &mut master {
                master[block].copy_from_slice(values);
            }
            round_block(rounding, place.layer, place.index + start, values, param);
        }
    }
}

#[inline(always)]
fn update_block<G: Element>(step: &Step, values: &mut [f32], grad: &[G], m: &mut [f32], v: &mut [f32]) {
    for (((p, g), m), v) in values.iter_mut().zip(grad).zip(m).zip(v) {
        let g = g.to_f32() * step.grad_scale;
        *m = lerp(g, *m, step.beta1);
        *v = lerp(g * g, *v, step.beta2);
        let (mhat, vhat) = (*m / step.correction1, *v / step.correction2);
        *p -= step.lr * (mhat / (vhat.sqrt() + step.eps) + step.weight_decay * *p);
    }
}

/// `(1 - w) a + w b` in two fused operations.
#[inline(always)]
fn lerp(a: f32, b: f32, w: f32) -> f32 {
    w.mul_add(b, (-w).mul_add(a, a))
}

per_isa! {
    fn round_chunk[P: Element](rounding: Rounding, place: Place, values: &[f32], param: &mut [P]) {
        for (i, (values, param)) in values.chunks(BLOCK).zip(param.chunks_mut(BLOCK)).enumerate() {
            round_block(rounding, place.layer, place.index + i * BLOCK, values, param);
        }
    }
}

/// Stores a block whose first element is element `index` of its layer, `index` a multiple of [`BLOCK`].
#[inline(always)]
fn round_block<P: Element>(rounding: Rounding, layer: usize, index: usize, values: &[f32], param: &mut [P]) {
    match rounding {
        Rounding::Stochastic { seed } if P::DTYPE == DType::BF16 => {
            // blockIdx.x * blockDim.x + blockIdx.y: `index` is the first of its block of 512. Wraps as unsigned ints do.
            let y = (index + layer) as u32;
            for (x, (p, value)) in param.iter_mut().zip(values).enumerate() {
                let rounded: bf16 = stochastic_round_bf16(*value, noise2d(x as u32, y, seed));
                *p = P::from_f32(rounded.to_f32());
            }
        }
        _ => {
            for (p, value) in param.iter_mut().zip(values) {
                *p = P::from_f32(*value);
            }
        }
    }
}
