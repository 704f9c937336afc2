//! The formulas in f64, one loop nest each: the oracle, and the explanation.

use crate::gelu::Gelu;

/// `gelu(x)` by its definition.
pub(crate) fn gelu(kind: Gelu, x: f64) -> f64 {
    match kind {
        Gelu::Tanh => 0.5 * x * (1.0 + tanh_argument(x).tanh()),
        Gelu::Erf => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
    }
}

/// `gelu'(x)` by its definition.
pub(crate) fn gelu_grad(kind: Gelu, x: f64) -> f64 {
    match kind {
        Gelu::Tanh => {
            let t = tanh_argument(x).tanh();
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * 0.044715 * x * x);
            0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * inner
        }
        Gelu::Erf => {
            let density = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            0.5 * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)) + x * density
        }
    }
}

fn tanh_argument(x: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)
}

/// erf by the series `2 / sqrt(pi) e^(-x^2) sum 2^n x^(2n+1) / (1 3 5 ... (2n+1))`, whose terms have one sign, so that no digits cancel.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    sum * std::f64::consts::FRAC_2_SQRT_PI * (-x * x).exp()
}

/// `(pre, out)` of the forward: `pre[i][j] = sum_p x[i][p] weight[j][p] + bias[j]`, `out = gelu(pre)`.
pub(crate) fn forward(
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    kind: Option<Gelu>,
    (m, n, k): (usize, usize, usize),
) -> (Vec<f64>, Vec<f64>) {
    let mut pre = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            let product: f64 = (0..k).map(|p| x[i * k + p] * weight[j * k + p]).sum();
            pre[i * n + j] = product + bias.map_or(0.0, |b| b[j]);
        }
    }
    let out = pre.iter().map(|&v| kind.map_or(v, |kind| gelu(kind, v))).collect();
    (pre, out)
}

/// `dx[i][p] = before[i][p] + sum_j dout[i][j] weight[j][p] * gelu'(pre[i][p])`; `before` is zero unless accumulated.
pub(crate) fn backward_input(
    dout: &[f64],
    weight: &[f64],
    activation: Option<(Gelu, &[f64])>,
    before: Option<&[f64]>,
    (m, n, k): (usize, usize, usize),
) -> Vec<f64> {
    let mut dx = vec![0.0; m * k];
    for i in 0..m {
        for p in 0..k {
            let product: f64 = (0..n).map(|j| dout[i * n + j] * weight[j * k + p]).sum();
            let slope = activation.map_or(1.0, |(kind, pre)| gelu_grad(kind, pre[i * k + p]));
            dx[i * k + p] = before.map_or(0.0, |b| b[i * k + p]) + product * slope;
        }
    }
    dx
}

/// `(dweight, dbias)`: `dweight[j][p] = sum_i dout[i][j] x[i][p]`, `dbias[j] = sum_i dout[i][j]`, added to what is there if accumulated.
pub(crate) fn backward_weight(
    dout: &[f64],
    x: &[f64],
    before: Option<(&[f64], &[f64])>,
    (m, n, k): (usize, usize, usize),
) -> (Vec<f64>, Vec<f64>) {
    let mut dweight = vec![0.0; n * k];
    let mut dbias = vec![0.0; n];
    for j in 0..n {
        for p in 0..k {
            let sum: f64 = (0..m).map(|i| dout[i * n + j] * x[i * k + p]).sum();
            dweight[j * k + p] = sum + before.map_or(0.0, |(w, _)| w[j * k + p]);
        }
        let sum: f64 = (0..m).map(|i| dout[i * n + j]).sum();
        dbias[j] = sum + before.map_or(0.0, |(_, b)| b[j]);
    }
    (dweight, dbias)
}
