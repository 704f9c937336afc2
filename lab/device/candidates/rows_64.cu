// Encoder attention of long rows as it was before long_rows.cu: two groups of 64 queries share three tiles of 64 keys, two blocks a multiprocessor.

#if TW_HEAD == 64 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr int ROWS = 64 * WARPGROUPS;

// What a thread keeps of its two rows of the accumulators.
struct Rows {
    float acc[8][4], most[2], sum[2];
};

// Scores of a tile to weights, as left operand; sums and what was added up so far are brought to the new maximum.
TW_FORCE void weigh(float (&s)[8][4], u32 (&p)[4][4], Rows& z, float scale2) {
    float fade[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = z.most[r];
#pragma unroll
        for (int n = 0; n < 8; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = quad_max(top);
        // A query may see no key of its first tiles.
        float base = top == -TW_INFINITY ? 0.0f : top * scale2, total = 0.0f;
        fade[r] = exp2_fast(z.most[r] * scale2 - base);
        z.most[r] = top;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n][e] = exp2_fast(s[n][e] * scale2 - base);
                total += s[n][e];
            }
        z.sum[r] = z.sum[r] * fade[r] + total;
    }
    as_left(p, s);
    // Maxima seldom change behind the first tiles.
    if (__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) z.acc[n][e] *= fade[e / 2];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
forward(const T* q_all, i64 q_width, const T* kv, i64 kv_width, const int* row_starts, const int* query_starts, const int* tokens, const int* positions, const int* option_ids,
        int rows, i64 window, T* out, int heads, int, float scale) {
    extern __shared__ u8 raw[];
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    Tile tile;
    if (!find_tile<ROWS>(c, blockIdx.x, tile)) return;
    int h = blockIdx.y, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, from, to;
    i64 width = i64(heads) * D;
    const T *k = kv + i64(tile.start) * kv_width + h * D, *v = k + width;
    // Queries, then three places of a tile of keys and one of values.
    T *qt = (T*)(raw + (0u - address(raw) & 1023u)), *tiles = qt + ROWS * D;
    load_tile<ROWS>(qt, q_all + i64(tile.first) * q_width + h * D, q_width, 0, tile.queries);
    key_range(c, tile, from, to);
    int first = from / TILE, end = (to + TILE - 1) / TILE;
    auto keys = [&](int at) { return tiles + (at - first) % 3 * (2 * TILE * D); };
    auto fetch = [&](int at) {
        if (at < end) {
            T* place = keys(at);
            load_tile<TILE>(place, k, kv_width, at * TILE, tile.length);
            load_tile<TILE>(place + TILE * D, v, kv_width, at * TILE, tile.length);
        }
        commit_copies();
    };
    // The queries of this thread's two rows of the accumulators.
    Token own[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = warp * 16 + g + 8 * r;
        own[r] = token(c, tile, query_index(c, tile, i < tile.queries ? i : 0));
    }
    bool banded = window >= 0 && !tokens && !positions, by_token = option_ids || (window >= 0 && !banded);
    int q0 = tile.offset + warp / 4 * 64;
    auto hide = [&](float (&s)[8][4], int k0) {
        if (k0 + TILE <= tile.length && !by_token && (!banded || (k0 >= q0 + 63 - window && k0 + TILE - 1 <= q0 + window))) return;
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = k0 + 8 * n + 2 * t + e;
                bool real = j < tile.length;
                Token key = real ? token(c, tile, j) : Token{0, 0};
                if (!real || !sees(c, own[0], key)) s[n][e] = -TW_INFINITY;
                if (!real || !sees(c, own[1], key)) s[n][2 + e] = -TW_INFINITY;
            }
    };
    Rows z;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) z.acc[n][e] = 0.0f;
    z.most[0] = z.most[1] = -TW_INFINITY, z.sum[0] = z.sum[1] = 0.0f;
    float scale2 = scale * LOG2E;
    u64 q = descriptor(qt + warp / 4 * 64 * D);
    fetch(first);
    fetch(first + 1);
    for (int at = first; at < end; at++) {
        // One more tile is under way.
        arrive<1>();
        fetch(at + 2);
        float scores[8][4];
        begin();
        times_transpose(scores, q, keys(at));
        commit();
        finish<0>();
        settle(scores);
        u32 p[4][4];
        hide(scores, at * TILE);
        weigh(scores, p, z, scale2);
        settle(p);
        settle(z.acc);
        begin();
        add_times(z.acc, p, keys(at) + TILE * D);
        commit();
        finish<0>();
        settle(z.acc);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float inverse = 1.0f / quad_sum(z.sum[r]);
#pragma unroll
        for (int n = 0; n < 8; n++) z.acc[n][2 * r] *= inverse, z.acc[n][2 * r + 1] *= inverse;
    }
    store_rows(out + i64(tile.first) * width + h * D, width, warp * 16, tile.queries, z.acc, 1.0f);
}
#endif
