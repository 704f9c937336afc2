#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tilewright_serve::wire::fuzz(data));
