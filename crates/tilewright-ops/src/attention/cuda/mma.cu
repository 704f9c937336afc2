// Flash attention on the matrix units (mma.sync, Ampere and later) for f16 and bf16 and head sizes 64 and 128.
//
// Scores of a tile live in the registers of the warp that made them, and are the left operand of the next product there; nothing but q, k, v and dout
// passes through shared memory. The backward is two kernels, one that owns keys and one that owns queries, so no sum is shared and no atomic is
// needed: the same inputs give the same bits.
//
// Tiles in shared memory have rows of D elements, whose 16-byte chunks are permuted by the row (chunk ^ row % 8): eight rows of one chunk column
// fall into all banks.

constexpr int D = TW_HEAD;
constexpr int CHUNKS = D / 8;
constexpr int STEPS = D / 16;   // of 16 along the head
constexpr int BLOCK = 64;       // keys of a tile of the forward; keys and queries of the backward
constexpr float LOG2E = 1.4426950408889634f;

// Forward: a warp owns M_TILES times 16 queries, so that each fragment of k and v is used that often.
constexpr int F_TILES = D == 64 ? 2 : 1;
constexpr int F_WARPS = D == 64 ? 4 : 8;
constexpr int F_ROWS = 16 * F_TILES * F_WARPS;
constexpr int B_WARPS = BLOCK / 16;
// Whether a warp of the backward keeps its own rows in registers; else they stay in shared memory behind the tiles.
constexpr bool HELD = D == 64;
constexpr int HELD_STEPS = HELD ? STEPS : 1;

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
    // With heads of 128 there are no registers left to hold all addresses at once.
    constexpr int AT_ONCE = D == 64 ? ROWS * CHUNKS / THREADS : 1;
#pragma unroll AT_ONCE
    for (int i = 0; i < ROWS * CHUNKS / THREADS; i++) {
        int e = threadIdx.x + i * THREADS, row = e / CHUNKS, chunk = e % CHUNKS;
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

extern "C" __global__ void __launch_bounds__(32 * F_WARPS)
forward(const T* qkv, T* out, float* lse, int batch, int heads, int length, float scale) {
    extern __shared__ __align__(128) T shared[];
    constexpr int THREADS = 32 * F_WARPS;
    int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // The longest rows first.
    int first = (gridDim.x - 1 - blockIdx.x) * F_ROWS;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    const T *k = q + c, *v = q + 2 * c;
    T *kt = shared, *vt = shared + 2 * BLOCK * D;
    // Queries pass through the memory of the first tiles.
    static_assert(F_ROWS * D <= 4 * BLOCK * D, "the queries fit the tiles' memory");
    load_tile<F_ROWS, THREADS>(shared, q, stride, first, length);
    commit();
    wait<0>();
    __syncthreads();
    u32 qf[F_TILES][STEPS][4];
#pragma unroll
    for (int m = 0; m < F_TILES; m++)
#pragma unroll
        for (int s = 0; s < STEPS; s++) load_left(qf[m][s], shared, (warp * F_TILES + m) * 16, 2 * s);
    __syncthreads();
    load_tile<BLOCK, THREADS>(kt, k, stride, 0, length);
    load_tile<BLOCK, THREADS>(vt, v, stride, 0, length);
    commit();

    float acc[F_TILES][D / 8][4] = {}, most[F_TILES][2], sum[F_TILES][2];
#pragma unroll
    for (int m = 0; m < F_TILES; m++) most[m][0] = most[m][1] = -TW_INFINITY, sum[m][0] = sum[m][1] = 0.0f;
    float scale2 = scale * LOG2E;
    int end = first + F_ROWS < length ? first + F_ROWS : length;
    int tiles = (end + BLOCK - 1) / BLOCK;
    for (int tile = 0; tile < tiles; tile++) {
        int k0 = tile * BLOCK;
        T *ks = kt + tile % 2 * BLOCK * D, *vs = vt + tile % 2 * BLOCK * D;
        wait<0>();
        __syncthreads();
        if (tile + 1 < tiles) {
            load_tile<BLOCK, THREADS>(kt + (tile + 1) % 2 * BLOCK * D, k, stride, k0 + BLOCK, length);
            load_tile<BLOCK, THREADS>(vt + (tile + 1) % 2 * BLOCK * D, v, stride, k0 + BLOCK, length);
            commit();
        }
        float s[F_TILES][BLOCK / 8][4] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int n = 0; n < BLOCK / 16; n++) {
                u32 kf[4];
                load_right(kf, ks, 16 * n, 2 * step);
#pragma unroll
                for (int m = 0; m < F_TILES; m++) {
                    mma(s[m][2 * n], qf[m][step], kf[0], kf[1]);
                    mma(s[m][2 * n + 1], qf[m][step], kf[2], kf[3]);
                }
            }
#pragma unroll
        for (int m = 0; m < F_TILES; m++) {
            int row = first + (warp * F_TILES + m) * 16 + g;
            if (k0 + BLOCK > first + (warp * F_TILES + m) * 16) {
#pragma unroll
                for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        if (k0 + 8 * n + 2 * t + e % 2 > row + e / 2 * 8) s[m][n][e] = -TW_INFINITY;
                    }
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float top = most[m][r];
#pragma unroll
                for (int n = 0; n < BLOCK / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * r], s[m][n][2 * r + 1]));
                top = quad_max(top);
                // A row of this tile may see no key of it; what it saw before stays.
                float base = top == -TW_INFINITY ? 0.0f : top * scale2;
                float fade = exp2_fast(most[m][r] * scale2 - base);
                most[m][r] = top;
                float total = 0.0f;
#pragma unroll
                for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; e++) {
                        s[m][n][e] = exp2_fast(s[m][n][e] * scale2 - base);
                        total += s[m][n][e];
                    }
                sum[m][r] = sum[m][r] * fade + total;
