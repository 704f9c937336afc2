//! What GPUs make in one launch: layers of a few rows with 16-bit input, with and without a normalisation before them, and gated products of many rows.
//! Processors run the normalised ones as two ops.

use super::*;
use crate::testing::hardware_gpus;

/// `||got - want|| <= bound ||want||`, and every element within ten times the mean bound.
#[track_caller]
fn assert_near(what: &str, got: &Tensor, want: &[f64], bound: f64) {
    let got: Vec<f64> = got.read_f32().unwrap().into_iter().map(f64::from).collect();
    let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>().sqrt();
    let error = norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied());
    assert!(error <= bound, "{what}: {error:e} by norm, allowed {bound:e}");
    let unit = norm(&mut want.iter().copied()) / (want.len() as f64).sqrt();
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= 20.0 * bound * (unit + w.abs()), "{what}[{i}]: got {g}, want {w}");
    }
}

/// How far a sum in f32, stored in `out`, may be off.
fn bound(out: DType) -> f64 {
    match out {
        DType::F32 => 3e-6,
        DType::F16 => 4e-4,
        _ => 3e-3,
    }
}

const SIXTEEN: [DType; 2] = [DType::F16, DType::BF16];

impl Case {
    /// `x` in the weight's type, and the result of the reference.
    fn in_16_bits(&self, device: &Device) -> (Tensor, Vec<f64>) {
        let (m, _, k) = self.shape;
        let values: Vec<f32> = self.x.1.iter().map(|&v| v as f32).collect();
        (Tensor::from_f32(device, self.precision, &[m, k], &values).unwrap(), self.expected())
    }

    fn check_16_bits(&self, device: &Device) {
        let (x, want) = self.in_16_bits(device);
        for out in [DType::F32, self.precision] {
            let what = format!("{:?} {} to {out} {:?}", self.shape, self.precision, self.activation);
            let out = poisoned(device, out, &[self.shape.0, self.columns()]);
            self.run_on(device, &x, self.residual.as_ref().map(|(t, _)| t), &out).unwrap();
            assert_near(&what, &out, &want, bound(out.dtype()));
        }
        if let Some((residual, _)) = &self.residual {
            // The sum where the residual lies.
            self.run_on(device, &x, Some(residual), residual).unwrap();
            assert_near("in place", residual, &want, bound(DType::F32));
        }
    }
}

#[test]
fn cuda_layers_of_few_rows_match_the_reference() {
    for device in hardware_gpus() {
        for precision in SIXTEEN {
            // The model's shapes, every width of a tile, columns off it, K of one step and of uneven quarters, and rows up to the tile's.
            let shapes = [
                (64, 1024, 2624),
                (64, 4096, 1024),
                (64, 1024, 4096),
                (33, 768, 1152),
                (17, 2304, 768),
                (1, 64, 64),
                (5, 1160, 128),
                (63, 40, 192),
                (64, 2056, 320),
                (2, 6400, 64),
                (65, 96, 64),
            ];
            for (i, shape) in shapes.into_iter().enumerate() {
                for activation in [Activation::None, Activation::Relu, Activation::Gelu(Gelu::Erf)] {
                    if i > 4 || activation == Activation::None || shape.1 == 4096 {
                        Case::new(&device, shape, DType::F32, precision, activation, i % 2 == 0).check_16_bits(&device);
                    }
                }
            }
        }
    }
}

#[test]
fn cuda_gated_products_of_many_rows_match_the_reference() {
    for device in hardware_gpus() {
        for precision in SIXTEEN {
            // Whole tiles, and tails of rows, columns and terms.
            for shape in [(512, 256, 64), (513, 2 * 136, 200), (700, 2 * 328, 1024), (1000, 2 * 120, 8)] {
                let case = Case::new(&device, shape, DType::F32, precision, Activation::Geglu, false);
                let (x, want) = case.in_16_bits(&device);
                let out = poisoned(&device, precision, &[shape.0, case.columns()]);
                case.run_on(&device, &x, None, &out).unwrap();
                assert_near(&format!("{shape:?} {precision}"), &out, &want, bound(precision));
            }
        }
    }
}

