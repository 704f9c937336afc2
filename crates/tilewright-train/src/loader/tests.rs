use std::path::{Path, PathBuf};

use tilewright_core::format::shard::ShardWriter;

use super::*;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn shard(dir: &Path, name: &str, tokens: impl IntoIterator<Item = u16>) -> PathBuf {
    let path = dir.join(name);
    let mut writer = ShardWriter::create(&path).unwrap();
    writer.write(&tokens.into_iter().collect::<Vec<_>>()).unwrap();
    writer.finish().unwrap();
    path
}

fn take(loader: &mut Loader, n: usize) -> Vec<Vec<i32>> {
    let mut batches = Vec::new();
    for _ in 0..n {
        let batch = loader.next_batch().unwrap();
        batches.push([batch.inputs, batch.targets].concat());
    }
    batches
}

#[test]
fn fixture_shards_have_llmcs_batches() {
    let open = |name, t| ShardSet::open(&[fixture(name)], Geometry::single(4, t), 50257).unwrap();
    assert_eq!(open("synthetic_train.bin", 64).samples(), [1192]);
    assert_eq!(open("synthetic_train.bin", 1024).samples(), [74]);
    // 32,768 tokens: the last of 128 samples would need a token more.
    assert_eq!(open("synthetic_val.bin", 64).samples(), [127]);
    let mut val = Loader::new(open("synthetic_val.bin", 64), None, false).unwrap();
    let batch = val.next_batch().unwrap();
    assert_eq!(batch.inputs[..8], [144, 9, 463, 113, 13321, 454, 24, 28]);
    assert_eq!(batch.targets[..7], batch.inputs[1..8]);
    assert_eq!((batch.inputs.len(), batch.targets.len()), (256, 256));
}

#[test]
fn a_shuffled_batch_lies_where_its_sample_lies() {
    let shards = ShardSet::open(&[fixture("synthetic_train.bin")], Geometry::single(4, 64), 50257).unwrap();
    let mut plain = Loader::new(shards.clone(), None, false).unwrap();
    let in_order = take(&mut plain, 800);
    let mut shuffled = Loader::new(shards, Some(42), true).unwrap();
    let got = take(&mut shuffled, 2);
    assert_eq!(got, [in_order[408].clone(), in_order[791].clone()]);
}

#[test]
fn reading_ahead_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> =
        (0..3).map(|i| shard(dir.path(), &format!("{i}.bin"), (0..40 + 7 * i).map(|t| t % 50))).collect();
    for seed in [None, Some(42)] {
        let open =
            |ahead| Loader::new(ShardSet::open(&paths, Geometry::single(2, 3), 50).unwrap(), seed, ahead).unwrap();
        assert_eq!(take(&mut open(true), 100), take(&mut open(false), 100));
    }
}

#[test]
fn a_restored_loader_continues_in_the_middle_of_an_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<_> =
        (0..3).map(|i| shard(dir.path(), &format!("{i}.bin"), (0..40 + 7 * i).map(|t| t % 50))).collect();
    let open = || Loader::new(ShardSet::open(&paths, Geometry::single(2, 3), 50).unwrap(), Some(42), true).unwrap();
    for stop in [0, 1, 6, 7, 13, 20, 21, 50] {
        let mut whole = open();
        take(&mut whole, stop);
        let (shard, sample) = (whole.order().shard() as u64, whole.order().sample() as u64);
        let lengths = whole.shards().samples();
        let order = Order::restore(lengths, shard, sample, whole.order().shuffle().cloned()).unwrap();
        let mut resumed = open();
        take(&mut resumed, 5);
        resumed.restore(order);
        assert_eq!(take(&mut whole, 30), take(&mut resumed, 30), "stopped after {stop}");
    }
}

#[test]
fn a_rewound_loader_gives_its_first_batches_again() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [shard(dir.path(), "a.bin", (0..100).map(|t| t % 50))];
    let mut loader = Loader::new(ShardSet::open(&paths, Geometry::single(2, 3), 50).unwrap(), None, false).unwrap();
    let first = take(&mut loader, 4);
    loader.rewind();
    assert_eq!(take(&mut loader, 4), first);
}

