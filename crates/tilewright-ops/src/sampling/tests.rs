use proptest::prelude::*;

use super::*;
use crate::testing::{FLOATS, Random, devices, random};

fn draw(logits: &Tensor, vocab: usize, temperature: f32, top_k: usize, coins: &[f32]) -> Vec<i32> {
    let device = logits.device();
    let out = Tensor::from_i32(device, &[coins.len()], &vec![-7; coins.len()]).unwrap();
    forward(device, &Forward { logits, vocab, temperature, top_k, coins, out: &out }).unwrap();
    out.read_i32().unwrap()
}

fn row(device: &Device, values: &[f32]) -> Tensor {
    Tensor::from_f32(device, DType::F32, &[1, values.len()], values).unwrap()
}

/// Draws with many coins and checks each against the reference's cumulative probabilities.
fn check(device: &Device, dtype: DType, rows: usize, vocab: usize, width: usize, temperature: f32, top_k: usize) {
    let mut rng = Random::new((vocab + rows) as u64);
    let (logits, exact) = random(device, dtype, &[rows, width], 3.0, &mut rng);
    for _ in 0..4 {
        let coins: Vec<f32> = (0..rows).map(|_| (rng.bits() >> 8) as f32 / 16_777_216.0).collect();
        for (r, drawn) in draw(&logits, vocab, temperature, top_k, &coins).into_iter().enumerate() {
            let drawn = usize::try_from(drawn).unwrap();
            let logits = &exact[r * width..(r + 1) * width];
            let p = reference::probabilities(logits, vocab, f64::from(temperature), top_k);
            assert!(p[drawn] > 0.0, "row {r}: {drawn} cannot be drawn");
            let ((low, high), coin) = (reference::interval(&p, drawn), f64::from(coins[r]));
            // The cumulative sum is f32.
            let slack = 1e-6 + 2e-8 * vocab as f64;
            assert!(low - slack <= coin && coin < high + slack, "row {r}: {coin} is not in {low}..{high} of {drawn}");
        }
    }
}

#[test]
fn draws_agree_with_the_cumulative_probabilities() {
    for device in devices() {
        for dtype in FLOATS {
            for (rows, vocab, width) in
                [(1, 1, 1), (2, 2, 3), (3, 7, 8), (5, 29, 37), (2, 511, 512), (4, 513, 513), (2, 1300, 1408)]
            {
                for temperature in [1.0, 0.7, 2.5] {
                    check(&device, dtype, rows, vocab, width, temperature, 0);
                }
            }
        }
    }
}

#[test]
fn a_vocabulary_of_gpt2() {
    check(&Device::cpu_with_threads(2), DType::F32, 4, 50_257, 50_304, 1.0, 0);
    check(&Device::cpu_with_threads(2), DType::BF16, 4, 50_257, 50_304, 0.8, 40);
}

#[test]
fn top_k_draws_agree_with_the_cumulative_probabilities() {
    for device in devices() {
        for top_k in [1, 2, 3, 28, 29, 30, 1000] {
            check(&device, DType::F32, 3, 29, 37, 1.0, top_k);
            // Many equal logits in this storage.
            check(&device, DType::BF16, 3, 700, 704, 1.0, top_k);
        }
    }
}

#[test]
fn the_first_index_above_the_coin_is_drawn() {
    for device in devices() {
        // Four equal logits: quarters, exact in f32.
        let logits = row(&device, &[2.0; 4]);
        for (coin, want) in [(0.0, 0), (0.249, 0), (0.25, 1), (0.499, 1), (0.5, 2), (0.75, 3), (0.999_999, 3)] {
            assert_eq!(draw(&logits, 4, 1.0, 0, &[coin]), [want], "coin {coin}");
        }
    }
}

#[test]
fn defect_9_logits_above_88_do_not_overflow() {
    for device in devices() {
        for shift in [89.0f32, 1000.0, 1e6, -1000.0] {
            let logits = row(&device, &[shift, shift + 1.0, shift]);
            for (coin, want) in [(0.1, 0), (0.5, 1), (0.9, 2)] {
                assert_eq!(draw(&logits, 3, 1.0, 0, &[coin]), [want], "shift {shift}, coin {coin}");
            }
        }
        let far_apart = row(&device, &[-3e38, 3e38, 0.0]);
        assert_eq!(draw(&far_apart, 3, 1.0, 0, &[0.5]), [1]);
    }
}

#[test]
fn the_largest_coin_never_leaves_the_vocabulary() {
    let coin = 1.0f32.next_down();
    for device in devices() {
        for dtype in FLOATS {
            let (logits, _) = random(&device, dtype, &[1, 3000], 0.1, &mut Random::new(1));
            let drawn = draw(&logits, 2990, 1.0, 0, &[coin])[0];
            assert!((2980..2990).contains(&drawn), "{drawn}");
        }
    }
}

