// AdamW in one pass. Compiled without joining products and sums: each operation rounds as the CPU's does, so the bits are the same.
//
// TW_DTYPE: storage of the parameter. TW_GRAD: storage of the gradient. One launch updates many tensors: a block finds its own in a table.

typedef Storage<TW_GRAD>::Type G;

TW_FORCE u32 noise(u32 position, u32 seed) {
    u32 bits = position * 0xd2a80a3fu + seed;
    bits ^= bits >> 9;
    bits += 0xa884f197u;
    bits ^= bits >> 11;
    bits *= 0x6c736f4bu;
    bits ^= bits >> 13;
    bits += 0xb79f3abbu;
    bits ^= bits >> 15;
    bits *= 0x1b56c4f5u;
    return bits ^ (bits >> 17);
}

// Element `index` of layer `layer`: the noise of llm.c, whose blocks have 512 threads.
TW_FORCE T rounded(float x, int stochastic, u32 seed, i64 index, u32 layer) {
#if TW_DTYPE == 2
    if (stochastic && x == x) {
        u32 y = u32(index / 512 * 512) + layer, bits = __float_as_uint(x);
        u32 low = noise(u32(index % 512) + y * 198491317u, seed) & 0xffffu;
        bf16 up;
        up.bits = u16((bits >> 16) + ((bits & 0xffffu) > low));
        return up;
    }
#endif
    return from_f32<T>(x);
}

TW_FORCE float lerp(float a, float b, float w) { return fmaf(w, b, fmaf(-w, a, a)); }

// N elements at a time: 1, or 4 where all tensors and layers start on 16 bytes.
template <class E, int N> struct alignas(sizeof(E) * N) Few { E v[N]; };

// Tensors of one launch: word 5 i on, the addresses of param, master, grad, m and v; then elements of a layer; weight decay and seed; the first block and
// the blocks of a layer.
#define TENSORS 16
#define ROUNDS 4  // packs that a thread updates, one after the other
struct Table {
    u64 address[5 * TENSORS];
    i64 layer_len[TENSORS];
    struct {
        float weight_decay;
        u32 seed;
    } own[TENSORS];
    struct {
        u32 first, per_layer;
    } blocks[TENSORS];
};

template <int N> TW_FORCE void update_body(
    const Table& table, int count, const float* norm, float max_norm, float grad_scale, float lr, float beta1, float beta2, float correction1,
    float correction2, float eps, int stochastic, int zero_grad) {
    float scale = grad_scale;
    if (norm) scale *= *norm > max_norm ? max_norm / *norm : 1.0f;
    int which = 0;
    while (which + 1 < count && blockIdx.x >= table.blocks[which + 1].first) which++;
    const u64* address = table.address + 5 * which;
    T* param = (T*)address[0];
    float *master = (float*)address[1], *m = (float*)address[3], *v = (float*)address[4];
    G* grad = (G*)address[2];
    i64 layer_len = table.layer_len[which];
    float weight_decay = table.own[which].weight_decay;
    u32 seed = table.own[which].seed, block = blockIdx.x - table.blocks[which].first, layer = block / table.blocks[which].per_layer;
    i64 base = i64(layer) * layer_len, begin = (i64(block - layer * table.blocks[which].per_layer) * (256 * ROUNDS) + threadIdx.x) * N;
#pragma unroll 1
    for (int round = 0; round < ROUNDS; round++) {
        i64 i = begin + round * (256 * N);
        if (i >= layer_len) break;
        Few<float, N> fm = *(Few<float, N>*)(m + base + i), fv = *(Few<float, N>*)(v + base + i), fp;
        Few<G, N> fg = *(Few<G, N>*)(grad + base + i);
        Few<T, N> ft;
        if (master) fp = *(Few<float, N>*)(master + base + i);
        else {
            ft = *(Few<T, N>*)(param + base + i);
#pragma unroll
            for (int j = 0; j < N; j++) fp.v[j] = to_f32(ft.v[j]);
        }
#pragma unroll
        for (int j = 0; j < N; j++) {
            float g = to_f32(fg.v[j]) * scale, p = fp.v[j];
            fm.v[j] = lerp(g, fm.v[j], beta1);
            fv.v[j] = lerp(g * g, fv.v[j], beta2);
            float mhat = fm.v[j] / correction1, vhat = fv.v[j] / correction2;
            p -= lr * (mhat / (sqrtf(vhat) + eps) + weight_decay * p);
            fp.v[j] = p;
            ft.v[j] = rounded(p, stochastic, seed, i + j, layer);
            fg.v[j] = from_f32<G>(0.0f);
        }
        *(Few<float, N>*)(m + base + i) = fm;
        *(Few<float, N>*)(v + base + i) = fv;
        if (master) *(Few<float, N>*)(master + base + i) = fp;
        *(Few<T, N>*)(param + base + i) = ft;
        if (zero_grad) *(Few<G, N>*)(grad + base + i) = fg;
    }
}

#define UPDATE_ARGUMENTS                                                                                                                       \
    const __grid_constant__ Table table, int count, const float *norm, float max_norm, float grad_scale, float lr, float beta1, float beta2,    \
        float correction1, float correction2, float eps, int stochastic, int zero_grad
#define UPDATE_VALUES table, count, norm, max_norm, grad_scale, lr, beta1, beta2, correction1, correction2, eps, stochastic, zero_grad

extern "C" __global__ void __launch_bounds__(256, 4) update_wide(UPDATE_ARGUMENTS) { update_body<4>(UPDATE_VALUES); }
extern "C" __global__ void __launch_bounds__(256, 4) update_narrow(UPDATE_ARGUMENTS) { update_body<1>(UPDATE_VALUES); }

extern "C" __global__ void __launch_bounds__(256) round_masters(const float* master, T* param, int stochastic, u32 seed, i64 layer_len) {
    i64 base = i64(blockIdx.y) * layer_len;
    for (i64 i = thread_index(); i < layer_len; i += thread_count()) {
        param[base + i] = rounded(master[base + i], stochastic, seed, i, blockIdx.y);
    }
}
