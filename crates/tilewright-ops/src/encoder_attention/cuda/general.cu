// Encoder attention for every storage type, head size and alignment, in f32 arithmetic: one warp two queries, lanes over the keys of a tile of 32.

#define WARPS 8
#define PER_WARP 2
#define ROWS (WARPS * PER_WARP)
#define KEYS 32
#define MOST 8  // columns a lane owns: head sizes up to 256

#define EACH_COLUMN _Pragma("unroll") for (int i = 0; i < MOST; i++) if (int j = LANE + 32 * i; j < d)

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const T* q_all, i64 q_width, const T* kv, i64 kv_width, const int* row_starts, const int* query_starts, const int* tokens, const int* positions, const int* option_ids,
        int rows, i64 window, T* out, int heads, int d, float scale) {
    extern __shared__ float shared[];
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    Tile tile;
    if (!find_tile<ROWS>(c, blockIdx.x, tile)) return;
    int h = blockIdx.y, warp = threadIdx.x / 32, ld = d + 1, from, to;
    i64 width = i64(heads) * d;
    float *q = shared, *k = q + ROWS * d, *v = k + KEYS * ld;
    for (int e = threadIdx.x; e < ROWS * d; e += blockDim.x) {
        int r = e / d, j = e % d;
        q[e] = r < tile.queries ? to_f32(q_all[(tile.first + r) * q_width + h * d + j]) : 0.0f;
    }
    Token own[PER_WARP];
    float acc[PER_WARP][MOST] = {}, most[PER_WARP], sum[PER_WARP];
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int i = warp * PER_WARP + r;
        own[r] = i < tile.queries ? token(c, tile, query_index(c, tile, i)) : Token{0, 0};
        most[r] = -TW_INFINITY;
        sum[r] = 0.0f;
    }
    key_range(c, tile, from, to);
    const T* keys = kv + i64(tile.start) * kv_width + h * d;
    for (int k0 = from / KEYS * KEYS; k0 < to; k0 += KEYS) {
        __syncthreads();
        for (int e = threadIdx.x; e < KEYS * d; e += blockDim.x) {
            int r = e / d, j = e % d;
            bool real = k0 + r < tile.length;
            const T* at = keys + (k0 + r) * kv_width + j;
            k[r * ld + j] = real ? to_f32(at[0]) : 0.0f;
            v[r * ld + j] = real ? to_f32(at[width]) : 0.0f;
        }
        __syncthreads();
        bool real = k0 + LANE < tile.length;
        Token key = real ? token(c, tile, k0 + LANE) : Token{0, 0};
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            int i = warp * PER_WARP + r;
            if (i >= tile.queries) continue;
            bool seen = real && sees(c, own[r], key);
            u32 all = __ballot_sync(0xffffffffu, seen);
            if (!all) continue;
            float score = 0.0f;
#pragma unroll 4
            for (int j = 0; j < d; j++) score += q[i * d + j] * k[LANE * ld + j];
            score = seen ? scale * score : -TW_INFINITY;
            float m = fmaxf(most[r], warp_max(score));
            float p = seen ? expf(score - m) : 0.0f, fade = expf(most[r] - m);
            most[r] = m;
            sum[r] = sum[r] * fade + warp_sum(p);
#pragma unroll
            for (int n = 0; n < MOST; n++) acc[r][n] *= fade;
            for (; all; all &= all - 1) {
                int at = __ffs(int(all)) - 1;
                float pk = __shfl_sync(0xffffffffu, p, at);
                EACH_COLUMN acc[r][i] += pk * v[at * ld + j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int at = warp * PER_WARP + r;
        if (at >= tile.queries) continue;
        float inverse = 1.0f / sum[r];
        EACH_COLUMN out[(tile.first + at) * width + h * d + j] = from_f32<T>(acc[r][i] * inverse);
    }
}