#[test]
fn where_rounding_leaves_the_sum_below_the_coin_the_last_possible_index_is_drawn() {
    let coin = 1.0f32.next_down();
    let device = Device::cpu_with_threads(1);
    let short: Vec<usize> = (3..60).filter(|&n| (0..n).fold(0.0f32, |sum, _| sum + 1.0 / n as f32) <= coin).collect();
    assert!(!short.is_empty(), "no such case among these");
    for n in short {
        // Behind n equal logits: one that top_k forbids, then one that is masked.
        let (forbidden, masked) =
            ([vec![1.0; n], vec![-5.0]].concat(), [vec![1.0; n], vec![f32::NEG_INFINITY]].concat());
        assert_eq!(draw(&row(&device, &forbidden), n + 1, 1.0, n, &[coin]), [n as i32 - 1]);
        assert_eq!(draw(&row(&device, &masked), n + 1, 1.0, 0, &[coin]), [n as i32 - 1]);
    }
}

#[test]
fn padded_columns_are_never_drawn() {
    for device in devices() {
        let mut values = vec![0.0; 37];
        values[29..].fill(1e9);
        values[30] = f32::NAN;
        let logits = row(&device, &values);
        for temperature in [0.0, 1.0] {
            for top_k in [0, 1, 5] {
                for coin in [0.0, 0.5, 1.0f32.next_down()] {
                    assert!(draw(&logits, 29, temperature, top_k, &[coin])[0] < 29);
                }
            }
        }
    }
}

#[test]
fn temperature_zero_takes_the_first_of_the_largest() {
    for device in devices() {
        for dtype in FLOATS {
            let values = [1.0, 4.0, -2.0, 4.0, 3.0];
            let logits = Tensor::from_f32(&device, dtype, &[1, 5], &values).unwrap();
            for coin in [0.0, 0.99] {
                assert_eq!(draw(&logits, 5, 0.0, 0, &[coin]), [1]);
            }
        }
    }
}

#[test]
fn top_k_of_one_is_the_largest_for_any_coin() {
    let device = Device::cpu_with_threads(1);
    let logits = row(&device, &[-1.0, -0.5, -0.5, -3.0]);
    for coin in [0.0, 0.5, 0.999] {
        assert_eq!(draw(&logits, 4, 1.0, 1, &[coin]), [1]);
    }
}

