//! The case table: shapes, forms and storage types on every device of the machine.

use proptest::prelude::*;

use super::*;
use crate::testing::{self, FLOATS, Random, assert_close, devices, poisoned, random};
use crate::{DType, Error};

/// `(M, N, K)`: ones, primes, one less and one more than the tile sizes of all instruction sets, the odd widths of the specification.
/// Whole packs of 16 bytes, which GPU libraries take.
const SHAPES: [(usize, usize, usize); 21] = [
    (1, 1, 1),
    (2, 3, 5),
    (7, 7, 7),
    (8, 15, 16),
    (15, 16, 17),
    (16, 17, 15),
    (17, 31, 33),
    (31, 33, 8),
    (33, 33, 31),
    (13, 64, 29),
    (9, 37, 767),
    (33, 767, 33),
    (14, 32, 384),
    (15, 65, 385),
    (1, 129, 767),
    (3, 767, 100),
    (24, 40, 56),
    (72, 136, 64),
    (200, 104, 776),
    (130, 776, 392),
    (65, 8, 1048),
];

const GELUS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];

/// Bounds for sums of unit size, tighter than the 1e-3 and 1e-3 (f32), 1e-2 and 3e-2 (bf16) of the specification.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F32 => (1e-5, 1e-5),
        DType::F16 => (1e-3, 1e-3),
        _ => (5e-3, 8e-3),
    }
}

fn name(device: &Device, dtype: DType, shape: (usize, usize, usize)) -> String {
    format!("{} {dtype} {shape:?}", device.name())
}

/// All forms of one layer against the reference.
fn check_layer(device: &Device, dtype: DType, (m, n, k): (usize, usize, usize), accumulate: bool, gelu: Option<Gelu>) {
    let what = name(device, dtype, (m, n, k));
    let rng = &mut Random::new((m * 7 + n * 5 + k) as u64);
    let (atol, rtol) = tolerance(dtype);
    let dims = (m, n, k);
    let scale = |terms: usize| 1.0 / (terms as f32).sqrt();

    let (x, rx) = random(device, dtype, &[m, k], 1.0, rng);
    let (weight, rw) = random(device, dtype, &[n, k], scale(k), rng);
    let (bias, rb) = random(device, dtype, &[n], 1.0, rng);
    let (out, pre) = (poisoned(device, dtype, &[m, n]), poisoned(device, dtype, &[m, n]));
    let pre_gelu = gelu.map(|_| &pre);
    forward(device, &Forward { x: &x, weight: &weight, bias: Some(&bias), gelu, pre_gelu, out: &out }).unwrap();
    let (want_pre, want) = reference::forward(&rx, &rw, Some(&rb), gelu, dims);
    assert_close(&format!("{what} out"), &out, &want, atol, rtol);
    if gelu.is_some() {
        assert_close(&format!("{what} pre_gelu"), &pre, &want_pre, atol, rtol);
    }

    let target = |shape: &[usize], rng: &mut Random| {
        if accumulate {
            let (t, before) = random(device, dtype, shape, 1.0, rng);
            (t, Some(before))
        } else {
            (poisoned(device, dtype, shape), None)
        }
    };
    let (dout, rdout) = random(device, dtype, &[m, n], scale(n), rng);
    let (weight, rw) = random(device, dtype, &[n, k], 1.0, rng);
    let (pre, rpre) = random(device, dtype, &[m, k], 2.0, rng);
    let (dx, before) = target(&[m, k], rng);
    let again = poisoned(device, dtype, &[m, k]);
    let (sums, before_sums) = target(&[k], rng);
    let args = BackwardInput {
        dout: &dout,
        weight: &weight,
        gelu: gelu.map(|kind| (kind, &pre)),
        dx: &dx,
        accumulate,
        activation: gelu.map(|_| &again),
        dx_sums: Some((&sums, accumulate)),
    };
    backward_input(device, &args).unwrap();
    let activation = gelu.map(|kind| (kind, &rpre[..]));
    let want = reference::backward_input(&rdout, &rw, activation, before.as_deref(), dims);
    assert_close(&format!("{what} dx"), &dx, &want, atol, rtol);
    let want: Vec<f64> = (0..k)
        .map(|j| (0..m).map(|i| want[i * k + j]).sum::<f64>() + before_sums.as_ref().map_or(0.0, |b| b[j]))
        .collect();
    // Each of the summed numbers may have been rounded.
    assert_close(&format!("{what} dx_sums"), &sums, &want, atol * (m as f64).sqrt() * 2.0, 2.0 * rtol);
    if let Some(kind) = gelu {
        let want: Vec<f64> = rpre.iter().map(|&x| gelu::reference::value(kind, x)).collect();
        assert_close(&format!("{what} activation"), &again, &want, atol, rtol);
    }

    let (dout, rdout) = random(device, dtype, &[m, n], scale(m), rng);
    let (dweight, before_w) = target(&[n, k], rng);
    let (dbias, before_b) = target(&[n], rng);
    let args = BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate };
    backward_weight(device, &args).unwrap();
    let (want_w, want_b) = reference::backward_weight(&rdout, &rx, before_w.as_deref().zip(before_b.as_deref()), dims);
    assert_close(&format!("{what} dweight"), &dweight, &want_w, atol, rtol);
    assert_close(&format!("{what} dbias"), &dbias, &want_b, atol, rtol);
}

