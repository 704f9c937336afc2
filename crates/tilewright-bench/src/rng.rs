//! Seeded random numbers for orders, inputs and resampling: small, portable, the same on every machine.

/// SplitMix64 (Steele, Lea and Flood 2014): any seed is a good one, neighbouring seeds give unrelated streams.
#[derive(Debug, Clone)]
pub struct SplitMix(u64);

impl SplitMix {
    /// A stream of its own for each seed.
    pub fn new(seed: u64) -> Self {
        SplitMix(seed)
    }

    /// A stream for `seed` and a purpose, so that the order of a plan does not depend on its inputs.
    pub fn for_purpose(seed: u64, purpose: &str) -> Self {
        // FNV-1a: spreads short names over 64 bits.
        let hash =
            purpose.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ b as u64).wrapping_mul(0x100_0000_01b3));
        SplitMix(seed ^ hash)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in `0..n`; the bias is below 2^-32 for the sizes used here.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next_u64() as u128 * n as u128) >> 64) as usize
    }

    /// Uniform in `[0, 1)` with 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Standard normal by Box and Muller; one of the two values is dropped to keep the stream simple.
    pub fn normal(&mut self) -> f64 {
        let (u, v) = (1.0 - self.uniform(), self.uniform());
        (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()
    }

    /// Fisher-Yates.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stream_is_the_published_one() {
        let mut rng = SplitMix::new(1234567);
        let want = [6457827717110365317, 3203168211198807973, 9817491932198370423];
        assert_eq!([rng.next_u64(), rng.next_u64(), rng.next_u64()], want);
    }

    #[test]
    fn purposes_and_seeds_give_different_streams() {
        let first = |seed, purpose| SplitMix::for_purpose(seed, purpose).next_u64();
        assert_ne!(first(1, "order"), first(1, "inputs"));
        assert_ne!(first(1, "order"), first(2, "order"));
        assert_eq!(first(1, "order"), first(1, "order"));
    }

    #[test]
    fn normals_have_mean_0_and_variance_1() {
        let mut rng = SplitMix::new(5);
        let values: Vec<f64> = (0..20_000).map(|_| rng.normal()).collect();
        let mean = values.iter().sum::<f64>() / 20_000.0;
        let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
    }

    #[test]
    fn a_shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..50).collect();
        SplitMix::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
