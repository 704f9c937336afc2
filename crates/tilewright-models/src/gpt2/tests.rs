//! Behaviour of the whole model at tiny sizes; the golden set at full size lives with the trainer.

use super::*;
use tilewright_ops::Device;

const TINY: Gpt2Config =
    Gpt2Config { max_seq_len: 16, vocab_size: 29, padded_vocab_size: 37, layers: 2, heads: 3, channels: 48 };

fn batch(n: usize, seed: u32) -> (Vec<i32>, Vec<i32>) {
    let mut s = seed;
    let mut next = || {
        s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((s >> 16) % 29) as i32
    };
    ((0..n).map(|_| next()).collect(), (0..n).map(|_| next()).collect())
}

fn tiny(threads: usize, options: Options) -> Gpt2 {
    let mut model = Gpt2::new(&Device::cpu_with_threads(threads), TINY, options).unwrap();
    model.init_random(42).unwrap();
    // Larger than the initialisation, so that no activation hides in the rounding of another; biases must matter too.
    for (i, p) in model.params().iter().enumerate() {
        let mut values = p.read_f32().unwrap();
        for (j, v) in values.iter_mut().enumerate() {
            *v = *v * 3.0 + 0.01 * ((i * 31 + j * 17) % 13) as f32;
        }
        let padding = if i == param::WTE { 29 * 48 } else { values.len() };
        values[padding..].fill(0.0);
        p.write_f32(&values).unwrap();
    }
    model.masters_from_params().unwrap();
    model
}

fn adamw(step: u64) -> AdamW {
    AdamW {
        lr: 1e-2,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
        decay_all: false,
        step,
        grad_scale: 1.0,
        max_norm: Some(1.0),
        stochastic_seeds: None,
    }
}

fn grads(model: &Gpt2) -> Vec<Vec<f32>> {
    model.grads().iter().map(|g| g.read_f32().unwrap()).collect()
}

#[test]
fn loss_of_the_initial_model_is_near_the_log_of_the_vocabulary() {
    let mut model = Gpt2::new(&Device::cpu_with_threads(2), TINY, Options::evaluation(2, 7)).unwrap();
    model.init_random(42).unwrap();
    let (x, y) = batch(14, 1);
    let loss = model.loss(&x, &y).unwrap();
    assert!((loss - 29f32.ln()).abs() < 0.1, "{loss}");
}

/// Compares gradients of parameter tensor `index` (only of `layer`, where one is given) with differences of the loss.
fn check_gradient(index: usize, layer: Option<usize>) {
    let (x, y) = batch(2 * 7, 3);
    let mut model = tiny(2, Options::training(2, 7));
    model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
    let part = |t: &Tensor| layer.map_or(t.clone(), |l| t.index(l).unwrap());
    let (tensor, name) = (part(&model.params()[index]), PARAMS[index].name);
    let analytic = part(&model.grads()[index]).read_f32().unwrap();
    let n = if index == param::WTE { 29 * 48 } else { tensor.numel() };
    let largest = analytic.iter().fold(0f32, |m, g| m.max(g.abs()));
    assert!(largest > 0.0, "{name} has no gradient at all");
    let flat = tensor.view(&[tensor.numel()]).unwrap();
    for k in 0..6 {
        let at = (k * 7919 + 13 * index) % n;
        let element = flat.slice(at, &[1]).unwrap();
        let old = element.read_f32().unwrap()[0];
        let mut losses = [0f32; 14];
        let mut loss = |v: f32| {
            element.write_f32(&[v]).unwrap();
            model.row_losses(&x, &y, &mut losses).unwrap();
            losses.iter().map(|&l| f64::from(l)).sum::<f64>() / 14.0
        };
        // Richardson's extrapolation removes the h^2 term; the rest is the noise of f32 losses, about 1e-6, over h.
        let mut central = |h: f32| (loss(old + h) - loss(old - h)) / f64::from((old + h) - (old - h));
        let difference = (4.0 * central(2e-3) - central(4e-3)) / 3.0;
        element.write_f32(&[old]).unwrap();
        let got = f64::from(analytic[at]);
        let bound = 3e-3 * f64::from(largest) + 2e-3;
        assert!((difference - got).abs() < bound, "{name}[{at}]: {got} against {difference}");
    }
}

