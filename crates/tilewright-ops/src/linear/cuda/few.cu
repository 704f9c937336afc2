// A linear layer of at most 64 rows on Hopper, where reading the weight and launching take the time. The four blocks of a cluster make the same columns, each
// from a quarter of K, and each adds up sixteen rows of what all have made. Everything a block needs is on its way before anything is computed: weights never
// change, so they are asked for before the kernel in front has ended. A layer normalisation of the input is made by the way.

#define FEW_ROWS 64
#define RANKS 4

TW_FORCE float activated(int activation, float x) {
    // What is not a number stays that.
    if (activation == 2) return x < 0.0f ? 0.0f : x;
    return activation == 0 || activation == 1 ? gelu_value(activation, x) : x;
}

struct alignas(8) Four {
    T v[4];
};

#define PARAMETERS                                                                                                                                             \
    const void *x, const float *norm_weight, const float *norm_bias, float eps, const T *weight, const float *bias, int activation, const float *residual,     \
        void *out, int out_code, int m, int k, int columns, const u8 *soon, i64 soon_bytes, float2 *made, \
        const float2 *given, int parts, int part_width

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

TW_FORCE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }
TW_FORCE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
TW_FORCE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
TW_FORCE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// The address of a place of this block's shared memory in another block of the cluster.
TW_FORCE u32 place_in(const void* at, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(at)), "r"(rank));
    return there;
}
TW_FORCE float2 fetch2(u32 there) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(there) : "memory");
    return x;
}
TW_FORCE float4 fetch4(u32 there) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(there) : "memory");
    return x;
}

// 16 bytes from global to shared memory, or zeros.
TW_FORCE void copy_chunk(u32 to, const void* from, bool real) {
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

// How the matrix units find an operand: rows of 128 bytes whose 16-byte chunks are permuted (chunk ^ row % 8), 8 of them 1024 bytes.
TW_FORCE u64 operand(u32 address) { return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(1) << 16 | (address & 0x3ffff) >> 4; }

#if TW_DTYPE == 2
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif
// d (64 x n) = [d +] a (64 x 16) b (n x 16)^T, for n of 32, 48, 64 and 96.
TW_FORCE void multiply(float (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, p, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
                 : "l"(a), "l"(b), "r"(add));
}
TW_FORCE void multiply(float (&d)[24], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\nwgmma.mma_async.sync.aligned.m64n48k16." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}, %24, %25, p, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23])
                 : "l"(a), "l"(b), "r"(add));
}
TW_FORCE void multiply(float (&d)[32], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
                 : "l"(a), "l"(b), "r"(add));
}
TW_FORCE void multiply(float (&d)[48], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %50, 0;\nwgmma.mma_async.sync.aligned.m64n96k16." TYPES " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, %48, %49, p, 1, 1, 0, 0;\n}"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47])
                 : "l"(a), "l"(b), "r"(add));
}

// A block's place in the layer.
struct Few {
    int rank, first, count;  // of the cluster; its 64 terms of K: the first and how many
    int j0;                  // first column of the tile
    u32 xs, ws;              // rows of x and of the weight in shared memory, 64 terms after 64 terms; sums take their place
    u8* shared;
};
// MADE: columns of the result in a tile.
TW_FORCE Few few_place(u8* raw, int k, int made) {
    Few f;
    u32 base = (shared_address(raw) + 1023) & ~1023u;
    int panels = k / 64;
    f.rank = int(cluster_rank());
    f.first = panels * f.rank / RANKS, f.count = panels * (f.rank + 1) / RANKS - f.first;
    f.j0 = blockIdx.x / RANKS * made;
    f.xs = base, f.ws = base + f.count * 8192;
    f.shared = raw + (base - shared_address(raw));
    return f;
}

