//! What is refused and how, what is planned, and what a weight says about itself.

use super::*;
use crate::{Arena, Error, Plan};

fn small(device: &Device) -> (Tensor, Weight, Tensor) {
    let x = Tensor::zeros(device, DType::F32, &[3, 5]).unwrap();
    let source = Tensor::zeros(device, DType::F16, &[8, 5]).unwrap();
    (x, Weight::pack(device, &source, DType::F32, Layout::Plain).unwrap(), poisoned(device, DType::F32, &[3, 8]))
}

#[track_caller]
fn refused(result: Result<()>, words: &[&str]) -> Error {
    let error = result.unwrap_err();
    for word in words {
        assert!(error.to_string().contains(word), "`{error}` lacks `{word}`");
    }
    error
}

#[test]
fn shapes_that_do_not_fit_are_refused_by_name() {
    for device in [Device::cpu(), Device::null(2)] {
        let (x, weight, out) = small(&device);
        let tensor = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
        let (wide, short, tall) = (tensor(&[3, 6]), tensor(&[7]), tensor(&[4, 8]));
        let good =
            Forward { x: &x, weight: &weight, bias: None, activation: Activation::None, residual: None, out: &out };
        let shape = |e: Error| assert!(matches!(e, Error::Shape { .. }));
        shape(refused(forward(&device, &Forward { x: &wide, ..good }), &["linear.forward", "`x`", "(3, 5)"]));
        shape(refused(forward(&device, &Forward { bias: Some(&short), ..good }), &["linear.forward", "`bias`", "(8)"]));
        shape(refused(forward(&device, &Forward { residual: Some(&tall), ..good }), &["`residual`", "(3, 8)"]));
        shape(refused(forward(&device, &Forward { out: &tall, ..good }), &["`out`", "(3, 8)"]));
    }
}

#[test]
fn activations_that_are_not_f32_are_refused_by_name() {
    for device in [Device::cpu(), Device::null(2)] {
        let (x, weight, out) = small(&device);
        let tensor = |shape: &[usize]| Tensor::zeros(&device, DType::F16, shape).unwrap();
        let (hx, hbias, hout) = (tensor(&[3, 5]), tensor(&[8]), tensor(&[3, 8]));
        let good =
            Forward { x: &x, weight: &weight, bias: None, activation: Activation::None, residual: None, out: &out };
        let dtype = |e: Error| assert!(matches!(e, Error::DType { .. }));
        dtype(refused(forward(&device, &Forward { x: &hx, ..good }), &["linear.forward", "`x`", "f16", "f32"]));
        dtype(refused(forward(&device, &Forward { bias: Some(&hbias), ..good }), &["`bias`", "f32"]));
        dtype(refused(forward(&device, &Forward { residual: Some(&hout), ..good }), &["`residual`", "f32"]));
        dtype(refused(forward(&device, &Forward { out: &hout, ..good }), &["`out`", "f32"]));
    }
}

#[test]
fn another_device_is_refused_by_name() {
    let (device, other) = (Device::cpu_with_threads(1), Device::cpu_with_threads(1));
    let (x, weight, out) = small(&device);
    let (ox, oweight, oout) = small(&other);
    let obias = Tensor::zeros(&other, DType::F32, &[8]).unwrap();
    let good = Forward { x: &x, weight: &weight, bias: None, activation: Activation::None, residual: None, out: &out };
    let elsewhere = |e: Error| assert!(matches!(e, Error::Device { .. }));
    elsewhere(refused(forward(&device, &Forward { x: &ox, ..good }), &["linear.forward", "`x`"]));
    elsewhere(refused(forward(&device, &Forward { weight: &oweight, ..good }), &["`weight`"]));
    elsewhere(refused(forward(&device, &Forward { bias: Some(&obias), ..good }), &["`bias`"]));
    elsewhere(refused(forward(&device, &Forward { residual: Some(&oout), ..good }), &["`residual`"]));
    elsewhere(refused(forward(&device, &Forward { out: &oout, ..good }), &["`out`"]));
    let source = Tensor::zeros(&other, DType::F32, &[8, 5]).unwrap();
    elsewhere(refused(
        Weight::pack(&device, &source, DType::F32, Layout::Plain).map(|_| ()),
        &["linear.pack", "`source`"],
    ));
}

