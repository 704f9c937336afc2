//! The reference's gradients against differences of its losses, and the backward entry against the reference.

use super::*;
use crate::testing::{FLOATS, assert_close, devices, tolerance};

fn assert_backward(what: &str, head: &Head, layout: &Layout) {
    let (_, lse) = head.forward(&Layout::forward(head.device.threads(), head.n, head.d, head.vp)).unwrap();
    let (dhidden, dweight) = head.backward(&lse, layout).unwrap();
    let (want_dhidden, want_dweight) = head.reference_gradients();
    let (atol, rtol) = tolerance(head.hidden.dtype());
    assert_close(&format!("{what}: dhidden"), &dhidden, &want_dhidden, atol, rtol);
    assert_close(&format!("{what}: dweight"), &dweight, &want_dweight, atol, rtol);
}

#[test]
fn the_reference_gradients_match_finite_differences() {
    let device = Device::cpu_with_threads(1);
    let head = Head::new(&device, DType::F32, [4, 5, 7, 9]).ignoring(|row| row == 2);
    let total = |hidden: &[f64], weight: &[f64]| -> f64 {
        let problem = reference::Problem { hidden, weight, ..head.reference() };
        problem.forward().0.iter().sum()
    };
    let (dhidden, dweight) = head.reference().backward(1.0);
    let h = 1e-5;
    for i in 0..dhidden.len() {
        let moved = |by: f64| {
            let mut hidden = head.hidden64.clone();
            hidden[i] += by;
            total(&hidden, &head.weight64)
        };
        let difference = (moved(h) - moved(-h)) / (2.0 * h);
        assert!((difference - dhidden[i]).abs() < 1e-8, "dhidden[{i}]: {difference} against {}", dhidden[i]);
    }
    for i in 0..dweight.len() {
        let moved = |by: f64| {
            let mut weight = head.weight64.clone();
            weight[i] += by;
            total(&head.hidden64, &weight)
        };
        let difference = (moved(h) - moved(-h)) / (2.0 * h);
        assert!((difference - dweight[i]).abs() < 1e-8, "dweight[{i}]: {difference} against {}", dweight[i]);
    }
}

#[test]
fn gradients_match_the_reference_for_every_shape_type_and_device() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                let head = Head::new(&device, dtype, shape);
                let what = format!("{shape:?} {dtype} on {}", device.name());
                assert_backward(&what, &head, &Layout::backward(head.device.threads(), head.n, head.d, head.vp));
                // Few summed rows: the 16-bit types take their second walk.
                assert_backward(&format!("{what}, small tiles"), &head, &head.backward_layout(3, 16, 5));
            }
        }
    }
}

#[test]
fn every_row_count_up_to_17_with_ignored_rows() {
    for device in devices() {
        for n in 1..=17 {
            let head = Head::new(&device, DType::F32, [n, 19, 29, 37]).ignoring(|row| row % 5 == 1);
            assert_backward(&format!("N={n}"), &head, &head.backward_layout(4, 8, 4));
        }
    }
}

#[test]
fn bug_10_gradients_of_a_padded_vocabulary_that_is_no_multiple_of_16() {
    for device in devices() {
        for dtype in FLOATS {
            for cols in [5, 8, 29, 37, 64] {
                let head = Head::new(&device, dtype, [9, 21, 29, 37]);
                assert_backward(&format!("{dtype}, tiles of {cols}"), &head, &head.backward_layout(4, cols, 9));
            }
        }
    }
}

#[test]
fn padding_rows_of_dweight_are_exact_zeros() {
    // Specification 1.2: the gradient of padded columns is exactly 0, and written: the buffer held NaN.
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [6, 10, 29, 64]);
            let (_, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
            let (_, dweight) = head.backward(&lse, &head.backward_layout(4, 16, 4)).unwrap();
            assert!(values(&dweight)[29 * 10..].iter().all(|&x| x == 0.0), "{dtype}");
        }
    }
}

#[test]
fn padding_rows_keep_what_they_hold_when_accumulating() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [6, 10, 29, 64]).adding_to(0.375);
            let (_, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
            let (_, dweight) = head.backward(&lse, &head.backward_layout(4, 16, 4)).unwrap();
            assert!(values(&dweight)[29 * 10..].iter().all(|&x| x == 0.375), "{dtype}");
        }
    }
}

