// What every kernel may use. No header of the toolkit is needed: 16-bit floats are their bits, converted by one instruction.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };

#define TW_INFINITY __int_as_float(0x7f800000)
#define TW_FORCE __forceinline__

TW_FORCE float to_f32(float x) { return x; }
TW_FORCE float to_f32(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }
TW_FORCE float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds to nearest, ties to even.
template <class T> TW_FORCE T from_f32(float x);
template <> TW_FORCE float from_f32<float>(float x) { return x; }
template <> TW_FORCE bf16 from_f32<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> TW_FORCE f16 from_f32<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Storage types by the code of `source::code`.
template <int CODE> struct Storage;
template <> struct Storage<0> { typedef float Type; };
template <> struct Storage<1> { typedef f16 Type; };
template <> struct Storage<2> { typedef bf16 Type; };
#ifdef TW_DTYPE
typedef Storage<TW_DTYPE>::Type T;
#endif

// One element of a type known only at run time: for edges, never for a hot loop.
TW_FORCE float load_any(const void* p, i64 i, int code) {
    if (code == 0) return ((const float*)p)[i];
    if (code == 1) return to_f32(((const f16*)p)[i]);
    return to_f32(((const bf16*)p)[i]);
}
TW_FORCE void store_any(void* p, i64 i, int code, float x) {
    if (code == 0) ((float*)p)[i] = x;
    else if (code == 1) ((f16*)p)[i] = from_f32<f16>(x);
    else ((bf16*)p)[i] = from_f32<bf16>(x);
}

// 16 bytes, moved at once.
template <class E> struct alignas(16) Pack {
    static constexpr int SIZE = 16 / sizeof(E);
    E v[SIZE];
};
template <class E> TW_FORCE Pack<E> load_pack(const E* p) { return *(const Pack<E>*)p; }
template <class E> TW_FORCE void store_pack(E* p, const Pack<E>& x) { *(Pack<E>*)p = x; }

// Sums over the 32 lanes; every lane gets the same bits.
TW_FORCE float warp_sum(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
TW_FORCE double warp_sum(double x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
    return x;
}
TW_FORCE float warp_max(float x) {
#pragma unroll
    for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
    return x;
}

TW_FORCE i64 thread_index() { return i64(blockIdx.x) * blockDim.x + threadIdx.x; }
TW_FORCE i64 thread_count() { return i64(gridDim.x) * blockDim.x; }

// First of all in a kernel that is launched early (launch.rs): the next one may begin now, and nothing is read before what is in front has ended.
TW_FORCE void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// GELU and its derivative: kind 0 GPT-2's tanh form, kind 1 exact. The tanh form as x * sigmoid(2u), which loses no digits in the tail.
TW_FORCE float gelu_value(int kind, float x) {
    if (kind == 0) {
        float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        return x / (1.0f + expf(-2.0f * u));
    }
    return 0.5f * x * erfcf(-0.7071067811865476f * x);
}
TW_FORCE float gelu_slope(int kind, float x) {
    // Beyond this both forms are 0 or 1 in f32, and the squares below would overflow.
    if (fabsf(x) > 30.0f) return x > 0.0f ? 1.0f : 0.0f;
    if (kind == 0) {
        float u = 0.7978845608028654f * (x + 0.044715f * x * x * x);
        float s = 1.0f / (1.0f + expf(-2.0f * u));
        return s + x * s * (1.0f - s) * 2.0f * 0.7978845608028654f * (1.0f + 3.0f * 0.044715f * x * x);
    }
    return 0.5f * erfcf(-0.7071067811865476f * x) + x * expf(-0.5f * x * x) * 0.3989422804014327f;
}
