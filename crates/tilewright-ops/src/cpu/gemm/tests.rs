//! The engine against sums in f64.

use super::*;
use crate::testing::Random;
use tilewright_core::{bf16, f16};

fn cpus() -> Vec<Cpu> {
    let mut all: Vec<_> = Isa::available().into_iter().map(|isa| Cpu::new(2, isa)).collect();
    all.extend([1, 3, 8].map(|threads| Cpu::new(threads, Isa::detect())));
    all
}

/// A matrix in one of three layouts inside a larger buffer: row-major, column-major, or both strides above 1.
fn matrix(rng: &mut Random, rows: usize, cols: usize, layout: usize) -> (Vec<f32>, usize, usize) {
    let (rs, cs) = match layout {
        0 => (cols + 3, 1),
        1 => (1, rows + 5),
        _ => (2 * cols + 1, 2),
    };
    (rng.normals(rows.max(1) * rs.max(1) + cols.max(1) * cs, 1.0), rs, cs)
}

#[track_caller]
fn check(cpu: &Cpu, m: usize, n: usize, k: usize, layouts: (usize, usize), accumulate: bool, bias: bool) {
    let mut rng = Random::new((m * 1000 + n * 10 + k) as u64);
    let (a, ars, acs) = matrix(&mut rng, m, k, layouts.0);
    let (b, brs, bcs) = matrix(&mut rng, k, n, layouts.1);
    let bias_values = rng.normals(n, 1.0);
    let ldc = n + 2;
    let before = if accumulate { rng.normals(m * ldc, 1.0) } else { vec![f32::NAN; m * ldc] };
    let mut out = before.clone();
    let finish = Finish { bias: bias.then(|| MatRef::new(&bias_values, 0, 1)), ..Finish::default() };
    let (a_view, b_view) = (MatRef::new(&a, ars, acs), MatRef::new(&b, brs, bcs));
    let view = MatMut::new(&mut out, ldc);
    product(cpu, &Product { m, n, k, a: a_view, b: b_view, out: view, accumulate, alpha: 1.0, finish });
    for i in 0..m {
        for j in 0..ldc {
            let got = out[i * ldc + j];
            if j >= n {
                assert_eq!(got.to_bits(), before[i * ldc + j].to_bits(), "wrote past the row at ({i}, {j})");
                continue;
            }
            let (mut want, mut size) = (0.0f64, 0.0f64);
            for p in 0..k {
                let term = f64::from(a[i * ars + p * acs]) * f64::from(b[p * brs + j * bcs]);
                want += term;
                size += term.abs();
            }
            if accumulate {
                want += f64::from(before[i * ldc + j]);
            }
            if bias {
                want += f64::from(bias_values[j]);
            }
            let bound = 1e-6 * (size + 1.0);
            assert!(
                (f64::from(got) - want).abs() <= bound,
                "{} x{}: ({m}, {n}, {k}) {layouts:?} at ({i}, {j}): got {got}, want {want}",
                cpu.isa().name(),
                cpu.threads()
            );
        }
    }
}

const TAILS: [usize; 10] = [1, 2, 7, 8, 13, 15, 16, 17, 31, 33];

#[test]
fn every_tail_of_m_and_n() {
    for cpu in cpus() {
        for m in TAILS {
            for n in TAILS {
                check(&cpu, m, n, 19, (0, 1), false, false);
            }
        }
    }
}

#[test]
fn every_tail_of_k_in_every_layout() {
    for cpu in cpus() {
        for k in [0, 1, 2, 7, 8, 15, 16, 17, 31, 33, 383, 384, 385, 401, 769] {
            for layouts in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)] {
                check(&cpu, 15, 37, k, layouts, false, true);
            }
        }
    }
}

#[test]
fn shapes_cut_into_many_tasks() {
    for cpu in cpus() {
        for (m, n, k) in [(67, 129, 767), (300, 70, 65), (70, 300, 33), (33, 1031, 129), (1031, 33, 129)] {
            for accumulate in [false, true] {
                check(&cpu, m, n, k, (0, 1), accumulate, true);
                check(&cpu, m, n, k, (1, 0), accumulate, false);
            }
        }
    }
}

#[test]
fn few_rows_as_in_decoding() {
    for cpu in cpus() {
        for m in 1..=9 {
            for (n, k) in [(1, 1), (3, 17), (65, 33), (130, 767), (64, 16)] {
                check(&cpu, m, n, k, (0, 1), m % 2 == 0, true);
            }
        }
    }
}

