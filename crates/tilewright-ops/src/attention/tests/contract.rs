//! What is refused, and with which words; workspace; the null device.

use super::*;
use crate::attention::{self, Decode};
use crate::testing::devices;
use crate::{Error, Result};

fn device() -> Device {
    Device::cpu_with_threads(2)
}

/// A valid small call: B = 2, T = 6, 2 heads of 4.
fn call(device: &Device) -> Call {
    Call::new(device, DType::F32, sizes(2, 2, 6, 4), 1.0, 1)
}

fn forward_args(call: &Call) -> Forward<'_> {
    Forward {
        qkv: &call.qkv,
        heads: call.sizes.heads,
        mask: Mask::Causal,
        out: &call.out,
        lse: &call.lse,
        workspace: &call.workspace,
    }
}

fn backward_args(call: &Call) -> Backward<'_> {
    Backward {
        qkv: &call.qkv,
        heads: call.sizes.heads,
        mask: Mask::Causal,
        out: &call.out,
        lse: &call.lse,
        dout: &call.dout,
        dqkv: &call.dqkv,
        dqkv_sums: None,
        workspace: &call.workspace,
    }
}

#[track_caller]
fn assert_refused(result: Result<()>, words: &[&str]) -> Error {
    let error = result.expect_err("the call must be refused");
    let message = error.to_string();
    for word in words {
        assert!(message.contains(word), "`{message}` does not say `{word}`");
    }
    error
}

#[test]
fn forward_names_the_argument_of_a_wrong_shape() {
    let call = call(&device());
    let wrong = poisoned(&call.device, DType::F32, &[2, 6, 9]);
    let args = Forward { out: &wrong, ..forward_args(&call) };
    let error = assert_refused(attention::forward(&call.device, &args), &["attention.forward", "`out`", "(2, 6, 8)"]);
    assert!(matches!(error, Error::Shape { .. }));
    let args = Forward { lse: &call.out, ..forward_args(&call) };
    assert_refused(attention::forward(&call.device, &args), &["`lse`"]);
    let flat = call.qkv.view(&[12, 24]).unwrap();
    let args = Forward { qkv: &flat, ..forward_args(&call) };
    assert_refused(attention::forward(&call.device, &args), &["`qkv`", "(B, T, 3C)"]);
}

#[test]
fn backward_names_the_argument_of_a_wrong_shape() {
    let call = call(&device());
    let wrong = poisoned(&call.device, DType::F32, &[2, 7, 8]);
    for (args, what) in [
        (Backward { dout: &wrong, ..backward_args(&call) }, "`dout`"),
        (Backward { out: &wrong, ..backward_args(&call) }, "`out`"),
        (Backward { dqkv: &wrong, ..backward_args(&call) }, "`dqkv`"),
    ] {
        assert_refused(attention::backward(&call.device, &args), &["attention.backward", what]);
    }
}

#[test]
fn heads_that_do_not_divide_the_channels_are_refused() {
    let call = call(&device());
    for heads in [0, 3, 16] {
        let args = Forward { heads, ..forward_args(&call) };
        let error = assert_refused(attention::forward(&call.device, &args), &["attention.forward", "`heads`", "C = 8"]);
        assert!(matches!(error, Error::Argument { .. }));
    }
}

#[test]
fn columns_that_are_no_multiple_of_three_are_refused() {
    let call = call(&device());
    let wrong = poisoned(&call.device, DType::F32, &[2, 6, 25]);
    let args = Forward { qkv: &wrong, ..forward_args(&call) };
    assert_refused(attention::forward(&call.device, &args), &["25 columns", "multiple of 3"]);
}

#[test]
fn head_sizes_above_256_are_refused() {
    let device = device();
    let call = Call::new(&device, DType::F32, sizes(1, 1, 2, 257), 1.0, 1);
    assert_refused(attention::forward(&device, &forward_args(&call)), &["257", "at most 256"]);
    assert_refused(attention::backward(&device, &backward_args(&call)), &["257", "at most 256"]);
}

#[test]
fn mixed_storage_types_are_refused() {
    let call = call(&device());
    let half = poisoned(&call.device, DType::BF16, &[2, 6, 8]);
    let args = Forward { out: &half, ..forward_args(&call) };
    let error = assert_refused(attention::forward(&call.device, &args), &["`out`", "bf16", "f32"]);
    assert!(matches!(error, Error::DType { .. }));
    let args = Backward { dout: &half, ..backward_args(&call) };
    assert_refused(attention::backward(&call.device, &args), &["`dout`", "bf16", "f32"]);
    let integers = Tensor::zeros(&call.device, DType::I32, &[2, 6, 24]).unwrap();
    let args = Forward { qkv: &integers, ..forward_args(&call) };
    assert_refused(attention::forward(&call.device, &args), &["`qkv`", "i32"]);
}

#[test]
fn a_tensor_of_another_device_is_refused() {
    let (here, there) = (call(&device()), call(&device()));
    let args = Forward { lse: &there.lse, ..forward_args(&here) };
    let error = assert_refused(attention::forward(&here.device, &args), &["attention.forward", "`lse`"]);
    assert!(matches!(error, Error::Device { .. }));
}

