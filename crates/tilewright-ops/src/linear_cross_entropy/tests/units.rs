//! The loss head of the portable GPU path on the matrix units: what it computes is held to the reference, and the rest to that it ran there.

use super::training::assert_near;
use super::*;
use crate::linear_cross_entropy::gpu::{self, Tiles};
use crate::matmul::gpu::shape;
use crate::runtime::gpu::Gpu;
use crate::testing::{assert_close, is_software, portable_gpus, tolerance};

/// One row, few columns, columns that are no whole pack, ends within a plane and within a group in every dimension, a sum shorter than a slice and one with
/// a remainder.
const SHAPES: [[usize; 4]; 9] = [
    [1, 8, 1, 1],
    [1, 64, 63, 64],
    [3, 16, 5, 13],
    [17, 24, 64, 64],
    [16, 40, 65, 128],
    [33, 8, 127, 127],
    [70, 72, 130, 144],
    [129, 16, 53, 64],
    [150, 96, 271, 300],
];

/// Types that the device's matrix units multiply.
fn factors(gpu: &Gpu) -> Vec<DType> {
    [DType::F16, DType::BF16].into_iter().filter(|t| shape::tile(gpu.capabilities(), *t).is_some()).collect()
}

/// `(losses, dhidden, dweight)` with gradients of logits rounded to the factors' type, on the matrix units; nothing behind the workspace is written.
fn train(head: &Head, asked: Option<[usize; 2]>) -> (Tensor, Tensor, Tensor) {
    let Device::Gpu(gpu) = &head.device else { unreachable!() };
    let losses = poisoned(&head.device, DType::F32, &[head.n]);
    let dhidden = poisoned(&head.device, head.hidden.dtype(), &[head.n, head.d]);
    let dweight = head.dweight();
    let tiles = Tiles::new(head.n, head.d, head.vp, asked).rounding_f16();
    let bytes = tiles.training_bytes();
    let guarded = Tensor::zeros(&head.device, DType::U8, &[bytes + 4096]).unwrap();
    guarded.write_bytes(0, &vec![0xA5; bytes + 4096]).unwrap();
    let args = ForwardBackward {
        hidden: &head.hidden,
        weight: &head.weight,
        vocab: head.vocab,
        targets: &head.targets(),
        ignore_index: IGNORE,
        losses: &losses,
        dloss: head.dloss,
        dhidden: &dhidden,
        dweight: &dweight,
        accumulate_dweight: !head.start.is_nan(),
        workspace: &guarded.slice(0, &[bytes]).unwrap(),
    };
    assert!(gpu::is_on_units(gpu, &args, &tiles), "{} {:?}", head.hidden.dtype(), [head.n, head.d, head.vocab]);
    gpu::forward_backward(gpu, &args, &tiles).unwrap();
    let mut guard = vec![0; 4096];
    guarded.read_bytes(bytes, &mut guard).unwrap();
    assert!(guard.iter().all(|&b| b == 0xA5), "something behind the workspace was written");
    (losses, dhidden, dweight)
}

/// With gradients near 1, so that their digits are there in f16 too.
fn assert_trained(what: &str, head: Head, asked: Option<[usize; 2]>) {
    let head = Head { dloss: 1.0, ..head };
    let (losses, dhidden, dweight) = train(&head, asked);
    let (want_losses, _) = head.reference().forward();
    let (want_dhidden, want_dweight) = head.reference_gradients();
    let (atol, rtol) = tolerance(DType::F32);
    assert_close(&format!("{what}: losses"), &losses, &want_losses, 4.0 * atol, rtol);
    if head.vocab > 1 {
        assert_near(&format!("{what}: dhidden"), &dhidden, &want_dhidden, head.hidden.dtype());
        let counted = head.vocab * head.d;
        let some = dweight.slice(0, &[counted]).unwrap();
        assert_near(&format!("{what}: dweight"), &some, &want_dweight[..counted], head.hidden.dtype());
    }
    let padding = if head.start.is_nan() { 0.0 } else { f64::from(head.start) };
    assert!(values(&dweight)[head.vocab * head.d..].iter().all(|&x| x == padding), "{what}: padding rows of dweight");
}

/// Runs `test` with every device and type.
fn everywhere(test: impl Fn(&Device, &Gpu, DType)) {
    for device in portable_gpus() {
        let Device::Gpu(gpu) = &device else { unreachable!() };
        for dtype in factors(gpu) {
            test(&device, gpu, dtype);
        }
    }
}

