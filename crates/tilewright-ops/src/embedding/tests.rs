use proptest::prelude::*;

use super::*;
use crate::testing::{self, FLOATS, Random, assert_close, devices, poisoned, random, tolerance};

/// `(B, T, C, vocab, Vp, maxT)`.
const SHAPES: [(usize, usize, usize, usize, usize, usize); 10] = [
    (1, 1, 1, 1, 1, 1),
    (2, 3, 5, 7, 8, 4),
    (1, 7, 33, 29, 37, 7),
    (3, 9, 13, 300, 304, 17),
    (2, 17, 127, 50, 50, 20),
    (4, 5, 129, 11, 16, 5),
    (2, 8, 256, 9, 16, 8),
    (2, 7, 767, 257, 384, 9),
    (2, 64, 768, 90, 96, 64),
    (2, 9, 3, 70_000, 70_016, 9),
];

struct Case {
    t: usize,
    c: usize,
    vocab: usize,
    ids: Vec<i32>,
    tokens: Tensor,
    wte: Tensor,
    wpe: Tensor,
    out: Tensor,
    dout: Tensor,
    dwte: Tensor,
    dwpe: Tensor,
    workspace: Tensor,
}

fn exact(t: &Tensor) -> Vec<f64> {
    t.read_f32().unwrap().into_iter().map(f64::from).collect()
}

impl Case {
    fn new(device: &Device, dtype: DType, shape: (usize, usize, usize, usize, usize, usize)) -> Self {
        let (b, t, c, vocab, rows, positions) = shape;
        let mut rng = Random::new((b * t * c + vocab) as u64);
        // Half of the ids come from a few, so that rows repeat.
        let ids: Vec<i32> =
            (0..b * t).map(|i| if i % 2 == 0 { rng.below(vocab) } else { rng.below(vocab.min(3)) } as i32).collect();
        let mut input = |shape: &[usize]| random(device, dtype, shape, 1.0, &mut rng).0;
        Case {
            t,
            c,
            vocab,
            tokens: Tensor::from_i32(device, &[b, t], &ids).unwrap(),
            wte: input(&[rows, c]),
            wpe: input(&[positions, c]),
            dout: input(&[b, t, c]),
            dwte: input(&[rows, c]),
            dwpe: poisoned(device, dtype, &[positions, c]),
            out: poisoned(device, dtype, &[b, t, c]),
            workspace: testing::workspace(device, backward_workspace_bytes(device, b, t)),
            ids,
        }
    }

    fn forward_args(&self) -> Forward<'_> {
        let Case { tokens, wte, wpe, out, vocab, .. } = self;
        Forward { tokens, wte, wpe, vocab: *vocab, position: 0, out }
    }

    fn backward_args(&self) -> Backward<'_> {
        let Case { tokens, dout, dwte, dwpe, workspace, vocab, .. } = self;
        Backward { tokens, dout, vocab: *vocab, dwte, dwpe, accumulate_dwpe: false, workspace }
    }

    fn forward(&self) -> Result<()> {
        forward(self.out.device(), &self.forward_args())
    }

    fn backward(&self) -> Result<()> {
        backward(self.out.device(), &self.backward_args())
    }

    /// Runs the backward and compares it with the reference, started from what is in `dwte` and zero in `dwpe`.
    fn check_backward(&self) {
        let (mut dwte, mut dwpe) = (exact(&self.dwte), vec![0.0; self.dwpe.numel()]);
        self.backward().unwrap();
        reference::backward(self.t, self.c, &self.ids, &exact(&self.dout), &mut dwte, &mut dwpe);
        let (atol, rtol) = tolerance(self.out.dtype());
        assert_close("dwte", &self.dwte, &dwte, 10.0 * atol, rtol);
        assert_close("dwpe", &self.dwpe, &dwpe, 10.0 * atol, rtol);
    }
}

