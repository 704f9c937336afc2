//! Values against the reference.

use super::*;
use proptest::prelude::*;

/// `(M, N, K)`: ones, primes, one less and one more than the tile sizes of all instruction sets, the odd widths of the models.
const SHAPES: [(usize, usize, usize); 18] = [
    (1, 1, 1),
    (1, 2, 33),
    (2, 1, 257),
    (3, 2, 1),
    (4, 8, 2),
    (5, 31, 7),
    (7, 32, 16),
    (8, 33, 17),
    (13, 64, 31),
    (14, 96, 15),
    (15, 65, 32),
    (17, 12, 511),
    (28, 24, 512),
    (29, 66, 513),
    (31, 40, 767),
    (65, 70, 129),
    (3, 256, 1028),
    (9, 34, 1152),
];

fn every_shape(precision: DType) {
    for device in devices() {
        for (m, n, k) in SHAPES {
            for activation in [Activation::None, Activation::Geglu] {
                let n = if activation == Activation::Geglu { n.next_multiple_of(2) } else { n };
                Case::new(&device, (m, n, k), DType::F32, precision, activation, m % 2 == 1).check(&device);
            }
        }
    }
}

#[test]
fn every_shape_in_f32_equals_the_reference() {
    every_shape(DType::F32);
}

#[test]
fn every_shape_in_bf16_equals_the_reference_of_rounded_operands() {
    every_shape(DType::BF16);
}

#[test]
fn every_shape_in_f16_equals_the_reference_of_a_rounded_weight() {
    every_shape(DType::F16);
}

#[test]
fn every_activation_with_and_without_bias_and_residual_equals_the_reference() {
    for device in devices() {
        for precision in FLOATS {
            for activation in ACTIVATIONS {
                for extras in [false, true] {
                    for shape in [(1, 34, 20), (20, 66, 50), (33, 128, 600)] {
                        Case::new(&device, shape, precision, precision, activation, extras).check(&device);
                    }
                }
            }
        }
    }
}

#[test]
fn a_weight_is_packed_from_any_float_type_into_any_other() {
    for device in devices() {
        for source in FLOATS {
            for precision in FLOATS {
                for (n, k) in [(40, 70), (34, 1153), (66, 31)] {
                    Case::new(&device, (3, n, k), source, precision, Activation::None, false).check(&device);
                    Case::new(&device, (3, n, k), source, precision, Activation::Geglu, true).check(&device);
                }
            }
        }
    }
}

#[test]
fn rows_of_the_first_half_are_activated_and_rows_of_the_last_half_are_gates() {
    // One input, weights 1, 2, 3 | 10, 20, 30: gelu(1) * 10, gelu(2) * 20, gelu(3) * 30.
    for device in devices() {
        for precision in FLOATS {
            let x = Tensor::from_f32(&device, DType::F32, &[1, 1], &[1.0]).unwrap();
            let source = Tensor::from_f32(&device, DType::F32, &[6, 1], &[1.0, 2.0, 3.0, 10.0, 20.0, 30.0]).unwrap();
            let weight = Weight::pack(&device, &source, precision, Layout::Gated).unwrap();
            let out = poisoned(&device, DType::F32, &[1, 3]);
            let activation = Activation::Geglu;
            forward(&device, &Forward { x: &x, weight: &weight, bias: None, activation, residual: None, out: &out })
                .unwrap();
            assert_close("geglu", &out, &[8.413_447_46, 39.089_994_7, 89.878_509_3], 1e-5, 1e-6);
        }
    }
}

#[test]
fn geglu_uses_the_exact_gelu_and_not_the_tanh_form() {
    // Between the two lie 4.7e-4 at 2.3.
    let device = Device::cpu();
    let x = Tensor::from_f32(&device, DType::F32, &[1, 1], &[2.3]).unwrap();
    let source = Tensor::from_f32(&device, DType::F32, &[2, 1], &[1.0, 1.0]).unwrap();
    let weight = Weight::pack(&device, &source, DType::F32, Layout::Gated).unwrap();
    let out = poisoned(&device, DType::F32, &[1, 1]);
    let activation = Activation::Geglu;
    forward(&device, &Forward { x: &x, weight: &weight, bias: None, activation, residual: None, out: &out }).unwrap();
    assert_close("geglu", &out, &[2.3 * crate::gelu::reference::value(Gelu::Erf, f64::from(2.3f32))], 0.0, 2e-6);
}