#[test]
fn fused_losses_and_gradients_match_the_reference_in_every_shape() {
    everywhere(|device, _, dtype| {
        for shape in SHAPES {
            for asked in [None, Some([16, 16]), Some([32, 128])] {
                let head = Head::new(device, dtype, shape);
                assert_trained(&format!("{shape:?} {dtype}, {asked:?}"), head, asked);
            }
        }
    });
}

#[test]
fn fused_blocks_of_several_fragments_match_the_reference() {
    // So many groups that software gets its larger blocks too.
    everywhere(|device, _, dtype| {
        let head = Head::new(device, dtype, [545, 40, 515, 520]).ignoring(|row| row % 7 == 3);
        assert_trained(&format!("{dtype}"), head, None);
    });
}

#[test]
fn fused_gradients_are_added_to_what_dweight_holds() {
    everywhere(|device, _, dtype| {
        for shape in [[17, 24, 61, 64], [150, 96, 271, 300]] {
            let head = Head::new(device, dtype, shape).ignoring(|row| row % 7 == 3).adding_to(0.25);
            assert_trained(&format!("{shape:?} {dtype}"), head, Some([32, 128]));
        }
    });
}

#[test]
fn fused_rows_that_do_not_count_get_zeros() {
    everywhere(|device, _, dtype| {
        let head = Head::new(device, dtype, [33, 16, 61, 64]).ignoring(|row| row < 2 || row % 3 == 1 || row == 32);
        let (losses, dhidden, _) = train(&head, None);
        for (row, d) in values(&dhidden).chunks(16).enumerate() {
            let ignored = head.targets[row] == IGNORE;
            assert_eq!(d.iter().all(|&x| x == 0.0), ignored, "row {row} {dtype}");
            assert_eq!(values(&losses)[row] == 0.0, ignored, "row {row} {dtype}");
        }
        assert_trained("others", head, None);
    });
}

#[test]
fn the_fused_target_is_found_in_every_column() {
    everywhere(|device, _, dtype| {
        let vocab = 139;
        let head = Head::new(device, dtype, [vocab, 16, vocab, 144]).with_targets(|row| row as i32);
        assert_trained(&format!("{dtype}"), head, None);
    });
}

#[test]
fn a_fused_maximum_is_found_wherever_it_is() {
    everywhere(|device, _, dtype| {
        for column in [0, 7, 8, 15, 63, 64, 129, 199] {
            let head = Head::new(device, dtype, [20, 16, 200, 208]).planting(1, column, 4.0).planting(18, 199, 3.0);
            assert_trained(&format!("column {column} {dtype}"), head, Some([16, 64]));
        }
    });
}

#[test]
fn a_fused_certain_target_has_loss_zero() {
    everywhere(|device, _, dtype| {
        let head = Head::new(device, dtype, [1, 16, 40, 40]).planting(0, 33, 1e3).with_targets(|_| 33);
        assert_eq!(values(&train(&head, None).0), [0.0]);
    });
}

#[test]
fn fused_logits_that_are_no_numbers_show_in_their_rows_alone() {
    everywhere(|device, _, dtype| {
        for bad in [f32::NAN, f32::INFINITY] {
            let head = Head::new(device, dtype, [20, 16, 100, 104]);
            let mut hidden = head.hidden.read_f32().unwrap();
            hidden[5 * 16] = bad;
            head.hidden.write_f32(&hidden).unwrap();
            let (losses, dhidden, _) = train(&head, None);
            for (row, loss) in values(&losses).into_iter().enumerate() {
                assert_eq!(loss.is_finite(), row != 5, "{bad} {dtype}: loss {loss} of row {row}");
            }
            for (row, d) in values(&dhidden).chunks(16).enumerate() {
                assert_eq!(d.iter().all(|x| x.is_finite()), row != 5, "{bad} {dtype}: dhidden of row {row}");
            }
        }
        let head = Head::new(device, dtype, [20, 16, 100, 104]);
        let mut weight = head.weight.read_f32().unwrap();
        weight[99 * 16] = f32::NAN;
        head.weight.write_f32(&weight).unwrap();
        assert!(values(&train(&head, None).0).iter().all(|loss| loss.is_nan()), "{dtype}");
    });
}

