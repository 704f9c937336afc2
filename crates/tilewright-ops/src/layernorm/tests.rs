use proptest::prelude::*;

use super::*;
use crate::testing::{self, FLOATS, Random, assert_close, devices, poisoned, random, tolerance};

const EPS: f32 = 1e-5;

/// Rows and channels: tails of every vector width, primes, one of each, and widths of real models.
const SHAPES: [(usize, usize); 14] = [
    (1, 1),
    (1, 2),
    (3, 3),
    (2, 7),
    (17, 13),
    (9, 16),
    (7, 31),
    (5, 33),
    (4, 64),
    (130, 65),
    (3, 129),
    (7, 767),
    (6, 768),
    (2, 1600),
];

/// All buffers of one forward and backward.
struct Case {
    c: usize,
    x: Tensor,
    branch: Tensor,
    weight: Tensor,
    bias: Tensor,
    sum: Tensor,
    out: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dout: Tensor,
    dx: Tensor,
    dweight: Tensor,
    dbias: Tensor,
    workspace: Tensor,
}

fn exact(t: &Tensor) -> Vec<f64> {
    t.read_f32().unwrap().into_iter().map(f64::from).collect()
}

impl Case {
    fn new(device: &Device, dtype: DType, n: usize, c: usize) -> Self {
        let mut rng = Random::new((n * 1000 + c) as u64);
        let mut input = |shape: &[usize], std| random(device, dtype, shape, std, &mut rng).0;
        Case {
            c,
            x: input(&[n, c], 1.5),
            branch: input(&[n, c], 0.7),
            weight: input(&[c], 1.0),
            bias: input(&[c], 0.5),
            dout: input(&[n, c], 1.0),
            sum: poisoned(device, dtype, &[n, c]),
            out: poisoned(device, dtype, &[n, c]),
            mean: poisoned(device, DType::F32, &[n]),
            rstd: poisoned(device, DType::F32, &[n]),
            dx: poisoned(device, dtype, &[n, c]),
            dweight: poisoned(device, dtype, &[c]),
            dbias: poisoned(device, dtype, &[c]),
            workspace: testing::workspace(device, backward_workspace_bytes(device, n, c)),
        }
    }

    fn forward_args(&self) -> Forward<'_> {
        Forward {
            x: &self.x,
            residual: Some(Residual { branch: &self.branch, sum: &self.sum }),
            weight: &self.weight,
            bias: Some(&self.bias),
            eps: EPS,
            out: &self.out,
            mean: &self.mean,
            rstd: &self.rstd,
        }
    }

    fn backward_args(&self) -> Backward<'_> {
        Backward {
            dout: &self.dout,
            sum: &self.sum,
            weight: &self.weight,
            mean: &self.mean,
            rstd: &self.rstd,
            dx: &self.dx,
            accumulate_dx: false,
            dweight: &self.dweight,
            dbias: Some(&self.dbias),
            accumulate_params: false,
            dx_sums: None,
            again: None,
            workspace: &self.workspace,
        }
    }

    fn forward(&self) {
        forward(self.x.device(), &self.forward_args()).unwrap();
    }

    fn backward(&self) {
        backward(self.x.device(), &self.backward_args()).unwrap();
    }

    fn check_forward(&self) {
        let (atol, rtol) = tolerance(self.x.dtype());
        let want: Vec<f64> = exact(&self.x).iter().zip(exact(&self.branch)).map(|(x, b)| x + b).collect();
        assert_close("sum", &self.sum, &want, atol, rtol);
        // What is normalised is the sum as it was stored.
        let sum = exact(&self.sum);
        let [out, mean, rstd] =
            reference::forward(self.c, &sum, &exact(&self.weight), Some(&exact(&self.bias)), f64::from(EPS));
        assert_close("mean", &self.mean, &mean, 1e-6, 1e-6);
        assert_close("rstd", &self.rstd, &rstd, 1e-6, if self.c > 2 { 2e-6 } else { 1e-3 });
        if self.c > 2 {
            assert_close("out", &self.out, &out, 2.0 * atol, rtol);
        }
    }

    fn check_backward(&self, scale: f64) {
        let (atol, rtol) = tolerance(self.x.dtype());
        let (mean, rstd) = (exact(&self.mean), exact(&self.rstd));
        let (dout, sum, weight) = (exact(&self.dout), exact(&self.sum), exact(&self.weight));
        let [dx, dweight, dbias] = reference::backward(self.c, &dout, &sum, &weight, &mean, &rstd)
            .map(|v| v.iter().map(|g| g * scale).collect::<Vec<_>>());
        // Rows of one or two channels have huge rstd and differences of equal numbers.
        let largest = rstd.iter().fold(1.0f64, |a, &b| a.max(b));
        assert_close("dx", &self.dx, &dx, 4.0 * atol * largest, 2.0 * rtol);
        assert_close("dweight", &self.dweight, &dweight, 100.0 * atol, rtol);
        assert_close("dbias", &self.dbias, &dbias, 100.0 * atol, rtol);
    }
}