#[test]
fn forward_matches_the_reference() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                let case = Case::new(&device, dtype, shape);
                case.forward().unwrap();
                let want = reference::forward(case.t, case.c, &case.ids, &exact(&case.wte), &exact(&case.wpe), 0);
                let (atol, rtol) = tolerance(dtype);
                assert_close("out", &case.out, &want, atol, rtol);
            }
        }
    }
}

#[test]
fn backward_matches_the_reference() {
    for device in devices() {
        for dtype in FLOATS {
            for shape in SHAPES {
                Case::new(&device, dtype, shape).check_backward();
            }
        }
    }
}

#[test]
fn bug_9_every_channel_beyond_128_gets_its_gradient() {
    for device in devices() {
        for c in [128, 129, 255, 256, 257, 384, 513, 1600] {
            let case = Case::new(&device, DType::F32, (2, 5, c, 6, 8, 5));
            case.dwte.zero();
            case.check_backward();
            let dwte = case.dwte.read_f32().unwrap();
            for &id in &case.ids {
                assert!(dwte[id as usize * c..(id as usize + 1) * c].iter().all(|&g| g != 0.0), "C = {c}");
            }
        }
    }
}

#[test]
fn a_position_offset_moves_the_rows_of_wpe() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, (2, 3, 8, 10, 16, 9));
        for position in 0..=6 {
            forward(&device, &Forward { position, ..case.forward_args() }).unwrap();
            let want = reference::forward(3, 8, &case.ids, &exact(&case.wte), &exact(&case.wpe), position);
            assert_close("out", &case.out, &want, 1e-6, 0.0);
        }
    }
}

#[test]
fn positions_beyond_wpe_are_refused() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, (2, 3, 8, 10, 16, 9));
    for position in [7, usize::MAX] {
        let error = forward(&device, &Forward { position, ..case.forward_args() }).unwrap_err().to_string();
        assert!(error.contains("embedding.forward") && error.contains("`wpe` of 9 rows"), "{error}");
    }
}

#[test]
fn an_id_outside_the_vocabulary_is_named_and_nothing_is_written() {
    let device = Device::cpu_with_threads(2);
    for bad in [-1, 10, i32::MAX, i32::MIN] {
        let mut case = Case::new(&device, DType::F32, (2, 3, 8, 10, 16, 3));
        case.ids[4] = bad;
        case.tokens.write_i32(&case.ids).unwrap();
        let before = case.dwte.read_f32().unwrap();
        for (op, error) in [("embedding.forward", case.forward()), ("embedding.backward", case.backward())]
            .map(|(o, r)| (o, r.unwrap_err()))
        {
            let message = error.to_string();
            assert!(matches!(error, Error::Argument { .. }));
            assert!(message.contains(op) && message.contains(&format!("id {bad} at (b, t) = (1, 1)")), "{message}");
            assert!(message.contains("0..10"), "{message}");
        }
        assert!(case.out.read_f32().unwrap().iter().all(|v| v.is_nan()));
        assert!(case.dwpe.read_f32().unwrap().iter().all(|v| v.is_nan()));
        assert_eq!(case.dwte.read_f32().unwrap(), before);
    }
}

#[test]
fn an_id_of_the_padding_is_outside_the_vocabulary() {
    let device = Device::cpu_with_threads(1);
    let case = Case::new(&device, DType::F32, (1, 1, 4, 29, 37, 1));
    case.tokens.write_i32(&[28]).unwrap();
    case.forward().unwrap();
    case.tokens.write_i32(&[29]).unwrap();
    case.forward().unwrap_err();
}

#[test]
fn dwte_is_added_to_and_other_rows_stay() {
    for device in devices() {
        let case = Case::new(&device, DType::BF16, (1, 4, 9, 20, 24, 4));
        case.tokens.write_i32(&[3, 7, 3, 19]).unwrap();
        let before = case.dwte.read_f32().unwrap();
        case.backward().unwrap();
        let after = case.dwte.read_f32().unwrap();
        for row in 0..24 {
            let same = before[row * 9..(row + 1) * 9] == after[row * 9..(row + 1) * 9];
            assert_eq!(same, ![3, 7, 19].contains(&row), "row {row}");
        }
    }
}

