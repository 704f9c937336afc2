use proptest::prelude::*;
use tilewright_core::bf16;

use super::reference::Scalars;
use super::*;
use crate::testing::{self, FLOATS, Random, assert_close, devices, poisoned, random};

/// Element counts: tails of every vector width, blocks of 512 and chunks of tasks, one less and one more.
const SIZES: [usize; 15] = [1, 2, 3, 5, 7, 13, 17, 33, 511, 512, 513, 767, 16_383, 16_385, 33_000];

const SCALARS: Scalars =
    Scalars { scale: 1.0, lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, step: 3 };

struct Case {
    param: Tensor,
    master: Option<Tensor>,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
}

impl Case {
    fn new(device: &Device, param: DType, grad: DType, shape: &[usize], master: bool) -> Self {
        let mut rng = Random::new(shape.iter().sum::<usize>() as u64 + 5);
        let mut input = |dtype, std| random(device, dtype, shape, std, &mut rng).0;
        let case = Case {
            param: input(param, 0.1),
            master: master.then(|| input(DType::F32, 0.1)),
            grad: input(grad, 0.01),
            m: input(DType::F32, 0.01),
            v: input(DType::F32, 0.001),
        };
        case.v.write_f32(&case.v.read_f32().unwrap().iter().map(|v| v.abs()).collect::<Vec<_>>()).unwrap();
        case
    }

    fn args(&self, s: &Scalars) -> Update<'_> {
        Update {
            param: &self.param,
            master: self.master.as_ref(),
            grad: &self.grad,
            m: &self.m,
            v: &self.v,
            lr: s.lr,
            beta1: s.beta1,
            beta2: s.beta2,
            eps: s.eps,
            weight_decay: s.weight_decay,
            step: s.step,
            grad_scale: s.scale,
            clip: None,
            rounding: Rounding::Nearest,
            layers: 1,
            zero_grad: false,
        }
    }

    fn run(&self, args: &Update<'_>) {
        update(self.param.device(), args).unwrap();
    }

    /// `[p, m, v]` now, `p` from the master where there is one.
    fn state(&self) -> [Vec<f32>; 3] {
        [self.master.as_ref().unwrap_or(&self.param), &self.m, &self.v].map(|t| t.read_f32().unwrap())
    }
}

/// What the contract's formula gives, operation by operation in f32.
fn single(s: &Scalars, before: &[Vec<f32>; 3], grad: &[f32]) -> [Vec<f32>; 3] {
    let mut after = [vec![], vec![], vec![]];
    for i in 0..grad.len() {
        let (p, m, v) = reference::single(s, before[0][i], grad[i], before[1][i], before[2][i]);
        after[0].push(p);
        after[1].push(m);
        after[2].push(v);
    }
    after
}

#[track_caller]
fn assert_states(device: &Device, got: &[Vec<f32>; 3], want: &[Vec<f32>; 3]) {
    for (i, what) in ["param", "m", "v"].into_iter().enumerate() {
        testing::assert_bits(device, what, &got[i], &want[i]);
    }
}

#[test]
fn f32_without_masters_has_the_bits_of_the_formula() {
    for device in devices() {
        for n in SIZES {
            let case = Case::new(&device, DType::F32, DType::F32, &[n], false);
            let (before, grad) = (case.state(), case.grad.read_f32().unwrap());
            case.run(&case.args(&SCALARS));
            assert_states(&device, &case.state(), &single(&SCALARS, &before, &grad));
        }
    }
}