#[test]
fn accumulating_adds_to_dweight_and_overwrites_dhidden() {
    for device in devices() {
        for dtype in FLOATS {
            for sum_rows in [3, 64] {
                let head = Head::new(&device, dtype, [17, 12, 50, 64]).adding_to(0.5);
                assert_backward(&format!("{dtype}, {sum_rows} rows"), &head, &head.backward_layout(4, 16, sum_rows));
            }
        }
    }
}

#[test]
fn ignored_rows_get_zero_gradient_and_give_none() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [23, 17, 61, 64]).ignoring(|row| row % 3 == 1 || row > 20);
            let (_, lse) = head.forward(&head.forward_layout(5, 16)).unwrap();
            let (dhidden, _) = head.backward(&lse, &head.backward_layout(5, 16, 6)).unwrap();
            for (row, d) in values(&dhidden).chunks(17).enumerate() {
                assert_eq!(d.iter().all(|&x| x == 0.0), head.targets[row] == IGNORE, "row {row} {dtype}");
            }
            assert_backward("others", &head, &head.backward_layout(5, 16, 6));
        }
    }
}

#[test]
fn all_rows_ignored_gives_zero_gradients() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [6, 9, 29, 37]).ignoring(|_| true);
            let lse = Tensor::zeros(&device, DType::F32, &[6]).unwrap();
            let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(4, 16, 4)).unwrap();
            assert!(values(&dhidden).iter().chain(&values(&dweight)).all(|&x| x == 0.0), "{dtype}");
        }
    }
}

#[test]
fn ignoring_a_row_equals_deleting_it_bit_for_bit() {
    for device in crate::testing::cpus() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [23, 17, 61, 64]).ignoring(|row| row % 3 == 1);
            let short = head.compacted();
            let (_, lse) = head.forward(&head.forward_layout(5, 16)).unwrap();
            let (_, short_lse) = short.forward(&short.forward_layout(5, 16)).unwrap();
            let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(5, 16, 6)).unwrap();
            let (short_dhidden, short_dweight) = short.backward(&short_lse, &short.backward_layout(5, 16, 6)).unwrap();
            let rows: Vec<u32> = bits(&dhidden)
                .chunks(17)
                .enumerate()
                .filter(|(row, _)| row % 3 != 1)
                .flat_map(|(_, d)| d.to_vec())
                .collect();
            assert_eq!(rows, bits(&short_dhidden), "dhidden {dtype}");
            assert_eq!(bits(&dweight), bits(&short_dweight), "dweight {dtype}");
        }
    }
}

#[test]
fn dlogits_of_a_row_sum_to_zero() {
    // With every weight row 1, dhidden is the sum of a row of dlogits; with every hidden row 1, the sum over dweight is that of all dlogits.
    for device in devices() {
        let head = Head::new(&device, DType::F32, [9, 4, 301, 320]);
        head.hidden.write_f32(&[1.0; 36]).unwrap();
        let (_, lse) = head.forward(&head.forward_layout(4, 64)).unwrap();
        let (_, dweight) = head.backward(&lse, &head.backward_layout(4, 64, 9)).unwrap();
        assert!(values(&dweight).iter().any(|x| x.abs() > 1e-3), "there is a gradient at all");
        for j in 0..4 {
            let sum: f64 = values(&dweight).iter().skip(j).step_by(4).sum();
            assert!(sum.abs() < 2e-6, "column {j} of dweight sums to {sum}");
        }
        let mut weight = head.weight.read_f32().unwrap();
        weight[..301 * 4].fill(1.0);
        head.weight.write_f32(&weight).unwrap();
        let (_, lse) = head.forward(&head.forward_layout(4, 64)).unwrap();
        let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(4, 64, 9)).unwrap();
        assert!(values(&dhidden).iter().all(|x| x.abs() < 1e-6), "{:?}", values(&dhidden));
        assert!(values(&dweight).iter().any(|x| x.abs() > 1e-3), "dlogits themselves are not all zero");
    }
}

