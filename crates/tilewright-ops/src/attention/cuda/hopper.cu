// Flash attention on Hopper's matrix units (wgmma) for f16 and bf16 and heads of 64: the shape of mma.cu, with operands read from shared memory by the
// unit itself; only probabilities come from registers.
//
// A warpgroup (128 threads) owns 64 rows and is a block of its own: two that share their tiles were 7 % slower. A tile is 64 rows of 128 bytes whose 16-byte
// chunks are permuted by the row (chunk ^ row % 8): what the descriptors call a swizzle of 128 bytes.

#if TW_HEAD == 64 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int D = 64;
constexpr int TILE = 64;
constexpr int THREADS = 128;
constexpr int ROWS = 64;
constexpr float LOG2E = 1.4426950408889634f;

TW_FORCE u32 address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
TW_FORCE void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits for the copies of all threads, and makes them seen by the matrix units.
TW_FORCE void arrive() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// One thread's share of a tile of a strided matrix: every eighth 16-byte chunk of every sixteenth row. Addresses are counted on, not made again.
struct Loader {
    const T* from;
    i64 step;  // 16 rows
    u32 to;    // from the tile's begin
    int row, limit;
    TW_FORCE Loader(const T* matrix, i64 stride, int first, int limit) : step(16 * stride), limit(limit) {
        int chunk = threadIdx.x % 8, r = threadIdx.x / 8;
        row = first + r;
        from = matrix + row * stride + chunk * 8;
        to = r * D * sizeof(T) + ((chunk ^ (r & 7)) * 16);
    }
    // Copies the tile and goes on to the next; zeros from row `limit` on.
    TW_FORCE void tile(u32 at) {
#pragma unroll
        for (int i = 0; i < TILE / 16; i++) {
            // What is not there is not read, wherever the address points.
            int bytes = row < limit ? 16 : 0;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at + to + i * 2048), "l"(from), "r"(bytes));
            from += step;
            row += 16;
        }
    }
};

// Keeps the making of a left operand before the fence behind which the unit reads it.
TW_FORCE void settle(u32 (&a)[4][4]) {
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[n][e])::"memory");
}

// A tile as operand: groups of eight rows are 1024 bytes apart, swizzle of 128 bytes.
TW_FORCE u64 descriptor(u32 tile) { return u64((tile & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62; }

#if TW_DTYPE == 2
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
#define RESULT "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
#define RESULT_NAMES "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
// c (64, 64) += a (64, 16) b (16, 64), a in registers, 16 rows of the tile are b.
TW_FORCE void multiply(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." TYPES " " RESULT_NAMES
                 ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
                 : RESULT
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(1));
}
// c (64, 64) = [c +] a (64, 16) b (16, 64), 16 columns of two tiles.
TW_FORCE void multiply_tiles(float (&c)[8][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." TYPES " " RESULT_NAMES ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : RESULT
                 : "l"(a), "l"(b), "r"(add));
}
TW_FORCE void begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TW_FORCE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> TW_FORCE void finish() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Keeps uses of a result behind the wait for it.
TW_FORCE void settle(float (&c)[8][4]) {
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[n][e])::"memory");
}

// c = rows tile^T
TW_FORCE void scores(float (&c)[8][4], u32 rows, u32 tile) {
    u64 a = descriptor(rows), b = descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; step++) multiply_tiles(c, a + 2 * step, b + 2 * step, step > 0);
}
// c += a tile
TW_FORCE void add_times(float (&c)[8][4], const u32 (&a)[4][4], u32 tile) {
    u64 b = descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; step++) multiply(c, a[step], b + 128 * step);
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
// A result as left operand.
TW_FORCE void as_left(u32 (&a)[4][4], const float (&c)[8][4]) {
#pragma unroll
    for (int step = 0; step < 4; step++) {
        a[step][0] = pack2(c[2 * step][0], c[2 * step][1]);
        a[step][1] = pack2(c[2 * step][2], c[2 * step][3]);
        a[step][2] = pack2(c[2 * step + 1][0], c[2 * step + 1][1]);
        a[step][3] = pack2(c[2 * step + 1][2], c[2 * step + 1][3]);
    }
}
// An element of a result that was made a left operand, rounded as it is there.
TW_FORCE float element(const u32 (&a)[4][4], int n, int e) {
    u32 pair = a[n / 2][n % 2 * 2 + e / 2];
#if TW_DTYPE == 2
    return __uint_as_float(e % 2 ? pair & 0xffff0000u : pair << 16);
#else
    return to_f32(f16{u16(e % 2 ? pair >> 16 : pair)});
#endif
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
TW_FORCE void store_rows(T* to, i64 stride, int row, int length, const float (&acc)[8][4], float scale) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (row + g + 8 * r >= length) continue;
        T* p = to + (row + g + 8 * r) * stride + 2 * t;
#pragma unroll
        for (int n = 0; n < 8; n++) *(u32*)(p + 8 * n) = pack2(acc[n][2 * r] * scale, acc[n][2 * r + 1] * scale);
    }
}

