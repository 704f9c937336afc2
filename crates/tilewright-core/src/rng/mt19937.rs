//! The Mersenne Twister with PyTorch's conventions for floats, normals and permutations.

use super::normal;

const N: usize = 624;
const M: usize = 397;
const MATRIX_A: u32 = 0x9908_b0df;

/// Bytes of the generator's record in llm.c's optimiser state file.
pub const MT_RECORD_BYTES: usize = 2520;

/// Values transformed at a time by [`Mt19937::normal_fill`]: a multiple of 16 that stays in the first-level cache.
const NORMAL_CHUNK: usize = 2048;

/// mt19937: the generator behind `torch.manual_seed` on the CPU.
#[derive(Clone, PartialEq, Eq)]
pub struct Mt19937 {
    // Kept only so that a record read from a file is written back unchanged: llm.c leaves it undefined.
    seed: u64,
    // Words of `state` left before the next twist, plus one.
    left: u32,
    next: u32,
    state: [u32; N],
}

impl std::fmt::Debug for Mt19937 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mt19937").field("left", &self.left).field("next", &self.next).finish_non_exhaustive()
    }
}

impl Mt19937 {
    /// A generator seeded as `torch.manual_seed(seed)` does.
    pub fn new(seed: u32) -> Self {
        let mut state = [0; N];
        state[0] = seed;
        for j in 1..N {
            let previous = state[j - 1];
            state[j] = 1_812_433_253u32.wrapping_mul(previous ^ (previous >> 30)).wrapping_add(j as u32);
        }
        Mt19937 { seed: u64::from(seed), left: 1, next: 0, state }
    }

    fn twist(&mut self) {
        fn mix(upper: u32, lower: u32) -> u32 {
            let y = (upper & 0x8000_0000) | (lower & 0x7fff_ffff);
            (y >> 1) ^ ((lower & 1).wrapping_neg() & MATRIX_A)
        }
        let s = &mut self.state;
        // Three runs without a modulus; each reads words that are either wholly old or wholly new.
        for j in 0..N - M {
            s[j] = s[j + M] ^ mix(s[j], s[j + 1]);
        }
        for j in N - M..N - 1 {
            s[j] = s[j + M - N] ^ mix(s[j], s[j + 1]);
        }
        s[N - 1] = s[M - 1] ^ mix(s[N - 1], s[0]);
        self.left = N as u32;
        self.next = 0;
    }

    /// The next 32 bits.
    pub fn random_u32(&mut self) -> u32 {
        self.left -= 1;
        if self.left == 0 {
            self.twist();
        }
        let y = self.state[self.next as usize];
        self.next += 1;
        temper(y)
    }

    /// The next 64 bits: two draws, the first in the upper half.
    pub fn random_u64(&mut self) -> u64 {
        let high = u64::from(self.random_u32());
        (high << 32) | u64::from(self.random_u32())
    }

    /// A float in `[0, 1)`: the low 24 bits of one draw.
    pub fn random_f32(&mut self) -> f32 {
        unit_f32(self.random_u32())
    }

    /// A double in `[0, 1)` as llm.c draws it: the low 53 bits of a 64-bit draw, rounded through `f32`.
    fn random_f64_of_f32(&mut self) -> f32 {
        (self.random_u64() & ((1 << 53) - 1)) as f32 * (1.0 / (1u64 << 53) as f32)
    }

    /// Fills `out` with the next floats in `[0, 1)`: the same stream as repeated [`random_f32`](Self::random_f32).
    pub fn uniform_fill(&mut self, out: &mut [f32]) {
        let mut rest = out;
        while !rest.is_empty() {
            if self.left == 1 {
                self.twist();
                // `random_u32` would have taken the first word at once; keep its bookkeeping.
                self.left += 1;
            }
            let run = rest.len().min(N - self.next as usize);
            let (now, later) = rest.split_at_mut(run);
            let words = &self.state[self.next as usize..][..run];
            for (o, &w) in now.iter_mut().zip(words) {
                *o = unit_f32(temper(w));
            }
            self.left -= run as u32;
            self.next += run as u32;
            rest = later;
        }
    }

