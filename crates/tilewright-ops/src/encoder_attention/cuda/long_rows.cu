// Encoder attention of long rows of which every query sees every key. Behind hopper.cu, whose parts it uses.
//
// A warpgroup that gives most of its registers away copies tiles of keys and values into a ring of STAGES places; each of the others owns 64 queries, waits for full
// places and gives empty ones back, so that none waits for another one's copies. The scores of the next tile and the product with the values of this one are
// under way while exponentials are made, and the groups hand on the right to begin products, so that one makes exponentials while the other multiplies.

#if TW_HEAD == 64 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace ring {
constexpr int GROUPS = 2, KEYS = 128, STAGES = 5, COPIERS = 128;
constexpr int PARTS = KEYS / 8;  // groups of eight columns of the scores
constexpr int ALL = 128 * GROUPS + COPIERS;
constexpr int QUERIES = 64 * GROUPS;

TW_FORCE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Only the last tile of a row has places behind the row's end.
struct Middle { static constexpr bool value = false; };
struct Last { static constexpr bool value = true; };

// A place of the ring and which time round it is.
struct Place {
    int stage = 0;
    u32 phase = 0;
    TW_FORCE void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

// `COUNT` rows of a strided matrix from row `first` on, by the copying warps; zeros from row `limit` on.
template <int COUNT> TW_FORCE void copy_rows(T* tile, const T* from, i64 stride, int first, int limit) {
    constexpr int STEP = COPIERS / 8;
    int lane = threadIdx.x - 128 * GROUPS, row = lane / 8, chunk = lane % 8;
    const T* at = from + (first + row) * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < COUNT / STEP; i++) {
        int r = row + i * STEP;
        bool real = first + r < limit;
        copy_chunk(tile + r * D + ((chunk ^ (r & 7)) * 8), real ? at : from, real);
        at += STEP * stride;
    }
}

#define SCORES \
    "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define S4(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
// c (64, 128) = [c +] a (64, 16) b (16, 128), b 16 columns of a tile, transposed.
TW_FORCE void multiply_wide(float (&c)[16][4], u64 a, u64 b, int add) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16." TYPES " " SCORES ", %64, %65, p, 1, 1, 0, 0;\n}"
                 : S4(0), S4(1), S4(2), S4(3), S4(4), S4(5), S4(6), S4(7), S4(8), S4(9), S4(10), S4(11), S4(12), S4(13), S4(14), S4(15)
                 : "l"(a), "l"(b), "r"(add));
}
TW_FORCE void settle_scores(float (&c)[PARTS][4]) {
#pragma unroll
    for (int n = 0; n < PARTS; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+f"(c[n][e])::"memory");
}
TW_FORCE void settle_weights(u32 (&a)[KEYS / 16][4]) {
#pragma unroll
    for (int n = 0; n < KEYS / 16; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) asm volatile("" : "+r"(a[n][e])::"memory");
}
TW_FORCE void begin_scores(float (&s)[PARTS][4], u64 q, const T* keys) {
    u64 b = descriptor(keys);
#pragma unroll
    for (int step = 0; step < D / 16; step++) multiply_wide(s, q + 2 * step, b + 2 * step, step > 0);
    commit();
}
TW_FORCE void begin_sums(float (&acc)[8][4], const u32 (&p)[KEYS / 16][4], const T* values) {
    u64 b = descriptor(values);
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) multiply(acc, p[step], b + 128 * step);
    commit();
}
TW_FORCE void weights_of(u32 (&p)[KEYS / 16][4], const float (&s)[PARTS][4]) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        p[step][0] = pack2(s[2 * step][0], s[2 * step][1]);
        p[step][1] = pack2(s[2 * step][2], s[2 * step][3]);
        p[step][2] = pack2(s[2 * step + 1][0], s[2 * step + 1][1]);
        p[step][3] = pack2(s[2 * step + 1][2], s[2 * step + 1][3]);
    }
}

// Scores to exponentials relative to the new maximum; `fade` brings what was summed before to it.
TW_FORCE void exponentials(float (&s)[PARTS][4], float (&most)[2], float (&sum)[2], float (&fade)[2], float scale2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = most[r];
#pragma unroll
        for (int n = 0; n < PARTS; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = quad_max(top);
        // A query may see no key of its first tiles.
        float base = top == -TW_INFINITY ? 0.0f : top * scale2, total = 0.0f;
        fade[r] = exp2_fast(most[r] * scale2 - base);
        most[r] = top;
#pragma unroll
        for (int n = 0; n < PARTS; n++)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; e++) {
                s[n][e] = exp2_fast(s[n][e] * scale2 - base);
                total += s[n][e];
            }
        sum[r] = sum[r] * fade[r] + total;
    }
}
TW_FORCE void fade_sums(float (&acc)[8][4], const float (&fade)[2]) {
    // Maxima seldom change behind the first tiles.
    if (!__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] *= fade[e / 2];
}

// The right to begin products goes round the groups.
TW_FORCE void wait_for_turn(int group) {
    asm volatile("bar.sync %0, 256;" ::"r"(group + 1) : "memory");
}
TW_FORCE void pass_turn(int group) {
    asm volatile("bar.arrive %0, 256;" ::"r"((group + 1) % GROUPS + 1) : "memory");
}
}  // namespace ring

