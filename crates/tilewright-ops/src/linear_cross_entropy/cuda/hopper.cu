// The loss head on Hopper, by the tiles of tiles.cuh (sm_90a; elsewhere the entries are empty and never launched).

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Whether any of the flags is set; the same for all threads.
TW_FORCE bool any_flag(const int* flags, int count) {
    int any = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) any |= flags[i];
    return __syncthreads_or(any);
}

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
