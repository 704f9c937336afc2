//! What holds for any input: a row's bits are its own, whatever runs beside it.

use proptest::prelude::*;

use super::*;

/// The rows of a pack one by one: the same inputs, cut out.
fn alone(call: &Call, row: usize) -> Vec<u8> {
    let (start, end) = (call.pack.row_starts[row] as usize, call.pack.row_starts[row + 1] as usize);
    let cut = |ids: &Option<Vec<i32>>| ids.as_ref().map(|ids| ids[start..end].to_vec());
    let pack = Pack {
        row_starts: vec![0, (end - start) as i32],
        positions: cut(&call.pack.positions),
        option_ids: cut(&call.pack.option_ids),
        ..call.pack.clone()
    };
    let single = Call::new(&call.device, call.qkv.dtype(), pack, 1.0, 1);
    let width = 3 * call.pack.d();
    single.qkv.copy_from(&call.qkv.slice(start * width, &[end - start, width]).unwrap()).unwrap();
    single.run()
}

#[test]
fn a_row_alone_has_the_bits_it_has_in_a_pack() {
    let rows: [(usize, &[usize], usize); 4] =
        [(9, &[3, 7, 1], 60), (1, &[], 0), (20, &[70, 70, 5], 90), (4, &[2], 700)];
    for device in devices() {
        for pack in [
            pack(3, 32, &[1, 65, 130, 2, 600, 17]),
            Pack { window: Some(64), ..pack(3, 32, &[1, 65, 130, 2, 600, 17]) },
            Pack { window: Some(5), ..pack(1, 20, &[1, 65, 130, 2, 600, 17]) },
            parallel(2, 32, Some(6), &rows),
            parallel(2, 32, None, &rows),
        ] {
            let call = Call::new(&device, DType::F32, pack, 1.0, 31);
            let bits = call.run();
            let width = call.pack.d() * 4;
            for row in 0..call.pack.row_starts.len() - 1 {
                let (start, end) = (call.pack.row_starts[row] as usize, call.pack.row_starts[row + 1] as usize);
                assert!(alone(&call, row) == bits[start * width..end * width], "row {row} on {}", device.name());
            }
        }
    }
}

#[test]
fn the_order_of_rows_changes_no_bit() {
    let device = Device::cpu_with_threads(2);
    for window in [None, Some(6)] {
        let lengths = [65, 20, 131];
        let call = Call::new(&device, DType::F32, Pack { window, ..pack(2, 32, &lengths) }, 1.0, 32);
        let bits = call.run();
        let turned = Call::new(&device, DType::F32, Pack { window, ..pack(2, 32, &[131, 65, 20]) }, 1.0, 33);
        let values = call.qkv.read_f32().unwrap();
        let (first, last) = values.split_at(85 * 192);
        turned.qkv.write_f32(&[last, first].concat()).unwrap();
        let other = turned.run();
        assert!(other[131 * 256..] == bits[..85 * 256] && other[..131 * 256] == bits[85 * 256..]);
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads_or_the_run() {
    for (dtype, window) in [(DType::F32, None), (DType::F32, Some(64)), (DType::BF16, Some(5)), (DType::F16, None)] {
        let run = |threads: usize| {
            let pack = Pack { window, ..pack(2, 32, &[700, 1, 65]) };
            let call = Call::new(&Device::cpu_with_threads(threads), dtype, pack, 1.0, 34);
            let first = call.run();
            assert!(call.run() == first, "a second run over the used workspace");
            first
        };
        let one = run(1);
        // Many threads also get smaller tasks.
        assert!([2, 3, 5, 40].into_iter().all(|threads| run(threads) == one), "{dtype}, {window:?}");
    }
}

#[test]
fn unaligned_tensors_give_the_same_bits() {
    for device in devices() {
        for dtype in FLOATS {
            let mut call = Call::new(&device, dtype, Pack { window: Some(5), ..pack(2, 13, &[9, 70]) }, 1.0, 35);
            let bits = call.run();
            call.qkv = crate::testing::unaligned(&call.qkv);
            call.out = crate::testing::unaligned(&call.out);
            assert!(call.run() == bits);
        }
    }
}

#[test]
fn equal_scores_average_the_values() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, pack(1, 8, &[40]), 1.0, 36);
        let mut qkv = call.qkv.read_f32().unwrap();
        qkv.chunks_mut(24).for_each(|row| row[..8].fill(0.0));
        call.qkv.write_f32(&qkv).unwrap();
        call.run();
        let out = call.out.read_f32().unwrap();
        for d in 0..8 {
            let mean = qkv.chunks(24).map(|row| f64::from(row[16 + d])).sum::<f64>() / 40.0;
            assert!((0..40).all(|i| (f64::from(out[i * 8 + d]) - mean).abs() < 1e-6));
        }
    }
}

#[test]
fn scores_of_ten_thousand_stay_finite() {
    for device in devices() {
        for window in [None, Some(6)] {
            let call = Call::new(&device, DType::F32, Pack { window, ..pack(2, 16, &[150]) }, 60.0, 37);
            call.run();
            assert!(call.out.read_f32().unwrap().iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn a_rising_maximum_in_a_later_block_rescales_what_was_summed() {
    for device in devices() {
        let mut call = Call::new(&device, DType::F32, pack(1, 8, &[400]), 0.3, 38);
        let mut qkv = call.qkv.read_f32().unwrap();
        for (t, row) in qkv.chunks_mut(24).enumerate() {
            row[..8].fill(1.0);
            row[8..16].iter_mut().for_each(|k| *k += t as f32 * 0.02);
        }
        call.qkv.write_f32(&qkv).unwrap();
        call.exact_qkv = qkv.into_iter().map(f64::from).collect();
        call.run();
        assert_close("out", &call.out, &call.want(), 3e-6, 1e-5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_pack_matches_the_reference(
        heads in 1usize..4, half_head in 1usize..40, lengths in prop::collection::vec(0usize..150, 1..5),
        window in prop::option::of(0usize..90), with_ids: bool, selected: bool, seed: u64,
    ) {
        let mut pack = Pack { window, ..pack(heads, 2 * half_head, &lengths) };
        let mut rng = Random::new(seed);
        let n = pack.tokens();
        if with_ids {
            pack.positions = Some((0..n).map(|_| rng.below(60) as i32).collect());
            pack.option_ids = Some((0..n).map(|_| rng.below(4) as i32).collect());
        }
        if selected {
            let (mut starts, mut tokens) = (vec![0], Vec::new());
            for row in pack.row_starts.windows(2) {
                tokens.extend((row[0]..row[1]).filter(|_| rng.below(3) == 0));
                starts.push(tokens.len() as i32);
            }
            pack.selected = Some((starts, tokens));
        }
        for device in devices() {
            let call = Call::new(&device, DType::F32, pack.clone(), 1.0, seed);
            call.run();
            assert_close(&format!("{pack:?}"), &call.out, &call.want(), 2e-6, 1e-5);
        }
    }
}