#[test]
fn forward_matches_the_reference() {
    for device in devices() {
        for dtype in FLOATS {
            for (n, c) in SHAPES {
                let case = Case::new(&device, dtype, n, c);
                case.forward();
                case.check_forward();
            }
        }
    }
}

#[test]
fn backward_matches_the_reference() {
    for device in devices() {
        for dtype in FLOATS {
            for (n, c) in SHAPES {
                let case = Case::new(&device, dtype, n, c);
                case.forward();
                case.backward();
                case.check_backward(1.0);
            }
        }
    }
}

#[test]
fn bug_28_odd_channels_and_rows_at_every_small_size() {
    let device = Device::cpu_with_threads(2);
    for c in 3..=17 {
        for n in 1..=17 {
            let case = Case::new(&device, DType::F32, n, c);
            case.forward();
            case.check_forward();
            case.backward();
            case.check_backward(1.0);
        }
    }
}

#[test]
fn bug_1_parameter_gradients_at_production_rows_are_right_and_not_zero() {
    // Enough rows for more than one row a block above the minimum: B=4, T=1024.
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::new(&Device::cpu_with_threads(2), dtype, 4096, 48);
        case.forward();
        case.backward();
        case.check_backward(1.0);
        assert!(case.dbias.read_f32().unwrap().iter().all(|&v| v != 0.0));
        assert!(case.dweight.read_f32().unwrap().iter().all(|&v| v != 0.0));
    }
}

#[test]
fn bug_1_backward_stays_inside_its_workspace() {
    for device in devices() {
        for (n, c) in [(1, 1), (15, 33), (16, 33), (17, 33), (2048, 8), (2049, 8), (4100, 5)] {
            let mut case = Case::new(&device, DType::BF16, n, c);
            let bytes = backward_workspace_bytes(&device, n, c);
            let guarded = testing::workspace(&device, 256 + bytes + 256);
            guarded.write_bytes(0, &vec![0xA5; bytes + 512]).unwrap();
            case.workspace = guarded.slice(256, &[bytes]).unwrap();
            case.forward();
            case.backward();
            let mut all = vec![0; bytes + 512];
            guarded.read_bytes(0, &mut all).unwrap();
            let (before, rest) = all.split_at(256);
            assert!(before.iter().chain(&rest[bytes..]).all(|&b| b == 0xA5), "guard words at ({n}, {c})");
        }
    }
}

#[test]
fn bug_8_unaligned_tensors_give_the_same_bits() {
    for device in devices() {
        for dtype in FLOATS {
            let case = Case::new(&device, dtype, 5, 67);
            case.forward();
            case.backward();
            let mut moved = Case::new(&device, dtype, 5, 67);
            for t in [
                &mut moved.x,
                &mut moved.branch,
                &mut moved.weight,
                &mut moved.bias,
                &mut moved.sum,
                &mut moved.out,
                &mut moved.mean,
                &mut moved.rstd,
                &mut moved.dout,
                &mut moved.dx,
                &mut moved.dweight,
                &mut moved.dbias,
            ] {
                *t = testing::unaligned(t);
            }
            moved.forward();
            moved.backward();
            for (a, b) in [(&case.out, &moved.out), (&case.dx, &moved.dx), (&case.dweight, &moved.dweight)] {
                assert_eq!(a.read_f32().unwrap(), b.read_f32().unwrap());
            }
        }
    }
}

#[test]
fn without_a_residual_x_itself_is_normalised() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, 9, 33);
        forward(&device, &Forward { residual: None, ..case.forward_args() }).unwrap();
        let [out, mean, _] =
            reference::forward(33, &exact(&case.x), &exact(&case.weight), Some(&exact(&case.bias)), f64::from(EPS));
        assert_close("out", &case.out, &out, 2e-6, 1e-5);
        assert_close("mean", &case.mean, &mean, 1e-6, 0.0);
    }
}

#[test]
fn sum_in_the_memory_of_x_gives_the_same_bits() {
    for device in devices() {
        for dtype in FLOATS {
            let case = Case::new(&device, dtype, 23, 37);
            case.forward();
            let in_place = Case::new(&device, dtype, 23, 37);
            let residual = Some(Residual { branch: &in_place.branch, sum: &in_place.x });
            forward(&device, &Forward { residual, ..in_place.forward_args() }).unwrap();
            assert_eq!(in_place.x.read_f32().unwrap(), case.sum.read_f32().unwrap());
            assert_eq!(in_place.out.read_f32().unwrap(), case.out.read_f32().unwrap());
        }
    }
}

