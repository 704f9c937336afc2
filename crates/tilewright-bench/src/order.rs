//! Who goes when: never in a fixed order, and every arm equally often in every slot.

use crate::rng::SplitMix;

/// For each round the arms in the order of their calls.
///
/// Two arms: half of the pairs begin with either, in random order. More: rounds come in groups of `arms`, each group a Latin square of its own, so
/// that every arm stands in every slot once a group; rows, columns and names of the squares are shuffled.
pub fn rounds(arms: usize, rounds: usize, seed: u64) -> Vec<Vec<usize>> {
    let mut rng = SplitMix::for_purpose(seed, "order");
    if arms == 2 {
        let mut first: Vec<usize> = (0..rounds).map(|i| i % 2).collect();
        rng.shuffle(&mut first);
        return first.into_iter().map(|f| vec![f, 1 - f]).collect();
    }
    let mut all = Vec::with_capacity(rounds + arms);
    while all.len() < rounds {
        let shuffled = |rng: &mut SplitMix| {
            let mut items: Vec<usize> = (0..arms).collect();
            rng.shuffle(&mut items);
            items
        };
        let (rows, columns, names) = (shuffled(&mut rng), shuffled(&mut rng), shuffled(&mut rng));
        for &row in &rows {
            all.push(columns.iter().map(|&column| names[(row + column) % arms]).collect());
        }
    }
    all.truncate(rounds);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_arms_begin_equally_often_and_not_in_turn() {
        let order = rounds(2, 60, 1);
        assert_eq!(order.iter().filter(|r| r[0] == 0).count(), 30);
        let alternating = order.windows(2).filter(|w| w[0] != w[1]).count();
        assert!((15..45).contains(&alternating), "{alternating}");
    }

    #[test]
    fn every_arm_stands_in_every_slot_once_a_group() {
        for arms in [3, 4, 5] {
            for group in rounds(arms, arms * 7, 2).chunks(arms) {
                for slot in 0..arms {
                    let mut seen: Vec<usize> = group.iter().map(|round| round[slot]).collect();
                    seen.sort();
                    assert_eq!(seen, (0..arms).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn every_round_holds_every_arm_once_even_the_cut_off_ones() {
        for (arms, n) in [(2, 7), (3, 7), (4, 1)] {
            let order = rounds(arms, n, 3);
            assert_eq!(order.len(), n);
            for mut round in order {
                round.sort();
                assert_eq!(round, (0..arms).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn the_seed_decides_the_order() {
        assert_eq!(rounds(3, 30, 4), rounds(3, 30, 4));
        assert_ne!(rounds(3, 30, 4), rounds(3, 30, 5));
        assert_ne!(rounds(2, 30, 4), rounds(2, 30, 5));
    }
}
