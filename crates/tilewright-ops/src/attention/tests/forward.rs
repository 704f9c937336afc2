//! Forward against the reference.

use super::*;
use crate::testing::{FLOATS, devices};

fn check_on_all(cases: impl IntoIterator<Item = Sizes> + Clone, dtype: DType) {
    let (atol, rtol) = tolerance(dtype);
    for device in devices() {
        for (i, sizes) in cases.clone().into_iter().enumerate() {
            Call::new(&device, dtype, sizes, 1.0, 100 + i as u64).check_forward(atol, rtol);
        }
    }
}

fn specified() -> impl Iterator<Item = Sizes> + Clone {
    SPECIFIED.into_iter().map(|(b, heads, t, head)| sizes(b, heads, t, head))
}

#[test]
fn specified_cases_in_f32() {
    check_on_all(specified(), DType::F32);
}

#[test]
fn specified_cases_in_f16() {
    check_on_all(specified(), DType::F16);
}

#[test]
fn specified_cases_in_bf16() {
    check_on_all(specified(), DType::BF16);
}

#[test]
fn every_length_from_1_to_17() {
    for dtype in FLOATS {
        check_on_all((1..=17).map(|t| sizes(1, 2, t, 16)), dtype);
    }
}

#[test]
fn head_sizes_off_every_register_width() {
    for dtype in FLOATS {
        check_on_all([3, 5, 13, 80, 96, 128, 256].map(|head| sizes(1, 2, 19, head)), dtype);
    }
}

#[test]
fn lengths_around_the_block_sizes() {
    check_on_all([63, 64, 65, 127, 128, 129, 191, 193, 257].map(|t| sizes(1, 1, t, 24)), DType::F32);
}

#[test]
fn tiles_of_16_bit_rows_meet_at_their_edges() {
    // Tiles of the matrix units have 32 or 64 rows; software has such kernels for small heads.
    for dtype in [DType::F16, DType::BF16] {
        check_on_all([31, 32, 33, 63, 65, 100, 129].map(|t| sizes(2, 1, t, 16)), dtype);
    }
}
