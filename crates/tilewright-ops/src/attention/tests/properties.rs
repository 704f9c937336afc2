//! What holds for any input: gradients are differences, the future is unseen, the bits are fixed.

use super::*;
use crate::testing::{FLOATS, devices, portable_gpus};
use proptest::prelude::*;

#[test]
fn the_reference_gradient_is_the_difference_quotient() {
    for s in [sizes(1, 1, 1, 3), sizes(1, 2, 4, 3), sizes(2, 1, 5, 2)] {
        let mut rng = Random::new(11);
        let n = s.b * s.t * s.c();
        let normals = |rng: &mut Random, n| rng.normals(n, 1.0).into_iter().map(f64::from).collect::<Vec<f64>>();
        let (qkv, dout) = (normals(&mut rng, 3 * n), normals(&mut rng, n));
        let loss = |qkv: &[f64]| reference::forward(s, qkv).0.iter().zip(&dout).map(|(o, d)| o * d).sum::<f64>();
        let gradient = reference::backward(s, &qkv, &dout);
        for i in 0..3 * n {
            let h = 1e-5;
            let (mut up, mut down) = (qkv.clone(), qkv.clone());
            up[i] += h;
            down[i] -= h;
            let difference = (loss(&up) - loss(&down)) / (2.0 * h);
            assert!((difference - gradient[i]).abs() < 1e-8, "{s:?}[{i}]: {difference} against {}", gradient[i]);
        }
    }
}

#[test]
fn rows_of_equal_scores_average_the_values() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, sizes(1, 2, 40, 8), 1.0, 4);
        let mut qkv = call.qkv.read_f32().unwrap();
        // All queries zero: every visible key has the same weight.
        qkv.chunks_mut(48).for_each(|row| row[..16].fill(0.0));
        call.qkv.write_f32(&qkv).unwrap();
        call.forward();
        let (out, lse) = (call.out.read_f32().unwrap(), call.lse.read_f32().unwrap());
        for t in 0..40 {
            for c in 0..16 {
                let mean = (0..=t).map(|j| f64::from(qkv[j * 48 + 32 + c])).sum::<f64>() / (t + 1) as f64;
                assert!((f64::from(out[t * 16 + c]) - mean).abs() < 1e-5);
            }
            assert!((lse[t] - ((t + 1) as f32).ln()).abs() < 1e-5);
        }
    }
}

#[test]
fn a_changed_future_token_changes_nothing_before_it() {
    for device in devices() {
        for s in [sizes(1, 2, 30, 16), sizes(1, 1, 200, 8)] {
            let at = s.t * 2 / 3;
            let outputs = [false, true].map(|changed| {
                let call = Call::new(&device, DType::F32, s, 1.0, 6);
                let mut qkv = call.qkv.read_f32().unwrap();
                if changed {
                    qkv[at * 3 * s.c()..].iter_mut().for_each(|x| *x = *x * -3.0 + 1.0);
                }
                call.qkv.write_f32(&qkv).unwrap();
                call.forward();
                (call.out.read_f32().unwrap(), call.lse.read_f32().unwrap())
            });
            let [(a, lse_a), (b, lse_b)] = &outputs;
            assert_eq!(a[..at * s.c()], b[..at * s.c()], "outputs before the change");
            assert_ne!(a[at * s.c()..], b[at * s.c()..], "the change itself is seen");
            for h in 0..s.heads {
                assert_eq!(lse_a[h * s.t..][..at], lse_b[h * s.t..][..at]);
            }
        }
    }
}

