//! The finishing of a tile with AVX-512: bias, activation and residual in registers, one store a line of the output.

use std::arch::x86_64::*;

use crate::cpu::gemm::avx512::lanes;

/// What is done with a row of 32 sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    Nothing,
    Relu,
    Gelu,
    /// 16 activated sums and their 16 gates become 16 elements.
    Geglu,
}

/// Finishes `rows` rows of 32 sums. `bias` holds 32 numbers; `residual` and `out` point to the first element of the first row, `stride` elements a
/// row, of which `columns` are read and written.
///
/// # Safety
/// All of that exists, the residual may be the output itself, and the machine has AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn finish(
    then: Then,
    sums: *const f32,
    rows: usize,
    bias: &[f32; 32],
    residual: Option<*const f32>,
    out: *mut f32,
    stride: usize,
    columns: usize,
) {
    let masks = [lanes(columns), lanes(columns.saturating_sub(16))];
    // SAFETY: as the caller vouches; lanes past `columns` are masked.
    unsafe {
        let bias = [_mm512_loadu_ps(bias.as_ptr()), _mm512_loadu_ps(bias.as_ptr().add(16))];
        for row in 0..rows {
            let at = row * stride;
            let sums = sums.add(32 * row);
            let z0 = _mm512_add_ps(_mm512_loadu_ps(sums), bias[0]);
            let z1 = _mm512_add_ps(_mm512_loadu_ps(sums.add(16)), bias[1]);
            let zero = _mm512_setzero_ps();
            let y = match then {
                Then::Nothing => [z0, z1],
                // The second operand is taken when one is NaN.
                Then::Relu => [_mm512_max_ps(zero, z0), _mm512_max_ps(zero, z1)],
                Then::Gelu => [gelu(z0), gelu(z1)],
                Then::Geglu => [_mm512_mul_ps(gelu(z0), z1), zero],
            };
            for j in 0..2 {
                if masks[j] == 0 {
                    continue;
                }
                let y = match residual {
                    Some(r) => _mm512_add_ps(y[j], _mm512_maskz_loadu_ps(masks[j], r.wrapping_add(at + 16 * j))),
                    None => y[j],
                };
                let p = out.wrapping_add(at + 16 * j);
                if masks[j] == !0 { _mm512_storeu_ps(p, y) } else { _mm512_mask_storeu_ps(p, masks[j], y) }
            }
        }
    }
}

/// Asks for the lines of a tile of the output, to be written soon.
#[inline(always)]
pub(super) fn prefetch(out: *const f32, rows: usize, stride: usize, columns: usize) {
    for row in 0..rows {
        for at in (0..columns).step_by(16) {
            let p = out.wrapping_add(row * stride + at);
            // SAFETY: a prefetch never faults; every processor with AVX-512 has this one.
            unsafe { std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags)) }
        }
    }
}

/// `(..(first y + second) y + ..) y + last`.
macro_rules! polynomial {
    ($y:expr; $first:expr $(, $next:expr)*) => {{
        let p = _mm512_set1_ps($first);
        $(let p = _mm512_fmadd_ps(p, $y, _mm512_set1_ps($next));)*
        p
    }};
}

/// `x / 2 erfc(-x / sqrt(2))` by the fit of `math::erfc`, with fused multiply-adds.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
#[inline]
#[allow(clippy::excessive_precision)] // the coefficients as published
fn gelu(x: __m512) -> __m512 {
    let z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(std::f32::consts::FRAC_1_SQRT_2));
    let t = _mm512_div_ps(_mm512_set1_ps(1.0), _mm512_fmadd_ps(z, _mm512_set1_ps(0.5), _mm512_set1_ps(1.0)));
    let p = polynomial!(t; 0.170_872_77, -0.822_152_23, 1.488_515_87, -1.135_203_98, 0.278_868_07, -0.186_288_06, 0.096_784_18,
        0.374_091_96, 1.000_023_68, -1.265_512_23);
    let tail = _mm512_mul_ps(t, exp(_mm512_fnmadd_ps(z, z, p)));
    let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_setzero_ps());
    let erfc = _mm512_mask_sub_ps(tail, positive, _mm512_set1_ps(2.0), tail);
    _mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(0.5)), erfc)
}

/// `e^x` for `x` below 88; 0 far below.
#[target_feature(enable = "avx512f")]
#[inline]
fn exp(x: __m512) -> __m512 {
    let x = _mm512_max_ps(_mm512_set1_ps(-110.0), x); // a NaN stays one
    let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
        x,
        _mm512_set1_ps(std::f32::consts::LOG2_E),
    ));
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693_359_4), x);
    let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.121_944_4e-4), r);
    let p =
        polynomial!(r; 1.987_569_2e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 5.000_000_3e-1);
    let y = _mm512_add_ps(_mm512_fmadd_ps(_mm512_mul_ps(p, r), r, r), _mm512_set1_ps(1.0));
    _mm512_scalef_ps(y, n)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::gelu::{Gelu, reference::value};

    fn gelu_of(x: f32) -> f32 {
        let mut out = [0.0; 16];
        // SAFETY: the caller has seen that the machine has AVX-512.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), gelu(_mm512_set1_ps(x))) };
        out[7]
    }

    #[test]
    fn gelu_in_registers_is_within_two_millionths_of_the_reference() {
        if !Isa::Avx512.is_available() {
            println!("not run: this machine lacks avx512");
            return;
        }
        let mut x = -12.0f32;
        while x < 12.0 {
            let (got, want) = (f64::from(gelu_of(x)), value(Gelu::Erf, f64::from(x)));
            assert!((got - want).abs() <= 2e-6 * want.abs() + 3e-7 * f64::from(x.abs()).min(1.0), "{x}: {got} {want}");
            x += 0.001_7;
        }
    }

    #[test]
    fn gelu_in_registers_far_out() {
        if !Isa::Avx512.is_available() {
            println!("not run: this machine lacks avx512");
            return;
        }
        for x in [20.0f32, 1e4, 1e18, 1e38, f32::INFINITY] {
            assert_eq!(gelu_of(x), x);
        }
        for x in [-20.0f32, -1e4, -1e18, -1e38, 0.0, -0.0] {
            assert_eq!(gelu_of(x), 0.0, "{x}");
        }
        assert!(gelu_of(f32::NAN).is_nan());
    }
}
