//! The formula in f64.

/// The four numbers of one row's logits.
pub(super) fn features(logits: &[f64]) -> [f64; 4] {
    if logits.is_empty() {
        return [0.0; 4];
    }
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = logits.iter().map(|l| (l - largest).exp()).sum();
    let mut p: Vec<f64> = logits.iter().map(|l| (l - largest).exp() / sum).collect();
    p.sort_by(|a, b| b.total_cmp(a));
    let entropy = -p.iter().map(|p| p * p.max(1e-9).ln()).sum::<f64>();
    let m = logits.len().max(2) as f64;
    [p[0], p[0] - p.get(1).copied().unwrap_or(0.0), entropy / m.ln(), m / 255.0]
}

/// States of `d` channels, one after the other.
pub(super) fn forward(states: &[f64], d: usize, firsts: &[i32], logits: &[f64], starts: &[i32]) -> Vec<f64> {
    let row = |(&first, span): (&i32, &[i32])| {
        let state = &states[first as usize * d..(first as usize + 1) * d];
        [state, &features(&logits[span[0] as usize..span[1] as usize])].concat()
    };
    firsts.iter().zip(starts.windows(2)).flat_map(row).collect()
}