#[test]
fn every_pair_of_storage_types_matches_the_reference() {
    for device in devices() {
        for (param, grad) in FLOATS.into_iter().flat_map(|p| FLOATS.map(|g| (p, g))) {
            for master in [false, true] {
                let case = Case::new(&device, param, grad, &[3, 767], master);
                let (before, grads) = (case.state(), case.grad.read_f32().unwrap());
                case.run(&case.args(&SCALARS));
                let [p, m, v] = single(&SCALARS, &before, &grads);
                let states = case.state();
                testing::assert_bits(&device, "m", &states[1], &m);
                testing::assert_bits(&device, "v", &states[2], &v);
                if master {
                    testing::assert_bits(&device, "master", &states[0], &p);
                }
                // The parameter is what was computed, rounded; without a master that is all there is to see.
                let p = if master { states[0].clone() } else { single(&SCALARS, &before, &grads)[0].clone() };
                let rounded = Tensor::from_f32(&device, param, &[3, 767], &p).unwrap().read_f32().unwrap();
                let got = case.param.read_f32().unwrap();
                if testing::is_portable(&device) && !master {
                    let (atol, rtol) = testing::tolerance(param);
                    let want: Vec<f64> = rounded.iter().map(|&x| f64::from(x)).collect();
                    assert_close("param", &case.param, &want, atol, rtol);
                } else {
                    assert_eq!(got, rounded);
                }
            }
        }
    }
}

#[test]
fn fifty_steps_stay_beside_the_same_in_f64() {
    for device in devices() {
        let n = 700;
        let case = Case::new(&device, DType::F32, DType::F32, &[n], false);
        case.m.zero();
        case.v.zero();
        let mut exact: Vec<_> = case.state()[0].iter().map(|&p| (f64::from(p), 0.0, 0.0)).collect();
        let mut rng = Random::new(8);
        for step in 1..=50 {
            let s = Scalars { step, ..SCALARS };
            case.grad.write_f32(&rng.normals(n, 0.1)).unwrap();
            for (e, g) in exact.iter_mut().zip(case.grad.read_f32().unwrap()) {
                *e = reference::exact(&s, e.0, f64::from(g), e.1, e.2);
            }
            case.run(&case.args(&s));
        }
        let want: Vec<f64> = exact.iter().map(|e| e.0).collect();
        assert_close("param", &case.param, &want, 1e-6, 1e-5);
        assert_close("m", &case.m, &exact.iter().map(|e| e.1).collect::<Vec<_>>(), 1e-8, 1e-5);
        assert_close("v", &case.v, &exact.iter().map(|e| e.2).collect::<Vec<_>>(), 1e-9, 1e-5);
    }
}

#[test]
fn the_first_step_moves_by_the_sign_of_the_gradient() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[4], false);
    case.param.zero();
    case.m.zero();
    case.v.zero();
    case.grad.write_f32(&[2.0, -3e-3, 0.0, 5e-5]).unwrap();
    case.run(&case.args(&Scalars { step: 1, weight_decay: 0.0, ..SCALARS }));
    assert_close("param", &case.param, &[-1e-3, 1e-3, 0.0, -1e-3], 1e-6, 0.0);
}

#[test]
fn bias_correction_keeps_its_digits_at_beta2_of_0_999() {
    // 1 - 0.999^2 by f32 powers is off by 3e-5 of itself.
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[1], false);
    case.param.zero();
    let s = Scalars { beta2: 0.999, step: 2, weight_decay: 0.0, ..SCALARS };
    let [_, m, v] = case.state().map(|x| f64::from(x[0]));
    let (want, ..) = reference::exact(&s, 0.0, f64::from(case.grad.read_f32().unwrap()[0]), m, v);
    case.run(&case.args(&s));
    assert_close("param", &case.param, &[want], 0.0, 5e-7);
}

#[test]
fn weight_decay_is_decoupled_from_the_gradient() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, DType::F32, &[40], false);
        for t in [&case.grad, &case.m, &case.v] {
            t.zero();
        }
        let before = case.param.read_f32().unwrap();
        case.run(&case.args(&SCALARS));
        let want: Vec<f64> = before.iter().map(|&p| f64::from(p) * (1.0 - 1e-4)).collect();
        assert_close("param", &case.param, &want, 0.0, 1e-6);
    }
}

