//! One-token decoding against the forward, row by row.

use super::*;
use crate::attention::Decode;
use crate::testing::{FLOATS, devices};

/// Decodes the whole sequence of a call token by token; the outputs as `(B, T, C)`, and the caches.
fn decode_all(call: &Call, longest: usize) -> (Vec<f32>, Tensor, Tensor) {
    let Sizes { b, heads, t, .. } = call.sizes;
    let (c, device, dtype) = (call.sizes.c(), &call.device, call.qkv.dtype());
    let qkv = call.qkv.read_f32().unwrap();
    let caches = [0, 1].map(|_| poisoned(device, dtype, &[b, longest, c]));
    let mut outputs = vec![0.0; b * t * c];
    for position in 0..t {
        let rows: Vec<f32> = (0..b).flat_map(|i| qkv[(i * t + position) * 3 * c..][..3 * c].iter().copied()).collect();
        let new = Tensor::from_f32(device, dtype, &[b, 3 * c], &rows).unwrap();
        let out = poisoned(device, dtype, &[b, c]);
        let args = Decode { qkv: &new, heads, position, k_cache: &caches[0], v_cache: &caches[1], out: &out };
        crate::attention::decode(device, &args).unwrap();
        for (i, row) in out.read_f32().unwrap().chunks(c).enumerate() {
            outputs[(i * t + position) * c..][..c].copy_from_slice(row);
        }
    }
    let [k, v] = caches;
    (outputs, k, v)
}

fn check_against_forward(sizes: Sizes, dtype: DType, seed: u64) {
    for device in devices() {
        let call = Call::new(&device, dtype, sizes, 1.0, seed);
        call.forward();
        let want: Vec<f64> = decode_all(&call, sizes.t + 3).0.into_iter().map(f64::from).collect();
        let (atol, rtol) = tolerance(dtype);
        assert_close(&format!("forward against decode of {}", call.name()), &call.out, &want, atol, rtol);
    }
}

#[test]
fn decode_equals_forward_row_by_row_in_every_storage_type() {
    for (i, dtype) in FLOATS.into_iter().enumerate() {
        check_against_forward(sizes(2, 3, 17, 16), dtype, i as u64);
    }
}

#[test]
fn decode_equals_forward_for_odd_head_sizes() {
    for head in [3, 5, 13, 80, 256] {
        check_against_forward(sizes(1, 2, 9, head), DType::F32, head as u64);
    }
}

#[test]
fn decode_equals_forward_past_a_block_of_keys() {
    check_against_forward(sizes(1, 1, 140, 64), DType::F32, 5);
}

#[test]
fn decode_writes_only_its_position_of_the_caches() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, sizes(2, 2, 5, 8), 1.0, 7);
        let (_, k, v) = decode_all(&call, 8);
        let (c, qkv) = (16, call.qkv.read_f32().unwrap());
        for (third, cache) in [(1, k), (2, v)] {
            for (row, got) in cache.read_f32().unwrap().chunks(c).enumerate() {
                let (b, position) = (row / 8, row % 8);
                if position < 5 {
                    assert_eq!(got, &qkv[((b * 5 + position) * 3 + third) * c..][..c]);
                } else {
                    assert!(got.iter().all(|x| x.is_nan()), "position {position} was written");
                }
            }
        }
    }
}

#[test]
fn decode_with_scores_of_ten_thousand_stays_finite() {
    for device in devices() {
        let call = Call::new(&device, DType::F32, sizes(1, 1, 70, 16), 60.0, 9);
        assert!(decode_all(&call, 70).0.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn decode_is_the_same_for_any_number_of_threads() {
    let results = [1, 2, 3].map(|threads| {
        let call = Call::new(&Device::cpu_with_threads(threads), DType::F32, sizes(2, 3, 20, 24), 1.0, 3);
        decode_all(&call, 20).0
    });
    assert!(results.iter().all(|r| r == &results[0]));
}
