// Layer normalisation: one warp a row, the row in registers where it fits.
//
// TW_FLOATS is the number of f32 values that a lane keeps of its row: 0 is the general form, which reads the row again for each pass and takes any
// width and alignment; above 0, rows of at most 32 * TW_FLOATS elements that are whole packs of 16 bytes. 24 has the backward pass that does most at once.

#define WARPS 8

TW_FORCE T normalised(float x, float mean, float rstd, const T* weight, const T* bias, int j) {
    float y = __fmul_rn(__fmul_rn(__fsub_rn(x, mean), rstd), to_f32(weight[j]));
    return from_f32<T>(bias ? __fadd_rn(y, to_f32(bias[j])) : y);
}

#if TW_FLOATS == 0

// Writes x + branch to `sum` where there is a branch; what is normalised is what was stored.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const T* x, const T* branch, T* sum, const T* weight, const T* bias, float eps, T* out, float* mean_out, float* rstd_out, i64 n, int c) {
    i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= n) return;
    x += row * c;
    out += row * c;
    if (branch) {
        branch += row * c;
        sum += row * c;
        for (int j = lane; j < c; j += 32) sum[j] = from_f32<T>(to_f32(x[j]) + to_f32(branch[j]));
        x = sum;
    }
    float total = 0.0f, squares = 0.0f;
    for (int j = lane; j < c; j += 32) total += to_f32(x[j]);
    float mean = c > 0 ? warp_sum(total) / float(c) : 0.0f;
    for (int j = lane; j < c; j += 32) {
        float d = to_f32(x[j]) - mean;
        squares += d * d;
    }
    float variance = c > 0 ? warp_sum(squares) / float(c) : 0.0f;
    float rstd = 1.0f / sqrtf(variance + eps);
    for (int j = lane; j < c; j += 32) out[j] = normalised(to_f32(x[j]), mean, rstd, weight, bias, j);
    if (lane == 0) {
        mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
recompute(const T* sum, const T* weight, const T* bias, const float* mean, const float* rstd, T* out, i64 n, int c) {
    i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= n) return;
    float m = mean[row], r = rstd[row];
    for (int j = threadIdx.x % 32; j < c; j += 32) {
        out[row * c + j] = normalised(to_f32(sum[row * c + j]), m, r, weight, bias, j);
    }
}

