// Layer normalisation of a stream in f32: the branch that joins it and the result are in 16 bits. One warp a row.

#define WARPS 8
#define FLOATS TW_FLOATS  // of a row in a lane, at most

struct alignas(8) Four {
    T v[4];
};

TW_FORCE float normalised(float x, float mean, float rstd, float weight, const float* bias, int j) {
    float y = (x - mean) * rstd * weight;
    return bias ? y + bias[j] : y;
}

// Rows of whole groups of four elements, at most 32 * FLOATS of them.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward(const float* x, const T* branch, float* sum, const float* weight, const float* bias, float eps, T* out, float* mean_out, float* rstd_out, i64 n, int c) {
    wait_for_inputs();
    i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= n) return;
    float4 held[FLOATS / 4];
    float total = 0.0f, squares = 0.0f;
    // All loads before the first store: what is stored may, for the compiler, be what is loaded next.
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        int j = (lane + 32 * i) * 4;
        held[i] = j < c ? *(const float4*)(x + row * c + j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (branch) {
        Four joined[FLOATS / 4];
#pragma unroll
        for (int i = 0; i < FLOATS / 4; i++) {
            int j = (lane + 32 * i) * 4;
            if (j < c) joined[i] = *(const Four*)(branch + row * c + j);
        }
#pragma unroll
        for (int i = 0; i < FLOATS / 4; i++) {
            int j = (lane + 32 * i) * 4;
            if (j >= c) continue;
            Four b = joined[i];
            held[i] = {held[i].x + to_f32(b.v[0]), held[i].y + to_f32(b.v[1]), held[i].z + to_f32(b.v[2]), held[i].w + to_f32(b.v[3])};
            *(float4*)(sum + row * c + j) = held[i];
        }
    }
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        if ((lane + 32 * i) * 4 < c) total += (held[i].x + held[i].y) + (held[i].z + held[i].w);
    }
    // The weight is on its way while the sums are made.
    float4 weights[FLOATS / 4];
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        int j = (lane + 32 * i) * 4;
        if (j < c) weights[i] = *(const float4*)(weight + j);
    }
    float mean = warp_sum(total) / float(c);
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        if ((lane + 32 * i) * 4 >= c) continue;
        float a = held[i].x - mean, b = held[i].y - mean, d = held[i].z - mean, e = held[i].w - mean;
        squares += (a * a + b * b) + (d * d + e * e);
    }
    float rstd = 1.0f / sqrtf(warp_sum(squares) / float(c) + eps);
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        int j = (lane + 32 * i) * 4;
        if (j >= c) continue;
        float4 w = weights[i];
        Four y;
        y.v[0] = from_f32<T>(normalised(held[i].x, mean, rstd, w.x, bias, j));
        y.v[1] = from_f32<T>(normalised(held[i].y, mean, rstd, w.y, bias, j + 1));
        y.v[2] = from_f32<T>(normalised(held[i].z, mean, rstd, w.z, bias, j + 2));
        y.v[3] = from_f32<T>(normalised(held[i].w, mean, rstd, w.w, bias, j + 3));
        *(Four*)(out + row * c + j) = y;
    }
    if (lane == 0) mean_out[row] = mean, rstd_out[row] = rstd;
}

// Any width and alignment: the row is read again for each pass.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
forward_any(const float* x, const T* branch, float* sum, const float* weight, const float* bias, float eps, T* out, float* mean_out, float* rstd_out, i64 n, int c) {
    wait_for_inputs();
    i64 row = i64(blockIdx.x) * WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= n) return;
    const float* from = x + row * c;
    if (branch) {
        for (int j = lane; j < c; j += 32) sum[row * c + j] = from[j] + to_f32(branch[row * c + j]);
        from = sum + row * c;
    }
    float total = 0.0f, squares = 0.0f;
    for (int j = lane; j < c; j += 32) total += from[j];
    float mean = c > 0 ? warp_sum(total) / float(c) : 0.0f;
    for (int j = lane; j < c; j += 32) squares += (from[j] - mean) * (from[j] - mean);
    float rstd = 1.0f / sqrtf((c > 0 ? warp_sum(squares) / float(c) : 0.0f) + eps);
    for (int j = lane; j < c; j += 32) out[row * c + j] = from_f32<T>(normalised(from[j], mean, rstd, weight[j], bias, j));
    if (lane == 0) mean_out[row] = mean, rstd_out[row] = rstd;
}