#[test]
fn gradients_match_finite_differences_of_the_loss() {
    (0..PARAMS.len()).for_each(|index| check_gradient(index, None));
}

#[test]
fn bug_11_the_skip_connection_carries_the_gradient_to_the_first_layer() {
    for index in [param::FCPROJW, param::FCPROJB, param::ATTPROJW, param::ATTPROJB] {
        check_gradient(index, Some(0));
    }
    // The published fault let block gradients fade a millionfold towards the input.
    let (x, y) = batch(14, 3);
    let mut model = tiny(2, Options::training(2, 7));
    model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
    let norm = |l: usize| {
        let layer = model.grads()[param::FCPROJW].index(l).unwrap().read_f32().unwrap();
        layer.iter().map(|g| g * g).sum::<f32>().sqrt()
    };
    let ratio = norm(0) / norm(1);
    assert!((0.1..10.0).contains(&ratio), "{ratio}");
}

#[test]
fn bug_12_the_gelu_derivative_belongs_to_the_hidden_layers_gradient() {
    for index in [param::FCW, param::FCB, param::LN2W, param::LN2B] {
        check_gradient(index, Some(0));
        check_gradient(index, Some(1));
    }
}

#[test]
fn bug_13_the_first_layernorm_is_differentiated_at_its_input() {
    for index in [param::LN1W, param::LN1B, param::WTE, param::WPE] {
        check_gradient(index, PARAMS[index].stacked.then_some(0));
    }
}

#[test]
fn bug_15_each_layer_differentiates_its_own_attention() {
    for layer in 0..2 {
        check_gradient(param::QKVW, Some(layer));
        check_gradient(param::QKVB, Some(layer));
    }
}

#[test]
fn padded_vocabulary_rows_have_no_gradient_and_never_change() {
    let mut model = tiny(2, Options::training(2, 7));
    let (x, y) = batch(14, 5);
    for step in 1..=3 {
        model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
        model.grad_norm().unwrap();
        model.update(&adamw(step)).unwrap();
    }
    for t in [&model.grads()[0], &model.params()[0]] {
        assert!(t.read_f32().unwrap()[29 * 48..].iter().all(|&v| v == 0.0));
    }
}

#[test]
fn training_on_one_batch_drives_its_loss_down() {
    let mut model = tiny(2, Options::training(2, 7));
    let (x, y) = batch(14, 9);
    let first = model.loss(&x, &y).unwrap();
    for step in 1..=60 {
        model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
        model.grad_norm().unwrap();
        model.update(&adamw(step)).unwrap();
    }
    let last = model.loss(&x, &y).unwrap();
    assert!(last < 0.2 * first, "{first} to {last}");
}

#[test]
fn every_recompute_mode_gives_the_same_bits() {
    let (x, y) = batch(14, 11);
    let run = |recompute| {
        let mut model = tiny(2, Options { recompute, ..Options::training(2, 7) });
        model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
        grads(&model)
    };
    let kept = run(Recompute::None);
    assert_eq!(kept, run(Recompute::Gelu));
    assert_eq!(kept, run(Recompute::GeluAndLayernorm));
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let (x, y) = batch(2 * 13, 13);
    let run = |threads| {
        let mut model = tiny(threads, Options::training(2, 13));
        for step in 1..=5 {
            model.forward_backward(&x, &y, false, 1.0 / 26.0).unwrap();
            model.grad_norm().unwrap();
            model.update(&adamw(step)).unwrap();
        }
        model.params().iter().map(|p| p.read_f32().unwrap()).collect::<Vec<_>>()
    };
    let one = run(1);
    assert_eq!(one, run(2));
    assert_eq!(one, run(3));
}

#[test]
fn accumulated_micro_batches_equal_one_large_batch() {
    let (x, y) = batch(4 * 7, 15);
    let mut large = tiny(2, Options::training(4, 7));
    let whole = large.forward_backward(&x, &y, false, 1.0 / 28.0).unwrap();
    let mut small = tiny(2, Options::training(2, 7));
    let mut parts = 0.0;
    for i in 0..2 {
        let range = i * 14..(i + 1) * 14;
        parts += small.forward_backward(&x[range.clone()], &y[range], i > 0, 1.0 / 28.0).unwrap();
    }
    assert!((whole - parts).abs() < 1e-3, "{whole} {parts}");
    for ((a, b), info) in grads(&large).iter().zip(&grads(&small)).zip(&PARAMS) {
        let scale = a.iter().fold(0f32, |m, v| m.max(v.abs()));
        for (p, q) in a.iter().zip(b) {
            assert!((p - q).abs() <= 1e-5 * scale + 1e-7, "{}: {p} {q}", info.name);
        }
    }
}

