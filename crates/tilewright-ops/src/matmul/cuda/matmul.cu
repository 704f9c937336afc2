// The general product, for shapes and addresses that cuBLASLt does not take, and the bias gradient. Any storage type for each tensor.

// out[i, j] = sum over p of a[i * a_row + p * a_step] * b[j * b_row + p * b_step], then bias, GELU, derivative, what is added to.
#define TILE 64
#define DEPTH 16

// gelu: -1 none, else the kind. `pre_out`: the value before the activation, stored. `pre_in`: multiplies by the derivative there.
extern "C" __global__ void __launch_bounds__(256)
general(const void* a, int a_code, i64 a_row, i64 a_step, const void* b, int b_code, i64 b_row, i64 b_step, const void* bias, int bias_code,
        int gelu, void* pre_out, int pre_out_code, const void* pre_in, int pre_in_code, float alpha, int accumulate, void* out, int out_code, i64 out_row, int m, int n, int k) {
    __shared__ float as[DEPTH][TILE + 1], bs[DEPTH][TILE + 1];
    int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    int i0 = blockIdx.y * TILE, j0 = blockIdx.x * TILE;
    float sum[4][4] = {};
    for (int p0 = 0; p0 < k; p0 += DEPTH) {
        for (int e = threadIdx.x; e < TILE * DEPTH; e += 256) {
            // Neighbouring threads read neighbouring addresses, whichever way the operand lies.
            int pa = a_step == 1 ? e % DEPTH : e / TILE, ia = a_step == 1 ? e / DEPTH : e % TILE;
            int pb = b_step == 1 ? e % DEPTH : e / TILE, jb = b_step == 1 ? e / DEPTH : e % TILE;
            as[pa][ia] = i0 + ia < m && p0 + pa < k ? load_any(a, (i0 + ia) * a_row + (p0 + pa) * a_step, a_code) : 0.0f;
            bs[pb][jb] = j0 + jb < n && p0 + pb < k ? load_any(b, (j0 + jb) * b_row + (p0 + pb) * b_step, b_code) : 0.0f;
        }
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEPTH; p++) {
            float x[4], y[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                x[i] = as[p][ty + 16 * i];
                y[i] = bs[p][tx + 16 * i];
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[i][j] += x[i] * y[j];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int row = i0 + ty + 16 * i, column = j0 + tx + 16 * j;
            if (row >= m || column >= n) continue;
            i64 at = row * out_row + column;
            float x = alpha * sum[i][j];
            if (bias) x += load_any(bias, column, bias_code);
            if (pre_out) store_any(pre_out, at, pre_out_code, x);
            if (gelu >= 0) x = pre_in ? x * gelu_slope(gelu, load_any(pre_in, at, pre_in_code)) : gelu_value(gelu, x);
            if (accumulate) x += load_any(out, at, out_code);
            store_any(out, at, out_code, x);
        }
}

// out[i, j] += product[i, j], the sum rounded once.
extern "C" __global__ void __launch_bounds__(256) add_product(const float* product, void* out, int code, i64 out_row, int m, int n) {
    for (i64 e = thread_index(); e < i64(m) * n; e += thread_count()) {
        i64 at = e / n * out_row + e % n;
        store_any(out, at, code, load_any(out, at, code) + product[e]);
    }
}

// Column sums of a block of rows of dout (M, N): (blocks, N) f32. Threads of a warp take neighbouring columns.
extern "C" __global__ void __launch_bounds__(256)
column_sums(const void* dout, int code, float* partial, i64 m, int n, int rows) {
    __shared__ float part[8][32];
    int lane = threadIdx.x % 32, y = threadIdx.x / 32;
    int column = blockIdx.x * 32 + lane;
    i64 first = i64(blockIdx.y) * rows, last = first + rows < m ? first + rows : m;
    float total = 0.0f;
    if (column < n) {
        for (i64 row = first + y; row < last; row += 8) total += load_any(dout, row * n + column, code);
    }
    part[y][lane] = total;
    __syncthreads();
    if (y == 0 && column < n) {
        total = 0.0f;
        for (int i = 0; i < 8; i++) total += part[i][lane];
        partial[i64(blockIdx.y) * n + column] = total;
    }
}

// A load that stays where it is written: left alone, the compiler moves each to its use, and one row at a time is on its way.
template <class E> TW_FORCE Pack<E> load_now(const E* p) {
    union { u32 words[4]; Pack<E> pack; } x;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.words[0]), "=r"(x.words[1]), "=r"(x.words[2]), "=r"(x.words[3]) : "l"(p));
    return x.pack;
}

// The same for bf16 and f16 on 16 bytes: each thread sums 8 neighbouring columns.
template <class E> TW_FORCE void column_sums_wide(const E* dout, float* partial, i64 m, int n, int rows) {
    __shared__ float part[8][256];
    int lane = threadIdx.x % 32, y = threadIdx.x / 32;
    int column = (blockIdx.x * 32 + lane) * 8;
    i64 first = i64(blockIdx.y) * rows, last = first + rows < m ? first + rows : m;
    float total[8] = {};
    if (column < n) {
        i64 row = first + y;
        // Eight rows on their way at once.
        for (; row + 7 * 8 < last; row += 8 * 8) {
            Pack<E> x[8];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = load_now(dout + (row + 8 * i) * n + column);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) total[j] += to_f32(x[i].v[j]);
        }
        for (; row < last; row += 8) {
            Pack<E> x = load_pack(dout + row * n + column);
#pragma unroll
            for (int j = 0; j < 8; j++) total[j] += to_f32(x.v[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < 8; j++) part[y][lane * 8 + j] = total[j];
    __syncthreads();
    column = blockIdx.x * 256 + threadIdx.x;
    if (column >= n) return;
    float sum = 0.0f;
    for (int i = 0; i < 8; i++) sum += part[i][threadIdx.x];
    partial[i64(blockIdx.y) * n + column] = sum;
}
extern "C" __global__ void __launch_bounds__(256) column_sums_bf16(const bf16* dout, float* partial, i64 m, int n, int rows) {
    column_sums_wide(dout, partial, m, n, rows);
}
extern "C" __global__ void __launch_bounds__(256) column_sums_f16(const f16* dout, float* partial, i64 m, int n, int rows) {
    column_sums_wide(dout, partial, m, n, rows);
}

// Adds the blocks' sums in order.
extern "C" __global__ void __launch_bounds__(256)
finish_sums(const float* partial, int blocks, void* dbias, int code, int accumulate, int n) {
    __shared__ float part[8][33];
    int lane = threadIdx.x % 32, y = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float total = 0.0f;
    if (column < n) {
#pragma unroll 8
        for (int b = y; b < blocks; b += 8) total += partial[i64(b) * n + column];
    }
    part[y][lane] = total;
    __syncthreads();
    if (y > 0 || column >= n) return;
    total = 0.0f;
    for (int i = 0; i < 8; i++) total += part[i][lane];
    if (accumulate) total += load_any(dbias, column, code);
    store_any(dbias, column, code, total);
}