// Asks for the rows of the weight. CHUNKS: of 32 of them. GATED: half of them are the gate's.
template <int THREADS, int CHUNKS, bool GATED> TW_FORCE void few_weights(const Few& f, const T* weight, int k, int columns) {
    constexpr int COLUMNS = 32 * CHUNKS, HALF = COLUMNS / 2, PASS = THREADS / 8, PASSES = (COLUMNS + PASS - 1) / PASS;
    int chunk = threadIdx.x % 8, r0 = threadIdx.x / 8;
    const T* from[PASSES];
    bool real[PASSES];
#pragma unroll
    for (int c = 0; c < PASSES; c++) {
        int r = PASS * c + r0, j = f.j0 + (GATED && r >= HALF ? r - HALF : r);
        real[c] = j < columns;
        int row = GATED && r >= HALF ? columns + j : j;
        from[c] = weight + i64(real[c] ? row : 0) * k + f.first * 64 + chunk * 8;
    }
    u32 to = f.ws + r0 * 128 + ((chunk ^ (r0 & 7)) << 4);
    for (int p = 0; p < f.count; p++)
#pragma unroll
        for (int c = 0; c < PASSES; c++)
            if (PASS * c + r0 < COLUMNS) copy_chunk(to + p * (COLUMNS * 128) + c * (PASS * 128), from[c] + p * 64, real[c]);
}

// What is done with the product: bias, activation, residual, type.
struct Finish {
    const float* bias;
    int activation;
    const float* residual;
    void* out;
    int out_code;
    float2* made;  // of each row of the tile mean and squares around it, for a normalisation that comes next
};

// Waits for the operands, multiplies, adds up and closes.
template <int THREADS, int CHUNKS, bool GATED> TW_FORCE void few_product(const Few& f, const Finish& end, int m, int columns) {
    constexpr int COLUMNS = 32 * CHUNKS, HALF = COLUMNS / 2, MADE = GATED ? HALF : COLUMNS, STRIDE = COLUMNS + 8;
    // Two groups of four warps multiply: narrow tiles by every other 64 terms, each with a sum of its own, wide ones by half of the columns.
    constexpr bool BY_TERMS = CHUNKS <= 2;
    constexpr int WIDTH = BY_TERMS ? COLUMNS : HALF, PARTS = BY_TERMS ? 2 : 1, OWN = FEW_ROWS / RANKS;
    int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, int(threadIdx.x / 32), 0);
    int rank = f.rank, count = f.count, j0 = f.j0, out_code = end.out_code, activation = end.activation;
    u32 xs = f.xs, ws = f.ws;
    u8* shared = f.shared;
    const float *bias = end.bias, *residual = end.residual;
    void* out = end.out;
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();

    int group = warp / 4;
    float acc[WIDTH / 2];
    if (group < 2) {
        int start = BY_TERMS ? group : 0;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        for (int p = start; p < count; p += BY_TERMS ? 2 : 1) {
            u64 a = operand(xs + p * 8192), b = operand(ws + p * (COLUMNS * 128) + (BY_TERMS ? 0 : group * (WIDTH * 128)));
#pragma unroll
            for (int s = 0; s < 4; s++) multiply(acc, a + 2 * s, b + 2 * s, p - start + s);
        }
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
        if (count <= start) {
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) acc[i] = 0.0f;
        }
    }
    // Nobody reads the operands any more.
    __syncthreads();
    float* parts = (float*)shared;
    if (group < 2) {
        float* to = parts + ((BY_TERMS ? group * FEW_ROWS : 0) + warp % 4 * 16 + lane / 4) * STRIDE + (BY_TERMS ? 0 : group * WIDTH) + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < WIDTH / 4; i++) *(float2*)(to + i % 2 * 8 * STRIDE + i / 2 * 8) = make_float2(acc[2 * i], acc[2 * i + 1]);
    }
    cluster_arrive();
    cluster_wait();
    u32 there[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) there[r] = place_in(parts + rank * OWN * STRIDE, r);
    auto gathered = [&](int row, int column) {
        float4 part[RANKS * PARTS], sum;
#pragma unroll
        for (int i = 0; i < RANKS * PARTS; i++) part[i] = fetch4(there[i / PARTS] + (i % PARTS * FEW_ROWS * STRIDE + row * STRIDE + column) * 4);
        sum = part[0];
#pragma unroll
        for (int i = 1; i < RANKS * PARTS; i++) sum = {sum.x + part[i].x, sum.y + part[i].y, sum.z + part[i].z, sum.w + part[i].w};
        return sum;
    };
    auto shifted = [&](float4 z, int column) {
        float4 b = bias ? *(const float4*)(bias + column) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        return float4{z.x + b.x, z.y + b.y, z.z + b.z, z.w + b.w};
    };