fn product_in_f64(a: &[f32], b: &[f32], m: usize, n: usize, k: usize) -> Vec<f64> {
    let mut c = vec![0.0; m * n];
    for i in 0..m {
        for j in 0..n {
            c[i * n + j] = (0..k).map(|p| f64::from(a[i * k + p]) * f64::from(b[p * n + j])).sum();
        }
    }
    c
}

#[test]
fn a_scaled_product_accumulates() {
    let mut rng = Random::new(5);
    for cpu in cpus() {
        for (m, n, k) in [(1, 1, 1), (9, 64, 64), (64, 64, 3), (33, 300, 401), (300, 20, 770)] {
            let (a, b, before) = (rng.normals(m * k, 1.0), rng.normals(k * n, 1.0), rng.normals(m * n, 1.0));
            let mut out = before.clone();
            let (a_view, b_view) = (MatRef::new(&a, k, 1), MatRef::new(&b, n, 1));
            let (view, finish) = (MatMut::new(&mut out, n), Finish::default());
            product(&cpu, &Product { m, n, k, a: a_view, b: b_view, out: view, accumulate: true, alpha: -0.5, finish });
            for ((got, want), before) in out.iter().zip(product_in_f64(&a, &b, m, n, k)).zip(before) {
                let want = f64::from(before) - 0.5 * want;
                assert!((f64::from(*got) - want).abs() < 1e-4, "{}: {m} {n} {k}: {got} {want}", cpu.isa().name());
            }
        }
    }
}

#[test]
fn packed_operands_multiply_like_raw_ones() {
    let mut rng = Random::new(6);
    for isa in Isa::available() {
        for (m, n, k) in [(1, 1, 1), (14, 32, 64), (64, 64, 64), (17, 33, 13), (65, 3, 128)] {
            let (a, b) = (rng.normals(m * k, 1.0), rng.normals(k * n, 1.0));
            let mut pa = vec![f32::NAN; packed_a_floats(isa, m, k)];
            let mut pb = vec![f32::NAN; packed_b_floats(isa, n, k)];
            pack_a(isa, MatRef::new(&a, k, 1), m, k, &mut pa);
            pack_b(isa, MatRef::new(&b, n, 1), n, k, &mut pb);
            let mut out = vec![f32::NAN; m * n];
            multiply_packed(isa, m, n, k, &pa, &pb, &mut out, n, false, 2.0);
            for (got, want) in out.iter().zip(product_in_f64(&a, &b, m, n, k)) {
                assert!((f64::from(*got) - 2.0 * want).abs() < 1e-4, "{}: {m} {n} {k}", isa.name());
            }
        }
    }
}

#[test]
fn scratch_is_as_large_as_reported() {
    for threads in [1, 2, 7] {
        let mut scratch = Scratch::new(threads);
        assert_eq!(scratch.map.len(), Scratch::bytes(threads));
        let end = scratch.buffers().ptr.wrapping_add(SHARED_FLOATS + threads * THREAD_FLOATS).cast::<u8>();
        assert_eq!(end as usize - scratch.map.as_ptr() as usize, Scratch::bytes(threads));
    }
}

#[test]
#[should_panic(expected = "b of a matrix product is too short for 4 x 5")]
fn a_short_operand_is_refused() {
    let cpu = Cpu::new(1, Isa::detect());
    let (a, b, mut out) = ([0.0f32; 12], [0.0f32; 19], [0.0f32; 15]);
    gemm(&cpu, 3, 5, 4, MatRef::new(&a, 4, 1), MatRef::new(&b, 5, 1), &mut out, 5, false);
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let mut rng = Random::new(7);
    for (m, n, k) in [(67, 130, 800), (513, 40, 96), (40, 1000, 401), (5, 600, 300)] {
        let (a, b) = (rng.normals(m * k, 1.0), rng.normals(k * n, 1.0));
        let mut first: Option<Vec<u32>> = None;
        for threads in [1, 2, 3, 5, 16] {
            let cpu = Cpu::new(threads, Isa::detect());
            let mut out = vec![f32::NAN; m * n];
            gemm(&cpu, m, n, k, MatRef::new(&a, k, 1), MatRef::new(&b, 1, k), &mut out, n, false);
            let bits: Vec<u32> = out.iter().map(|x| x.to_bits()).collect();
            assert!(*first.get_or_insert_with(|| bits.clone()) == bits, "{m} {n} {k}: {threads} threads");
        }
    }
}