// One block takes `rows` rows, one after the other; a thread owns columns, so the sums over rows need no exchange. Partial sums of each block:
// (blocks, 2, C), weight before bias.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
backward(const T* dout, const T* sum, const T* weight, const float* mean, const float* rstd, T* dx, int accumulate, float* partial, i64 n, int c, int rows) {
    __shared__ float part[2][WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* dweight = partial + i64(blockIdx.x) * 2 * c;
    float* dbias = dweight + c;
    for (int j = threadIdx.x; j < c; j += blockDim.x) dweight[j] = dbias[j] = 0.0f;
    i64 first = i64(blockIdx.x) * rows, last = first + rows < n ? first + rows : n;
    for (i64 row = first; row < last; row++) {
        const T* d = dout + row * c;
        const T* s = sum + row * c;
        float m = mean[row], r = rstd[row], g_sum = 0.0f, gx_sum = 0.0f;
        for (int j = threadIdx.x; j < c; j += blockDim.x) {
            float g = to_f32(weight[j]) * to_f32(d[j]), xhat = (to_f32(s[j]) - m) * r;
            g_sum += g;
            gx_sum += g * xhat;
            dweight[j] += xhat * to_f32(d[j]);
            dbias[j] += to_f32(d[j]);
        }
        g_sum = warp_sum(g_sum);
        gx_sum = warp_sum(gx_sum);
        if (lane == 0) {
            part[0][warp] = g_sum;
            part[1][warp] = gx_sum;
        }
        __syncthreads();
        g_sum = gx_sum = 0.0f;
        for (int w = 0; w < WARPS; w++) {
            g_sum += part[0][w];
            gx_sum += part[1][w];
        }
        g_sum /= float(c);
        gx_sum /= float(c);
        __syncthreads();
        for (int j = threadIdx.x; j < c; j += blockDim.x) {
            float g = to_f32(weight[j]) * to_f32(d[j]), xhat = (to_f32(s[j]) - m) * r;
            float y = r * (g - g_sum - xhat * gx_sum);
            if (accumulate) y += to_f32(dx[row * c + j]);
            dx[row * c + j] = from_f32<T>(y);
        }
    }
}

// Adds the partial sums of all blocks, always in the same order: 8 threads a column take every eighth block. `parts` rows of C columns.
extern "C" __global__ void __launch_bounds__(256)
finish(const float* partial, int blocks, int parts, T* dweight, T* dbias, T* dx_sums, int accumulate, int c) {
    __shared__ float part[8][33];
    int lane = threadIdx.x % 32, y = threadIdx.x / 32;
    int column = blockIdx.x * 32 + lane;
    float total = 0.0f;
    if (column < parts * c) {
#pragma unroll 4
        for (int b = y; b < blocks; b += 8) total += partial[i64(b) * parts * c + column];
    }
    part[y][lane] = total;
    __syncthreads();
    if (y > 0 || column >= parts * c) return;
    total = 0.0f;
    for (int i = 0; i < 8; i++) total += part[i][lane];
    int which = column / c;
    T* to = which == 0 ? dweight : which == 1 ? dbias : dx_sums;
    if (!to) return;
    to += column - which * c;
    *to = from_f32<T>(accumulate ? total + to_f32(*to) : total);
}

#else

constexpr int SIZE = Pack<T>::SIZE;
constexpr int PACKS = TW_FLOATS / SIZE;

// A lane's packs of a row are `lane`, `lane + 32`, ...; beyond the row they count as zero.
struct Row {
    Pack<T> packs[PACKS];
    TW_FORCE void load(const T* p, int packs_in_row) {
#pragma unroll
        for (int i = 0; i < PACKS; i++) {
            int at = threadIdx.x % 32 + 32 * i;
            if (at < packs_in_row) packs[i] = load_pack(p + at * SIZE);
        }
    }
};

#define EACH_PACK                                                             \
    _Pragma("unroll") for (int i = 0; i < PACKS; i++)                         \
        if (int at = threadIdx.x % 32 + 32 * i; at < c / SIZE)

extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const T* x, const T* branch, T* sum, const T* weight, const T* bias, float eps, T* out, float* mean_out, float* rstd_out, i64 n, int c) {
    i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= n) return;
    Row a;
    a.load(x + row * c, c / SIZE);
    if (branch) {
        Row b;
        b.load(branch + row * c, c / SIZE);
        EACH_PACK {
#pragma unroll
            for (int j = 0; j < SIZE; j++) a.packs[i].v[j] = from_f32<T>(to_f32(a.packs[i].v[j]) + to_f32(b.packs[i].v[j]));
            store_pack(sum + row * c + at * SIZE, a.packs[i]);
        }
    }
    float total = 0.0f, squares = 0.0f;
    EACH_PACK {
#pragma unroll
        for (int j = 0; j < SIZE; j++) total += to_f32(a.packs[i].v[j]);
    }
    float mean = warp_sum(total) / float(c);
    EACH_PACK {
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            float d = to_f32(a.packs[i].v[j]) - mean;
            squares += d * d;
        }
    }
    float rstd = 1.0f / sqrtf(warp_sum(squares) / float(c) + eps);
    EACH_PACK {
        Pack<T> w = load_pack(weight + at * SIZE), b, y;
        if (bias) b = load_pack(bias + at * SIZE);
#pragma unroll
        for (int j = 0; j < SIZE; j++) y.v[j] = normalised(to_f32(a.packs[i].v[j]), mean, rstd, w.v, bias ? b.v : nullptr, j);
        store_pack(out + row * c + at * SIZE, y);
    }
    if (threadIdx.x % 32 == 0) {
        mean_out[row] = mean;
        rstd_out[row] = rstd;
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
recompute(const T* sum, const T* weight, const T* bias, const float* mean, const float* rstd, T* out, i64 n, int c) {
    i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    if (row >= n) return;
    float m = mean[row], r = rstd[row];
    Row a;
    a.load(sum + row * c, c / SIZE);
    EACH_PACK {
        Pack<T> w = load_pack(weight + at * SIZE), b, y;
        if (bias) b = load_pack(bias + at * SIZE);
#pragma unroll
        for (int j = 0; j < SIZE; j++) y.v[j] = normalised(to_f32(a.packs[i].v[j]), m, r, w.v, bias ? b.v : nullptr, j);
        store_pack(out + row * c + at * SIZE, y);
    }
}

#if TW_FLOATS == 24

// The backward pass with what else can be had of the same rows: what the forward put out (`again`, where asked for), and sums over rows of the new dx
// (`parts` = 3). A block takes `rows` rows, its warps every twelfth, all of a row's loads at once. Each lane sums its own columns in registers; the warps' sums are added in order at the end. Partial sums of each block: (blocks, parts, C): weight, bias, dx.
#define BACKWARD_WARPS 12
extern "C" __global__ void __launch_bounds__(32 * BACKWARD_WARPS, 1)
backward_whole(const T* dout, const T* sum, const T* weight, const T* bias, const float* mean, const float* rstd, T* dx, int accumulate, T* again, float* partial,
               int parts, i64 n, int c, int rows) {
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32;
    float dweight[PACKS][SIZE], dbias[PACKS][SIZE], totals[PACKS][SIZE];
#pragma unroll
    for (int i = 0; i < PACKS; i++)
#pragma unroll
        for (int j = 0; j < SIZE; j++) dweight[i][j] = dbias[i][j] = totals[i][j] = 0.0f;
    i64 first = i64(blockIdx.x) * rows, last = first + rows < n ? first + rows : n;
    for (i64 row = first + warp; row < last; row += BACKWARD_WARPS) {
        Row d, s, x;
        d.load(dout + row * c, c / SIZE);
        s.load(sum + row * c, c / SIZE);
        if (accumulate) x.load(dx + row * c, c / SIZE);
        float m = mean[row], r = rstd[row], g_sum = 0.0f, gx_sum = 0.0f;
        EACH_PACK {
            Pack<T> w = load_pack(weight + at * SIZE);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                float dj = to_f32(d.packs[i].v[j]), xhat = (to_f32(s.packs[i].v[j]) - m) * r, g = to_f32(w.v[j]) * dj;
                g_sum += g;
                gx_sum += g * xhat;
                dweight[i][j] += xhat * dj;
                dbias[i][j] += dj;
            }
        }
        g_sum = warp_sum(g_sum) / float(c);
        gx_sum = warp_sum(gx_sum) / float(c);
        EACH_PACK {
            Pack<T> w = load_pack(weight + at * SIZE), y;
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                float xhat = (to_f32(s.packs[i].v[j]) - m) * r, g = to_f32(w.v[j]) * to_f32(d.packs[i].v[j]);
                float v = r * (g - g_sum - xhat * gx_sum);
                if (accumulate) v += to_f32(x.packs[i].v[j]);
                totals[i][j] += v;
                y.v[j] = from_f32<T>(v);
            }
            store_pack(dx + row * c + at * SIZE, y);
            if (again) {
                Pack<T> b;
                if (bias) b = load_pack(bias + at * SIZE);
#pragma unroll
                for (int j = 0; j < SIZE; j++) y.v[j] = normalised(to_f32(s.packs[i].v[j]), m, r, w.v, bias ? b.v : nullptr, j);
                store_pack(again + row * c + at * SIZE, y);
            }
        }
    }
    // (BACKWARD_WARPS, C) floats, once for each part.
    float* to = partial + i64(blockIdx.x) * parts * c;
