//! The formula in f64.

/// Turns `heads` heads of `head` channels of each row of `width` columns.
pub(super) fn forward(x: &mut [f64], width: usize, heads: usize, head: usize, positions: &[i32], theta: f64) {
    let m = head / 2;
    for (row, &position) in x.chunks_exact_mut(width.max(1)).zip(positions) {
        for h in 0..heads {
            for t in 0..m {
                let angle = f64::from(position) * theta.powf(-(2.0 * t as f64) / head as f64);
                let (low, high) = (row[h * head + t], row[h * head + t + m]);
                row[h * head + t] = low * angle.cos() - high * angle.sin();
                row[h * head + t + m] = high * angle.cos() + low * angle.sin();
            }
        }
    }
}
