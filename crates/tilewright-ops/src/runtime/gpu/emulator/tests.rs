//! What the emulator must see: texts with one thing wrong each, and texts that are right.

use super::compile::Compiler;
use super::machine::{Bound, Job, Machine};
use super::text::translate;

/// Runs a text of two groups of 64 threads over these buffers; `None` where there is no compiler.
fn run(body: &str, buffers: &mut [Vec<u32>]) -> Option<Result<(), String>> {
    let compiler = match Compiler::here() {
        Ok(compiler) => compiler,
        Err(error) => {
            println!("NOT TESTED: no C++ compiler; {error}");
            return None;
        }
    };
    let parameters: String =
        (0..buffers.len()).map(|i| format!("device uint32_t * const b{i} [[buffer({i})]], ")).collect();
    let metal = format!(
        "#include <metal_stdlib>\nusing namespace metal;\ntypedef unsigned int uint32_t;\n\
         [[max_total_threads_per_threadgroup(64)]] [[kernel]] void k({parameters}\
         uint32_t const t [[thread_index_in_threadgroup]], uint3 const g [[threadgroup_position_in_grid]], \
         uint3 const n [[thread_position_in_grid]]) {{\n{body}\n}}\n"
    );
    let text = translate(&metal).unwrap();
    let (object, _) = compiler.build(&text.source).unwrap();
    let mut touched: Vec<_> = buffers.iter().map(|b| vec![[0u32; 4]; b.len() * 2]).collect();
    let bound: Vec<_> = (buffers.iter_mut().zip(&mut touched))
        .map(|(b, t)| Bound { low: b.as_mut_ptr().cast(), bytes: b.len() * 4, touched: t.as_mut_ptr() })
        .collect();
    let job = Job {
        entry: object.entry,
        meets: text.meets,
        shared_bytes: text.shared_bytes,
        group: [64, 1, 1],
        groups: [2, 1, 1],
        buffers: &bound,
        info: &[],
    };
    // SAFETY: the buffers are of the types that the text declares and live until the end.
    Some(unsafe { Machine::new().run(&job) })
}

/// What is said of a text with something wrong in it, held to what it must name.
#[track_caller]
fn refused(body: &str, names: &[&str]) {
    let Some(result) = run(body, &mut [vec![0; 128]]) else { return };
    let error = result.expect_err("nothing was found");
    for name in names {
        assert!(error.contains(name), "{error}");
    }
}

const SHARED: &str = "alignas(4) threadgroup char m[256];\n\
                      threadgroup array<uint32_t, 64> * const s = reinterpret_cast<threadgroup array<uint32_t, 64> *>(&m[0]);\n";

#[test]
fn threads_exchange_through_threadgroup_memory() {
    let mut buffers = [(0..128).collect::<Vec<u32>>()];
    let body = format!(
        "{SHARED}(*s)[t] = b0[n[0]];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nb0[n[0]] = (*s)[63 - t] + 1000 * g[0];"
    );
    let Some(result) = run(&body, &mut buffers) else { return };
    result.unwrap();
    let want: Vec<u32> = (0..128).map(|i| if i < 64 { 63 - i } else { 191 - i + 1000 }).collect();
    assert_eq!(buffers[0], want);
}

#[test]
fn lanes_of_a_simdgroup_exchange_values() {
    let mut buffers = [vec![0; 128], vec![0; 128], vec![0; 128]];
    let body =
        "b0[n[0]] = simd_sum(t);\nb1[n[0]] = simd_shuffle_xor(t, 1u);\nb2[n[0]] = simd_prefix_exclusive_sum(1u);";
    let Some(result) = run(body, &mut buffers) else { return };
    result.unwrap();
    for (i, got) in buffers[0].iter().enumerate() {
        assert_eq!(*got, if i % 64 < 32 { 496 } else { 496 + 1024 });
    }
    assert!((0..128).all(|i| buffers[1][i] == (i as u32 % 64) ^ 1 && buffers[2][i] == i as u32 % 32));
}

#[test]
fn a_simdgroup_multiplies_matrices_of_eight_by_eight() {
    // a and its transpose, one product a simdgroup of the first group.
    let mut buffers = [vec![0; 64], vec![0; 128]];
    for (i, x) in buffers[0].iter_mut().enumerate() {
        *x = ((i * 7 % 13) as f32 - 6.0).to_bits();
    }
    let body = "if (g[0] == 0) {\n\
                simdgroup_float8x8 a, b, c = make_filled_simdgroup_matrix<float, 8, 8>(0.5f), d;\n\
                simdgroup_load(a, reinterpret_cast<device float const*>(b0), 8, 0, false);\n\
                simdgroup_load(b, reinterpret_cast<device float const*>(b0), 8, 0, t >= 32);\n\
                simdgroup_multiply_accumulate(d, a, b, c);\n\
                simdgroup_store(d, reinterpret_cast<device float *>(&b1[t / 32 * 64]), 8);\n}";
    let Some(result) = run(body, &mut buffers) else { return };
    result.unwrap();
    let a = |row: usize, column: usize| f32::from_bits(buffers[0][row * 8 + column]);
    for transposed in [false, true] {
        for row in 0..8 {
            for column in 0..8 {
                let sum: f32 = (0..8).map(|k| a(row, k) * if transposed { a(column, k) } else { a(k, column) }).sum();
                let got = f32::from_bits(buffers[1][usize::from(transposed) * 64 + row * 8 + column]);
                assert_eq!(got, sum + 0.5, "{transposed} {row} {column}");
            }
        }
    }
}