#[test]
fn dhidden_is_a_sum_of_weights_balanced_by_the_target() {
    // sum_v p_v (w_v - w_target) dloss: adding one vector to all weight rows changes nothing.
    for device in devices() {
        let head = Head::new(&device, DType::F32, [5, 6, 40, 40]);
        let (_, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        let (before, _) = head.backward(&lse, &head.backward_layout(4, 16, 5)).unwrap();
        let shifted: Vec<f32> = head.weight.read_f32().unwrap().iter().map(|w| w + 2.0).collect();
        head.weight.write_f32(&shifted).unwrap();
        let (_, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        let (after, _) = head.backward(&lse, &head.backward_layout(4, 16, 5)).unwrap();
        assert_close("dhidden", &after, &values(&before), 3e-6, 1e-5);
    }
}

#[test]
fn gradients_are_linear_in_dloss() {
    for device in devices() {
        let mut head = Head::new(&device, DType::F32, [5, 6, 40, 40]);
        let (_, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        head.dloss = 0.25;
        let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(4, 16, 5)).unwrap();
        head.dloss = 1.0;
        let (four_dhidden, four_dweight) = head.backward(&lse, &head.backward_layout(4, 16, 5)).unwrap();
        for (one, four) in [(dhidden, four_dhidden), (dweight, four_dweight)] {
            let scaled: Vec<f64> = values(&one).iter().map(|x| 4.0 * x).collect();
            assert_close("a power of two scales exactly", &four, &scaled, 0.0, 0.0);
        }
    }
}

#[test]
fn logits_of_ten_thousand_give_finite_gradients() {
    for device in devices() {
        let head = Head::scaled(&device, DType::F32, [6, 24, 70, 70], 1e4);
        let (_, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(4, 16, 6)).unwrap();
        assert!(values(&dhidden).iter().chain(&values(&dweight)).all(|x| x.is_finite()));
        let (want_dhidden, _) = head.reference_gradients();
        let scale = want_dhidden.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        assert_close("dhidden", &dhidden, &want_dhidden, 2e-3 * scale, 0.0);
    }
}

#[test]
fn sixteen_bit_gradients_are_rounded_once() {
    // Many blocks of rows and many tiles: sums kept in 16 bits would be off by far more than half a unit.
    for device in crate::testing::cpus() {
        for (dtype, half_ulp) in [(DType::F16, 2f64.powi(-11)), (DType::BF16, 2f64.powi(-8))] {
            for sum_rows in [8, 64] {
                let mut head = Head::new(&device, dtype, [64, 16, 200, 208]).adding_to(1.0);
                head.dloss = 1.0;
                let (_, lse) = head.forward(&head.forward_layout(8, 16)).unwrap();
                let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(8, 16, sum_rows)).unwrap();
                let (want_dhidden, want_dweight) = head.reference_gradients();
                assert_close(&format!("dhidden {dtype}"), &dhidden, &want_dhidden, 2e-5, half_ulp);
                assert_close(&format!("dweight {dtype}"), &dweight, &want_dweight, 2e-5, half_ulp);
            }
        }
    }
}

#[test]
fn storage_types_may_be_mixed() {
    let device = Device::cpu_with_threads(2);
    for (d_hidden, d_weight) in [(DType::BF16, DType::F32), (DType::F32, DType::BF16)] {
        let head = Head::new(&device, DType::BF16, [9, 8, 30, 32]).ignoring(|row| row == 4);
        let (_, lse) = head.forward(&head.forward_layout(4, 8)).unwrap();
        let layout = head.backward_layout(4, 8, 4);
        let (dhidden, dweight) = (poisoned(&device, d_hidden, &[9, 8]), poisoned(&device, d_weight, &[32, 8]));
        let args = Backward {
            hidden: &head.hidden,
            weight: &head.weight,
            vocab: 30,
            targets: &head.targets(),
            ignore_index: IGNORE,
            lse: &lse,
            dloss: head.dloss,
            dhidden: &dhidden,
            dweight: &dweight,
            accumulate_dweight: false,
            workspace: &workspace(&device, layout.bytes_on(&device)),
        };
        backward_with(&device, &args, &layout).unwrap();
        let (want_dhidden, want_dweight) = head.reference_gradients();
        for (what, got, want) in [("dhidden", &dhidden, want_dhidden), ("dweight", &dweight, want_dweight)] {
            let (atol, rtol) = tolerance(got.dtype());
            assert_close(what, got, &want, atol, rtol);
        }
    }
}
