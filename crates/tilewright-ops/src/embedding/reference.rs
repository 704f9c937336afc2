//! The formulas in f64.

/// `out[b, t] = wte[tokens[b, t]] + wpe[position + t]` for `(B, T, C)`.
pub(crate) fn forward(t: usize, c: usize, tokens: &[i32], wte: &[f64], wpe: &[f64], position: usize) -> Vec<f64> {
    let mut out = Vec::new();
    for (i, &token) in tokens.iter().enumerate() {
        let (token, place) = (token as usize, position + i % t);
        out.extend((0..c).map(|j| wte[token * c + j] + wpe[place * c + j]));
    }
    out
}

/// Adds the gradients of every position to `dwte` and `dwpe`.
pub(crate) fn backward(t: usize, c: usize, tokens: &[i32], dout: &[f64], dwte: &mut [f64], dwpe: &mut [f64]) {
    for (i, &token) in tokens.iter().enumerate() {
        for j in 0..c {
            dwte[token as usize * c + j] += dout[i * c + j];
            dwpe[i % t * c + j] += dout[i * c + j];
        }
    }
}
