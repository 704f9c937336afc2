//! The formulas in f64, one row at a time.

/// What the forward computes for `(n, c)`: `(out, mean, rstd)` of `sum`.
pub(crate) fn forward(c: usize, sum: &[f64], weight: &[f64], bias: Option<&[f64]>, eps: f64) -> [Vec<f64>; 3] {
    let (mut out, mut means, mut rstds) = (Vec::new(), Vec::new(), Vec::new());
    for row in sum.chunks_exact(c) {
        let mean = row.iter().sum::<f64>() / c as f64;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / c as f64;
        let rstd = 1.0 / (variance + eps).sqrt();
        out.extend((0..c).map(|i| (row[i] - mean) * rstd * weight[i] + bias.map_or(0.0, |b| b[i])));
        means.push(mean);
        rstds.push(rstd);
    }
    [out, means, rstds]
}

/// `(dx, dweight, dbias)` for `(n, c)`, before any accumulation.
pub(crate) fn backward(
    c: usize,
    dout: &[f64],
    sum: &[f64],
    weight: &[f64],
    mean: &[f64],
    rstd: &[f64],
) -> [Vec<f64>; 3] {
    let (mut dx, mut dweight, mut dbias) = (Vec::new(), vec![0.0; c], vec![0.0; c]);
    for (r, (dout, sum)) in dout.chunks_exact(c).zip(sum.chunks_exact(c)).enumerate() {
        let xhat: Vec<f64> = sum.iter().map(|x| (x - mean[r]) * rstd[r]).collect();
        let g: Vec<f64> = (0..c).map(|i| weight[i] * dout[i]).collect();
        let g_mean = g.iter().sum::<f64>() / c as f64;
        let gx_mean = g.iter().zip(&xhat).map(|(g, x)| g * x).sum::<f64>() / c as f64;
        for i in 0..c {
            dx.push(rstd[r] * (g[i] - g_mean - xhat[i] * gx_mean));
            dweight[i] += xhat[i] * dout[i];
            dbias[i] += dout[i];
        }
    }
    [dx, dweight, dbias]
}