    /// Fills `out` with normal values: PyTorch's `normal_` on a CPU tensor of `out.len()` elements.
    ///
    /// From 16 elements on, every aligned block of 16 is made of 16 uniforms and a ragged tail redraws the last 16 values, so filling a tensor in pieces gives
    /// the values of one call when every piece but the last is a multiple of 16 and the last is empty or a multiple of 16 too. Below 16 elements PyTorch draws
    /// doubles, two a pair.
    pub fn normal_fill(&mut self, out: &mut [f32], mean: f32, std: f32) {
        if out.len() < 16 {
            return self.normal_fill_short(out, mean, std);
        }
        let whole = out.len() / 16 * 16;
        let (blocks, tail) = out.split_at_mut(whole);
        for chunk in blocks.chunks_mut(NORMAL_CHUNK) {
            self.uniform_fill(chunk);
            for block in chunk.as_chunks_mut().0 {
                normal::block_of_16(block, mean, std);
            }
        }
        if !tail.is_empty() {
            // The tail's own uniforms are drawn and then overwritten.
            self.uniform_fill(tail);
            let start = out.len() - 16;
            let last: &mut [f32; 16] = (&mut out[start..]).try_into().expect("16 values");
            self.uniform_fill(last);
            normal::block_of_16(last, mean, std);
        }
    }

    fn normal_fill_short(&mut self, out: &mut [f32], mean: f32, std: f32) {
        for pair in out.chunks_mut(2) {
            let (u1, u2) = (self.random_f64_of_f32(), self.random_f64_of_f32());
            let (cos, sin) = normal::pair(1.0 - u2, u1);
            pair[0] = cos * std + mean;
            if let Some(second) = pair.get_mut(1) {
                *second = (f64::from(sin) * f64::from(std) + f64::from(mean)) as f32;
            }
        }
    }

    /// Fisher-Yates from the end, as llm.c and PyTorch's `randperm` do: permutes what is there, so epochs accumulate.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.random_u32() as usize % (i + 1);
            items.swap(i, j);
        }
    }

    /// A shuffled `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<i32> {
        let mut items: Vec<i32> = (0..n as i32).collect();
        self.shuffle(&mut items);
        items
    }

    /// The generator as llm.c's state file stores it: u64 seed, i32 left, u32 next, `u32 state[624]`, `u32 matrix[2]`, little endian.
    pub fn to_record(&self) -> [u8; MT_RECORD_BYTES] {
        let mut record = [0; MT_RECORD_BYTES];
        record[..8].copy_from_slice(&self.seed.to_le_bytes());
        let words = [self.left, self.next].into_iter().chain(self.state).chain([0, MATRIX_A]);
        for (slot, word) in record[8..].chunks_exact_mut(4).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
        record
    }

    /// Reads a record of [`to_record`](Self::to_record); on a record that no generator can have written, says what is wrong and at which byte of it.
    pub fn from_record(record: &[u8; MT_RECORD_BYTES]) -> Result<Self, (usize, String)> {
        let word = |i: usize| u32::from_le_bytes(record[8 + 4 * i..][..4].try_into().expect("4 bytes"));
        let (left, next) = (word(0), word(1));
        let fresh = left == 1 && next == 0;
        let running = (1..=N as u32).contains(&next) && left == N as u32 + 1 - next;
        if !fresh && !running {
            return Err((8, format!("generator position left={left}, next={next} is impossible")));
        }
        if (word(N + 2), word(N + 3)) != (0, MATRIX_A) {
            return Err((8 + 4 * (N + 2), "the generator's matrix is not that of mt19937".into()));
        }
        let seed = u64::from_le_bytes(record[..8].try_into().expect("8 bytes"));
        Ok(Mt19937 { seed, left, next, state: std::array::from_fn(|i| word(2 + i)) })
    }
}

fn temper(mut y: u32) -> u32 {
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c_5680;
    y ^= (y << 15) & 0xefc6_0000;
    y ^ (y >> 18)
}

