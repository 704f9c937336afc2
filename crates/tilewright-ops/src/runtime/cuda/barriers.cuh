// Barriers in shared memory, where copies and products of Hopper's kernels meet.

#if __CUDA_ARCH__ >= 900
TW_FORCE void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
TW_FORCE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(barrier), "r"(parity) : "memory");
}
#endif
