//! Positions of the parallel option layout: every option begins where the first one does, and what follows begins after the longest.

use tilewright_models::laya::OptionPositions;

/// The positions of a row of `len` tokens whose question half has `head_len`. There is at least one marker.
pub(super) fn parallel(markers: &[u32], head_len: usize, len: usize) -> OptionPositions {
    let start = markers[0];
    let closing = head_len as u32 - 1;
    let ends = markers[1..].iter().copied().chain([closing]);
    let mut position_ids: Vec<u32> = (0..start).collect();
    let mut option_ids = vec![0; start as usize];
    let mut longest = 0;
    for (slot, (&begin, end)) in markers.iter().zip(ends).enumerate() {
        let span = end - begin;
        position_ids.extend(start..start + span);
        option_ids.extend(std::iter::repeat_n(slot as u32 + 1, span as usize));
        longest = longest.max(span);
    }
    let rest = len as u32 - closing;
    position_ids.extend(start + longest..start + longest + rest);
    option_ids.resize(len, 0);
    OptionPositions { position_ids, option_ids }
}

#[cfg(test)]
mod tests {
    use super::parallel;

    #[test]
    fn options_share_their_positions_and_the_rest_follows_the_longest() {
        // [CLS] a [SEP] M x M y y [SEP] s s [SEP]
        let layout = parallel(&[3, 5], 9, 12);
        assert_eq!(layout.position_ids, [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9]);
        assert_eq!(layout.option_ids, [0, 0, 0, 1, 1, 2, 2, 2, 0, 0, 0, 0]);
    }
}
