// Flash attention for every storage type, head size and alignment, in f32 arithmetic: one warp a row, lanes over the keys (or queries) of a tile of 32.
// What the matrix units can do is in mma.cu; this is the rest, and its measure.
//
// Shared memory holds tiles as f32. Tiles that lanes walk side by side have rows of D + 1, so that the lanes' addresses fall into different banks.

#define WARPS 8
#define PER_WARP 2
#define ROWS (WARPS * PER_WARP)
#define KEYS 32
#define MOST 8  // columns a lane owns: head sizes up to 256

struct Shape {
    int b, heads, t, d;
};

// Row `t` of part `part` (0 q, 1 k, 2 v) of head h.
TW_FORCE i64 qkv_at(const Shape& s, int b, int h, int t, int part) {
    i64 c = i64(s.heads) * s.d;
    return (i64(b) * s.t + t) * 3 * c + part * c + h * s.d;
}
TW_FORCE i64 out_at(const Shape& s, int b, int h, int t) { return (i64(b) * s.t + t) * s.heads * s.d + h * s.d; }

// `rows` rows from row `first` on into shared memory, zeros beyond T.
template <class AT> TW_FORCE void fill(float* to, int ld, const T* from, const Shape& s, int first, int rows, AT at) {
    for (int e = threadIdx.x; e < rows * s.d; e += blockDim.x) {
        int r = e / s.d, j = e % s.d;
        to[r * ld + j] = first + r < s.t ? to_f32(from[at(first + r) + j]) : 0.0f;
    }
}

TW_FORCE float dot(const float* x, const float* y, int d) {
    float total = 0.0f;
#pragma unroll 4
    for (int j = 0; j < d; j++) total += x[j] * y[j];
    return total;
}

#define LANE (threadIdx.x % 32)
#define EACH_COLUMN _Pragma("unroll") for (int i = 0; i < MOST; i++) if (int j = LANE + 32 * i; j < s.d)