#[test]
fn fused_results_have_the_same_bits_whatever_the_chunks_and_the_pace() {
    everywhere(|device, gpu, dtype| {
        let head = Head::new(device, dtype, [300, 16, 411, 416]).ignoring(|row| row % 11 == 2);
        let run = |asked| {
            let before = gpu.launches();
            let (losses, dhidden, dweight) = train(&head, asked);
            ([losses, dhidden, dweight].map(|t| bits(&t)), gpu.launches() - before)
        };
        let (whole, few) = run(None);
        assert!(run(None).0 == whole, "{dtype}: a second run");
        let (chunks, more) = run(Some([48, 4096]));
        assert!(chunks == whole && more > few, "{dtype}: {more} launches in chunks, {few} whole");
        let budget = gpu.pace.budget();
        gpu.pace.set(1e-9, Some(1e9));
        let (cut, many) = run(None);
        gpu.pace.set(budget, None);
        // Three launches of rows, by four of columns; three of gradients.
        assert!(cut == whole && many > few + 12, "{dtype}: {many} launches cut, {few} whole");
    });
}

/// Relative error by norms of some values.
fn error(got: &[f64], want: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(want).map(|(g, w)| g - w)) / norm(&mut want.iter().copied())
}

/// Some losses, rows of `dhidden` and rows of `dweight` of a large head against exact sums.
fn assert_large(device: &Device, dtype: DType, [n, d, vocab, vp]: [usize; 4]) {
    let mut rng = Random::new(11);
    // The pattern's length is prime, so that no two rows near each other are alike.
    let pattern = rng.normals(65_537, 1.0);
    let filled = |rows: usize, std: f32| {
        let numbers: Vec<f32> = (0..rows * d).map(|i| std * pattern[i % pattern.len()]).collect();
        let t = Tensor::from_f32(device, dtype, &[rows, d], &numbers).unwrap();
        let exact = values(&t);
        (t, exact)
    };
    let (hidden, hidden64) = filled(n, 1.0);
    let (weight, weight64) = filled(vp, 1.0 / (d as f32).sqrt());
    let targets: Vec<i32> = (0..n).map(|row| (row * 7919 % vocab) as i32).collect();
    let head = Head {
        device: device.clone(),
        n,
        d,
        vocab,
        vp,
        hidden,
        weight,
        targets,
        dloss: 1.0,
        start: f32::NAN,
        hidden64,
        weight64,
    };
    let (losses, dhidden, dweight) = train(&head, None);
    let logit = |row: usize, v: usize| -> f64 {
        let (h, w) = (&head.hidden64[row * d..][..d], &head.weight64[v * d..][..d]);
        h.iter().zip(w).map(|(a, b)| a * b).sum()
    };
    let target = |row: usize| head.targets[row] as usize;
    let (losses, dhidden) = (values(&losses), values(&dhidden));
    let bound = if dtype == DType::F16 { 1.5e-3 } else { 6e-3 };
    for row in [0, n / 2 + 1, n - 1] {
        let logits: Vec<f64> = (0..vocab).map(|v| logit(row, v)).collect();
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = most + logits.iter().map(|l| (l - most).exp()).sum::<f64>().ln();
        let want = lse - logits[target(row)];
        assert!(
            (losses[row] - want).abs() < 2e-5 * want.max(1.0),
            "{dtype}: loss {} of row {row}, {want}",
            losses[row]
        );
        let mut sums = vec![0.0; d];
        for (v, l) in logits.iter().enumerate() {
            let gradient = (l - lse).exp() - if v == target(row) { 1.0 } else { 0.0 };
            sums.iter_mut().zip(&head.weight64[v * d..][..d]).for_each(|(s, w)| *s += gradient * w);
        }
        let off = error(&dhidden[row * d..][..d], &sums);
        assert!(off < bound, "{dtype}: dhidden of row {row} is off by {off:.1e}");
    }
    // The losses are right, so they tell each row's log-sum-exp.
    let lse: Vec<f64> = (0..n).map(|row| losses[row] + logit(row, target(row))).collect();
    for v in [0, vocab / 2, vocab - 1] {
        let mut sums = vec![0.0; d];
        for (row, lse) in lse.iter().enumerate() {
            let gradient = (logit(row, v) - lse).exp() - if v == target(row) { 1.0 } else { 0.0 };
            sums.iter_mut().zip(&head.hidden64[row * d..][..d]).for_each(|(s, h)| *s += gradient * h);
        }
        let off = error(&values(&dweight.slice(v * d, &[d]).unwrap()), &sums);
        assert!(off < bound, "{dtype}: dweight of column {v} is off by {off:.1e}");
    }
    assert!(values(&dweight.slice(vocab * d, &[vp - vocab, d]).unwrap()).iter().all(|&x| x == 0.0));
}

#[test]
fn a_large_fused_head_is_right_where_it_is_looked_at() {
    everywhere(|device, _, dtype| {
        // That of GPT-2 where there is hardware for it: chunks of rows, seven tiles, a column that is no pack.
        let shape = if is_software(device) { [70, 64, 1001, 1024] } else { [4096, 768, 50_257, 50_304] };
        assert_large(device, dtype, shape);
    });
}

