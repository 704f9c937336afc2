use proptest::prelude::*;

use super::*;
use crate::testing::{Random, assert_close, devices, random, unaligned};

const THETA: f64 = 160_000.0;

/// What an f32 angle is off by for each position that it counts: three roundings of half a unit, seen through channels of up to 5.
const ROUNDING: f64 = 3.0 * 6e-8 * 5.0;

/// `(N, heads turned, head size, columns behind them)`.
const SHAPES: [(usize, usize, usize, usize); 12] = [
    (1, 1, 2, 0),
    (3, 2, 4, 3),
    (5, 3, 6, 1),
    (7, 2, 10, 0),
    (17, 5, 14, 33),
    (9, 4, 32, 64),
    (65, 2, 34, 0),
    (13, 3, 66, 7),
    (65, 24, 64, 768),
    (4, 3, 256, 256),
    (0, 2, 8, 8),
    (6, 0, 8, 8),
];

struct Case {
    x: Tensor,
    exact: Vec<f64>,
    heads: usize,
    ids: Vec<i32>,
    positions: Tensor,
    table: Tensor,
}

impl Case {
    /// Positions restart at 0 in the middle, and the last one is the table's last.
    fn new(device: &Device, (n, heads, head, rest): (usize, usize, usize, usize), longest: usize, theta: f64) -> Self {
        let mut rng = Random::new((n * heads + head) as u64);
        let (x, exact) = random(device, DType::F32, &[n, heads * head + rest], 1.0, &mut rng);
        let mut ids: Vec<i32> = (0..n).map(|i| (if i < n / 2 { i } else { i - n / 2 } % longest) as i32).collect();
        if let Some(last) = ids.last_mut() {
            *last = longest as i32 - 1;
        }
        let positions = Tensor::from_i32(device, &[n], &ids).unwrap();
        Case { x, exact, heads, ids, positions, table: table(device, theta, longest, head).unwrap() }
    }

    fn args(&self) -> Forward<'_> {
        Forward { x: &self.x, heads: self.heads, positions: &self.positions, table: &self.table }
    }

    fn check(&self, theta: f64, atol: f64) {
        forward(self.x.device(), &self.args()).unwrap();
        let mut want = self.exact.clone();
        let (width, head) = (self.x.shape().last(), self.table.shape().last());
        reference::forward(&mut want, width, self.heads, head, &self.ids, theta);
        assert_close("x", &self.x, &want, atol, 1e-6);
    }
}

#[test]
fn rows_turn_as_the_reference_says() {
    for device in devices() {
        for shape in SHAPES {
            Case::new(&device, shape, 70, THETA).check(THETA, ROUNDING * 70.0);
        }
    }
}

#[test]
fn both_published_thetas_are_told_apart() {
    // The frequencies of the two differ by a factor of up to 16.
    let device = Device::cpu_with_threads(1);
    for theta in [10_000.0, 160_000.0] {
        Case::new(&device, (40, 2, 64, 0), 40, theta).check(theta, ROUNDING * 40.0);
        let wrong = Case::new(&device, (40, 2, 64, 0), 40, 170_000.0 - theta);
        forward(&device, &wrong.args()).unwrap();
        let right = Case::new(&device, (40, 2, 64, 0), 40, theta);
        forward(&device, &right.args()).unwrap();
        let (a, b) = (wrong.x.read_f32().unwrap(), right.x.read_f32().unwrap());
        assert!(a.iter().zip(&b).any(|(a, b)| (a - b).abs() > 0.5));
    }
}

#[test]
fn long_positions_stay_within_the_rounding_of_an_f32_angle() {
    for device in devices() {
        Case::new(&device, (3, 2, 64, 64), 8192, 10_000.0).check(10_000.0, ROUNDING * 8192.0);
    }
}

#[test]
fn the_table_holds_cosines_then_sines_of_f32_angles() {
    let t = table(&Device::cpu_with_threads(1), 10_000.0, 300, 6).unwrap().read_f32().unwrap();
    assert_eq!(t[..6], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]);
    let row = &t[299 * 6..];
    for (i, exponent) in [0.0f32, 2.0 / 6.0, 4.0 / 6.0].into_iter().enumerate() {
        let frequency = 1.0f32 / 10_000f64.powf(f64::from(exponent)) as f32;
        let angle = f64::from(299.0f32 * frequency);
        assert_eq!((row[i], row[i + 3]), (angle.cos() as f32, angle.sin() as f32));
        // And those are the plain formula's to the rounding of the angle.
        let plain = 299.0 * 10_000f64.powf(-(i as f64) / 3.0);
        assert!((f64::from(row[i]) - plain.cos()).abs() < 3e-5 && (f64::from(row[i + 3]) - plain.sin()).abs() < 3e-5);
    }
}