#pragma unroll
    for (int which = 0; which < 3; which++) {
        if (which >= parts) break;
        __syncthreads();
        EACH_PACK {
#pragma unroll
            for (int j = 0; j < SIZE; j++) shared[warp * c + at * SIZE + j] = which == 0 ? dweight[i][j] : which == 1 ? dbias[i][j] : totals[i][j];
        }
        __syncthreads();
        for (int column = threadIdx.x; column < c; column += blockDim.x) {
            float total = 0.0f;
            for (int w = 0; w < BACKWARD_WARPS; w++) total += shared[w * c + column];
            to[which * c + column] = total;
        }
    }
}

#else

// A block takes `rows` rows, its warps every eighth of them. Each lane sums its own columns over its warp's rows in registers; the warps' sums are
// added in order at the end. Partial sums of each block: (blocks, 2, C), weight before bias.
extern "C" __global__ void __launch_bounds__(32 * WARPS, TW_FLOATS == 32 && TW_DTYPE != 0 ? 2 : 1)
backward(const T* dout, const T* sum, const T* weight, const float* mean, const float* rstd, T* dx, int accumulate, float* partial, i64 n, int c, int rows) {
    extern __shared__ float shared[];
    int warp = threadIdx.x / 32;
    float dweight[PACKS][SIZE], dbias[PACKS][SIZE];
#pragma unroll
    for (int i = 0; i < PACKS; i++)
#pragma unroll
        for (int j = 0; j < SIZE; j++) dweight[i][j] = dbias[i][j] = 0.0f;
    i64 first = i64(blockIdx.x) * rows, last = first + rows < n ? first + rows : n;
    for (i64 row = first + warp; row < last; row += WARPS) {
        Row d, s;
        d.load(dout + row * c, c / SIZE);
        s.load(sum + row * c, c / SIZE);
        float m = mean[row], r = rstd[row], g_sum = 0.0f, gx_sum = 0.0f;
        EACH_PACK {
            Pack<T> w = load_pack(weight + at * SIZE);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                float dj = to_f32(d.packs[i].v[j]), xhat = (to_f32(s.packs[i].v[j]) - m) * r, g = to_f32(w.v[j]) * dj;
                g_sum += g;
                gx_sum += g * xhat;
                dweight[i][j] += xhat * dj;
                dbias[i][j] += dj;
            }
        }
        g_sum = warp_sum(g_sum) / float(c);
        gx_sum = warp_sum(gx_sum) / float(c);
        EACH_PACK {
            Pack<T> w = load_pack(weight + at * SIZE), y;
            T* to = dx + row * c + at * SIZE;
            if (accumulate) y = load_pack(to);
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                float xhat = (to_f32(s.packs[i].v[j]) - m) * r, g = to_f32(w.v[j]) * to_f32(d.packs[i].v[j]);
                float v = r * (g - g_sum - xhat * gx_sum);
                y.v[j] = from_f32<T>(accumulate ? v + to_f32(y.v[j]) : v);
            }
            store_pack(to, y);
        }
    }
    // (WARPS, C) floats, once for the weight and once for the bias.
    float* to = partial + i64(blockIdx.x) * 2 * c;
    for (int which = 0; which < 2; which++) {
        __syncthreads();
        EACH_PACK {
#pragma unroll
            for (int j = 0; j < SIZE; j++) shared[warp * c + at * SIZE + j] = which ? dbias[i][j] : dweight[i][j];
        }
        __syncthreads();
        for (int column = threadIdx.x; column < c; column += blockDim.x) {
            float total = 0.0f;
            for (int w = 0; w < WARPS; w++) total += shared[w * c + column];
            to[which * c + column] = total;
        }
    }
}

#endif

#endif