#[test]
fn every_form_matches_the_reference_in_every_shape_and_type() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                check_layer(&device, dtype, shape, false, None);
            }
        }
    }
}

#[test]
fn every_form_accumulates_in_every_shape_and_type() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                check_layer(&device, dtype, shape, true, None);
            }
        }
    }
}

#[test]
fn gelu_forward_and_gelu_derivative_are_fused_in_both_kinds() {
    for device in devices() {
        for dtype in FLOATS {
            for gelu in GELUS {
                for shape in SHAPES {
                    check_layer(&device, dtype, shape, false, Some(gelu));
                }
            }
        }
    }
}

#[test]
fn the_gelu_derivative_multiplies_only_what_is_added() {
    for device in devices() {
        for dtype in FLOATS {
            check_layer(&device, dtype, (33, 65, 31), true, Some(Gelu::Tanh));
        }
    }
}

#[test]
fn storage_types_may_differ_between_arguments() {
    for device in devices() {
        let (m, n, k) = (20, 40, 50);
        for (tx, tw, to) in [
            (DType::F32, DType::BF16, DType::F16),
            (DType::BF16, DType::F32, DType::F32),
            (DType::F16, DType::BF16, DType::BF16),
        ] {
            let rng = &mut Random::new(3);
            let (x, rx) = random(&device, tx, &[m, k], 1.0, rng);
            let (weight, rw) = random(&device, tw, &[n, k], 0.2, rng);
            let (bias, rb) = random(&device, DType::F32, &[n], 1.0, rng);
            let out = poisoned(&device, to, &[m, n]);
            let args = Forward { x: &x, weight: &weight, bias: Some(&bias), gelu: None, pre_gelu: None, out: &out };
            forward(&device, &args).unwrap();
            let (_, want) = reference::forward(&rx, &rw, Some(&rb), None, (m, n, k));
            let (atol, rtol) = tolerance(to);
            assert_close(&format!("{tx} x {tw} -> {to}"), &out, &want, atol, rtol);
        }
    }
}

#[test]
fn without_bias_nothing_is_added() {
    let device = Device::cpu();
    let x = Tensor::from_f32(&device, DType::F32, &[2, 2], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    let weight = Tensor::from_f32(&device, DType::F32, &[3, 2], &[1.0, 0.0, 0.0, 1.0, 1.0, -1.0]).unwrap();
    let out = poisoned(&device, DType::F32, &[2, 3]);
    forward(&device, &Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out }).unwrap();
    assert_eq!(out.read_f32().unwrap(), [1.0, 2.0, -1.0, 3.0, 4.0, -1.0]);
}

