// Token and position embedding. The backward needs no atomics: each block owns every G-th token id, finds the positions of its ids in order, and
// adds their gradients in that order.

constexpr int SIZE = Pack<T>::SIZE;

template <bool WIDE> TW_FORCE void forward_body(const int* tokens, const T* wte, const T* wpe, int position, T* out, i64 n, int t, int c) {
    int step = WIDE ? SIZE : 1, steps = c / step;
    for (i64 i = thread_index(); i < n * steps; i += thread_count()) {
        i64 row = i / steps, column = i % steps * step;
        const T* a = wte + i64(tokens[row]) * c + column;
        const T* b = wpe + (position + row % t) * c + column;
        T* to = out + row * c + column;
        if (WIDE) {
            Pack<T> x = load_pack(a), y = load_pack(b);
#pragma unroll
            for (int j = 0; j < SIZE; j++) x.v[j] = from_f32<T>(to_f32(x.v[j]) + to_f32(y.v[j]));
            store_pack(to, x);
        } else {
            *to = from_f32<T>(to_f32(*a) + to_f32(*b));
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
forward_wide(const int* tokens, const T* wte, const T* wpe, int position, T* out, i64 n, int t, int c) {
    forward_body<true>(tokens, wte, wpe, position, out, n, t, c);
}
extern "C" __global__ void __launch_bounds__(256)
forward_narrow(const int* tokens, const T* wte, const T* wpe, int position, T* out, i64 n, int t, int c) {
    forward_body<false>(tokens, wte, wpe, position, out, n, t, c);
}

// dwpe[t] (+)= sum over b of dout[b, t], rows from T on become zero where nothing is added to.
extern "C" __global__ void __launch_bounds__(256) positions(const T* dout, T* dwpe, int accumulate, int b, int t, int max_t, int c) {
    for (i64 i = thread_index(); i < i64(max_t) * c; i += thread_count()) {
        if (i >= i64(t) * c) {
            if (!accumulate) dwpe[i] = from_f32<T>(0.0f);
            continue;
        }
        float total = accumulate ? to_f32(dwpe[i]) : 0.0f;
        for (int k = 0; k < b; k++) total += to_f32(dout[i64(k) * t * c + i]);
        dwpe[i] = from_f32<T>(total);
    }
}

#define THREADS 512
#define CAPACITY 4096
#define HEAVY 64

extern "C" __global__ void __launch_bounds__(THREADS) words(const int* tokens, const T* dout, T* dwte, i64 n, int c) {
    __shared__ int list[CAPACITY];      // positions of this block's ids, ascending
    __shared__ int ids[CAPACITY];       // their ids
    __shared__ u8 state[CAPACITY];      // 1: first of its id and light, 2: first and heavy
    __shared__ int counts[THREADS / 32], length;
    __shared__ float part[THREADS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 next = 0;
    while (next < n) {
        // Collect, in order, as many as fit.
        if (threadIdx.x == 0) length = 0;
        __syncthreads();
        while (next < n) {
            i64 i = next + threadIdx.x;
            int id = i < n ? tokens[i] : -1;
            bool mine = id >= 0 && id % gridDim.x == blockIdx.x;
            u32 ballot = __ballot_sync(0xffffffffu, mine);
            if (lane == 0) counts[warp] = __popc(ballot);
            __syncthreads();
            int before = length, total = 0;
            for (int w = 0; w < THREADS / 32; w++) {
                if (w < warp) before += counts[w];
                total += counts[w];
            }
            bool fits = length + total <= CAPACITY;
            if (fits && mine) {
                int at = before + __popc(ballot & ((1u << lane) - 1));
                list[at] = int(i);
                ids[at] = id;
            }
            __syncthreads();
            if (!fits) break;
            if (threadIdx.x == 0) length += total;
            next += THREADS;
            __syncthreads();
        }
        int count = length;
        for (int i = threadIdx.x; i < count; i += THREADS) {
            bool first = true;
            for (int j = 0; j < i && first; j++) first = ids[j] != ids[i];
            int same = 0;
            if (first) {
                for (int j = i; j < count; j++) same += ids[j] == ids[i];
            }
            state[i] = first ? (same > HEAVY ? 2 : 1) : 0;
        }
        __syncthreads();
        // Rare ids: one warp each.
        int light = 0;
        for (int i = 0; i < count; i++) {
            if (state[i] != 1 || light++ % (THREADS / 32) != warp) continue;
            int id = ids[i];
            for (int column = lane; column < c; column += 32) {
                float total = 0.0f;
                for (int j = i; j < count; j++) {
                    if (ids[j] == id) total += to_f32(dout[i64(list[j]) * c + column]);
                }
                T* to = dwte + i64(id) * c + column;
                *to = from_f32<T>(to_f32(*to) + total);
            }
        }
        // Frequent ids: the whole block each, 32 columns at a time; each warp takes every 16th entry, so that many rows are on their way at once.
        for (int i = 0; i < count; i++) {
            if (state[i] != 2) continue;
            int id = ids[i];
            for (int start = 0; start < c; start += 32) {
                int column = start + lane;
                float total = 0.0f;
                if (column < c) {
                    for (int j = i + warp; j < count; j += THREADS / 32) {
                        if (ids[j] == id) total += to_f32(dout[i64(list[j]) * c + column]);
                    }
                }
                __syncthreads();
                part[threadIdx.x] = total;
                __syncthreads();
                if (warp == 0 && column < c) {
                    total = 0.0f;
                    for (int w = 0; w < THREADS / 32; w++) total += part[w * 32 + lane];
                    T* to = dwte + i64(id) * c + column;
                    *to = from_f32<T>(to_f32(*to) + total);
                }
            }
        }
        __syncthreads();
    }
}