/// A normalised layer: stream, norm, layer.
fn check_normed(
    device: &Device,
    (m, n, k): (usize, usize, usize),
    precision: DType,
    activation: Activation,
    extras: bool,
) {
    let case = Case::new(device, (m, n, k), DType::F32, precision, activation, extras);
    let between = if crate::testing::is_gpu(device) { precision } else { DType::F32 };
    let rng = &mut Random::new(77);
    let scale = random(device, DType::F32, &[k], 0.5, rng);
    let shift = random(device, DType::F32, &[k], 0.5, rng);
    let shift = extras.then_some(shift);
    // A stream far from zero, with rows of different sizes.
    let stream: Vec<f32> =
        case.x.1.iter().enumerate().map(|(i, &x)| (x as f32 * 3.0 + 5.0) * (1 + i / k % 7) as f32).collect();
    let x = Tensor::from_f32(device, DType::F32, &[m, k], &stream).unwrap();
    let (y, mean, rstd) =
        (poisoned(device, between, &[m, k]), poisoned(device, DType::F32, &[m]), poisoned(device, DType::F32, &[m]));
    let out = poisoned(device, between, &[m, case.columns()]);
    let norm = layernorm::Forward {
        x: &x,
        residual: None,
        weight: &scale.0,
        bias: shift.as_ref().map(|(t, _)| t),
        eps: 1e-5,
        out: &y,
        mean: &mean,
        rstd: &rstd,
    };
    let bias = case.bias.as_ref().map(|(t, _)| t);
    let layer = Forward { x: &y, weight: &case.weight, bias, activation, residual: None, out: &out };
    normed(device, &Normed { norm, layer }).unwrap();
    let mut normal = Vec::new();
    for row in stream.chunks_exact(k) {
        let mean = row.iter().map(|&v| f64::from(v)).sum::<f64>() / k as f64;
        let var = row.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / k as f64;
        for (j, &v) in row.iter().enumerate() {
            let y = (f64::from(v) - mean) / (var + 1e-5).sqrt() * scale.1[j] + shift.as_ref().map_or(0.0, |s| s.1[j]);
            normal.push(if between == DType::F32 { y } else { reference::kept(between, y) });
        }
    }
    let bias = case.bias.as_ref().map(|(_, v)| &v[..]);
    let want = reference::forward(&normal, &case.source.1, bias, activation, None, precision, (m, n, k));
    let bound = if between == DType::F32 && precision == DType::BF16 { 1e-4 } else { 2.0 * bound(between) };
    assert_near(&format!("{:?} {precision} {activation:?} on {}", (m, n, k), device.name()), &out, &want, bound);
}

#[test]
fn a_normalised_layer_is_the_layer_of_the_normalised_rows() {
    for device in devices() {
        for precision in FLOATS {
            for (i, shape) in [(1, 8, 256), (5, 48, 33), (7, 34, 64), (3, 16, 2)].into_iter().enumerate() {
                check_normed(&device, shape, precision, Activation::None, i % 2 == 0);
                check_normed(&device, shape, precision, Activation::Geglu, i % 2 == 1);
            }
        }
    }
}

#[test]
fn cuda_normalised_layers_of_few_rows_match_the_reference() {
    for device in hardware_gpus() {
        for precision in SIXTEEN {
            // The models' layers, then tiles of every width and quarters of every size.
            for (k, n) in [(1024, 3072), (768, 2304), (1024, 1024), (1024, 2048)] {
                check_normed(&device, (64, n, k), precision, Activation::None, n == 2048);
            }
            for (k, n) in [(1024, 5248), (768, 2304)] {
                check_normed(&device, (63, n, k), precision, Activation::Geglu, false);
            }
            check_normed(&device, (8, 4096, 1024), precision, Activation::Relu, true);
            for (i, (m, k)) in [(1, 768), (33, 256), (63, 320), (64, 960), (65, 1024)].into_iter().enumerate() {
                for n in [104, 1160, 2056, 4104] {
                    check_normed(&device, (m, n, k), precision, Activation::None, i % 2 == 0);
                }
                for n in [208, 2064, 4112] {
                    check_normed(&device, (m.min(9), n, k), precision, Activation::Geglu, i % 2 == 1);
                }
            }
        }
    }
}

