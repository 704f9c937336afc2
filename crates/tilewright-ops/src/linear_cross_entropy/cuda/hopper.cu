// The loss head on Hopper: matrix units fed by the copy engine (sm_90a; elsewhere the entries are empty and never launched).
//
// A block multiplies a tile of 128 x 256, two blocks of a cluster one of 256 x 256: each loads its own rows and half of the columns that both use.
// One thread keeps STAGES steps of 64 terms in flight, two groups of four warps multiply 64 rows each. What is done with a tile in registers is all
// that differs between the entries. Blocks stay and take tile after tile, in an order that keeps the operands in the second-level cache.

typedef Storage<TW_TYPE>::Type E;

#define TILE_M 128
#define TILE_N 256
#define TILE_K 64
#define STAGES 4
#define STAGE_BYTES ((TILE_M + TILE_N) * TILE_K * 2)
#define THREADS 384
#define LOG2E 1.4426950408889634f

// The only parameter of the entries that multiply: two descriptors of the copy engine, then what each entry says.
struct alignas(64) Job {
    u8 a[128], b[128];
    u64 p[4];
    int i[8];
};

TW_FORCE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TW_FORCE u32 pack_pair(float a, float b) {
    return u32(from_f32<E>(a).bits) | u32(from_f32<E>(b).bits) << 16;
}
// Lane q of each four gives four words and gets word q of all four, in their order.
TW_FORCE void transpose_quad(u32 (&w)[4], int lane) {
    bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got;
        else w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
        if (high) w[i] = got;
        else w[i + 2] = got;
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

TW_FORCE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

TW_FORCE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
TW_FORCE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
TW_FORCE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}
// Arrives at the barrier at the same place of a block of the cluster.
TW_FORCE void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier), "r"(rank) : "memory");
}
TW_FORCE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
TW_FORCE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Copies a box at (x, y) of a matrix to shared memory of this block, or to the same place in both blocks of the cluster.
TW_FORCE void copy_box(const u8* map, int x, int y, u32 to, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x),
                 "r"(y), "r"(barrier)
                 : "memory");
}
TW_FORCE void copy_box_to_both(const u8* map, int x, int y, u32 to, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(u16(3))
        : "memory");
}

// How the matrix units find an operand: rows of 128 bytes, swizzled, 8 of them 1024 bytes; `leading` between blocks of 64 rows of an operand whose
// rows run along the 128 bytes.
TW_FORCE u64 operand(u32 address, u32 leading) { return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(leading >> 4) << 16 | (address & 0x3ffff) >> 4; }

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define R64(i) R16(i), R16(i + 16), R16(i + 32), R16(i + 48)
#if TW_TYPE == 1
#define FACTORS "f16.f16"
#else
#define FACTORS "bf16.bf16"
#endif

// d (64 x 256) = [d +] a (64 x 16) b (16 x 256). A_ROWS, B_ROWS: the operand's rows (not its terms) lie side by side in memory.
template <int A_ROWS, int B_ROWS> TW_FORCE void multiply(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." FACTORS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, %131, %132;\n}"
        : R64(0), R64(64)
        : "l"(a), "l"(b), "r"(add), "n"(A_ROWS), "n"(B_ROWS));
}

// Which tile comes n-th: `group` pairs of row tiles side by side, then the next column of tiles.
struct Order {
    int pairs, columns, group;
    TW_FORCE int count() const { return pairs * columns; }
    TW_FORCE void at(int n, int& pair, int& column) const {
        int first = n / (group * columns) * group, width = min(group, pairs - first);
        n -= first * columns;
        column = n / width;
        pair = first + n % width;
    }
};

