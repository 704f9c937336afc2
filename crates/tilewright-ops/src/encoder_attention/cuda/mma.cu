// Encoder attention by the matrix units of warps (mma.sync, Ampere and later) for f16 and bf16 and heads of 64: a warp owns 16 queries of a row, a block 64, or
// a short row as a whole.
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
constexpr int SHORT = 128;  // tokens of a row that one block takes as a whole
constexpr int SHORT_THREADS = 32 * SHORT / 16;
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

// What a warp keeps of its 16 queries: two rows of the accumulators a thread.
struct Sums {
    float acc[D / 8][4], most[2], sum[2];
};
TW_FORCE Sums no_sums() {
    Sums z;
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) z.acc[n][e] = 0.0f;
    z.most[0] = z.most[1] = -TW_INFINITY, z.sum[0] = z.sum[1] = 0.0f;
    return z;
}

// Hides the keys of a tile that a query does not see.
TW_FORCE void hide(float (&s)[BLOCK / 8][4], const Call& c, const Tile& tile, const Token (&own)[2], int k0, bool banded, bool by_token) {
    int t = threadIdx.x % 4;
    if (by_token) {
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
        return;
    }
    // Positions are indices in the row: a query sees the keys from one to another.
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int half = banded && c.window < tile.length ? int(c.window) : tile.length;
        int from = own[r].position - half - k0 - 2 * t, to = min(own[r].position + half, tile.length - 1) - k0 - 2 * t;
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (8 * n + e < from || 8 * n + e > to) s[n][2 * r + e] = -TW_INFINITY;
    }
}

// Adds a tile of keys, from token `k0` of the row on, to the sums of the queries from `q0` on.
TW_FORCE void add_tile(Sums& z, const Call& c, const Tile& tile, const u32 (&qf)[STEPS][4], const Token (&own)[2], int q0, int k0, T* ks, T* vs, float scale2) {
    bool banded = c.window >= 0 && !c.tokens && !c.positions, by_token = c.option_ids || (c.window >= 0 && !banded);
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
    bool inside = k0 + BLOCK <= tile.length && !by_token && (!banded || (k0 >= q0 + 15 - c.window && k0 + BLOCK - 1 <= q0 + c.window));
    if (!inside) hide(s, c, tile, own, k0, banded, by_token);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = z.most[r];
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = quad_max(top);
        // A query may see no key of its first tiles.
        float base = top == -TW_INFINITY ? 0.0f : top * scale2;
        float fade = exp2_fast(z.most[r] * scale2 - base), total = 0.0f;
        z.most[r] = top;
#pragma unroll
        for (int n = 0; n < BLOCK / 8; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n][e] = exp2_fast(s[n][e] * scale2 - base);
                total += s[n][e];
            }
        z.sum[r] = z.sum[r] * fade + total;
#pragma unroll
        for (int n = 0; n < D / 8; n++) z.acc[n][2 * r] *= fade, z.acc[n][2 * r + 1] *= fade;
    }
#pragma unroll
    for (int step = 0; step < BLOCK / 16; step++) {
        u32 pf[4] = {pack2(s[2 * step][0], s[2 * step][1]), pack2(s[2 * step][2], s[2 * step][3]), pack2(s[2 * step + 1][0], s[2 * step + 1][1]),
                     pack2(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            u32 vf[4];
            load_right_plain(vf, vs, 16 * step, 2 * n);
            mma(z.acc[2 * n], pf, vf[0], vf[1]);
            mma(z.acc[2 * n + 1], pf, vf[2], vf[3]);
        }
    }
}

// Writes the results of the warp's queries.
TW_FORCE void close(const Sums& z, const Tile& tile, T* out, i64 width, int h) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = threadIdx.x / 32 * 16 + g + 8 * r;
        float inverse = 1.0f / quad_sum(z.sum[r]);
        if (i >= tile.queries) continue;
        T* at = out + (tile.first + i) * width + h * D + 2 * t;
#pragma unroll
        for (int n = 0; n < D / 8; n++) store2(at + 8 * n, z.acc[n][2 * r] * inverse, z.acc[n][2 * r + 1] * inverse);
    }
}

// The tokens of this thread's two queries.
TW_FORCE void own_tokens(Token (&own)[2], const Call& c, const Tile& tile) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * r;
        own[r] = token(c, tile, query_index(c, tile, i < tile.queries ? i : 0));
    }
}

