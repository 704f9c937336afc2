//! The case table: shapes, forms and storage types on every device of the machine.

use super::*;
use crate::testing::{FLOATS, Random, assert_close, devices, poisoned, random};
use crate::{DType, Error};

/// `(M, N, K)`: ones, primes, one less and one more than the tile sizes of all instruction sets, the odd widths of the specification.
const SHAPES: [(usize, usize, usize); 16] = [
    (1, 1, 1),
    (2, 3, 5),
    (7, 7, 7),
    (8, 15, 16),
    (15, 16, 17),
    (16, 17, 15),
    (17, 31, 33),
    (31, 33, 8),
    (33, 33, 31),
    (13, 64, 29),
    (9, 37, 767),
    (33, 767, 33),
    (14, 32, 384),
    (15, 65, 385),
    (1, 129, 767),
    (3, 767, 100),
];

/// Specification 2.3: 1e-3 and 1e-3 for f32, tighter here; 1e-2 and 3e-2 for bf16, with the sum of K terms of size one in mind.
fn tolerance(dtype: DType, k: usize) -> (f64, f64) {
    let scale = (k as f64).sqrt();
    match dtype {
        DType::F32 => (2e-6 * scale.max(1.0), 1e-5),
        DType::F16 => (1e-3, 2e-3),
        _ => (1e-2, 1e-2),
    }
}

fn gelus() -> [Option<Gelu>; 3] {
    [None, Some(Gelu::Tanh), Some(Gelu::Erf)]
}

#[test]
fn forward_matches_the_reference_for_every_shape_and_type() {
    for device in devices() {
        for dtype in FLOATS {
            for (index, (m, n, k)) in SHAPES.into_iter().enumerate() {
                let mut rng = Random::new(index as u64 + 1);
                let (x, rx) = random(&device, dtype, &[m, k], 1.0, &mut rng);
                let (weight, rw) = random(&device, dtype, &[n, k], 1.0 / (k as f32).sqrt(), &mut rng);
                let (bias, rb) = random(&device, dtype, &[n], 1.0, &mut rng);
                let out = poisoned(&device, dtype, &[m, n]);
                let args = Forward { x: &x, weight: &weight, bias: Some(&bias), gelu: None, pre_gelu: None, out: &out };
                forward(&device, &args).unwrap();
                let (_, want) = reference::forward(&rx, &rw, Some(&rb), None, (m, n, k));
                let (atol, rtol) = tolerance(dtype, 1);
                assert_close(&format!("{} {dtype} {m}x{n}x{k}", device.name()), &out, &want, atol, rtol);
            }
        }
    }
}