// Walks the tiles. `wanted(pair)`: whether these rows are to be made at all. `use(d, pair * 2 + rank, column)`: the tile in registers, as the matrix
// units leave it: d[4 j + 2 h + b] is row 16 warp + 8 h + lane / 4 of the group, column 8 j + 2 (lane % 4) + b. `early(row tile, column)` comes before
// the last step: loads that it begins arrive while the matrix units work.
template <int A_ROWS, int B_ROWS, int CLEAR, class Wanted, class Early, class Use>
TW_FORCE void walk(const Job& job, const Order& order, int steps, Wanted wanted, Early early, Use use) {
    extern __shared__ u8 raw[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    u32 base = (shared_address(raw) + 1023) & ~1023u;
    u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    u32 rank = cluster_rank();
    int group = threadIdx.x / 128, cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 16);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    int stage = 0;
    u32 phase = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int n = cluster; n < order.count(); n += clusters) {
                int pair, column;
                order.at(n, pair, column);
                if (!wanted(pair)) continue;
                int row = (pair * 2 + rank) * TILE_M, col = column * TILE_N + rank * (TILE_N / 2);
                for (int k = 0; k < steps; k++) {
                    u32 bar = full + 8 * stage, to = base + stage * STAGE_BYTES, to_b = to + TILE_M * TILE_K * 2 + rank * (TILE_N / 2 * TILE_K * 2);
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(bar, STAGE_BYTES);
                    if (A_ROWS) {
                        copy_box(job.a, row, k * TILE_K, to, bar);
                        copy_box(job.a, row + 64, k * TILE_K, to + 8192, bar);
                    } else {
                        copy_box(job.a, k * TILE_K, row, to, bar);
                    }
                    if (B_ROWS) {
                        copy_box_to_both(job.b, col, k * TILE_K, to_b, bar);
                        copy_box_to_both(job.b, col + 64, k * TILE_K, to_b + 8192, bar);
                    } else {
                        copy_box_to_both(job.b, k * TILE_K, col, to_b, bar);
                    }
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int lane = threadIdx.x % 32;
        constexpr u64 A_STEP = A_ROWS ? 128 : 2, B_STEP = B_ROWS ? 128 : 2;
        for (int n = cluster; n < order.count(); n += clusters) {
            int pair, column;
            order.at(n, pair, column);
            if (!wanted(pair)) continue;
            float d[128];
#pragma unroll
            for (int i = 0; i < 128 && CLEAR; i++) d[i] = 0.0f;
            int before = 0;
            for (int k = 0; k < steps; k++) {
                if (k + 1 == steps) early(pair * 2 + int(rank), column);
                u32 at = base + stage * STAGE_BYTES;
                u64 a = operand(at + (group - 1) * 8192, 8192), b = operand(at + TILE_M * TILE_K * 2, 8192);
                barrier_wait(full + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int i = 0; i < TILE_K / 16; i++) multiply<A_ROWS, B_ROWS>(d, a + i * A_STEP, b + i * B_STEP, CLEAR ? 1 : k + i);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                // The step before this one is done with its stage, in both blocks.
                if (k > 0 && lane < 2) barrier_arrive(empty + 8 * before, lane);
                before = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
            if (lane < 2) barrier_arrive(empty + 8 * before, lane);
            use(d, pair * 2 + int(rank), column);
        }
    }
    // No block may end while another still arrives at its barriers.
    cluster_sync();
}

// Whether any of the flags is set; the same for all threads.
TW_FORCE bool any_flag(const int* flags, int count) {
    int any = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) any |= flags[i];
    return __syncthreads_or(any);
}

#define HOPPER(entry) extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) entry(const __grid_constant__ Job job)

// Statistics of logits = a b^T: for each row and tile of columns the maximum and the sum of exp(logit - maximum), at partial[column tile][row].
// p: partial, flags or null (one of two row tiles; without one nothing is done). i: rows, vocab, steps, group.
HOPPER(statistics) {
    float2* partial = (float2*)job.p[0];
    const int* flags = (const int*)job.p[1];
    int rows = job.i[0], vocab = job.i[1];
    Order order{(rows + 255) / 256, (vocab + TILE_N - 1) / TILE_N, job.i[3]};
    if (flags && !any_flag(flags, order.pairs)) return;
    walk<0, 0, 0>(job, order, job.i[2], [&](int pair) { return !flags || flags[pair]; }, [](int, int) {}, [&](float (&d)[128], int tile, int column) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        if ((column + 1) * TILE_N > vocab) {
            int left = vocab - column * TILE_N - 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 32; j++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    if (8 * j + b >= left) d[4 * j + b] = d[4 * j + 2 + b] = -TW_INFINITY;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float most = -TW_INFINITY, sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int j = 0; j < 32; j++) most = fmaxf(most, fmaxf(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
#pragma unroll
            for (int j = 0; j < 32; j++) {
#pragma unroll
                for (int b = 0; b < 2; b++) sum[b] += exp2_fast((d[4 * j + 2 * h + b] - most) * LOG2E);
            }
            float all = sum[0] + sum[1];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            int row = tile * TILE_M + warp * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && row < rows) partial[i64(column) * rows + row] = make_float2(most, all);
        }
    });
}

