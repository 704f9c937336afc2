//! Loss and gradients in one walk, and the agreement of the three entries.

use proptest::prelude::*;

use super::*;
use crate::testing::{FLOATS, assert_close, devices, tolerance};

fn assert_trained(what: &str, head: &Head, layout: &Layout) {
    let (losses, dhidden, dweight) = head.train(layout).unwrap();
    let (want_losses, _) = head.reference().forward();
    let (want_dhidden, want_dweight) = head.reference_gradients();
    let (atol, rtol) = tolerance(DType::F32);
    assert_close(&format!("{what}: losses"), &losses, &want_losses, 4.0 * atol, rtol);
    let (atol, rtol) = tolerance(head.hidden.dtype());
    assert_close(&format!("{what}: dhidden"), &dhidden, &want_dhidden, atol, rtol);
    assert_close(&format!("{what}: dweight"), &dweight, &want_dweight, atol, rtol);
}

#[test]
fn one_walk_matches_the_reference_for_every_shape_type_and_device() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                let head = Head::new(&device, dtype, shape);
                let what = format!("{shape:?} {dtype} on {}", device.name());
                assert_trained(&what, &head, &Layout::training(head.device.threads(), head.n, head.d, head.vp));
                assert_trained(&format!("{what}, small chunks"), &head, &head.training_layout(3, 16));
            }
        }
    }
}

#[test]
fn every_row_count_up_to_17() {
    for device in devices() {
        for n in 1..=17 {
            let head = Head::new(&device, DType::F32, [n, 19, 29, 37]).ignoring(|row| row % 4 == 3);
            assert_trained(&format!("N={n}"), &head, &head.training_layout(4, 8));
        }
    }
}

#[test]
fn bug_10_training_with_a_padded_vocabulary_that_is_no_multiple_of_16() {
    for device in devices() {
        for dtype in FLOATS {
            for cols in [5, 8, 29, 37, 64] {
                let head = Head::new(&device, dtype, [9, 21, 29, 37]);
                assert_trained(&format!("{dtype}, tiles of {cols}"), &head, &head.training_layout(4, cols));
            }
        }
    }
}

#[test]
fn padding_rows_get_zeros_or_keep_what_they_hold() {
    for device in devices() {
        for dtype in FLOATS {
            for (start, want) in [(f32::NAN, 0.0), (0.375, 0.375)] {
                let head = Head::new(&device, dtype, [6, 10, 29, 64]).adding_to(start);
                let (_, _, dweight) = head.train(&head.training_layout(4, 16)).unwrap();
                assert!(values(&dweight)[29 * 10..].iter().all(|&x| x == want), "{dtype}, {start} before");
            }
        }
    }
}

#[test]
fn accumulating_adds_to_dweight_and_overwrites_the_rest() {
    for device in devices() {
        for dtype in FLOATS {
            for rows in [3, 64] {
                let head = Head::new(&device, dtype, [17, 12, 50, 64]).adding_to(0.5);
                assert_trained(&format!("{dtype}, {rows} rows"), &head, &head.training_layout(rows, 16));
            }
        }
    }
}

#[test]
fn two_micro_batches_accumulate_to_the_whole_batch() {
    for device in devices() {
        let whole = Head::new(&device, DType::F32, [16, 12, 50, 64]);
        let (_, _, want) = whole.train(&whole.training_layout(8, 16)).unwrap();
        let first = whole.clone().ignoring(|row| row >= 8);
        let second = whole.clone().ignoring(|row| row < 8);
        let (_, _, sum) = first.train(&first.training_layout(8, 16)).unwrap();
        let dhidden = poisoned(&device, DType::F32, &[16, 12]);
        let losses = poisoned(&device, DType::F32, &[16]);
        let layout = second.training_layout(8, 16);
        let args = ForwardBackward {
            hidden: &second.hidden,
            weight: &second.weight,
            vocab: 50,
            targets: &second.targets(),
            ignore_index: IGNORE,
            losses: &losses,
            dloss: second.dloss,
            dhidden: &dhidden,
            dweight: &sum,
            accumulate_dweight: true,
            workspace: &workspace(&device, layout.bytes_on(&device)),
        };
        forward_backward_with(&device, &args, &layout).unwrap();
        assert_close("dweight", &sum, &values(&want), 1e-8, 1e-6);
    }
}