#[test]
fn without_a_bias_nothing_is_added() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, 4, 65);
        forward(&device, &Forward { bias: None, ..case.forward_args() }).unwrap();
        let [out, ..] = reference::forward(65, &exact(&case.sum), &exact(&case.weight), None, f64::from(EPS));
        assert_close("out", &case.out, &out, 2e-6, 1e-5);
        backward(&device, &Backward { dbias: None, ..case.backward_args() }).unwrap();
        assert!(case.dbias.read_f32().unwrap().iter().all(|v| v.is_nan()), "dbias was not asked for");
    }
}

#[test]
fn recompute_gives_the_bits_of_the_forward() {
    for device in devices() {
        for dtype in FLOATS {
            for (n, c) in SHAPES {
                for bias in [true, false] {
                    let case = Case::new(&device, dtype, n, c);
                    let bias = bias.then_some(&case.bias);
                    forward(&device, &Forward { bias, ..case.forward_args() }).unwrap();
                    let again = poisoned(&device, dtype, &[n, c]);
                    let args = Recompute {
                        sum: &case.sum,
                        weight: &case.weight,
                        bias,
                        mean: &case.mean,
                        rstd: &case.rstd,
                        out: &again,
                    };
                    recompute(&device, &args).unwrap();
                    assert_eq!(again.read_f32().unwrap(), case.out.read_f32().unwrap());
                }
            }
        }
    }
}

#[test]
fn backward_makes_the_output_again_and_sums_its_result_on_the_way() {
    for device in devices() {
        for dtype in FLOATS {
            // Many packs a unit of a small plane, and more rows a block than a group has planes.
            for (n, c) in SHAPES.into_iter().chain([(700, 768), (65, 8), (33, 760), (40, 448), (300, 512), (9000, 16)])
            {
                for accumulate in [false, true] {
                    let case = Case::new(&device, dtype, n, c);
                    case.forward();
                    let (again, sums) = (poisoned(&device, dtype, &[n, c]), poisoned(&device, dtype, &[c]));
                    let before = if accumulate { 2.0 } else { 0.0 };
                    if accumulate {
                        case.dx.write_f32(&vec![0.25; n * c]).unwrap();
                        for t in [&sums, &case.dweight, &case.dbias] {
                            t.write_f32(&vec![2.0; c]).unwrap();
                        }
                    }
                    let args = Backward {
                        accumulate_dx: accumulate,
                        accumulate_params: accumulate,
                        dx_sums: Some(&sums),
                        again: Some(Again { bias: Some(&case.bias), out: &again }),
                        ..case.backward_args()
                    };
                    backward(&device, &args).unwrap();
                    assert_eq!(again.read_f32().unwrap(), case.out.read_f32().unwrap(), "{n} x {c} {dtype}");
                    let dx = &exact(&case.dx);
                    let column = |j: usize| (0..n).map(move |i| dx[i * c + j]);
                    let want: Vec<f64> = (0..c).map(|j| column(j).sum::<f64>() + before).collect();
                    // A sum of rounded numbers against one that is rounded once.
                    let size = (0..c).map(|j| column(j).map(|x| x * x).sum::<f64>().sqrt()).fold(1.0, f64::max);
                    let (atol, rtol) = tolerance(dtype);
                    assert_close("dx_sums", &sums, &want, 4.0 * atol.max(rtol) * size, 2.0 * rtol);
                    if !accumulate {
                        case.check_backward(1.0);
                    }
                }
            }
        }
    }
}

#[test]
fn accumulation_adds_to_what_is_there() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, 19, 33);
        case.forward();
        case.backward();
        let twice = Backward { accumulate_dx: true, accumulate_params: true, ..case.backward_args() };
        backward(&device, &twice).unwrap();
        case.check_backward(2.0);
    }
}