#[test]
fn the_bias_of_a_gated_weight_has_the_order_of_its_rows() {
    for device in devices() {
        let (n, k) = (70, 3);
        let x = Tensor::zeros(&device, DType::F32, &[2, k]).unwrap();
        let weight =
            Weight::pack(&device, &Tensor::zeros(&device, DType::F32, &[n, k]).unwrap(), DType::F32, Layout::Gated)
                .unwrap();
        let values: Vec<f32> = (0..n).map(|j| if j < n / 2 { 10.0 + j as f32 } else { 1.0 + j as f32 }).collect();
        let bias = Tensor::from_f32(&device, DType::F32, &[n], &values).unwrap();
        let out = poisoned(&device, DType::F32, &[2, n / 2]);
        let (activation, bias) = (Activation::Geglu, Some(&bias));
        forward(&device, &Forward { x: &x, weight: &weight, bias, activation, residual: None, out: &out }).unwrap();
        let want: Vec<f64> = (0..n).map(|i| ((10 + i % (n / 2)) * (1 + n / 2 + i % (n / 2))) as f64).collect();
        assert_close("bias", &out, &want, 0.0, 1e-6);
    }
}

#[test]
fn the_residual_is_added_after_the_activation() {
    for device in devices() {
        let x = Tensor::from_f32(&device, DType::F32, &[1, 1], &[-3.0]).unwrap();
        let source = Tensor::from_f32(&device, DType::F32, &[2, 1], &[1.0, -1.0]).unwrap();
        let weight = Weight::pack(&device, &source, DType::F32, Layout::Plain).unwrap();
        let out = Tensor::from_f32(&device, DType::F32, &[1, 2], &[-5.0, 0.5]).unwrap();
        let (activation, residual) = (Activation::Relu, Some(&out));
        forward(&device, &Forward { x: &x, weight: &weight, bias: None, activation, residual, out: &out }).unwrap();
        assert_eq!(out.read_f32().unwrap(), [-5.0, 3.5]);
    }
}

#[test]
fn a_residual_in_place_gives_the_bits_of_one_elsewhere() {
    for device in devices() {
        for precision in FLOATS {
            for activation in [Activation::None, Activation::Geglu] {
                let case = Case::new(&device, (33, 98, 1100), DType::F16, precision, activation, true);
                let apart = poisoned(&device, DType::F32, &[33, case.columns()]);
                case.run(&device, &apart);
                let place = Tensor::zeros(&device, DType::F32, &[33, case.columns()]).unwrap();
                place.copy_from(&case.residual.as_ref().unwrap().0).unwrap();
                case.run_on(&device, &case.x.0, Some(&place), &place).unwrap();
                assert_eq!(place.read_f32().unwrap(), apart.read_f32().unwrap(), "{} {precision}", device.name());
            }
        }
    }
}

#[test]
fn without_inputs_only_bias_activation_and_residual_remain() {
    for device in devices() {
        for precision in FLOATS {
            for activation in ACTIVATIONS {
                Case::new(&device, (3, 34, 0), DType::F32, precision, activation, true).check(&device);
            }
        }
    }
}

#[test]
fn no_rows_are_no_work() {
    for device in devices() {
        let case = Case::new(&device, (0, 34, 20), DType::F32, DType::F32, Activation::None, false);
        case.run(&device, &Tensor::zeros(&device, DType::F32, &[0, 34]).unwrap());
    }
}