#[test]
fn leading_dimensions_fold_into_rows() {
    let device = Device::cpu();
    let rng = &mut Random::new(4);
    let (x, rx) = random(&device, DType::F32, &[2, 3, 5], 1.0, rng);
    let (weight, rw) = random(&device, DType::F32, &[7, 5], 1.0, rng);
    let out = poisoned(&device, DType::F32, &[2, 3, 7]);
    forward(&device, &Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out }).unwrap();
    assert_close("out", &out, &reference::forward(&rx, &rw, None, None, (6, 7, 5)).1, 1e-5, 1e-5);
}

/// Some elements of a large product against sums in f64.
#[track_caller]
fn sampled(what: &str, got: &Tensor, cols: usize, dtype: DType, right: impl Fn(usize, usize) -> f64) {
    let got = got.read_f32().unwrap();
    assert!(got.iter().all(|x| x.is_finite()), "{what}: an element was not written");
    let rng = &mut Random::new(9);
    let (atol, rtol) = tolerance(dtype);
    // Corners too: the last row and column are where tails go wrong.
    let ends = [0, cols - 1, got.len() - cols, got.len() - 1];
    for at in ends.into_iter().chain((0..400).map(|_| rng.below(got.len()))) {
        let want = right(at / cols, at % cols);
        assert!(
            (f64::from(got[at]) - want).abs() <= 4.0 * atol + rtol * want.abs(),
            "{what} at ({}, {}): got {}, want {want}",
            at / cols,
            at % cols,
            got[at]
        );
    }
}

fn production(m: usize, n: usize, k: usize, dtype: DType) {
    for device in crate::testing::production_devices() {
        let rng = &mut Random::new(1);
        let (x, rx) = random(&device, dtype, &[m, k], 1.0, rng);
        let (weight, rw) = random(&device, dtype, &[n, k], 1.0 / (k as f32).sqrt(), rng);
        let (dout, rd) = random(&device, dtype, &[m, n], 1.0 / (m.max(n) as f32).sqrt(), rng);
        let (out, dx) = (poisoned(&device, dtype, &[m, n]), poisoned(&device, dtype, &[m, k]));
        let dweight = poisoned(&device, dtype, &[n, k]);
        forward(&device, &Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out })
            .unwrap();
        backward_input(
            &device,
            &BackwardInput {
                dout: &dout,
                weight: &weight,
                gelu: None,
                dx: &dx,
                accumulate: false,
                activation: None,
                dx_sums: None,
            },
        )
        .unwrap();
        let args = BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: None, accumulate: false };
        backward_weight(&device, &args).unwrap();
        sampled("out", &out, n, dtype, |i, j| (0..k).map(|p| rx[i * k + p] * rw[j * k + p]).sum());
        sampled("dx", &dx, k, dtype, |i, p| (0..n).map(|j| rd[i * n + j] * rw[j * k + p]).sum());
        sampled("dweight", &dweight, k, dtype, |j, p| (0..m).map(|i| rd[i * n + j] * rx[i * k + p]).sum());
    }
}

