use super::cpu::features;
use super::*;
use crate::testing::{Random, assert_close, devices, poisoned, random};

/// Rows by their numbers of options, `D`, and rows of `states`.
const SHAPES: [(&[usize], usize, usize); 7] = [
    (&[1], 1, 1),
    (&[2], 33, 3),
    (&[0], 4, 1),
    (&[4, 1, 0, 2, 17], 64, 9),
    (&[31, 32, 33, 64, 65], 5, 2),
    (&[255, 3, 300], 1024, 8),
    (&[0, 0, 5, 0], 768, 4),
];

struct Case {
    states: (Tensor, Vec<f64>),
    logits: (Tensor, Vec<f64>),
    firsts: (Tensor, Vec<i32>),
    starts: (Tensor, Vec<i32>),
    out: Tensor,
    d: usize,
}

impl Case {
    fn new(device: &Device, (options, d, s): (&[usize], usize, usize), std: f32) -> Case {
        let mut rng = Random::new((d * 31 + s) as u64);
        let mut starts = vec![0];
        for n in options {
            starts.push(starts[starts.len() - 1] + *n as i32);
        }
        let firsts: Vec<i32> = options.iter().map(|_| rng.below(s) as i32).collect();
        // Two logits that belong to no row.
        let count = starts[starts.len() - 1] as usize + 2;
        let ids = |v: &Vec<i32>| Tensor::from_i32(device, &[v.len()], v).unwrap();
        Case {
            states: random(device, DType::F32, &[s, d], 1.0, &mut rng),
            logits: random(device, DType::F32, &[count, 1], std, &mut rng),
            out: poisoned(device, DType::F32, &[options.len(), d + FEATURES]),
            firsts: (ids(&firsts), firsts),
            starts: (ids(&starts), starts),
            d,
        }
    }

    fn args(&self) -> Forward<'_> {
        Forward {
            states: &self.states.0,
            firsts: &self.firsts.0,
            logits: &self.logits.0,
            starts: &self.starts.0,
            out: &self.out,
        }
    }

    fn check(&self) {
        forward(self.out.device(), &self.args()).unwrap();
        let want = reference::forward(&self.states.1, self.d, &self.firsts.1, &self.logits.1, &self.starts.1);
        assert_close(&format!("out on {}", self.out.device().name()), &self.out, &want, 2e-6, 2e-6);
    }
}

#[test]
fn rows_of_every_number_of_options_match_the_formula() {
    for device in devices() {
        for shape in SHAPES {
            Case::new(&device, shape, 2.0).check();
        }
    }
}

#[test]
fn probabilities_that_vanish_add_nothing_to_the_entropy() {
    for device in devices() {
        Case::new(&device, (&[3, 40, 2], 7, 3), 60.0).check();
    }
}

#[test]
fn logits_that_are_not_numbers_show_in_their_row_alone() {
    for device in devices() {
        let case = Case::new(&device, (&[2, 3], 1, 1), 1.0);
        let mut logits: Vec<f32> = case.logits.1.iter().map(|&l| l as f32).collect();
        logits[0] = f32::NAN;
        case.logits.0.write_f32(&logits).unwrap();
        forward(&device, &case.args()).unwrap();
        let out = case.out.read_f32().unwrap();
        assert!(out[1].is_nan() && out[2].is_nan() && out[3].is_nan() && out[4] == 2.0 / 255.0, "{out:?}");
        assert!(out[5..].iter().all(|x| x.is_finite()), "{out:?}");
    }
}

#[test]
fn trap_19_a_single_option_has_a_lead_of_one() {
    assert_eq!(features(&[-3.5]), [1.0, 1.0, 0.0, 2.0 / 255.0]);
}

#[test]
fn equal_options_have_no_lead_and_full_entropy() {
    let [top, lead, entropy, count] = features(&[0.25; 4]);
    assert_eq!((top, lead, count), (0.25, 0.0, 4.0 / 255.0));
    assert!((entropy - 1.0).abs() < 1e-6, "{entropy}");
}

#[test]
fn features_do_not_depend_on_the_order_of_options_or_on_a_common_shift() {
    let a = features(&[1.0, 3.0, -2.0]);
    assert_eq!(a, features(&[3.0, 5.0, 0.0]));
    let b = features(&[3.0, -2.0, 1.0]);
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6), "{a:?} {b:?}");
    assert!(a[0] > 0.85 && (a[1] - (a[0] - (1.0f32 - 3.0).exp() * a[0])).abs() < 1e-6, "{a:?}");
}

#[test]
fn rows_and_options_that_are_not_there_are_refused_by_name() {
    let device = Device::cpu();
    let case = Case::new(&device, (&[2, 3], 4, 3), 1.0);
    let refused = |args: Forward<'_>, words: &str| {
        let error = forward(&device, &args).unwrap_err().to_string();
        assert!(error.contains("option_features.forward") && error.contains(words), "{error}");
    };
    let ids = |v: &[i32]| Tensor::from_i32(&device, &[v.len()], v).unwrap();
    refused(Forward { firsts: &ids(&[0, 3]), ..case.args() }, "`firsts` holds 3");
    refused(Forward { firsts: &ids(&[-1, 0]), ..case.args() }, "`firsts` holds -1");
    for starts in [[0, 5, 4], [-1, 2, 5], [0, 2, 8]] {
        refused(Forward { starts: &ids(&starts), ..case.args() }, "`starts` must rise within 0..=7");
    }
    refused(Forward { starts: &ids(&[0, 5]), ..case.args() }, "`starts`");
    refused(Forward { out: &poisoned(&device, DType::F32, &[2, 7]), ..case.args() }, "`out`");
    refused(Forward { states: &poisoned(&device, DType::F16, &[3, 4]), ..case.args() }, "`states`");
    let half = case.states.0.slice(0, &[1, 8]).unwrap();
    refused(Forward { out: &half, firsts: &ids(&[0]), starts: &ids(&[0, 1]), ..case.args() }, "`out`");
}
