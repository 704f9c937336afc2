//! Which keys a query sees, shown by values that name their token.

use super::*;

/// For each query the keys it sees: equal scores, and values that are one at their own token's channel. `L` at most 256.
fn seen(device: &Device, mut pack: Pack) -> Vec<Vec<usize>> {
    let n = pack.tokens();
    (pack.heads, pack.head) = (1, n.next_multiple_of(2));
    let head = pack.head;
    let call = Call::new(device, DType::F32, pack, 1.0, 1);
    let mut qkv = vec![0.0; n * 3 * head];
    (0..n).for_each(|t| qkv[t * 3 * head + 2 * head + t] = 1.0);
    call.qkv.write_f32(&qkv).unwrap();
    if let Some(q) = &call.q {
        q.zero();
    }
    call.run();
    let out = call.out.read_f32().unwrap();
    out.chunks(head).map(|row| (0..n).filter(|&t| row[t] != 0.0).collect()).collect()
}

fn window(half: usize, lengths: &[usize]) -> Pack {
    Pack { window: Some(half), ..pack(1, 2, lengths) }
}

#[test]
fn the_window_is_inclusive_on_both_sides() {
    for device in devices() {
        for half in [1, 2, 5, 64] {
            let seen = seen(&device, window(half, &[150]));
            for (i, keys) in seen.iter().enumerate() {
                let want: Vec<usize> = (i.saturating_sub(half)..=(i + half).min(149)).collect();
                assert_eq!(keys, &want, "query {i}, half {half}");
            }
            assert_eq!(seen[75].len(), (2 * half + 1).min(75 + half + 1));
        }
    }
}

#[test]
fn a_window_of_zero_leaves_the_query_alone() {
    for device in devices() {
        let all = seen(&device, window(0, &[70]));
        assert!(all.iter().enumerate().all(|(i, keys)| keys == &[i]));
    }
}

#[test]
fn no_query_sees_another_row() {
    for device in devices() {
        for half in [None, Some(3)] {
            let all = seen(&device, Pack { window: half, ..pack(1, 2, &[5, 1, 70, 2]) });
            for (i, keys) in all.iter().enumerate() {
                let row = [0..5, 5..6, 6..76, 76..78].into_iter().find(|r| r.contains(&i)).unwrap();
                let want: Vec<usize> = row.filter(|&j| half.is_none_or(|half| i.abs_diff(j) <= half)).collect();
                assert_eq!(keys, &want, "query {i}");
            }
        }
    }
}

#[test]
fn options_see_themselves_and_the_rest_but_not_each_other() {
    for device in devices() {
        // Prefix 0..3, options 3..5 and 5..9, rest 9..12.
        let all = seen(&device, parallel(1, 2, None, &[(3, &[2, 4], 3)]));
        let without = |hidden: std::ops::Range<usize>| (0..12).filter(|j| !hidden.contains(j)).collect::<Vec<_>>();
        for (i, keys) in all.iter().enumerate() {
            let want = match i {
                3 | 4 => without(5..9),
                5..9 => without(3..5),
                _ => without(0..0),
            };
            assert_eq!(keys, &want, "query {i}");
        }
    }
}

#[test]
fn the_window_of_the_parallel_layout_measures_positions_not_indices() {
    for device in devices() {
        // Positions 0 1 2 | 3 4 5 6 | 3 4 | 7 8 9.
        let pack = parallel(1, 2, Some(2), &[(3, &[4, 2], 3)]);
        let (positions, options) = (pack.positions.clone().unwrap(), pack.option_ids.clone().unwrap());
        assert_eq!(positions, [0, 1, 2, 3, 4, 5, 6, 3, 4, 7, 8, 9]);
        let all = seen(&device, pack);
        for i in 0..12 {
            let near = |j: &usize| (positions[i] - positions[*j]).abs() <= 2;
            let same = |j: &usize| options[i] == 0 || options[*j] == 0 || options[i] == options[*j];
            assert_eq!(all[i], (0..12).filter(near).filter(same).collect::<Vec<_>>(), "query {i}");
        }
        // Index 7 is five away from index 2, but its position only one.
        assert!(all[7].contains(&2) && all[8].contains(&2) && !all[8].contains(&1));
    }
}

