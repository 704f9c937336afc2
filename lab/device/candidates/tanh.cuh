TW_FORCE void gelu(float x, float& value, float& slope) {
    // The square must not become infinite; the hardware's tanh is right to 2^-11.
    float square = fminf(x * x, 1e4f), t;
    asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(x * fmaf(square, 0.044715f * 0.5f * TWICE, 0.5f * TWICE)));
    float sigmoid = fmaf(0.5f, t, 0.5f);
    value = x * sigmoid;
    slope = fmaf(value * (1.0f - sigmoid), fmaf(square, 3.0f * 0.044715f * TWICE, TWICE), sigmoid);
}
