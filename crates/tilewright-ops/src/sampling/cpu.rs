//! One task a row. Exponentials are computed twice, in blocks on the stack, rather than kept: no buffer grows with the vocabulary.

use tilewright_core::Result;

use super::{Forward, no_distribution};
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element, math};

/// Exponentials computed at once.
const BLOCK: usize = 512;

/// Independent maxima.
const LANES: usize = 16;

pub(super) fn forward<T: Element>(cpu: &Cpu, args: &Forward<'_>) -> Result<()> {
    let (isa, width) = (cpu.isa(), args.logits.shape().last());
    // SAFETY: the contract checked dtypes, shapes and overlaps; no other op runs meanwhile.
    let logits = unsafe { args.logits.slice_of::<T>() };
    let &Forward { vocab, temperature, top_k, coins, .. } = args;
    let row = |i: usize| &logits[i * width..i * width + vocab];
    for i in 0..coins.len() {
        let largest = maximum(isa, row(i));
        if !largest.is_finite() {
            return Err(no_distribution(i, largest));
        }
    }
    let out = Disjoint::new(unsafe { args.out.slice_of_mut::<i32>() });
    cpu.pool().run(coins.len(), &|i, _| {
        // SAFETY: one element a task.
        let out = unsafe { out.part(i, i + 1) };
        let row = row(i);
        let largest = maximum(isa, row);
        out[0] = if temperature == 0.0 || top_k == 1 {
            row.iter().position(|x| x.to_f32() == largest).unwrap_or(0) as i32
        } else {
            let limit = if top_k == 0 || top_k >= vocab { Limit::NONE } else { Limit::find(row, top_k) };
            draw(isa, row, largest, temperature, limit, coins[i]) as i32
        };
    });
    Ok(())
}

/// Which logits can be drawn: those with a larger key, and the first `ties` with an equal one.
#[derive(Clone, Copy)]
struct Limit {
    key: u32,
    ties: usize,
}

impl Limit {
    const NONE: Limit = Limit { key: 0, ties: usize::MAX };

    /// The limit that keeps `k` of the row, by four passes that each fix one byte of the k-th largest key.
    fn find<T: Element>(row: &[T], k: usize) -> Limit {
        let (mut key, mut wanted) = (0u32, k);
        for shift in [24, 16, 8, 0] {
            let mut counts = [0usize; 256];
            for x in row {
                let other = sort_key(x.to_f32());
                // Bytes above this one already agree; in the first pass there are none.
                if (u64::from(other) ^ u64::from(key)) >> (shift + 8) == 0 {
                    counts[(other >> shift) as usize & 0xFF] += 1;
                }
            }
            let mut byte = 255;
            while counts[byte] < wanted {
                wanted -= counts[byte];
                byte -= 1;
            }
            key |= (byte as u32) << shift;
        }
        Limit { key, ties: wanted }
    }
}

/// An integer that sorts as the float does; the two zeros are one.
#[inline(always)]
fn sort_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 0x8000_0000 } else { !bits }
}

per_isa! {
    /// The largest value; NaN when any value is NaN.
    fn maximum[T: Element](row: &[T]) -> f32 {
        let (mut lanes, mut nan) = ([f32::NEG_INFINITY; LANES], [false; LANES]);
        let (groups, tail) = row.as_chunks::<LANES>();
        for group in groups {
            for l in 0..LANES {
                let x = group[l].to_f32();
                lanes[l] = if x > lanes[l] { x } else { lanes[l] };
                nan[l] |= x.is_nan();
            }
        }
        for (l, x) in tail.iter().enumerate() {
            let x = x.to_f32();
            lanes[l] = if x > lanes[l] { x } else { lanes[l] };
            nan[l] |= x.is_nan();
        }
        if nan.contains(&true) { f32::NAN } else { lanes.into_iter().fold(f32::NEG_INFINITY, f32::max) }
    }
}

per_isa! {
    fn draw[T: Element](row: &[T], largest: f32, temperature: f32, limit: Limit, coin: f32) -> usize {
        let mut sum = 0.0f32;
        each_weight(row, largest, temperature, limit, |_, w| {
            sum += w;
            false
        });
        let (mut cumulative, mut drawn) = (0.0f32, 0);
        each_weight(row, largest, temperature, limit, |i, w| {
            cumulative += w / sum;
            if w > 0.0 {
                drawn = i; // also when rounding leaves the whole sum at or below the coin
            }
            coin < cumulative
        });
        drawn
    }
}

/// Calls `f(index, exp((x - largest) / temperature))` for every logit within the limit, in order, until it returns true.
#[inline(always)]
fn each_weight<T: Element>(
    row: &[T],
    largest: f32,
    temperature: f32,
    limit: Limit,
    mut f: impl FnMut(usize, f32) -> bool,
) {
    let mut weights = [0.0f32; BLOCK];
    let mut ties = limit.ties;
    for (block, row) in row.chunks(BLOCK).enumerate() {
        for (w, x) in weights.iter_mut().zip(row) {
            *w = math::exp((x.to_f32() - largest) / temperature);
        }
        for (j, (&w, x)) in weights.iter().zip(row).enumerate() {
            let key = sort_key(x.to_f32());
            if key < limit.key || (key == limit.key && ties == 0) {
                continue;
            }
            if key == limit.key {
                ties -= 1;
            }
            if f(block * BLOCK + j, w) {
                return;
            }
        }
    }
}