#[test]
fn clipping_scales_the_gradient_only_above_the_limit() {
    for device in devices() {
        for (norm, scale) in [(4.0, 0.25), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0)] {
            let case = Case::new(&device, DType::F32, DType::F32, &[100], false);
            let (before, grad) = (case.state(), case.grad.read_f32().unwrap());
            let norm = Tensor::from_f32(&device, DType::F32, &[1], &[norm]).unwrap();
            let clip = Some(Clip { norm: &norm, max_norm: 1.0 });
            case.run(&Update { clip, ..case.args(&SCALARS) });
            assert_states(&device, &case.state(), &single(&Scalars { scale, ..SCALARS }, &before, &grad));
            assert_eq!(case.grad.read_f32().unwrap(), grad, "the gradient buffer is not scaled");
        }
    }
}

#[test]
fn grad_scale_and_clipping_multiply() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[100], false);
    let (before, grad) = (case.state(), case.grad.read_f32().unwrap());
    let norm = Tensor::from_f32(&device, DType::F32, &[1], &[8.0]).unwrap();
    let clip = Some(Clip { norm: &norm, max_norm: 2.0 });
    case.run(&Update { clip, ..case.args(&Scalars { scale: 0.5, ..SCALARS }) });
    assert_eq!(case.state(), single(&Scalars { scale: 0.125, ..SCALARS }, &before, &grad));
}

#[test]
fn zero_grad_leaves_zeros_and_otherwise_the_gradient_stays() {
    for device in devices() {
        for dtype in FLOATS {
            let case = Case::new(&device, DType::F32, dtype, &[1000], false);
            let grad = case.grad.read_f32().unwrap();
            case.run(&case.args(&SCALARS));
            assert_eq!(case.grad.read_f32().unwrap(), grad);
            case.run(&Update { zero_grad: true, ..case.args(&SCALARS) });
            assert_eq!(case.grad.read_f32().unwrap(), [0.0; 1000]);
        }
    }
}

#[test]
fn the_master_decides_and_the_parameter_follows() {
    for device in devices() {
        let case = Case::new(&device, DType::BF16, DType::BF16, &[600], true);
        case.param.write_f32(&[f32::NAN; 600]).unwrap();
        case.run(&case.args(&SCALARS));
        let want: Vec<f32> = case.state()[0].iter().map(|&p| bf16::from_f32(p).to_f32()).collect();
        assert_eq!(case.param.read_f32().unwrap(), want);
    }
}

#[test]
fn stochastic_rounding_uses_the_noise_of_place_layer_and_seed() {
    for device in devices() {
        // Layers of less than a block, of a block and a tail, and of more than a chunk.
        for (layers, per_layer) in [(1, 1), (12, 33), (3, 512), (2, 1300), (3, 16_384 + 700)] {
            let n = layers * per_layer;
            let case = Case::new(&device, DType::BF16, DType::F32, &[layers, per_layer], true);
            let rounding = Rounding::Stochastic { seed: 740_755_583 };
            case.run(&Update { rounding, layers, ..case.args(&SCALARS) });
            let (values, got) = (&case.state()[0], case.param.read_f32().unwrap());
            for i in 0..n {
                let want = reference::stochastic(values[i], i % per_layer, i / per_layer, 740_755_583);
                assert_eq!(got[i], want.to_f32(), "element {i} of ({layers}, {per_layer})");
            }
        }
    }
}

#[test]
fn without_masters_the_new_value_is_rounded_stochastically() {
    for device in devices() {
        let case = Case::new(&device, DType::BF16, DType::BF16, &[2, 700], false);
        let (before, grad) = (case.state(), case.grad.read_f32().unwrap());
        let rounding = Rounding::Stochastic { seed: 5 };
        case.run(&Update { rounding, layers: 2, ..case.args(&SCALARS) });
        let [p, ..] = single(&SCALARS, &before, &grad);
        let want: Vec<f32> = (0..1400).map(|i| reference::stochastic(p[i], i % 700, i / 700, 5).to_f32()).collect();
        let differ = case.param.read_f32().unwrap().iter().zip(&want).filter(|(g, w)| g != w).count();
        // A unit in the last place of f32 changes the choice once in thousands.
        assert!(differ <= if testing::is_portable(&device) { 3 } else { 0 }, "{differ} of 1400 on {device:?}");
    }
}

