// What surrounds the products of linear layers: conversion of the input, activations behind a product, and the whole layer for shapes and addresses
// that cuBLASLt does not take.

template <class E, int N> struct alignas(N * sizeof(E)) Group {
    E v[N];
};

// Activation codes: -1 none, 0 GELU by tanh, 1 exact GELU, 2 ReLU, 3 GEGLU.
TW_FORCE float activated(int activation, float x) {
    // What is not a number stays that.
    if (activation == 2) return x < 0.0f ? 0.0f : x;
    return activation == 0 || activation == 1 ? gelu_value(activation, x) : x;
}

// The exact GELU; for 16 bits by the error function itself, whose lost digits in the far tail no such result has.
TW_FORCE float exact_gelu(float x) {
    return sizeof(T) == 2 ? 0.5f * x * (1.0f + erff(0.7071067811865476f * x)) : gelu_value(1, x);
}

// to[i] = from[i] in another type.
extern "C" __global__ void __launch_bounds__(256) convert(const void* from, int from_code, void* to, int to_code, i64 n) {
    for (i64 i = thread_index(); i < n; i += thread_count()) store_any(to, i, to_code, load_any(from, i, from_code));
}

// Elements of a thread: whole groups where rows are, else one by one.
template <int N> TW_FORCE void finish_rows(const T* product, const float* bias, int activation, const float* residual, T* out, i64 rows, int columns) {
    bool gated = activation == 3;
    int width = gated ? 2 * columns : columns, groups = columns / N;
    // Chunks are small: 32 bits count their groups, and divide fast.
    u32 all = u32(rows * groups), step = u32(thread_count());
    for (u32 e = u32(thread_index()); e < all; e += step) {
        i64 row = e / u32(groups);
        int j = int(e % u32(groups)) * N;
        Group<T, N> x = *(const Group<T, N>*)(product + row * width + j), gate;
        if (gated) gate = *(const Group<T, N>*)(product + row * width + columns + j);
        Group<T, N> y;
#pragma unroll
        for (int i = 0; i < N; i++) {
            float z = to_f32(x.v[i]);
            if (bias) z += bias[j + i];
            if (gated) z = exact_gelu(z) * (to_f32(gate.v[i]) + (bias ? bias[columns + j + i] : 0.0f));
            else z = activated(activation, z);
            if (residual) z += residual[row * columns + j + i];
            y.v[i] = from_f32<T>(z);
        }
        *(Group<T, N>*)(out + row * columns + j) = y;
    }
}

// out (rows, columns) = activation(product + bias) + residual; a gated product has twice the columns. `out` may be `product` or `residual`.
extern "C" __global__ void __launch_bounds__(256)
finish(const T* product, const float* bias, int activation, const float* residual, T* out, i64 rows, int columns, int wide) {
    if (wide) finish_rows<16 / sizeof(T)>(product, bias, activation, residual, out, rows, columns);
    else finish_rows<1>(product, bias, activation, residual, out, rows, columns);
}

// A layer of few results, in f32 arithmetic: a warp each. x is rounded to the weight's type.
extern "C" __global__ void __launch_bounds__(256)
narrow(const void* x, int x_code, const T* weight, const float* bias, int activation, const float* residual, void* out, int out_code, int m, int columns, int k) {
    wait_for_inputs();
    int e = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (e >= m * columns) return;
    int row = e / columns, column = e % columns;
    float sum = 0.0f;
#pragma unroll 8
    for (int p = lane; p < k; p += 32) sum += to_f32(from_f32<T>(load_any(x, i64(row) * k + p, x_code))) * to_f32(weight[i64(column) * k + p]);
    sum = warp_sum(sum);
    if (lane > 0) return;
    float z = activated(activation, sum + (bias ? bias[column] : 0.0f));
    if (residual) z += residual[e];
    store_any(out, e, out_code, z);
}

// The whole layer in f32 arithmetic, for weights of type T: x is rounded to it. A block makes 64 x 32 outputs, of a gated weight from both halves.
#define TILE_M 64
#define TILE_N 32
#define DEPTH 16
extern "C" __global__ void __launch_bounds__(256)
general(const void* x, int x_code, const T* weight, const float* bias, int activation, const float* residual, void* out, int out_code, int m, int columns, int k) {
    __shared__ float xs[DEPTH][TILE_M + 1], ws[2][DEPTH][TILE_N + 1];
    bool gated = activation == 3;
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int i0 = blockIdx.y * TILE_M, j0 = blockIdx.x * TILE_N;
    float sum[4][2] = {}, other[4][2] = {};
    for (int p0 = 0; p0 < k; p0 += DEPTH) {
        for (int e = threadIdx.x; e < TILE_M * DEPTH; e += 256) {
            int p = e % DEPTH, i = e / DEPTH;
            bool real = i0 + i < m && p0 + p < k;
            xs[p][i] = real ? to_f32(from_f32<T>(load_any(x, i64(i0 + i) * k + p0 + p, x_code))) : 0.0f;
        }
        for (int e = threadIdx.x; e < TILE_N * DEPTH; e += 256) {
            int p = e % DEPTH, j = e / DEPTH;
            bool real = j0 + j < columns && p0 + p < k;
            ws[0][p][j] = real ? to_f32(weight[i64(j0 + j) * k + p0 + p]) : 0.0f;
            if (gated) ws[1][p][j] = real ? to_f32(weight[i64(columns + j0 + j) * k + p0 + p]) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEPTH; p++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    sum[i][j] += xs[p][ty + 16 * i] * ws[0][p][tx + 16 * j];
                    if (gated) other[i][j] += xs[p][ty + 16 * i] * ws[1][p][tx + 16 * j];
                }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            int row = i0 + ty + 16 * i, column = j0 + tx + 16 * j;
            if (row >= m || column >= columns) continue;
            i64 at = i64(row) * columns + column;
            float z = sum[i][j] + (bias ? bias[column] : 0.0f);
            if (gated) z = gelu_value(1, z) * (other[i][j] + (bias ? bias[columns + column] : 0.0f));
            else z = activated(activation, z);
            if (residual) z += residual[at];
            store_any(out, at, out_code, z);
        }
}