#[test]
fn production_size_of_gelu_and_its_derivative_in_bf16() {
    // The widths of GPT-2's; as many rows as B=64, T=1024 on a GPU.
    for (m, n) in [(1024, 3072), (65_536, 768)] {
        let (k, dtype) = (768, DType::BF16);
        for device in crate::testing::production_devices() {
            let m = if crate::testing::is_gpu(&device) { m } else { 130 };
            let rng = &mut Random::new(2);
            let (x, rx) = random(&device, dtype, &[m, k], 1.0, rng);
            let (weight, rw) = random(&device, dtype, &[n, k], 1.0 / (k as f32).sqrt(), rng);
            let (bias, rb) = random(&device, dtype, &[n], 0.5, rng);
            let (out, pre) = (poisoned(&device, dtype, &[m, n]), poisoned(&device, dtype, &[m, n]));
            let (gelu, bias) = (Some(Gelu::Tanh), Some(&bias));
            let args = Forward { x: &x, weight: &weight, bias, gelu, pre_gelu: Some(&pre), out: &out };
            forward(&device, &args).unwrap();
            let right = |i: usize, j: usize| (0..k).map(|p| rx[i * k + p] * rw[j * k + p]).sum::<f64>() + rb[j];
            sampled("pre_gelu", &pre, n, dtype, right);
            sampled("out", &out, n, dtype, |i, j| gelu::reference::value(Gelu::Tanh, right(i, j)));
            // Down to the width, and back up behind the derivative at `pre`.
            let (weight, rw) = random(&device, dtype, &[k, n], 1.0 / (k as f32).sqrt(), rng);
            let (again, dx, sums) = (
                poisoned(&device, dtype, &[m, n]),
                poisoned(&device, dtype, &[m, n]),
                poisoned(&device, DType::F32, &[n]),
            );
            let args = BackwardInput {
                dout: &x,
                weight: &weight,
                gelu: Some((Gelu::Tanh, &pre)),
                dx: &dx,
                accumulate: false,
                activation: Some(&again),
                dx_sums: Some((&sums, false)),
            };
            backward_input(&device, &args).unwrap();
            let at: Vec<f64> = pre.read_f32().unwrap().into_iter().map(f64::from).collect();
            let right = |i: usize, j: usize| {
                (0..k).map(|p| rx[i * k + p] * rw[p * n + j]).sum::<f64>()
                    * gelu::reference::derivative(Gelu::Tanh, at[i * n + j])
            };
            sampled("dx", &dx, n, dtype, right);
            sampled("activation", &again, n, dtype, |i, j| gelu::reference::value(Gelu::Tanh, at[i * n + j]));
            let (dx, sums) = (dx.read_f32().unwrap(), sums.read_f32().unwrap());
            for j in (0..n).step_by(251) {
                let (mut sum, mut size) = (0.0, 0.0);
                for i in 0..m {
                    sum += f64::from(dx[i * n + j]);
                    size += f64::from(dx[i * n + j]).powi(2);
                }
                let off = (f64::from(sums[j]) - sum).abs();
                assert!(off <= 0.02 * size.sqrt(), "dx_sums of column {j}: {} for {sum}", sums[j]);
            }
        }
    }
}

#[test]
fn production_size_qkv_in_f32() {
    production(1024, 2304, 768, DType::F32);
}

#[test]
fn production_size_projection_in_bf16() {
    production(1024, 768, 3072, DType::BF16);
}

#[test]
fn production_size_head_in_f32() {
    production(256, 50304, 64, DType::F32);
}

#[test]
fn rows_one_below_and_above_a_production_count() {
    production(1023, 767, 129, DType::F32);
    production(1025, 769, 127, DType::F16);
}

#[test]
fn bug_1_the_bias_gradient_at_production_rows_equals_a_host_sum_and_is_not_zero() {
    for device in devices() {
        for dtype in FLOATS {
            for m in [1024, 4096] {
                let (n, k) = (771, 8);
                let rng = &mut Random::new(m as u64);
                let (dout, rd) = random(&device, dtype, &[m, n], 1.0, rng);
                let (x, _) = random(&device, dtype, &[m, k], 1.0, rng);
                let (dweight, dbias) = (poisoned(&device, dtype, &[n, k]), poisoned(&device, DType::F32, &[n]));
                let args =
                    BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate: false };
                backward_weight(&device, &args).unwrap();
                let want: Vec<f64> = (0..n).map(|j| (0..m).map(|i| rd[i * n + j]).sum()).collect();
                assert_close(&name(&device, dtype, (m, n, k)), &dbias, &want, 1e-4, 1e-5);
                assert!(dbias.read_f32().unwrap().iter().all(|&g| g != 0.0), "no sum of {m} normals is exactly zero");
            }
        }
    }
}