#if TW_TYPE == 2
// Weights of the vocabulary, exp(logit - reference of the row), kept in 16 bits, and their sums, at partial[column tile][row].
// p: partial, reference, kept, flags or null. i: rows, vocab, steps, group, stride of kept.
HOPPER(weights) {
    float* partial = (float*)job.p[0];
    const float* reference = (const float*)job.p[1];
    E* kept = (E*)job.p[2];
    const int* flags = (const int*)job.p[3];
    int rows = job.i[0], vocab = job.i[1], ld = job.i[4];
    Order order{(rows + 255) / 256, (vocab + TILE_N - 1) / TILE_N, job.i[3]};
    if (flags && !any_flag(flags, order.pairs)) return;
    walk<0, 0, 0>(job, order, job.i[2], [&](int pair) { return !flags || flags[pair]; }, [](int, int) {}, [&](float (&d)[128], int tile, int column) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        if ((column + 1) * TILE_N > vocab) {
            int left = vocab - column * TILE_N - 2 * (lane % 4);
#pragma unroll
            for (int j = 0; j < 32; j++) {
#pragma unroll
                for (int b = 0; b < 2; b++) {
                    if (8 * j + b >= left) d[4 * j + b] = d[4 * j + 2 + b] = -TW_INFINITY;
                }
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = tile * TILE_M + warp * 16 + h * 8 + lane / 4;
            float down = row < rows ? reference[row] : TW_INFINITY, sum[2] = {0.0f, 0.0f};
            E* to = kept + i64(row) * ld + column * TILE_N + 8 * (lane % 4);
            int room = row < rows ? ld - column * TILE_N - 8 * (lane % 4) : 0;
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float x = exp2_fast((d[4 * (j + i) + 2 * h] - down) * LOG2E), y = exp2_fast((d[4 * (j + i) + 2 * h + 1] - down) * LOG2E);
                    sum[0] += x;
                    sum[1] += y;
                    pairs[i] = pack_pair(x, y);
                }
                transpose_quad(pairs, lane);
                if (8 * j < room) *(uint4*)(to + 8 * j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
            float all = sum[0] + sum[1];
            all += __shfl_xor_sync(0xffffffffu, all, 1);
            all += __shfl_xor_sync(0xffffffffu, all, 2);
            if (lane % 4 == 0 && row < rows) partial[i64(column) * rows + row] = all;
        }
    });
}

// dhidden = factor of the row * (kept weight). p: dhidden, factor. i: rows, D, steps, group.
HOPPER(hidden_gradient) {
    E* out = (E*)job.p[0];
    const float* factor = (const float*)job.p[1];
    int rows = job.i[0], width = job.i[1];
    Order order{(rows + 255) / 256, (width + TILE_N - 1) / TILE_N, job.i[3]};
    walk<0, 1, 0>(job, order, job.i[2], [](int) { return true; }, [](int, int) {}, [&](float (&d)[128], int tile, int column) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = tile * TILE_M + warp * 16 + h * 8 + lane / 4;
            float f = row < rows ? factor[row] : 0.0f;
            E* to = out + i64(row) * width + column * TILE_N + 8 * (lane % 4);
            int room = row < rows ? width - column * TILE_N - 8 * (lane % 4) : 0;
#pragma unroll
            for (int j = 0; j < 32; j += 4) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++) pairs[i] = pack_pair(f * d[4 * (j + i) + 2 * h], f * d[4 * (j + i) + 2 * h + 1]);
                transpose_quad(pairs, lane);
                if (8 * j < room) *(uint4*)(to + 8 * j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    });
}

// Between chunks a sum is cut to the high half of its float, where dweight's element is, and LOW_BITS more in `low`. What is cut off comes back as half
// of the last bit kept: an error of at most 2^-(8 + LOW_BITS) of the value, no bias. PRMT puts the pieces together: byte `i` of `low` twice, then a
// half of `high`.
#define LOW_BITS 1
#define LOW_MASK ((0xffu << (8 - LOW_BITS) & 0xffu) * 0x01010101u)
#define LOW_HALF ((0x80u >> LOW_BITS) * 0x01010101u)
#define LOW_WORDS (4 * LOW_BITS)
#define LOW_QUADS (8 / LOW_BITS)
template <int HALF> TW_FORCE float joined(u32 high, u32 low, int i) {
    return __uint_as_float(__byte_perm(low, high, (HALF ? 0x7600 : 0x5400) | i << 4 | i));
}

