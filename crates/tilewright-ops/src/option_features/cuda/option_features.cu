// One block a row: all threads copy the state, the first warp looks at the options.

extern "C" __global__ void __launch_bounds__(128)
forward(const float* states, const int* firsts, const float* logits, const int* starts, float* out, int d) {
    wait_for_inputs();
    int row = blockIdx.x, lane = threadIdx.x;
    float* to = out + i64(row) * (d + 4);
    const float* state = states + i64(firsts[row]) * d;
    for (int j = lane; j < d; j += blockDim.x) to[j] = state[j];
    if (lane >= 32) return;
    int from = starts[row], n = starts[row + 1] - from;
    if (n <= 0) {
        if (lane < 4) to[d + lane] = 0.0f;
        return;
    }
    // The two largest logits; what is not a number shows in the sum.
    float first = -TW_INFINITY, second = -TW_INFINITY, sum = 0.0f, entropy = 0.0f;
    for (int i = lane; i < n; i += 32) {
        float l = logits[from + i];
        second = fmaxf(second, fminf(first, l));
        first = fmaxf(first, l);
    }
#pragma unroll
    for (int s = 16; s > 0; s >>= 1) {
        float f = __shfl_xor_sync(0xffffffffu, first, s), g = __shfl_xor_sync(0xffffffffu, second, s);
        second = fmaxf(fminf(first, f), fmaxf(second, g));
        first = fmaxf(first, f);
    }
    for (int i = lane; i < n; i += 32) sum += expf(logits[from + i] - first);
    sum = warp_sum(sum);
    for (int i = lane; i < n; i += 32) {
        float p = expf(logits[from + i] - first) / sum;
        entropy -= p * logf(p < 1e-9f ? 1e-9f : p);
    }
    entropy = warp_sum(entropy);
    if (lane > 0) return;
    float options = n < 2 ? 2.0f : float(n), top = 1.0f / sum;
    to[d] = top;
    to[d + 1] = n < 2 ? top : top - expf(second - first) / sum;
    to[d + 2] = entropy / logf(options);
    to[d + 3] = options / 255.0f;
}
