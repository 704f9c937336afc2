// Sum of squares in two passes of fixed order, in f64: no overflow for any f32.

// Each block writes one partial sum. The grid depends on the tensor's size only.
extern "C" __global__ void __launch_bounds__(256) squares(const T* x, i64 n, int wide, double* partial) {
    double total = 0.0;
    if (wide) {
        const int size = Pack<T>::SIZE;
        for (i64 i = thread_index() * size; i + size <= n; i += thread_count() * size) {
            Pack<T> p = load_pack(x + i);
#pragma unroll
            for (int j = 0; j < size; j++) {
                double v = to_f32(p.v[j]);
                total += v * v;
            }
        }
        i64 tail = n / size * size + thread_index();
        if (tail < n) {
            double v = to_f32(x[tail]);
            total += v * v;
        }
    } else {
        for (i64 i = thread_index(); i < n; i += thread_count()) {
            double v = to_f32(x[i]);
            total += v * v;
        }
    }
    __shared__ double part[8];
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0.0;
        for (int w = 0; w < 8; w++) total += part[w];
        partial[blockIdx.x] = total;
    }
}

extern "C" __global__ void __launch_bounds__(256) root(const double* partial, int count, float* out) {
    double total = 0.0;
    for (int i = threadIdx.x; i < count; i += 256) total += partial[i];
    __shared__ double part[8];
    total = warp_sum(total);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = total;
    __syncthreads();
    if (threadIdx.x == 0) {
        total = 0.0;
        for (int w = 0; w < 8; w++) total += part[w];
        *out = float(sqrt(total));
    }
}