#pragma unroll
    for (int i = 0; i < (OWN * MADE / 4 + THREADS - 1) / THREADS; i++) {
        int e = threadIdx.x + i * THREADS, row = e / (MADE / 4), column = e % (MADE / 4) * 4;
        int to = rank * OWN + row, j = j0 + column;
        bool real = row < OWN && to < m && j < columns;
        if (row >= OWN) continue;
        i64 at = i64(to) * columns + j;
        float4 r = residual && real ? *(const float4*)(residual + at) : float4{0.0f, 0.0f, 0.0f, 0.0f};
        float4 z = shifted(gathered(row, column), j < columns ? j : 0);
        if (GATED) {
            float4 g = shifted(gathered(row, HALF + column), columns + (j < columns ? j : 0));
            z = {gelu_value(1, z.x) * g.x, gelu_value(1, z.y) * g.y, gelu_value(1, z.z) * g.z, gelu_value(1, z.w) * g.w};
        } else if (activation >= 0) {
            z = {activated(activation, z.x), activated(activation, z.y), activated(activation, z.z), activated(activation, z.w)};
        }
        if (residual) z = {z.x + r.x, z.y + r.y, z.z + r.z, z.w + r.w};
        // Lanes side by side hold a row of the tile.
        constexpr int LANES = MADE / 4;
        if ((LANES == 8 || LANES == 16 || LANES == 32) && end.made) {
            float count = float(min(MADE, columns - j0)), mean = j < columns ? (z.x + z.y) + (z.z + z.w) : 0.0f;
#pragma unroll
            for (int d = LANES / 2; d > 0; d >>= 1) mean += __shfl_xor_sync(0xffffffffu, mean, d);
            mean /= count;
            float a = z.x - mean, b = z.y - mean, c = z.z - mean, d = z.w - mean;
            float squares = j < columns ? (a * a + b * b) + (c * c + d * d) : 0.0f;
#pragma unroll
            for (int d = LANES / 2; d > 0; d >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, d);
            if (column == 0) end.made[blockIdx.x / RANKS * FEW_ROWS + to] = make_float2(mean, squares);
        }
        if (!real) continue;
        if (out_code == 0) {
            *(float4*)((float*)out + at) = z;
        } else {
            Four y;
            y.v[0] = from_f32<T>(z.x), y.v[1] = from_f32<T>(z.y), y.v[2] = from_f32<T>(z.z), y.v[3] = from_f32<T>(z.w);
            *(Four*)((T*)out + at) = y;
        }
    }
    // No block may end while another reads its memory.
    cluster_arrive();
    cluster_wait();
}

// Sums of four values over the lanes of a warp; lane l gets that of value l / 8.
TW_FORCE float sums_of_four(const float (&v)[4]) {
    bool high = threadIdx.x & 16, odd = threadIdx.x & 8;
    float a = (high ? v[2] : v[0]) + __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 16);
    float b = (high ? v[3] : v[1]) + __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 16);
    float c = (odd ? b : a) + __shfl_xor_sync(0xffffffffu, odd ? a : b, 8);
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) c += __shfl_xor_sync(0xffffffffu, c, d);
    return c;
}

