//! Errors before any write, workspaces, plans, and the same bits for any number of threads.

use super::*;
use crate::linear_cross_entropy::{
    backward, backward_workspace_bytes, forward, forward_backward, forward_backward_workspace_bytes,
    forward_workspace_bytes,
};
use crate::testing::FLOATS;

/// All tensors that any of the three entries takes, at `(N, D, V, Vp) = (6, 5, 9, 11)`.
struct All {
    device: Device,
    hidden: Tensor,
    weight: Tensor,
    vocab: usize,
    targets: Tensor,
    losses: Tensor,
    lse: Tensor,
    dhidden: Tensor,
    dweight: Tensor,
    workspace: Tensor,
}

impl All {
    fn new(device: &Device) -> All {
        let zeros = |dtype, shape: &[usize]| Tensor::zeros(device, dtype, shape).unwrap();
        let bytes = forward_backward_workspace_bytes(device, 6, 5, 11).max(backward_workspace_bytes(device, 6, 5, 11));
        All {
            device: device.clone(),
            hidden: zeros(DType::F32, &[6, 5]),
            weight: zeros(DType::F32, &[11, 5]),
            vocab: 9,
            targets: zeros(DType::I32, &[6]),
            losses: poisoned(device, DType::F32, &[6]),
            lse: poisoned(device, DType::F32, &[6]),
            dhidden: poisoned(device, DType::F32, &[6, 5]),
            dweight: poisoned(device, DType::F32, &[11, 5]),
            workspace: zeros(DType::U8, &[bytes]),
        }
    }

    fn forward(&self) -> Result<()> {
        let (hidden, weight, vocab, targets) = (&self.hidden, &self.weight, self.vocab, &self.targets);
        let (losses, lse, workspace) = (&self.losses, &self.lse, &self.workspace);
        let args = Forward { hidden, weight, vocab, targets, ignore_index: IGNORE, losses, lse, workspace };
        forward(&self.device, &args)
    }

    fn backward(&self) -> Result<()> {
        let args = Backward {
            hidden: &self.hidden,
            weight: &self.weight,
            vocab: self.vocab,
            targets: &self.targets,
            ignore_index: IGNORE,
            lse: &self.lse,
            dloss: 1.0,
            dhidden: &self.dhidden,
            dweight: &self.dweight,
            accumulate_dweight: false,
            workspace: &self.workspace,
        };
        backward(&self.device, &args)
    }

    fn train(&self) -> Result<()> {
        let args = ForwardBackward {
            hidden: &self.hidden,
            weight: &self.weight,
            vocab: self.vocab,
            targets: &self.targets,
            ignore_index: IGNORE,
            losses: &self.losses,
            dloss: 1.0,
            dhidden: &self.dhidden,
            dweight: &self.dweight,
            accumulate_dweight: false,
            workspace: &self.workspace,
        };
        forward_backward(&self.device, &args)
    }

    /// The messages of the three entries, each of which must refuse and write nothing.
    #[track_caller]
    fn refused(&self) -> [String; 3] {
        let results = [self.forward(), self.backward(), self.train()];
        for t in [&self.losses, &self.dhidden, &self.dweight] {
            if t.dtype().is_float() {
                assert!(values(t).iter().all(|x| x.is_nan()), "an output was written before the refusal");
            }
        }
        results.map(|r| r.expect_err("accepted").to_string())
    }
}

#[track_caller]
fn assert_names(messages: &[String], argument: &str) {
    for message in messages {
        assert!(message.starts_with("linear_cross_entropy."), "{message}");
        assert!(message.contains(&format!("`{argument}`")), "{message}");
    }
}

fn cpu() -> Device {
    Device::cpu_with_threads(2)
}

#[test]
fn valid_arguments_are_accepted() {
    let all = All::new(&cpu());
    all.forward().unwrap();
    all.backward().unwrap();
    all.train().unwrap();
}

#[test]
fn a_target_outside_the_vocabulary_is_refused_by_row_and_id() {
    for bad in [9, 10, 50_000, -1, -101, i32::MIN, i32::MAX] {
        let all = All::new(&cpu());
        all.targets.write_i32(&[0, 8, IGNORE, bad, 1, bad]).unwrap();
        let messages = all.refused();
        assert_names(&messages, "targets");
        for message in messages {
            assert!(message.contains(&format!("row 3 is {bad}, allowed are 0 to 8")), "{message}");
        }
    }
}