/// A 16-bit operand must give the bits of its f32 copy, on every packing path.
fn narrow<T: Element>() {
    let mut rng = Random::new(8);
    let (m, n, k) = (29, 45, 100);
    for cpu in cpus() {
        let a: Vec<T> = rng.normals(m * k, 1.0).into_iter().map(T::from_f32).collect();
        let b: Vec<T> = rng.normals(k * n, 1.0).into_iter().map(T::from_f32).collect();
        let wide = |x: &[T]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
        let (wa, wb) = (wide(&a), wide(&b));
        for (ars, acs, brs, bcs) in [(k, 1, n, 1), (k, 1, 1, k), (1, m, n, 1), (1, m, 1, k)] {
            let run = |a: MatRef<'_>, b: MatRef<'_>| {
                let mut out = vec![f32::NAN; m * n];
                gemm(&cpu, m, n, k, a, b, &mut out, n, false);
                out
            };
            let got = run(MatRef::new(&a, ars, acs), MatRef::new(&b, brs, bcs));
            let want = run(MatRef::new(&wa, ars, acs), MatRef::new(&wb, brs, bcs));
            assert_eq!(got, want, "{} {}", cpu.isa().name(), T::DTYPE);
        }
    }
}

#[test]
fn bf16_operands_equal_their_f32_copies() {
    narrow::<bf16>();
}

#[test]
fn f16_operands_equal_their_f32_copies() {
    narrow::<f16>();
}

#[test]
fn sixteen_bit_outputs_keep_f32_sums_over_all_of_k() {
    // 4096 terms of 1: a sum kept in bf16 would stop at 256.
    for cpu in cpus() {
        let (m, n, k) = (20, 70, 4096);
        let (a, b) = (vec![1.0f32; m * k], vec![1.0f32; k * n]);
        let mut out = vec![bf16::from_f32(f32::NAN); m * n];
        let (ma, mb, out_mat) = (MatRef::new(&a, k, 1), MatRef::new(&b, n, 1), MatMut::new(&mut out, n));
        let finish = Finish::default();
        product(&cpu, &Product { m, n, k, a: ma, b: mb, out: out_mat, accumulate: false, alpha: 1.0, finish });
        assert!(out.iter().all(|x| x.to_f32() == 4096.0), "{}", cpu.isa().name());
    }
}

#[test]
fn a_shared_operand_larger_than_its_buffer_is_taken_in_parts() {
    // 6000 rows of A over 800 steps exceed the 4 Mi floats of the shared buffer; ones make the right sum exact.
    let (m, n, k) = (6000, 6001, 801);
    let cpu = Cpu::new(2, Isa::detect());
    let a: Vec<f32> = (0..m * k).map(|i| ((i / k) % 5) as f32).collect();
    let b: Vec<f32> = (0..n * k).map(|i| ((i / k) % 7) as f32).collect();
    let right = |i: usize, j: usize| (k * (i % 5) * (j % 7)) as f32;
    let mut out = vec![f32::NAN; m * n];
    gemm(&cpu, m, n, k, MatRef::new(&a, k, 1), MatRef::new(&b, 1, k), &mut out, n, false);
    assert!((0..m * n).all(|at| out[at] == right(at / n, at % n)));
    let mut narrow = vec![f16::from_f32(f32::NAN); m * n];
    let (ma, mb, out) = (MatRef::new(&a, k, 1), MatRef::new(&b, 1, k), MatMut::new(&mut narrow, n));
    let finish = Finish::default();
    product(&cpu, &Product { m, n, k, a: ma, b: mb, out, accumulate: false, alpha: 1.0 / 64.0, finish });
    assert!((0..m * n).all(|at| narrow[at] == f16::from_f32(right(at / n, at % n) / 64.0)));
}

#[test]
fn nan_and_infinity_propagate_through_zeros() {
    for cpu in cpus() {
        for m in [1, 20] {
            let (n, k) = (40, 50);
            let (mut a, mut b) = (vec![0.0f32; m * k], vec![0.0f32; k * n]);
            (a[3], b[7 * n + 9]) = (f32::NAN, f32::INFINITY); // 0 * inf is NaN too
            let mut out = vec![0.0f32; m * n];
            for columns_first in [false, true] {
                let b: Vec<f32> =
                    if columns_first { (0..n * k).map(|i| b[i % k * n + i / k]).collect() } else { b.clone() };
                let mb = if columns_first { MatRef::new(&b, 1, k) } else { MatRef::new(&b, n, 1) };
                gemm(&cpu, m, n, k, MatRef::new(&a, k, 1), mb, &mut out, n, false);
                assert!(out[..n].iter().all(|x| x.is_nan()), "row 0 meets the NaN");
                assert!((0..m).all(|i| out[i * n + 9].is_nan()), "column 9 meets the infinity");
                assert!(m == 1 || out[n] == 0.0);
            }
        }
    }
}
