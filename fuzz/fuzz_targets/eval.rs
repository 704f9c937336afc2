#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    tilewright_core::format::fuzzing::fuzz_eval(data);
});