// dweight [+]= kept^T scaled, over chunks of rows. Cut sums lie in the order of threads where the tile is whole, `low` always; the last chunk rounds the
// f32 sum to dweight's type, in the order of rows. START: 0 from nothing, 1 from dweight, 2 from cut sums. EARLY pairs are loaded before the last step
// ends, as many as registers are left for.
// p: dweight, low. i: vocab, D, steps, group.
#define EARLY 32
template <bool VALUE> struct Flag {
    static constexpr bool value = VALUE;
};
template <int START, int LAST> TW_FORCE void sum_weights(const Job& job) {
    E* out = (E*)job.p[0];
    uint4* low = (uint4*)job.p[1];
    int rows = job.i[0], width = job.i[1];
    Order order{(rows + 255) / 256, (width + TILE_N - 1) / TILE_N, job.i[3]};
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    u32 bits[LOW_WORDS], pairs[64];
    struct Place {
        bool whole;
        int rows, columns;
        E *corner, *mine;
        uint4* low;
    };
    auto place = [&](int tile, int column) {
        E* corner = out + i64(tile * TILE_M + warp * 16) * width + column * TILE_N;
        return Place{(tile + 1) * TILE_M <= rows && (column + 1) * TILE_N <= width,
                     rows - tile * TILE_M - warp * 16 - lane / 4,
                     width - column * TILE_N - 2 * (lane % 4),
                     corner,
                     corner + i64(lane / 4) * width + 2 * (lane % 4),
                     low + (i64(tile) * order.columns + column) * (256 * LOW_BITS) + (threadIdx.x - 128)};
    };
    auto load = [&](const Place& at, int from, int to) {
        if (START == 2 && at.whole) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                if (4 * i < from || 4 * i >= to) continue;
                uint4 x = *(const uint4*)(at.corner + i64(i) * width + 8 * lane);
                pairs[4 * i] = x.x, pairs[4 * i + 1] = x.y, pairs[4 * i + 2] = x.z, pairs[4 * i + 3] = x.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 64; i++) {
                if (i < from || i >= to) continue;
                int h = i % 2, j = i / 2;
                pairs[i] = 8 * h < at.rows && 8 * j < at.columns ? *(const u32*)(at.mine + i64(8 * h) * width + 8 * j) : 0;
            }
        }
    };
    auto early = [&](int tile, int column) {
        if (START != 2) return;
        Place at = place(tile, column);
#pragma unroll
        for (int i = 0; i < LOW_BITS; i++) {
            uint4 x = at.low[i * 256];
            bits[4 * i] = x.x, bits[4 * i + 1] = x.y, bits[4 * i + 2] = x.z, bits[4 * i + 3] = x.w;
        }
        load(at, 0, EARLY);
    };
    walk<1, 1, START == 2>(job, order, job.i[2], [](int) { return true; }, early, [&](float (&d)[128], int tile, int column) {
        Place at = place(tile, column);
        if (START) load(at, START == 2 ? EARLY : 0, 64);
#pragma unroll
        for (int q = 0; q < 32 && START; q++) {
            u32 low = START == 2 ? bits[q / LOW_QUADS] << (q % LOW_QUADS * LOW_BITS) & LOW_MASK | LOW_HALF : 0;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                d[4 * q + 2 * i] += joined<0>(pairs[2 * q + i], low, 2 * i);
                d[4 * q + 2 * i + 1] += joined<1>(pairs[2 * q + i], low, 2 * i + 1);
            }
        }
        // A warp's cut sums lie where its rows of the result will.
        __syncwarp();
        if (LAST) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                E* to = at.corner + i64(h * 8 + lane / 4) * width + 8 * (lane % 4);
                int room = 8 * h < at.rows ? width - column * TILE_N - 8 * (lane % 4) : 0;
#pragma unroll
                for (int j = 0; j < 32; j += 4) {
                    u32 out[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) out[i] = pack_pair(d[4 * (j + i) + 2 * h], d[4 * (j + i) + 2 * h + 1]);
                    transpose_quad(out, lane);
                    if (8 * j < room) *(uint4*)(to + 8 * j) = make_uint4(out[0], out[1], out[2], out[3]);
                }
            }
            return;
        }
        auto store = [&](auto whole) {
            u32 kept[LOW_WORDS];
#pragma unroll
            for (int i = 0; i < LOW_WORDS; i++) kept[i] = 0;
#pragma unroll
            for (int q = 0; q < 16; q++) {
                u32 x[8], p[4];
                // Opaque: else the compiler reads the registers while the matrix units still own them, and has to serialise.
#pragma unroll
                for (int i = 0; i < 8; i++) asm volatile("mov.b32 %0, %1;" : "=r"(x[i]) : "f"(d[8 * q + i]));
#pragma unroll
                for (int i = 0; i < 4; i++) p[i] = __byte_perm(x[2 * i], x[2 * i + 1], 0x7632);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    u32 low = __byte_perm(__byte_perm(x[4 * i], x[4 * i + 1], 0x0051), __byte_perm(x[4 * i + 2], x[4 * i + 3], 0x0051), 0x5410);
                    int quad = 2 * q + i;
                    kept[quad / LOW_QUADS] |= (low & LOW_MASK) >> (quad % LOW_QUADS * LOW_BITS);
                }
                if (whole.value) {
                    *(uint4*)(at.corner + i64(q) * width + 8 * lane) = make_uint4(p[0], p[1], p[2], p[3]);
                } else {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int h = i % 2, j = 2 * q + i / 2;
                        if (8 * h < at.rows && 8 * j < at.columns) *(u32*)(at.mine + i64(8 * h) * width + 8 * j) = p[i];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < LOW_BITS; i++) at.low[i * 256] = make_uint4(kept[4 * i], kept[4 * i + 1], kept[4 * i + 2], kept[4 * i + 3]);
        };
        if (at.whole) store(Flag<true>());
        else store(Flag<false>());
    });
}
HOPPER(weight_gradient_00) { sum_weights<0, 0>(job); }
HOPPER(weight_gradient_01) { sum_weights<0, 1>(job); }
HOPPER(weight_gradient_10) { sum_weights<1, 0>(job); }
HOPPER(weight_gradient_11) { sum_weights<1, 1>(job); }
HOPPER(weight_gradient_20) { sum_weights<2, 0>(job); }
HOPPER(weight_gradient_21) { sum_weights<2, 1>(job); }

