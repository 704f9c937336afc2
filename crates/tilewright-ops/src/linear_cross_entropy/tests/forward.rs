//! Losses and log-sum-exps.

use super::*;
use crate::testing::{FLOATS, assert_close, devices, tolerance};

/// Losses of f32 arithmetic on exact inputs, however these are stored.
fn assert_forward(what: &str, head: &Head, layout: &Layout) {
    let (losses, lse) = head.forward(layout).unwrap();
    let (want_losses, want_lse) = head.reference().forward();
    let (atol, rtol) = tolerance(DType::F32);
    assert_close(&format!("{what}: losses"), &losses, &want_losses, 4.0 * atol, rtol);
    assert_close(&format!("{what}: lse"), &lse, &want_lse, 4.0 * atol, rtol);
}

#[test]
fn losses_match_the_reference_for_every_shape_type_and_device() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                let head = Head::new(&device, dtype, shape);
                let what = format!("{shape:?} {dtype} on {}", device.name());
                assert_forward(&what, &head, &Layout::forward(head.device.threads(), head.n, head.d, head.vp));
                assert_forward(&format!("{what}, small tiles"), &head, &head.forward_layout(3, 16));
            }
        }
    }
}

#[test]
fn several_tiles_of_every_dimension() {
    for device in crate::testing::production_devices() {
        for dtype in FLOATS {
            for shape in [[300, 72, 777, 800], [257, 136, 517, 517], [130, 520, 300, 304]] {
                let head = Head::new(&device, dtype, shape).ignoring(|row| row % 7 == 3);
                let what = format!("{shape:?} {dtype} on {}", device.name());
                assert_forward(&what, &head, &Layout::forward(head.device.threads(), head.n, head.d, head.vp));
                assert_forward(&format!("{what}, blocks of 128 rows"), &head, &head.forward_layout(128, 256));
            }
        }
    }
}

#[test]
fn every_row_count_up_to_17() {
    for device in devices() {
        for n in 1..=17 {
            let head = Head::new(&device, DType::F32, [n, 19, 29, 37]).ignoring(|row| row % 5 == 4);
            assert_forward(&format!("N={n}"), &head, &head.forward_layout(4, 8));
        }
    }
}

#[test]
fn bug_10_padded_vocabulary_that_is_no_multiple_of_16() {
    // The leading dimension of the tile must not be taken for aligned: V=29, Vp=37.
    for device in devices() {
        for dtype in FLOATS {
            for cols in [5, 8, 29, 37, 64] {
                let head = Head::new(&device, dtype, [9, 21, 29, 37]);
                assert_forward(&format!("{dtype}, tiles of {cols}"), &head, &head.forward_layout(4, cols));
            }
        }
    }
}

#[test]
fn padded_columns_take_part_in_no_sum() {
    // Specification 1.2: softmax and loss over the first V columns only. The padding rows would win every maximum.
    for device in devices() {
        let head = Head::new(&device, DType::F32, [4, 8, 29, 64]);
        let (losses, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        let mut weight = head.weight.read_f32().unwrap();
        weight[29 * 8..].fill(1e30);
        head.weight.write_f32(&weight).unwrap();
        let again = head.forward(&head.forward_layout(4, 16)).unwrap();
        assert_eq!((bits(&losses), bits(&lse)), (bits(&again.0), bits(&again.1)));
        assert!(values(&losses).iter().all(|l| l.is_finite()));
    }
}

#[test]
fn a_tile_that_is_all_padding_is_not_visited() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [5, 12, 16, 64]);
        assert_forward("tiles 1 to 3 of 4 are padding", &head, &head.forward_layout(5, 16));
    }
}

#[test]
fn a_late_maximum_in_the_last_tile_replaces_the_running_one() {
    for device in devices() {
        for cols in [1, 7, 16, 64] {
            let head = Head::new(&device, DType::F32, [3, 16, 100, 100]).planting(1, 99, 4.0);
            let (_, lse) = head.reference().forward();
            assert!(lse[1] > 20.0, "the planted logit is no maximum: {}", lse[1]);
            assert_forward(&format!("tiles of {cols}"), &head, &head.forward_layout(2, cols));
        }
    }
}

#[test]
fn an_early_maximum_in_the_first_tile_survives_all_others() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [3, 16, 100, 100]).planting(2, 0, 4.0);
        assert_forward("first column", &head, &head.forward_layout(2, 9));
    }
}

#[test]
fn the_target_is_found_in_every_tile() {
    for device in devices() {
        let (vocab, cols) = (50, 8);
        for target in 0..vocab {
            let head = Head::new(&device, DType::F32, [1, 7, vocab, 53]).with_targets(|_| target as i32);
            assert_forward(&format!("target {target}"), &head, &head.forward_layout(1, cols));
        }
    }
}

#[test]
fn ignored_rows_have_loss_and_lse_zero() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [11, 9, 29, 37]).ignoring(|row| [0, 3, 4, 10].contains(&row));
        let (losses, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        for row in [0, 3, 4, 10] {
            assert_eq!((values(&losses)[row], values(&lse)[row]), (0.0, 0.0));
        }
        assert_forward("others", &head, &head.forward_layout(4, 16));
    }
}

#[test]
fn all_rows_ignored_gives_zeros() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [6, 9, 29, 37]).ignoring(|_| true);
        let (losses, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        assert!(values(&losses).iter().chain(&values(&lse)).all(|&x| x == 0.0));
    }
}