#[test]
fn bug_5_remainders_of_every_dimension_read_no_garbage() {
    // Neighbours of the operands are NaN: one element read past a row, a column or the end shows.
    for device in devices() {
        for m in [1, 9, 15, 17] {
            for n in [1, 7, 15, 17, 33] {
                for k in [1, 7, 15, 17] {
                    let make = |count: usize, shape: &[usize]| {
                        let whole = poisoned(&device, DType::F32, &[count + 128]);
                        let part = whole.slice(64, shape).unwrap();
                        part.write_f32(&vec![1.0; count]).unwrap();
                        (whole, part)
                    };
                    let ((_, x), (_, weight)) = (make(m * k, &[m, k]), make(n * k, &[n, k]));
                    let (all, out) = make(m * n, &[m, n]);
                    let args = Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out };
                    forward(&device, &args).unwrap();
                    assert!(out.read_f32().unwrap().iter().all(|&v| v == k as f32), "{m} {n} {k}");
                    let all = all.read_f32().unwrap();
                    let outside = all[..64].iter().chain(&all[64 + m * n..]);
                    assert!(outside.clone().count() == 128 && outside.clone().all(|v| v.is_nan()), "wrote outside");
                }
            }
        }
    }
}

#[test]
fn bug_8_operands_at_odd_addresses_are_read_and_written() {
    for device in devices() {
        for dtype in FLOATS {
            let (m, n, k) = (17, 35, 33);
            let rng = &mut Random::new(8);
            let odd = |shape: &[usize], behind| testing::unaligned_zeros(&device, dtype, shape, behind);
            let (x, weight, out) = (odd(&[m, k], 1), odd(&[n, k], 3), odd(&[m, n], 1));
            out.write_f32(&vec![f32::NAN; m * n]).unwrap();
            x.write_f32(&rng.normals(m * k, 1.0)).unwrap();
            weight.write_f32(&rng.normals(n * k, 0.2)).unwrap();
            let exact = |t: &Tensor| t.read_f32().unwrap().into_iter().map(f64::from).collect::<Vec<_>>();
            let args = Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out };
            forward(&device, &args).unwrap();
            let (_, want) = reference::forward(&exact(&x), &exact(&weight), None, None, (m, n, k));
            let (atol, rtol) = tolerance(dtype);
            assert_close(&name(&device, dtype, (m, n, k)), &out, &want, atol, rtol);
        }
    }
}

#[test]
fn bug_28_odd_widths_drop_no_tail() {
    for device in devices() {
        for c in [3, 5, 13, 33, 767] {
            check_layer(&device, DType::F32, (7, c, c), false, None);
            check_layer(&device, DType::BF16, (7, 3 * c, c), true, None);
        }
    }
}

#[test]
fn the_bits_are_the_same_for_one_two_and_three_threads() {
    for dtype in FLOATS {
        let mut first: Option<Vec<Vec<u32>>> = None;
        for threads in [1, 2, 3] {
            let device = Device::cpu_with_threads(threads);
            let (m, n, k) = (130, 517, 770);
            let rng = &mut Random::new(11);
            let (x, _) = random(&device, dtype, &[m, k], 1.0, rng);
            let (weight, _) = random(&device, dtype, &[n, k], 1.0, rng);
            let (bias, _) = random(&device, dtype, &[n], 1.0, rng);
            let (dout, _) = random(&device, dtype, &[m, n], 1.0, rng);
            let [out, dx, dweight] = [[m, n], [m, k], [n, k]].map(|shape| poisoned(&device, dtype, &shape));
            let dbias = poisoned(&device, dtype, &[n]);
            let gelu = Some(Gelu::Tanh);
            let args = Forward { x: &x, weight: &weight, bias: Some(&bias), gelu, pre_gelu: None, out: &out };
            forward(&device, &args).unwrap();
            let args = BackwardInput {
                dout: &dout,
                weight: &weight,
                gelu: None,
                dx: &dx,
                accumulate: false,
                activation: None,
                dx_sums: None,
            };
            backward_input(&device, &args).unwrap();
            let args = BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate: false };
            backward_weight(&device, &args).unwrap();
            let bits: Vec<Vec<u32>> = [&out, &dx, &dweight, &dbias]
                .map(|t| t.read_f32().unwrap().iter().map(|x| x.to_bits()).collect())
                .to_vec();
            assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{dtype}: {threads} threads");
        }
    }
}

