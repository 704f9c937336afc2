//! The formula in f64: the oracle, and the explanation.

use tilewright_core::{DType, bf16, f16};

use super::Activation;
use crate::gelu::{Gelu, reference::value as gelu};

/// What is kept of a number in a precision.
pub(crate) fn kept(precision: DType, x: f64) -> f64 {
    match precision {
        DType::F32 => f64::from(x as f32),
        DType::F16 => f64::from(f16::from_f32(x as f32).to_f32()),
        _ => f64::from(bf16::from_f32(x as f32).to_f32()),
    }
}

/// `out[i][j] = activation(sum_p x[i][p] w[j][p] + bias[j]) + residual[i][j]`, or with GEGLU
/// `out[i][j] = gelu(z[i][j]) z[i][j + n/2] + residual[i][j]` where `z = x w^T + bias`. `x` and `w` are rounded as the precision says.
pub(crate) fn forward(
    x: &[f64],
    weight: &[f64],
    bias: Option<&[f64]>,
    activation: Activation,
    residual: Option<&[f64]>,
    precision: DType,
    (m, n, k): (usize, usize, usize),
) -> Vec<f64> {
    let x: Vec<f64> = x.iter().map(|&v| if precision == DType::BF16 { kept(precision, v) } else { v }).collect();
    let weight: Vec<f64> = weight.iter().map(|&v| kept(precision, v)).collect();
    let mut out = Vec::new();
    for i in 0..m {
        let row: Vec<f64> = (0..n)
            .map(|j| {
                let product: f64 = (0..k).map(|p| x[i * k + p] * weight[j * k + p]).sum();
                product + bias.map_or(0.0, |b| b[j])
            })
            .collect();
        match activation {
            Activation::None => out.extend(row),
            Activation::Gelu(kind) => out.extend(row.iter().map(|&z| gelu(kind, z))),
            Activation::Relu => out.extend(row.iter().map(|&z| z.max(0.0))),
            Activation::Geglu => {
                out.extend((0..n / 2).map(|j| gelu(Gelu::Erf, row[j]) * row[j + n / 2]));
            }
        }
    }
    if let Some(residual) = residual {
        out.iter_mut().zip(residual).for_each(|(o, r)| *o += r);
    }
    out
}