#[test]
fn an_output_that_overlaps_an_input_is_refused() {
    for device in [Device::cpu(), Device::null(2)] {
        let source = Tensor::zeros(&device, DType::F32, &[8, 8]).unwrap();
        let mut plan = Plan::new("overlap");
        let bytes = Weight::packed_bytes(&device, 8, 8, DType::F32, Layout::Plain).unwrap();
        let slot = plan.add("weight", DType::U8, &[bytes]);
        let memory = Arena::allocate(&device, plan).unwrap().tensor(slot);
        let weight = Weight::pack_into(&device, &source, DType::F32, Layout::Plain, &memory).unwrap();
        let both = Tensor::zeros(&device, DType::F32, &[64]).unwrap();
        let (x, bias) = (both.slice(0, &[3, 8]).unwrap(), both.slice(24, &[8]).unwrap());
        let (out, later) = (both.slice(32, &[3, 8]).unwrap(), both.slice(40, &[3, 8]).unwrap());
        let good = Forward {
            x: &x,
            weight: &weight,
            bias: Some(&bias),
            activation: Activation::None,
            residual: None,
            out: &out,
        };
        forward(&device, &good).unwrap();
        let overlap = |e: Error| assert!(matches!(e, Error::Overlap { .. }));
        overlap(refused(
            forward(&device, &Forward { out: &both.slice(16, &[3, 8]).unwrap(), ..good }),
            &["`out`", "`x`"],
        ));
        overlap(refused(
            forward(&device, &Forward { out: &both.slice(25, &[3, 8]).unwrap(), ..good }),
            &["`out`", "`bias`"],
        ));
        overlap(refused(forward(&device, &Forward { residual: Some(&later), ..good }), &["`out`", "`residual`"]));
        let inside = memory.reinterpret(0, DType::F32, &[3, 8]).unwrap();
        overlap(refused(forward(&device, &Forward { out: &inside, ..good }), &["`out`", "`weight`"]));
        forward(&device, &Forward { residual: Some(&out), ..good }).unwrap();
    }
}

#[test]
fn a_gated_weight_and_geglu_go_together_only() {
    for device in [Device::cpu(), Device::null(2)] {
        let (x, weight, out) = small(&device);
        let source = Tensor::zeros(&device, DType::F32, &[8, 5]).unwrap();
        let gated = Weight::pack(&device, &source, DType::F32, Layout::Gated).unwrap();
        let call = |weight, activation| {
            forward(&device, &Forward { x: &x, weight, bias: None, activation, residual: None, out: &out })
        };
        let argument = |e: Error| assert!(matches!(e, Error::Argument { .. }));
        argument(refused(call(&weight, Activation::Geglu), &["linear.forward", "Geglu", "Gated"]));
        argument(refused(call(&gated, Activation::Relu), &["linear.forward", "Geglu", "Plain"]));
    }
}

#[test]
fn a_gated_weight_with_an_odd_number_of_rows_is_refused() {
    for device in [Device::cpu(), Device::null(2)] {
        let source = Tensor::zeros(&device, DType::F32, &[7, 5]).unwrap();
        let result = Weight::pack(&device, &source, DType::F32, Layout::Gated).map(|_| ());
        assert!(matches!(refused(result, &["linear.pack", "even", "7"]), Error::Argument { .. }));
    }
}

#[test]
fn a_precision_or_a_source_that_is_no_float_is_refused() {
    for device in [Device::cpu(), Device::null(2)] {
        let floats = Tensor::zeros(&device, DType::F32, &[8, 5]).unwrap();
        let ints = Tensor::zeros(&device, DType::I32, &[8, 5]).unwrap();
        let pack = |source, precision| Weight::pack(&device, source, precision, Layout::Plain).map(|_| ());
        assert!(matches!(refused(pack(&floats, DType::I8), &["linear.pack", "`precision`"]), Error::DType { .. }));
        assert!(matches!(refused(pack(&ints, DType::F32), &["linear.pack", "`source`"]), Error::DType { .. }));
    }
}

#[test]
fn memory_for_a_weight_is_checked() {
    for device in [Device::cpu(), Device::null(2)] {
        let source = Tensor::zeros(&device, DType::F32, &[40, 5]).unwrap();
        let bytes = Weight::packed_bytes(&device, 40, 5, DType::F16, Layout::Plain).unwrap();
        let pack = |memory: &Tensor| Weight::pack_into(&device, &source, DType::F16, Layout::Plain, memory).map(|_| ());
        let memory = |dtype, n: usize| Tensor::zeros(&device, dtype, &[n]).unwrap();
        let short = refused(pack(&memory(DType::U8, bytes - 1)), &["linear.pack", "`memory`", &bytes.to_string()]);
        assert!(matches!(short, Error::Shape { .. }));
        assert!(matches!(refused(pack(&memory(DType::F32, bytes)), &["`memory`", "u8"]), Error::DType { .. }));
        let shifted = memory(DType::U8, bytes + 32).slice(32, &[bytes]).unwrap();
        assert!(matches!(refused(pack(&shifted), &["`memory`", "64"]), Error::Argument { .. }));
        pack(&memory(DType::U8, bytes + 100)).unwrap();
    }
}