#[test]
fn a_long_sum_of_a_bias_gradient_keeps_its_small_terms() {
    // 2^18 terms of 1 + 2^-10 in one f32 chain would round each addition above 2^14; blocks of rows keep the error below 1e-6.
    let device = Device::cpu();
    let (m, value) = (1 << 18, 1.0 + 1.0 / 1024.0);
    let dout = Tensor::from_f32(&device, DType::F32, &[m, 1], &vec![value; m]).unwrap();
    let x = Tensor::zeros(&device, DType::F32, &[m, 1]).unwrap();
    let (dweight, dbias) = (poisoned(&device, DType::F32, &[1, 1]), poisoned(&device, DType::F32, &[1]));
    let args = BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate: false };
    backward_weight(&device, &args).unwrap();
    assert_close("dbias", &dbias, &[m as f64 * f64::from(value)], 0.0, 1e-6);
    assert_eq!(dweight.read_f32().unwrap(), [0.0]);
}

#[test]
fn nan_in_a_gradient_reaches_every_result_it_belongs_to() {
    for device in devices() {
        let (m, n, k) = (20, 30, 40);
        let mut values = vec![0.0; m * n];
        values[5 * n + 6] = f32::NAN;
        let dout = Tensor::from_f32(&device, DType::F32, &[m, n], &values).unwrap();
        let x = Tensor::zeros(&device, DType::F32, &[m, k]).unwrap();
        let weight = Tensor::zeros(&device, DType::F32, &[n, k]).unwrap();
        let [dx, dweight] = [[m, k], [n, k]].map(|shape| Tensor::zeros(&device, DType::F32, &shape).unwrap());
        let dbias = Tensor::zeros(&device, DType::F32, &[n]).unwrap();
        let args = BackwardInput {
            dout: &dout,
            weight: &weight,
            gelu: None,
            dx: &dx,
            accumulate: true,
            activation: None,
            dx_sums: None,
        };
        backward_input(&device, &args).unwrap();
        let args = BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate: true };
        backward_weight(&device, &args).unwrap();
        let nan_rows = |t: &Tensor, cols: usize| {
            let values = t.read_f32().unwrap();
            values
                .chunks(cols)
                .enumerate()
                .filter(|(_, r)| r.iter().all(|v| v.is_nan()))
                .map(|(i, _)| i)
                .collect::<Vec<_>>()
        };
        assert_eq!((nan_rows(&dx, k), nan_rows(&dweight, k), nan_rows(&dbias, 1)), (vec![5], vec![6], vec![6]));
    }
}

