//! Two levels: chunks of a tensor into a fixed number of partial sums on the stack, then these in their order.

use crate::Tensor;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// The largest number of partial sums of one tensor.
const PARTIALS: usize = 512;

/// The smallest number of elements of a chunk.
const CHUNK: usize = 16 * 1024;

/// Independent sums inside a chunk.
const LANES: usize = 32;

pub(super) fn sum_of_squares<T: Element>(cpu: &Cpu, tensor: &Tensor) -> f64 {
    let isa = cpu.isa();
    // SAFETY: the contract checked the dtype; nothing writes to a tensor that is only read here.
    let data = unsafe { tensor.slice_of::<T>() };
    let chunk = data.len().div_ceil(PARTIALS).max(CHUNK);
    let mut sums = [0.0f64; PARTIALS];
    let partials = Disjoint::new(&mut sums);
    cpu.pool().run(data.len().div_ceil(chunk), &|i, _| {
        let sum = sum_chunk(isa, &data[i * chunk..data.len().min((i + 1) * chunk)]);
        // SAFETY: one partial sum a task.
        let partial = unsafe { partials.part(i, i + 1) };
        partial[0] = sum;
    });
    sums.iter().sum()
}

per_isa! {
    fn sum_chunk[T: Element](data: &[T]) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let (groups, tail) = data.as_chunks::<LANES>();
        for group in groups {
            for l in 0..LANES {
                let x = f64::from(group[l].to_f32());
                lanes[l] += x * x;
            }
        }
        for (lane, x) in lanes.iter_mut().zip(tail) {
            let x = f64::from(x.to_f32());
            *lane += x * x;
        }
        lanes.iter().sum()
    }
}
