// Token and position embedding. The backward needs no atomics: positions are sorted by token (stable, so each token's are in order), and the sorted
// list is cut into chunks of rows, each summed by one block. A token whose positions lie in several chunks is finished by a second kernel, in order.

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
template <bool WIDE> TW_FORCE void positions_body(const T* dout, T* dwpe, int accumulate, int b, int t, int max_t, int c) {
    constexpr int N = WIDE ? SIZE : 1;
    for (i64 i = thread_index() * N; i < i64(max_t) * c; i += thread_count() * N) {
        float total[N] = {};
        bool real = i < i64(t) * c;
        if (accumulate) {
#pragma unroll
            for (int j = 0; j < N; j++) total[j] = to_f32(dwpe[i + j]);
        }
        if (real) {
#pragma unroll 4
            for (int k = 0; k < b; k++) {
                const T* from = dout + i64(k) * t * c + i;
                if (WIDE) {
                    Pack<T> x = load_pack(from);
#pragma unroll
                    for (int j = 0; j < N; j++) total[j] += to_f32(x.v[j]);
                } else {
                    total[0] += to_f32(*from);
                }
            }
        }
#pragma unroll
        for (int j = 0; j < N; j++) dwpe[i + j] = from_f32<T>(total[j]);
    }
}
extern "C" __global__ void __launch_bounds__(256) positions_wide(const T* dout, T* dwpe, int accumulate, int b, int t, int max_t, int c) {
    positions_body<true>(dout, dwpe, accumulate, b, t, max_t, c);
}
extern "C" __global__ void __launch_bounds__(256) positions_narrow(const T* dout, T* dwpe, int accumulate, int b, int t, int max_t, int c) {
    positions_body<false>(dout, dwpe, accumulate, b, t, max_t, c);
}

// One pass of a stable radix sort by 8 bits of the token, in three kernels. A tile is what one block holds: one element a thread.
#define TILE 1024
#define DIGITS 256

// The place of this thread's element among those of its tile with the same digit; `totals` gets the tile's count of each digit.
TW_FORCE int place_in_tile(int digit, u16 (*counts)[DIGITS], int* totals) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < TILE / 32 * DIGITS; i += TILE) counts[i / DIGITS][i % DIGITS] = 0;
    __syncthreads();
    // Threads behind the end have digit -1 and count nowhere.
    u32 same = __match_any_sync(0xffffffffu, digit);
    int before = __popc(same & ((1u << lane) - 1));
    if (digit >= 0 && before == 0) counts[warp][digit] = u16(__popc(same));
    __syncthreads();
    if (threadIdx.x < DIGITS) {
        int total = 0;
        for (int w = 0; w < TILE / 32; w++) {
            int here = counts[w][threadIdx.x];
            counts[w][threadIdx.x] = u16(total);
            total += here;
        }
        totals[threadIdx.x] = total;
    }
    __syncthreads();
    return digit >= 0 ? before + counts[warp][digit] : 0;
}

TW_FORCE int digit_of(const int* tokens, const int* order, i64 i, i64 n, int shift, int* position) {
    if (i >= n) return -1;
    *position = order ? order[i] : int(i);
    return (tokens[*position] >> shift) & (DIGITS - 1);
}

// histogram[digit * tiles + tile]. `order`: the permutation so far, null for none.
extern "C" __global__ void __launch_bounds__(TILE) sort_count(const int* tokens, const int* order, int* histogram, i64 n, int shift) {
    __shared__ u16 counts[TILE / 32][DIGITS];
    __shared__ int totals[DIGITS];
    int position = 0;
    int digit = digit_of(tokens, order, i64(blockIdx.x) * TILE + threadIdx.x, n, shift, &position);
    place_in_tile(digit, counts, totals);
    if (threadIdx.x < DIGITS) histogram[threadIdx.x * gridDim.x + blockIdx.x] = totals[threadIdx.x];
}