#define PARAMETERS                                                                                                                                            \
    const T *q_all, i64 q_width, const T *kv, i64 kv_width, const int *row_starts, const int *query_starts, const int *tokens, const int *positions,          \
        const int *option_ids, int rows, i64 window, T *out, int heads, int, float scale

extern "C" __global__ void __launch_bounds__(THREADS) forward(PARAMETERS) {
    extern __shared__ __align__(128) T shared[];
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    Tile tile;
    if (!find_tile<ROWS>(c, blockIdx.x, tile)) return;
    int h = blockIdx.y, warp = threadIdx.x / 32, from, to;
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
    Token own[2];
    own_tokens(own, c, tile);
    Sums z = no_sums();
    for (int at_tile = begin; at_tile < end; at_tile++) {
        wait<0>();
        __syncthreads();
        if (at_tile + 1 < end) {
            load_tile<BLOCK, THREADS>(kt + (at_tile + 1) % 2 * BLOCK * D, k, kv_width, at_tile * BLOCK + BLOCK, tile.length);
            load_tile<BLOCK, THREADS>(vt + (at_tile + 1) % 2 * BLOCK * D, v, kv_width, at_tile * BLOCK + BLOCK, tile.length);
            commit();
        }
        add_tile(z, c, tile, qf, own, tile.offset + warp * 16, at_tile * BLOCK, kt + at_tile % 2 * BLOCK * D, vt + at_tile % 2 * BLOCK * D, scale * LOG2E);
    }
    close(z, tile, out, width, h);
}

// Turns rows of a tile by the angles of their positions.
TW_FORCE void turn_rows(T* tile, int count, const int* positions, const float* table) {
    constexpr int PAIRS = CHUNKS / 2;
#pragma unroll
    for (int i = 0; i < SHORT * PAIRS / SHORT_THREADS; i++) {
        int e = threadIdx.x + i * SHORT_THREADS, row = e / PAIRS, chunk = e % PAIRS;
        if (row < count) turn(tile, row, chunk, angles_at(table, positions[row], chunk));
    }
}

// Rows of at most SHORT tokens: a block takes one head of one row as a whole, whose keys are loaded once, and turned by the way where there is a table.
#if __CUDA_ARCH__ >= 900
#define SHORT_BLOCKS 2
#else
#define SHORT_BLOCKS 1
#endif
extern "C" __global__ void __launch_bounds__(SHORT_THREADS, SHORT_BLOCKS) short_rows(PARAMETERS, const float* table, const int* key_positions, const int* query_positions) {
    extern __shared__ __align__(128) T shared[];
    wait_for_inputs();
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    int row = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32;
    Tile tile;
    tile.start = row_starts[row], tile.length = row_starts[row + 1] - tile.start;
    int first = query_starts[row], queries = query_starts[row + 1] - first;
    if (tile.length <= 0) return;
    i64 width = i64(heads) * D;
    const T *k = kv + i64(tile.start) * kv_width + h * D, *v = k + width;
    T *kt = shared, *vt = kt + SHORT * D, *qt = vt + SHORT * D;
    load_tile<SHORT, SHORT_THREADS>(kt, k, kv_width, 0, tile.length);
    for (int q0 = 0; q0 < queries; q0 += SHORT) {
        tile.offset = q0, tile.first = first + q0, tile.queries = queries - q0 < SHORT ? queries - q0 : SHORT;
        if (q0 > 0) __syncthreads();
        load_tile<SHORT, SHORT_THREADS>(qt, q_all + i64(tile.first) * q_width + h * D, q_width, 0, tile.queries);
        commit();
        // Values arrive while queries and keys are turned.
        if (q0 == 0) load_tile<SHORT, SHORT_THREADS>(vt, v, kv_width, 0, tile.length);
        commit();
        if (table) {
            wait<1>();
            __syncthreads();
            if (q0 == 0) turn_rows(kt, tile.length, key_positions + tile.start, table);
            turn_rows(qt, tile.queries, query_positions + tile.first, table);
        }
        wait<0>();
        __syncthreads();
        if (warp * 16 >= tile.queries) continue;
        u32 qf[STEPS][4];
#pragma unroll
        for (int s = 0; s < STEPS; s++) load_left(qf[s], qt, warp * 16, 2 * s);
        Token own[2];
        own_tokens(own, c, tile);
        Sums z = no_sums();
        for (int k0 = 0; k0 < tile.length; k0 += BLOCK)
            add_tile(z, c, tile, qf, own, q0 + warp * 16, k0, kt + k0 * D, vt + k0 * D, scale * LOG2E);
        close(z, tile, out, width, h);
    }
}