#[test]
fn a_row_is_rounded_once_not_once_a_position() {
    // 64 additions of 2^-9 to 1 in bf16 would each round to nothing; their sum does not.
    for device in devices() {
        let case = Case::new(&device, DType::BF16, (1, 64, 4, 2, 2, 64));
        case.tokens.write_i32(&[1; 64]).unwrap();
        case.dout.write_f32(&[1.0 / 512.0; 256]).unwrap();
        case.dwte.write_f32(&[1.0; 8]).unwrap();
        case.backward().unwrap();
        assert_eq!(case.dwte.read_f32().unwrap(), [1.0, 1.0, 1.0, 1.0, 1.125, 1.125, 1.125, 1.125]);
    }
}

#[test]
fn dwpe_rows_beyond_t_become_zero_or_stay() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, (2, 3, 5, 4, 4, 6));
        case.backward().unwrap();
        let dwpe = case.dwpe.read_f32().unwrap();
        assert_eq!(dwpe[15..], [0.0; 15]);
        case.dwpe.write_f32(&[7.0; 30]).unwrap();
        backward(&device, &Backward { accumulate_dwpe: true, ..case.backward_args() }).unwrap();
        let added = case.dwpe.read_f32().unwrap();
        assert_eq!(added[15..], [7.0; 15]);
        assert!(added.iter().zip(&dwpe).all(|(a, d)| (a - d - 7.0).abs() < 1e-5));
    }
}

#[test]
fn one_token_everywhere_sums_every_position() {
    for device in devices() {
        let case = Case::new(&device, DType::F32, (3, 50, 7, 5, 8, 50));
        case.tokens.write_i32(&[4; 150]).unwrap();
        case.dout.write_f32(&vec![0.5; 150 * 7]).unwrap();
        case.dwte.zero();
        case.backward().unwrap();
        let mut want = [0.0; 8 * 7];
        want[4 * 7..5 * 7].fill(75.0);
        assert_eq!(case.dwte.read_f32().unwrap(), want);
    }
}