// Each count becomes the sum of those before it.
extern "C" __global__ void __launch_bounds__(TILE) sort_scan(int* histogram, int count) {
    __shared__ int sums[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, carried = 0;
    for (int start = 0; start < count; start += TILE) {
        int i = start + threadIdx.x, own = i < count ? histogram[i] : 0, sum = own;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
            int other = __shfl_up_sync(0xffffffffu, sum, d);
            if (lane >= d) sum += other;
        }
        if (lane == 31) sums[warp] = sum;
        __syncthreads();
        if (warp == 0) {
            int x = sums[lane];
#pragma unroll
            for (int d = 1; d < 32; d <<= 1) {
                int other = __shfl_up_sync(0xffffffffu, x, d);
                if (lane >= d) x += other;
            }
            sums[lane] = x;
        }
        __syncthreads();
        int before = carried + (warp > 0 ? sums[warp - 1] : 0) + sum - own;
        if (i < count) histogram[i] = before;
        carried += sums[31];
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(TILE)
sort_place(const int* tokens, const int* order, const int* histogram, int* sorted, i64 n, int shift) {
    __shared__ u16 counts[TILE / 32][DIGITS];
    __shared__ int totals[DIGITS];
    int position = 0;
    int digit = digit_of(tokens, order, i64(blockIdx.x) * TILE + threadIdx.x, n, shift, &position);
    int place = place_in_tile(digit, counts, totals);
    if (digit >= 0) sorted[histogram[digit * gridDim.x + blockIdx.x] + place] = position;
}

// Rows of a chunk at most.
#define ROWS 64

// One block sums the rows `rows * blockIdx.x` and on of the sorted list, each thread some columns. partial (chunks, 2, c): the sum of the first token
// where the chunk before has it too, and of the last where it begins here and goes on behind.
template <bool WIDE> TW_FORCE void chunks_body(const int* tokens, const int* sorted, const T* dout, T* dwte, float* partial, i64 n, int rows, int c) {
    __shared__ int ids[ROWS + 2], at[ROWS];
    constexpr int N = WIDE ? SIZE : 1;
    constexpr int AHEAD = 8;
    i64 first = i64(blockIdx.x) * rows;
    int count = int(n - first < rows ? n - first : rows);
    for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
        i64 row = first + i - 1;
        bool real = row >= 0 && row < n;
        int position = real ? sorted[row] : 0;
        ids[i] = real ? tokens[position] : -1;
        if (i > 0 && i <= count) at[i - 1] = position;
    }
    __syncthreads();
    bool continues = ids[0] == ids[1], goes_on = ids[count] == ids[count + 1];
    for (int column = threadIdx.x * N; column < c; column += blockDim.x * N) {
        float total[N] = {};
        bool leading = continues;
        for (int start = 0; start < count; start += AHEAD) {
            float x[AHEAD][N];
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (start + a >= count) break;
                const T* from = dout + i64(at[start + a]) * c + column;
                if (WIDE) {
                    Pack<T> p = load_pack(from);
#pragma unroll
                    for (int j = 0; j < N; j++) x[a][j] = to_f32(p.v[j]);
                } else {
                    x[a][0] = to_f32(*from);
                }
            }
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                int i = start + a;
                if (i >= count) break;
#pragma unroll
                for (int j = 0; j < N; j++) total[j] += x[a][j];
                bool last = i + 1 == count;
                if (ids[i + 1] == ids[i + 2] && !last) continue;
                // The end of this token's rows here.
                if (leading || (last && goes_on)) {
                    float* to = partial + (i64(blockIdx.x) * 2 + (leading ? 0 : 1)) * c + column;
#pragma unroll
                    for (int j = 0; j < N; j++) to[j] = total[j];
                } else {
                    T* to = dwte + i64(ids[i + 1]) * c + column;
                    if (WIDE) {
                        Pack<T> p = load_pack(to);
#pragma unroll
                        for (int j = 0; j < N; j++) p.v[j] = from_f32<T>(to_f32(p.v[j]) + total[j]);
                        store_pack(to, p);
                    } else {
                        *to = from_f32<T>(to_f32(*to) + total[0]);
                    }
                }
                leading = false;
#pragma unroll
                for (int j = 0; j < N; j++) total[j] = 0.0f;
            }
        }
    }
}
extern "C" __global__ void __launch_bounds__(256)
chunks_wide(const int* tokens, const int* sorted, const T* dout, T* dwte, float* partial, i64 n, int rows, int c) {
    chunks_body<true>(tokens, sorted, dout, dwte, partial, n, rows, c);
}
extern "C" __global__ void __launch_bounds__(256)
chunks_narrow(const int* tokens, const int* sorted, const T* dout, T* dwte, float* partial, i64 n, int rows, int c) {
    chunks_body<false>(tokens, sorted, dout, dwte, partial, n, rows, c);
}

// Tokens of several chunks: the block of the chunk where one begins adds its partial sums in order.
extern "C" __global__ void __launch_bounds__(256)
finish(const int* tokens, const int* sorted, T* dwte, const float* partial, i64 n, int rows, int c) {
    i64 chunk = blockIdx.x, next = (chunk + 1) * rows;
    if (next >= n) return;
    int id = tokens[sorted[next]];
    i64 first = chunk * rows;
    // It must end this chunk, and begin in it.
    if (tokens[sorted[next - 1]] != id) return;
    if (first > 0 && tokens[sorted[first]] == id && tokens[sorted[first - 1]] == id) return;
    i64 end = chunk + 1;
    while (end * rows < n && tokens[sorted[end * rows]] == id) end++;
    for (int column = threadIdx.x; column < c; column += blockDim.x) {
        float total = partial[(chunk * 2 + 1) * c + column];
#pragma unroll 8
        for (i64 k = chunk + 1; k < end; k++) total += partial[k * 2 * c + column];
        T* to = dwte + i64(id) * c + column;
        *to = from_f32<T>(to_f32(*to) + total);
    }
}
