//! What is refused, and with which words; workspace; the null device.

use super::*;
use crate::{Error, Result};

fn device() -> Device {
    Device::cpu_with_threads(2)
}

/// A valid small call: rows of 4 and 2, 2 heads of 4, two selected queries.
fn call(device: &Device) -> Call {
    let mut pack = pack(2, 4, &[4, 2]);
    pack.selected = Some((vec![0, 1, 2], vec![0, 5]));
    (pack.positions, pack.option_ids) = (Some((0..6).collect()), Some(vec![0; 6]));
    Call::new(device, DType::F32, pack, 1.0, 1)
}

#[track_caller]
fn refused(result: Result<()>, words: &[&str]) -> Error {
    let error = result.expect_err("the call must be refused");
    let message = error.to_string();
    for word in ["encoder_attention.forward"].iter().chain(words) {
        assert!(message.contains(word), "`{message}` does not say `{word}`");
    }
    error
}

#[test]
fn wrong_shapes_are_refused_by_name() {
    let call = call(&device());
    let device = call.device.clone();
    let tensor = |shape: &[usize]| poisoned(&device, DType::F32, shape);
    let fails = |args: Forward<'_>, words: &[&str]| refused(forward(&device, &args), words);
    let (narrow, short, wide) = (tensor(&[2, 7]), tensor(&[3, 8]), tensor(&[2, 16]));
    fails(Forward { q: &narrow, ..call.args() }, &["`q`", "7 columns", "D = 8"]);
    assert!(matches!(fails(Forward { out: &short, ..call.args() }, &["`out`", "(2, 8)"]), Error::Shape { .. }));
    fails(Forward { out: &wide, ..call.args() }, &["`q` has 8 columns"]);
    fails(Forward { key_column: 9, ..call.args() }, &["`kv` has 24 columns", "column 9"]);
    fails(Forward { key_column: usize::MAX, ..call.args() }, &["`kv` has 24 columns"]);
    fails(Forward { selected: None, ..call.args() }, &["`q` has 2 rows", "`kv` 6"]);
    let five = Tensor::from_i32(&device, &[5], &[0; 5]).unwrap();
    fails(Forward { positions: Some(&five), ..call.args() }, &["`positions`", "(6)"]);
    fails(Forward { option_ids: Some(&five), ..call.args() }, &["`option_ids`", "(6)"]);
    let (starts, tokens) = call.selected.as_ref().unwrap();
    fails(Forward { selected: Some(Selected { starts: &five, tokens }), ..call.args() }, &["`selected.starts`", "(3)"]);
    fails(Forward { selected: Some(Selected { starts, tokens: &five }), ..call.args() }, &["`selected.tokens`", "(2)"]);
    forward(&device, &call.args()).unwrap();
}

#[test]
fn heads_that_do_not_divide_the_channels_are_refused() {
    let call = call(&device());
    for heads in [0, 3, 16] {
        let error = refused(forward(&call.device, &Forward { heads, ..call.args() }), &["`heads`", "D = 8"]);
        assert!(matches!(error, Error::Argument { .. }));
    }
    let device = device();
    let large = Call::new(&device, DType::F32, pack(1, 257, &[2]), 1.0, 1);
    refused(forward(&device, &large.args()), &["257", "at most 256"]);
}

#[test]
fn mixed_storage_types_are_refused() {
    let call = call(&device());
    let half = poisoned(&call.device, DType::BF16, &[2, 8]);
    let error = refused(forward(&call.device, &Forward { out: &half, ..call.args() }), &["`out`", "bf16", "f32"]);
    assert!(matches!(error, Error::DType { .. }));
    let kv = poisoned(&call.device, DType::F16, &[6, 24]);
    refused(forward(&call.device, &Forward { kv: &kv, ..call.args() }), &["`kv`", "f16", "f32"]);
    let floats = poisoned(&call.device, DType::F32, &[6]);
    refused(forward(&call.device, &Forward { positions: Some(&floats), ..call.args() }), &["`positions`", "i32"]);
    refused(forward(&call.device, &Forward { row_starts: &floats, ..call.args() }), &["`row_starts`", "i32"]);
}

#[test]
fn a_tensor_of_another_device_is_refused() {
    let (here, there) = (call(&device()), call(&device()));
    let error = refused(forward(&here.device, &Forward { kv: &there.qkv, ..here.args() }), &["`kv`"]);
    assert!(matches!(error, Error::Device { .. }));
}

