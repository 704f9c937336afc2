//! The order in which samples are visited: llm.c's, draw for draw.
//!
//! One mt19937 stream shuffles the shards at the start of every epoch (each time the previous permutation again) and, at the start of
//! every shard, a fresh identity permutation of its samples.

use tilewright_core::format::state::ShuffleState;
use tilewright_core::rng::Mt19937;

/// An endless walk over the samples of a set of shards.
#[derive(Clone, PartialEq, Debug)]
pub struct Order {
    /// Samples of each shard.
    lengths: Vec<usize>,
    shard: usize,
    sample: usize,
    shuffle: Option<ShuffleState>,
}

/// One sample: which shard, and which of its samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Index into the sorted shards.
    pub shard: usize,
    /// Sample of that shard.
    pub sample: usize,
}

impl Order {
    /// The order over shards of so many samples each, shuffled when there is a seed. Every shard must have a sample.
    pub fn new(lengths: Vec<usize>, seed: Option<u32>) -> Self {
        assert!(!lengths.is_empty() && !lengths.contains(&0), "an order needs shards with samples");
        let shards = (0..lengths.len() as i32).collect();
        let shuffle = seed.map(|seed| ShuffleState { rng: Mt19937::new(seed), shards, samples: Vec::new() });
        let mut order = Order { lengths, shard: 0, sample: 0, shuffle };
        order.start_epoch();
        order
    }

    /// An order at a saved position; says what is wrong when the position does not fit these shards.
    pub fn restore(
        lengths: Vec<usize>,
        shard: u64,
        sample: u64,
        shuffle: Option<ShuffleState>,
    ) -> std::result::Result<Self, String> {
        let n = lengths.len();
        let shard = usize::try_from(shard).ok().filter(|s| *s < n);
        let shard = shard.ok_or_else(|| format!("the checkpoint stands in a shard that the {n} shards do not have"))?;
        let mut order = Order { lengths, shard, sample: 0, shuffle };
        if let Some(shuffle) = &order.shuffle {
            if !is_permutation(&shuffle.shards, n) {
                return Err(format!("the checkpoint visits {} shards, there are {n}", shuffle.shards.len()));
            }
            let samples = order.lengths[order.current_shard()];
            if !is_permutation(&shuffle.samples, samples) {
                return Err(format!("the checkpoint visits {} samples of a shard of {samples}", shuffle.samples.len()));
            }
        }
        let samples = order.lengths[order.current_shard()];
        let sample = usize::try_from(sample).ok().filter(|s| *s <= samples);
        order.sample =
            sample.ok_or_else(|| format!("the checkpoint stands behind the {samples} samples of its shard"))?;
        Ok(order)
    }

    /// Starts a new epoch. llm.c's `reset`: it keeps the generator and the shard permutation, so that epochs differ.
    pub fn start_epoch(&mut self) {
        self.shard = 0;
        if let Some(shuffle) = &mut self.shuffle {
            shuffle.rng.shuffle(&mut shuffle.shards);
        }
        self.start_shard();
    }

    fn start_shard(&mut self) {
        self.sample = 0;
        let samples = self.lengths[self.current_shard()];
        if let Some(shuffle) = &mut self.shuffle {
            shuffle.samples.clear();
            shuffle.samples.extend(0..samples as i32);
            shuffle.rng.shuffle(&mut shuffle.samples);
        }
    }

    fn current_shard(&self) -> usize {
        self.shuffle.as_ref().map_or(self.shard, |s| s.shards[self.shard] as usize)
    }

    /// The next sample. The step into the next shard or epoch is taken here, not behind a shard's last sample, as llm.c does: a state
    /// saved in between is the same.
    pub fn next_place(&mut self) -> Place {
        if self.sample >= self.lengths[self.current_shard()] {
            if self.shard + 1 == self.lengths.len() {
                self.start_epoch();
            } else {
                self.shard += 1;
                self.start_shard();
            }
        }
        let sample = self.shuffle.as_ref().map_or(self.sample, |s| s.samples[self.sample] as usize);
        self.sample += 1;
        Place { shard: self.current_shard(), sample }
    }

    /// Shards visited in this epoch.
    pub fn shard(&self) -> usize {
        self.shard
    }

    /// Samples visited of the current shard.
    pub fn sample(&self) -> usize {
        self.sample
    }

    /// The shuffle's state.
    pub fn shuffle(&self) -> Option<&ShuffleState> {
        self.shuffle.as_ref()
    }
}