#[test]
fn bug_11_the_residual_gradient_is_added_once_and_not_scaled() {
    let device = Device::cpu_with_threads(2);
    let case = Case::new(&device, DType::F32, 6, 48);
    case.forward();
    case.backward();
    let plain = case.dx.read_f32().unwrap();
    case.dx.write_f32(&vec![100.0; 6 * 48]).unwrap();
    backward(&device, &Backward { accumulate_dx: true, ..case.backward_args() }).unwrap();
    for (with, without) in case.dx.read_f32().unwrap().iter().zip(plain) {
        assert!((with - without - 100.0).abs() < 1e-4, "{with} against {without} + 100");
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    for dtype in FLOATS {
        let run = |threads| {
            let case = Case::new(&Device::cpu_with_threads(threads), dtype, 517, 96);
            case.forward();
            case.backward();
            [case.out, case.mean, case.rstd, case.dx, case.dweight, case.dbias].map(|t| t.read_f32().unwrap())
        };
        let one = run(1);
        assert!([2, 3, 7].into_iter().all(|threads| run(threads) == one));
    }
}

#[test]
fn a_row_alone_has_the_bits_it_has_among_others() {
    for device in devices() {
        for (n, c) in [(65, 768), (40, 1024), (17, 33)] {
            let all = Case::new(&device, DType::F32, n, c);
            all.forward();
            let out = all.out.read_f32().unwrap();
            for row in [0, 7, n - 1] {
                let mut alone = Case::new(&device, DType::F32, 1, c);
                let at = |t: &Tensor| testing::in_a_slot(&t.slice(row * c, &[1, c]).unwrap());
                (alone.x, alone.branch) = (at(&all.x), at(&all.branch));
                (alone.weight, alone.bias) = (all.weight.clone(), all.bias.clone());
                alone.forward();
                assert_eq!(alone.out.read_f32().unwrap(), out[row * c..(row + 1) * c], "row {row}");
            }
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_instruction_set() {
    let run = |device: &Device| {
        let case = Case::new(device, DType::F32, 37, 77);
        case.forward();
        case.backward();
        [case.out, case.dx, case.dweight].map(|t| t.read_f32().unwrap())
    };
    let all = testing::cpus();
    let first = run(&all[0]);
    assert!(all[1..].iter().all(|d| run(d) == first));
}

#[test]
fn a_large_common_offset_does_not_destroy_the_variance() {
    // One pass (mean of squares minus square of mean) would lose every digit here.
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, 1, 64);
    let x: Vec<f32> = (0..64).map(|i| 4096.0 + if i % 2 == 0 { 0.5 } else { -0.5 }).collect();
    case.x.write_f32(&x).unwrap();
    forward(&device, &Forward { residual: None, ..case.forward_args() }).unwrap();
    assert_close("mean", &case.mean, &[4096.0], 0.0, 0.0);
    assert_close("rstd", &case.rstd, &[1.0 / (0.25 + f64::from(EPS)).sqrt()], 1e-6, 0.0);
}

#[test]
fn a_constant_row_gives_the_bias() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, 2, 50);
        case.x.write_f32(&[3.25; 100]).unwrap();
        forward(&device, &Forward { residual: None, ..case.forward_args() }).unwrap();
        let bias = case.bias.read_f32().unwrap();
        assert_eq!(case.out.read_f32().unwrap(), [bias.clone(), bias].concat());
    }
}

#[test]
fn bug_20_no_rows_is_no_work() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, 0, 5);
        case.forward();
        case.backward();
        assert_eq!(case.dweight.read_f32().unwrap(), [0.0; 5], "a sum over no rows is zero");
        assert_eq!(case.dbias.read_f32().unwrap(), [0.0; 5]);
        let empty = Case::new(&device, DType::F32, 3, 0);
        empty.forward();
        empty.backward();
        assert_eq!(empty.mean.read_f32().unwrap(), [0.0; 3]);
    }
}

#[test]
fn reference_gradients_match_finite_differences() {
    let (n, c) = (3, 5);
    let mut rng = Random::new(4);
    let mut values = |n| rng.normals(n, 1.0).into_iter().map(f64::from).collect::<Vec<f64>>();
    let (x, w, b, dout) = (values(n * c), values(c), values(c), values(n * c));
    let loss = |x: &[f64], w: &[f64], b: &[f64]| -> f64 {
        reference::forward(c, x, w, Some(b), 1e-5)[0].iter().zip(&dout).map(|(o, d)| o * d).sum()
    };
    let [_, mean, rstd] = reference::forward(c, &x, &w, Some(&b), 1e-5);
    let [dx, dw, db] = reference::backward(c, &dout, &x, &w, &mean, &rstd);
    let difference = |values: &[f64], i: usize, loss: &dyn Fn(&[f64]) -> f64| {
        let (mut up, mut down) = (values.to_vec(), values.to_vec());
        up[i] += 1e-5;
        down[i] -= 1e-5;
        (loss(&up) - loss(&down)) / 2e-5
    };
    for i in 0..n * c {
        assert!((difference(&x, i, &|x| loss(x, &w, &b)) - dx[i]).abs() < 1e-7, "dx[{i}]");
    }
    for i in 0..c {
        assert!((difference(&w, i, &|w| loss(&x, w, &b)) - dw[i]).abs() < 1e-7, "dweight[{i}]");
        assert!((difference(&b, i, &|b| loss(&x, &w, b)) - db[i]).abs() < 1e-7, "dbias[{i}]");
    }
}