// The same for an f32 dweight, which holds its sums. p: dweight. i: vocab, D, steps, group, whether to add.
HOPPER(weight_gradient_f32) {
    float* out = (float*)job.p[0];
    int rows = job.i[0], width = job.i[1], add = job.i[4];
    Order order{(rows + 255) / 256, (width + TILE_N - 1) / TILE_N, job.i[3]};
    walk<1, 1, 0>(job, order, job.i[2], [](int) { return true; }, [](int, int) {}, [&](float (&d)[128], int tile, int column) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        int row = tile * TILE_M + warp * 16 + lane / 4, columns_left = width - column * TILE_N - 2 * (lane % 4);
        float* mine = out + i64(row) * width + column * TILE_N + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 64; i++) {
            int h = i % 2, j = i / 2;
            if (row + 8 * h < rows && 8 * j < columns_left) {
                float2* at = (float2*)(mine + i64(8 * h) * width + 8 * j);
                float2 x = add ? *at : make_float2(0.0f, 0.0f);
                *at = make_float2(x.x + d[2 * i], x.y + d[2 * i + 1]);
            }
        }
    });
}

#endif

#else
#define EMPTY(entry) extern "C" __global__ void entry(const __grid_constant__ Job job) {}
EMPTY(statistics)
EMPTY(weights)
EMPTY(hidden_gradient)
EMPTY(weight_gradient_00)
EMPTY(weight_gradient_01)
EMPTY(weight_gradient_10)
EMPTY(weight_gradient_11)
EMPTY(weight_gradient_20)
EMPTY(weight_gradient_21)
EMPTY(weight_gradient_f32)
#endif

// The logit of each row's target, a warp a row; +infinity where the row does not count, so that exp(logit - it) is 0. Clears the flags.
extern "C" __global__ void __launch_bounds__(256)
target_logits(const E* hidden, const E* weight, const int* targets, int ignore, float* out, float* reference, int* flags, int rows, int width) {
    int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    int target = targets[row];
    float sum = 0.0f;
    if (target != ignore) {
        const E *x = hidden + i64(row) * width, *w = weight + i64(target) * width;
        for (int i = lane * 8; i < width; i += 256) {
            Pack<E> a = load_pack(x + i), b = load_pack(w + i);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += to_f32(a.v[j]) * to_f32(b.v[j]);
        }
        sum = warp_sum(sum);
    }
    if (lane == 0) {
        out[row] = sum;
        if (reference) reference[row] = target == ignore ? TW_INFINITY : sum;
        if (flags && row % 256 == 0) flags[row / 256] = 0;
    }
}

