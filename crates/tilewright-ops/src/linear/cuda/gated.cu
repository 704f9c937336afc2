// A gated product on Hopper by the tiles of tiles.cuh (elsewhere the entry is empty and never launched): a tile is 128 columns of the activated half and the
// same 128 of the gate, which one thread holds in the same registers, so that only their product leaves the chip.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The exact GELU to 2e-7, by a rational form of the error function's complement (Abramowitz and Stegun 7.1.26).
TW_FORCE float gelu_fast(float x) {
    float size = fabsf(x), t;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(1.0f + (0.3275911f * 0.7071067811865476f) * size));
    float series = t * (0.127414796f + t * (-0.142248368f + t * (0.7107068705f + t * (-0.7265760135f + t * 0.5307027145f))));
    float tail = series * exp2_fast(x * x * (-0.5f * LOG2E));
    // Where the tail is zero x may be infinite.
    return fmaxf(x, 0.0f) - fminf(size, 64.0f) * tail;
}

// p: out. i: rows, columns of out, steps, group.
HOPPER(gated) {
    wait_for_inputs();
    E* out = (E*)job.p[0];
    int rows = job.i[0], width = job.i[1];
    Order order{(rows + 255) / 256, (width + 127) / 128, job.i[3], 128, width};
    walk<0, 0, 0>(job, order, job.i[2], [](int) { return true; }, [](int, int) {}, [&](float (&d)[128], int tile, int column) {
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = tile * TILE_M + warp * 16 + h * 8 + lane / 4;
            E* to = out + i64(row) * width + column * 128 + 8 * (lane % 4);
            int room = row < rows ? width - column * 128 - 8 * (lane % 4) : 0;
#pragma unroll
            for (int j = 0; j < 16; j += 4) {
                u32 pairs[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int at = 4 * (j + i) + 2 * h;
                    pairs[i] = pack_pair(gelu_fast(d[at]) * d[at + 64], gelu_fast(d[at + 1]) * d[at + 65]);
                }
                transpose_quad(pairs, lane);
                if (8 * j < room) *(uint4*)(to + 8 * j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    });
}
#else
extern "C" __global__ void gated(const __grid_constant__ Job job) {}
#endif
