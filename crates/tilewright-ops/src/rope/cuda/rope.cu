// Rotary embedding: a thread turns N neighbouring channels of a head's first half with their partners in the second.

template <class E, int N> struct alignas(N * sizeof(E)) Group {
    E v[N];
};

template <int N> TW_FORCE void turn(T* x, i64 width, int heads, const int* positions, const float* table, int half) {
    // One block a row of x: no division by its width, and its angles stay in the first cache.
    u32 groups = u32(heads) * u32(half / N);
    i64 row = blockIdx.x;
    for (u32 e = threadIdx.x; e < groups; e += blockDim.x) {
        int h = int(e / u32(half / N)), t = int(e % u32(half / N)) * N;
        T* first = x + row * width + i64(h) * 2 * half + t;
        const float* angles = table + i64(positions[row]) * 2 * half + t;
        Group<T, N> a = *(Group<T, N>*)first, b = *(Group<T, N>*)(first + half);
        float cosines[N], sines[N];
#pragma unroll
        for (int i = 0; i < N; i++) cosines[i] = angles[i], sines[i] = angles[half + i];
#pragma unroll
        for (int i = 0; i < N; i++) {
            float u = to_f32(a.v[i]), v = to_f32(b.v[i]);
            a.v[i] = from_f32<T>(u * cosines[i] - v * sines[i]);
            b.v[i] = from_f32<T>(v * cosines[i] + u * sines[i]);
        }
        *(Group<T, N>*)first = a;
        *(Group<T, N>*)(first + half) = b;
    }
}

extern "C" __global__ void __launch_bounds__(256)
forward(T* x, i64 width, int heads, const int* positions, const float* table, int half, int wide) {
    if (wide) turn<4>(x, width, heads, positions, table, half);
    else turn<1>(x, width, heads, positions, table, half);
}