extern "C" __global__ void __launch_bounds__(ring::ALL, 1)
forward(const T* q_all, i64 q_width, const T* kv, i64 kv_width, const int* row_starts, const int* query_starts, const int* tokens, const int* positions, const int* option_ids,
        int rows, i64 window, T* out, int heads, int, float scale) {
    using namespace ring;
    extern __shared__ u8 raw[];
    __shared__ alignas(8) u64 barriers[2 * STAGES];
    Call c = {row_starts, query_starts, tokens, positions, option_ids, rows, window};
    Tile tile;
    if (!find_tile<QUERIES>(c, blockIdx.x, tile)) return;
    int h = blockIdx.y, warp = threadIdx.x / 32;
    i64 width = i64(heads) * D;
    // Queries, then the ring: keys and values of a tile.
    T *qt = (T*)(raw + (0u - address(raw) & 1023u)), *places = qt + QUERIES * D;
    int end = (tile.length + KEYS - 1) / KEYS;
    u32 full = address(barriers), empty = full + 8 * STAGES;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            barrier_init(full + 8 * s, COPIERS);
            barrier_init(empty + 8 * s, 4 * GROUPS);
        }
    }
    __syncthreads();
    if (warp >= 4 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
        const T *k = kv + i64(tile.start) * kv_width + h * D, *v = k + width;
        // The queries are part of the first place's copies.
        copy_rows<QUERIES>(qt, q_all + i64(tile.first) * q_width + h * D, q_width, 0, tile.queries);
        Place place;
        int before = 0;
        for (int at = 0; at < end; at++) {
            barrier_wait(empty + 8 * place.stage, place.phase ^ 1);
            T* to_place = places + place.stage * (2 * KEYS * D);
            copy_rows<KEYS>(to_place, k, kv_width, at * KEYS, tile.length);
            copy_rows<KEYS>(to_place + KEYS * D, v, kv_width, at * KEYS, tile.length);
            commit_copies();
            if (at > 0) {
                // What this thread copied one tile ago has arrived; then it is shown to the matrix units.
                asm volatile("cp.async.wait_group 1;" ::: "memory");
                asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
                barrier_arrive(full + 8 * before);
            }
            before = place.stage;
            place.next();
        }
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        barrier_arrive(full + 8 * before);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
        int group = warp / 4, lane = threadIdx.x % 32, t = lane % 4;
        // It is launched where every query sees every key of its row: only keys behind the row's end are hidden.
        auto hide = [&](float (&s)[PARTS][4], int k0) {
            int room = tile.length - k0 - 2 * t;
            if (k0 + KEYS <= tile.length) return;
#pragma unroll
            for (int n = 0; n < PARTS; n++)
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (8 * n + e % 2 >= room) s[n][e] = -TW_INFINITY;
        };
        float acc[8][4], most[2] = {-TW_INFINITY, -TW_INFINITY}, sum[2] = {0.0f, 0.0f}, fade[2];
#pragma unroll
        for (int n = 0; n < 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) acc[n][e] = 0.0f;
        float scale2 = scale * LOG2E, s[PARTS][4];
        u32 p[KEYS / 16][4];
        u64 q = descriptor(qt + group * 64 * D);
        Place place;
        auto keys = [&](int stage) { return places + stage * (2 * KEYS * D); };
        if (group == GROUPS - 1 && end > 1) pass_turn(group);
        barrier_wait(full, 0);
        begin();
        begin_scores(s, q, keys(0));
        finish<0>();
        settle_scores(s);
        hide(s, 0);
        exponentials(s, most, sum, fade, scale2);
        weights_of(p, s);
        int before = 0;
        place.next();
        // No branch between the beginning of products and the wait for them: behind one the compiler waits at once.
        auto advance = [&](auto last, int at) {
            barrier_wait(full + 8 * place.stage, place.phase);
            wait_for_turn(group);
            settle_weights(p);
            settle(acc);
            begin();
            begin_scores(s, q, keys(place.stage));
            begin_sums(acc, p, keys(before) + KEYS * D);
            if (!last.value || group + 1 < GROUPS) pass_turn(group);
            finish<1>();
            settle_scores(s);
            if (last.value) hide(s, at * KEYS);
            exponentials(s, most, sum, fade, scale2);
            // They are made before the wait, beside the product: over a branch, never taken, the compiler does not pull it forward. That takes registers.
            settle_scores(s);
            if (sum[0] + sum[1] < 0.0f) asm volatile("trap;");
            finish<0>();
            settle(acc);
            settle_weights(p);
            if (lane == 0) barrier_arrive(empty + 8 * before);
            fade_sums(acc, fade);
            weights_of(p, s);
            before = place.stage;
            place.next();
        };
        for (int at = 1; at + 1 < end; at++) advance(Middle{}, at);
        if (end > 1) advance(Last{}, end - 1);
        settle_weights(p);
        settle(acc);
        begin();
        begin_sums(acc, p, keys(before) + KEYS * D);
        finish<0>();
        settle(acc);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float inverse = 1.0f / quad_sum(sum[r]);
#pragma unroll
            for (int n = 0; n < 8; n++) acc[n][2 * r] *= inverse, acc[n][2 * r + 1] *= inverse;
        }
        store_rows(out + i64(tile.first) * width + h * D, width, warp * 16, tile.queries, acc, 1.0f);
    }
}
#endif
