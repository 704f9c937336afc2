// A product on Hopper, by the tiles of tiles.cuh, with the derivative of GPT-2's GELU behind it and what else can be had there (sm_90a; elsewhere the entry is
// empty and never launched). All eight warps do it in registers while the next steps arrive: three warps of their own, beside the next tile's product, took longer.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

TW_FORCE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// GPT-2's GELU as x * sigmoid(2u), and its slope, to a few f32 roundings: far below what 16 bits hold.
constexpr float TWICE = 2.0f * 0.7978845608028654f;
TW_FORCE void gelu(float x, float& value, float& slope) {
    // Beyond 100 the sigmoid is 0 or 1, and the square must not become infinite.
    float square = fminf(x * x, 1e4f);
    float sigmoid = reciprocal(1.0f + exp2_fast(-x * fmaf(square, 0.044715f * TWICE * LOG2E, TWICE * LOG2E)));
    value = x * sigmoid;
    slope = fmaf(value * (1.0f - sigmoid), fmaf(square, 3.0f * 0.044715f * TWICE, TWICE), sigmoid);
}

TW_FORCE float low(u32 pair) { return to_f32(E{u16(pair)}); }
TW_FORCE float high(u32 pair) { return to_f32(E{u16(pair >> 16)}); }
TW_FORCE u32 pack_two(float a, float b) {
    u32 r;
#if TW_TYPE == 2
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
#endif
    return r;
}

// A thread's two rows of a tile and its first columns: of packs of eight as they are stored, a pack in every 32.
struct Place {
    int m, n, row, column;
    TW_FORCE Place(const Job& job) : m(job.i[0]), n(job.i[1]) {}
    TW_FORCE void begin(int tile, int tile_column) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        row = tile * TILE_M + warp * 16 + lane / 4;
        column = tile_column * TILE_N + 8 * (lane % 4);
    }
    TW_FORCE bool real(int h, int g) const { return row + 8 * h < m && column + 32 * g < n; }
    TW_FORCE i64 at(int h, int g) const { return i64(row + 8 * h) * n + column + 32 * g; }
};
TW_FORCE void store(E* to, const u32 (&w)[4]) { *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]); }

// dx = (a b) * gelu'(pre), and where asked for gelu(pre) and sums over the rows of each tile of dx, partial[tile][column].
// p: pre, dx, activation or null, partial or null. i: rows, columns, steps.
// `early(tile, column)` comes before the last step, for loads; `use(d, turn)` gets the tile as the matrix units leave it: d[4 j + 2 h + b] is row
// 16 warp + 8 h + lane / 4 of the group, column 8 j + 2 (lane % 4) + b.
struct Derive {
    Place place;
    const E* pre;
    E *dx, *activation;
    float* partial;
    u32 turn = 0;
    uint4 held[2][8];
    TW_FORCE Derive(const Job& job) : place(job), pre((const E*)job.p[0]), dx((E*)job.p[1]), activation((E*)job.p[2]), partial((float*)job.p[3]) {}
    TW_FORCE void load(int g) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            held[h][g] = make_uint4(0, 0, 0, 0);
            if (place.real(h, g)) held[h][g] = *(const uint4*)(pre + place.at(h, g));
        }
    }
    // As many as there are registers for; the others when those are done with.
    static constexpr int EARLY = 3;
    TW_FORCE void early(int tile, int column) {
        place.begin(tile, column);
#pragma unroll
        for (int g = 0; g < EARLY; g++) load(g);
    }
    TW_FORCE void use(const float (&d)[128]) {
        __shared__ float part[2][8][TILE_N];
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
#pragma unroll
        for (int g = 0; g < 8; g++) {
            // Over this thread's two rows, of columns 8 i + 2 (lane % 4) + b.
            float sums[8];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                u32 x[4] = {held[h][g].x, held[h][g].y, held[h][g].z, held[h][g].w}, y[4], v[4];
                transpose_quad(x, lane);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int j = 4 * g + i;
                    float v0, v1, s0, s1;
                    gelu(low(x[i]), v0, s0);
                    gelu(high(x[i]), v1, s1);
                    s0 *= d[4 * j + 2 * h];
                    s1 *= d[4 * j + 2 * h + 1];
                    // Rows behind the end have products of zero.
                    sums[2 * i] = h ? sums[2 * i] + s0 : s0;
                    sums[2 * i + 1] = h ? sums[2 * i + 1] + s1 : s1;
                    y[i] = pack_two(s0, s1);
                    v[i] = pack_two(v0, v1);
                }
                transpose_quad(y, lane);
                if (activation) transpose_quad(v, lane);
                if (!place.real(h, g)) continue;
                store(dx + place.at(h, g), y);
                if (activation) store(activation + place.at(h, g), v);
            }
            if (g + EARLY < 8) load(g + EARLY);
            if (partial) {
                // Over the eight lanes that have the same columns, each of which ends with one of the eight sums.
#pragma unroll
                for (int left = 4; left > 0; left >>= 1) {
                    bool upper = lane & (4 * left);
#pragma unroll
                    for (int i = 0; i < left; i++) {
                        float mine = upper ? sums[i + left] : sums[i], other = upper ? sums[i] : sums[i + left];
                        sums[i] = mine + __shfl_xor_sync(0xffffffffu, other, 4 * left);
                    }
                }
                part[turn][warp][32 * g + lane / 8 * 8 + 2 * (lane % 4) + lane / 4 % 2] = sums[0];
            }
        }
        if (!partial) return;
        // Over the warps, in order. Two places by turns: one barrier a tile is enough.
        asm volatile("bar.sync 1, 256;" ::: "memory");
        int j = threadIdx.x - 128, at = place.column - 8 * (lane % 4) + j, tile = (place.row - warp * 16 - lane / 4) / TILE_M;
        if (tile * TILE_M < place.m && at < place.n) {
            float total = 0.0f;
#pragma unroll
            for (int w = 0; w < 8; w++) total += part[turn][w][j];
            partial[i64(tile) * place.n + at] = total;
        }
        turn ^= 1;
    }
};

HOPPER(backward_gelu) {
    Order order{(job.i[0] + 2 * TILE_M - 1) / (2 * TILE_M), (job.i[1] + TILE_N - 1) / TILE_N, 8};
    Derive behind(job);
    walk<0, 1, 0>(
        job, order, job.i[2], [](int) { return true; }, [&](int tile, int column) { behind.early(tile, column); },
        [&](float (&d)[128], int, int) { behind.use(d); });
}

#else
extern "C" __global__ void backward_gelu(const __grid_constant__ Job job) {}
#endif