fn is_permutation(items: &[i32], n: usize) -> bool {
    let mut seen = vec![false; n];
    items.len() == n
        && items.iter().all(|&i| {
            let slot = usize::try_from(i).ok().and_then(|i| seen.get_mut(i));
            slot.is_some_and(|s| !std::mem::replace(s, true))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(lengths: Vec<usize>, seed: Option<u32>, n: usize) -> Vec<usize> {
        let mut order = Order::new(lengths, seed);
        (0..n).map(|_| order.next_place().sample).collect()
    }

    #[test]
    fn first_samples_equal_llmcs() {
        assert_eq!(first(vec![1192], Some(42), 8), [408, 791, 914, 1057, 81, 450, 299, 907]);
        assert_eq!(first(vec![74], Some(42), 8), [29, 58, 10, 4, 11, 25, 63, 56]);
        assert_eq!(first(vec![1192], Some(43), 8), [688, 340, 306, 518, 397, 795, 267, 512]);
        assert_eq!(first(vec![74], Some(43), 8), [36, 63, 59, 15, 71, 35, 6, 58]);
    }

    #[test]
    fn whole_permutation_and_generator_equal_llmcs() {
        for (seed, n, sum, next) in [(42, 1192, 423_932_559u64, 2_212_922_010u32), (43, 74, 96_379, 4_137_876_487)] {
            let mut order = Order::new(vec![n], Some(seed));
            // The vectors count places from 1.
            let got: u64 = (1..=n as u64).map(|i| i * order.next_place().sample as u64).sum();
            assert_eq!(got, sum);
            assert_eq!(order.shuffle.unwrap().rng.random_u32(), next);
        }
    }

    #[test]
    fn an_epoch_visits_every_sample_once() {
        let lengths = vec![5, 1, 17, 8];
        for seed in [None, Some(42)] {
            let mut order = Order::new(lengths.clone(), seed);
            for _ in 0..4 {
                let mut seen: Vec<_> = (0..31).map(|_| order.next_place()).map(|p| (p.shard, p.sample)).collect();
                seen.sort_unstable();
                let want: Vec<_> = (0..4).flat_map(|s| (0..lengths[s]).map(move |i| (s, i))).collect();
                assert_eq!(seen, want);
            }
        }
    }

    #[test]
    fn epochs_differ_and_shards_are_shuffled_cumulatively() {
        let mut order = Order::new(vec![3; 6], Some(42));
        let before = order.shuffle().unwrap().shards.clone();
        let first: Vec<_> = (0..18).map(|_| order.next_place()).collect();
        let second: Vec<_> = (0..18).map(|_| order.next_place()).collect();
        assert_ne!(first, second);
        // What the second epoch visits is the first permutation, shuffled again with the stream as it then stood.
        let mut rng = Mt19937::new(42);
        let mut shards: Vec<i32> = (0..6).collect();
        rng.shuffle(&mut shards);
        assert_eq!(shards, before);
        for _ in 0..6 {
            rng.permutation(3);
        }
        rng.shuffle(&mut shards);
        assert_eq!(second.chunks(3).map(|c| c[0].shard as i32).collect::<Vec<_>>(), shards);
    }

    #[test]
    fn without_a_seed_the_walk_is_in_file_order() {
        let mut order = Order::new(vec![2, 1], None);
        let got: Vec<_> = (0..4).map(|_| order.next_place()).map(|p| (p.shard, p.sample)).collect();
        assert_eq!(got, [(0, 0), (0, 1), (1, 0), (0, 0)]);
    }

    #[test]
    fn a_restored_order_continues_at_any_point() {
        for seed in [None, Some(42)] {
            for stop in 0..40 {
                let mut whole = Order::new(vec![5, 3, 7], seed);
                for _ in 0..stop {
                    whole.next_place();
                }
                let (shard, sample) = (whole.shard() as u64, whole.sample() as u64);
                let mut again = Order::restore(vec![5, 3, 7], shard, sample, whole.shuffle().cloned()).unwrap();
                for _ in 0..40 {
                    assert_eq!(whole.next_place(), again.next_place(), "stopped after {stop}");
                }
            }
        }
    }

    #[test]
    fn positions_of_other_shards_are_refused() {
        let order = Order::new(vec![5, 3], Some(42));
        let shuffle = || order.shuffle().cloned();
        let lengths = || vec![5, 3];
        assert!(Order::restore(lengths(), 0, 0, shuffle()).is_ok());
        assert!(Order::restore(lengths(), 2, 0, shuffle()).is_err());
        assert!(Order::restore(lengths(), 0, 6, shuffle()).is_err());
        assert!(Order::restore(vec![5, 3, 2], 0, 0, shuffle()).is_err());
        assert!(Order::restore(vec![6, 6], 0, 0, shuffle()).is_err());
        for samples in [vec![0, 0, 1, 2, 3], vec![-1, 0, 1, 2, 3]] {
            let bad = shuffle().map(|s| ShuffleState { samples: samples.clone(), ..s });
            assert!(Order::restore(lengths(), 0, 0, bad.clone()).is_err() || bad.unwrap().shards[0] == 1);
        }
    }
}
