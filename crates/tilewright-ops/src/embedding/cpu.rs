//! Forward copies rows. Backward sorts the positions by token, so that each row of `dwte` is read and written once, by one task.

use super::{Backward, Forward};
use crate::Tensor;
use crate::cpu::disjoint::Disjoint;
use crate::cpu::isa::per_isa;
use crate::cpu::{Cpu, Element};

/// Channels that one task of the backward owns, and that its sums hold: producer and consumer share this one constant.
const SPAN: usize = 256;

/// Distinct rows that one task of the backward owns.
const GROUPS: usize = 16;

/// Elements of a task of the forward.
const TASK: usize = 16 * 1024;

pub(super) fn forward<T: Element>(cpu: &Cpu, args: &Forward<'_>, c: usize) {
    let (isa, position, t) = (cpu.isa(), args.position, args.tokens.shape().last());
    // SAFETY: the contract checked dtypes, shapes and overlaps; no other op runs meanwhile.
    let tokens = unsafe { args.tokens.slice_of::<i32>() };
    let (wte, wpe) = unsafe { (args.wte.slice_of::<T>(), args.wpe.slice_of::<T>()) };
    let out = Disjoint::new(unsafe { args.out.slice_of_mut::<T>() });
    let rows = (TASK / c.max(1)).max(1);
    cpu.pool().run(tokens.len().div_ceil(rows), &|task, _| {
        for i in task * rows..tokens.len().min((task + 1) * rows) {
            let (token, place) = (tokens[i] as usize * c, (position + i % t) * c);
            // SAFETY: each position belongs to one task.
            let out = unsafe { out.part(i * c, (i + 1) * c) };
            add(isa, &wte[token..token + c], &wpe[place..place + c], out);
        }
    });
}

pub(super) fn backward<T: Element>(cpu: &Cpu, args: &Backward<'_>, c: usize, words: &Tensor) {
    let (isa, accumulate, t) = (cpu.isa(), args.accumulate_dwpe, args.tokens.shape().last());
    // SAFETY: as in `forward`; an i32 may be seen as a u32.
    let (tokens, dout) = unsafe { (args.tokens.slice_of::<i32>(), args.dout.slice_of::<T>()) };
    let n = tokens.len();
    let words = unsafe { words.slice_of_mut::<u32>() };
    let (order, rest) = words.split_at_mut(n);
    let (swap, starts) = rest.split_at_mut(n);
    sort_by_token(tokens, args.vocab, order, swap);
    let groups = find_groups(tokens, order, starts);
    let (order, starts) = (&*order, &starts[..=groups]);

    let spans = c.div_ceil(SPAN);
    let columns = |task: usize| (task % spans * SPAN, c.min((task % spans + 1) * SPAN));
    let dwte = Disjoint::new(unsafe { args.dwte.slice_of_mut::<T>() });
    cpu.pool().run(groups.div_ceil(GROUPS) * spans, &|task, _| {
        let (c0, c1) = columns(task);
        let first = task / spans * GROUPS;
        for group in first..groups.min(first + GROUPS) {
            let positions = &order[starts[group] as usize..starts[group + 1] as usize];
            let row = tokens[positions[0] as usize] as usize * c;
            // SAFETY: a group is all positions of one token, so each row and span belongs to one task.
            let row = unsafe { dwte.part(row + c0, row + c1) };
            add_rows(isa, dout, c, c0, true, positions.iter().map(|&p| p as usize), row);
        }
    });

    let dwpe = Disjoint::new(unsafe { args.dwpe.slice_of_mut::<T>() });
    // Rows from `t` on have no gradient: nothing to add, but they must become zero where `=` is wanted.
    let places = if accumulate { t } else { args.dwpe.shape()[0] };
    cpu.pool().run(places.div_ceil(GROUPS) * spans, &|task, _| {
        let (c0, c1) = columns(task);
        let first = task / spans * GROUPS;
        for place in first..places.min(first + GROUPS) {
            // SAFETY: each row and span belongs to one task.
            let row = unsafe { dwpe.part(place * c + c0, place * c + c1) };
            let positions = (place..if place < t { n } else { place }).step_by(t.max(1));
            add_rows(isa, dout, c, c0, accumulate, positions, row);
        }
    });
}