#[test]
fn top_k_keeps_exactly_k_and_the_first_of_equals() {
    let device = Device::cpu_with_threads(1);
    let logits = row(&device, &[0.0, 1.0, 1.0, -0.0, 1.0, 0.0]);
    let drawable = |k| {
        let mut all: Vec<i32> = (0..1000).map(|c| draw(&logits, 6, 1.0, k, &[c as f32 / 1000.0])[0]).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    assert_eq!(drawable(2), [1, 2]);
    assert_eq!(drawable(3), [1, 2, 4]);
    assert_eq!(drawable(4), [0, 1, 2, 4]);
    assert_eq!(drawable(5), [0, 1, 2, 3, 4], "-0 equals 0");
    assert_eq!(drawable(6), [0, 1, 2, 3, 4, 5]);
}

#[test]
fn a_tiny_temperature_is_nearly_the_largest_and_never_nan() {
    for device in devices() {
        let logits = row(&device, &[0.1, 0.3, 0.2]);
        for temperature in [1e-3, 1e-30, f32::MIN_POSITIVE, f32::from_bits(1)] {
            assert_eq!(draw(&logits, 3, temperature, 0, &[0.5]), [1], "{temperature:e}");
        }
    }
}

#[test]
fn masked_logits_of_minus_infinity_are_never_drawn() {
    for device in devices() {
        let logits = row(&device, &[f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.0]);
        for (coin, want) in [(0.0, 1), (0.4, 1), (0.6, 3)] {
            assert_eq!(draw(&logits, 4, 1.0, 0, &[coin]), [want]);
            assert_eq!(draw(&logits, 4, 1.0, 3, &[coin]), [want]);
        }
    }
}

#[test]
fn frequencies_follow_the_probabilities() {
    let device = Device::cpu_with_threads(2);
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let n = 20_000;
    let coins: Vec<f32> = (0..n).map(|i| i as f32 / n as f32).collect();
    let all = Tensor::from_f32(&device, DType::F32, &[n, 4], &logits.repeat(n)).unwrap();
    let p = reference::probabilities(&logits.map(f64::from), 4, 1.0, 0);
    let drawn = draw(&all, 4, 1.0, 0, &coins);
    for (token, p) in p.iter().enumerate() {
        let count = drawn.iter().filter(|&&t| t == token as i32).count();
        assert!((count as f64 / n as f64 - p).abs() < 2e-4, "token {token}: {count} of {n}, probability {p}");
    }
}

#[test]
fn rows_without_a_distribution_are_refused_and_nothing_is_drawn() {
    for device in devices() {
        for (bad, words) in
            [(f32::NAN, "hold a NaN"), (f32::INFINITY, "maximum inf"), (f32::NEG_INFINITY, "maximum -inf")]
        {
            for column in [0, 17, 39] {
                let mut values = vec![if bad == f32::NEG_INFINITY { bad } else { 0.5 }; 40];
                values[column] = bad;
                let logits =
                    Tensor::from_f32(&device, DType::F32, &[2, 40], &[vec![0.0; 40], values].concat()).unwrap();
                let out = Tensor::from_i32(&device, &[2], &[-7; 2]).unwrap();
                let args =
                    Forward { logits: &logits, vocab: 40, temperature: 1.0, top_k: 0, coins: &[0.5; 2], out: &out };
                let message = forward(&device, &args).unwrap_err().to_string();
                assert!(message.contains("sampling.forward") && message.contains("row 1"), "{message}");
                assert!(message.contains(words), "{message}");
                assert_eq!(out.read_i32().unwrap(), [-7; 2]);
            }
        }
    }
}

#[test]
fn the_draw_depends_on_neither_threads_nor_instruction_set() {
    let coins: Vec<f32> = (0..16).map(|i| i as f32 / 16.0).collect();
    let run = |device: &Device| {
        let (logits, _) = random(device, DType::F32, &[16, 5003], 1.0, &mut Random::new(6));
        [draw(&logits, 5003, 0.9, 0, &coins), draw(&logits, 5003, 0.9, 50, &coins)]
    };
    let first = run(&Device::cpu_with_threads(1));
    for device in devices() {
        assert_eq!(run(&device), first, "{device:?}");
    }
}

#[test]
fn bug_8_unaligned_logits_are_read_right() {
    for device in devices() {
        for dtype in FLOATS {
            let (logits, _) = random(&device, dtype, &[3, 101], 1.0, &mut Random::new(2));
            let moved = crate::testing::unaligned(&logits);
            let coins = [0.2, 0.5, 0.8];
            assert_eq!(draw(&logits, 97, 1.0, 0, &coins), draw(&moved, 97, 1.0, 0, &coins));
        }
    }
}

#[test]
fn bug_20_no_rows_is_no_work() {
    for device in devices() {
        let logits = Tensor::zeros(&device, DType::F32, &[0, 5]).unwrap();
        assert!(draw(&logits, 5, 1.0, 0, &[]).is_empty());
    }
}

#[test]
fn refuses_what_the_contract_does_not_allow() {
    let device = Device::cpu_with_threads(1);
    let logits = Tensor::zeros(&device, DType::F32, &[2, 8]).unwrap();
    let out = Tensor::zeros(&device, DType::I32, &[2]).unwrap();
    let good = || Forward { logits: &logits, vocab: 7, temperature: 1.0, top_k: 0, coins: &[0.1, 0.2], out: &out };
    let fails = |args: Forward<'_>, words: &str| {
        let message = forward(&device, &args).unwrap_err().to_string();
        assert!(message.contains("sampling.forward") && message.contains(words), "{message}");
    };
    forward(&device, &good()).unwrap();
    fails(Forward { vocab: 0, ..good() }, "`vocab` is 0");
    fails(Forward { vocab: 9, ..good() }, "1..=8");
    fails(Forward { temperature: -1.0, ..good() }, "`temperature` is -1");
    fails(Forward { temperature: f32::NAN, ..good() }, "`temperature` is NaN");
    fails(Forward { coins: &[0.1], ..good() }, "`coins` holds 1 numbers for 2 rows");
    fails(Forward { coins: &[0.1, 1.0], ..good() }, "[0, 1)");
    fails(Forward { coins: &[-0.1, 0.5], ..good() }, "[0, 1)");
    let short = Tensor::zeros(&device, DType::I32, &[3]).unwrap();
    fails(Forward { out: &short, ..good() }, "`out` has shape (3)");
    let floats = Tensor::zeros(&device, DType::F32, &[2]).unwrap();
    fails(Forward { out: &floats, ..good() }, "`out` is stored as f32");
    fails(Forward { logits: &out, ..good() }, "`logits` is stored as i32");
    let elsewhere = Tensor::zeros(&Device::cpu_with_threads(1), DType::F32, &[2, 8]).unwrap();
    fails(Forward { logits: &elsewhere, ..good() }, "`logits` lives on");
    let inside = logits.reinterpret(0, DType::I32, &[2]).unwrap();
    fails(Forward { out: &inside, ..good() }, "overlaps");
}

#[test]
fn the_null_device_records_one_launch() {
    let device = Device::null(1);
    draw(&Tensor::zeros(&device, DType::F32, &[2, 8]).unwrap(), 7, 1.0, 0, &[0.0, 0.0]);
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    assert_eq!((launches.len(), launches[0].op, launches[0].bytes), (1, "sampling.forward", 64 + 8));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_row_agrees_with_the_reference(
        rows in 1usize..4, vocab in 1usize..1500, padding in 0usize..20, top_k in 0usize..60, dtype in 0usize..3,
    ) {
        check(&Device::cpu_with_threads(2), FLOATS[dtype], rows, vocab, vocab + padding, 1.3, top_k);
    }
}
