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
fn selected_queries_have_the_bits_they_have_among_all() {
    for device in devices() {
        for pack in variants() {
            let all = Call::new(&device, DType::F32, pack.clone(), 1.0, 21).run();
            let some = Call::new(&device, DType::F32, select(pack), 1.0, 21);
            let bits = some.run();
            let row = some.pack.d() * 4;
            for (query, (_, token)) in some.pack.queries().into_iter().enumerate() {
                let same = bits[query * row..][..row] == all[token * row..][..row];
                assert!(same, "token {token} of {:?} on {}", some.pack.window, device.name());
            }
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