#[test]
fn an_access_outside_of_a_buffer_is_named() {
    refused("b0[n[0] + 1] = 1;", &["thread 63 of group 1 writes 4 bytes at byte 512 of buffer 0, outside of it"]);
    refused("uint32_t const x = b0[n[0] - 1];\nb0[n[0]] = x;", &["thread 0 of group 0 reads"]);
}

#[test]
fn an_access_outside_of_an_array_in_threadgroup_memory_is_named() {
    refused(&format!("{SHARED}(*s)[t + 1] = 0;"), &["thread 63 of group 0 takes element 64 of an array of 64"]);
}

#[test]
fn an_access_that_is_not_aligned_is_named() {
    refused(
        "reinterpret_cast<device ulong *>(&b0[1])[t / 64] = 0;",
        &["thread 0 of group 0 writes 8 bytes at byte 4 of buffer 0, which is not aligned"],
    );
}

#[test]
fn threadgroup_memory_that_nobody_wrote_is_named() {
    let body = format!(
        "{SHARED}if (t != 5) (*s)[t] = 1;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nb0[n[0]] = (*s)[t];"
    );
    refused(
        &body,
        &["thread 5 of group 0 reads 4 bytes at byte 20 of threadgroup memory, which nobody in the group has written"],
    );
}

#[test]
fn a_missing_barrier_is_named_with_both_threads() {
    let body =
        format!("{SHARED}(*s)[t] = t;\nb0[n[0]] = (*s)[t & 62u];\nthreadgroup_barrier(mem_flags::mem_threadgroup);");
    refused(&body, &["thread 1 of group 0 reads", "which thread 0 of group 0 wrote with no barrier between"]);
    // Read by one, then overwritten by another: the barrier between is what loops forget.
    let body = format!(
        "{SHARED}(*s)[t] = t;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nb0[n[0]] = (*s)[min(t + 1, 63u)];\n(*s)[t] = 7;"
    );
    refused(&body, &["thread 1 of group 0 writes", "which thread 0 of group 0 read with no barrier between"]);
}

#[test]
fn a_simdgroup_barrier_orders_its_own_lanes_and_no_others() {
    let text = |other: &str| {
        format!("{SHARED}(*s)[t] = t;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nb0[n[0]] = (*s)[t ^ {other}];")
    };
    if let Some(result) = run(&text("1"), &mut [vec![0; 128]]) {
        result.unwrap();
    }
    refused(&text("32"), &["no barrier between"]);
}

#[test]
fn groups_that_write_one_place_are_named() {
    refused("b0[t] = g[0];", &["thread 0 of group 1 writes", "which thread 0 of group 0 wrote"]);
}

#[test]
fn a_barrier_of_threadgroup_memory_does_not_order_device_memory() {
    let text = |flags: &str| format!("b0[n[0]] = t;\nthreadgroup_barrier({flags});\nb0[n[0] ^ 1] = 1;");
    refused(&text("mem_flags::mem_threadgroup"), &["of buffer 0", "no barrier between"]);
    if let Some(result) = run(&text("mem_flags::mem_device | mem_flags::mem_threadgroup"), &mut [vec![0; 128]]) {
        result.unwrap();
    }
}

#[test]
fn a_barrier_that_not_all_threads_reach_is_named() {
    refused(
        "if (t < 63) threadgroup_barrier(mem_flags::mem_threadgroup);",
        &["thread 0 of group 0 waits at the threadgroup barrier of line 5", "thread 63 has ended"],
    );
    // Two barriers are not one, though all threads stand at a barrier.
    refused(
        "if (t < 32) {\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n} else {\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n}",
        &["line 6", "line 8"],
    );
}

#[test]
fn a_simdgroup_operation_that_not_all_lanes_reach_is_named() {
    refused("if (t % 32 != 3) b0[n[0]] = simd_sum(t);", &["simdgroup operation of line 5", "thread 3 has ended"]);
    refused("b0[n[0]] = simd_shuffle(t, 32u);", &["asks lane 32 of its simdgroup"]);
}

#[test]
fn more_threadgroup_memory_than_there_is_is_refused() {
    let body = "alignas(4) threadgroup char m[32772];\nreinterpret_cast<threadgroup uint32_t *>(&m[0])[t] = 0;";
    refused(body, &["32772 bytes of threadgroup memory"]);
}

#[test]
fn no_thread_may_use_more_stack_than_it_has() {
    let body = "volatile uint32_t big[20000];\nfor (uint32_t i = 20000; i > 0; i -= 1) big[i - 1] = i;\n\
                threadgroup_barrier(mem_flags::mem_threadgroup);\nb0[n[0]] = uint32_t(big[t]);";
    let Some(result) = run(body, &mut [vec![0; 128]]) else { return };
    assert!(result.unwrap_err().contains("overran its stack"));
}

#[test]
fn what_the_text_must_not_say_is_refused() {
    assert!(translate("float k() {}").unwrap_err().contains("no kernel"));
    let compiler = Compiler::here();
    if let Ok(compiler) = compiler {
        let error = compiler.build("this is no C++").err().unwrap();
        assert!(error.contains("refuses") && error.contains("error"), "{error}");
    }
}