#[test]
fn leading_dimensions_fold_into_rows() {
    let device = Device::cpu();
    let case = Case::new(&device, (6, 34, 20), DType::F32, DType::F32, Activation::None, false);
    let out = poisoned(&device, DType::F32, &[2, 3, 34]);
    case.run_on(&device, &case.x.0.view(&[3, 2, 20]).unwrap(), None, &out).unwrap();
    assert_close("folded", &out, &case.expected(), 5e-6, 5e-6);
}

#[test]
fn tensors_need_no_more_than_the_alignment_of_their_elements() {
    for device in devices() {
        for precision in FLOATS {
            let mut case = Case::new(&device, (15, 66, 70), DType::F16, precision, Activation::Geglu, true);
            case.x.0 = crate::testing::unaligned(&case.x.0);
            case.weight =
                Weight::pack(&device, &crate::testing::unaligned(&case.source.0), precision, Layout::Gated).unwrap();
            if let Some((bias, _)) = &mut case.bias {
                *bias = crate::testing::unaligned(bias);
            }
            let out = crate::testing::unaligned(&poisoned(&device, DType::F32, &[15, 33]));
            case.run(&device, &out);
            let (atol, rtol) = tolerance(precision);
            assert_close("unaligned", &out, &case.expected(), atol, rtol);
        }
    }
}