#[test]
fn leading_dimensions_fold() {
    let device = Device::cpu_with_threads(2);
    let mut case = Case::new(&device, DType::F32, 6, 8);
    for t in [&mut case.x, &mut case.branch, &mut case.sum, &mut case.out] {
        *t = t.view(&[2, 3, 8]).unwrap();
    }
    case.forward();
    case.check_forward();
}

#[test]
fn refuses_what_the_contract_does_not_allow() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, 4, 8);
    let other = Case::new(&device, DType::BF16, 4, 8);
    let elsewhere = Case::new(&Device::cpu_with_threads(1), DType::F32, 4, 8);
    let short = Tensor::zeros(&device, DType::F32, &[3]).unwrap();
    let fails = |args: Forward<'_>| forward(&device, &args).unwrap_err().to_string();
    let named = |message: String, words: &[&str]| {
        assert!(words.iter().all(|w| message.contains(w)), "{message}");
    };
    named(fails(Forward { out: &other.out, ..case.forward_args() }), &["layernorm.forward", "`out`", "bf16", "f32"]);
    named(fails(Forward { weight: &short, ..case.forward_args() }), &["layernorm.forward", "`weight`", "(3)", "(8)"]);
    named(fails(Forward { mean: &short, ..case.forward_args() }), &["layernorm.forward", "`mean`", "(3)", "(4)"]);
    named(fails(Forward { x: &elsewhere.x, ..case.forward_args() }), &["layernorm.forward", "`x`", "lives on"]);
    named(fails(Forward { out: &case.x, ..case.forward_args() }), &["layernorm.forward", "`out`", "`x`", "overlaps"]);
    named(fails(Forward { eps: 0.0, ..case.forward_args() }), &["layernorm.forward", "`eps` is 0"]);
    let half = case.x.slice(0, &[2, 8]).unwrap();
    let residual = Some(Residual { branch: &case.branch, sum: &half });
    named(fails(Forward { residual, ..case.forward_args() }), &["layernorm.forward", "`sum`", "(2, 8)"]);
    let residual = Some(Residual { branch: &case.branch, sum: &case.branch });
    named(fails(Forward { residual, ..case.forward_args() }), &["`sum`", "`branch`", "overlaps"]);
    let residual = Some(Residual { branch: &case.branch, sum: &case.x });
    let out = &case.x;
    named(fails(Forward { residual, out, ..case.forward_args() }), &["`out`", "overlaps"]);

    let fails = |args: Backward<'_>| backward(&device, &args).unwrap_err().to_string();
    named(fails(Backward { workspace: &short, ..case.backward_args() }), &["`workspace`", "at least 64 bytes"]);
    named(fails(Backward { dx: &case.dout, ..case.backward_args() }), &["layernorm.backward", "`dx`", "`dout`"]);
    named(fails(Backward { dweight: &case.dbias, ..case.backward_args() }), &["`dweight`", "`dbias`", "overlaps"]);
    named(fails(Backward { sum: &other.sum, ..case.backward_args() }), &["layernorm.backward", "`sum`", "bf16"]);
    assert!(case.out.read_f32().unwrap().iter().all(|v| v.is_nan()), "a refused call writes nothing");
}

#[test]
fn the_null_device_records_one_launch_each() {
    let device = Device::null(2);
    let case = Case::new(&device, DType::F32, 4, 8);
    case.forward();
    case.backward();
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    assert_eq!(launches.iter().map(|l| l.op).collect::<Vec<_>>(), ["layernorm.forward", "layernorm.backward"]);
    // x, branch, sum, out; weight, bias; mean, rstd.
    assert_eq!(launches[0].bytes, 4 * (4 * 32 + 2 * 8 + 2 * 4));
    let residual = Some(Residual { branch: &case.branch, sum: &case.x });
    forward(&device, &Forward { residual, ..case.forward_args() }).unwrap();
    assert_eq!(null.take_launches()[0].bytes, launches[0].bytes, "in place or not, the same bytes move");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_matches_the_reference(n in 1usize..40, c in 3usize..200, dtype in 0usize..3, threads in 1usize..4) {
        let case = Case::new(&Device::cpu_with_threads(threads), FLOATS[dtype], n, c);
        case.forward();
        case.check_forward();
        case.backward();
        case.check_backward(1.0);
    }
}
