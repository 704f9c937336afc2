use std::collections::BTreeMap;
use std::path::Path;

use super::{tilewright, tilewright_in};
use tilewright_core::format::shard::TokenShard;
use tilewright_core::format::token_table::TokenTable;

/// The tokens of all shards of a split, in order.
fn tokens(folder: &Path, pattern: &str) -> Vec<u16> {
    let mut all = Vec::new();
    for index in 0.. {
        let path = folder.join(format!("{pattern}_{index:06}.bin"));
        if !path.exists() {
            break;
        }
        let mut shard = TokenShard::open(&path, 1 << 16).unwrap();
        let start = all.len();
        all.resize(start + shard.len() as usize, 0);
        shard.read_at(0, &mut all[start..]).unwrap();
    }
    all
}

/// What the tokens spell, by the tokenizer file beside them; end-of-text as `|`.
fn decode(folder: &Path, prefix: &str, tokens: &[u16]) -> String {
    let table = TokenTable::open(&folder.join(format!("{prefix}_tokenizer.bin"))).unwrap();
    let bytes =
        |&t: &u16| if usize::from(t) == table.eot() { b"|".to_vec() } else { table.get(t.into()).unwrap().to_vec() };
    String::from_utf8(tokens.iter().flat_map(bytes).collect()).unwrap()
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |e: std::fs::DirEntry| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap());
    std::fs::read_dir(folder).unwrap().map(|e| read(e.unwrap())).collect()
}

const TEXT: &str = "It is a truth universally acknowledged,\n\nthat a single man \u{2014} caf\u{e9} \u{1f600} in possession of 1813   pounds!\n";

#[test]
fn tokens_decode_back_to_the_text_for_every_tokenizer() {
    for tokenizer in ["gpt2", "bytes"] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.txt"), TEXT.repeat(50)).unwrap();
        let args = ["data", "a.txt", "--output", "out/x", "--tokenizer", tokenizer, "--shard-tokens", "1000"];
        let said = tilewright_in(dir.path(), &args, &[]).ok();
        assert!(said.starts_with("1 documents"), "{said}");
        let out = dir.path().join("out");
        let (train, val) = (tokens(&out, "x_train"), tokens(&out, "x_val"));
        assert_eq!(decode(&out, "x", &[val, train].concat()), format!("|{}", TEXT.repeat(50)), "{tokenizer}");
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_byte() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), TEXT.repeat(40_000)).unwrap();
    for threads in ["1", "3"] {
        let args = ["data", "a.txt", "-o", &format!("{threads}/x"), "--tokenizer", "bytes", "--threads", threads];
        tilewright_in(dir.path(), &args, &[]).ok();
    }
    let (one, three) = (files(&dir.path().join("1")), files(&dir.path().join("3")));
    assert_eq!(one.keys().collect::<Vec<_>>(), ["x_tokenizer.bin", "x_train_000000.bin", "x_val_000000.bin"]);
    assert!(one == three, "shards differ between 1 and 3 threads");
}

#[test]
fn every_json_line_and_every_file_of_a_folder_begins_with_end_of_text() {
    let dir = tempfile::tempdir().unwrap();
    let docs = dir.path().join("docs");
    std::fs::create_dir(&docs).unwrap();
    std::fs::write(docs.join("a.jsonl"), "{\"body\": \"one\"}\n{\"body\": \"two\"}\n").unwrap();
    std::fs::write(docs.join("b.txt"), "three").unwrap();
    std::fs::write(docs.join("c.pdf"), "no text").unwrap();
    let args = ["data", "docs", "-o", "x", "--tokenizer", "bytes", "--field", "body", "--val-fraction", "0"];
    let run = tilewright_in(dir.path(), &args, &[]);
    assert!(run.err.contains("skipped") && run.err.contains("c.pdf"), "{}", run.err);
    run.ok();
    assert_eq!(decode(dir.path(), "x", &tokens(dir.path(), "x_train")), "|one|two|three");
    assert!(tokens(dir.path(), "x_val").is_empty());
}

#[test]
fn the_validation_split_can_be_counted_in_tokens() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), TEXT).unwrap();
    tilewright_in(dir.path(), &["data", "a.txt", "-o", "x", "--tokenizer", "bytes", "--val-tokens", "7"], &[]).ok();
    assert_eq!(decode(dir.path(), "x", &tokens(dir.path(), "x_val")), "|It is ");
}

#[test]
fn text_that_spells_end_of_text_is_text() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), "a<|endoftext|>b").unwrap();
    tilewright_in(dir.path(), &["data", "a.txt", "-o", "x", "--val-fraction", "0"], &[]).ok();
    let tokens = tokens(dir.path(), "x_train");
    assert_eq!(tokens.iter().filter(|&&t| t == 50256).count(), 1, "{tokens:?}");
    assert_eq!(decode(dir.path(), "x", &tokens), "|a<|endoftext|>b");
}

#[test]
fn an_earlier_data_set_is_replaced_only_when_told() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), TEXT).unwrap();
    let run = |more: &[&str]| {
        tilewright_in(dir.path(), &[&["data", "a.txt", "-o", "x", "--tokenizer", "bytes"], more].concat(), &[])
    };
    run(&["--shard-tokens", "20"]).ok();
    assert!(run(&[]).failed().contains("--force"));
    run(&["--force"]).ok();
    assert!(!dir.path().join("x_train_000001.bin").exists(), "a stale shard would be trained on");
}

#[test]
fn bad_inputs_are_refused_and_leave_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    std::fs::write(
        dir.path().join("latin1.txt"),
        b"word ".repeat(1000).iter().chain(b"\xE9").copied().collect::<Vec<_>>(),
    )
    .unwrap();
    std::fs::write(dir.path().join("bad.jsonl"), "{\"text\": \"x\"}\nnonsense\n").unwrap();
    std::fs::write(dir.path().join("good.txt"), TEXT).unwrap();
    std::fs::write(dir.path().join("fake.bin"), vec![0; 2000]).unwrap();
    let failed = |args: &[&str]| {
        let error = tilewright_in(dir.path(), &[&["data", "-o", "out/x"], args].concat(), &[]).failed();
        assert!(!out.exists() || files(&out).is_empty(), "{args:?} left {:?}", files(&out).keys());
        error
    };
    assert!(failed(&["missing.txt"]).contains("missing.txt"));
    assert!(failed(&["latin1.txt"]).contains("byte 5000"));
    assert!(failed(&["bad.jsonl"]).contains("line 2"));
    assert!(failed(&["good.txt", "--tokenizer", "llama"]).contains("llama"));
    assert!(failed(&["good.txt", "--tokenizer", "fake.bin"]).contains("fake.bin"));
    assert!(failed(&["good.txt", "--val-fraction", "1.5"]).contains("--val-fraction"));
    assert!(failed(&["good.txt", "--val-tokens", "1M"]).contains("--val-tokens"));
    assert!(tilewright(&["data", "good.txt"]).refused().contains("--output"));
    assert!(tilewright(&["data", "x", "-o", "y", "--shard-tokens", "some"]).refused().contains("1.5M"));
}
