// Rows of a table in any order, one block of threads a row; any storage type on either side.

template <class E, int N> struct alignas(N * sizeof(E)) Group {
    E v[N];
};

template <class FROM, class TO, int N> TW_FORCE void copy_row(const FROM* from, TO* to, int width) {
    for (int j = threadIdx.x * N; j < width; j += blockDim.x * N) {
        Group<FROM, N> x = *(const Group<FROM, N>*)(from + j);
        Group<TO, N> y;
#pragma unroll
        for (int i = 0; i < N; i++) y.v[i] = from_f32<TO>(to_f32(x.v[i]));
        *(Group<TO, N>*)(to + j) = y;
    }
}

template <class FROM, class TO> TW_FORCE void one(const FROM* table, const int* index, TO* out, int width, int wide) {
    i64 row = blockIdx.x;
    const FROM* from = table + i64(index[row]) * width;
    if (wide) copy_row<FROM, TO, 4>(from, out + row * width, width);
    else copy_row<FROM, TO, 1>(from, out + row * width, width);
}

// `wide`: rows are whole groups of four elements, and aligned to them.
extern "C" __global__ void __launch_bounds__(256) forward(const T* table, const int* index, void* out, int out_code, int width, int wide) {
    wait_for_inputs();
    if (out_code == 0) one(table, index, (float*)out, width, wide);
    else if (out_code == 1) one(table, index, (f16*)out, width, wide);
    else one(table, index, (bf16*)out, width, wide);
}