fn unit_f32(bits: u32) -> f32 {
    (bits & 0x00ff_ffff) as f32 * (1.0 / (1 << 24) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_fill_is_the_stream_of_single_draws_across_twists() {
        for lengths in [&[1usize, 5, 623, 624, 625, 3][..], &[2000], &[624, 624], &[0, 1248, 1]] {
            let (mut a, mut b) = (Mt19937::new(7), Mt19937::new(7));
            for &n in lengths {
                let mut out = vec![f32::NAN; n];
                a.uniform_fill(&mut out);
                for (i, x) in out.iter().enumerate() {
                    assert_eq!(*x, b.random_f32(), "value {i} of {lengths:?}");
                }
                assert_eq!(a, b, "state after {n} of {lengths:?}");
            }
        }
    }

    #[test]
    fn a_tensor_filled_in_pieces_of_16_equals_one_fill() {
        let mut whole = vec![0.0; 4096 + 48];
        let mut pieces = whole.clone();
        Mt19937::new(42).normal_fill(&mut whole, 0.5, 2.0);
        let mut rng = Mt19937::new(42);
        let (a, b) = pieces.split_at_mut(2080);
        rng.normal_fill(a, 0.5, 2.0);
        rng.normal_fill(b, 0.5, 2.0);
        assert_eq!(whole, pieces);
    }

    #[test]
    fn a_ragged_tail_redraws_the_last_sixteen_values() {
        let mut out = vec![0.0; 37];
        let mut rng = Mt19937::new(42);
        rng.normal_fill(&mut out, 0.0, 1.0);
        let mut head = vec![0.0; 32];
        let mut other = Mt19937::new(42);
        other.normal_fill(&mut head, 0.0, 1.0);
        assert_eq!(out[..21], head[..21]);
        let mut skipped = [0.0; 5];
        other.uniform_fill(&mut skipped);
        let mut last = [0.0; 16];
        other.normal_fill(&mut last, 0.0, 1.0);
        assert_eq!(out[21..], last);
        assert_eq!(rng, other);
    }

    #[test]
    fn normals_have_their_mean_and_deviation() {
        let mut out = vec![0.0; 1 << 16];
        Mt19937::new(3).normal_fill(&mut out, 1.0, 0.5);
        let n = out.len() as f64;
        let mean = out.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let var = out.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        assert!((mean - 1.0).abs() < 0.01 && (var.sqrt() - 0.5).abs() < 0.01, "mean {mean}, std {}", var.sqrt());
    }

    #[test]
    fn a_record_restores_the_stream_at_every_position() {
        let mut rng = Mt19937::new(1337);
        for _ in 0..1300 {
            let record = rng.to_record();
            let mut copy = Mt19937::from_record(&record).unwrap();
            assert_eq!(copy.to_record(), record);
            assert_eq!(copy.random_u32(), rng.random_u32());
        }
    }

    #[test]
    fn an_unused_seed_field_survives_the_round_trip() {
        let mut record = Mt19937::new(5).to_record();
        record[..8].copy_from_slice(&0xdead_beef_0bad_cafe_u64.to_le_bytes());
        assert_eq!(Mt19937::from_record(&record).unwrap().to_record(), record);
    }

    #[test]
    fn an_impossible_record_is_refused_with_its_byte() {
        let good = Mt19937::new(5).to_record();
        let broken = |at: usize, value: u32| {
            let mut record = good;
            record[at..at + 4].copy_from_slice(&value.to_le_bytes());
            Mt19937::from_record(&record).map(|_| ()).unwrap_err().0
        };
        assert_eq!(broken(8, 0), 8);
        assert_eq!(broken(8, u32::MAX), 8);
        assert_eq!(broken(12, 625), 8);
        assert_eq!(broken(2516, 1), 2512);
    }

    #[test]
    fn shuffling_nothing_or_one_item_draws_nothing() {
        let mut rng = Mt19937::new(9);
        rng.shuffle::<i32>(&mut []);
        rng.shuffle(&mut [1]);
        assert_eq!(rng, Mt19937::new(9));
    }
}