#[test]
fn ignored_rows_get_zeros() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [23, 17, 61, 64]).ignoring(|row| row < 2 || row % 3 == 1 || row > 20);
            let (losses, dhidden, _) = head.train(&head.training_layout(5, 16)).unwrap();
            for (row, d) in values(&dhidden).chunks(17).enumerate() {
                let ignored = head.targets[row] == IGNORE;
                assert_eq!(d.iter().all(|&x| x == 0.0), ignored, "row {row} {dtype}");
                assert_eq!(values(&losses)[row] == 0.0, ignored, "row {row} {dtype}");
            }
            assert_trained("others", &head, &head.training_layout(5, 16));
        }
    }
}

#[test]
fn all_rows_ignored_gives_zeros() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [6, 9, 29, 37]).ignoring(|_| true);
            let (losses, dhidden, dweight) = head.train(&head.training_layout(4, 16)).unwrap();
            let all = [losses, dhidden, dweight];
            assert!(all.iter().flat_map(values).all(|x| x == 0.0), "{dtype}");
        }
    }
}

#[test]
fn all_rows_ignored_leaves_an_accumulated_dweight_alone() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [6, 9, 29, 37]).ignoring(|_| true).adding_to(2.0);
            let (_, _, dweight) = head.train(&head.training_layout(4, 16)).unwrap();
            assert!(values(&dweight).iter().all(|&x| x == 2.0), "{dtype}");
        }
    }
}

#[test]
fn no_rows_at_all_is_a_batch_of_zero_gradient() {
    let device = Device::cpu_with_threads(2);
    let head = Head::new(&device, DType::F32, [0, 9, 29, 37]);
    let (losses, dhidden, dweight) = head.train(&Layout::training(4, 0, 9, 37)).unwrap();
    assert_eq!((losses.numel(), dhidden.numel()), (0, 0));
    assert!(values(&dweight).iter().all(|&x| x == 0.0));
}

#[test]
fn ignoring_a_row_equals_deleting_it_bit_for_bit() {
    for device in crate::testing::cpus() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [23, 17, 61, 64]).ignoring(|row| row % 3 == 1);
            let short = head.compacted();
            let (losses, dhidden, dweight) = head.train(&head.training_layout(5, 16)).unwrap();
            let (short_losses, short_dhidden, short_dweight) = short.train(&short.training_layout(5, 16)).unwrap();
            let kept = |t: &Tensor, width: usize| -> Vec<u32> {
                let rows = bits(t);
                (0..23).filter(|row| row % 3 != 1).flat_map(|row| rows[row * width..][..width].to_vec()).collect()
            };
            assert_eq!(kept(&losses, 1), bits(&short_losses), "losses {dtype}");
            assert_eq!(kept(&dhidden, 17), bits(&short_dhidden), "dhidden {dtype}");
            assert_eq!(bits(&dweight), bits(&short_dweight), "dweight {dtype}");
        }
    }
}

#[test]
fn chunk_and_tile_sizes_change_only_rounding() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [19, 30, 211, 256]);
            for (rows, cols) in [(1, 1), (2, 7), (19, 256), (8, 64), (64, 1024)] {
                assert_trained(&format!("{rows} rows, {cols} columns"), &head, &head.training_layout(rows, cols));
            }
        }
    }
}

#[test]
fn the_three_entries_agree() {
    for device in devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [37, 20, 150, 160]).ignoring(|row| row % 7 == 3);
            let (losses, lse) = head.forward(&head.forward_layout(8, 32)).unwrap();
            let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(8, 32, 16)).unwrap();
            let (train_losses, train_dhidden, train_dweight) = head.train(&head.training_layout(8, 32)).unwrap();
            assert_close("losses", &train_losses, &values(&losses), 1e-6, 1e-6);
            // Two roundings of nearly the same sum differ by a unit of the storage at most.
            let ulp = match dtype {
                DType::F32 => 1e-5,
                DType::F16 => 2f64.powi(-10),
                _ => 2f64.powi(-7),
            };
            // On a GPU each entry rounds its own dlogits to the weight's type.
            let (abs, rel) = if crate::testing::is_gpu(&device) { tolerance(dtype) } else { (1e-7, ulp) };
            assert_close("dhidden", &train_dhidden, &values(&dhidden), abs, rel);
            assert_close("dweight", &train_dweight, &values(&dweight), abs, rel);
        }
    }
}

#[test]
fn a_late_maximum_and_a_target_in_every_tile() {
    for device in devices() {
        let (vocab, cols) = (96, 16);
        let head = Head::new(&device, DType::F32, [12, 16, vocab, vocab]);
        let head = head.planting(1, 95, 4.0).planting(7, 80, 3.0).with_targets(|row| (row * 8 + 7) as i32);
        assert_trained("late maximum", &head, &head.training_layout(5, cols));
    }
}