// Which rows of which head come n-th: within `group` heads, which share the second-level cache, the longest rows of all heads first, so that short ones
// fill the end.
struct Place {
    int unit, h, b;
    TW_FORCE Place(int n, int units, int batch, int heads, int group) {
        int pairs = batch * heads, begin = n / (units * group) * group, width = min(group, pairs - begin);
        n -= begin * units;
        unit = n / width;
        int pair = begin + n - unit * width;
        b = pair / heads;
        h = pair - b * heads;
    }
};

constexpr u32 TILE_BYTES = TILE * D * sizeof(T);

// Sums over 64 rows, each warp's 16 to its place in `part`; threads of one column add the warps' in order once all have come.
TW_FORCE void sum_rows(float* part, const float (&acc)[8][4], float scale) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float x = (acc[n][e] + acc[n][2 + e]) * scale;
            x += __shfl_xor_sync(0xffffffffu, x, 4);
            x += __shfl_xor_sync(0xffffffffu, x, 8);
            x += __shfl_xor_sync(0xffffffffu, x, 16);
            if (lane < 4) part[warp * D + 8 * n + 2 * lane + e] = x;
        }
}
TW_FORCE void store_sums(float* to, const float* part) {
    int j = threadIdx.x % D;
    *to = (part[j] + part[D + j]) + (part[2 * D + j] + part[3 * D + j]);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
forward(const T* qkv, T* out, float* lse, int batch, int heads, int length, float scale, int group) {
    extern __shared__ __align__(1024) T shared[];
    int blocks = (length + ROWS - 1) / ROWS, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Place place(blockIdx.x, blocks, batch, heads, group);
    int h = place.h, b = place.b, first = (blocks - 1 - place.unit) * ROWS, row = first + warp * 16;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    u32 kt = address(shared), vt = kt + 2 * TILE_BYTES, qt = kt + 4 * TILE_BYTES;
    Loader(q, stride, first, length).tile(qt);
    Loader keys(q + c, stride, 0, length), values(q + 2 * c, stride, 0, length);
    auto fetch = [&](int tile) {
        keys.tile(kt + tile % 2 * TILE_BYTES);
        values.tile(vt + tile % 2 * TILE_BYTES);
        commit_copies();
    };
    float acc[8][4] = {}, most[2] = {-TW_INFINITY, -TW_INFINITY}, sum[2] = {};
    float scale2 = scale * LOG2E;
    int end = first + ROWS < length ? first + ROWS : length, tiles = (end + TILE - 1) / TILE;
    fetch(0);
    for (int tile = 0; tile < tiles; tile++) {
        int k0 = tile * TILE;
        arrive();
        if (tile + 1 < tiles) fetch(tile + 1);
        float s[8][4];
        begin();
        scores(s, qt, kt + tile % 2 * TILE_BYTES);
        commit();
        finish<0>();
        settle(s);
        bool diagonal = k0 + TILE > first;
        if (diagonal) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (k0 + 8 * n + 2 * t + e % 2 > row + g + e / 2 * 8) s[n][e] = -TW_INFINITY;
                }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            // Every row sees key 0, so the maximum is finite from the first tile on.
            float top = most[r];
#pragma unroll
            for (int n = 0; n < 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            top = quad_max(top);
            float base = top * scale2, fade = exp2_fast(most[r] * scale2 - base), total = 0.0f;
            most[r] = top;
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; e++) {
                    s[n][e] = exp2_fast(s[n][e] * scale2 - base);
                    total += s[n][e];
                }
            sum[r] = sum[r] * fade + total;
#pragma unroll
            for (int n = 0; n < 8; n++) acc[n][2 * r] *= fade, acc[n][2 * r + 1] *= fade;
        }
        u32 p[4][4];
        as_left(p, s);
        settle(p);
        settle(acc);
        begin();
        add_times(acc, p, vt + tile % 2 * TILE_BYTES);
        commit();
        finish<0>();
        settle(acc);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = row + g + 8 * r;
        float total = quad_sum(sum[r]), inverse = 1.0f / total;
#pragma unroll
        for (int n = 0; n < 8; n++) acc[n][2 * r] *= inverse, acc[n][2 * r + 1] *= inverse;
        if (t == 0 && at < length) lse[(i64(b) * heads + h) * length + at] = most[r] * scale + logf(total);
    }
    store_rows(out + i64(b) * length * c + h * D, c, row, length, acc, 1.0f);
}