#[test]
fn cuda_a_normalisation_behind_a_sum_takes_the_moments_of_the_rows_as_they_are() {
    for device in hardware_gpus() {
        for (precision, k, n) in [(DType::F16, 1024, 512), (DType::BF16, 768, 64), (DType::F16, 320, 128)] {
            let m = 40;
            let sum = Case::new(&device, (m, k, n), DType::F32, precision, Activation::None, true);
            let layer = Case::new(&device, (m, 104, k), DType::F32, precision, Activation::None, true);
            let (x, _) = sum.in_16_bits(&device);
            let stream = &sum.residual.as_ref().unwrap().0;
            let ones = Tensor::from_f32(&device, DType::F32, &[k], &vec![1.0; k]).unwrap();
            let y = poisoned(&device, precision, &[m, k]);
            let [mean, rstd] = [0, 1].map(|_| poisoned(&device, DType::F32, &[m]));
            let outs = [0, 1, 2, 3].map(|_| poisoned(&device, precision, &[m, 104]));
            let normalise = |x: &Tensor, out: &Tensor| {
                let (weight, mean, rstd) = (&ones, &mean, &rstd);
                let norm = layernorm::Forward { x, residual: None, weight, bias: None, eps: 1e-5, out: &y, mean, rstd };
                let (weight, activation) = (&layer.weight, Activation::None);
                let layer = Forward { x: &y, weight, bias: None, activation, residual: None, out };
                normed(&device, &Normed { norm, layer }).unwrap();
            };
            let copy = |t: &Tensor| Tensor::from_f32(&device, DType::F32, &[m, k], &t.read_f32().unwrap()).unwrap();
            // With what the sum said of its rows, and of a copy of them.
            sum.run_on(&device, &x, Some(stream), stream).unwrap();
            normalise(stream, &outs[0]);
            normalise(&copy(stream), &outs[1]);
            let want: Vec<f64> = outs[1].read_f32().unwrap().into_iter().map(f64::from).collect();
            assert_near(&format!("{k} {precision}"), &outs[0], &want, 0.5 * bound(precision));
            // Rows that were changed since then.
            sum.run_on(&device, &x, Some(stream), stream).unwrap();
            stream.write_f32(&(0..m * k).map(|i| (i % 37) as f32).collect::<Vec<_>>()).unwrap();
            normalise(stream, &outs[2]);
            normalise(&copy(stream), &outs[3]);
            assert!(outs[2].read_f32().unwrap() == outs[3].read_f32().unwrap(), "{k} {precision}");
        }
    }
}

#[test]
fn cuda_fused_layers_give_the_same_bits_again() {
    for device in hardware_gpus() {
        for (shape, activation) in [((64, 3072, 1024), Activation::None), ((600, 512, 1024), Activation::Geglu)] {
            let case = Case::new(&device, shape, DType::F32, DType::F16, activation, false);
            let (x, _) = case.in_16_bits(&device);
            let run = || {
                let out = poisoned(&device, DType::F16, &[shape.0, case.columns()]);
                case.run_on(&device, &x, None, &out).unwrap();
                out.read_f32().unwrap()
            };
            assert!(run() == run());
        }
    }
}

#[test]
fn a_layer_that_does_not_read_what_was_normalised_is_refused() {
    let device = Device::cpu();
    let case = Case::new(&device, (3, 8, 16), DType::F32, DType::F32, Activation::None, false);
    let t = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
    let (y, weight, out, mean, rstd) = (t(&[3, 16]), t(&[16]), t(&[3, 8]), t(&[3]), t(&[3]));
    let x = &case.x.0;
    let norm = layernorm::Forward {
        x,
        residual: None,
        weight: &weight,
        bias: None,
        eps: 1e-5,
        out: &y,
        mean: &mean,
        rstd: &rstd,
    };
    let layer =
        Forward { x, weight: &case.weight, bias: None, activation: Activation::None, residual: None, out: &out };
    let error = normed(&device, &Normed { norm, layer }).unwrap_err().to_string();
    assert!(error.contains("linear.normed") && error.contains("`norm.out`"), "{error}");
}
