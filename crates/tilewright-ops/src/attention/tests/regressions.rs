//! Bugs documented in specification 2.5 that a CPU attention can have.

use super::*;
use crate::testing::{FLOATS, devices, unaligned_zeros};

/// Garbage in all scratch, then both directions against the reference.
fn check(s: Sizes, dtype: DType) {
    let (atol, rtol) = tolerance(dtype);
    for device in devices() {
        let call = Call::new(&device, dtype, s, 1.0, 31);
        call.check_forward(atol, rtol);
        let nan_patterns = vec![0xFF; call.workspace.bytes()];
        call.workspace.write_bytes(0, &nan_patterns).unwrap();
        call.check_backward(atol, rtol);
    }
}

/// The upper triangle of dS was skipped and trusted to be zero; a dense product then read it.
#[test]
fn bug_3_masked_scores_in_poisoned_scratch_reach_no_gradient() {
    for t in [2, 15, 33, 64, 100] {
        for dtype in FLOATS {
            check(sizes(1, 2, t, 16), dtype);
        }
    }
}

/// Eight-wide loads at `row * T` with `T` not a multiple of 8.
#[test]
fn bug_4_odd_t_in_attention() {
    for t in [1, 2, 3, 5, 7, 9, 11, 13, 15, 17] {
        for dtype in FLOATS {
            check(sizes(2, 2, t, 32), dtype);
        }
    }
}

/// The same on tensors whose rows start at odd elements of their arena.
#[test]
fn bug_4_misaligned_tensors_in_attention() {
    for device in devices() {
        for dtype in FLOATS {
            let mut call = Call::new(&device, dtype, sizes(1, 2, 9, 5), 1.0, 33);
            let shifted = |t: &Tensor| {
                let inner = unaligned_zeros(&device, t.dtype(), &t.shape(), 3);
                inner.copy_from(t).unwrap();
                inner
            };
            call.qkv = shifted(&call.qkv);
            call.dout = shifted(&call.dout);
            call.out = shifted(&call.out);
            call.lse = shifted(&call.lse);
            call.dqkv = shifted(&call.dqkv);
            let (atol, rtol) = tolerance(dtype);
            call.check_forward(atol, rtol);
            call.check_backward(atol, rtol);
        }
    }
}

/// Products over T unrolled by 16 without a guard.
#[test]
fn bug_5_t_not_a_multiple_of_16_in_every_product() {
    for t in [18, 31, 63, 65, 79, 130, 145] {
        check(sizes(1, 1, t, 16), DType::F32);
    }
}

/// Backward recomputed the scores from the buffer of the last layer: the calls of two layers must share nothing but the workspace.
#[test]
fn bug_15_layers_that_share_a_workspace_do_not_alias() {
    for device in devices() {
        let s = sizes(1, 2, 70, 16);
        let mut layers: Vec<Call> = (0..3).map(|i| Call::new(&device, DType::F32, s, 1.0, 40 + i)).collect();
        let shared = layers[0].workspace.clone();
        layers.iter_mut().for_each(|l| l.workspace = shared.clone());
        layers.iter().for_each(Call::forward);
        for layer in layers.iter().rev() {
            layer.check_backward(1e-6, 1e-5);
        }
    }
}

/// An aligned fast path taken for shapes that are not: C = 767-like widths, T = 7, head sizes 3, 5, 13.
#[test]
fn bug_28_odd_head_sizes_with_odd_lengths() {
    for head in [3, 5, 13] {
        for dtype in FLOATS {
            check(sizes(2, 3, 7, head), dtype);
        }
    }
    // C = 767 = 13 * 59.
    check(sizes(1, 59, 7, 13), DType::F32);
    check(sizes(1, 11, 7, 3), DType::F32);
}
