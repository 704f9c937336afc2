//! The same bits for a row in any batch, at any place, with any number of threads.

use super::*;
use crate::testing::is_gpu;

fn bits(t: &Tensor) -> Vec<u32> {
    t.read_f32().unwrap().into_iter().map(f32::to_bits).collect()
}

/// Runs all rows of a case at once and then every count of `counts`, from a start that moves; each row must have the same bits.
fn invariant(device: &Device, (n, k): (usize, usize), precision: DType, activation: Activation, counts: &[usize]) {
    let most = 1040;
    let case = Case::new(device, (most, n, k), DType::F32, precision, activation, true);
    let columns = case.columns();
    let out = poisoned(device, DType::F32, &[most, columns]);
    case.run(device, &out);
    let all = bits(&out);
    for &m in counts {
        let first = (m * 13) % (most - m + 1);
        let x = case.x.0.slice(first * k, &[m, k]).unwrap();
        let residual = case.residual.as_ref().unwrap().0.slice(first * columns, &[m, columns]).unwrap();
        let out = poisoned(device, DType::F32, &[m, columns]);
        case.run_on(device, &x, Some(&residual), &out).unwrap();
        let same = bits(&out) == all[first * columns..(first + m) * columns];
        assert!(same, "{} {precision} {activation:?} N={n} K={k}: {m} rows from {first} on", device.name());
    }
}

fn every_count_of_rows(precision: DType) {
    let counts: Vec<usize> = (1..=70).chain([128, 131, 520, 1039, 1040]).collect();
    // A GPU's library chooses another order of sums for another number of rows.
    for device in devices().into_iter().filter(|d| !is_gpu(d)) {
        invariant(&device, (37, 131), precision, Activation::None, &counts);
        invariant(&device, (66, 43), precision, Activation::Geglu, &counts);
    }
}

#[test]
fn every_count_of_rows_gives_the_same_bits_in_f32() {
    every_count_of_rows(DType::F32);
}

#[test]
fn every_count_of_rows_gives_the_same_bits_in_bf16() {
    every_count_of_rows(DType::BF16);
}

#[test]
fn every_count_of_rows_gives_the_same_bits_in_f16() {
    every_count_of_rows(DType::F16);
}

#[test]
fn rows_keep_their_bits_over_several_blocks_of_k() {
    for device in devices().into_iter().filter(|d| !is_gpu(d)) {
        for precision in FLOATS {
            for (n, k) in [(33, 1153), (5, 2624)] {
                invariant(&device, (n, k), precision, Activation::None, &[1, 2, 5, 13, 14, 15, 29, 65, 300]);
            }
        }
    }
}

#[test]
fn rows_of_a_production_size_keep_their_bits() {
    let device = Device::cpu_with_threads(2);
    for precision in FLOATS {
        invariant(&device, (768, 768), precision, Activation::None, &[1, 5, 16, 64, 65, 66, 520, 1040]);
        invariant(&device, (2304, 768), precision, Activation::Geglu, &[1, 65, 130]);
    }
}

#[test]
fn rows_too_long_for_the_packing_buffer_keep_their_bits() {
    let device = Device::cpu_with_threads(2);
    for precision in FLOATS {
        let (k, n) = (30_011, 3);
        let case = Case::new(&device, (70, n, k), DType::F32, precision, Activation::None, false);
        let out = poisoned(&device, DType::F32, &[70, n]);
        case.run(&device, &out);
        let one = poisoned(&device, DType::F32, &[1, n]);
        for row in [0, 1, 33, 69] {
            case.run_on(&device, &case.x.0.slice(row * k, &[1, k]).unwrap(), None, &one).unwrap();
            assert_eq!(bits(&one), bits(&out)[row * n..(row + 1) * n], "{precision} row {row}");
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    for precision in FLOATS {
        for (shape, activation) in [
            ((65, 1030, 520), Activation::Geglu),
            ((700, 97, 257), Activation::None),
            ((3, 600, 1100), Activation::Relu),
        ] {
            let mut first: Option<Vec<u32>> = None;
            for threads in [1, 2, 3, 5, 16] {
                let device = Device::cpu_with_threads(threads);
                let case = Case::new(&device, shape, DType::F16, precision, activation, true);
                let out = poisoned(&device, DType::F32, &[shape.0, case.columns()]);
                case.run(&device, &out);
                let got = bits(&out);
                assert!(*first.get_or_insert_with(|| got.clone()) == got, "{precision} {shape:?}: {threads} threads");
            }
        }
    }
}

#[test]
fn a_call_does_not_see_rows_that_an_earlier_call_packed() {
    // Same shapes, other numbers, one after the other: what a thread keeps must not outlive the call. With one thread it surely runs in both.
    for threads in [1, 3] {
        let device = Device::cpu_with_threads(threads);
        let case = Case::new(&device, (65, 700, 300), DType::F32, DType::F32, Activation::None, false);
        let (first, second) = (poisoned(&device, DType::F32, &[65, 700]), poisoned(&device, DType::F32, &[65, 700]));
        case.run(&device, &first);
        let negated: Vec<f32> = case.x.0.read_f32().unwrap().into_iter().map(|v| -v).collect();
        case.x.0.write_f32(&negated).unwrap();
        case.run(&device, &second);
        let (first, second) = (first.read_f32().unwrap(), second.read_f32().unwrap());
        assert!(first.iter().zip(&second).all(|(a, b)| *a == -*b), "{threads} threads");
    }
}

#[test]
fn a_training_product_between_two_calls_changes_nothing() {
    // Both use the packing buffers of the device.
    let device = Device::cpu_with_threads(2);
    let case = Case::new(&device, (65, 700, 300), DType::F32, DType::F32, Activation::None, false);
    let (first, second) = (poisoned(&device, DType::F32, &[65, 700]), poisoned(&device, DType::F32, &[65, 700]));
    case.run(&device, &first);
    let (x, weight, out) = (&case.x.0, &case.source.0, poisoned(&device, DType::F32, &[65, 700]));
    let args = crate::matmul::Forward { x, weight, bias: None, gelu: None, pre_gelu: None, out: &out };
    crate::matmul::forward(&device, &args).unwrap();
    case.run(&device, &second);
    assert_eq!(bits(&first), bits(&second));
}