#[test]
fn stochastic_rounding_of_other_storage_is_to_nearest() {
    for dtype in [DType::F32, DType::F16] {
        let run = |rounding| {
            let case = Case::new(&Device::cpu_with_threads(1), dtype, DType::F32, &[900], true);
            case.run(&Update { rounding, ..case.args(&SCALARS) });
            case.param.read_f32().unwrap()
        };
        assert_eq!(run(Rounding::Stochastic { seed: 1 }), run(Rounding::Nearest));
    }
}

#[test]
fn stochastic_rounding_goes_both_ways_and_is_right_on_average() {
    // 1 + 3/4 of a step of bf16: three of four go up.
    let device = Device::cpu_with_threads(2);
    let n = 100_000;
    let master = Tensor::from_f32(&device, DType::F32, &[n], &vec![1.0 + 0.75 / 128.0; n]).unwrap();
    let param = poisoned(&device, DType::BF16, &[n]);
    let rounding = Rounding::Stochastic { seed: 3 };
    round(&device, &Round { master: &master, param: &param, rounding, layers: 1 }).unwrap();
    let values = param.read_f32().unwrap();
    let up = values.iter().filter(|&&v| v == 1.0 + 1.0 / 128.0).count();
    assert_eq!(up + values.iter().filter(|&&v| v == 1.0).count(), n);
    assert!((up as f64 / n as f64 - 0.75).abs() < 0.01, "{up} of {n} went up");
}

#[test]
fn rounding_passes_nan_and_infinity_through() {
    for device in devices() {
        for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 9 }] {
            let low_nan = f32::from_bits(0x7F80_0001);
            let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN, low_nan, 1.0, -0.0];
            let master = Tensor::from_f32(&device, DType::F32, &[7], &values).unwrap();
            let param = Tensor::zeros(&device, DType::BF16, &[7]).unwrap();
            round(&device, &Round { master: &master, param: &param, rounding, layers: 1 }).unwrap();
            let got = param.read_f32().unwrap();
            assert!(got[0].is_nan() && got[3].is_nan() && got[4].is_nan(), "{got:?}");
            assert_eq!(got[1..3], values[1..3]);
            assert_eq!(got[5..], values[5..]);
        }
    }
}

#[test]
fn round_gives_the_bits_of_the_update_that_it_repeats() {
    for device in devices() {
        for dtype in FLOATS {
            for rounding in [Rounding::Nearest, Rounding::Stochastic { seed: 77 }] {
                let case = Case::new(&device, dtype, DType::F32, &[3, 6000], true);
                case.run(&Update { rounding, layers: 3, ..case.args(&SCALARS) });
                let param = poisoned(&device, dtype, &[3, 6000]);
                let master = case.master.as_ref().unwrap();
                round(&device, &Round { master, param: &param, rounding, layers: 3 }).unwrap();
                assert_eq!(param.read_f32().unwrap(), case.param.read_f32().unwrap());
            }
        }
    }
}

#[test]
fn the_bits_depend_on_neither_threads_nor_instruction_set_nor_alignment() {
    let run = |device: &Device, moved: bool| {
        let mut case = Case::new(device, DType::BF16, DType::F16, &[5, 7001], true);
        if moved {
            let Case { param, master, grad, m, v } = &mut case;
            for t in [param, master.as_mut().unwrap(), grad, m, v] {
                *t = testing::unaligned(t);
            }
        }
        case.run(&Update { rounding: Rounding::Stochastic { seed: 1 }, layers: 5, ..case.args(&SCALARS) });
        (case.param.read_f32().unwrap(), case.state())
    };
    let first = run(&Device::cpu_with_threads(1), false);
    for device in devices() {
        // Drivers of other GPUs round as they like, but each as itself.
        let first = if testing::is_portable(&device) { &run(&device, false) } else { &first };
        assert!(run(&device, false) == *first, "{device:?}");
        assert!(run(&device, true) == *first, "{device:?}, unaligned");
    }
}