#[test]
fn a_vocabulary_of_zero_or_above_the_weight_is_refused() {
    for vocab in [0, 12] {
        let all = All { vocab, ..All::new(&cpu()) };
        assert_names(&all.refused(), "vocab");
    }
}

#[test]
fn a_weight_of_another_width_is_refused() {
    let device = cpu();
    let all = All { weight: Tensor::zeros(&device, DType::F32, &[11, 4]).unwrap(), ..All::new(&device) };
    assert_names(&all.refused(), "weight");
}

#[test]
fn integers_are_no_weights() {
    let device = cpu();
    let ints = |shape: &[usize]| Tensor::zeros(&device, DType::I32, shape).unwrap();
    assert_names(&All { weight: ints(&[11, 5]), ..All::new(&device) }.refused(), "weight");
    assert_names(&All { hidden: ints(&[6, 5]), ..All::new(&device) }.refused(), "hidden");
    assert_names(&[All { dhidden: ints(&[6, 5]), ..All::new(&device) }.train().unwrap_err().to_string()], "dhidden");
    assert_names(&[All { dweight: ints(&[11, 5]), ..All::new(&device) }.train().unwrap_err().to_string()], "dweight");
}

#[test]
fn targets_must_be_i32_and_one_a_row() {
    let device = cpu();
    let floats = All { targets: Tensor::zeros(&device, DType::F32, &[6]).unwrap(), ..All::new(&device) };
    assert_names(&floats.refused(), "targets");
    let short = All { targets: Tensor::zeros(&device, DType::I32, &[5]).unwrap(), ..All::new(&device) };
    assert_names(&short.refused(), "targets");
}

#[test]
fn losses_and_lse_are_f32_one_a_row() {
    let device = cpu();
    let half = || Tensor::zeros(&device, DType::BF16, &[6]).unwrap();
    let long = || Tensor::zeros(&device, DType::F32, &[7]).unwrap();
    for t in [half(), long()] {
        let all = All { losses: t.clone(), ..All::new(&device) };
        assert_names(&[all.forward(), all.train()].map(|r| r.unwrap_err().to_string()), "losses");
        let all = All { lse: t, ..All::new(&device) };
        assert_names(&[all.forward(), all.backward()].map(|r| r.unwrap_err().to_string()), "lse");
    }
}

#[test]
fn gradients_of_another_shape_are_refused() {
    let device = cpu();
    let all = All { dhidden: Tensor::zeros(&device, DType::F32, &[5, 6]).unwrap(), ..All::new(&device) };
    assert_names(&[all.backward(), all.train()].map(|r| r.unwrap_err().to_string()), "dhidden");
    let all = All { dweight: Tensor::zeros(&device, DType::F32, &[9, 5]).unwrap(), ..All::new(&device) };
    assert_names(&[all.backward(), all.train()].map(|r| r.unwrap_err().to_string()), "dweight");
}

#[test]
fn a_small_workspace_is_refused_with_the_bytes_that_are_needed() {
    let device = cpu();
    let bytes = forward_workspace_bytes(&device, 6, 5, 11);
    let with = |bytes: usize| {
        let workspace = Tensor::zeros(&device, DType::U8, &[bytes]).unwrap();
        All { workspace, ..All::new(&device) }
    };
    assert_names(&with(64).refused(), "workspace");
    let message = with(bytes - 1).forward().unwrap_err().to_string();
    assert!(message.contains(&format!("at least {bytes} bytes")), "{message}");
    with(bytes).forward().unwrap();
}

#[test]
fn a_workspace_off_its_alignment_is_refused() {
    let all = All::new(&cpu());
    let bytes = all.workspace.bytes();
    let large = Tensor::zeros(&all.device, DType::U8, &[bytes + 1]).unwrap();
    let all = All { workspace: large.slice(1, &[bytes]).unwrap(), ..all };
    let results = [all.forward(), all.backward(), all.train()];
    assert!(results.iter().all(|r| r.is_err()));
}