// The same from what the layer in front has said of parts of each row: mean and squares around it.
TW_FORCE void moments_of_parts(const float2* given, int parts, int width, int k, float eps, float& mean, float& rstd) {
    int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 4 + lane / 8;
    float2 part[4];
    float share[4], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int p = lane % 8 + 8 * i;
        part[i] = p < parts ? given[p * FEW_ROWS + row] : make_float2(0.0f, 0.0f);
        share[i] = p < parts ? float(min(width, k - p * width)) : 0.0f;
    }
    mean = (share[0] * part[0].x + share[1] * part[1].x) + (share[2] * part[2].x + share[3] * part[3].x);
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) mean += __shfl_xor_sync(0xffffffffu, mean, d);
    mean /= float(k);
#pragma unroll
    for (int i = 0; i < 4; i++) squares += part[i].y + share[i] * (part[i].x - mean) * (part[i].x - mean);
#pragma unroll
    for (int d = 4; d > 0; d >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    rstd = 1.0f / sqrtf(squares / float(k) + eps);
}

// Asks for a block's part of what is read soon to come into the second-level cache, 4096 bytes a thread.
TW_FORCE void bring(const u8* from, i64 bytes) {
    i64 part = (bytes / gridDim.x + 4095) / 4096 * 4096;
    for (i64 at = threadIdx.x * 4096; at < part; at += blockDim.x * 4096) {
        i64 place = part * blockIdx.x + at;
        u32 size = u32(min(i64(4096), bytes - place));
        if (place < bytes) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + place), "r"(size) : "memory");
    }
}

// Mean and inverse deviation of the warp's four rows, of which the cluster's blocks hold a quarter each; lane l gets those of row l / 8.
TW_FORCE void moments(const float4 (&held)[4][2], float2* statistics, int width, int panels, int k, float eps, float& mean, float& rstd) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    // Of each row's quarter the mean and the squares around it; of the row from the four of them.
    float four[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        four[i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) four[i] += (held[i][h].x + held[i][h].y) + (held[i][h].z + held[i][h].w);
    }
    float quarter = sums_of_four(four) / float(width);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float mu = __shfl_sync(0xffffffffu, quarter, 8 * i);
        four[i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float a = held[i][h].x - mu, b = held[i][h].y - mu, d = held[i][h].z - mu, e = held[i][h].w - mu;
            if ((lane + 32 * h) * 4 < width) four[i] += (a * a + b * b) + (d * d + e * e);
        }
    }
    float around = sums_of_four(four);
    if (lane % 8 == 0) statistics[warp * 4 + lane / 8] = make_float2(quarter, around);
    cluster_arrive();
    cluster_wait();
    int other = lane % RANKS;
    float share = 64.0f * float(panels * (other + 1) / RANKS - panels * other / RANKS);
    float2 part = fetch2(place_in(&statistics[warp * 4 + lane / 8], other));
    mean = share * part.x;
    mean += __shfl_xor_sync(0xffffffffu, mean, 1);
    mean += __shfl_xor_sync(0xffffffffu, mean, 2);
    mean /= float(k);
    float squares = part.y + share * (part.x - mean) * (part.x - mean);
    squares += __shfl_xor_sync(0xffffffffu, squares, 1);
    squares += __shfl_xor_sync(0xffffffffu, squares, 2);
    rstd = 1.0f / sqrtf(squares / float(k) + eps);
}

