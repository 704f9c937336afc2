// Products on Hopper: matrix units fed by the copy engine (sm_90a). What is done with a tile of the product while it is in registers is the kernel's own.
//
// A block multiplies a tile of 128 x 256, two blocks of a cluster one of 256 x 256: each loads its own rows and half of the columns that both use.
// One thread keeps STAGES steps of 64 terms in flight, two groups of four warps multiply 64 rows each. Blocks stay and take tile after tile, in an order that
// keeps the operands in the second-level cache.

typedef Storage<TW_TYPE>::Type E;

#define TILE_M 128
#define TILE_N 256
#define TILE_K 64
#define STAGES 4
#define STAGE_BYTES ((TILE_M + TILE_N) * TILE_K * 2)
#define THREADS 384
#define LOG2E 1.4426950408889634f

// The only parameter of the entries that multiply: two descriptors of the copy engine, then what each entry says.
struct alignas(64) Job {
    u8 a[128], b[128];
    u64 p[4];
    int i[8];
};

TW_FORCE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TW_FORCE u32 pack_pair(float a, float b) {
    return u32(from_f32<E>(a).bits) | u32(from_f32<E>(b).bits) << 16;
}
// Lane q of each four gives four words and gets word q of all four, in their order.
TW_FORCE void transpose_quad(u32 (&w)[4], int lane) {
    bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        if (odd) w[i] = got;
        else w[i + 1] = got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
        if (high) w[i] = got;
        else w[i + 2] = got;
    }
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL


TW_FORCE u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

TW_FORCE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Arrives at the barrier at the same place of a block of the cluster.
TW_FORCE void barrier_arrive(u32 barrier, u32 rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier), "r"(rank) : "memory");
}
TW_FORCE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
TW_FORCE u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Copies a box at (x, y) of a matrix to shared memory of this block, or to the same place in both blocks of the cluster.
TW_FORCE void copy_box(const u8* map, int x, int y, u32 to, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(map), "r"(x),
                 "r"(y), "r"(barrier)
                 : "memory");
}
TW_FORCE void copy_box_to_both(const u8* map, int x, int y, u32 to, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(barrier), "h"(u16(3))
        : "memory");
}

// How the matrix units find an operand: rows of 128 bytes, swizzled, 8 of them 1024 bytes; `leading` between blocks of 64 rows of an operand whose
// rows run along the 128 bytes.
TW_FORCE u64 operand(u32 address, u32 leading) { return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(leading >> 4) << 16 | (address & 0x3ffff) >> 4; }

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define R64(i) R16(i), R16(i + 16), R16(i + 32), R16(i + 48)
#if TW_TYPE == 1
#define FACTORS "f16.f16"
#else
#define FACTORS "bf16.bf16"
#endif

// d (64 x 256) = [d +] a (64 x 16) b (16 x 256). A_ROWS, B_ROWS: the operand's rows (not its terms) lie side by side in memory.
template <int A_ROWS, int B_ROWS> TW_FORCE void multiply(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." FACTORS " {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
        "}, %128, %129, p, 1, 1, %131, %132;\n}"
        : R64(0), R64(64)
        : "l"(a), "l"(b), "r"(add), "n"(A_ROWS), "n"(B_ROWS));
}

// Which tile comes n-th: `group` pairs of row tiles side by side, then the next column of tiles. The first block of a cluster loads the rows of b from
// `step` times the tile's column on, the second those `apart` behind them.
struct Order {
    int pairs, columns, group, step = TILE_N, apart = TILE_N / 2;
    TW_FORCE int count() const { return pairs * columns; }
    TW_FORCE void at(int n, int& pair, int& column) const {
        int first = n / (group * columns) * group, width = min(group, pairs - first);
        n -= first * columns;
        column = n / width;
        pair = first + n % width;
    }
};

// Walks the tiles. `wanted(pair)`: whether these rows are to be made at all. `use(d, pair * 2 + rank, column)`: the tile in registers, as the matrix
// units leave it: d[4 j + 2 h + b] is row 16 warp + 8 h + lane / 4 of the group, column 8 j + 2 (lane % 4) + b. `early(row tile, column)` comes before
// the last step: loads that it begins arrive while the matrix units work.
template <int A_ROWS, int B_ROWS, int CLEAR, class Wanted, class Early, class Use>
TW_FORCE void walk(const Job& job, const Order& order, int steps, Wanted wanted, Early early, Use use) {
    extern __shared__ u8 raw[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    u32 base = (shared_address(raw) + 1023) & ~1023u;
    u32 full = shared_address(barriers), empty = full + 8 * STAGES;
    u32 rank = cluster_rank();
    int group = threadIdx.x / 128, cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
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
            for (int n = cluster; n < order.count(); n += clusters) {
                int pair, column;
                order.at(n, pair, column);
                if (!wanted(pair)) continue;
                int row = (pair * 2 + rank) * TILE_M, col = column * order.step + int(rank) * order.apart;
                for (int k = 0; k < steps; k++) {
                    u32 bar = full + 8 * stage, to = base + stage * STAGE_BYTES, to_b = to + TILE_M * TILE_K * 2 + rank * (TILE_N / 2 * TILE_K * 2);
                    barrier_wait(empty + 8 * stage, phase ^ 1);
                    barrier_expect(bar, STAGE_BYTES);
                    if (A_ROWS) {
                        copy_box(job.a, row, k * TILE_K, to, bar);
                        copy_box(job.a, row + 64, k * TILE_K, to + 8192, bar);
                    } else {
                        copy_box(job.a, k * TILE_K, row, to, bar);
                    }
                    if (B_ROWS) {
                        copy_box_to_both(job.b, col, k * TILE_K, to_b, bar);
                        copy_box_to_both(job.b, col + 64, k * TILE_K, to_b + 8192, bar);
                    } else {
                        copy_box_to_both(job.b, k * TILE_K, col, to_b, bar);
                    }
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        int lane = threadIdx.x % 32;
        constexpr u64 A_STEP = A_ROWS ? 128 : 2, B_STEP = B_ROWS ? 128 : 2;
        for (int n = cluster; n < order.count(); n += clusters) {
            int pair, column;
            order.at(n, pair, column);
            if (!wanted(pair)) continue;
            float d[128];
#pragma unroll
            for (int i = 0; i < 128 && CLEAR; i++) d[i] = 0.0f;
            int before = 0;
            for (int k = 0; k < steps; k++) {
                if (k + 1 == steps) early(pair * 2 + int(rank), column);
                u32 at = base + stage * STAGE_BYTES;
                u64 a = operand(at + (group - 1) * 8192, 8192), b = operand(at + TILE_M * TILE_K * 2, 8192);
                barrier_wait(full + 8 * stage, phase);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int i = 0; i < TILE_K / 16; i++) multiply<A_ROWS, B_ROWS>(d, a + i * A_STEP, b + i * B_STEP, CLEAR ? 1 : k + i);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                // The step before this one is done with its stage, in both blocks.
                if (k > 0 && lane < 2) barrier_arrive(empty + 8 * before, lane);
                before = stage;
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
            for (int i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
            if (lane < 2) barrier_arrive(empty + 8 * before, lane);
            use(d, pair * 2 + int(rank), column);
        }
    }
    // No block may end while another still arrives at its barriers.
    cluster_sync();
}

#define HOPPER(entry) extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) entry(const __grid_constant__ Job job)
#endif

