//! The formula in f64.

/// `sqrt(sum of x^2)` over all tensors, summed with compensation (Neumaier) so that the order does not matter.
pub(crate) fn norm(tensors: &[Vec<f64>]) -> f64 {
    let (mut sum, mut lost) = (0.0f64, 0.0f64);
    for x in tensors.iter().flatten() {
        let (square, before) = (x * x, sum);
        sum += square;
        lost += if before >= square { (before - sum) + square } else { (square - sum) + before };
    }
    (sum + lost).sqrt()
}
