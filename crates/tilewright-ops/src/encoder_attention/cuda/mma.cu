// Encoder attention on the matrix units (mma.sync, Ampere and later) for f16 and bf16 and heads of 64: a warp owns 16 queries of a row, a block 64.
//
// Scores of a tile live in the registers of the warp that made them, and are the left operand of the next product there. Tiles in shared memory have rows of D
// elements, whose 16-byte chunks are permuted by the row (chunk ^ row % 8).

constexpr int D = TW_HEAD;
constexpr int CHUNKS = D / 8;
constexpr int STEPS = D / 16;  // of 16 along the head
constexpr int BLOCK = 64;      // keys of a tile
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr int ROWS = 16 * WARPS;
constexpr float LOG2E = 1.4426950408889634f;

TW_FORCE u32 address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// 16 bytes from global to shared memory, or zeros.
TW_FORCE void copy_chunk(void* to, const void* from, bool real) {
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(bytes));
}
TW_FORCE void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> TW_FORCE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

TW_FORCE T* at(T* tile, int row, int chunk) { return tile + row * D + ((chunk ^ (row & 7)) * 8); }

// `rows` rows of a strided matrix from row `first` on, zeros from row `limit` on.
template <int ROWS, int THREADS> TW_FORCE void load_tile(T* tile, const T* from, i64 stride, int first, int limit) {
#pragma unroll
    for (int e = threadIdx.x; e < ROWS * CHUNKS; e += THREADS) {
        int row = e / CHUNKS, chunk = e % CHUNKS;
        bool real = first + row < limit;
        copy_chunk(at(tile, row, chunk), from + (real ? first + row : 0) * stride + chunk * 8, real);
    }
}

TW_FORCE void ldmatrix(u32 (&r)[4], const T* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)));
}
TW_FORCE void ldmatrix_transposed(u32 (&r)[4], const T* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address(p)));
}

// Left operand: 16 rows from `row` on, 16 columns from chunk `chunk` on.
TW_FORCE void load_left(u32 (&r)[4], T* tile, int row, int chunk) {
    int lane = threadIdx.x % 32;
    ldmatrix(r, at(tile, row + lane % 16, chunk + lane / 16));
}
// Right operand of a product with the transpose of the tile: 16 of its rows become columns. r[0..1] are the first 8, r[2..3] the others.
TW_FORCE void load_right(u32 (&r)[4], T* tile, int row, int chunk) {
    int lane = threadIdx.x % 32, m = lane / 8;
    ldmatrix(r, at(tile, row + m / 2 * 8 + lane % 8, chunk + m % 2));
}
// Right operand of a product with the tile itself: 16 rows, 16 columns.
TW_FORCE void load_right_plain(u32 (&r)[4], T* tile, int row, int chunk) {
    int lane = threadIdx.x % 32, m = lane / 8;
    ldmatrix_transposed(r, at(tile, row + m % 2 * 8 + lane % 8, chunk + m / 2));
}