// CHUNKS: of 32 rows of the weight in a tile. NORM: x is the f32 stream, and is normalised where there is a norm. GATED: half of the tile's rows are the gate's.
template <int CHUNKS, bool NORM, bool GATED> TW_FORCE void few(PARAMETERS) {
    constexpr int THREADS = NORM ? 512 : 256;
    extern __shared__ u8 raw[];
    __shared__ float2 statistics[FEW_ROWS];
    Few f = few_place(raw, k, 32 * CHUNKS / (GATED ? 2 : 1));
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, panels = k / 64, first = f.first, count = f.count;
    asm volatile("griddepcontrol.launch_dependents;");
    few_weights<THREADS, CHUNKS, GATED>(f, weight, k, columns);
    bring(soon, soon_bytes);
    if (NORM) {
        int width = count * 64;
        float4 scale[2], shift[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int j = (lane + 32 * h) * 4;
            scale[h] = {1.0f, 1.0f, 1.0f, 1.0f}, shift[h] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (norm_weight && j < width) {
                scale[h] = *(const float4*)(norm_weight + first * 64 + j);
                if (norm_bias) shift[h] = *(const float4*)(norm_bias + first * 64 + j);
            }
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
        float4 held[4][2];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = warp * 4 + i;
            const float* from = (const float*)x + i64(row) * k + first * 64;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int j = (lane + 32 * h) * 4;
                held[i][h] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (j < width && row < m) held[i][h] = *(const float4*)(from + j);
            }
        }
        float mean = 0.0f, rstd = 1.0f;
        if (given) moments_of_parts(given, parts, part_width, k, eps, mean, rstd);
        else if (norm_weight) moments(held, statistics, width, panels, k, eps, mean, rstd);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = warp * 4 + i;
            float mu = __shfl_sync(0xffffffffu, mean, 8 * i), r = __shfl_sync(0xffffffffu, rstd, 8 * i);
#pragma unroll
            for (int h = 0; h < 2; h++) {
                int j = (lane + 32 * h) * 4;
                if (j >= width) continue;
                Four y;
                y.v[0] = from_f32<T>((held[i][h].x - mu) * r * scale[h].x + shift[h].x);
                y.v[1] = from_f32<T>((held[i][h].y - mu) * r * scale[h].y + shift[h].y);
                y.v[2] = from_f32<T>((held[i][h].z - mu) * r * scale[h].z + shift[h].z);
                y.v[3] = from_f32<T>((held[i][h].w - mu) * r * scale[h].w + shift[h].w);
                *(Four*)(f.shared + j / 64 * 8192 + row * 128 + ((j % 64 / 8 ^ (row & 7)) << 4) + j % 8 * 2) = y;
            }
        }
    } else {
        asm volatile("griddepcontrol.wait;" ::: "memory");
        int chunk = threadIdx.x % 8, r0 = threadIdx.x / 8;
        u32 to = f.xs + r0 * 128 + ((chunk ^ (r0 & 7)) << 4);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int row = 32 * i + r0;
            const T* from = (const T*)x + i64(row < m ? row : 0) * k + first * 64 + chunk * 8;
            for (int p = 0; p < count; p++) copy_chunk(to + p * 8192 + i * 4096, from + p * 64, row < m);
        }
    }
    few_product<THREADS, CHUNKS, GATED>(f, Finish{bias, activation, residual, out, out_code, made}, m, columns);
}

#define ARGUMENTS x, norm_weight, norm_bias, eps, weight, bias, activation, residual, out, out_code, m, k, columns, soon, soon_bytes, made, given, parts, part_width
#define ENTRY(name, chunks, norm, gated)                                                                                                                       \
    extern "C" __global__ void __cluster_dims__(RANKS, 1, 1) __launch_bounds__(norm ? 512 : 256) name(PARAMETERS) { few<chunks, norm, gated>(ARGUMENTS); }
#else
#define ENTRY(name, chunks, norm, gated) extern "C" __global__ void name(PARAMETERS) {}
#endif

ENTRY(plain_1, 1, false, false)
ENTRY(plain_2, 2, false, false)
ENTRY(plain_3, 3, false, false)
ENTRY(plain_4, 4, false, false)
ENTRY(plain_6, 6, false, false)
ENTRY(normed_1, 1, true, false)
ENTRY(normed_2, 2, true, false)
ENTRY(normed_3, 3, true, false)
ENTRY(normed_4, 4, true, false)
ENTRY(normed_6, 6, true, false)
ENTRY(gated_2, 2, true, true)
ENTRY(gated_4, 4, true, true)
ENTRY(gated_6, 6, true, true)
