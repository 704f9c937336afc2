// GELU forward and backward, element by element. `wide` variants take tensors that start on 16 bytes.

template <bool WIDE, class F> TW_FORCE void each(i64 n, F f) {
    const int size = Pack<T>::SIZE;
    if (WIDE) {
        for (i64 i = thread_index() * size; i + size <= n; i += thread_count() * size) f(i, size);
        i64 tail = n / size * size + thread_index();
        if (tail < n) f(tail, 1);
    } else {
        for (i64 i = thread_index(); i < n; i += thread_count()) f(i, 1);
    }
}

template <bool WIDE> TW_FORCE void forward_body(const T* x, T* out, i64 n, int kind) {
    each<WIDE>(n, [=](i64 i, int count) {
        if (count == 1) {
            out[i] = from_f32<T>(gelu_value(kind, to_f32(x[i])));
            return;
        }
        Pack<T> a = load_pack(x + i);
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; j++) a.v[j] = from_f32<T>(gelu_value(kind, to_f32(a.v[j])));
        store_pack(out + i, a);
    });
}

// dx may be dout itself: each element is read before it is written, by the thread that writes it.
template <bool WIDE> TW_FORCE void backward_body(const T* x, const T* dout, T* dx, i64 n, int kind) {
    each<WIDE>(n, [=](i64 i, int count) {
        if (count == 1) {
            dx[i] = from_f32<T>(to_f32(dout[i]) * gelu_slope(kind, to_f32(x[i])));
            return;
        }
        Pack<T> a = load_pack(x + i), d = load_pack(dout + i);
#pragma unroll
        for (int j = 0; j < Pack<T>::SIZE; j++) d.v[j] = from_f32<T>(to_f32(d.v[j]) * gelu_slope(kind, to_f32(a.v[j])));
        store_pack(dx + i, d);
    });
}

extern "C" __global__ void __launch_bounds__(256) forward_wide(const T* x, T* out, i64 n, int kind) {
    forward_body<true>(x, out, n, kind);
}
extern "C" __global__ void __launch_bounds__(256) forward_narrow(const T* x, T* out, i64 n, int kind) {
    forward_body<false>(x, out, n, kind);
}
extern "C" __global__ void __launch_bounds__(256) backward_wide(const T* x, const T* dout, T* dx, i64 n, int kind) {
    backward_body<true>(x, dout, dx, n, kind);
}
extern "C" __global__ void __launch_bounds__(256) backward_narrow(const T* x, const T* dout, T* dx, i64 n, int kind) {
    backward_body<false>(x, dout, dx, n, kind);
}