TW_FORCE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if TW_DTYPE == 2
#define TYPES "f32.bf16.bf16.f32"
#else
#define TYPES "f32.f16.f16.f32"
#endif
    asm volatile("mma.sync.aligned.m16n8k16.row.col." TYPES " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

TW_FORCE u32 pack2(float low, float high) {
    u32 r;
#if TW_DTYPE == 2
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}
TW_FORCE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TW_FORCE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
TW_FORCE float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Two neighbouring elements.
TW_FORCE void store2(T* p, float low, float high) { *(u32*)p = pack2(low, high); }

extern "C" __global__ void __launch_bounds__(THREADS)
forward(const T* q_all, i64 q_width, const T* kv, i64 kv_width, const int* row_starts, const int* query_starts, const int* tokens, const int* positions, const int* option_ids,
        int rows, i64 window, T* out, int heads, int, float scale) {
    extern __shared__ __align__(128) T shared[];
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    Tile tile;
    if (!find_tile<ROWS>(c, blockIdx.x, tile)) return;
    int h = blockIdx.y, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, from, to;
    i64 width = i64(heads) * D;
    const T *k = kv + i64(tile.start) * kv_width + h * D, *v = k + width;
    T *kt = shared, *vt = shared + 2 * BLOCK * D;
    key_range(c, tile, from, to);
    int begin = from / BLOCK, end = (to + BLOCK - 1) / BLOCK;
    // Queries pass through the memory of the second tiles, while the first ones arrive.
    load_tile<ROWS, THREADS>(kt + (begin + 1) % 2 * BLOCK * D, q_all + i64(tile.first) * q_width + h * D, q_width, 0, tile.queries);
    commit();
    load_tile<BLOCK, THREADS>(kt + begin % 2 * BLOCK * D, k, kv_width, begin * BLOCK, tile.length);
    load_tile<BLOCK, THREADS>(vt + begin % 2 * BLOCK * D, v, kv_width, begin * BLOCK, tile.length);
    commit();
    wait<1>();
    __syncthreads();
    u32 qf[STEPS][4];
#pragma unroll
    for (int s = 0; s < STEPS; s++) load_left(qf[s], kt + (begin + 1) % 2 * BLOCK * D, warp * 16, 2 * s);

    // The queries of this thread's two rows of the accumulators.
    Token own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = warp * 16 + g + 8 * r;
        own[r] = token(c, tile, query_index(c, tile, i < tile.queries ? i : 0));
    }
    bool banded = window >= 0 && !tokens && !positions, by_token = option_ids || (window >= 0 && !banded);
    float acc[D / 8][4] = {}, most[2] = {-TW_INFINITY, -TW_INFINITY}, sum[2] = {};
    float scale2 = scale * LOG2E;
    for (int at_tile = begin; at_tile < end; at_tile++) {
        int k0 = at_tile * BLOCK;
        T *ks = kt + at_tile % 2 * BLOCK * D, *vs = vt + at_tile % 2 * BLOCK * D;
        wait<0>();
        __syncthreads();
        if (at_tile + 1 < end) {
            load_tile<BLOCK, THREADS>(kt + (at_tile + 1) % 2 * BLOCK * D, k, kv_width, k0 + BLOCK, tile.length);
            load_tile<BLOCK, THREADS>(vt + (at_tile + 1) % 2 * BLOCK * D, v, kv_width, k0 + BLOCK, tile.length);
            commit();
        }
        float s[BLOCK / 8][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < BLOCK / 16; n++) {
                u32 kf[4];
                load_right(kf, ks, 16 * n, 2 * step);
                mma(s[2 * n], qf[step], kf[0], kf[1]);
                mma(s[2 * n + 1], qf[step], kf[2], kf[3]);
            }
        int q0 = tile.offset + warp * 16;
        bool inside = k0 + BLOCK <= tile.length && !by_token && (!banded || (k0 >= q0 + 15 - window && k0 + BLOCK - 1 <= q0 + window));
        if (!inside) {
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int j = k0 + 8 * n + 2 * t + e;
                    bool real = j < tile.length;
                    Token key = real ? token(c, tile, j) : Token{0, 0};
                    if (!real || !sees(c, own[0], key)) s[n][e] = -TW_INFINITY;
                    if (!real || !sees(c, own[1], key)) s[n][2 + e] = -TW_INFINITY;
                }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = most[r];
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            top = quad_max(top);
            // A query may see no key of its first tiles.
            float base = top == -TW_INFINITY ? 0.0f : top * scale2;
            float fade = exp2_fast(most[r] * scale2 - base), total = 0.0f;
            most[r] = top;
#pragma unroll
            for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[n][e] = exp2_fast(s[n][e] * scale2 - base);
                    total += s[n][e];
                }
            sum[r] = sum[r] * fade + total;
#pragma unroll
            for (int n = 0; n < D / 8; n++) acc[n][2 * r] *= fade, acc[n][2 * r + 1] *= fade;
        }
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++) {
            u32 pf[4] = {pack2(s[2 * step][0], s[2 * step][1]), pack2(s[2 * step][2], s[2 * step][3]),
                         pack2(s[2 * step + 1][0], s[2 * step + 1][1]), pack2(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 vf[4];
                load_right_plain(vf, vs, 16 * step, 2 * n);
                mma(acc[2 * n], pf, vf[0], vf[1]);
                mma(acc[2 * n + 1], pf, vf[2], vf[3]);
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = warp * 16 + g + 8 * r;
        float inverse = 1.0f / quad_sum(sum[r]);
        if (i >= tile.queries) continue;
        T* at = out + (tile.first + i) * width + h * D + 2 * t;
#pragma unroll
        for (int n = 0; n < D / 8; n++) store2(at + 8 * n, acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);
    }
}
