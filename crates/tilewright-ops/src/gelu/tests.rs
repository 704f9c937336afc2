use proptest::prelude::*;

use super::*;
use crate::DType;
use crate::testing::{self, FLOATS, Random, assert_close, devices, poisoned, random, tolerance};

const KINDS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];

/// Element counts: tails of every vector width, one chunk of a task and one more.
const SIZES: [usize; 12] = [1, 2, 3, 5, 7, 8, 13, 16, 17, 33, 8192, 8193];

fn check(device: &Device, dtype: DType, kind: Gelu, shape: &[usize], std: f32) {
    let mut rng = Random::new(shape.iter().sum::<usize>() as u64);
    let (x, x_exact) = random(device, dtype, shape, std, &mut rng);
    let (dout, dout_exact) = random(device, dtype, shape, 1.0, &mut rng);
    let (out, dx) = (poisoned(device, dtype, shape), poisoned(device, dtype, shape));
    forward(device, &Forward { kind, x: &x, out: &out }).unwrap();
    backward(device, &Backward { kind, x: &x, dout: &dout, dx: &dx }).unwrap();
    let (atol, rtol) = tolerance(dtype);
    let want: Vec<f64> = x_exact.iter().map(|&x| reference::value(kind, x)).collect();
    assert_close("out", &out, &want, atol, rtol);
    let want: Vec<f64> = x_exact.iter().zip(dout_exact).map(|(&x, d)| d * reference::derivative(kind, x)).collect();
    assert_close("dx", &dx, &want, 2.0 * atol, rtol);
}

#[test]
fn both_forms_match_the_reference_in_every_storage_type() {
    for device in devices() {
        for dtype in FLOATS {
            for kind in KINDS {
                for n in SIZES {
                    check(&device, dtype, kind, &[n], 2.0);
                }
            }
        }
    }
}

#[test]
fn bug_28_odd_shapes_keep_their_tails() {
    for shape in [&[7, 767][..], &[1, 7, 33], &[3, 5, 13], &[2, 3, 1]] {
        for kind in KINDS {
            check(&Device::cpu_with_threads(3), DType::F32, kind, shape, 1.0);
        }
    }
}

#[test]
fn a_production_sized_hidden_layer() {
    for device in testing::production_devices() {
        for dtype in FLOATS {
            check(&device, dtype, Gelu::Tanh, &[1, 1024, 3072], 1.0);
        }
    }
}

#[test]
fn a_dense_sweep_stays_within_a_few_units_of_the_last_place() {
    // Also far into the negative tail, where the naive 0.5 x (1 + tanh u) has no correct digit left.
    let x: Vec<f32> = (0..40_000).map(|i| (i - 24_000) as f32 * 0.000_4).collect();
    let device = Device::cpu_with_threads(1);
    let t = Tensor::from_f32(&device, DType::F32, &[x.len()], &x).unwrap();
    let out = poisoned(&device, DType::F32, &[x.len()]);
    for kind in KINDS {
        forward(&device, &Forward { kind, x: &t, out: &out }).unwrap();
        let want: Vec<f64> = x.iter().map(|&x| reference::value(kind, f64::from(x))).collect();
        let rtol = 4e-6;
        // The reference itself loses its relative digits below -4: 1 + tanh(u) and 1 + erf(u) cancel in f64, too.
        assert_close("out", &out, &want, 1e-14, rtol);
    }
}

#[test]
fn tanh_and_erf_are_not_the_same_function() {
    // The largest difference of the two forms is about 4.7e-4; a silent swap must be seen.
    let device = Device::cpu_with_threads(1);
    let x = Tensor::from_f32(&device, DType::F32, &[1], &[2.2]).unwrap();
    let values = KINDS.map(|kind| {
        let out = poisoned(&device, DType::F32, &[1]);
        forward(&device, &Forward { kind, x: &x, out: &out }).unwrap();
        out.read_f32().unwrap()[0]
    });
    assert!((values[0] - values[1]).abs() > 2e-4, "{values:?}");
}