#[test]
fn heads_whose_rows_are_no_whole_packs_stay_off_the_units() {
    everywhere(|device, gpu, dtype| {
        let head = Head::new(device, dtype, [20, 12, 40, 48]);
        let [losses, other] = [(); 2].map(|()| poisoned(device, DType::F32, &[20]));
        let tiles = Tiles::new(20, 12, 48, None);
        let args = ForwardBackward {
            hidden: &head.hidden,
            weight: &head.weight,
            vocab: 40,
            targets: &head.targets(),
            ignore_index: IGNORE,
            losses: &losses,
            dloss: 1.0,
            dhidden: &head.hidden,
            dweight: &head.weight,
            accumulate_dweight: false,
            workspace: &other,
        };
        assert!(!gpu::is_on_units(gpu, &args, &tiles));
    });
}

#[cfg(feature = "metal")]
#[test]
fn metal_text_of_the_fused_head_multiplies_on_the_matrix_units() {
    use crate::runtime::gpu::metal;
    let device = Device::Gpu(metal::open());
    let t = |shape: &[usize]| Tensor::zeros(&device, DType::F16, shape).unwrap();
    let f = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
    let Device::Gpu(gpu) = &device else { unreachable!() };
    let tiles = Tiles::new(600, 64, 1000, None).rounding_f16();
    let args = ForwardBackward {
        hidden: &t(&[600, 64]),
        weight: &t(&[1000, 64]),
        vocab: 999,
        targets: &Tensor::zeros(&device, DType::I32, &[600]).unwrap(),
        ignore_index: IGNORE,
        losses: &f(&[600]),
        dloss: 1.0,
        dhidden: &t(&[600, 64]),
        dweight: &t(&[1000, 64]),
        accumulate_dweight: false,
        workspace: &Tensor::zeros(&device, DType::U8, &[tiles.training_bytes()]).unwrap(),
    };
    gpu::forward_backward(gpu, &args, &tiles).unwrap();
    device.synchronize().unwrap();
    for kernel in ["units::sums_kernel", "units::gradients_kernel"] {
        let all = metal::compiled();
        let (name, kernel) = all.iter().find(|(name, _)| name.contains(kernel)).expect("launched");
        for word in ["simdgroup_multiply_accumulate", "simdgroup_load", "simdgroup_store"] {
            assert!(kernel.source.contains(word), "{name} lacks {word}:\n{}", kernel.source);
        }
        for line in kernel.source.lines().filter(|line| line.contains("simdgroup_load")) {
            assert!(line.contains("threadgroup half"), "{name}: {line}");
        }
        assert!(kernel.shared_bytes <= 32 << 10, "{name}: {} bytes of threadgroup memory", kernel.shared_bytes);
    }
}

#[test]
fn pairs_of_a_chunk_fit_its_part_of_the_workspace_whatever_the_blocks() {
    for n in [1, 7, 127, 128, 129, 1000, 4096, 32_768] {
        for vp in [1, 5, 127, 128, 129, 50_304, 151_936, 1_000_000] {
            let tiles = Tiles::new(n, 8, vp, None);
            for (group, plane) in [(128, 64), (64, 32), (64, 16), (32, 16), (16, 8), (128, 8)] {
                let parts = vp.div_ceil(group) * (group / plane);
                let rows = tiles.sum_rows(parts);
                assert!(rows * parts * 8 <= tiles.partials_bytes(), "{n} rows, {vp} columns, planes of {plane}");
                assert!(rows == n || rows.is_multiple_of(128), "{rows} of {n} rows");
            }
        }
    }
}

#[test]
fn portable_workspaces_keep_their_stated_bounds() {
    let mib = |bytes: usize| bytes.div_ceil(1 << 20);
    // The vocabulary of GPT-2: a batch of 4 and one of 32.
    for (n, forward, training) in [(4096, 17, 77), (32_768, 17, 161)] {
        let tiles = Tiles::new(n, 768, 50_304, None);
        assert_eq!((mib(tiles.forward_bytes()), mib(tiles.training_bytes())), (forward, training), "{n} rows");
    }
    // Rows cost their sums of `dhidden` and LEAST_BYTES of the tile, never their logits.
    let bytes = |n| Tiles::new(n, 768, 50_304, None).training_bytes();
    assert!(bytes(1 << 20) - bytes(1 << 19) <= (1 << 19) * (768 * 4 + 2048 + 4));
}
