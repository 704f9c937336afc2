#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    if let Ok(record) = tilewright_bench::record::Record::parse(data) {
        tilewright_bench::report::text(&record);
        tilewright_bench::report::html(&[("record.json".to_owned(), record)]);
    }
});
