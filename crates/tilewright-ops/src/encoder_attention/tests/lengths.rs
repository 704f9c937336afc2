//! Full and banded attention against the reference, by length, head size and window.

use super::*;

/// Long rows beside rows of one token, an odd number of rows, and an empty row.
const MIXED: [usize; 9] = [1, 130, 1, 17, 64, 1, 0, 65, 3];

#[test]
fn every_length_from_1_to_17_in_every_storage_type() {
    let packs: Vec<Pack> = (1..=17).map(|l| pack(2, 16, &[l])).collect();
    FLOATS.into_iter().for_each(|dtype| check_on_all(dtype, &packs));
}

#[test]
fn lengths_around_the_blocks_of_queries_and_keys() {
    let lengths = [31, 63, 64, 65, 66, 67, 127, 128, 129, 130, 132, 133, 255, 257, 529];
    let packs: Vec<Pack> = lengths.into_iter().map(|l| pack(1, 32, &[l])).collect();
    check_on_all(DType::F32, &packs);
}

#[test]
fn a_thousand_tokens_with_and_without_a_window() {
    let packs = [None, Some(64), Some(5)].map(|window| Pack { window, ..pack(2, 64, &[1000]) });
    check_on_all(DType::F32, &packs);
}

#[test]
fn heads_of_64_in_every_storage_type_at_lengths_around_tiles_of_64_and_128() {
    // What the matrix units of GPUs take.
    let mut packs = Vec::new();
    for window in [None, Some(64), Some(5)] {
        packs.push(Pack { window, ..pack(2, 64, &[1, 63, 64, 65, 127, 128, 129, 200]) });
        packs.push(Pack { window, ..pack(1, 64, &[1100]) });
    }
    FLOATS.into_iter().for_each(|dtype| check_on_all(dtype, &packs));
}

#[test]
fn head_sizes_off_every_register_width() {
    let packs: Vec<Pack> = [1, 2, 3, 4, 6, 8, 10, 13, 14, 18, 24, 30, 34, 48, 66, 80, 96, 128, 130, 254, 256]
        .into_iter()
        .map(|head| pack(2, head, &[19, 3]))
        .collect();
    FLOATS.into_iter().for_each(|dtype| check_on_all(dtype, &packs));
}

#[test]
fn rows_of_one_token_between_long_ones() {
    FLOATS.into_iter().for_each(|dtype| check_on_all(dtype, &[pack(3, 32, &MIXED)]));
}

#[test]
fn windows_over_mixed_rows_in_every_storage_type() {
    for dtype in FLOATS {
        let windows = [0, 1, 5, 6, 8, 64, 65, 129, 130, usize::MAX];
        check_on_all(dtype, &windows.map(|half| Pack { window: Some(half), ..pack(2, 32, &MIXED) }));
    }
}

#[test]
fn windows_and_lengths_around_the_block_edges() {
    let mut packs = Vec::new();
    for half in [0, 1, 2, 15, 16, 17, 62, 63, 64, 65, 66, 127, 128, 129, 200] {
        for length in [1, 65, 67, 128, 129, 200, 263] {
            packs.push(Pack { window: Some(half), ..pack(1, 8, &[length]) });
        }
    }
    check_on_all(DType::F32, &packs);
}

#[test]
fn production_shapes_of_both_model_sizes() {
    let device = Device::cpu_with_threads(2);
    for (heads, window) in [(12, None), (12, Some(64)), (16, None), (16, Some(64))] {
        let pack = Pack { window, ..pack(heads, 64, &[65, 20, 300, 65]) };
        Call::new(&device, DType::F32, pack, 1.0, 3).check();
    }
}

#[test]
fn a_row_of_1024_tokens() {
    let device = Device::cpu_with_threads(2);
    for window in [None, Some(64)] {
        Call::new(&device, DType::F32, Pack { window, ..pack(2, 64, &[1024]) }, 1.0, 4).check();
    }
}

#[test]
fn a_row_of_8192_tokens_needs_no_more_scratch_than_a_short_one() {
    let device = Device::cpu_with_threads(2);
    for window in [None, Some(64)] {
        let call = Call::new(&device, DType::F32, Pack { window, ..pack(1, 64, &[8192]) }, 1.0, 5);
        assert_eq!(call.workspace.bytes(), workspace_bytes(&device, 1, 1, 64));
        assert!(call.workspace.bytes() < 2 << 20);
        call.run();
        // The reference for all queries takes a while; every 61st and the last are enough.
        let tokens: Vec<i32> = (0..8192).step_by(61).chain([8191]).collect();
        let some = Pack { selected: Some((vec![0, tokens.len() as i32], tokens.clone())), ..call.pack.clone() };
        let q: Vec<f64> = tokens.iter().flat_map(|&t| call.exact_qkv[t as usize * 192..][..64].to_vec()).collect();
        let want = reference::forward(&some, &q, 64, &call.exact_qkv, 192, 64);
        let out = call.out.read_f32().unwrap();
        for (query, &t) in tokens.iter().enumerate() {
            for d in 0..64 {
                let (got, want) = (f64::from(out[t as usize * 64 + d]), want[query * 64 + d]);
                assert!((got - want).abs() <= 1e-6 + 1e-5 * want.abs(), "token {t}: {got}, want {want}");
            }
        }
        assert!(out.iter().all(|x| x.is_finite()));
    }
}