#[test]
fn scores_that_are_not_numbers_in_the_future_stay_there() {
    for device in devices() {
        for t in [20, 100] {
            let call = Call::new(&device, DType::F32, sizes(1, 1, t, 16), 1.0, 6);
            let mut qkv = call.qkv.read_f32().unwrap();
            // Queries and keys; the values stay numbers, since a probability of zero is multiplied with them.
            qkv[(t - 2) * 48..].chunks_mut(48).for_each(|row| row[..32].fill(f32::NAN));
            call.qkv.write_f32(&qkv).unwrap();
            call.forward();
            let out = call.out.read_f32().unwrap();
            assert!(out[..(t - 2) * 16].iter().all(|x| x.is_finite()), "t = {t} on {}", device.name());
            assert!(out[(t - 2) * 16..].iter().all(|x| x.is_nan()));
        }
    }
}

/// NaN in a whole third of the given tokens: 0 queries, 1 keys, 2 values.
fn spoil(call: &Call, third: usize, tokens: std::ops::Range<usize>) {
    let (mut qkv, c) = (call.qkv.read_f32().unwrap(), call.sizes.c());
    for token in tokens {
        qkv[(token * 3 + third) * c..][..c].fill(f32::NAN);
    }
    call.qkv.write_f32(&qkv).unwrap();
}

// Other devices promise it of scores alone, and multiply what else is hidden by zero.
#[test]
fn on_portable_gpus_keys_and_values_that_are_not_numbers_reach_no_query_before_them() {
    for device in portable_gpus() {
        for dtype in FLOATS {
            for (t, third) in [(20, 1), (20, 2), (100, 1), (100, 2)] {
                let call = Call::new(&device, dtype, sizes(1, 2, t, 16), 1.0, 6);
                spoil(&call, third, t - 2..t);
                call.forward();
                call.backward();
                let name = format!("third {third}, {}", call.name());
                let numbers = |row: &[f32]| row.iter().all(|x| x.is_finite());
                for (i, row) in call.out.read_f32().unwrap().chunks(32).enumerate() {
                    assert_eq!(numbers(row), i < t - 2, "output {i}, {name}");
                }
                // What the last queries see reaches gradients of all keys and values, which they see too.
                for (i, row) in call.dqkv.read_f32().unwrap().chunks(96).enumerate() {
                    assert_eq!(numbers(&row[..32]), i < t - 2, "gradient of query {i}, {name}");
                }
            }
        }
    }
}

