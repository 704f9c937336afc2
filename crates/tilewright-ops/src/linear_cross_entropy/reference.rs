//! The formula, one row at a time, with f64 accumulation: what the fast path must agree with.
//!
//! ```text
//! logit[v]  = sum_d hidden[d] * weight[v, d]          for v < V; padding rows V..Vp do not exist
//! lse       = m + ln(sum_v exp(logit[v] - m))         m = max_v logit[v]
//! loss      = lse - logit[target]
//! dlogit[v] = (exp(logit[v] - lse) - [v == target]) * dloss
//! dhidden   = sum_v dlogit[v] * weight[v]
//! dweight[v] += dlogit[v] * hidden
//! ```

/// A loss head in f64.
pub(crate) struct Problem<'a> {
    pub(crate) hidden: &'a [f64],
    pub(crate) weight: &'a [f64],
    pub(crate) targets: &'a [i32],
    pub(crate) ignore_index: i32,
    pub(crate) d: usize,
    pub(crate) vocab: usize,
}

impl Problem<'_> {
    fn logits(&self, row: usize) -> Vec<f64> {
        let h = &self.hidden[row * self.d..][..self.d];
        let dot = |w: &[f64]| h.iter().zip(w).map(|(a, b)| a * b).sum();
        self.weight.chunks(self.d).take(self.vocab).map(dot).collect()
    }

    /// `(losses, lse)`.
    pub(crate) fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let row = |(row, &target): (usize, &i32)| {
            if target == self.ignore_index {
                return (0.0, 0.0);
            }
            let logits = self.logits(row);
            let m = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let log_sum = logits.iter().map(|l| (l - m).exp()).sum::<f64>().ln();
            ((m - logits[target as usize]) + log_sum, m + log_sum)
        };
        self.targets.iter().enumerate().map(row).unzip()
    }

    /// `(dhidden, dweight)`, `dweight` with as many rows as `weight`.
    pub(crate) fn backward(&self, dloss: f64) -> (Vec<f64>, Vec<f64>) {
        let d = self.d;
        let (_, lse) = self.forward();
        let mut dhidden = vec![0.0; self.hidden.len()];
        let mut dweight = vec![0.0; self.weight.len()];
        for (row, &target) in self.targets.iter().enumerate() {
            if target == self.ignore_index {
                continue;
            }
            for (v, logit) in self.logits(row).into_iter().enumerate() {
                let onehot = if v == target as usize { 1.0 } else { 0.0 };
                let dlogit = ((logit - lse[row]).exp() - onehot) * dloss;
                for j in 0..d {
                    dhidden[row * d + j] += dlogit * self.weight[v * d + j];
                    dweight[v * d + j] += dlogit * self.hidden[row * d + j];
                }
            }
        }
        (dhidden, dweight)
    }
}
