// Encoder attention on Hopper's matrix units (wgmma) for f16 and bf16 and heads of 64: rows of at most 128 tokens here, long rows in long_rows.cu behind it. A
// warpgroup owns 64 queries. A tile is rows of 128 bytes whose 16-byte chunks are permuted by the row (chunk ^ row % 8): what the descriptors call a
// swizzle of 128 bytes.

#if TW_HEAD == 64 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int D = 64;
constexpr int TILE = 64;
constexpr int WARPGROUPS = 2;
constexpr int THREADS = 128 * WARPGROUPS;
constexpr float LOG2E = 1.4426950408889634f;

TW_FORCE u32 address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
TW_FORCE void copy_chunk(void* to, const void* from, bool real) {
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from), "r"(bytes));
}
TW_FORCE void commit_copies() { asm volatile("cp.async.commit_group;"); }
// Waits for the copies of all threads but the last N groups, and makes them seen by the matrix units.
template <int N> TW_FORCE void arrive() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
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

// Keeps the making of a left operand before the fence behind which the unit reads it.
TW_FORCE void settle(u32 (&a)[4][4]) {
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[n][e])::"memory");
}

// A tile as an operand: groups of eight rows are 1024 bytes apart, swizzle of 128 bytes.
TW_FORCE u64 descriptor(const T* tile) { return u64((address(tile) & 0x3ffff) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62; }

#if TW_DTYPE == 2
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
#define RESULT \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define OWNED \
    "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3])
// c (64, 64) = [c +] a (64, 16) b (16, 64), b 16 columns of a tile, transposed; both where they lie.
TW_FORCE void multiply(float (&c)[8][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." TYPES " " RESULT ", %32, %33, p, 1, 1, 0, 0;\n}"
                 : OWNED
                 : "l"(a), "l"(b), "r"(add));
}
// c (64, 64) += a (64, 16) b (16, 64), b 16 rows of a tile, a in registers.
TW_FORCE void multiply(float (&c)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." TYPES " " RESULT ", {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
                 : OWNED
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
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

// c = a tile^T
TW_FORCE void times_transpose(float (&c)[8][4], u64 a, const T* tile) {
    u64 b = descriptor(tile);
#pragma unroll
    for (int step = 0; step < 4; step++) multiply(c, a + 2 * step, b + 2 * step, step > 0);
}
// c += a tile
TW_FORCE void add_times(float (&c)[8][4], const u32 (&a)[4][4], const T* tile) {
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

// Rows of at most SHORT tokens: a block takes one head of one row as a whole, whose keys are loaded once, and turned by the way where there is a table.
constexpr int SHORT = 128;
constexpr int ITEMS = SHORT * 4 / THREADS;  // groups of channels of a tile that a thread turns

TW_FORCE void turn_rows(T* tile, int count, const int* positions, const float* table) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int e = threadIdx.x + i * THREADS, row = e / 4, chunk = e % 4;
        if (row < count) turn(tile, row, chunk, angles_at(table, positions[row], chunk));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
short_rows(const T* q_all, i64 q_width, const T* kv, i64 kv_width, const int* row_starts, const int* query_starts, const int* tokens, const int* positions,
           const int* option_ids, int rows, i64 window, T* out, int heads, int, float scale, const float* table, const int* key_positions,
           const int* query_positions) {
    extern __shared__ u8 raw[];
    asm volatile("griddepcontrol.launch_dependents;");
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    int row = blockIdx.x, h = blockIdx.y, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    Tile tile;
    tile.start = row_starts[row], tile.length = row_starts[row + 1] - tile.start;
    // Selected queries may outnumber the tokens: then several blocks share them.
    tile.offset = blockIdx.z * SHORT, tile.first = query_starts[row] + tile.offset;
    tile.queries = min(query_starts[row + 1] - tile.first, SHORT);
    // Whole numbers and tables come from the host, never from a kernel: they are there before the kernel in front has ended.
    Angles angles[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        int r = (threadIdx.x + i * THREADS) / 4;
        if (table && r < tile.length) angles[i] = angles_at(table, key_positions[tile.start + r], threadIdx.x % 4);
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (tile.length <= 0 || tile.queries <= 0) return;
    i64 width = i64(heads) * D;
    const T *k = kv + i64(tile.start) * kv_width + h * D, *v = k + width;
    T *qt = (T*)(raw + (0u - address(raw) & 1023u)), *kt = qt + SHORT * D, *vt = kt + SHORT * D;
    bool banded = window >= 0 && !tokens && !positions, by_token = option_ids || (window >= 0 && !banded);
    float scale2 = scale * LOG2E;
    load_tile<SHORT>(kt, k, kv_width, 0, tile.length);
    load_tile<SHORT>(qt, q_all + i64(tile.first) * q_width + h * D, q_width, 0, tile.queries);
    commit_copies();
    // Values arrive while queries and keys are turned.
    load_tile<SHORT>(vt, v, kv_width, 0, tile.length);
    commit_copies();
    if (table) {
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int r = (threadIdx.x + i * THREADS) / 4;
            if (r >= tile.length) continue;
            turn(kt, r, threadIdx.x % 4, angles[i]);
            if (!tokens) turn(qt, r, threadIdx.x % 4, angles[i]);
        }
        if (tokens) turn_rows(qt, tile.queries, query_positions + tile.first, table);
    }
    arrive<0>();
    float s[2][8][4];
    u64 q = descriptor(qt + warp / 4 * 64 * D);
    begin();
    times_transpose(s[0], q, kt);
    times_transpose(s[1], q, kt + TILE * D);
    commit();
    finish<0>();
    settle(s[0]);
    settle(s[1]);
    if (by_token) {
        Token own[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int i = warp * 16 + g + 8 * r;
            own[r] = token(c, tile, query_index(c, tile, i < tile.queries ? i : 0));
        }
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = 8 * n + 2 * t + e;
                bool real = j < tile.length;
                Token key = real ? token(c, tile, j) : Token{0, 0};
                if (!real || !sees(c, own[0], key)) s[n / 8][n % 8][e] = -TW_INFINITY;
                if (!real || !sees(c, own[1], key)) s[n / 8][n % 8][2 + e] = -TW_INFINITY;
            }
    } else if (banded || tile.length < SHORT) {
        // Positions are indices in the row: a query sees the keys from one to another.
        int half = banded && window < SHORT ? int(window) : SHORT;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            int i = banded ? warp * 16 + g + 8 * r : 0, from = i - half - 2 * t, to = min(i + half, tile.length - 1) - 2 * t;
#pragma unroll
            for (int n = 0; n < 16; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e < from || 8 * n + e > to) s[n / 8][n % 8][2 * r + e] = -TW_INFINITY;
        }
    }
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -TW_INFINITY, total = 0.0f;
#pragma unroll
        for (int n = 0; n < 16; n++) top = fmaxf(top, fmaxf(s[n / 8][n % 8][2 * r], s[n / 8][n % 8][2 * r + 1]));
        top = quad_max(top);
        float base = top == -TW_INFINITY ? 0.0f : top * scale2;
#pragma unroll
        for (int n = 0; n < 16; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n / 8][n % 8][e] = exp2_fast(s[n / 8][n % 8][e] * scale2 - base);
                total += s[n / 8][n % 8][e];
            }
        inverse[r] = 1.0f / quad_sum(total);
    }
    u32 p[2][4][4];
    float acc[8][4];
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
    as_left(p[0], s[0]);
    as_left(p[1], s[1]);
    settle(p[0]);
    settle(p[1]);
    settle(acc);
    begin();
    add_times(acc, p[0], vt);
    add_times(acc, p[1], vt + TILE * D);
    commit();
    finish<0>();
    settle(acc);
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] *= inverse[e / 2];
    store_rows(out + i64(tile.first) * width + h * D, width, warp * 16, tile.queries, acc, 1.0f);
}
#endif
