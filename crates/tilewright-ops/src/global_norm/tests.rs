use proptest::prelude::*;

use super::*;
use crate::testing::{self, FLOATS, Random, devices, poisoned, random};

fn norm(device: &Device, tensors: &[Tensor]) -> f32 {
    let out = poisoned(device, DType::F32, &[1]);
    forward(device, &Forward { tensors, out: &out }).unwrap();
    out.read_f32().unwrap()[0]
}

#[track_caller]
fn check(device: &Device, dtypes: &[DType], sizes: &[usize]) {
    let mut rng = Random::new(sizes.iter().sum::<usize>() as u64);
    let made: Vec<_> =
        sizes.iter().zip(dtypes.iter().cycle()).map(|(&n, &d)| random(device, d, &[n], 0.3, &mut rng)).collect();
    let (tensors, exact): (Vec<_>, Vec<_>) = made.into_iter().unzip();
    let (got, want) = (norm(device, &tensors), reference::norm(&exact));
    // Squares and sums are f64: only the last rounding to f32 is seen. Through Vulkan and Metal they are f32, summed in trees.
    let bound = if testing::is_portable(device) { 4e-7 } else { 6.1e-8 };
    assert!((f64::from(got) - want).abs() <= bound * want, "{sizes:?}: {got} against {want}");
}

#[test]
fn one_tensor_of_every_awkward_size_matches_the_reference() {
    for device in devices() {
        for dtype in FLOATS {
            for n in [1, 2, 3, 5, 7, 13, 17, 31, 32, 33, 63, 65, 767, 16_383, 16_384, 16_385, 33 * 767] {
                check(&device, &[dtype], &[n]);
            }
        }
    }
}

#[test]
fn many_tensors_of_mixed_storage_match_the_reference() {
    for device in devices() {
        check(&device, &FLOATS, &[1, 768, 40_000, 3, 0, 17, 2304]);
    }
}

#[test]
fn a_production_sized_tensor_fills_more_than_the_smallest_chunks() {
    // 512 partial sums of 16 Ki elements hold 8 Mi; beyond, chunks grow.
    let device = Device::cpu_with_threads(2);
    let n = 9_000_011;
    let t = Tensor::zeros(&device, DType::BF16, &[n]).unwrap();
    t.write_f32(&vec![0.5; n]).unwrap();
    assert_eq!(norm(&device, &[t]), (0.25 * n as f64).sqrt() as f32);
}

#[test]
fn every_element_counts_once() {
    for device in devices() {
        let n = 50_000;
        let t = Tensor::zeros(&device, DType::F32, &[n]).unwrap();
        for i in (0..n).step_by(1013).chain([n - 1]) {
            let mut values = vec![0.0; n];
            values[i] = 3.0;
            t.write_f32(&values).unwrap();
            testing::assert_bits(&device, &format!("element {i}"), &[norm(&device, std::slice::from_ref(&t))], &[3.0]);
        }
    }
}

#[test]
fn the_bits_depend_on_neither_threads_nor_instruction_set_nor_alignment() {
    let run = |device: &Device, moved: bool| {
        let (t, _) = random(device, DType::F32, &[200_003], 1.0, &mut Random::new(1));
        norm(device, &[if moved { testing::unaligned(&t) } else { t }]).to_bits()
    };
    let first = run(&Device::cpu_with_threads(1), false);
    for device in devices() {
        let first = if testing::is_portable(&device) { run(&device, false) } else { first };
        assert_eq!([run(&device, false), run(&device, true)], [first; 2], "{device:?}");
    }
}

#[test]
fn squares_of_large_gradients_do_not_overflow() {
    for device in devices() {
        let t = Tensor::from_f32(&device, DType::F32, &[2], &[3e30, 4e30]).unwrap();
        testing::assert_bits(&device, "norm", &[norm(&device, &[t])], &[5e30]);
    }
}

#[test]
fn squares_of_small_gradients_do_not_vanish() {
    for device in devices() {
        let t = Tensor::from_f32(&device, DType::F32, &[2], &[3e-30, 4e-30]).unwrap();
        assert!((norm(&device, &[t]) / 5e-30 - 1.0).abs() < 1e-6);
    }
}