#[test]
fn outputs_that_overlap_anything_are_refused() {
    let device = cpu();
    let base = All::new(&device);
    let same = |r: Result<()>, output: &str, other: &str| {
        let message = r.expect_err("accepted").to_string();
        assert!(message.contains(&format!("`{output}`")) && message.contains(&format!("`{other}`")), "{message}");
    };
    same(All { lse: base.losses.clone(), ..All::new(&device) }.with_losses(&base.losses).forward(), "losses", "lse");
    let all = All::new(&device);
    same(All { dhidden: all.hidden.clone(), ..all }.train(), "dhidden", "hidden");
    let all = All::new(&device);
    same(All { dweight: all.weight.clone(), ..all }.backward(), "dweight", "weight");
    let all = All::new(&device);
    let losses = all.workspace.reinterpret(0, DType::F32, &[6]).unwrap();
    same(All { losses, ..all }.train(), "losses", "workspace");
}

impl All {
    fn with_losses(mut self, losses: &Tensor) -> All {
        self.losses = losses.clone();
        self
    }
}

#[test]
fn tensors_of_another_device_are_refused() {
    let (device, other) = (cpu(), cpu());
    let all = All { weight: All::new(&other).weight, ..All::new(&device) };
    assert_names(&all.refused(), "weight");
    let all = All { workspace: All::new(&other).workspace, ..All::new(&device) };
    assert_names(&all.refused(), "workspace");
}

#[test]
fn workspaces_never_grow_with_rows_times_vocabulary() {
    // Past the largest block, each further row costs an index, and in the gradients' entries two numbers: 4 and 12 bytes.
    let device = cpu();
    let (d, vp) = (768, 50_304);
    let all = [forward_workspace_bytes, backward_workspace_bytes, forward_backward_workspace_bytes];
    for (bytes, per_row) in all.into_iter().zip([4, 12, 12]) {
        let (few, many) = (bytes(&device, 4096, d, vp), bytes(&device, 1 << 20, d, vp));
        assert_eq!(many - few, ((1 << 20) - 4096) * per_row);
    }
}

#[test]
fn workspaces_keep_their_stated_bounds() {
    let device = cpu();
    let mib = 1 << 20;
    for (d, vp) in [(768, 50_304), (4096, 151_936), (2304, 256_000)] {
        let n = 8192;
        let logits = n * vp * 4;
        let small = forward_workspace_bytes(&device, n, d, vp);
        assert!(small < logits / 100 && small < 14 * mib, "forward, D={d}, Vp={vp}: {small}");
        let small = backward_workspace_bytes(&device, n, d, vp);
        assert!(small < logits / 40 && small < 32 * mib, "backward, D={d}, Vp={vp}: {small}");
        let chunk = forward_backward_workspace_bytes(&device, n, d, vp);
        assert!(chunk < logits / 20 && chunk < 54 * mib, "training, D={d}, Vp={vp}: {chunk}");
    }
}

#[test]
fn more_than_128_rows_never_have_all_their_logits_at_once() {
    for vp in [37, 5_000, 50_304, 1_000_000] {
        for n in [129, 256, 4096] {
            let layout = Layout::training(4, n, 1, vp);
            assert!(layout.rows <= 140 && layout.rows < n, "N={n}, Vp={vp}: {} rows", layout.rows);
            // 32 MiB, and a little for what each thread and each row needs; one row of a vocabulary of any size.
            assert!(layout.bytes() <= (36 << 20).max(vp * 8), "N={n}, Vp={vp}: {} bytes", layout.bytes());
        }
    }
}

#[test]
fn a_larger_workspace_than_needed_is_fine() {
    let all = All::new(&cpu());
    let large = Tensor::zeros(&all.device, DType::U8, &[all.workspace.bytes() + 777]).unwrap();
    let all = All { workspace: large, ..all };
    all.forward().unwrap();
    all.train().unwrap();
}

