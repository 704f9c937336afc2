// Read or written once a step: told to the caches.
TW_FORCE Few<float, 1> load_once(const Few<float, 1>* p) { return {__ldcs((const float*)p)}; }
TW_FORCE Few<float, 4> load_once(const Few<float, 4>* p) {
    float4 x = __ldcs((const float4*)p);
    return {x.x, x.y, x.z, x.w};
}
// 16-bit gradients: two or eight bytes.
template <class E> TW_FORCE Few<E, 1> load_once(const Few<E, 1>* p) { return *p; }
template <class E> TW_FORCE Few<E, 4> load_once(const Few<E, 4>* p) {
    uint2 x = __ldcs((const uint2*)p);
    return {E{u16(x.x)}, E{u16(x.x >> 16)}, E{u16(x.y)}, E{u16(x.y >> 16)}};
}
TW_FORCE void store_once(Few<float, 1>* p, const Few<float, 1>& x) { __stcs((float*)p, x.v[0]); }
TW_FORCE void store_once(Few<float, 4>* p, const Few<float, 4>& x) { __stcs((float4*)p, make_float4(x.v[0], x.v[1], x.v[2], x.v[3])); }

