// Flash attention on Hopper's matrix units (wgmma) for f16 and bf16 and heads of 64: the shape of mma.cu, with right operands read from shared memory
// by the unit itself and left operands in registers.
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
TW_FORCE void copy_chunk(void* to, const void* from, bool real) {
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(bytes));
}
TW_FORCE void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits for the copies of all threads, and makes them seen by the matrix units.
TW_FORCE void arrive() {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

// `COUNT` rows of a strided matrix from row `first` on, zeros from row `limit` on.
template <int COUNT> TW_FORCE void load_tile(T* tile, const T* from, i64 stride, int first, int limit) {
#pragma unroll
    for (int i = 0; i < COUNT * 8 / THREADS; i++) {
        int e = threadIdx.x + i * THREADS, row = e / 8, chunk = e % 8;
        bool real = first + row < limit;
        copy_chunk(tile + row * D + ((chunk ^ (row & 7)) * 8), from + (real ? first + row : 0) * stride + chunk * 8, real);
    }
}

// Left operand in registers: the 16 rows of this warp, 16 columns from chunk `chunk` on.
TW_FORCE void load_left(u32 (&r)[4], const T* tile, int row, int chunk) {
    int lane = threadIdx.x % 32;
    row += lane % 16, chunk += lane / 16;
    u32 p = address(tile + row * D + ((chunk ^ (row & 7)) * 8));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(p));
}

// Keeps the making of a left operand before the fence behind which the unit reads it.
TW_FORCE void settle(u32 (&a)[4][4]) {
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[n][e])::"memory");
}

// The 16 rows of this warp. Loaded again for each tile: held over the loop, their registers were seen given to others (NVRTC and nvcc 13.0).
TW_FORCE void load_rows(u32 (&a)[4][4], const T* tile) {
#pragma unroll
    for (int step = 0; step < 4; step++) load_left(a[step], tile, threadIdx.x / 32 * 16, 2 * step);
    settle(a);
}