#[test]
fn many_updates_in_one_call_have_the_bits_of_one_after_the_other() {
    // More than one launch holds, storage that changes in between, stacks, odd lengths, an empty tensor.
    let shapes: Vec<Vec<usize>> =
        (0..21).map(|i| if i == 4 { vec![0, 3] } else { vec![1 + i % 3, 8 * (i * 37 % 300) + 8 + i / 15] }).collect();
    for device in devices() {
        let cases = || -> Vec<Case> {
            let new = |(i, shape): (usize, &Vec<usize>)| {
                let storage = if i < 12 { DType::BF16 } else { DType::F32 };
                Case::new(&device, storage, storage, shape, i < 12)
            };
            shapes.iter().enumerate().map(new).collect()
        };
        let args = |i: usize, case: &'_ Case| -> (f32, Rounding, usize) {
            (0.01 * i as f32, Rounding::Stochastic { seed: 7 + i as u32 }, case.param.shape().dims()[0].max(1))
        };
        let (one, all) = (cases(), cases());
        for (i, case) in one.iter().enumerate() {
            let (weight_decay, rounding, layers) = args(i, case);
            case.run(&Update { weight_decay, rounding, layers, ..case.args(&SCALARS) });
        }
        let updates: Vec<Update<'_>> = all
            .iter()
            .enumerate()
            .map(|(i, case)| {
                let (weight_decay, rounding, layers) = args(i, case);
                Update { weight_decay, rounding, layers, ..case.args(&SCALARS) }
            })
            .collect();
        update_all(&device, &updates).unwrap();
        for (one, all) in one.iter().zip(&all) {
            assert_eq!(one.state(), all.state());
            assert_eq!(one.param.read_f32().unwrap(), all.param.read_f32().unwrap());
        }
    }
}

#[test]
fn bug_20_no_elements_is_no_work() {
    for device in devices() {
        let case = Case::new(&device, DType::BF16, DType::F32, &[0, 3], true);
        case.run(&Update { layers: 4, ..case.args(&SCALARS) });
    }
}

#[test]
fn a_parameter_that_never_had_a_gradient_stays() {
    // 0 / (sqrt(0) + eps) is 0, not NaN.
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[20], false);
    for t in [&case.grad, &case.m, &case.v] {
        t.zero();
    }
    let before = case.param.read_f32().unwrap();
    case.run(&case.args(&Scalars { weight_decay: 0.0, ..SCALARS }));
    assert_eq!(case.param.read_f32().unwrap(), before);
}

#[test]
fn refuses_scalars_out_of_range() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[6], false);
    let before = case.state();
    let fails = |args: Update<'_>, words: &str| {
        let message = update(&device, &args).unwrap_err().to_string();
        assert!(message.contains("adamw.update") && message.contains(words), "{message}");
    };
    let good = || case.args(&SCALARS);
    fails(Update { step: 0, ..good() }, "`step` is 0");
    fails(Update { beta1: 1.0, ..good() }, "`beta1` is 1");
    fails(Update { beta2: -0.1, ..good() }, "`beta2` is -0.1");
    fails(Update { beta2: f32::NAN, ..good() }, "`beta2` is NaN");
    fails(Update { eps: -1e-8, ..good() }, "`eps`");
    fails(Update { lr: f32::INFINITY, ..good() }, "`lr` is inf");
    fails(Update { weight_decay: f32::NAN, ..good() }, "`weight_decay` is NaN");
    fails(Update { grad_scale: f32::NAN, ..good() }, "`grad_scale` is NaN");
    fails(Update { layers: 0, ..good() }, "`layers` is 0");
    fails(Update { layers: 4, ..good() }, "`layers` is 4, which does not divide `param` of shape (6)");
    let norm = Tensor::zeros(&device, DType::F32, &[1]).unwrap();
    fails(Update { clip: Some(Clip { norm: &norm, max_norm: 0.0 }), ..good() }, "`max_norm` is 0");
    assert_eq!(case.state(), before, "a refused call writes nothing");
}