#[test]
fn option_ids_of_zero_and_below_hide_nothing() {
    for device in devices() {
        for ids in [vec![0; 6], vec![-1, -2, 0, 1, 1, -3]] {
            let all = seen(&device, Pack { option_ids: Some(ids), ..pack(1, 2, &[6]) });
            assert!(all.iter().all(|keys| keys.len() == 6));
        }
    }
}

#[test]
fn positions_at_both_ends_of_i32_are_far_apart() {
    for device in devices() {
        for (half, want) in [(5, 1), (u32::MAX as usize - 1, 1), (u32::MAX as usize, 2), (usize::MAX, 2)] {
            let positions = Some(vec![i32::MIN, i32::MAX]);
            let all = seen(&device, Pack { positions, ..window(half, &[2]) });
            assert!(all.iter().all(|keys| keys.len() == want), "half {half}");
        }
    }
}

#[test]
fn the_parallel_layout_matches_the_reference_in_every_storage_type() {
    let rows: [(usize, &[usize], usize); 4] =
        [(9, &[3, 7, 1], 60), (1, &[], 0), (20, &[70, 70, 5], 90), (2, &[1, 1, 1, 1], 300)];
    for dtype in FLOATS {
        let packs = [None, Some(1), Some(6), Some(64)].map(|window| parallel(2, 32, window, &rows));
        check_on_all(dtype, &packs);
    }
}

#[test]
fn two_hundred_options_of_one_token() {
    let options = [1; 200];
    check_on_all(DType::F32, &[parallel(1, 16, Some(5), &[(30, &options, 40)])]);
}

#[test]
fn positions_without_a_window_change_nothing() {
    for device in devices() {
        let plain = pack(2, 16, &[30, 9]);
        let bits = Call::new(&device, DType::F32, plain.clone(), 1.0, 7).run();
        let positions = Some((0..39).rev().collect());
        assert_eq!(Call::new(&device, DType::F32, Pack { positions, ..plain }, 1.0, 7).run(), bits);
    }
}

#[test]
fn positions_equal_to_the_index_give_the_result_of_the_band() {
    for device in devices() {
        for half in [1, 8, 64, 65, 100] {
            let band = Pack { window: Some(half), ..pack(2, 32, &[1, 300, 65]) };
            let by_index = Call::new(&device, DType::F32, band.clone(), 1.0, 8);
            let bits = by_index.run();
            let want: Vec<f64> = by_index.out.read_f32().unwrap().into_iter().map(f64::from).collect();
            let positions = Some((0..1).chain(0..300).chain(0..65).collect());
            for by_ids in [Pack { positions, ..band.clone() }, Pack { option_ids: Some(vec![0; 366]), ..band.clone() }]
            {
                let by_ids = Call::new(&device, DType::F32, by_ids, 1.0, 8);
                let same = by_ids.run() == bits;
                assert_close("out", &by_ids.out, &want, 1e-6, 1e-6);
                // A narrow band takes all its keys at once, ids take them block by block: equal up to rounding.
                assert!(same || half <= 64, "half {half} on {}", device.name());
            }
        }
    }
}

#[test]
fn a_window_as_long_as_the_row_gives_the_bits_of_none() {
    for device in devices() {
        let full = pack(2, 32, &[65, 200]);
        let bits = Call::new(&device, DType::F32, full.clone(), 1.0, 9).run();
        for half in [199, 1000, usize::MAX] {
            assert!(Call::new(&device, DType::F32, Pack { window: Some(half), ..full.clone() }, 1.0, 9).run() == bits);
        }
        // 64 tokens away is still inside for the row of 65, as published models use it.
        let short = Call::new(&device, DType::F32, Pack { window: Some(64), ..full }, 1.0, 9).run();
        assert!(short[..65 * 256] == bits[..65 * 256] && short != bits);
    }
}