#[test]
fn a_second_step_does_not_see_the_first_steps_gradients() {
    let (x, y) = batch(14, 17);
    let (x2, y2) = batch(14, 18);
    let mut fresh = tiny(2, Options::training(2, 7));
    fresh.forward_backward(&x2, &y2, false, 1.0 / 14.0).unwrap();
    let mut used = tiny(2, Options::training(2, 7));
    used.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
    used.forward_backward(&x2, &y2, false, 1.0 / 14.0).unwrap();
    assert_eq!(grads(&fresh), grads(&used));
}

#[test]
fn a_later_token_changes_no_earlier_logit() {
    let mut model = tiny(2, Options::evaluation(1, 11));
    let (mut x, _) = batch(11, 19);
    let before = model.logits(&x).unwrap();
    x[10] = (x[10] + 1) % 29;
    let after = model.logits(&x).unwrap();
    assert_eq!(before[..10 * 29], after[..10 * 29]);
    assert_ne!(before[10 * 29..], after[10 * 29..]);
}

#[test]
fn rows_of_a_batch_do_not_see_each_other() {
    let mut model = tiny(2, Options::evaluation(2, 5));
    let (mut x, _) = batch(10, 21);
    let before = model.logits(&x).unwrap();
    x[7] = (x[7] + 1) % 29;
    let after = model.logits(&x).unwrap();
    assert_eq!(before[..5 * 29], after[..5 * 29]);
}

#[test]
fn losses_equal_those_of_the_logits() {
    let mut model = tiny(2, Options::evaluation(2, 5));
    let (x, y) = batch(10, 23);
    let logits = model.logits(&x).unwrap();
    let mut losses = vec![0.0; 10];
    model.row_losses(&x, &y, &mut losses).unwrap();
    for (r, row) in logits.chunks(29).enumerate() {
        let sum: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        let want = sum.ln() - f64::from(row[y[r] as usize]);
        assert!((f64::from(losses[r]) - want).abs() < 1e-5, "row {r}");
    }
}

#[test]
fn ignored_targets_count_in_no_loss_and_no_gradient() {
    let (x, mut y) = batch(14, 25);
    y[7..].fill(IGNORE_INDEX);
    let mut both = tiny(2, Options::training(2, 7));
    let sum = both.forward_backward(&x, &y, false, 1.0 / 7.0).unwrap();
    let mut one = tiny(2, Options::training(1, 7));
    let want = one.forward_backward(&x[..7], &y[..7], false, 1.0 / 7.0).unwrap();
    assert!((sum - want).abs() < 1e-4);
    for (a, b) in grads(&both).iter().zip(&grads(&one)) {
        let scale = a.iter().fold(0f32, |m, v| m.max(v.abs()));
        assert!(a.iter().zip(b).all(|(p, q)| (p - q).abs() <= 2e-5 * scale));
    }
}

#[test]
fn the_sampling_cache_predicts_what_the_full_pass_predicts() {
    let mut model = tiny(2, Options { decode_len: 11, ..Options::evaluation(1, 11) });
    let (x, _) = batch(11, 27);
    let full = model.logits(&x).unwrap();
    let decoder = model.decoder().unwrap();
    for (t, &token) in x.iter().enumerate() {
        decoder.step(token).unwrap();
        let got = decoder.logits().read_f32().unwrap();
        for (v, (g, w)) in got[..29].iter().zip(&full[t * 29..]).enumerate() {
            assert!((g - w).abs() < 1e-4, "position {t}, token {v}: {g} {w}");
        }
    }
    let message = decoder.step(0).unwrap_err().to_string();
    assert!(message.contains("11 positions"), "{message}");
    decoder.reset();
    decoder.step(x[0]).unwrap();
    assert!((decoder.logits().read_f32().unwrap()[3] - full[3]).abs() < 1e-4);
}

