// Reductions over rows of logits. TW_KEPT: storage of kept logits (0 f32, 1 f16: 11 bits of a logit, where bf16 would keep 8). TW_GRAD: storage of the
// gradient of the logits, which is that of the weight.

typedef Storage<TW_KEPT>::Type Kept;
typedef Storage<TW_GRAD>::Type Grad;
#define WARPS 8

// max, sum of exp(logit - max), the target's logit: one of each a row, one array after the other.
extern "C" __global__ void __launch_bounds__(256) begin(float* stats, int n) {
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= n) return;
    stats[i] = -TW_INFINITY;
    stats[n + i] = 0.0f;
    stats[2 * n + i] = 0.0f;
}

// Takes in a tile of f32 logits (rows, columns `first`..), one warp a row: the maximum first, then the sum. Where `kept` is not null, logits are kept
// less the largest seen so far, which goes to `shifts`: what is near the maximum keeps its digits in 16 bits, however large it is.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
absorb(const float* tile, i64 tile_ld, const int* targets, int first, int columns, float* max_of, float* sum_of, float* target_of, Kept* kept,
       i64 kept_ld, float* shifts, int tiles, int tile_index, int rows) {
    int row = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    tile += row * tile_ld;
    int whole = tile_ld % 4 == 0 && u64(tile) % 16 == 0 ? columns / 128 * 128 : 0;
    float most = -TW_INFINITY, sum = 0.0f, before = max_of[row];
    for (int j = lane * 4; j < whole; j += 128) {
        float4 x = *(const float4*)(tile + j);
        most = fmaxf(fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)), most);
    }
    for (int j = whole + lane; j < columns; j += 32) most = fmaxf(most, tile[j]);
    most = fmaxf(before, warp_max(most));
    if (kept) kept += row * kept_ld + first;
    auto take = [&](float x, int j) {
        x -= most;
        sum += expf(x);
        if (kept) kept[j] = from_f32<Kept>(TW_KEPT == 1 ? fmaxf(x, -65504.0f) : x);
    };
    for (int j = lane * 4; j < whole; j += 128) {
        float4 x = *(const float4*)(tile + j);
        take(x.x, j);
        take(x.y, j + 1);
        take(x.z, j + 2);
        take(x.w, j + 3);
    }
    for (int j = whole + lane; j < columns; j += 32) take(tile[j], j);
    sum = warp_sum(sum);
    if (lane == 0) {
        max_of[row] = most;
        sum_of[row] = sum + (before == -TW_INFINITY ? 0.0f : sum_of[row] * expf(before - most));
        if (kept) shifts[i64(row) * tiles + tile_index] = most;
        int t = targets[row] - first;
        if (t >= 0 && t < columns) target_of[row] = tile[t];
    }
}

// lse = max + ln(sum), loss = (max - target) + ln(sum); both 0 where the row does not count.
extern "C" __global__ void __launch_bounds__(256)
finish(const float* max_of, const float* sum_of, const float* target_of, const int* targets, int ignore, float* losses, float* lse, int rows) {
    int row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    bool counts = targets[row] != ignore;
    float ln = logf(sum_of[row]);
    if (losses) losses[row] = counts ? (max_of[row] - target_of[row]) + ln : 0.0f;
    lse[row] = counts ? max_of[row] + ln : 0.0f;
}

// softmax - onehot of columns `first`.. of some rows, 0 for rows that do not count. `grad` may be the memory of `logits` where both have the same width:
// each element is read before it is written, by the same thread. `shifts`: what was taken from the logits of each tile of `tile` columns, or null.
template <class L> TW_FORCE void gradients_body(const L* logits, i64 logits_ld, const float* shifts, int tile, int tiles, const int* targets, int ignore,
                                               const float* lse, int first, int columns, Grad* grad, i64 grad_ld) {
    int row = blockIdx.y, target = targets[row];
    bool counts = target != ignore;
    float down = lse[row];
    logits += row * logits_ld;
    grad += row * grad_ld;
    for (int j = blockIdx.x * blockDim.x + threadIdx.x; j < columns; j += gridDim.x * blockDim.x) {
        float shift = shifts ? shifts[i64(row) * tiles + j / tile] - down : -down;
        float g = counts ? expf(to_f32(logits[j]) + shift) - (first + j == target ? 1.0f : 0.0f) : 0.0f;
        grad[j] = from_f32<Grad>(g);
    }
}
extern "C" __global__ void __launch_bounds__(256)
gradients_kept(const Kept* logits, i64 logits_ld, const float* shifts, int tile, int tiles, const int* targets, int ignore, const float* lse, int first,
               int columns, Grad* grad, i64 grad_ld) {
    gradients_body(logits, logits_ld, shifts, tile, tiles, targets, ignore, lse, first, columns, grad, grad_ld);
}
extern "C" __global__ void __launch_bounds__(256)
gradients_tile(const float* logits, i64 logits_ld, const int* targets, int ignore, const float* lse, int first, int columns, Grad* grad, i64 grad_ld) {
    gradients_body(logits, logits_ld, nullptr, 1, 0, targets, ignore, lse, first, columns, grad, grad_ld);
}

// out = sums [+ out], rounded once.
extern "C" __global__ void __launch_bounds__(256) store_sums(const float* sums, void* out, int code, int accumulate, i64 n) {
    for (i64 i = thread_index(); i < n; i += thread_count()) {
        float x = sums[i];
        if (accumulate) x += load_any(out, i, code);
        store_any(out, i, code, x);
    }
}
