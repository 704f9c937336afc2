#![no_main]

use tilewright_bench::protocol::{Answer, parse};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let line = String::from_utf8_lossy(data);
    for asked in ["hello", "prepare", "run", "quit"] {
        if let Ok(Answer::Ran(ran)) = parse(&line, asked) {
            assert!(ran.ns > 0.0 && ran.ns.is_finite());
        }
    }
});