#[test]
fn hidden_scores_that_are_not_numbers_stay_hidden() {
    for device in devices() {
        for positions in [None, Some((0..200).collect())] {
            let pack = Pack { window: Some(8), positions, ..pack(1, 16, &[200]) };
            let call = Call::new(&device, DType::F32, pack, 1.0, 10);
            let mut qkv = call.qkv.read_f32().unwrap();
            // The key of token 100 alone; its value stays a number, since a probability of zero is multiplied with it.
            qkv[100 * 48 + 16..100 * 48 + 32].fill(f32::NAN);
            call.qkv.write_f32(&qkv).unwrap();
            call.run();
            for (i, row) in call.out.read_f32().unwrap().chunks(16).enumerate() {
                let sees = i.abs_diff(100) <= 8;
                assert!(row.iter().all(|x| x.is_nan() == sees), "query {i} on {}", device.name());
            }
        }
    }
}

/// NaN in a whole third of the given tokens: 1 keys, 2 values.
fn spoil(call: &Call, third: usize, tokens: std::ops::Range<usize>) {
    let (mut qkv, d) = (call.qkv.read_f32().unwrap(), call.pack.d());
    for token in tokens {
        qkv[(token * 3 + third) * d..][..d].fill(f32::NAN);
    }
    call.qkv.write_f32(&qkv).unwrap();
}

// Other devices promise it of scores alone, and multiply hidden values by zero.
#[test]
fn on_portable_gpus_hidden_keys_and_values_that_are_not_numbers_stay_hidden() {
    for device in portable_gpus() {
        for dtype in FLOATS {
            for (third, positions) in [(1, None), (2, None), (2, Some((0..100).collect()))] {
                let pack = Pack { window: Some(8), positions, ..pack(2, 16, &[100]) };
                let call = Call::new(&device, dtype, pack, 1.0, 10);
                spoil(&call, third, 50..51);
                call.run();
                for (i, row) in call.out.read_f32().unwrap().chunks(32).enumerate() {
                    let sees = i.abs_diff(50) <= 8;
                    let name = format!("query {i}, third {third}, {dtype} on {}", device.name());
                    assert!(row.iter().all(|x| x.is_nan() == sees), "{name}");
                }
            }
        }
    }
}

#[test]
fn on_portable_gpus_values_of_other_options_that_are_not_numbers_stay_there() {
    for device in portable_gpus() {
        for dtype in FLOATS {
            // Tokens 3 to 6 are the first option, 7 to 11 the second.
            let call = Call::new(&device, dtype, parallel(1, 16, None, &[(3, &[4, 5], 2)]), 1.0, 11);
            spoil(&call, 2, 4..5);
            call.run();
            for (i, row) in call.out.read_f32().unwrap().chunks(16).enumerate() {
                let sees = !(7..12).contains(&i);
                assert!(row.iter().all(|x| x.is_nan() == sees), "query {i}, {dtype} on {}", device.name());
            }
        }
    }
}

#[test]
fn rows_of_a_pack_that_are_not_numbers_stay_there() {
    for device in devices() {
        for dtype in FLOATS {
            // The middle row and the last: neighbours of rows whose last tile is not full.
            let call = Call::new(&device, dtype, pack(2, 16, &[7, 5, 33, 9]), 1.0, 12);
            for third in 0..3 {
                spoil(&call, third, 7..12);
                spoil(&call, third, 45..54);
            }
            call.run();
            for (i, row) in call.out.read_f32().unwrap().chunks(32).enumerate() {
                let own = (7..12).contains(&i) || i >= 45;
                assert!(row.iter().all(|x| x.is_nan() == own), "query {i}, {dtype} on {}", device.name());
            }
        }
    }
}

#[test]
fn a_block_of_scores_that_are_not_numbers_is_not_taken_for_hidden() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, pack(1, 16, &[300]), 1.0, 10);
        let mut qkv = call.qkv.read_f32().unwrap();
        qkv[..128 * 48].chunks_mut(48).for_each(|row| row[16..32].fill(f32::NAN));
        call.qkv.write_f32(&qkv).unwrap();
        call.run();
        assert!(call.out.read_f32().unwrap().iter().all(|x| x.is_nan()), "{}", device.name());
    }
}
