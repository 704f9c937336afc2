//! The formula in f64.

/// `out[i, :] = table[index[i], :]` for a table of `width` columns.
pub(super) fn forward(width: usize, table: &[f64], index: &[i32]) -> Vec<f64> {
    index.iter().flat_map(|&i| (0..width).map(move |j| table[i as usize * width + j])).collect()
}
