//! The peak of a processor: independent f32 multiply-adds and nothing else. Probes divide by it.

use super::Cpu;

/// Rounds of one piece of work, some 90 microseconds.
const ROUNDS: usize = 30_000;

/// Pieces a thread: a thread that is interrupted leaves its share to the others, as in the matrix products.
const PIECES: usize = 32;

/// Runs independent multiply-adds on all threads for some milliseconds, whatever the device's instruction set with the widest registers of
/// this machine, and returns the number of floating-point operations (two a multiply-add).
pub fn run_multiply_adds(cpu: &Cpu) -> f64 {
    let pieces = PIECES * cpu.threads();
    run_pieces(cpu, pieces, ROUNDS);
    (pieces * ROUNDS * FLOPS_A_ROUND) as f64
}

/// [`run_multiply_adds`] of as near to `flops` operations as whole rounds allow: at least as many, and at most one round a piece more.
pub fn run_flops(cpu: &Cpu, flops: f64) {
    let pieces = (PIECES * cpu.threads()).max((flops / (ROUNDS * FLOPS_A_ROUND) as f64) as usize);
    run_pieces(cpu, pieces, (flops / (pieces * FLOPS_A_ROUND) as f64).ceil() as usize);
}

fn run_pieces(cpu: &Cpu, pieces: usize, rounds: usize) {
    cpu.pool().run(pieces, &|_, _| {
        std::hint::black_box(multiply_adds(std::hint::black_box(rounds), std::hint::black_box(0.999)));
    });
}

#[cfg(target_arch = "x86_64")]
const FLOPS_A_ROUND: usize = 12 * 2 * 32;

#[cfg(target_arch = "x86_64")]
fn multiply_adds(rounds: usize, factor: f32) -> f32 {
    use std::arch::x86_64::*;

    // 12 chains: more than latency times throughput of any core, and few enough that all stay in registers. Each starts elsewhere, or the
    // compiler would merge them.
    #[target_feature(enable = "avx512f")]
    fn avx512(rounds: usize, factor: f32) -> f32 {
        let (x, y) = (_mm512_set1_ps(factor), _mm512_set1_ps(1e-3));
        let mut acc: [__m512; 12] = std::array::from_fn(|i| _mm512_set1_ps(i as f32));
        for _ in 0..2 * rounds {
            for i in 0..12 {
                acc[i] = _mm512_fmadd_ps(acc[i], x, y);
            }
        }
        let mut sum = acc[0];
        for i in 1..12 {
            sum = _mm512_add_ps(sum, acc[i]);
        }
        _mm512_reduce_add_ps(sum)
    }

    // Half as wide: twice the rounds.
    #[target_feature(enable = "avx2,fma")]
    fn avx2(rounds: usize, factor: f32) -> f32 {
        let (x, y) = (_mm256_set1_ps(factor), _mm256_set1_ps(1e-3));
        let mut acc: [__m256; 12] = std::array::from_fn(|i| _mm256_set1_ps(i as f32));
        for _ in 0..4 * rounds {
            for i in 0..12 {
                acc[i] = _mm256_fmadd_ps(acc[i], x, y);
            }
        }
        let mut sum = acc[0];
        for i in 1..12 {
            sum = _mm256_add_ps(sum, acc[i]);
        }
        _mm256_cvtss_f32(sum)
    }

    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just detected.
        unsafe { avx512(rounds, factor) }
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: just detected.
        unsafe { avx2(rounds, factor) }
    } else {
        plain(rounds, factor)
    }
}

#[cfg(target_arch = "aarch64")]
const FLOPS_A_ROUND: usize = 24 * 8;

#[cfg(target_arch = "aarch64")]
fn multiply_adds(rounds: usize, factor: f32) -> f32 {
    use std::arch::aarch64::*;

    // SAFETY: every AArch64 machine has NEON.
    unsafe {
        let (mut acc, x, y) = ([vdupq_n_f32(1.0); 24], vdupq_n_f32(factor), vdupq_n_f32(1e-3));
        for _ in 0..rounds {
            for a in &mut acc {
                *a = vfmaq_f32(y, *a, x);
            }
        }
        acc.into_iter().map(|a| vaddvq_f32(a)).sum()
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
const FLOPS_A_ROUND: usize = 12 * 2 * 32;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn multiply_adds(rounds: usize, factor: f32) -> f32 {
    plain(rounds, factor)
}

/// As many operations with a multiply and an add apart: the peak of the portable kernels.
#[cfg(not(target_arch = "aarch64"))]
fn plain(rounds: usize, factor: f32) -> f32 {
    let mut acc: [f32; 32] = std::array::from_fn(|i| i as f32);
    for _ in 0..12 * rounds {
        for a in &mut acc {
            *a = *a * factor + 1e-3;
        }
    }
    acc.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chain_of_multiply_adds_nears_its_fixed_point() {
        // x = x f + 1e-3 tends to 1e-3 / (1 - f) = 0.002 in each lane.
        let lanes = multiply_adds(2_000, 0.5) / 0.002;
        assert!((lanes - lanes.round()).abs() < 1e-2 && lanes >= 8.0, "{lanes}");
        assert_eq!(
            run_multiply_adds(&Cpu::new(1, crate::cpu::Isa::detect())),
            (PIECES * ROUNDS * FLOPS_A_ROUND) as f64
        );
    }
}
