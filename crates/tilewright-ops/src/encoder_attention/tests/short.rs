//! Rows that are promised to be short, and the rotary embedding on the way: GPUs have a kernel for both.

use super::*;
use crate::rope;

/// Rows within the promise of 128 tokens, with empty ones.
const LENGTHS: [usize; 14] = [1, 128, 0, 5, 16, 17, 63, 64, 65, 100, 0, 127, 33, 128];

fn packs() -> Vec<Pack> {
    let rows: [(usize, &[usize], usize); 3] = [(9, &[3, 7, 1], 60), (1, &[], 0), (20, &[30, 30, 5], 40)];
    let mut packs: Vec<Pack> =
        [None, Some(64), Some(5)].map(|window| Pack { window, ..pack(3, 64, &LENGTHS) }).to_vec();
    packs.extend([parallel(2, 64, None, &rows), parallel(2, 64, Some(6), &rows), pack(2, 32, &LENGTHS)]);
    packs
}

/// Every fourth token of each row, and so many times the last row's first one, as padding does.
fn select(pack: Pack, again: usize) -> Pack {
    let (mut starts, mut tokens) = (vec![0], Vec::new());
    for row in pack.row_starts.windows(2) {
        tokens.extend((row[0]..row[1]).step_by(4));
        starts.push(tokens.len() as i32);
    }
    let last = pack.row_starts[pack.row_starts.len() - 2];
    tokens.extend(vec![last; again]);
    *starts.last_mut().unwrap() = tokens.len() as i32;
    Pack { selected: Some((starts, tokens)), ..pack }
}

fn check(call: &Call, longest: usize) {
    forward(&call.device, &Forward { longest: Some(longest), ..call.args() }).unwrap();
    let (atol, rtol) = tolerance(call.out.dtype());
    let Pack { head, window, .. } = call.pack;
    let name = format!("heads of {head}, window {window:?}, {} on {}", call.out.dtype(), call.device.name());
    assert_close(&name, &call.out, &call.want(), atol, rtol);
}

#[test]
fn rows_promised_to_be_short_match_the_reference_in_every_storage_type() {
    for device in devices() {
        for dtype in FLOATS {
            for (i, pack) in packs().into_iter().enumerate() {
                for longest in [128, 500] {
                    check(&Call::new(&device, dtype, pack.clone(), 1.0, i as u64), longest);
                }
            }
        }
    }
}

#[test]
fn selected_queries_of_short_rows_match_even_where_they_outnumber_the_tokens() {
    for device in devices() {
        for dtype in FLOATS {
            for (i, pack) in packs().into_iter().enumerate() {
                check(&Call::new(&device, dtype, select(pack.clone(), 0), 1.0, i as u64), 128);
                check(&Call::new(&device, dtype, select(pack, 200), 1.0, i as u64), 128);
            }
        }
    }
}

#[test]
fn a_row_that_breaks_the_promise_is_refused_by_its_number() {
    let call = Call::new(&Device::cpu(), DType::F32, pack(1, 8, &[3, 9, 4]), 1.0, 1);
    let error = forward(&call.device, &Forward { longest: Some(8), ..call.args() }).unwrap_err().to_string();
    assert!(error.contains("row 1 has 9 tokens") && error.contains("`longest`"), "{error}");
    forward(&call.device, &Forward { longest: Some(9), ..call.args() }).unwrap();
}

/// Positions of every token and of every query.
fn positions(pack: &Pack) -> (Vec<i32>, Vec<i32>) {
    let of_rows = || pack.row_starts.windows(2).flat_map(|row| 0..row[1] - row[0]).collect();
    let all: Vec<i32> = pack.positions.clone().unwrap_or_else(of_rows);
    let queries = pack.queries().into_iter().map(|(_, token)| all[token]).collect();
    (all, queries)
}

/// `(q, kv, key_column)` of a call: packed as one tensor, or in two.
fn operands(call: &Call) -> (Tensor, Tensor, usize) {
    let d = call.pack.d();
    let Some(q) = &call.q else { return (call.qkv.clone(), call.qkv.clone(), d) };
    let values = call.qkv.read_f32().unwrap();
    let kv: Vec<f32> = values.chunks_exact(3 * d).flat_map(|row| row[d..].to_vec()).collect();
    let n = values.len() / (3 * d);
    (q.clone(), Tensor::from_f32(&call.device, call.qkv.dtype(), &[n, 2 * d], &kv).unwrap(), 0)
}

