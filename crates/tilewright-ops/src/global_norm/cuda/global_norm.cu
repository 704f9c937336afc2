// Sum of squares in two passes of fixed order, in f64: no overflow for any f32.

// Tensors of one launch: addresses; elements, negative where packs cannot be used; the first block of each.
#define TENSORS 16
struct Table {
    u64 address[TENSORS];
    i64 elements[TENSORS];
    u64 first[TENSORS + 1];
};

// Each block writes one partial sum. The blocks of a tensor depend on its size only.
extern "C" __global__ void __launch_bounds__(256) squares(const __grid_constant__ Table table, int count, double* partial) {
    int which = 0;
    while (which + 1 < count && blockIdx.x >= table.first[which + 1]) which++;
    const T* x = (const T*)table.address[which];
    i64 n = table.elements[which];
    bool wide = n >= 0;
    n = wide ? n : -n;
    i64 first = (blockIdx.x - table.first[which]) * 256 + threadIdx.x, all = (table.first[which + 1] - table.first[which]) * 256;
    double total = 0.0;
    if (wide) {
        const int size = Pack<T>::SIZE;
        for (i64 i = first * size; i + size <= n; i += all * size) {
            Pack<T> p = load_pack(x + i);
#pragma unroll
            for (int j = 0; j < size; j++) {
                double v = to_f32(p.v[j]);
                total += v * v;
            }
        }
        i64 tail = n / size * size + first;
        if (tail < n) {
            double v = to_f32(x[tail]);
            total += v * v;
        }
    } else {
        for (i64 i = first; i < n; i += all) {
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