#[test]
fn magnitudes_far_apart_count_as_they_should() {
    for device in devices() {
        // Around 2^48, around 2^-40, and what is nothing beside the rest.
        for (values, want) in [
            (&[3e14f32, 4e14, 1e-30][..], 5e14),
            (&[2e14, 3e14, 6e14], 7e14),
            (&[3e-12, 4e-12, 1e-38], 5e-12),
            (&[2e-13, 3e-13, 6e-13], 7e-13),
            (&[9e-13, 1.2e-12, 0.0], 1.5e-12),
            (&[3e37, 4e37, 1.0], 5e37),
        ] {
            let t = Tensor::from_f32(&device, DType::F32, &[3], values).unwrap();
            let got = norm(&device, &[t]);
            assert!((got / want - 1.0).abs() < 1e-6, "{values:?}: {got} on {}", device.name());
        }
    }
}

#[test]
fn nan_and_infinity_reach_the_result() {
    for device in devices() {
        let nan = Tensor::from_f32(&device, DType::BF16, &[3], &[1.0, f32::NAN, 1.0]).unwrap();
        assert!(norm(&device, &[nan]).is_nan());
        let infinite = Tensor::from_f32(&device, DType::F32, &[3], &[1.0, f32::NEG_INFINITY, 1.0]).unwrap();
        assert_eq!(norm(&device, &[infinite]), f32::INFINITY);
        let beyond = Tensor::from_f32(&device, DType::F32, &[4], &[3e38; 4]).unwrap();
        assert_eq!(norm(&device, &[beyond]), f32::INFINITY, "{}", device.name());
    }
}

#[test]
fn bug_20_no_tensors_and_empty_tensors_have_norm_zero() {
    for device in devices() {
        assert_eq!(norm(&device, &[]), 0.0);
        assert_eq!(norm(&device, &[Tensor::zeros(&device, DType::F32, &[0]).unwrap()]), 0.0);
    }
}

#[test]
fn refuses_what_the_contract_does_not_allow() {
    let device = Device::cpu_with_threads(1);
    let out = poisoned(&device, DType::F32, &[1]);
    let x = Tensor::zeros(&device, DType::F32, &[4]).unwrap();
    let fails = |tensors: &[Tensor], out: &Tensor| forward(&device, &Forward { tensors, out }).unwrap_err().to_string();
    let named = |message: String, words: &[&str]| assert!(words.iter().all(|w| message.contains(w)), "{message}");
    let ids = Tensor::zeros(&device, DType::I32, &[4]).unwrap();
    named(fails(&[x.clone(), ids], &out), &["global_norm.forward", "`tensors`", "i32"]);
    named(fails(std::slice::from_ref(&x), &x), &["global_norm.forward", "`out`", "(4)", "(1)"]);
    let half = Tensor::zeros(&device, DType::F16, &[1]).unwrap();
    named(fails(std::slice::from_ref(&x), &half), &["global_norm.forward", "`out`", "f16"]);
    named(fails(std::slice::from_ref(&x), &x.slice(2, &[1]).unwrap()), &["`out`", "`tensors`", "overlaps"]);
    let elsewhere = Tensor::zeros(&Device::cpu_with_threads(1), DType::F32, &[4]).unwrap();
    named(fails(&[elsewhere], &out), &["global_norm.forward", "`tensors`", "lives on"]);
    assert!(out.read_f32().unwrap()[0].is_nan(), "a refused call writes nothing");
}

#[test]
fn the_null_device_records_the_bytes_read() {
    let device = Device::null(1);
    let t = Tensor::zeros(&device, DType::BF16, &[100]).unwrap();
    norm(&device, &[t.clone(), t]);
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    assert_eq!((launches[0].op, launches[0].flops, launches[0].bytes), ("global_norm.forward", 400, 404));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_list_of_sizes_matches_the_reference(
        sizes in prop::collection::vec(1usize..5_000, 1..8), first in 0usize..3, threads in 1usize..4,
    ) {
        check(&Device::cpu_with_threads(threads), &[FLOATS[first], DType::F32], &sizes);
    }
}