#[test]
fn nothing_behind_the_workspace_is_written() {
    // Bug 1: scratch sized by another expression than the launch. Guard bytes behind each workspace stay.
    let device = cpu();
    for dtype in FLOATS {
        let head = Head::new(&device, dtype, [37, 20, 150, 160]).ignoring(|row| row % 7 == 3);
        let targets = head.targets();
        let guarded = |bytes: usize| {
            let t = Tensor::zeros(&device, DType::U8, &[bytes + 4096]).unwrap();
            t.write_bytes(0, &vec![0xA5; bytes + 4096]).unwrap();
            let inner = t.slice(0, &[bytes]).unwrap();
            (t, inner)
        };
        let check = |t: &Tensor, inner: &Tensor| {
            let mut guard = vec![0; 4096];
            t.read_bytes(inner.bytes(), &mut guard).unwrap();
            assert!(guard.iter().all(|&b| b == 0xA5), "{dtype}");
        };
        let [losses, lse] = [(); 2].map(|()| poisoned(&device, DType::F32, &[37]));
        let (dhidden, dweight) = (poisoned(&device, dtype, &[37, 20]), head.dweight());
        let (outer, inner) = guarded(forward_workspace_bytes(&device, 37, 20, 160));
        let args = Forward {
            hidden: &head.hidden,
            weight: &head.weight,
            vocab: 150,
            targets: &targets,
            ignore_index: IGNORE,
            losses: &losses,
            lse: &lse,
            workspace: &inner,
        };
        forward(&device, &args).unwrap();
        check(&outer, &inner);
        let (outer, inner) = guarded(backward_workspace_bytes(&device, 37, 20, 160));
        let args = Backward {
            hidden: &head.hidden,
            weight: &head.weight,
            vocab: 150,
            targets: &targets,
            ignore_index: IGNORE,
            lse: &lse,
            dloss: 1.0,
            dhidden: &dhidden,
            dweight: &dweight,
            accumulate_dweight: false,
            workspace: &inner,
        };
        backward(&device, &args).unwrap();
        check(&outer, &inner);
        let (outer, inner) = guarded(forward_backward_workspace_bytes(&device, 37, 20, 160));
        let args = ForwardBackward {
            hidden: &head.hidden,
            weight: &head.weight,
            vocab: 150,
            targets: &targets,
            ignore_index: IGNORE,
            losses: &losses,
            dloss: 1.0,
            dhidden: &dhidden,
            dweight: &dweight,
            accumulate_dweight: false,
            workspace: &inner,
        };
        forward_backward(&device, &args).unwrap();
        check(&outer, &inner);
    }
}

#[test]
fn the_same_bits_for_any_number_of_threads() {
    for dtype in FLOATS {
        let run = |threads: usize| {
            let device = Device::cpu_with_threads(threads);
            let head = Head::new(&device, dtype, [150, 65, 1100, 1152]).ignoring(|row| row % 11 == 2);
            let (losses, lse) = head.forward(&Layout::forward(4, 150, 65, 1152)).unwrap();
            let (dhidden, dweight) = head.backward(&lse, &head.backward_layout(64, 512, 100)).unwrap();
            let (train_losses, train_dhidden, train_dweight) = head.train(&Layout::training(4, 150, 65, 1152)).unwrap();
            [losses, lse, dhidden, dweight, train_losses, train_dhidden, train_dweight].map(|t| bits(&t))
        };
        let one = run(1);
        for threads in [2, 3, 4] {
            assert!(run(threads) == one, "{dtype}, {threads} threads");
        }
    }
}

#[test]
fn the_same_bits_when_run_again() {
    for device in crate::testing::production_devices() {
        for dtype in FLOATS {
            let head = Head::new(&device, dtype, [150, 64, 1100, 1152]);
            let run = || {
                let (losses, dhidden, dweight) = head.train(&Layout::training(4, 150, 64, 1152)).unwrap();
                [losses, dhidden, dweight].map(|t| bits(&t))
            };
            assert!(run() == run(), "{dtype} on {}", device.name());
        }
    }
}

#[test]
fn the_null_device_records_work_and_bytes_and_computes_nothing() {
    let device = Device::null(2);
    let all = All::new(&device);
    all.forward().unwrap();
    all.backward().unwrap();
    all.train().unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    let nvd = 6 * 9 * 5;
    let inputs = (6 * 5 + 11 * 5 + 6) * 4;
    let expected = [
        ("linear_cross_entropy.forward", 2 * nvd, inputs + 12 * 4),
        ("linear_cross_entropy.backward", 6 * nvd, inputs + (6 + 30 + 55) * 4),
        ("linear_cross_entropy.forward_backward", 6 * nvd, inputs + (6 + 30 + 55) * 4),
    ];
    for (launch, want) in launches.iter().zip(expected) {
        assert_eq!((launch.op, launch.flops, launch.bytes), want);
    }
    assert_eq!(launches.len(), 3);
}

#[test]
fn the_null_device_checks_arguments_too() {
    let all = All { vocab: 12, ..All::new(&Device::null(2)) };
    for message in [all.forward(), all.backward(), all.train()].map(|r| r.unwrap_err().to_string()) {
        assert!(message.contains("`vocab` is 12"), "{message}");
    }
}