#[test]
fn a_weight_that_exceeds_the_address_space_is_refused() {
    let device = Device::null(1);
    let result = Weight::packed_bytes(&device, usize::MAX / 8, 16, DType::F32, Layout::Plain).map(|_| ());
    assert!(matches!(refused(result, &["linear.pack", "address space"]), Error::Argument { .. }));
}

#[test]
fn a_weight_in_a_slot_gives_the_bits_of_one_in_memory_of_its_own() {
    for device in devices() {
        for precision in FLOATS {
            let case = Case::new(&device, (5, 70, 33), DType::BF16, precision, Activation::Geglu, true);
            let mut plan = Plan::new("weights");
            let bytes = Weight::packed_bytes(&device, 70, 33, precision, Layout::Gated).unwrap();
            plan.add("before", DType::U8, &[1]);
            let slot = plan.add("weight", DType::U8, &[bytes]);
            let memory = Arena::allocate(&device, plan).unwrap().tensor(slot);
            memory.write_bytes(0, &vec![0xFF; bytes]).unwrap();
            let weight = Weight::pack_into(&device, &case.source.0, precision, Layout::Gated, &memory).unwrap();
            let (own, slot) = (poisoned(&device, DType::F32, &[5, 35]), poisoned(&device, DType::F32, &[5, 35]));
            case.run(&device, &own);
            let args = Forward {
                x: &case.x.0,
                weight: &weight,
                bias: case.bias.as_ref().map(|(t, _)| t),
                activation: Activation::Geglu,
                residual: case.residual.as_ref().map(|(t, _)| t),
                out: &slot,
            };
            forward(&device, &args).unwrap();
            assert_eq!(own.read_f32().unwrap(), slot.read_f32().unwrap(), "{} {precision}", device.name());
        }
    }
}

#[test]
fn a_weight_says_what_it_is() {
    for device in devices().into_iter().chain([Device::null(2)]) {
        let source = Tensor::zeros(&device, DType::F32, &[96, 64]).unwrap();
        let weight = Weight::pack(&device, &source, DType::BF16, Layout::Gated).unwrap();
        assert_eq!((weight.shape(), weight.dtype(), weight.layout()), ((96, 64), DType::BF16, Layout::Gated));
        assert_eq!(weight.bytes(), 96 * 64 * 2, "96 is a whole number of panels for every instruction set");
    }
}

#[test]
fn the_weights_of_the_released_checkpoints_need_no_padding_worth_naming() {
    // (N, K, gated, how often) of the large encoder and its head.
    let device = Device::cpu();
    let all = [(3072, 1024, false, 30), (1024, 1024, false, 31), (5248, 1024, true, 28), (1024, 2624, false, 28)];
    for precision in FLOATS {
        let (mut packed, mut plain) = (0, 0);
        for (n, k, gated, count) in all {
            let layout = if gated { Layout::Gated } else { Layout::Plain };
            packed += count * Weight::packed_bytes(&device, n, k, precision, layout).unwrap();
            plain += count * n * k * precision.size();
        }
        assert!(packed as f64 <= 1.01 * plain as f64, "{precision}: {packed} for {plain}");
    }
}

#[test]
fn the_null_device_records_work_and_bytes_and_allocates_nothing() {
    let device = Device::null(2);
    let Device::Null(null) = &device else { unreachable!() };
    let source = Tensor::zeros(&device, DType::F16, &[96, 50]).unwrap();
    let weight = Weight::pack(&device, &source, DType::F32, Layout::Gated).unwrap();
    let live = device.live_bytes();
    assert!(live >= 96 * 50 * (2 + 4));
    let x = Tensor::zeros(&device, DType::F32, &[7, 50]).unwrap();
    let out = Tensor::zeros(&device, DType::F32, &[7, 48]).unwrap();
    null.take_launches();
    let (activation, residual) = (Activation::Geglu, Some(&out));
    forward(&device, &Forward { x: &x, weight: &weight, bias: None, activation, residual, out: &out }).unwrap();
    let launches = null.take_launches();
    assert_eq!(launches.len(), 1);
    assert_eq!((launches[0].op, launches[0].flops), ("linear.forward", 2 * 7 * 96 * 50));
    assert_eq!(launches[0].bytes as usize, x.bytes() + weight.bytes() + 2 * out.bytes());
}

#[test]
fn the_null_device_plans_the_bytes_that_the_processor_packs() {
    for precision in FLOATS {
        for layout in [Layout::Plain, Layout::Gated] {
            let bytes = |device: &Device| Weight::packed_bytes(device, 1030, 77, precision, layout).unwrap();
            assert_eq!(bytes(&Device::null(2)), bytes(&Device::cpu()));
        }
    }
}