#[test]
fn backward_is_the_derivative_of_forward() {
    // L = sum(out * seed); central differences of the reference in f64, against its analytic backward.
    for gelu in [None, Some(Gelu::Tanh), Some(Gelu::Erf)] {
        let (m, n, k) = (3, 4, 5);
        let rng = &mut Random::new(12);
        let wide = |v: Vec<f32>| v.into_iter().map(f64::from).collect::<Vec<_>>();
        let [x, weight, bias, seed] = [m * k, n * k, n, m * n].map(|c| wide(rng.normals(c, 1.0)));
        let loss = |x: &[f64], weight: &[f64], bias: &[f64]| -> f64 {
            let (_, out) = reference::forward(x, weight, Some(bias), gelu, (m, n, k));
            out.iter().zip(&seed).map(|(o, s)| o * s).sum()
        };
        let (pre, _) = reference::forward(&x, &weight, Some(&bias), gelu, (m, n, k));
        let slope = |v: f64| gelu.map_or(1.0, |kind| reference::gelu_grad(kind, v));
        let dpre: Vec<f64> = seed.iter().zip(&pre).map(|(s, p)| s * slope(*p)).collect();
        let dx = reference::backward_input(&dpre, &weight, None, None, (m, n, k));
        let (dweight, dbias) = reference::backward_weight(&dpre, &x, None, (m, n, k));
        let h = 1e-5;
        let difference = |values: &[f64], at: usize, f: &dyn Fn(&[f64]) -> f64| {
            let (mut up, mut down) = (values.to_vec(), values.to_vec());
            (up[at], down[at]) = (values[at] + h, values[at] - h);
            (f(&up) - f(&down)) / (2.0 * h)
        };
        for at in 0..x.len() {
            assert!((difference(&x, at, &|x| loss(x, &weight, &bias)) - dx[at]).abs() < 1e-7, "dx[{at}] {gelu:?}");
        }
        for at in 0..weight.len() {
            let d = difference(&weight, at, &|w| loss(&x, w, &bias));
            assert!((d - dweight[at]).abs() < 1e-7, "dweight[{at}] {gelu:?}");
        }
        for at in 0..bias.len() {
            let d = difference(&bias, at, &|b| loss(&x, &weight, b));
            assert!((d - dbias[at]).abs() < 1e-7, "dbias[{at}] {gelu:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_small_shape_matches_the_reference(
        m in 1usize..70, n in 1usize..90, k in 1usize..120, accumulate: bool, dtype in 0usize..3, device in 0usize..16,
    ) {
        let all = devices();
        check_layer(&all[device % all.len()], FLOATS[dtype], (m, n, k), accumulate, None);
    }
}

#[test]
fn no_rows_give_no_output_and_a_zero_gradient() {
    let device = Device::cpu();
    let (n, k) = (5, 3);
    let [x, dout] = [[0, k], [0, n]].map(|shape| Tensor::zeros(&device, DType::F32, &shape).unwrap());
    let weight = Tensor::zeros(&device, DType::F32, &[n, k]).unwrap();
    let (dweight, dbias) = (poisoned(&device, DType::F32, &[n, k]), poisoned(&device, DType::F32, &[n]));
    forward(&device, &Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &dout }).unwrap();
    let args = BackwardWeight { dout: &dout, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate: false };
    backward_weight(&device, &args).unwrap();
    assert!(dweight.read_f32().unwrap().iter().chain(&dbias.read_f32().unwrap()).all(|&g| g == 0.0));
}

/// The message of a refused forward with one argument changed.
fn refused(change: impl FnOnce(&mut [Tensor; 5]), gelu: Option<Gelu>) -> Error {
    let device = Device::cpu();
    let tensor = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
    let mut all = [tensor(&[4, 3]), tensor(&[5, 3]), tensor(&[5]), tensor(&[4, 5]), tensor(&[4, 5])];
    change(&mut all);
    let [x, weight, bias, pre, out] = &all;
    forward(&device, &Forward { x, weight, bias: Some(bias), gelu, pre_gelu: Some(pre), out }).unwrap_err()
}

#[test]
fn wrong_shapes_are_refused_by_name() {
    let device = Device::cpu();
    let wrong = || Tensor::zeros(&device, DType::F32, &[5, 4]).unwrap();
    for (index, what) in [(1, "weight"), (2, "bias"), (3, "pre_gelu"), (4, "out")] {
        let change = |all: &mut [Tensor; 5]| all[index] = Tensor::zeros(all[0].device(), DType::F32, &[5, 4]).unwrap();
        let error = refused(change, Some(Gelu::Tanh));
        let message = error.to_string();
        assert!(message.starts_with("matmul.forward: ") && message.contains(&format!("`{what}`")), "{message}");
        assert!(matches!(error, Error::Shape { .. }));
    }
    let [dout, weight, x] = [[4, 5], [5, 3], [4, 3]].map(|s| Tensor::zeros(&device, DType::F32, &s).unwrap());
    let args = BackwardInput {
        dout: &dout,
        weight: &weight,
        gelu: None,
        dx: &wrong(),
        accumulate: false,
        activation: None,
        dx_sums: None,
    };
    let message = backward_input(&device, &args).unwrap_err().to_string();
    assert!(message.starts_with("matmul.backward_input: `dx`"), "{message}");
    let args = BackwardWeight { dout: &dout, x: &x, dweight: &wrong(), dbias: None, accumulate: false };
    let message = backward_weight(&device, &args).unwrap_err().to_string();
    assert!(message.starts_with("matmul.backward_weight: `dweight`"), "{message}");
}

#[test]
fn integers_are_refused_by_name() {
    let error = refused(|all| all[1] = Tensor::zeros(all[0].device(), DType::I32, &[5, 3]).unwrap(), Some(Gelu::Erf));
    assert!(matches!(error, Error::DType { op: "matmul.forward", what: "weight", .. }), "{error}");
}

#[test]
fn a_tensor_of_another_device_is_refused_by_name() {
    let other = Device::cpu_with_threads(1);
    let error = refused(|all| all[0] = Tensor::zeros(&other, DType::F32, &[4, 3]).unwrap(), Some(Gelu::Erf));
    assert!(matches!(error, Error::Device { op: "matmul.forward", what: "x", .. }), "{error}");
}

#[test]
fn overlapping_outputs_are_refused_by_name() {
    let error = refused(|all| all[3] = all[4].clone(), Some(Gelu::Tanh));
    let wanted = matches!(error, Error::Overlap { op: "matmul.forward", output: "out", other: "pre_gelu" });
    assert!(wanted, "{error}");
    let device = Device::cpu();
    let [dout, weight] = [[4, 4], [4, 4]].map(|s| Tensor::zeros(&device, DType::F32, &s).unwrap());
    let args = BackwardInput {
        dout: &dout,
        weight: &weight,
        gelu: None,
        dx: &dout,
        accumulate: false,
        activation: None,
        dx_sums: None,
    };
    let error = backward_input(&device, &args).unwrap_err();
    assert!(matches!(error, Error::Overlap { output: "dx", other: "dout", .. }), "{error}");
    let args = BackwardWeight {
        dout: &dout,
        x: &dout,
        dweight: &weight,
        dbias: Some(&weight.slice(4, &[4]).unwrap()),
        accumulate: false,
    };
    let error = backward_weight(&device, &args).unwrap_err();
    assert!(matches!(error, Error::Overlap { output: "dweight", other: "dbias", .. }), "{error}");
}

#[test]
fn saving_the_argument_of_no_activation_is_refused() {
    let error = refused(|_| {}, None);
    assert!(matches!(error, Error::Argument { op: "matmul.forward", .. }) && error.to_string().contains("`pre_gelu`"));
}

#[test]
fn the_null_device_records_each_form_and_touches_nothing() {
    let device = Device::null(4);
    let tensor = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
    let (x, weight, out) = (tensor(&[6, 4]), tensor(&[5, 4]), tensor(&[6, 5]));
    let (dx, dweight, dbias) = (tensor(&[6, 4]), tensor(&[5, 4]), tensor(&[5]));
    forward(&device, &Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out }).unwrap();
    let args = BackwardInput {
        dout: &out,
        weight: &weight,
        gelu: None,
        dx: &dx,
        accumulate: true,
        activation: None,
        dx_sums: None,
    };
    backward_input(&device, &args).unwrap();
    let args = BackwardWeight { dout: &out, x: &x, dweight: &dweight, dbias: Some(&dbias), accumulate: false };
    backward_weight(&device, &args).unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let launches: Vec<_> = null.take_launches().into_iter().map(|l| (l.op, l.flops, l.bytes)).collect();
    let (x, w, o) = (6 * 4 * 4, 5 * 4 * 4, 6 * 5 * 4);
    let wanted = [
        ("matmul.forward", 240, x + w + o),
        ("matmul.backward_input", 240, o + w + 2 * x),
        ("matmul.backward_weight", 240 + 30, o + x + w + 5 * 4),
    ];
    assert_eq!(launches, wanted);
}
