//! A few rows: one thread.

use super::{FEATURES, Forward};

/// Probabilities below this count as this in the entropy's logarithm.
const SMALLEST: f32 = 1e-9;

/// Options that the fourth number measures by.
const MOST_OPTIONS: f32 = 255.0;

pub(super) fn forward(args: &Forward<'_>, d: usize) {
    // SAFETY: the contract checked dtypes, shapes, overlaps and every index; no other op runs meanwhile.
    let (states, logits) = unsafe { (args.states.slice_of::<f32>(), args.logits.slice_of::<f32>()) };
    let (firsts, starts) = unsafe { (args.firsts.slice_of::<i32>(), args.starts.slice_of::<i32>()) };
    let out = unsafe { args.out.slice_of_mut::<f32>() };
    for ((out, &first), span) in out.chunks_exact_mut(d + FEATURES).zip(firsts).zip(starts.windows(2)) {
        let (state, numbers) = out.split_at_mut(d);
        state.copy_from_slice(&states[first as usize * d..][..d]);
        numbers.copy_from_slice(&features(&logits[span[0] as usize..span[1] as usize]));
    }
}

/// The largest probability, its lead, the entropy in units of its maximum, and how many options there are.
pub(super) fn features(logits: &[f32]) -> [f32; 4] {
    if logits.is_empty() {
        return [0.0; 4];
    }
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = logits.iter().map(|l| (l - largest).exp()).collect();
    let sum: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    let entropy = -p.iter().map(|p| p * p.max(SMALLEST).ln()).sum::<f32>();
    // Two options at least, so that a single one divides by no zero.
    let options = logits.len().max(2) as f32;
    p.sort_by(|a, b| b.total_cmp(a));
    let second = p.get(1).copied().unwrap_or(0.0);
    [p[0], p[0] - second, entropy / options.ln(), options / MOST_OPTIONS]
}