#[test]
fn ranks_read_neighbouring_slices() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [shard(dir.path(), "a.bin", 0..49)];
    let rank = |rank| {
        let geometry = Geometry { batch: 2, seq_len: 3, processes: 2, rank };
        let mut loader = Loader::new(ShardSet::open(&paths, geometry, 50).unwrap(), None, false).unwrap();
        take(&mut loader, 2)
    };
    let (zero, one) = (rank(0), rank(1));
    assert_eq!(zero[0][..6], [0, 1, 2, 3, 4, 5]);
    assert_eq!(one[0][..6], [6, 7, 8, 9, 10, 11]);
    assert_eq!(zero[1][..6], [12, 13, 14, 15, 16, 17]);
    assert_eq!(one[1][6..], [19, 20, 21, 22, 23, 24]);
}

#[test]
fn a_token_outside_the_vocabulary_names_file_and_byte_from_the_thread_too() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [shard(dir.path(), "bad.bin", [1, 2, 3, 4, 5, 60, 7, 8])];
    for ahead in [false, true] {
        let shards = ShardSet::open(&paths, Geometry::single(1, 3), 50).unwrap();
        let mut loader = Loader::new(shards, None, ahead).unwrap();
        loader.next_batch().unwrap();
        let message = loader.next_batch().unwrap_err().to_string();
        assert!(message.contains("bad.bin: byte 1034") && message.contains("60"), "{message}");
        if ahead {
            assert!(loader.next_batch().unwrap_err().to_string().contains("earlier error"));
        }
    }
}

#[test]
fn a_shard_smaller_than_a_batch_is_refused_with_both_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [shard(dir.path(), "small.bin", 0..6)];
    assert!(ShardSet::open(&paths, Geometry::single(1, 5), 50).is_ok());
    let message = ShardSet::open(&paths, Geometry::single(2, 3), 50).unwrap_err().to_string();
    assert!(message.contains("small.bin") && message.contains("6 tokens") && message.contains("needs 7"), "{message}");
}

#[test]
fn the_tail_that_fills_no_sample_is_counted() {
    let dir = tempfile::tempdir().unwrap();
    let paths = [shard(dir.path(), "a.bin", 0..21), shard(dir.path(), "b.bin", 0..7)];
    let shards = ShardSet::open(&paths, Geometry::single(2, 3), 50).unwrap();
    assert_eq!(shards.samples(), [3, 1]);
    assert_eq!((shards.tokens(), shards.left_over()), (28, 3 + 1));
}

#[test]
fn patterns_find_shards_in_sorted_order_or_say_that_there_are_none() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["t_2.bin", "t_10.bin", "v_1.bin"] {
        shard(dir.path(), name, 0..7);
    }
    let pattern = |p: &str| format!("{}/{p}", dir.path().display());
    let find = |p: &str| ShardSet::find(&pattern(p), "--data", Geometry::single(2, 3), 50);
    let set = find("t_*.bin").unwrap();
    assert_eq!(set.len(), 2);
    assert!(set.path(0).ends_with("t_10.bin") && set.path(1).ends_with("t_2.bin"));
    let message = find("x_*.bin").unwrap_err().to_string();
    assert!(
        message.contains("--data") && message.contains("x_*.bin") && message.contains("tilewright data"),
        "{message}"
    );
    assert!(find("t_[.bin").unwrap_err().to_string().contains("no pattern"));
}

#[test]
fn bug_2_offsets_beyond_two_gigabytes_are_not_truncated() {
    // A sparse shard of more than 2^31 bytes; only its last tokens are written.
    use std::io::{Seek, SeekFrom, Write};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("large.bin");
    let tokens = 1_200_000_000u64;
    let mut file = std::fs::File::create(&path).unwrap();
    for word in [20240520i32, 1, tokens as i32] {
        file.write_all(&word.to_le_bytes()).unwrap();
    }
    file.set_len(1024 + 2 * tokens).unwrap();
    let sample = (tokens - 1) / 6 - 1;
    file.seek(SeekFrom::Start(1024 + 12 * sample)).unwrap();
    file.write_all(&[1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0]).unwrap();
    let mut shards = ShardSet::open(&[path], Geometry::single(2, 3), 50).unwrap();
    let mut out = [0; 7];
    shards.read(Place { shard: 0, sample: sample as usize }, &mut out).unwrap();
    assert_eq!(out, [1, 2, 3, 4, 5, 6, 7]);
}