#[test]
fn turning_on_the_way_gives_what_turning_before_gives() {
    for device in devices() {
        let types: &[DType] = if crate::testing::is_gpu(&device) { &FLOATS } else { &[DType::F32] };
        let lengths = [1, 128, 0, 5, 17, 64, 100];
        let rows: [(usize, &[usize], usize); 2] = [(9, &[3, 7, 1], 60), (20, &[30, 30, 5], 40)];
        for &dtype in types {
            for (longest, plain) in [
                (Some(128), pack(2, 64, &lengths)),
                (None, pack(2, 64, &lengths)),
                (Some(128), parallel(2, 64, Some(8), &rows)),
            ] {
                for pack in [plain.clone(), select(plain, 3)] {
                    let (at, of_queries) = positions(&pack);
                    let ids = |v: &[i32]| Tensor::from_i32(&device, &[v.len()], v).unwrap();
                    let (at, of_queries) = (ids(&at), ids(&of_queries));
                    let table = rope::table(&device, 10_000.0, 200, 64).unwrap();
                    let (before, way) = (
                        Call::new(&device, dtype, pack.clone(), 1.0, 5),
                        Call::new(&device, dtype, pack.clone(), 1.0, 5),
                    );
                    let (q, kv, key_column) = operands(&before);
                    let turn = |x: &Tensor, heads: usize, positions: &Tensor| {
                        rope::forward(&device, &rope::Forward { x, heads, positions, table: &table }).unwrap();
                    };
                    if key_column > 0 {
                        turn(&q, 4, &at);
                    } else {
                        turn(&kv, 2, &at);
                        turn(&q, 2, &of_queries);
                    }
                    forward(&device, &Forward { q: &q, kv: &kv, key_column, longest, ..before.args() }).unwrap();
                    let (q, kv, key_column) = operands(&way);
                    let rotation = Some(Rotation {
                        table: &table,
                        positions: &at,
                        query_positions: pack.selected.as_ref().map(|_| &of_queries),
                    });
                    let args = Forward { q: &q, kv: &kv, key_column, rotation, longest, ..way.args() };
                    forward(&device, &args).unwrap();
                    assert!(bits(&way.out) == bits(&before.out), "{dtype}, {longest:?} on {}", device.name());
                }
            }
        }
    }
}

#[test]
fn a_rotation_that_does_not_fit_is_refused_by_name() {
    let device = Device::cpu();
    let call = Call::new(&device, DType::F32, pack(2, 8, &[3, 2]), 1.0, 1);
    let refused = |args: Forward<'_>, words: &str| {
        let error = forward(&device, &args).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let (table, narrow) = (rope::table(&device, 1e4, 4, 8).unwrap(), rope::table(&device, 1e4, 4, 6).unwrap());
    let ids = |v: &[i32]| Tensor::from_i32(&device, &[v.len()], v).unwrap();
    let (good, short, far) = (ids(&[0, 1, 2, 0, 1]), ids(&[0]), ids(&[0, 1, 2, 0, 4]));
    let with = |table, positions| Forward {
        rotation: Some(Rotation { table, positions, query_positions: None }),
        ..call.args()
    };
    forward(&device, &with(&table, &good)).unwrap();
    refused(with(&narrow, &good), "`rotation.table`");
    refused(with(&table, &short), "`rotation.positions`");
    refused(with(&table, &far), "`positions` holds 4");
    refused(Forward { key_column: 8, ..with(&table, &good) }, "cannot be turned");
    let some = Call::new(&device, DType::F32, select(pack(2, 8, &[3, 2]), 0), 1.0, 1);
    let (q, kv, key_column) = operands(&some);
    let rotation = Some(Rotation { table: &table, positions: &good, query_positions: None });
    refused(Forward { q: &q, kv: &kv, key_column, rotation, ..some.args() }, "rotation.query_positions");
}