#[test]
fn outputs_that_overlap_are_refused() {
    let call = call(&device());
    let args = Backward { dqkv: &call.qkv, ..backward_args(&call) };
    let error = assert_refused(attention::backward(&call.device, &args), &["attention.backward", "`dqkv`", "`qkv`"]);
    assert!(matches!(error, Error::Overlap { .. }));
    let first = call.qkv.slice(0, &[2, 6, 8]).unwrap();
    let args = Forward { out: &first, ..forward_args(&call) };
    assert_refused(attention::forward(&call.device, &args), &["`out`", "`qkv`"]);
    let args = Forward { workspace: &call.qkv, ..forward_args(&call) };
    assert!(attention::forward(&call.device, &args).is_err());
}

#[test]
fn the_workspace_is_exactly_enough_on_every_device() {
    for device in devices() {
        // Few heads and many blocks: the shape that needs shared sums too.
        for s in [sizes(2, 2, 6, 4), sizes(1, 1, 600, 16), sizes(3, 12, 65, 13)] {
            let call = Call::new(&device, DType::F32, s, 1.0, 1);
            let bytes = workspace_bytes(&device, s.b, s.t, s.c(), s.heads);
            assert_eq!(bytes, call.workspace.bytes());
            call.forward();
            call.backward();
            let less = call.workspace.slice(0, &[bytes - 1]).unwrap();
            let args = Forward { workspace: &less, ..forward_args(&call) };
            assert_refused(attention::forward(&device, &args), &["`workspace`", &format!("{bytes} bytes")]);
            let args = Backward { workspace: &less, ..backward_args(&call) };
            assert_refused(attention::backward(&device, &args), &["`workspace`", &format!("{bytes} bytes")]);
        }
    }
}

#[test]
fn nothing_behind_the_workspace_is_written() {
    for device in devices() {
        for s in [sizes(1, 2, 17, 13), sizes(1, 1, 300, 16)] {
            let call = Call::new(&device, DType::F32, s, 1.0, 1);
            let bytes = workspace_bytes(&device, s.b, s.t, s.c(), s.heads);
            let guarded = workspace(&device, bytes + 4096);
            let args = Forward { workspace: &guarded, ..forward_args(&call) };
            attention::forward(&device, &args).unwrap();
            let args = Backward { workspace: &guarded, ..backward_args(&call) };
            attention::backward(&device, &args).unwrap();
            assert!(bits(&guarded)[bytes..].iter().all(|&x| x == 0xFF), "{}", call.name());
        }
    }
}

#[test]
fn the_workspace_never_grows_with_the_square_of_the_length() {
    let device = Device::null(2);
    let at = |t| workspace_bytes(&device, 4, t, 768, 12);
    assert!(at(8192) < 9 * at(1024), "{} against {}", at(8192), at(1024));
    // T x T scores of one head alone would be 64 times as much for 8 times the length.
    assert!(at(65_536) < 9 * at(8192));
}

#[test]
fn an_empty_batch_or_sequence_is_no_work() {
    let device = device();
    for (b, t) in [(0, 4), (2, 0)] {
        let call = Call::new(&device, DType::F32, sizes(b, 2, t, 4), 1.0, 1);
        call.forward();
        call.backward();
    }
}

#[test]
fn the_null_device_records_the_visible_half_of_the_products() {
    let device = Device::null(2);
    let call = Call::new(&device, DType::F32, sizes(2, 3, 10, 4), 1.0, 1);
    call.forward();
    call.backward();
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    let product = 2 * 2 * 3 * 4 * (10 * 11 / 2);
    assert_eq!(
        launches.iter().map(|l| (l.op, l.flops)).collect::<Vec<_>>(),
        [("attention.forward", 2 * product), ("attention.backward", 5 * product)]
    );
    let elements = 2 * 10 * 12;
    assert_eq!(launches[0].bytes, 4 * (3 * elements + elements + 2 * 3 * 10));
    assert_eq!(launches[1].bytes, 4 * (6 * elements + 2 * elements + 2 * 3 * 10));
}

#[test]
fn decode_refuses_a_position_beyond_the_caches_and_wrong_caches() {
    let device = device();
    let tensor = |shape: &[usize]| poisoned(&device, DType::F32, shape);
    let (qkv, k, v, out) = (tensor(&[2, 24]), tensor(&[2, 5, 8]), tensor(&[2, 5, 8]), tensor(&[2, 8]));
    let args = |position| Decode { qkv: &qkv, heads: 2, position, k_cache: &k, v_cache: &v, out: &out };
    attention::decode(&device, &args(4)).unwrap();
    assert_refused(attention::decode(&device, &args(5)), &["attention.decode", "`position` is 5", "5 positions"]);
    let short = tensor(&[2, 4, 8]);
    let wrong = Decode { v_cache: &short, ..args(0) };
    assert_refused(attention::decode(&device, &wrong), &["attention.decode", "`v_cache`"]);
    let shared = Decode { v_cache: &k, ..args(0) };
    assert_refused(attention::decode(&device, &shared), &["`k_cache`", "`v_cache`"]);
}