#[test]
fn nothing_is_written_outside_the_output() {
    for device in devices() {
        for (m, n, k) in [(3, 33, 20), (30, 97, 600)] {
            let case = Case::new(&device, (m, n, k), DType::F32, DType::F32, Activation::None, false);
            let around = poisoned(&device, DType::F32, &[64 + m * n + 64]);
            case.run(&device, &around.slice(64, &[m, n]).unwrap());
            let all = around.read_f32().unwrap();
            assert!(all[..64].iter().chain(&all[64 + m * n..]).all(|x| x.is_nan()));
            assert!(all[64..64 + m * n].iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn nan_and_infinity_reach_their_rows_and_columns_only() {
    for device in devices() {
        for precision in FLOATS {
            let (m, n, k) = (20, 70, 41);
            let mut x = vec![1.0f32; m * k];
            (x[3 * k + 40], x[4 * k]) = (f32::NAN, f32::INFINITY);
            let mut w = vec![1.0f32; n * k];
            w[9 * k + 40] = f32::NAN;
            let x = Tensor::from_f32(&device, DType::F32, &[m, k], &x).unwrap();
            let weight = Weight::pack(
                &device,
                &Tensor::from_f32(&device, DType::F32, &[n, k], &w).unwrap(),
                precision,
                Layout::Plain,
            )
            .unwrap();
            for activation in [Activation::None, Activation::Relu, Activation::Gelu(Gelu::Erf)] {
                let out = poisoned(&device, DType::F32, &[m, n]);
                forward(
                    &device,
                    &Forward { x: &x, weight: &weight, bias: None, activation, residual: None, out: &out },
                )
                .unwrap();
                for (at, &v) in out.read_f32().unwrap().iter().enumerate() {
                    let (i, j) = (at / n, at % n);
                    assert_eq!(v.is_nan(), i == 3 || j == 9, "{} {precision} {activation:?} ({i}, {j})", device.name());
                    assert!(v.is_nan() || (v == f32::INFINITY) == (i == 4));
                }
            }
        }
    }
}

#[test]
fn a_bf16_weight_multiplies_rows_rounded_to_bf16_on_every_processor() {
    // 1 + 2^-9 rounds to 1 in bf16; sums of exact products of bf16 are exact here.
    for device in devices() {
        let (m, n, k) = (5, 40, 64);
        let x = Tensor::from_f32(&device, DType::F32, &[m, k], &vec![1.0 + 2f32.powi(-9); m * k]).unwrap();
        let source = Tensor::from_f32(&device, DType::F32, &[n, k], &vec![1.5; n * k]).unwrap();
        let weight = Weight::pack(&device, &source, DType::BF16, Layout::Plain).unwrap();
        let out = poisoned(&device, DType::F32, &[m, n]);
        let activation = Activation::None;
        forward(&device, &Forward { x: &x, weight: &weight, bias: None, activation, residual: None, out: &out })
            .unwrap();
        assert!(out.read_f32().unwrap().iter().all(|&v| v == 96.0), "{}", device.name());
    }
}

#[test]
fn sixteen_bit_weights_are_summed_in_f32_over_all_of_k() {
    for device in devices() {
        for precision in [DType::F16, DType::BF16] {
            let (m, n, k) = (2, 3, 5000);
            let x = Tensor::from_f32(&device, DType::F32, &[m, k], &vec![1.0; m * k]).unwrap();
            let source = Tensor::from_f32(&device, DType::F32, &[n, k], &vec![1.0; n * k]).unwrap();
            let weight = Weight::pack(&device, &source, precision, Layout::Plain).unwrap();
            let out = poisoned(&device, DType::F32, &[m, n]);
            let activation = Activation::None;
            forward(&device, &Forward { x: &x, weight: &weight, bias: None, activation, residual: None, out: &out })
                .unwrap();
            assert!(out.read_f32().unwrap().iter().all(|&v| v == 5000.0), "{}", device.name());
        }
    }
}

/// Some elements of a large product against sums in f64: the corners, where tails go wrong, and others at random.
fn production(m: usize, n: usize, k: usize, activation: Activation) {
    let device = Device::cpu_with_threads(2);
    for precision in FLOATS {
        let case = Case::new(&device, (m, n, k), DType::F16, precision, activation, false);
        let columns = case.columns();
        let out = poisoned(&device, DType::F32, &[m, columns]);
        case.run(&device, &out);
        let out = out.read_f32().unwrap();
        assert!(out.iter().all(|x| x.is_finite()), "an element was not written");
        let rng = &mut Random::new(9);
        let ends = [0, columns - 1, out.len() - columns, out.len() - 1];
        for at in ends.into_iter().chain((0..60).map(|_| rng.below(out.len()))) {
            let (i, j) = (at / columns, at % columns);
            let rows: Vec<usize> = if columns < n { vec![j, j + columns] } else { vec![j] };
            let source: Vec<f64> = rows.iter().flat_map(|&r| case.source.1[r * k..(r + 1) * k].to_vec()).collect();
            let x = &case.x.1[i * k..(i + 1) * k];
            let want = reference::forward(x, &source, None, activation, None, precision, (1, rows.len(), k))[0];
            let got = f64::from(out[at]);
            assert!((got - want).abs() <= 2e-5 + 2e-5 * want.abs(), "{precision} ({i}, {j}): got {got}, want {want}");
        }
    }
}

#[test]
fn production_size_qkv_of_one_question() {
    production(65, 3072, 1024, Activation::None);
}

#[test]
fn production_size_gated_layer_of_sixteen_questions() {
    production(1040, 5248, 1024, Activation::Geglu);
}

#[test]
fn production_size_projection_from_2624() {
    production(1040, 1024, 2624, Activation::None);
}

#[test]
fn production_size_gated_layer_of_the_small_encoder() {
    production(65, 2304, 768, Activation::Geglu);
}

#[test]
fn production_size_feed_forward_of_the_head_on_pruned_rows() {
    production(5, 4096, 1024, Activation::Relu);
    production(5, 1024, 4096, Activation::None);
}

#[test]
fn rows_longer_than_the_packing_buffer_are_taken_in_parts() {
    for precision in FLOATS {
        let device = Device::cpu_with_threads(2);
        Case::new(&device, (30, 33, 50_001), DType::F32, precision, Activation::None, true).check(&device);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn any_shape_equals_the_reference(
        (m, n, k) in (1usize..80, 1usize..150, 1usize..700),
        precision in 0usize..3, activation in 0usize..5, extras: bool, device in 0usize..64,
    ) {
        let all = devices();
        let device = &all[device % all.len()];
        let activation = ACTIVATIONS[activation];
        let n = if activation == Activation::Geglu { n.next_multiple_of(2) } else { n };
        Case::new(device, (m, n, k), DType::F32, FLOATS[precision], activation, extras).check(device);
    }
}
