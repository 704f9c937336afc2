    float4 held[FLOATS / 4];
    float total = 0.0f, squares = 0.0f;
    // All loads before the first store: what is stored may, for the compiler, be what is loaded next.
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        int j = (lane + 32 * i) * 4;
        held[i] = j < c ? *(const float4*)(x + row * c + j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (branch) {
        Four joined[FLOATS / 4];
#pragma unroll
        for (int i = 0; i < FLOATS / 4; i++) {
            int j = (lane + 32 * i) * 4;
            if (j < c) joined[i] = *(const Four*)(branch + row * c + j);
        }
#pragma unroll
        for (int i = 0; i < FLOATS / 4; i++) {
            int j = (lane + 32 * i) * 4;
            if (j >= c) continue;
            Four b = joined[i];
            held[i] = {held[i].x + to_f32(b.v[0]), held[i].y + to_f32(b.v[1]), held[i].z + to_f32(b.v[2]), held[i].w + to_f32(b.v[3])};
            *(float4*)(sum + row * c + j) = held[i];
        }
    }
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        if ((lane + 32 * i) * 4 < c) total += (held[i].x + held[i].y) + (held[i].z + held[i].w);
    }
    // The weight is on its way while the sums are made.
    float4 weights[FLOATS / 4];
#pragma unroll
    for (int i = 0; i < FLOATS / 4; i++) {
        int j = (lane + 32 * i) * 4;
        if (j < c) weights[i] = *(const float4*)(weight + j);
    }