#[test]
fn on_portable_gpus_queries_that_are_not_numbers_reach_no_gradient_behind_them() {
    for device in portable_gpus() {
        for dtype in FLOATS {
            for t in [20, 100] {
                let call = Call::new(&device, dtype, sizes(1, 2, t, 16), 1.0, 6);
                spoil(&call, 0, 0..2);
                let mut dout = call.dout.read_f32().unwrap();
                dout[..2 * 32].fill(f32::NAN);
                call.dout.write_f32(&dout).unwrap();
                call.forward();
                call.backward();
                for (i, row) in call.dqkv.read_f32().unwrap().chunks(96).enumerate() {
                    for (third, x) in row.chunks(32).enumerate() {
                        let numbers = x.iter().all(|x| x.is_finite());
                        assert_eq!(numbers, i >= 2, "third {third} of token {i}, {}", call.name());
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_of_keys_that_no_loss_depends_on_are_zero() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, sizes(1, 2, 90, 16), 1.0, 6);
        // The loss looks at the first 50 tokens only.
        let mut dout = call.dout.read_f32().unwrap();
        dout[50 * 32..].fill(0.0);
        call.dout.write_f32(&dout).unwrap();
        call.forward();
        call.backward();
        let dqkv = call.dqkv.read_f32().unwrap();
        assert!(dqkv[50 * 96..].iter().all(|&x| x == 0.0));
        assert!(dqkv[..96].iter().any(|&x| x != 0.0));
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads_or_the_run() {
    // The second shape has few heads and many blocks: its work is dealt in shares.
    for s in [sizes(2, 3, 70, 16), sizes(1, 2, 600, 16), sizes(1, 1, 333, 80)] {
        for dtype in FLOATS {
            let results: Vec<_> = [1, 2, 3, 7, 2]
                .into_iter()
                .map(|threads| {
                    let call = Call::new(&Device::cpu_with_threads(threads), dtype, s, 1.0, 8);
                    call.forward();
                    call.backward();
                    let first = [bits(&call.out), bits(&call.lse), bits(&call.dqkv)];
                    call.forward();
                    call.backward();
                    assert_eq!(first, [bits(&call.out), bits(&call.lse), bits(&call.dqkv)], "a second run");
                    first
                })
                .collect();
            assert!(results.iter().all(|r| r == &results[0]), "{s:?} in {dtype}");
        }
    }
}

#[test]
fn a_second_run_gives_the_same_bits_on_every_device() {
    for device in devices() {
        for dtype in FLOATS {
            for s in [sizes(2, 3, 70, 16), sizes(1, 2, 600, 64), sizes(2, 1, 257, 128)] {
                let runs = [0, 1].map(|_| {
                    let call = Call::new(&device, dtype, s, 1.0, 9);
                    call.forward();
                    call.backward();
                    [bits(&call.out), bits(&call.lse), bits(&call.dqkv)]
                });
                assert!(runs[0] == runs[1], "{s:?} {dtype} on {}", device.name());
            }
        }
    }
}

#[test]
fn scores_of_ten_thousand_stay_finite() {
    for device in devices() {
        for std in [30.0, 60.0, 120.0] {
            let call = Call::new(&device, DType::F32, sizes(1, 2, 150, 16), std, 12);
            call.forward();
            let (_, want) = reference::forward(call.sizes, &call.exact_qkv);
            assert!(want.iter().any(|x| x.abs() > 1e3), "the case is as large as its name says");
            assert_close("lse", &call.lse, &want, 0.0, 1e-5);
            call.backward();
            for t in [&call.out, &call.dqkv] {
                assert!(t.read_f32().unwrap().iter().all(|x| x.is_finite()), "std {std} on {}", device.name());
            }
        }
    }
}

#[test]
fn a_rising_maximum_in_a_later_block_rescales_what_was_summed() {
    // Keys grow along the sequence, so every block of keys brings a new maximum.
    for device in devices() {
        let mut call = Call::new(&device, DType::F32, sizes(1, 1, 400, 8), 0.3, 13);
        let mut qkv = call.qkv.read_f32().unwrap();
        for (t, row) in qkv.chunks_mut(24).enumerate() {
            row[..8].fill(1.0);
            row[8..16].iter_mut().for_each(|k| *k += t as f32 * 0.02);
        }
        call.qkv.write_f32(&qkv).unwrap();
        call.exact_qkv = qkv.into_iter().map(f64::from).collect();
        call.check_forward(3e-6, 1e-5);
        call.check_backward(2e-6, 1e-5);
    }
}

#[test]
fn production_length_in_f32_equals_the_reference() {
    for device in crate::testing::production_devices() {
        let call = Call::new(&device, DType::F32, sizes(1, 2, 1024, 64), 1.0, 14);
        call.check_forward(1e-6, 1e-5);
        call.check_backward(2e-6, 1e-5);
    }
}

#[test]
fn production_length_in_sixteen_bits_equals_the_reference() {
    for device in crate::testing::production_devices() {
        for dtype in [DType::F16, DType::BF16] {
            let (atol, rtol) = tolerance(dtype);
            let call = Call::new(&device, dtype, sizes(1, 1, 1024, 64), 1.0, 15);
            call.check_forward(atol, rtol);
            call.check_backward(atol, rtol);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_equals_the_reference(b in 1usize..3, heads in 1usize..4, t in 1usize..150, head in 3usize..70, seed: u64) {
        for device in devices() {
            let call = Call::new(&device, DType::F32, sizes(b, heads, t, head), 1.0, seed);
            call.check_forward(2e-6, 1e-5);
            call.check_backward(2e-6, 1e-5);
        }
    }
}