#[test]
fn dlogits_of_a_row_sum_to_zero() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [9, 4, 301, 320]);
        let mut weight = head.weight.read_f32().unwrap();
        weight[..301 * 4].fill(1.0);
        head.weight.write_f32(&weight).unwrap();
        let (_, dhidden, dweight) = head.train(&head.training_layout(4, 64)).unwrap();
        assert!(values(&dhidden).iter().all(|x| x.abs() < 1e-6), "{:?}", values(&dhidden));
        assert!(values(&dweight).iter().any(|x| x.abs() > 1e-3), "dlogits themselves are not all zero");
    }
}

#[test]
fn logits_of_ten_thousand_stay_finite() {
    for device in devices() {
        let head = Head::scaled(&device, DType::F32, [6, 24, 70, 70], 1e4);
        let (losses, dhidden, dweight) = head.train(&head.training_layout(4, 16)).unwrap();
        let (want, _) = head.reference().forward();
        assert_close("losses", &losses, &want, 0.02, 1e-5);
        assert!(values(&dhidden).iter().chain(&values(&dweight)).all(|x| x.is_finite()));
    }
}

#[test]
fn sixteen_bit_dweight_is_rounded_once_whatever_the_chunks() {
    for device in crate::testing::cpus() {
        for (dtype, half_ulp) in [(DType::F16, 2f64.powi(-11)), (DType::BF16, 2f64.powi(-8))] {
            for rows in [8, 64] {
                let mut head = Head::new(&device, dtype, [64, 16, 200, 208]).adding_to(1.0);
                head.dloss = 1.0;
                let (_, dhidden, dweight) = head.train(&head.training_layout(rows, 16)).unwrap();
                let (want_dhidden, want_dweight) = head.reference_gradients();
                assert_close(&format!("dhidden {dtype}"), &dhidden, &want_dhidden, 2e-5, half_ulp);
                assert_close(&format!("dweight {dtype}"), &dweight, &want_dweight, 2e-5, half_ulp);
            }
        }
    }
}

#[test]
fn the_gpt2_vocabulary_at_1024_rows() {
    // Chunks as a trainer has them (bug 1: production row counts), sampled: all losses, every 61st row of dhidden, every 997th of dweight.
    for device in crate::testing::production_devices() {
        let (n, d, vocab, vp) = (1024, 4, 50_257, 50_304);
        let head = Head::new(&device, DType::F32, [n, d, vocab, vp]).ignoring(|row| row % 97 == 5);
        let (losses, dhidden, dweight) = head.train(&Layout::training(4, n, d, vp)).unwrap();
        let (want, lse) = head.reference().forward();
        assert_close("losses", &losses, &want, 4e-6, 1e-5);
        let logit = |row: usize, v: usize| -> f64 {
            (0..d).map(|j| head.hidden64[row * d + j] * head.weight64[v * d + j]).sum()
        };
        let dlogit = |row: usize, v: usize| -> f64 {
            let onehot = if head.targets[row] == v as i32 { 1.0 } else { 0.0 };
            ((logit(row, v) - lse[row]).exp() - onehot) * f64::from(head.dloss)
        };
        let counts: Vec<usize> = (0..n).filter(|&row| head.targets[row] != IGNORE).collect();
        let (dhidden, dweight) = (values(&dhidden), values(&dweight));
        for &row in counts.iter().step_by(61) {
            for j in 0..d {
                let want: f64 = (0..vocab).map(|v| dlogit(row, v) * head.weight64[v * d + j]).sum();
                let got = dhidden[row * d + j];
                assert!((got - want).abs() <= 1e-7 + 1e-4 * want.abs(), "dhidden[{row}, {j}]: {got} against {want}");
            }
        }
        for v in (0..vocab).step_by(997).chain([vocab - 1]) {
            for j in 0..d {
                let want: f64 = counts.iter().map(|&row| dlogit(row, v) * head.hidden64[row * d + j]).sum();
                let got = dweight[v * d + j];
                assert!((got - want).abs() <= 1e-9 + 1e-4 * want.abs(), "dweight[{v}, {j}]: {got} against {want}");
            }
        }
        assert!(dweight[vocab * d..].iter().all(|&x| x == 0.0));
    }
}

/// Shapes of several matrix tiles in every dimension, with edges in all.
const LARGE: [[usize; 4]; 3] = [[300, 72, 777, 800], [257, 136, 517, 517], [130, 520, 300, 304]];