#pragma unroll
                for (int n = 0; n < D / 8; n++) {
                    acc[m][n][2 * r] *= fade;
                    acc[m][n][2 * r + 1] *= fade;
                }
            }
        }
#pragma unroll
        for (int step = 0; step < BLOCK / 16; step++) {
            u32 pf[F_TILES][4];
#pragma unroll
            for (int m = 0; m < F_TILES; m++) {
                pf[m][0] = pack2(s[m][2 * step][0], s[m][2 * step][1]);
                pf[m][1] = pack2(s[m][2 * step][2], s[m][2 * step][3]);
                pf[m][2] = pack2(s[m][2 * step + 1][0], s[m][2 * step + 1][1]);
                pf[m][3] = pack2(s[m][2 * step + 1][2], s[m][2 * step + 1][3]);
            }
#pragma unroll
            for (int n = 0; n < D / 16; n++) {
                u32 vf[4];
                load_right_plain(vf, vs, 16 * step, 2 * n);
#pragma unroll
                for (int m = 0; m < F_TILES; m++) {
                    mma(acc[m][2 * n], pf[m], vf[0], vf[1]);
                    mma(acc[m][2 * n + 1], pf[m], vf[2], vf[3]);
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < F_TILES; m++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int row = first + (warp * F_TILES + m) * 16 + g + 8 * r;
            float total = quad_sum(sum[m][r]), inverse = 1.0f / total;
            if (row >= length) continue;
            T* to = out + (i64(b) * length + row) * c + h * D + 2 * t;
#pragma unroll
            for (int n = 0; n < D / 8; n++) store2(to + 8 * n, acc[m][n][2 * r] * inverse, acc[m][n][2 * r + 1] * inverse);
            if (t == 0) lse[(i64(b) * heads + h) * length + row] = most[m][r] * scale + logf(total);
        }
}

// Shared by the two backward kernels: each warp owns 16 rows of `mine` (two tensors x and y) and walks tiles of the other side (u and w):
// s = x u^T, p = exp(scale s - lse), dp = y w^T, ds = p (dp - delta). For keys x = k, y = v, u = q, w = dout; for queries x = q, y = dout, u = k, w = v.
struct Scores {
    float p[BLOCK / 8][4], ds[BLOCK / 8][4];
};

struct Own {
    u32 x[HELD_STEPS][4], y[HELD_STEPS][4];
    T *xt, *yt;
    TW_FORCE void hold(int row) {
        if constexpr (HELD) {
#pragma unroll
            for (int s = 0; s < HELD_STEPS; s++) {
                load_left(x[s], xt, row, 2 * s);
                load_left(y[s], yt, row, 2 * s);
            }
        }
    }
};

TW_FORCE void scores(Scores& r, Own& own, int row, T* u, T* w) {
#pragma unroll
    for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) r.p[n][e] = r.ds[n][e] = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        const int held = HELD ? step : 0;
        if (!HELD) {
            load_left(own.x[0], own.xt, row, 2 * step);
            load_left(own.y[0], own.yt, row, 2 * step);
        }
#pragma unroll
        for (int n = 0; n < BLOCK / 16; n++) {
            u32 f[4];
            load_right(f, u, 16 * n, 2 * step);
            mma(r.p[2 * n], own.x[held], f[0], f[1]);
            mma(r.p[2 * n + 1], own.x[held], f[2], f[3]);
            load_right(f, w, 16 * n, 2 * step);
            mma(r.ds[2 * n], own.y[held], f[0], f[1]);
            mma(r.ds[2 * n + 1], own.y[held], f[2], f[3]);
        }
    }
}