#[test]
fn long_lists_of_ids_of_five_digits_are_each_summed_where_they_belong() {
    // Several tiles of a sort and a tail, ids far apart and in long runs; whole numbers, so that any order of a sum has the same bits.
    for device in devices() {
        for (b, t) in [(1, 1024), (3, 700), (2, 2049)] {
            let (c, vocab, n) = (3, 50_257, b * t);
            let mut rng = Random::new(n as u64);
            let ids: Vec<i32> = (0..n)
                .map(|i| match i % 5 {
                    0 => rng.below(vocab) as i32,
                    1 => 50_256,
                    2 => (i / 400) as i32 * 4096,
                    _ => rng.below(40) as i32,
                })
                .collect();
            let dout: Vec<f32> = (0..n * c).map(|_| rng.below(16) as f32 - 7.0).collect();
            let mut want = vec![1.0f32; vocab * c];
            for (i, &id) in ids.iter().enumerate() {
                for j in 0..c {
                    want[id as usize * c + j] += dout[i * c + j];
                }
            }
            let dwte = Tensor::from_f32(&device, DType::F32, &[vocab, c], &vec![1.0; vocab * c]).unwrap();
            let args = Backward {
                tokens: &Tensor::from_i32(&device, &[b, t], &ids).unwrap(),
                dout: &Tensor::from_f32(&device, DType::F32, &[b, t, c], &dout).unwrap(),
                vocab,
                dwte: &dwte,
                dwpe: &poisoned(&device, DType::F32, &[t, c]),
                accumulate_dwpe: false,
                workspace: &testing::workspace(&device, backward_workspace_bytes(&device, b, t)),
            };
            backward(&device, &args).unwrap();
            assert!(dwte.read_f32().unwrap() == want, "{b} x {t} on {}", device.name());
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    for dtype in FLOATS {
        let run = |threads| {
            let case = Case::new(&Device::cpu_with_threads(threads), dtype, (4, 150, 300, 90, 96, 160));
            case.forward().unwrap();
            case.backward().unwrap();
            [case.out, case.dwte, case.dwpe].map(|t| t.read_f32().unwrap())
        };
        let one = run(1);
        assert!([2, 3, 5].into_iter().all(|threads| run(threads) == one));
    }
}

#[test]
fn sums_are_taken_in_the_order_of_positions() {
    // f32 sums of this kind differ in any other order.
    let device = Device::cpu_with_threads(3);
    let case = Case::new(&device, DType::F32, (2, 40, 3, 4, 4, 40));
    case.dwte.zero();
    case.backward().unwrap();
    let (dout, mut want) = (case.dout.read_f32().unwrap(), [0.0f32; 12]);
    for (i, &id) in case.ids.iter().enumerate() {
        for j in 0..3 {
            want[id as usize * 3 + j] += dout[i * 3 + j];
        }
    }
    assert_eq!(case.dwte.read_f32().unwrap(), want);
}

#[test]
fn bug_1_backward_stays_inside_its_workspace() {
    for device in devices() {
        for (b, t) in [(1, 1), (2, 3), (4, 65)] {
            let mut case = Case::new(&device, DType::F32, (b, t, 5, 300, 300, t));
            let bytes = backward_workspace_bytes(&device, b, t);
            let guarded = testing::workspace(&device, 256 + bytes + 256);
            case.workspace = guarded.slice(256, &[bytes]).unwrap();
            case.check_backward();
            let mut all = vec![0; bytes + 512];
            guarded.read_bytes(0, &mut all).unwrap();
            assert!(all[..256].iter().chain(&all[256 + bytes..]).all(|&b| b == 0xFF), "guard words at ({b}, {t})");
        }
    }
}

#[test]
fn bug_8_unaligned_tensors_give_the_same_bits() {
    for device in devices() {
        for dtype in FLOATS {
            let shape = (2, 9, 67, 13, 16, 9);
            let case = Case::new(&device, dtype, shape);
            case.forward().unwrap();
            case.backward().unwrap();
            let mut moved = Case::new(&device, dtype, shape);
            let Case { wte, wpe, out, dout, dwte, dwpe, .. } = &mut moved;
            for t in [wte, wpe, out, dout, dwte, dwpe] {
                *t = testing::unaligned(t);
            }
            moved.forward().unwrap();
            moved.backward().unwrap();
            for (a, b) in [(&case.out, &moved.out), (&case.dwte, &moved.dwte), (&case.dwpe, &moved.dwpe)] {
                assert_eq!(a.read_f32().unwrap(), b.read_f32().unwrap());
            }
        }
    }
}

#[test]
fn bug_20_an_empty_batch_is_no_work() {
    for device in devices() {
        for (b, t) in [(0, 4), (3, 0)] {
            let case = Case::new(&device, DType::F32, (b, t, 5, 7, 8, 4));
            case.forward().unwrap();
            case.check_backward();
        }
        let no_channels = Case::new(&device, DType::F32, (2, 3, 0, 7, 8, 4));
        no_channels.forward().unwrap();
        no_channels.backward().unwrap();
    }
}

#[test]
fn gradients_match_finite_differences() {
    let (t, c, ids) = (3, 2, [1, 0, 1, 1, 2, 0]);
    let mut rng = Random::new(2);
    let mut values = |n| rng.normals(n, 1.0).into_iter().map(f64::from).collect::<Vec<f64>>();
    let (wte, wpe, dout) = (values(3 * c), values(t * c), values(ids.len() * c));
    let loss = |wte: &[f64], wpe: &[f64]| -> f64 {
        reference::forward(t, c, &ids, wte, wpe, 0).iter().zip(&dout).map(|(o, d)| o * d).sum()
    };
    let (mut dwte, mut dwpe) = (vec![0.0; 3 * c], vec![0.0; t * c]);
    reference::backward(t, c, &ids, &dout, &mut dwte, &mut dwpe);
    let moved = |values: &[f64], i: usize, by: f64| {
        let mut v = values.to_vec();
        v[i] += by;
        v
    };
    for i in 0..wte.len() {
        let difference = (loss(&moved(&wte, i, 1e-4), &wpe) - loss(&moved(&wte, i, -1e-4), &wpe)) / 2e-4;
        assert!((difference - dwte[i]).abs() < 1e-9);
    }
    for i in 0..wpe.len() {
        let difference = (loss(&wte, &moved(&wpe, i, 1e-4)) - loss(&wte, &moved(&wpe, i, -1e-4))) / 2e-4;
        assert!((difference - dwpe[i]).abs() < 1e-9);
    }
}

#[test]
fn refuses_what_the_contract_does_not_allow() {
    let device = Device::cpu_with_threads(1);
    let shape = (2, 3, 8, 10, 16, 4);
    let case = Case::new(&device, DType::F32, shape);
    let other = Case::new(&device, DType::F16, shape);
    let elsewhere = Case::new(&Device::cpu_with_threads(1), DType::F32, shape);
    let fails = |args: Forward<'_>| forward(&device, &args).unwrap_err().to_string();
    let named = |message: String, words: &[&str]| assert!(words.iter().all(|w| message.contains(w)), "{message}");
    named(fails(Forward { out: &other.out, ..case.forward_args() }), &["embedding.forward", "`out`", "f16"]);
    named(fails(Forward { wpe: &case.out, ..case.forward_args() }), &["embedding.forward", "`wpe`", "(maxT, C)"]);
    named(
        fails(Forward { tokens: &case.wte, ..case.forward_args() }),
        &["embedding.forward", "`tokens`", "f32", "i32"],
    );
    named(fails(Forward { vocab: 17, ..case.forward_args() }), &["embedding.forward", "`vocab` is 17", "16 rows"]);
    named(fails(Forward { wte: &elsewhere.wte, ..case.forward_args() }), &["embedding.forward", "`wte`", "lives on"]);
    let out = case.wte.slice(0, &[2, 3, 8]).unwrap();
    named(fails(Forward { out: &out, ..case.forward_args() }), &["embedding.forward", "`out`", "`wte`", "overlaps"]);

    let fails = |args: Backward<'_>| backward(&device, &args).unwrap_err().to_string();
    named(fails(Backward { dwte: &other.dwte, ..case.backward_args() }), &["embedding.backward", "`dwte`", "f16"]);
    let small = case.workspace.slice(0, &[75]).unwrap();
    named(fails(Backward { workspace: &small, ..case.backward_args() }), &["`workspace`", "at least 76 bytes"]);
    let dwpe = case.dwte.slice(0, &[4, 8]).unwrap();
    named(fails(Backward { dwpe: &dwpe, ..case.backward_args() }), &["`dwte`", "`dwpe`", "overlaps"]);
    let dwpe = case.dwpe.slice(0, &[2, 8]).unwrap();
    named(fails(Backward { dwpe: &dwpe, ..case.backward_args() }), &["3 positions", "`dwpe` of 2 rows"]);
}

#[test]
fn the_null_device_records_and_needs_no_tokens() {
    let device = Device::null(1);
    let case = Case::new(&device, DType::F32, (2, 3, 8, 10, 16, 4));
    case.forward().unwrap();
    case.backward().unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let ops: Vec<_> = null.take_launches().iter().map(|l| l.op).collect();
    assert_eq!(ops, ["embedding.forward", "embedding.backward"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_matches_the_reference(
        b in 1usize..4, t in 1usize..20, c in 1usize..300, vocab in 1usize..400, dtype in 0usize..3, threads in 1usize..4,
    ) {
        let device = Device::cpu_with_threads(threads);
        Case::new(&device, FLOATS[dtype], (b, t, c, vocab, vocab + 3, t + 2)).check_backward();
    }
}