#[test]
fn position_zero_turns_nothing_and_lengths_are_kept() {
    for device in devices() {
        let case = Case::new(&device, (9, 3, 32, 5), 50, 10_000.0);
        forward(&device, &case.args()).unwrap();
        let x = case.x.read_f32().unwrap();
        assert!(x[..101].iter().zip(&case.exact).all(|(a, b)| f64::from(*a) == *b), "position 0");
        for (row, before) in x.chunks(101).zip(case.exact.chunks(101)) {
            for h in 0..3 {
                let square = |v: &mut dyn Iterator<Item = f64>| v.map(|x| x * x).sum::<f64>();
                let now = square(&mut row[h * 32..h * 32 + 32].iter().map(|&x| f64::from(x)));
                let then = square(&mut before[h * 32..h * 32 + 32].iter().copied());
                assert!((now / then - 1.0).abs() < 1e-5);
            }
        }
    }
}

#[test]
fn channels_pair_across_the_halves_not_with_their_neighbour() {
    let device = Device::cpu_with_threads(1);
    let table = table(&device, 10_000.0, 2, 8).unwrap();
    let x = Tensor::from_f32(&device, DType::F32, &[1, 8], &[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
    let positions = Tensor::from_i32(&device, &[1], &[1]).unwrap();
    forward(&device, &Forward { x: &x, heads: 1, positions: &positions, table: &table }).unwrap();
    let got = x.read_f32().unwrap();
    assert_eq!((got[0], got[4]), (1f64.cos() as f32, 1f64.sin() as f32));
    assert!([1, 2, 3, 5, 6, 7].iter().all(|&i| got[i] == 0.0), "{got:?}");
}

#[test]
fn scores_depend_on_the_distance_alone() {
    let device = Device::cpu_with_threads(1);
    let dot = |p: i32, q: i32| {
        let mut rng = Random::new(3);
        let x = random(&device, DType::F32, &[2, 64], 1.0, &mut rng).0;
        let positions = Tensor::from_i32(&device, &[2], &[p, q]).unwrap();
        let table = table(&device, 10_000.0, 128, 64).unwrap();
        forward(&device, &Forward { x: &x, heads: 1, positions: &positions, table: &table }).unwrap();
        let x = x.read_f32().unwrap();
        (0..64).map(|d| x[d] * x[64 + d]).sum::<f32>()
    };
    assert!((dot(3, 10) - dot(100, 107)).abs() < 1e-4);
    assert!((dot(3, 10) - dot(10, 3)).abs() > 1e-2);
}

#[test]
fn columns_behind_the_turned_heads_keep_their_bits() {
    for device in devices() {
        let case = Case::new(&device, (65, 2, 64, 129), 65, THETA);
        forward(&device, &case.args()).unwrap();
        for (now, then) in case.x.read_f32().unwrap().chunks(257).zip(case.exact.chunks(257)) {
            assert!(now[128..].iter().zip(&then[128..]).all(|(a, b)| f64::from(*a) == *b));
        }
    }
}

#[test]
fn all_instruction_sets_and_thread_counts_give_the_same_bits() {
    let bits: Vec<Vec<f32>> = devices()
        .into_iter()
        .map(|device| {
            let case = Case::new(&device, (300, 24, 64, 100), 200, THETA);
            forward(&device, &case.args()).unwrap();
            case.x.read_f32().unwrap()
        })
        .collect();
    assert!(bits.iter().all(|b| b == &bits[0]));
}

#[test]
fn a_row_alone_turns_as_in_a_pack() {
    let device = Device::cpu_with_threads(2);
    let case = Case::new(&device, (90, 4, 64, 64), 90, THETA);
    let before = case.x.read_f32().unwrap();
    forward(&device, &case.args()).unwrap();
    let pack = case.x.read_f32().unwrap();
    for row in [0, 44, 45, 89] {
        let range = row * 320..(row + 1) * 320;
        let x = Tensor::from_f32(&device, DType::F32, &[1, 320], &before[range.clone()]).unwrap();
        let positions = Tensor::from_i32(&device, &[1], &case.ids[row..=row]).unwrap();
        forward(&device, &Forward { x: &x, positions: &positions, ..case.args() }).unwrap();
        assert_eq!(x.read_f32().unwrap(), pack[range]);
    }
}

#[test]
fn a_position_outside_the_table_is_named_and_nothing_turns() {
    for device in devices() {
        for bad in [-1, 70, i32::MAX, i32::MIN] {
            let mut case = Case::new(&device, (65, 4, 64, 9), 70, THETA);
            case.ids[63] = bad;
            case.positions.write_i32(&case.ids).unwrap();
            let error = forward(&device, &case.args()).unwrap_err();
            assert!(matches!(error, Error::Argument { .. }));
            let message = error.to_string();
            let words = ["rope.forward", "`positions`", &format!("holds {bad} at row 63"), "0..70"];
            assert!(words.iter().all(|w| message.contains(w)), "{message}");
            assert!(case.x.read_f32().unwrap().iter().zip(&case.exact).all(|(a, b)| f64::from(*a) == *b));
        }
    }
}

#[test]
fn unaligned_tensors_turn_alike() {
    for device in devices() {
        let mut case = Case::new(&device, (9, 3, 34, 5), 70, THETA);
        case.x = unaligned(&case.x);
        case.table = unaligned(&case.table);
        case.check(THETA, ROUNDING * 70.0);
    }
}

#[test]
fn refuses_what_the_contract_does_not_allow() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, (5, 2, 8, 8), 9, THETA);
    let elsewhere = Case::new(&Device::cpu_with_threads(1), (5, 2, 8, 8), 9, THETA);
    let fails = |args: Forward<'_>, words: &[&str]| {
        let message = forward(&device, &args).unwrap_err().to_string();
        assert!(message.contains("rope.forward") && words.iter().all(|w| message.contains(w)), "{message}");
    };
    fails(Forward { heads: 4, ..case.args() }, &["4 heads of 8", "24 columns"]);
    fails(Forward { heads: usize::MAX, ..case.args() }, &["heads of 8", "24 columns"]);
    let half = Tensor::zeros(&device, DType::F16, &[5, 24]).unwrap();
    fails(Forward { x: &half, ..case.args() }, &["`x`", "f16", "f32"]);
    let short = case.positions.slice(0, &[4]).unwrap();
    fails(Forward { positions: &short, ..case.args() }, &["`positions`", "(4)", "(5)"]);
    let odd = Tensor::zeros(&device, DType::F32, &[9, 5]).unwrap();
    fails(Forward { table: &odd, ..case.args() }, &["head size is 5", "even"]);
    fails(Forward { table: &elsewhere.table, ..case.args() }, &["`table`", "lives on"]);
    let inside = case.x.slice(0, &[9, 8]).unwrap();
    fails(Forward { table: &inside, ..case.args() }, &["`x`", "`table`", "overlaps"]);
}

#[test]
fn tables_of_odd_heads_or_impossible_thetas_are_refused() {
    let device = Device::cpu_with_threads(1);
    for (theta, head, word) in [(1e4, 7, "even"), (1e4, 0, "above 0"), (0.0, 8, "`theta` is 0"), (f64::NAN, 8, "NaN")] {
        let message = table(&device, theta, 4, head).unwrap_err().to_string();
        assert!(message.contains("rope.table") && message.contains(word), "{message}");
    }
}

#[test]
fn the_null_device_records_what_turns() {
    let device = Device::null(1);
    let case = Case::new(&device, (65, 24, 64, 768), 100, THETA);
    forward(&device, &case.args()).unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    assert_eq!((launches[0].op, launches[0].flops), ("rope.forward", 3 * 65 * 1536));
    assert_eq!(launches[0].bytes, 4 * (2 * 65 * 1536 + 65 + 65 * 64));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_matches_the_reference(n in 0usize..80, heads in 0usize..9, half in 1usize..70, rest in 0usize..20, threads in 1usize..4) {
        let device = Device::cpu_with_threads(threads);
        Case::new(&device, (n, heads, 2 * half, rest), 90, 10_000.0).check(10_000.0, ROUNDING * 90.0);
    }
}