#[test]
fn outputs_that_overlap_are_refused() {
    let call = call(&device());
    let inside = call.qkv.slice(0, &[2, 8]).unwrap();
    let error = refused(forward(&call.device, &Forward { out: &inside, ..call.args() }), &["`out`", "`kv`"]);
    assert!(matches!(error, Error::Overlap { .. }));
    let scratch = call.workspace.reinterpret(0, DType::F32, &[2, 8]).unwrap();
    refused(forward(&call.device, &Forward { out: &scratch, ..call.args() }), &["`out`", "`workspace`"]);
}

#[test]
fn starts_that_do_not_rise_from_0_to_the_end_are_refused_before_anything_is_written() {
    let call = call(&device());
    for (starts, words) in [
        ([1, 4, 6], ["`row_starts` holds 1 at 0", "starts at 0"]),
        ([0, 4, 3], ["`row_starts` holds 3 at 2", "before its start 4"]),
        ([0, -1, 6], ["`row_starts` holds -1 at 1", "before its start 0"]),
        ([0, 4, 5], ["`row_starts` holds 5 at 2", "ends at 6"]),
        ([0, 4, 7], ["`row_starts` holds 7 at 2", "ends at 6"]),
    ] {
        call.row_starts.write_i32(&starts).unwrap();
        let error = refused(forward(&call.device, &call.args()), &words);
        assert!(matches!(error, Error::Argument { .. }));
        assert!(call.out.read_f32().unwrap().iter().all(|x| x.is_nan()));
    }
    call.row_starts.write_i32(&[0, 4, 6]).unwrap();
    let (starts, _) = call.selected.as_ref().unwrap();
    starts.write_i32(&[0, 1, 3]).unwrap();
    refused(forward(&call.device, &call.args()), &["`selected.starts` holds 3 at 2", "ends at 2"]);
}

#[test]
fn a_selected_token_of_another_row_is_refused_by_query_and_row() {
    let call = call(&device());
    let (_, tokens) = call.selected.as_ref().unwrap();
    for (values, words) in [
        ([4, 5], ["holds 4 at query 0", "outside 0..4", "row 0"]),
        ([-1, 5], ["holds -1 at query 0", "outside 0..4", "row 0"]),
        ([0, 3], ["holds 3 at query 1", "outside 4..6", "row 1"]),
        ([0, i32::MAX], ["holds 2147483647 at query 1", "outside 4..6", "row 1"]),
    ] {
        tokens.write_i32(&values).unwrap();
        refused(forward(&call.device, &call.args()), &words);
        assert!(call.out.read_f32().unwrap().iter().all(|x| x.is_nan()));
    }
}

#[test]
fn starts_without_an_entry_are_refused() {
    let call = call(&device());
    let none = call.row_starts.slice(0, &[0]).unwrap();
    refused(forward(&call.device, &Forward { row_starts: &none, ..call.args() }), &["`row_starts`"]);
}

#[test]
fn no_rows_and_empty_rows_are_no_work() {
    for device in devices() {
        for lengths in [&[][..], &[0], &[0, 0, 0]] {
            let call = Call::new(&device, DType::F32, Pack { window: Some(3), ..pack(2, 8, lengths) }, 1.0, 1);
            call.run();
        }
    }
}

#[test]
fn the_workspace_is_exactly_enough_and_nothing_behind_it_is_written() {
    for device in devices() {
        for pack in [pack(2, 13, &[70, 1, 9]), Pack { window: Some(5), ..pack(1, 256, &[600]) }] {
            let (rows, heads, d) = (pack.row_starts.len() - 1, pack.heads, pack.d());
            let mut call = Call::new(&device, DType::F32, pack, 1.0, 1);
            let bytes = workspace_bytes(&device, rows, heads, d);
            let guarded = workspace(&device, bytes + 4096);
            call.workspace = guarded.clone();
            call.check();
            assert!(bits(&guarded)[bytes..].iter().all(|&b| b == 0xFF));
            call.workspace = guarded.slice(0, &[bytes - 1]).unwrap();
            refused(forward(&device, &call.args()), &["`workspace`", &format!("{bytes} bytes")]);
        }
    }
}

#[test]
fn the_null_device_records_the_work_of_equal_rows() {
    let device = Device::null(2);
    let Device::Null(null) = &device else { unreachable!() };
    for (window, seen) in [(None, 300), (Some(64), 129), (Some(1000), 300)] {
        let call = Call::new(&device, DType::F32, Pack { window, ..pack(2, 32, &[300, 300]) }, 1.0, 1);
        forward(&device, &call.args()).unwrap();
        let launches = null.take_launches();
        assert_eq!((launches[0].op, launches[0].flops), ("encoder_attention.forward", 4 * 600 * seen * 64));
        assert_eq!(launches[0].bytes, 4 * 600 * 64 * 4);
    }
}