#[test]
fn ignored_rows_may_hold_anything() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [6, 9, 29, 37]).ignoring(|row| row == 2);
        let mut hidden = head.hidden.read_f32().unwrap();
        hidden[2 * 9..3 * 9].fill(f32::NAN);
        head.hidden.write_f32(&hidden).unwrap();
        assert_forward("row 2 holds NaN", &head, &head.forward_layout(4, 16));
    }
}

#[test]
fn ignore_index_may_be_a_token() {
    let device = Device::cpu_with_threads(2);
    let head = Head::new(&device, DType::F32, [4, 5, 7, 7]).with_targets(|row| row as i32);
    let losses = poisoned(&device, DType::F32, &[4]);
    let lse = poisoned(&device, DType::F32, &[4]);
    let layout = head.forward_layout(4, 16);
    let args = Forward {
        hidden: &head.hidden,
        weight: &head.weight,
        vocab: 7,
        targets: &head.targets(),
        ignore_index: 3,
        losses: &losses,
        lse: &lse,
        workspace: &workspace(&device, layout.bytes_on(&device)),
    };
    forward_with(&device, &args, &layout).unwrap();
    let losses = values(&losses);
    assert!(losses[..3].iter().all(|&l| l > 0.0) && losses[3] == 0.0, "{losses:?}");
}

#[test]
fn ignoring_a_row_equals_deleting_it_bit_for_bit() {
    for device in crate::testing::cpus() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [23, 17, 61, 64]).ignoring(|row| row % 3 == 1);
            let short = head.compacted();
            let (losses, lse) = head.forward(&head.forward_layout(5, 16)).unwrap();
            let (short_losses, short_lse) = short.forward(&short.forward_layout(5, 16)).unwrap();
            for (all, short) in [(losses, short_losses), (lse, short_lse)] {
                let kept: Vec<u32> = (0..23).filter(|row| row % 3 != 1).map(|row| bits(&all)[row]).collect();
                assert_eq!(kept, bits(&short), "{dtype} on {}", device.name());
            }
        }
    }
}

#[test]
fn logits_of_ten_thousand_stay_finite() {
    for device in devices() {
        // exp of any of these overflows unless the maximum is subtracted; the target's loss is near 0, or near the gap to the maximum.
        let head = Head::scaled(&device, DType::F32, [6, 24, 70, 70], 1e4);
        let (losses, lse) = head.forward(&head.forward_layout(4, 16)).unwrap();
        let (want_losses, want_lse) = head.reference().forward();
        assert!(want_lse.iter().all(|l| *l > 5e3));
        assert_close("losses", &losses, &want_losses, 0.02, 1e-5);
        assert_close("lse", &lse, &want_lse, 0.02, 1e-5);
    }
}

#[test]
fn a_certain_target_has_loss_zero_not_noise() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [1, 16, 40, 40]).planting(0, 33, 1e3).with_targets(|_| 33);
        let (losses, _) = head.forward(&head.forward_layout(1, 16)).unwrap();
        assert_eq!(values(&losses), [0.0], "lse - logit would carry the rounding of a logit above 1e4");
    }
}

#[test]
fn uniform_logits_give_the_log_of_the_vocabulary() {
    for device in devices() {
        let head = Head::scaled(&device, DType::F32, [3, 4, 1000, 1024], 0.0);
        let (losses, _) = head.forward(&head.forward_layout(3, 64)).unwrap();
        assert_close("losses", &losses, &[1000f64.ln(); 3], 1e-6, 1e-6);
    }
}

#[test]
fn tile_sizes_change_only_rounding() {
    for device in devices() {
        let head = Head::new(&device, DType::F32, [19, 30, 211, 256]);
        for (rows, cols) in [(1, 1), (2, 7), (19, 256), (8, 64), (64, 1024)] {
            assert_forward(&format!("{rows} rows, {cols} columns"), &head, &head.forward_layout(rows, cols));
        }
    }
}

#[test]
fn leading_dimensions_fold() {
    let device = Device::cpu_with_threads(2);
    let head = Head::new(&device, DType::F32, [6, 5, 9, 9]);
    let layout = head.forward_layout(4, 16);
    let (flat, _) = head.forward(&layout).unwrap();
    let [losses, lse] = [(); 2].map(|()| poisoned(&device, DType::F32, &[2, 3]));
    let args = Forward {
        hidden: &head.hidden.view(&[2, 3, 5]).unwrap(),
        weight: &head.weight,
        vocab: 9,
        targets: &head.targets().view(&[2, 3]).unwrap(),
        ignore_index: IGNORE,
        losses: &losses,
        lse: &lse,
        workspace: &workspace(&device, layout.bytes_on(&device)),
    };
    forward_with(&device, &args, &layout).unwrap();
    assert_eq!(bits(&flat), bits(&losses));
}

#[test]
fn the_gpt2_vocabulary_at_1024_rows() {
    // The production row count and vocabulary of bug 1, narrow enough for a test; every loss is checked.
    let device = Device::cpu_with_threads(2);
    let head = Head::new(&device, DType::F32, [1024, 4, 50_257, 50_304]).ignoring(|row| row % 97 == 5);
    assert_forward("N=1024, V=50257", &head, &Layout::forward(4, 1024, 4, 50_304));
}
