// The gated product with its tiles dealt out in halves, a candidate for `gated` of linear/gated.cu, behind which this text is put (its own entry renamed).
//
// Tiles of 128 columns of each half take whole turns: 672 tiles of 66 pairs of blocks (8192 rows of ModernBERT-large) take 11 turns for 10.2, 225 (6400 rows of
// mmBERT) 4 for 3.4. Here each pair of blocks gets the same number of half tiles, of 64 columns of each half: two at a time as a whole tile, what is left alone.
// A last column of at most 64 is a half of its own. The operands' copies stay as they are; half a tile multiplies by half of what was copied.

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// d (64 x 128) = [d +] a (64 x 16) b (16 x 128).
TW_FORCE void multiply_half(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." FACTORS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
        "}, %64, %65, p, 1, 1, 0, 0;\n}"
        : R64(0)
        : "l"(a), "l"(b), "r"(add));
}

struct Whole { static constexpr int COLUMNS = 128; };
struct Half { static constexpr int COLUMNS = 64; };

// What one pair of blocks makes, in order: position i is a whole tile, half a tile, or nothing.
struct Deal {
    int pairs, columns, narrow, group, clusters, cluster;
    int wholes, each, rounds, split, singles;
    TW_FORCE Deal(int rows, int width, int group, int clusters, int cluster) : group(group), clusters(clusters), cluster(cluster) {
        pairs = (rows + 255) / 256;
        int left = width % 128;
        narrow = left > 0 && left <= 64;
        columns = width / 128 + (left > 64);
        wholes = pairs * columns;
        // Half tiles of each pair of blocks; of these, whole turns, and in them no more whole tiles than fit.
        each = (2 * wholes + pairs * narrow + clusters - 1) / clusters;
        rounds = each / 2;
        split = max(0, wholes - rounds * clusters);
        singles = 2 * split + pairs * narrow;
    }
    // First column of the result, whether the tile is whole; false: nothing comes at this position.
    TW_FORCE bool at(int i, int& pair, int& column, bool& whole) const {
        int round = i / 2, slot = round * clusters + cluster;
        whole = round < rounds && slot < wholes;
        int tile = slot, part = 0;
        if (whole) {
            if (i & 1) return false;
        } else {
            // Behind the whole tiles a turn takes two half ones, and the last turn of an odd number one.
            int unit = round < rounds ? 2 * (slot - wholes) + (i & 1) : 2 * max(0, rounds * clusters - wholes) + cluster;
            if (unit >= singles) return false;
            if (unit >= 2 * split) {
                pair = unit - 2 * split;
                column = columns * 128;
                return true;
            }
            tile = rounds * clusters + unit / 2;
            part = unit & 1;
        }
        Order{pairs, columns, group}.at(tile, pair, column);
        column = column * 128 + part * 64;
        return true;
    }
};

// p: out. i: rows, columns of out, steps, group.
HOPPER(gated) {
    wait_for_inputs();
    extern __shared__ u8 stages[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    E* out = (E*)job.p[0];
    int rows = job.i[0], width = job.i[1], steps = job.i[2];
    u32 base = (shared_address(stages) + 1023) & ~1023u;
    u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    int rank = int(cluster_rank()), group = threadIdx.x / 128;
    Deal deal(rows, width, job.i[3], gridDim.x / 2, blockIdx.x / 2);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 16);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_sync();
    int stage = 0;
    u32 phase = 0;
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            for (int i = 0; i < deal.each; i++) {
                int pair, column;
                bool whole;
                if (!deal.at(i, pair, column, whole)) continue;
                // The first block's columns of half a tile lie at the end of what it loads.
                int row = (pair * 2 + rank) * TILE_M, col = column + (rank ? width : whole ? 0 : -64);
                for (int k = 0; k < steps; k++) {
                    u32 bar = full + 8 * stage, to = base + stage * STAGE_BYTES, to_b = to + TILE_M * TILE_K * 2 + rank * (TILE_N / 2 * TILE_K * 2);
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(bar, STAGE_BYTES);
                    copy_box(job.a, k * TILE_K, row, to, bar);
                    copy_box_to_both(job.b, k * TILE_K, col, to_b, bar);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
        for (int i = 0; i < deal.each; i++) {
            int pair, column;
            bool whole;
            if (!deal.at(i, pair, column, whole)) continue;
            auto make = [&](auto size) {
                constexpr int COLUMNS = decltype(size)::COLUMNS;
                float d[128];
                int before = 0;
                for (int k = 0; k < steps; k++) {
                    u32 at = base + stage * STAGE_BYTES;
                    // Half a tile is the last 64 columns of what the first block loads and the first 64 of the second's.
                    u64 a = operand(at + (group - 1) * 8192, 8192), b = operand(at + TILE_M * TILE_K * 2 + (COLUMNS == 64 ? 8192 : 0), 8192);
                    barrier_wait(full + 8 * stage, phase);
                    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                    for (int n = 0; n < TILE_K / 16; n++) {
                        if constexpr (COLUMNS == 128) multiply<0, 0>(d, a + 2 * n, b + 2 * n, k + n);
                        else multiply_half(d, a + 2 * n, b + 2 * n, k + n);
                    }
                    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                    // The step before this one is done with its stage, in both blocks.
                    if (k > 0 && lane < 2) barrier_arrive(empty + 8 * before, lane);
                    before = stage;
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) asm volatile("" : "+f"(d[n])::"memory");
                if (lane < 2) barrier_arrive(empty + 8 * before, lane);
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    int row = (pair * 2 + rank) * TILE_M + warp * 16 + h * 8 + lane / 4;
                    E* to = out + i64(row) * width + column + 8 * (lane % 4);
                    int room = row < rows ? width - column - 8 * (lane % 4) : 0;
#pragma unroll
                    for (int j = 0; j < COLUMNS / 8; j += 4) {
                        u32 pairs[4];
#pragma unroll
                        for (int n = 0; n < 4; n++) {
                            int at = 4 * (j + n) + 2 * h;
                            pairs[n] = pack_pair(gelu_fast(d[at]) * d[at + COLUMNS / 2], gelu_fast(d[at + 1]) * d[at + COLUMNS / 2 + 1]);
                        }
                        transpose_quad(pairs, lane);
                        if (8 * j < room) *(uint4*)(to + 8 * j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
                    }
                }
            };
            if (whole) make(Whole{});
            else make(Half{});
        }
    }
    // No block may end while another still arrives at its barriers.
    cluster_sync();
}
#endif