#[test]
fn refuses_tensors_that_do_not_fit() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[2, 3], false);
    let half = Tensor::zeros(&device, DType::F16, &[2, 3]).unwrap();
    let flat = Tensor::zeros(&device, DType::F32, &[6]).unwrap();
    let ids = Tensor::zeros(&device, DType::I32, &[2, 3]).unwrap();
    let elsewhere = Tensor::zeros(&Device::cpu_with_threads(1), DType::F32, &[2, 3]).unwrap();
    let fails = |args: Update<'_>, words: &[&str]| {
        let message = update(&device, &args).unwrap_err().to_string();
        assert!(message.contains("adamw.update") && words.iter().all(|w| message.contains(w)), "{message}");
    };
    let good = || case.args(&SCALARS);
    fails(Update { m: &half, ..good() }, &["`m`", "f16", "f32"]);
    fails(Update { v: &flat, ..good() }, &["`v`", "(6)", "(2, 3)"]);
    fails(Update { grad: &ids, ..good() }, &["`grad`", "i32"]);
    fails(Update { master: Some(&half), ..good() }, &["`master`", "f16"]);
    fails(Update { param: &elsewhere, ..good() }, &["`param`", "lives on"]);
    fails(Update { m: &case.v, ..good() }, &["`m`", "`v`", "overlaps"]);
    fails(Update { master: Some(&case.param), ..good() }, &["`param`", "`master`", "overlaps"]);
    let param = Tensor::zeros(&device, DType::BF16, &[6]).unwrap();
    let wrong = Round { master: &case.m, param: &param, rounding: Rounding::Nearest, layers: 1 };
    let message = round(&device, &wrong).unwrap_err().to_string();
    assert!(message.contains("adamw.round: `param`") && message.contains("(2, 3)"), "{message}");
}

#[test]
fn the_null_device_records_28_bytes_a_parameter() {
    let device = Device::null(1);
    let case = Case::new(&device, DType::F32, DType::F32, &[100], false);
    case.run(&case.args(&SCALARS));
    let mixed = Case::new(&device, DType::BF16, DType::BF16, &[100], true);
    mixed.run(&Update { zero_grad: true, ..mixed.args(&SCALARS) });
    let Device::Null(null) = &device else { unreachable!() };
    let bytes: Vec<u64> = null.take_launches().iter().map(|l| l.bytes).collect();
    assert_eq!(bytes, [2800, 100 * (2 + 2 * 2 + 3 * 8)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_stack_of_layers_matches_the_reference(
        layers in 1usize..6, per_layer in 1usize..3000, seed: u32, step in 1u64..100_000, threads in 1usize..4,
    ) {
        let device = Device::cpu_with_threads(threads);
        let case = Case::new(&device, DType::BF16, DType::F32, &[layers, per_layer], true);
        let (before, grad) = (case.state(), case.grad.read_f32().unwrap());
        let s = Scalars { step, ..SCALARS };
        case.run(&Update { rounding: Rounding::Stochastic { seed }, layers, ..case.args(&s) });
        let want = single(&s, &before, &grad);
        prop_assert!(case.state() == want);
        let got = case.param.read_f32().unwrap();
        for i in 0..layers * per_layer {
            prop_assert_eq!(got[i], reference::stochastic(want[0][i], i % per_layer, i / per_layer, seed).to_f32());
        }
    }
}