// delta: the product of each row of out and dout, eight lanes a row.
extern "C" __global__ void __launch_bounds__(256) row_products(const T* out, const T* dout, float* delta, int batch, int heads, int length) {
    i64 chunk = thread_index(), all = i64(batch) * length * heads * 8;
    float total = 0.0f;
    if (chunk < all) {
        Pack<T> x = load_pack(out + chunk * 8), y = load_pack(dout + chunk * 8);
#pragma unroll
        for (int i = 0; i < 8; i++) total += to_f32(x.v[i]) * to_f32(y.v[i]);
    }
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) total += __shfl_xor_sync(0xffffffffu, total, d);
    if (threadIdx.x % 8 != 0 || chunk >= all) return;
    u32 row = u32(chunk / 8), token = row / heads, h = row - token * heads, b = token / length, t = token - b * length;
    delta[(i64(b) * heads + h) * length + t] = total;
}

struct Gradients {
    const T *q, *d;         // this head's queries and gradients of outputs, from the row's first
    const float *lse, *dl;  // this head's statistics
    T* to;
    float* sums;  // of this row and head, over the 64 rows of each block; or null
    i64 c, stride;
    int length;
    float scale;
};

// dk and dv of 64 keys.
TW_FORCE void key_gradients(const Gradients& x, int first, T* shared) {
    __shared__ float stats[2][2][TILE], part[2][4 * D];
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = first + warp * 16;
    u32 qt = address(shared), dt = qt + 2 * TILE_BYTES, kt = qt + 4 * TILE_BYTES, vt = qt + 5 * TILE_BYTES;
    Loader(x.q + x.c, x.stride, first, x.length).tile(kt);
    Loader(x.q + 2 * x.c, x.stride, first, x.length).tile(vt);
    Loader queries(x.q, x.stride, first, x.length), outs(x.d, x.c, first, x.length);
    auto fetch = [&](int tile) {
        int half = tile % 2;
        queries.tile(qt + half * TILE_BYTES);
        outs.tile(dt + half * TILE_BYTES);
        commit_copies();
        if (threadIdx.x < TILE) {
            // Queries behind the end: exp of minus infinity is zero.
            int at = tile * TILE + threadIdx.x;
            stats[half][0][threadIdx.x] = at < x.length ? x.lse[at] * LOG2E : TW_INFINITY;
            stats[half][1][threadIdx.x] = at < x.length ? x.dl[at] : 0.0f;
        }
    };
    float dk[8][4] = {}, dv[8][4] = {}, scale2 = x.scale * LOG2E;
    int from = first / TILE, tiles = (x.length + TILE - 1) / TILE;
    fetch(from);
    for (int tile = from; tile < tiles; tile++) {
        int q0 = tile * TILE, half = tile % 2;
        u32 qs = qt + half * TILE_BYTES, ds = dt + half * TILE_BYTES;
        arrive();
        if (tile + 1 < tiles) fetch(tile + 1);
        float s[8][4], dp[8][4];
        begin();
        scores(s, kt, qs);
        commit();
        scores(dp, vt, ds);
        commit();
        finish<1>();
        settle(s);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 base = *(const float2*)&stats[half][0][8 * n + 2 * t];
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = exp2_fast(s[n][e] * scale2 - (e % 2 ? base.y : base.x));
        }
        if (q0 < first + 64) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (q0 + 8 * n + 2 * t + e % 2 < row + g + e / 2 * 8) s[n][e] = 0.0f;
                }
        }
        u32 pf[4][4];
        as_left(pf, s);
        settle(pf);
        begin();
        add_times(dv, pf, ds);
        commit();
        finish<1>();
        settle(dp);