TW_FORCE void left_of(u32 (&a)[4], const float (&s)[BLOCK / 8][4], int step) {
    a[0] = pack2(s[2 * step][0], s[2 * step][1]);
    a[1] = pack2(s[2 * step][2], s[2 * step][3]);
    a[2] = pack2(s[2 * step + 1][0], s[2 * step + 1][1]);
    a[3] = pack2(s[2 * step + 1][2], s[2 * step + 1][3]);
}

// acc (16, D) += s (16, BLOCK) tile (BLOCK, D)
TW_FORCE void add_product(float (&acc)[D / 8][4], const float (&s)[BLOCK / 8][4], T* tile) {
#pragma unroll
    for (int step = 0; step < BLOCK / 16; step++) {
        u32 a[4];
        left_of(a, s, step);
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 f[4];
            load_right_plain(f, tile, 16 * step, 2 * n);
            mma(acc[2 * n], a, f[0], f[1]);
            mma(acc[2 * n + 1], a, f[2], f[3]);
        }
    }
}

TW_FORCE void store_rows(T* to, i64 stride, int row, int length, const float (&acc)[D / 8][4], float scale) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + g + 8 * r >= length) continue;
        T* p = to + (row + g + 8 * r) * stride + 2 * t;
#pragma unroll
        for (int n = 0; n < D / 8; n++) store2(p + 8 * n, acc[n][2 * r] * scale, acc[n][2 * r + 1] * scale);
    }
}

// dk and dv of 64 keys.
extern "C" __global__ void __launch_bounds__(32 * B_WARPS)
backward_keys(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, int batch, int heads, int length, float scale) {
    extern __shared__ __align__(128) T shared[];
    __shared__ float stats[2][2][BLOCK];
    constexpr int THREADS = 32 * B_WARPS;
    int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int first = blockIdx.x * BLOCK;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    const T* d = dout + i64(b) * length * c + h * D;
    const float *l = lse + (i64(b) * heads + h) * length, *dl = delta + (i64(b) * heads + h) * length;
    T *qt = shared, *dt = shared + 2 * BLOCK * D;
    Own own;
    own.xt = HELD ? qt : shared + 4 * BLOCK * D;
    own.yt = HELD ? dt : shared + 5 * BLOCK * D;
    load_tile<BLOCK, THREADS>(own.xt, q + c, stride, first, length);
    load_tile<BLOCK, THREADS>(own.yt, q + 2 * c, stride, first, length);
    commit();
    wait<0>();
    __syncthreads();
    own.hold(warp * 16);
    __syncthreads();
    auto fetch = [&](int tile) {
        int q0 = tile * BLOCK, half = tile % 2;
        load_tile<BLOCK, THREADS>(qt + half * BLOCK * D, q, stride, q0, length);
        load_tile<BLOCK, THREADS>(dt + half * BLOCK * D, d, c, q0, length);
        commit();
        for (int i = threadIdx.x; i < BLOCK; i += THREADS) {
            // Queries beyond the end: exp of minus infinity is zero.
            stats[half][0][i] = q0 + i < length ? l[q0 + i] * LOG2E : TW_INFINITY;
            stats[half][1][i] = q0 + i < length ? dl[q0 + i] : 0.0f;
        }
    };
    float dk[D / 8][4] = {}, dv[D / 8][4] = {}, scale2 = scale * LOG2E;
    int from = first / BLOCK, tiles = (length + BLOCK - 1) / BLOCK;
    fetch(from);
    for (int tile = from; tile < tiles; tile++) {
        int q0 = tile * BLOCK, half = tile % 2;
        T *qs = qt + half * BLOCK * D, *ds = dt + half * BLOCK * D;
        wait<0>();
        __syncthreads();
        if (tile + 1 < tiles) fetch(tile + 1);
        Scores s;
        scores(s, own, warp * 16, qs, ds);
        bool diagonal = tile == from;
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int query = 8 * n + 2 * t + e % 2;
                float p = exp2_fast(s.p[n][e] * scale2 - stats[half][0][query]);
                if (diagonal && q0 + query < first + warp * 16 + g + e / 2 * 8) p = 0.0f;
                s.p[n][e] = p;
                s.ds[n][e] = p * (s.ds[n][e] - stats[half][1][query]);
            }
        add_product(dv, s.p, ds);
        add_product(dk, s.ds, qs);
    }
    T* to = dqkv + i64(b) * length * stride + h * D;
    store_rows(to + c, stride, first + warp * 16, length, dk, scale);
    store_rows(to + 2 * c, stride, first + warp * 16, length, dv, 1.0f);
}

