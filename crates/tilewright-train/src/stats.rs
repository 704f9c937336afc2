//! Small statistics: the Wilson interval of a proportion, throughput as a moving average, model FLOP utilisation.

use tilewright_core::gpt2::Gpt2Config;

/// The 95 % Wilson score interval of `hits` successes in `n` trials.
pub fn wilson(hits: usize, n: usize) -> (f64, f64) {
    if n == 0 {
        return (0.0, 1.0);
    }
    // The 97.5 % quantile of the standard normal distribution.
    const Z: f64 = 1.959_963_984_540_054;
    let (n, p) = (n as f64, hits as f64 / n as f64);
    let centre = p + Z * Z / (2.0 * n);
    let spread = Z * (p * (1.0 - p) / n + Z * Z / (4.0 * n * n)).sqrt();
    let scale = 1.0 + Z * Z / n;
    (((centre - spread) / scale).max(0.0), ((centre + spread) / scale).min(1.0))
}

/// Bias-corrected exponential moving average of tokens per second; the first step after a start is not counted.
#[derive(Clone, Copy, Default, Debug)]
pub struct Throughput {
    average: f64,
    counted: u32,
    seen_first: bool,
    total_seconds: f64,
}

impl Throughput {
    /// Adds a step; gives the rate to show.
    pub fn add(&mut self, tokens: usize, seconds: f64) -> f64 {
        let rate = tokens as f64 / seconds.max(1e-9);
        if !self.seen_first {
            self.seen_first = true;
            return rate;
        }
        self.counted += 1;
        self.total_seconds += seconds;
        self.average = 0.95 * self.average + 0.05 * rate;
        self.average / (1.0 - 0.95f64.powi(self.counted as i32))
    }

    /// Mean milliseconds a step, the first excluded; `None` before the second.
    pub fn mean_ms(&self) -> Option<f64> {
        (self.counted > 0).then(|| 1e3 * self.total_seconds / f64::from(self.counted))
    }
}

/// Floating-point operations of one training token: 6 a parameter, and 6 a layer, channel and position for attention.
pub fn flops_per_token(config: &Gpt2Config, seq_len: usize) -> f64 {
    6.0 * (config.parameter_count() + config.layers * config.channels * seq_len) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wilson_equals_published_values() {
        // 29.55 % of HellaSwag's 10,042 examples; checked against the closed form by hand.
        let (low, high) = wilson(2967, 10042);
        assert!((low - 0.28660).abs() < 5e-5 && (high - 0.30445).abs() < 5e-5, "{low} {high}");
        let (low, high) = wilson(8, 10);
        assert!((low - 0.49016).abs() < 1e-4 && (high - 0.94331).abs() < 1e-4, "{low} {high}");
    }

    #[test]
    fn wilson_stays_inside_zero_and_one() {
        assert_eq!(wilson(0, 0), (0.0, 1.0));
        for n in [1, 2, 10, 1000] {
            let (low, high) = wilson(0, n);
            assert!((0.0..1e-12).contains(&low) && high > 0.0 && high < 1.0);
            let (low, high) = wilson(n, n);
            assert!(low > 0.0 && low < 1.0 && high > 1.0 - 1e-12 && high <= 1.0);
        }
    }

    #[test]
    fn throughput_ignores_the_first_step_and_corrects_its_bias() {
        let mut t = Throughput::default();
        assert_eq!(t.add(100, 10.0), 10.0, "the first step is shown as it is");
        assert_eq!(t.mean_ms(), None);
        for _ in 0..3 {
            let shown = t.add(100, 1.0);
            assert!((shown - 100.0).abs() < 1e-9, "a constant rate is shown unchanged, got {shown}");
        }
        assert!((t.mean_ms().unwrap() - 1000.0).abs() < 1e-9);
    }

    #[test]
    fn flops_of_a_token_follow_the_formula() {
        let config = Gpt2Config::from_descriptor("d12").unwrap();
        assert_eq!(flops_per_token(&config, 1024), 6.0 * (124_475_904.0 + 12.0 * 768.0 * 1024.0));
    }
}