extern "C" __global__ void __launch_bounds__(32 * WARPS) forward(const T* qkv, T* out, float* lse, int batch, int heads, int length, int d, float scale) {
    extern __shared__ float shared[];
    Shape s = {batch, heads, length, d};
    int h = blockIdx.y, b = blockIdx.z, first = blockIdx.x * ROWS, warp = threadIdx.x / 32, ld = s.d + 1;
    float *q = shared, *k = q + ROWS * s.d, *v = k + KEYS * ld;
    fill(q, s.d, qkv, s, first, ROWS, [&](int t) { return qkv_at(s, b, h, t, 0); });
    float acc[PER_WARP][MOST] = {}, most[PER_WARP], sum[PER_WARP];
    for (int r = 0; r < PER_WARP; r++) {
        most[r] = -TW_INFINITY;
        sum[r] = 0.0f;
    }
    int last = first + ROWS < s.t ? first + ROWS : s.t;
    for (int k0 = 0; k0 < last; k0 += KEYS) {
        __syncthreads();
        fill(k, ld, qkv, s, k0, KEYS, [&](int t) { return qkv_at(s, b, h, t, 1); });
        fill(v, ld, qkv, s, k0, KEYS, [&](int t) { return qkv_at(s, b, h, t, 2); });
        __syncthreads();
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            int row = warp * PER_WARP + r, visible = first + row - k0 + 1;
            if (first + row >= s.t || visible <= 0) continue;
            visible = visible < KEYS ? visible : KEYS;
            bool seen = int(LANE) < visible;
            float score = seen ? scale * dot(q + row * s.d, k + LANE * ld, s.d) : -TW_INFINITY;
            float m = fmaxf(most[r], warp_max(score));
            float p = seen ? expf(score - m) : 0.0f, fade = expf(most[r] - m);
            most[r] = m;
            sum[r] = sum[r] * fade + warp_sum(p);
#pragma unroll
            for (int i = 0; i < MOST; i++) acc[r][i] *= fade;
            for (int key = 0; key < visible; key++) {
                float pk = __shfl_sync(0xffffffffu, p, key);
                EACH_COLUMN acc[r][i] += pk * v[key * ld + j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int t = first + warp * PER_WARP + r;
        if (t >= s.t) continue;
        float inverse = 1.0f / sum[r];
        EACH_COLUMN out[out_at(s, b, h, t) + j] = from_f32<T>(acc[r][i] * inverse);
        if (LANE == 0) lse[(i64(b) * s.heads + h) * s.t + t] = most[r] + logf(sum[r]);
    }
}

// D[b, h, t] = sum over the head's columns of dout * out: one warp each.
extern "C" __global__ void __launch_bounds__(32 * WARPS) products(const T* out, const T* dout, float* delta, int batch, int heads, int length, int d) {
    Shape s = {batch, heads, length, d};
    i64 i = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (i >= i64(s.b) * s.heads * s.t) return;
    int t = int(i % s.t), h = int(i / s.t % s.heads), b = int(i / s.t / s.heads);
    i64 at = out_at(s, b, h, t);
    float total = 0.0f;
    for (int j = LANE; j < s.d; j += 32) total += to_f32(out[at + j]) * to_f32(dout[at + j]);
    total = warp_sum(total);
    if (LANE == 0) delta[i] = total;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward_queries(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, int batch, int heads, int length, int d, float scale) {
    extern __shared__ float shared[];
    Shape s = {batch, heads, length, d};
    int h = blockIdx.y, b = blockIdx.z, first = blockIdx.x * ROWS, warp = threadIdx.x / 32, ld = s.d + 1;
    float *q = shared, *g = q + ROWS * s.d, *k = g + ROWS * s.d, *v = k + KEYS * ld;
    fill(q, s.d, qkv, s, first, ROWS, [&](int t) { return qkv_at(s, b, h, t, 0); });
    fill(g, s.d, dout, s, first, ROWS, [&](int t) { return out_at(s, b, h, t); });
    float acc[PER_WARP][MOST] = {};
    i64 stats = (i64(b) * s.heads + h) * s.t;
    int last = first + ROWS < s.t ? first + ROWS : s.t;
    for (int k0 = 0; k0 < last; k0 += KEYS) {
        __syncthreads();
        fill(k, ld, qkv, s, k0, KEYS, [&](int t) { return qkv_at(s, b, h, t, 1); });
        fill(v, ld, qkv, s, k0, KEYS, [&](int t) { return qkv_at(s, b, h, t, 2); });
        __syncthreads();
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            int row = warp * PER_WARP + r, visible = first + row - k0 + 1;
            if (first + row >= s.t || visible <= 0) continue;
            visible = visible < KEYS ? visible : KEYS;
            float ds = 0.0f;
            if (int(LANE) < visible) {
                float p = expf(scale * dot(q + row * s.d, k + LANE * ld, s.d) - lse[stats + first + row]);
                ds = p * (dot(g + row * s.d, v + LANE * ld, s.d) - delta[stats + first + row]) * scale;
            }
            __syncwarp();
            for (int key = 0; key < visible; key++) {
                float x = __shfl_sync(0xffffffffu, ds, key);
                EACH_COLUMN acc[r][i] += x * k[key * ld + j];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int t = first + warp * PER_WARP + r;
        if (t >= s.t) continue;
        EACH_COLUMN dqkv[qkv_at(s, b, h, t, 0) + j] = from_f32<T>(acc[r][i]);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward_keys(const T* qkv, const float* lse, const T* dout, const float* delta, T* dqkv, int batch, int heads, int length, int d, float scale) {
    extern __shared__ float shared[];
    Shape s = {batch, heads, length, d};
    int h = blockIdx.y, b = blockIdx.z, first = blockIdx.x * ROWS, warp = threadIdx.x / 32, ld = s.d + 1;
    float *k = shared, *v = k + ROWS * s.d, *q = v + ROWS * s.d, *g = q + KEYS * ld;
    fill(k, s.d, qkv, s, first, ROWS, [&](int t) { return qkv_at(s, b, h, t, 1); });
    fill(v, s.d, qkv, s, first, ROWS, [&](int t) { return qkv_at(s, b, h, t, 2); });
    float dk[PER_WARP][MOST] = {}, dv[PER_WARP][MOST] = {};
    i64 stats = (i64(b) * s.heads + h) * s.t;
    for (int q0 = first / KEYS * KEYS; q0 < s.t; q0 += KEYS) {
        __syncthreads();
        fill(q, ld, qkv, s, q0, KEYS, [&](int t) { return qkv_at(s, b, h, t, 0); });
        fill(g, ld, dout, s, q0, KEYS, [&](int t) { return out_at(s, b, h, t); });
        __syncthreads();
#pragma unroll
        for (int r = 0; r < PER_WARP; r++) {
            int row = warp * PER_WARP + r, key = first + row;
            if (key >= s.t || key >= q0 + KEYS) continue;
            int from = key > q0 ? key - q0 : 0, to = s.t - q0 < KEYS ? s.t - q0 : KEYS;
            float p = 0.0f, ds = 0.0f;
            if (int(LANE) >= from && int(LANE) < to) {
                p = expf(scale * dot(k + row * s.d, q + LANE * ld, s.d) - lse[stats + q0 + LANE]);
                ds = p * (dot(v + row * s.d, g + LANE * ld, s.d) - delta[stats + q0 + LANE]) * scale;
            }
            __syncwarp();
            for (int query = from; query < to; query++) {
                float x = __shfl_sync(0xffffffffu, p, query), y = __shfl_sync(0xffffffffu, ds, query);
                EACH_COLUMN {
                    dv[r][i] += x * g[query * ld + j];
                    dk[r][i] += y * q[query * ld + j];
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < PER_WARP; r++) {
        int t = first + warp * PER_WARP + r;
        if (t >= s.t) continue;
        EACH_COLUMN {
            dqkv[qkv_at(s, b, h, t, 1) + j] = from_f32<T>(dk[r][i]);
            dqkv[qkv_at(s, b, h, t, 2) + j] = from_f32<T>(dv[r][i]);
        }
    }
}

// One new token a row: its k and v go to `position` of the caches, then it attends to positions 0..=position. One block a head; each warp takes every
// eighth key, and the warps' results are joined in order.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
decode(const T* qkv, T* k_cache, T* v_cache, T* out, int heads, int d, int position, int longest, float scale) {
    __shared__ float most_of[WARPS], sum_of[WARPS], acc_of[WARPS][32 * MOST];
    int h = blockIdx.x, b = blockIdx.y, warp = threadIdx.x / 32;
    i64 c = i64(heads) * d;
    const T* q = qkv + b * 3 * c + h * d;
    i64 cache = i64(b) * longest * c + h * d;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        k_cache[cache + position * c + j] = q[c + j];
        v_cache[cache + position * c + j] = q[2 * c + j];
    }
    __syncthreads();
    float acc[MOST] = {}, most = -TW_INFINITY, sum = 0.0f;
    for (int key = warp; key <= position; key += WARPS) {
        float score = 0.0f;
        for (int j = LANE; j < d; j += 32) score += to_f32(q[j]) * to_f32(k_cache[cache + key * c + j]);
        score = scale * warp_sum(score);
        float m = fmaxf(most, score), p = expf(score - m), fade = expf(most - m);
        most = m;
        sum = sum * fade + p;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            int j = LANE + 32 * i;
            if (j < d) acc[i] = acc[i] * fade + p * to_f32(v_cache[cache + key * c + j]);
        }
    }
    if (LANE == 0) {
        most_of[warp] = most;
        sum_of[warp] = sum;
    }
#pragma unroll
    for (int i = 0; i < MOST; i++) acc_of[warp][LANE + 32 * i] = acc[i];
    __syncthreads();
    float m = -TW_INFINITY, total = 0.0f;
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, most_of[w]);
    for (int w = 0; w < WARPS; w++) total += sum_of[w] != 0.0f ? sum_of[w] * expf(most_of[w] - m) : 0.0f;
    for (int j = threadIdx.x; j < d; j += blockDim.x) {
        float x = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            if (sum_of[w] != 0.0f) x += acc_of[w][j] * expf(most_of[w] - m);
        }
        out[b * c + h * d + j] = from_f32<T>(x / total);
    }
}