#pragma unroll
        for (int n = 0; n < 8; n++) {
            float2 shift = *(const float2*)&stats[half][1][8 * n + 2 * t];
#pragma unroll
            for (int e = 0; e < 4; e++) dp[n][e] = element(pf, n, e) * (dp[n][e] - (e % 2 ? shift.y : shift.x));
        }
        u32 df[4][4];
        as_left(df, dp);
        settle(df);
        begin();
        add_times(dk, df, qs);
        commit();
        finish<0>();
        settle(dv);
        settle(dk);
    }
    store_rows(x.to + x.c, x.stride, row, x.length, dk, x.scale);
    store_rows(x.to + 2 * x.c, x.stride, row, x.length, dv, 1.0f);
    if (!x.sums) return;
    sum_rows(part[0], dk, x.scale);
    sum_rows(part[1], dv, 1.0f);
    __syncthreads();
    int which = threadIdx.x / D;
    store_sums(x.sums + (first / ROWS) * x.stride + (1 + which) * x.c + threadIdx.x % D, part[which]);
}

// dq of 64 queries.
TW_FORCE void query_gradients(const Gradients& x, int first, T* shared) {
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = first + warp * 16;
    u32 kt = address(shared), vt = kt + 2 * TILE_BYTES, qt = kt + 4 * TILE_BYTES, ot = kt + 5 * TILE_BYTES;
    Loader(x.q, x.stride, first, x.length).tile(qt);
    Loader(x.d, x.c, first, x.length).tile(ot);
    float base[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = row + g + 8 * r;
        base[r] = at < x.length ? x.lse[at] * LOG2E : TW_INFINITY;
        shift[r] = at < x.length ? x.dl[at] : 0.0f;
    }
    Loader keys(x.q + x.c, x.stride, 0, x.length), values(x.q + 2 * x.c, x.stride, 0, x.length);
    auto fetch = [&](int tile) {
        keys.tile(kt + tile % 2 * TILE_BYTES);
        values.tile(vt + tile % 2 * TILE_BYTES);
        commit_copies();
    };
    float dq[8][4] = {}, scale2 = x.scale * LOG2E;
    int end = first + ROWS < x.length ? first + ROWS : x.length, tiles = (end + TILE - 1) / TILE;
    fetch(0);
    for (int tile = 0; tile < tiles; tile++) {
        int k0 = tile * TILE;
        u32 ks = kt + tile % 2 * TILE_BYTES, vs = vt + tile % 2 * TILE_BYTES;
        arrive();
        if (tile + 1 < tiles) fetch(tile + 1);
        float s[8][4], dp[8][4];
        begin();
        scores(s, qt, ks);
        commit();
        scores(dp, ot, vs);
        commit();
        finish<1>();
        settle(s);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) s[n][e] = exp2_fast(s[n][e] * scale2 - base[e / 2]);
        if (k0 + TILE > first) {
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (k0 + 8 * n + 2 * t + e % 2 > row + g + e / 2 * 8) s[n][e] = 0.0f;
                }
        }
        finish<0>();
        settle(dp);
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dp[n][e] = s[n][e] * (dp[n][e] - shift[e / 2]);
        u32 df[4][4];
        as_left(df, dp);
        settle(df);
        begin();
        add_times(dq, df, ks);
        commit();
        finish<0>();
        settle(dq);
    }
    store_rows(x.to, x.stride, row, x.length, dq, x.scale);
    if (!x.sums) return;
    __shared__ float part[4 * D];
    sum_rows(part, dq, x.scale);
    __syncthreads();
    if (threadIdx.x < D) store_sums(x.sums + (first / ROWS) * x.stride + threadIdx.x, part);
}

// Both in one launch, keys and queries by turns. `sums`, where given: dqkv's sums over the rows of each block, (B, blocks, 3C). Rows behind the end add zero.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
backward(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, float* sums, int batch, int heads, int length, float scale,
         int group) {
    extern __shared__ __align__(1024) T shared[];
    int blocks = (length + ROWS - 1) / ROWS;
    Place place(blockIdx.x, 2 * blocks, batch, heads, group);
    i64 c = i64(heads) * D, stride = 3 * c, row = i64(place.b) * length, statistics = (i64(place.b) * heads + place.h) * length;
    if (sums) sums += i64(place.b) * blocks * stride + place.h * D;
    Gradients x = {qkv + row * stride + place.h * D,  dout + row * c + place.h * D, lse + statistics, delta + statistics,
                   dqkv + row * stride + place.h * D, sums,                         c,                stride,
                   length,                            scale};
    int nth = place.unit / 2;
    if (place.unit % 2) query_gradients(x, (blocks - 1 - nth) * ROWS, shared);
    else key_gradients(x, nth * ROWS, shared);
}
#else
// Other chips and heads run mma.cu.
extern "C" __global__ void forward() {}
extern "C" __global__ void row_products() {}
extern "C" __global__ void backward() {}
#endif