// 32 rows a block, 8 threads a row, each every eighth tile; then in their order.
// From maxima and sums: losses and lse; where `flags` is given only rows of flagged pairs of tiles, whose reference becomes their lse.
extern "C" __global__ void __launch_bounds__(256)
close_statistics(const float2* partial, int tiles, int rows, const float* target_logit, const int* targets, int ignore, const int* flags, float* reference,
                 float* losses, float* lse) {
    __shared__ float2 part[8][32];
    int lane = threadIdx.x % 32, row = blockIdx.x * 32 + lane, group = threadIdx.x / 32;
    if (flags && !flags[blockIdx.x / 8]) return;
    float most = -TW_INFINITY, sum = 0.0f;
    if (row < rows) {
        auto take = [&](float2 x) {
            float top = fmaxf(most, x.x);
            if (top != -TW_INFINITY) sum = sum * exp2_fast((most - top) * LOG2E) + x.y * exp2_fast((x.x - top) * LOG2E);
            // NaN is no maximum, but must not be lost.
            if (x.y != x.y) sum = x.y;
            most = top;
        };
#pragma unroll 4
        for (int t = group; t < tiles; t += 8) take(partial[i64(t) * rows + row]);
        part[group][lane] = make_float2(most, sum);
        most = -TW_INFINITY, sum = 0.0f;
    }
    __syncthreads();
    if (group > 0 || row >= rows) return;
    for (int g = 0; g < 8; g++) {
        float2 x = part[g][lane];
        float top = fmaxf(most, x.x);
        if (top != -TW_INFINITY) sum = sum * exp2_fast((most - top) * LOG2E) + x.y * exp2_fast((x.x - top) * LOG2E);
        if (x.y != x.y) sum = x.y;
        most = top;
    }
    bool counts = targets[row] != ignore;
    float ln = logf(sum);
    if (losses) losses[row] = counts ? (most - target_logit[row]) + ln : 0.0f;
    lse[row] = counts ? most + ln : 0.0f;
    if (reference) reference[row] = counts ? most + ln : TW_INFINITY;
}

// From sums relative to the target's logit: losses and lse. A sum out of the range in which 16 bits and their products are safe flags its pair of tiles.
extern "C" __global__ void __launch_bounds__(256)
close_weights(const float* partial, int tiles, int rows, const float* target_logit, const int* targets, int ignore, int* flags, float* losses, float* lse) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, row = blockIdx.x * 32 + lane, group = threadIdx.x / 32;
    float sum = 0.0f;
    if (row < rows) {
#pragma unroll 8
        for (int t = group; t < tiles; t += 8) sum += partial[i64(t) * rows + row];
        part[group][lane] = sum;
    }
    __syncthreads();
    if (group > 0 || row >= rows) return;
    sum = 0.0f;
    for (int g = 0; g < 8; g++) sum += part[g][lane];
    bool counts = targets[row] != ignore;
    if (counts && !(sum < 1e24f)) flags[row / 256] = 1;
    float ln = logf(sum);
    losses[row] = counts ? ln : 0.0f;
    lse[row] = counts ? target_logit[row] + ln : 0.0f;
}

// A block a row: the factor from kept weights to the gradient of the logits (scale times softmax - onehot), the target's onehot, and the row of
// `hidden` times that factor.
extern "C" __global__ void __launch_bounds__(128)
settle(const float* lse, const float* reference, const float* losses, const int* targets, int ignore, E* kept, int ld, const E* hidden, E* scaled, int width,
       float scale, float* factor) {
    int row = blockIdx.x, target = targets[row];
    bool counts = target != ignore;
    float f = counts ? expf(reference[row] - lse[row]) : 0.0f;
    if (threadIdx.x == 0) {
        factor[row] = f * scale;
        // softmax - 1 at the target, over the factor.
        if (counts) kept[i64(row) * ld + target] = from_f32<E>(expm1f(-losses[row]) / f);
    }
    f *= scale;
    const E* x = hidden + i64(row) * width;
    E* to = scaled + i64(row) * width;
    for (int i = threadIdx.x * 8; i < width; i += 1024) {
        Pack<E> a = load_pack(x + i);
#pragma unroll
        for (int j = 0; j < 8; j++) a.v[j] = counts ? from_f32<E>(to_f32(a.v[j]) * f) : E{0};
        store_pack(to + i, a);
    }
}