/// `||got - want|| / ||want||` within what roundings of single factors and of the result add up to.
pub(super) fn assert_near(what: &str, got: &Tensor, want: &[f64], dtype: DType) {
    let bound = match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 1.5e-3,
        _ => 6e-3,
    };
    let got = values(got);
    let (mut error, mut norm) = (0.0, 0.0);
    for (g, w) in got.iter().zip(want) {
        error += (g - w) * (g - w);
        norm += w * w;
    }
    let relative = (error / norm).sqrt();
    assert!(relative < bound, "{what}: ||got - want|| / ||want|| is {relative:.2e}, allowed is {bound:.1e}");
}

/// By norms and with gradients near 1, in chunks of so many rows, overwriting and adding.
fn assert_trained_closely(what: &str, head: &Head, chunks: &[usize]) {
    let head = Head { dloss: 1.0, ..head.clone() };
    let (dtype, columns) = (head.hidden.dtype(), head.vocab * head.d);
    let (want_losses, _) = head.reference().forward();
    let (want_dhidden, want_dweight) = head.reference().backward(1.0);
    for &rows in chunks {
        for start in [f32::NAN, 0.25] {
            let what = format!("{what}, {rows} rows, {start} before");
            let head = head.clone().adding_to(start);
            let (losses, dhidden, dweight) = head.train(&head.training_layout(rows, 256)).unwrap();
            let before = if start.is_nan() { 0.0 } else { f64::from(start) };
            let want: Vec<f64> = want_dweight[..columns].iter().map(|w| w + before).collect();
            let (atol, rtol) = tolerance(DType::F32);
            assert_close(&format!("{what}: losses"), &losses, &want_losses, 4.0 * atol, rtol);
            assert_near(&format!("{what}: dhidden"), &dhidden, &want_dhidden, dtype);
            assert_near(&format!("{what}: dweight"), &dweight.slice(0, &[columns]).unwrap(), &want, dtype);
        }
    }
}

#[test]
fn several_tiles_of_every_dimension_in_chunks_of_every_kind() {
    for device in crate::testing::production_devices() {
        for dtype in FLOATS {
            for shape in LARGE {
                let head = Head::new(&device, dtype, shape).ignoring(|row| row % 7 == 3);
                let what = format!("{shape:?} {dtype} on {}", device.name());
                assert_trained_closely(&what, &head, &[head.n, 128, 101, 64]);
            }
        }
    }
}

#[test]
fn a_target_far_below_the_largest_logit() {
    for device in crate::testing::production_devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [300, 72, 777, 800]).planting(1, 5, 4.0).planting(299, 700, 3.0);
            assert_trained_closely(&format!("{dtype} on {}", device.name()), &head, &[300, 101]);
        }
    }
}

#[test]
fn the_same_bits_twice() {
    for device in crate::testing::production_devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, LARGE[1]);
            for rows in [257, 128, 101] {
                let layout = head.training_layout(rows, 256);
                let (first, second) = (head.train(&layout).unwrap(), head.train(&layout).unwrap());
                assert_eq!(bits(&first.0), bits(&second.0), "losses {dtype}, {rows} rows");
                assert_eq!(bits(&first.1), bits(&second.1), "dhidden {dtype}, {rows} rows");
                assert_eq!(bits(&first.2), bits(&second.2), "dweight {dtype}, {rows} rows");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape_tiling_and_ignored_rows(
        n in 1usize..40,
        d in 1usize..40,
        vocab in 1usize..120,
        padding in 0usize..40,
        rows in 1usize..20,
        cols in 1usize..70,
        sum_rows in 1usize..20,
        ignored in any::<u64>(),
        dtype in 0usize..3,
        accumulate in any::<bool>(),
    ) {
        let device = Device::cpu_with_threads(2);
        let head = Head::new(&device, FLOATS[dtype], [n, d, vocab, vocab + padding])
            .ignoring(|row| ignored >> row & 1 == 1)
            .adding_to(if accumulate { 0.25 } else { f32::NAN });
        assert_trained("training", &head, &head.training_layout(rows, cols));
        let (losses, lse) = head.forward(&head.forward_layout(rows, cols)).unwrap();
        let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(rows, cols, sum_rows)).unwrap();
        let (want_losses, want_lse) = head.reference().forward();
        let (want_dhidden, want_dweight) = head.reference_gradients();
        assert_close("losses", &losses, &want_losses, 4e-6, 1e-5);
        assert_close("lse", &lse, &want_lse, 4e-6, 1e-5);
        let (atol, rtol) = tolerance(head.hidden.dtype());
        assert_close("dhidden", &dhidden, &want_dhidden, atol, rtol);
        assert_close("dweight", &dweight, &want_dweight, atol, rtol);
    }
}