/// Fills `order` with the positions sorted by token, equal tokens in the order of their positions: a radix sort by bytes, least significant
/// first, of as many bytes as `vocab` has.
fn sort_by_token(tokens: &[i32], vocab: usize, order: &mut [u32], swap: &mut [u32]) {
    for (i, o) in order.iter_mut().enumerate() {
        *o = i as u32;
    }
    let bits = usize::BITS - vocab.saturating_sub(1).leading_zeros();
    let (mut from, mut to) = (&mut *order, &mut *swap);
    let passes = bits.div_ceil(8);
    for pass in 0..passes {
        let digit = |position: u32| (tokens[position as usize] >> (8 * pass)) as usize & 0xFF;
        let mut next = [0u32; 256];
        for &p in from.iter() {
            next[digit(p)] += 1;
        }
        let mut sum = 0;
        for n in &mut next {
            sum += std::mem::replace(n, sum);
        }
        for &p in from.iter() {
            let slot = &mut next[digit(p)];
            to[*slot as usize] = p;
            *slot += 1;
        }
        (from, to) = (to, from);
    }
    if passes % 2 == 1 {
        order.copy_from_slice(swap);
    }
}

/// Notes where each token's positions start, and the end behind the last; returns the number of distinct tokens.
fn find_groups(tokens: &[i32], order: &[u32], starts: &mut [u32]) -> usize {
    let mut groups = 0;
    for i in 0..order.len() {
        if i == 0 || tokens[order[i] as usize] != tokens[order[i - 1] as usize] {
            starts[groups] = i as u32;
            groups += 1;
        }
    }
    starts[groups] = order.len() as u32;
    groups
}

per_isa! {
    fn add[T: Element](a: &[T], b: &[T], out: &mut [T]) {
        for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
            *o = T::from_f32(a.to_f32() + b.to_f32());
        }
    }
}

per_isa! {
    /// Adds columns `c0..` of the rows at `positions` in their order, then reads and writes `out` once.
    fn add_rows[T: Element, I: Iterator<Item = usize>](
        dout: &[T], c: usize, c0: usize, accumulate: bool, positions: I, out: &mut [T],
    ) {
        let mut sums = [0.0f32; SPAN];
        let sums = &mut sums[..out.len()];
        for p in positions {
            let row = &dout[p * c + c0..p * c + c0 + sums.len()];
            for (s, d) in sums.iter_mut().zip(row) {
                *s += d.to_f32();
            }
        }
        for (o, s) in out.iter_mut().zip(sums) {
            *o = T::from_f32(if accumulate { o.to_f32() + *s } else { *s });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    #[test]
    fn the_sort_is_stable_for_vocabularies_of_one_to_four_bytes() {
        for vocab in [1, 2, 255, 256, 257, 50_257, 65_536, 65_537, 200_000, 20_000_000, i32::MAX as usize] {
            let mut rng = Random::new(vocab as u64);
            for n in [0, 1, 2, 3, 100, 1000] {
                let mut tokens: Vec<i32> = (0..n).map(|_| rng.below(vocab) as i32).collect();
                if n > 2 {
                    (tokens[0], tokens[n - 1]) = (vocab as i32 - 1, tokens[1]);
                }
                let (mut order, mut swap) = (vec![u32::MAX; n], vec![u32::MAX; n]);
                sort_by_token(&tokens, vocab, &mut order, &mut swap);
                let mut want: Vec<u32> = (0..n as u32).collect();
                want.sort_by_key(|&p| tokens[p as usize]);
                assert_eq!(order, want, "vocab {vocab}, {n} positions");
            }
        }
    }

    #[test]
    fn groups_cover_every_position_once() {
        let tokens = [5, 3, 5, 5, 9, 3];
        let (mut order, mut swap, mut starts) = ([0; 6], [0; 6], [u32::MAX; 7]);
        sort_by_token(&tokens, 10, &mut order, &mut swap);
        assert_eq!(find_groups(&tokens, &order, &mut starts), 3);
        assert_eq!((order, &starts[..4]), ([1, 5, 0, 2, 3, 4], &[0, 2, 5, 6][..]));
    }
}