// dq of 64 queries.
extern "C" __global__ void __launch_bounds__(32 * B_WARPS)
backward_queries(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, int batch, int heads, int length, float scale) {
    extern __shared__ __align__(128) T shared[];
    constexpr int THREADS = 32 * B_WARPS;
    int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int first = (gridDim.x - 1 - blockIdx.x) * BLOCK;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    const T* d = dout + i64(b) * length * c + h * D;
    i64 row_stats = (i64(b) * heads + h) * length;
    T *kt = shared, *vt = shared + 2 * BLOCK * D;
    Own own;
    own.xt = HELD ? kt : shared + 4 * BLOCK * D;
    own.yt = HELD ? vt : shared + 5 * BLOCK * D;
    load_tile<BLOCK, THREADS>(own.xt, q, stride, first, length);
    load_tile<BLOCK, THREADS>(own.yt, d, c, first, length);
    commit();
    wait<0>();
    __syncthreads();
    own.hold(warp * 16);
    __syncthreads();
    float base[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + warp * 16 + g + 8 * r;
        base[r] = row < length ? lse[row_stats + row] * LOG2E : TW_INFINITY;
        shift[r] = row < length ? delta[row_stats + row] : 0.0f;
    }
    auto fetch = [&](int tile) {
        load_tile<BLOCK, THREADS>(kt + tile % 2 * BLOCK * D, q + c, stride, tile * BLOCK, length);
        load_tile<BLOCK, THREADS>(vt + tile % 2 * BLOCK * D, q + 2 * c, stride, tile * BLOCK, length);
        commit();
    };
    float dq[D / 8][4] = {}, scale2 = scale * LOG2E;
    int tiles = first / BLOCK + 1;
    fetch(0);
    for (int tile = 0; tile < tiles; tile++) {
        T *ks = kt + tile % 2 * BLOCK * D, *vs = vt + tile % 2 * BLOCK * D;
        wait<0>();
        __syncthreads();
        if (tile + 1 < tiles) fetch(tile + 1);
        Scores s;
        scores(s, own, warp * 16, ks, vs);
        bool diagonal = tile + 1 == tiles;
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = exp2_fast(s.p[n][e] * scale2 - base[e / 2]);
                if (diagonal && tile * BLOCK + 8 * n + 2 * t + e % 2 > first + warp * 16 + g + e / 2 * 8) p = 0.0f;
                s.ds[n][e] = p * (s.ds[n][e] - shift[e / 2]);
            }
        add_product(dq, s.ds, ks);
    }
    store_rows(dqkv + i64(b) * length * stride + h * D, stride, first + warp * 16, length, dq, scale);
}