#[test]
fn half_precision_storage_stays_near_f32() {
    let (x, y) = batch(14, 29);
    let want = tiny(2, Options::training(2, 7)).forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
    for dtype in [DType::BF16, DType::F16] {
        let mut model = tiny(2, Options { dtype, masters: true, ..Options::training(2, 7) });
        let got = model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
        assert!((got - want).abs() < 0.03 * want, "{dtype}: {got} {want}");
        model.grad_norm().unwrap();
        model.update(&adamw(1)).unwrap();
        assert!(model.loss(&x, &y).unwrap() < got / 14.0);
    }
}

#[test]
fn parameters_rounded_from_masters_again_are_the_same_bits() {
    let (x, y) = batch(14, 31);
    let mut model = tiny(2, Options { dtype: DType::BF16, masters: true, ..Options::training(2, 7) });
    model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
    model.grad_norm().unwrap();
    let seeds = std::array::from_fn(|i| 1234 + 77 * i as u32);
    model.update(&AdamW { stochastic_seeds: Some(seeds), ..adamw(1) }).unwrap();
    let before: Vec<_> = model.params().iter().map(|p| p.read_f32().unwrap()).collect();
    model.params().iter().for_each(Tensor::zero);
    model.params_from_masters(Some(seeds)).unwrap();
    assert_eq!(before, model.params().iter().map(|p| p.read_f32().unwrap()).collect::<Vec<_>>());
}

#[test]
fn nothing_is_allocated_after_construction() {
    let mut model = tiny(2, Options { decode_len: 8, ..Options::training(2, 7) });
    let device = model.device().clone();
    let live = device.live_bytes();
    let (x, y) = batch(14, 33);
    for step in 1..=3 {
        model.forward_backward(&x, &y, false, 1.0 / 14.0).unwrap();
        model.grad_norm().unwrap();
        model.update(&adamw(step)).unwrap();
        model.decoder().unwrap().step(1).unwrap();
        assert_eq!(device.live_bytes(), live);
    }
}

#[test]
fn the_null_device_runs_the_whole_step_and_records_it() {
    let device = Device::null(2);
    let config = Gpt2Config::from_descriptor("d12").unwrap();
    let mut model = Gpt2::new(&device, config, Options::training(4, 64)).unwrap();
    let zeros = vec![0; 256];
    model.forward_backward(&zeros, &zeros, false, 1.0).unwrap();
    model.grad_norm().unwrap();
    model.update(&adamw(1)).unwrap();
    let Device::Null(null) = &device else { unreachable!() };
    let launches = null.take_launches();
    let products: u64 = launches.iter().filter(|l| !l.op.starts_with("adamw")).map(|l| l.flops).sum();
    // Specification 7.1: 190.9 GFLOP for forward and backward at B=4, T=64.
    let giga = products as f64 / 1e9;
    assert!((giga - 190.9).abs() < 4.0, "{giga} GFLOP");
    assert_eq!(launches.iter().filter(|l| l.op == "adamw.update").count(), 16);
}

#[test]
fn a_wrong_batch_is_refused_with_both_sizes() {
    let mut model = tiny(1, Options::training(2, 7));
    let message = model.forward_backward(&[0; 13], &[0; 13], false, 1.0).unwrap_err().to_string();
    assert!(message.contains("13") && message.contains("2 x 7"), "{message}");
}

#[test]
fn an_evaluation_model_refuses_to_train() {
    let mut model = tiny(1, Options::evaluation(2, 7));
    let message = model.forward_backward(&[0; 14], &[0; 14], false, 1.0).unwrap_err().to_string();
    assert!(message.contains("Options::train"), "{message}");
}

#[test]
fn a_token_outside_the_vocabulary_is_refused() {
    let mut model = tiny(1, Options::training(1, 4));
    for bad in [29, -1, 36] {
        let error = model.forward_backward(&[0, bad, 0, 0], &[0; 4], false, 1.0).unwrap_err().to_string();
        assert!(error.contains(&bad.to_string()), "{error}");
        let error = model.forward_backward(&[0; 4], &[0, 0, bad, 0], false, 1.0).unwrap_err().to_string();
        assert!(error.contains(&bad.to_string()), "{error}");
    }
}

#[test]
fn recompute_modes_have_llmc_numbers() {
    assert_eq!(Recompute::try_from(0).unwrap(), Recompute::None);
    assert_eq!(Recompute::try_from(2).unwrap(), Recompute::GeluAndLayernorm);
    assert!(Recompute::try_from(3).is_err());
}
