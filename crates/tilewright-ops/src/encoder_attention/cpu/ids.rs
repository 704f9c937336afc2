//! Keys that are hidden by what ids say: positions further apart than the window, and other options.

use super::{KEYS, QUERIES, Sight};
use crate::cpu::isa::per_isa;

/// Positions and options of a block of queries or keys, and between what the positions lie.
pub(super) struct Ids<const N: usize> {
    positions: [i32; N],
    options: [i32; N],
    lowest: i32,
    highest: i32,
}

impl<const N: usize> Ids<N> {
    /// Of tokens counted from the start of the pack, in a row that starts at `row_start`.
    pub(super) fn new(row_start: usize, tokens: impl Iterator<Item = usize>, sight: &Sight<'_>) -> Self {
        let mut ids = Ids { positions: [0; N], options: [0; N], lowest: i32::MAX, highest: i32::MIN };
        let Sight::Ids { positions, option_ids, .. } = sight else { return ids };
        for (i, token) in tokens.enumerate() {
            let position = positions.map_or((token - row_start) as i32, |p| p[token]);
            (ids.positions[i], ids.options[i]) = (position, option_ids.map_or(0, |o| o[token]));
            (ids.lowest, ids.highest) = (ids.lowest.min(position), ids.highest.max(position));
        }
        ids
    }

    /// Whether some positions of the two may be no further apart than `half`.
    pub(super) fn near<const M: usize>(&self, other: &Ids<M>, half: u32) -> bool {
        let behind = i64::from(self.lowest) - i64::from(other.highest);
        let before = i64::from(other.lowest) - i64::from(self.highest);
        behind.max(before) <= i64::from(half)
    }
}

per_isa! {
    /// Sets the scores of hidden keys to minus infinity.
    pub(super) fn hide[](scores: &mut [f32], width: usize, rows: usize, keys: usize, query: &Ids<QUERIES>, key: &Ids<KEYS>, half: u32) {
        for (i, scores) in scores.chunks_exact_mut(width).enumerate().take(rows) {
            let (position, option) = (query.positions[i], query.options[i]);
            let ids = key.positions[..keys].iter().zip(&key.options[..keys]);
            for (s, (&p, &o)) in scores.iter_mut().zip(ids) {
                let far = p.abs_diff(position) > half;
                let foreign = (option > 0) & (o > 0) & (o != option);
                *s = if far | foreign { f32::NEG_INFINITY } else { *s };
            }
        }
    }
}