#[test]
fn known_values_of_the_tanh_form() {
    let device = Device::cpu_with_threads(1);
    let x = Tensor::from_f32(&device, DType::F32, &[3], &[1.0, -1.0, 0.0]).unwrap();
    let out = poisoned(&device, DType::F32, &[3]);
    forward(&device, &Forward { kind: Gelu::Tanh, x: &x, out: &out }).unwrap();
    assert_close("out", &out, &[0.841_191_990_6, -0.158_808_009_4, 0.0], 2e-7, 0.0);
}

#[test]
fn known_values_of_the_exact_form() {
    let device = Device::cpu_with_threads(1);
    let x = Tensor::from_f32(&device, DType::F32, &[3], &[1.0, -1.0, 0.0]).unwrap();
    let out = poisoned(&device, DType::F32, &[3]);
    forward(&device, &Forward { kind: Gelu::Erf, x: &x, out: &out }).unwrap();
    assert_close("out", &out, &[0.841_344_746_1, -0.158_655_253_9, 0.0], 2e-7, 0.0);
}

#[test]
fn huge_arguments_give_no_nan() {
    // cosh of these overflows: the derivative must not be written as 1 / cosh^2.
    for device in devices() {
        for kind in KINDS {
            let values = [-3e38f32, -1e10, -100.0, -20.0, 20.0, 100.0, 1e10, 3e38];
            let x = Tensor::from_f32(&device, DType::F32, &[8], &values).unwrap();
            let dout = Tensor::from_f32(&device, DType::F32, &[8], &[1.0; 8]).unwrap();
            let (out, dx) = (poisoned(&device, DType::F32, &[8]), poisoned(&device, DType::F32, &[8]));
            forward(&device, &Forward { kind, x: &x, out: &out }).unwrap();
            backward(&device, &Backward { kind, x: &x, dout: &dout, dx: &dx }).unwrap();
            assert_eq!(out.read_f32().unwrap(), [0.0, 0.0, 0.0, 0.0, 20.0, 100.0, 1e10, 3e38]);
            assert_eq!(dx.read_f32().unwrap(), [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        }
    }
}

#[test]
fn a_nan_stays_a_nan() {
    for device in devices() {
        for kind in KINDS {
            let x = Tensor::from_f32(&device, DType::F32, &[2], &[f32::NAN, 1.0]).unwrap();
            let out = Tensor::zeros(&device, DType::F32, &[2]).unwrap();
            forward(&device, &Forward { kind, x: &x, out: &out }).unwrap();
            let out = out.read_f32().unwrap();
            assert!(out[0].is_nan() && out[1].is_finite());
        }
    }
}

#[test]
fn dx_may_be_dout_itself() {
    for device in devices() {
        for dtype in FLOATS {
            for kind in KINDS {
                let mut rng = Random::new(3);
                let (x, _) = random(&device, dtype, &[8200], 1.0, &mut rng);
                let (dout, _) = random(&device, dtype, &[8200], 1.0, &mut rng);
                let dx = poisoned(&device, dtype, &[8200]);
                backward(&device, &Backward { kind, x: &x, dout: &dout, dx: &dx }).unwrap();
                backward(&device, &Backward { kind, x: &x, dout: &dout, dx: &dout }).unwrap();
                assert_eq!(dx.read_f32().unwrap(), dout.read_f32().unwrap());
            }
        }
    }
}

#[test]
fn the_bits_depend_on_neither_threads_nor_instruction_set_nor_alignment() {
    let run = |device: &Device, kind, moved: bool| {
        let (x, _) = random(device, DType::F32, &[20_011], 2.0, &mut Random::new(9));
        let out = poisoned(device, DType::F32, &[20_011]);
        let (x, out) = if moved { (testing::unaligned(&x), testing::unaligned(&out)) } else { (x, out) };
        forward(device, &Forward { kind, x: &x, out: &out }).unwrap();
        out.read_f32().unwrap()
    };
    for kind in KINDS {
        let first = run(&Device::cpu_with_threads(1), kind, false);
        for device in testing::cpus() {
            assert!(run(&device, kind, false) == first, "{device:?}");
            assert!(run(&device, kind, true) == first, "{device:?}, unaligned");
        }
    }
}

#[test]
fn the_derivative_matches_finite_differences() {
    for kind in KINDS {
        for i in -60..=60 {
            let x = f64::from(i) * 0.1;
            let difference = (reference::value(kind, x + 1e-5) - reference::value(kind, x - 1e-5)) / 2e-5;
            assert!((difference - reference::derivative(kind, x)).abs() < 1e-9, "{kind:?} at {x}");
        }
    }
}

#[test]
fn bug_20_no_elements_is_no_work() {
    for device in devices() {
        let x = Tensor::zeros(&device, DType::F32, &[0, 4]).unwrap();
        let out = Tensor::zeros(&device, DType::F32, &[0, 4]).unwrap();
        forward(&device, &Forward { kind: Gelu::Tanh, x: &x, out: &out }).unwrap();
        backward(&device, &Backward { kind: Gelu::Tanh, x: &x, dout: &x, dx: &out }).unwrap();
    }
}

#[test]
fn refuses_other_shapes_types_devices_and_overlaps() {
    let device = Device::cpu_with_threads(1);
    let x = Tensor::zeros(&device, DType::F32, &[2, 4]).unwrap();
    let all = Tensor::zeros(&device, DType::F32, &[20]).unwrap();
    let fails =
        |x: &Tensor, out: &Tensor| forward(&device, &Forward { kind: Gelu::Tanh, x, out }).unwrap_err().to_string();
    let named = |message: String, words: &[&str]| assert!(words.iter().all(|w| message.contains(w)), "{message}");
    named(fails(&x, &all), &["gelu.forward", "`out`", "(20)", "(2, 4)"]);
    named(fails(&x, &x), &["gelu.forward", "`out`", "`x`", "overlaps"]);
    let half = Tensor::zeros(&device, DType::F16, &[2, 4]).unwrap();
    named(fails(&x, &half), &["gelu.forward", "`out`", "f16", "f32"]);
    let ids = Tensor::zeros(&device, DType::I32, &[2, 4]).unwrap();
    named(fails(&ids, &x), &["gelu.forward", "`x`", "i32"]);
    let elsewhere = Tensor::zeros(&Device::cpu_with_threads(1), DType::F32, &[2, 4]).unwrap();
    named(fails(&x, &elsewhere), &["gelu.forward", "`out`", "lives on"]);
    // A partial overlap of dx and dout is not the in-place form.
    let (dout, dx) = (all.slice(0, &[2, 4]).unwrap(), all.slice(3, &[2, 4]).unwrap());
    let error = backward(&device, &Backward { kind: Gelu::Erf, x: &x, dout: &dout, dx: &dx }).unwrap_err();
    named(error.to_string(), &["gelu.backward", "`dx`", "`dout`", "overlaps"]);
}

#[test]
fn the_null_device_records_and_computes_nothing() {
    let device = Device::null(1);
    let x = Tensor::zeros(&device, DType::BF16, &[3, 5]).unwrap();
    let out = Tensor::zeros(&device, DType::BF16, &[3, 5]).unwrap();
    forward(&device, &Forward { kind: Gelu::Tanh, x: &x, out: &out }).unwrap();
    backward(&device, &Backward { kind: Gelu::Tanh, x: &x, dout: &out, dx: &out }).unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let bytes: Vec<_> = null.take_launches().iter().map(|l| (l.op, l.bytes)).collect();
    assert_eq!(bytes, [("gelu.forward", 60), ("gelu.backward", 90)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_size_matches_the_reference(n in 1usize..20_000, dtype in 0usize..3, kind in 0usize..2, threads in 1usize..4) {
        check(&Device::cpu_with_threads(threads), FLOATS[dtype], KINDS[kind], &[n], 3.0);
    }
}
