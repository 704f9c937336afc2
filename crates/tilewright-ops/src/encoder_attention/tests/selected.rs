//! Some tokens as queries: what the last layer of a model needs.

use super::*;

/// Class token and every third token of each row.
fn select(pack: Pack) -> Pack {
    let (mut starts, mut tokens) = (vec![0], Vec::new());
    for row in pack.row_starts.windows(2) {
        tokens.extend((row[0]..row[1]).step_by(3));
        starts.push(tokens.len() as i32);
    }
    Pack { selected: Some((starts, tokens)), ..pack }
}

fn variants() -> Vec<Pack> {
    let full = pack(2, 32, &[65, 1, 130, 7, 300]);
    let rows: [(usize, &[usize], usize); 3] = [(9, &[3, 7, 1], 60), (1, &[], 0), (20, &[70, 70, 5], 90)];
    vec![
        full.clone(),
        Pack { window: Some(8), ..full.clone() },
        Pack { window: Some(64), ..full },
        parallel(2, 32, None, &rows),
        parallel(2, 32, Some(6), &rows),
    ]
}

#[test]
fn selected_queries_match_the_reference_in_every_storage_type() {
    let packs: Vec<Pack> = variants().into_iter().map(select).collect();
    FLOATS.into_iter().for_each(|dtype| check_on_all(dtype, &packs));
}

#[test]
fn selected_queries_have_the_results_they_have_among_all() {
    for device in devices() {
        for pack in variants() {
            let all = Call::new(&device, DType::F32, pack.clone(), 1.0, 21);
            all.run();
            let (all, some) = (all.out.read_f32().unwrap(), Call::new(&device, DType::F32, select(pack), 1.0, 21));
            some.run();
            let d = some.pack.d();
            let want: Vec<f32> =
                some.pack.queries().into_iter().flat_map(|(_, token)| all[token * d..][..d].to_vec()).collect();
            let same = some.out.read_f32().unwrap() == want;
            assert_close("out", &some.out, &want.into_iter().map(f64::from).collect::<Vec<_>>(), 1e-6, 1e-6);
            // A band takes all its keys at once, selected queries take them block by block: equal up to rounding.
            let band = some.pack.window.is_some() && some.pack.positions.is_none();
            assert!(same || band, "{:?} on {}", some.pack.window, device.name());
        }
    }
}

#[test]
fn a_selected_query_has_the_same_bits_whatever_is_selected_beside_it() {
    for device in devices() {
        for pack in variants() {
            let some = Call::new(&device, DType::F32, select(pack.clone()), 1.0, 21);
            let bits = some.run();
            let mut starts = vec![1; pack.row_starts.len()];
            starts[0] = 0;
            let token = pack.row_starts[0] + 3 * 21;
            let lone = Pack { selected: Some((starts, vec![token])), ..pack };
            let row = some.pack.d() * 4;
            assert!(Call::new(&device, DType::F32, lone, 1.0, 21).run() == bits[21 * row..22 * row]);
        }
    }
}

#[test]
fn keys_and_values_may_lie_alone() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, select(pack(2, 32, &[65, 9])), 1.0, 22);
        let bits = call.run();
        let alone: Vec<f32> = call.qkv.read_f32().unwrap().chunks(192).flat_map(|row| row[64..].to_vec()).collect();
        let kv = Tensor::from_f32(&device, DType::F32, &[74, 128], &alone).unwrap();
        forward(&device, &Forward { kv: &kv, key_column: 0, ..call.args() }).unwrap();
        assert!(super::bits(&call.out) == bits);
    }
}

#[test]
fn queries_may_come_in_any_order_and_twice() {
    let mut shuffled = pack(2, 16, &[40, 30]);
    shuffled.selected = Some((vec![0, 4, 6], vec![39, 0, 7, 7, 69, 40]));
    for half in [None, Some(5)] {
        check_on_all(DType::F32, &[Pack { window: half, ..shuffled.clone() }]);
    }
}

#[test]
fn a_row_may_have_no_query() {
    let mut some = pack(1, 16, &[5, 200, 3]);
    some.selected = Some((vec![0, 1, 1, 3], vec![4, 205, 207]));
    check_on_all(DType::F32, &[some]);
}