// A tile as right operand: groups of eight rows are 1024 bytes apart, swizzle of 128 bytes.
TW_FORCE u64 descriptor(const T* tile) { return u64((address(tile) & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62; }

#if TW_DTYPE == 2
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
// c (64, 64) = [c +] a (64, 16) b (16, 64). PLAIN: 16 rows of the tile are b; else 16 columns of the tile, transposed.
template <int PLAIN> TW_FORCE void multiply(float (&c)[8][4], const u32 (&a)[4], u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." TYPES
                 " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}"
                 : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(PLAIN));
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

// c = a tile^T, with a (64, 64) in registers.
TW_FORCE void times_transpose(float (&c)[8][4], const u32 (&a)[4][4], const T* tile) {
    u64 b = descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; step++) multiply<0>(c, a[step], b + 2 * step, step > 0);
}
// c += a tile
TW_FORCE void add_times(float (&c)[8][4], const u32 (&a)[4][4], const T* tile) {
    u64 b = descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; step++) multiply<1>(c, a[step], b + 128 * step, 1);
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

extern "C" __global__ void __launch_bounds__(THREADS, 4)
forward(const T* qkv, T* out, float* lse, int batch, int heads, int length, float scale) {
    extern __shared__ __align__(1024) T shared[];
    int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // The longest rows first.
    int first = (gridDim.x - 1 - blockIdx.x) * ROWS, row = first + warp * 16;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    const T *k = q + c, *v = q + 2 * c;
    T *kt = shared, *vt = shared + 2 * TILE * D;
    T* qt = shared + 4 * TILE * D;
    load_tile<ROWS>(qt, q, stride, first, length);
    auto fetch = [&](int tile) {
        load_tile<TILE>(kt + tile % 2 * TILE * D, k, stride, tile * TILE, length);
        load_tile<TILE>(vt + tile % 2 * TILE * D, v, stride, tile * TILE, length);
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
        u32 qf[4][4];
        load_rows(qf, qt);
        begin();
        times_transpose(s, qf, kt + tile % 2 * TILE * D);
        commit();
        finish<0>();
        settle(s);
        bool diagonal = k0 + TILE > first;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                if (diagonal && k0 + 8 * n + 2 * t + e % 2 > row + g + e / 2 * 8) s[n][e] = -TW_INFINITY;
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
        add_times(acc, p, vt + tile % 2 * TILE * D);
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

// dk and dv of 64 keys.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward_keys(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, int batch, int heads, int length, float scale) {
    extern __shared__ __align__(1024) T shared[];
    __shared__ float stats[2][2][TILE];
    int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int first = blockIdx.x * ROWS, row = first + warp * 16;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    const T* d = dout + i64(b) * length * c + h * D;
    const float *l = lse + (i64(b) * heads + h) * length, *dl = delta + (i64(b) * heads + h) * length;
    T *qt = shared, *dt = shared + 2 * TILE * D;
    T *kt = shared + 4 * TILE * D, *vt = shared + 5 * TILE * D;
    load_tile<ROWS>(kt, q + c, stride, first, length);
    load_tile<ROWS>(vt, q + 2 * c, stride, first, length);
    auto fetch = [&](int tile) {
        int q0 = tile * TILE, half = tile % 2;
        load_tile<TILE>(qt + half * TILE * D, q, stride, q0, length);
        load_tile<TILE>(dt + half * TILE * D, d, c, q0, length);
        commit_copies();
        if (threadIdx.x < TILE) {
            // Queries behind the end: exp of minus infinity is zero.
            int at = q0 + threadIdx.x;
            stats[half][0][threadIdx.x] = at < length ? l[at] * LOG2E : TW_INFINITY;
            stats[half][1][threadIdx.x] = at < length ? dl[at] : 0.0f;
        }
    };
    float dk[8][4] = {}, dv[8][4] = {}, scale2 = scale * LOG2E;
    int from = first / TILE, tiles = (length + TILE - 1) / TILE;
    fetch(from);
    for (int tile = from; tile < tiles; tile++) {
        int q0 = tile * TILE, half = tile % 2;
        const T *qs = qt + half * TILE * D, *ds = dt + half * TILE * D;
        arrive();
        if (tile + 1 < tiles) fetch(tile + 1);
        float s[8][4], dp[8][4];
        u32 kf[4][4], vf[4][4];
        load_rows(kf, kt);
        load_rows(vf, vt);
        begin();
        times_transpose(s, kf, qs);
        commit();
        times_transpose(dp, vf, ds);
        commit();
        finish<1>();
        settle(s);
        bool diagonal = q0 < first + 64;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                int query = 8 * n + 2 * t + e % 2;
                float p = exp2_fast(s[n][e] * scale2 - stats[half][0][query]);
                s[n][e] = diagonal && q0 + query < row + g + e / 2 * 8 ? 0.0f : p;
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
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) dp[n][e] = s[n][e] * (dp[n][e] - stats[half][1][8 * n + 2 * t + e % 2]);
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
    T* to = dqkv + i64(b) * length * stride + h * D;
    store_rows(to + c, stride, row, length, dk, scale);
    store_rows(to + 2 * c, stride, row, length, dv, 1.0f);
}

// dq of 64 queries.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward_queries(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, int batch, int heads, int length, float scale) {
    extern __shared__ __align__(1024) T shared[];
    int h = blockIdx.y, b = blockIdx.z, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int first = (gridDim.x - 1 - blockIdx.x) * ROWS, row = first + warp * 16;
    i64 c = i64(heads) * D, stride = 3 * c;
    const T* q = qkv + i64(b) * length * stride + h * D;
    const T* d = dout + i64(b) * length * c + h * D;
    i64 row_stats = (i64(b) * heads + h) * length;
    T *kt = shared, *vt = shared + 2 * TILE * D;
    T *qt = shared + 4 * TILE * D, *ot = shared + 5 * TILE * D;
    load_tile<ROWS>(qt, q, stride, first, length);
    load_tile<ROWS>(ot, d, c, first, length);
    float base[2], shift[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int at = row + g + 8 * r;
        base[r] = at < length ? lse[row_stats + at] * LOG2E : TW_INFINITY;
        shift[r] = at < length ? delta[row_stats + at] : 0.0f;
    }
    auto fetch = [&](int tile) {
        load_tile<TILE>(kt + tile % 2 * TILE * D, q + c, stride, tile * TILE, length);
        load_tile<TILE>(vt + tile % 2 * TILE * D, q + 2 * c, stride, tile * TILE, length);
        commit_copies();
    };
    float dq[8][4] = {}, scale2 = scale * LOG2E;
    int end = first + ROWS < length ? first + ROWS : length, tiles = (end + TILE - 1) / TILE;
    fetch(0);
    for (int tile = 0; tile < tiles; tile++) {
        int k0 = tile * TILE;
        const T *ks = kt + tile % 2 * TILE * D, *vs = vt + tile % 2 * TILE * D;
        arrive();
        if (tile + 1 < tiles) fetch(tile + 1);
        float s[8][4], dp[8][4];
        u32 qf[4][4], of[4][4];
        load_rows(qf, qt);
        load_rows(of, ot);
        begin();
        times_transpose(s, qf, ks);
        commit();
        times_transpose(dp, of, vs);
        commit();
        finish<1>();
        settle(s);
        bool diagonal = k0 + TILE > first;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float p = exp2_fast(s[n][e] * scale2 - base[e / 2]);
                s[n][e] = diagonal && k0 + 8 * n + 2 * t + e % 2 > row + g + e / 2 * 8 ? 0.0f : p;
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
    store_rows(dqkv + i64(b) * length * stride + h * D, stride, row, length, dq, scale);
}
#else
// Other chips and heads run mma.cu.
extern "C" __global__ void forward() {}
extern "C" __global__ void backward_keys() {}
extern "C" __global__ void backward_queries() {}
#endif
