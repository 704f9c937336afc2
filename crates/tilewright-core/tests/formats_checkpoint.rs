//! Optimiser state files and the folder of checkpoints.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tilewright_core::format::checkpoint::{self, Retention};
use tilewright_core::format::state::{
    DetectorState, Extension, Part, ShuffleState, StateHeader, StateReader, StateWriter,
};
use tilewright_core::format::{Sink, Source};
use tilewright_core::rng::Mt19937;
use tilewright_core::{Error, Result};

const PARAMS: u64 = 11;

fn header() -> StateHeader {
    StateHeader {
        procs: 2,
        rank: 1,
        use_master: true,
        should_shuffle: true,
        step: 1234,
        rng_state: 0x1234_5678_9abc_def0,
        rng_state_last_update: u64::MAX - 3,
        shard_index: 1,
        sample_index: 5,
    }
}

fn shuffle() -> ShuffleState {
    let mut rng = Mt19937::new(42);
    ShuffleState { shards: rng.permutation(2), samples: rng.permutation(9), rng }
}

fn extension() -> Extension {
    Extension {
        loss: DetectorState { values: vec![1.5, f64::MIN_POSITIVE, -0.0], sum: 0.1 + 0.2, sum_sq: 1e300 },
        norm: DetectorState::default(),
        model_crc32: Some(0xdead_beef),
        other: vec![(*b"XTRA", vec![1, 2, 3]), (*b"ZERO", vec![])],
    }
}

fn array(part: Part) -> Vec<f32> {
    (0..PARAMS).map(|i| i as f32 + 100.0 * part as usize as f32).collect()
}

fn write(header: &StateHeader, shuffle: Option<&ShuffleState>, extension: Option<&Extension>) -> Vec<u8> {
    let mut writer = StateWriter::new(Sink::memory(), header, PARAMS).unwrap();
    for part in [Part::M, Part::V, Part::Master] {
        if part != Part::Master || header.use_master {
            for piece in array(part).chunks(4) {
                writer.write(part, piece).unwrap();
            }
        }
    }
    writer.finish(shuffle, extension).unwrap().memory
}

fn full() -> Vec<u8> {
    write(&header(), Some(&shuffle()), Some(&extension()))
}

fn read(bytes: Vec<u8>) -> Result<StateReader> {
    StateReader::new(Source::from_bytes("state.bin", bytes), PARAMS)
}

fn offset<T: std::fmt::Debug>(result: Result<T>) -> u64 {
    match result.unwrap_err() {
        Error::Format { offset, path, .. } if path.to_str() == Some("state.bin") => offset,
        other => panic!("{other:?} is no format error of this file"),
    }
}

fn put(mut bytes: Vec<u8>, at: usize, value: &[u8]) -> Vec<u8> {
    bytes[at..at + value.len()].copy_from_slice(value);
    bytes
}

const SHUFFLE_AT: usize = 1024 + 3 * 4 * PARAMS as usize;
const LLM_C_END: usize = SHUFFLE_AT + 8 + 2 * 4 + 8 + 9 * 4 + 2520;

#[test]
fn everything_is_read_back() {
    let reader = read(full()).unwrap();
    assert_eq!(*reader.header(), header());
    assert_eq!(reader.shuffle(), Some(&shuffle()));
    assert_eq!(reader.extension(), Some(&extension()));
    reader.verify().unwrap();
    for part in [Part::M, Part::V, Part::Master] {
        let mut all = vec![0.0; PARAMS as usize];
        reader.read_at(part, 0, &mut all).unwrap();
        assert_eq!(all, array(part));
        let mut middle = [0.0; 3];
        reader.read_at(part, 7, &mut middle).unwrap();
        assert_eq!(middle, array(part)[7..10]);
        let mut streamed = Vec::new();
        reader
            .stream(part, &mut |chunk| {
                streamed.extend_from_slice(chunk);
                Ok(())
            })
            .unwrap();
        assert_eq!(streamed, all);
    }
}

#[test]
fn the_layout_is_llm_cs() {
    let bytes = full();
    let word = |i: usize| i32::from_le_bytes(bytes[4 * i..][..4].try_into().unwrap());
    let long = |at: usize| u64::from_le_bytes(bytes[at..][..8].try_into().unwrap());
    assert_eq!([0, 1, 2, 3, 4, 5, 10].map(word), [20240527, 1, 2, 1, 1, 1, 1234]);
    assert_eq!([20, 22, 30, 32].map(|w| long(4 * w)), [0x1234_5678_9abc_def0, u64::MAX - 3, 1, 5]);
    assert_eq!(bytes[1024..1032], [0, 0, 0, 0, 0, 0, 0x80, 0x3f]);
    assert_eq!((long(SHUFFLE_AT), long(SHUFFLE_AT + 16)), (2, 9));
    assert_eq!(bytes[LLM_C_END - 2520..LLM_C_END], shuffle().rng.to_record());
    assert_eq!(bytes[LLM_C_END..LLM_C_END + 8], *b"TWSTATE1");
}

#[test]
fn a_file_of_llm_c_ends_after_the_generator_and_is_accepted() {
    let bytes = write(&header(), Some(&shuffle()), None);
    assert_eq!(bytes.len(), LLM_C_END);
    assert_eq!(bytes, full()[..LLM_C_END]);
    let reader = read(bytes).unwrap();
    assert_eq!(reader.extension(), None);
    reader.verify().unwrap();
}

#[test]
fn masters_and_shuffling_are_optional() {
    let plain = StateHeader { use_master: false, should_shuffle: false, ..header() };
    let bytes = write(&plain, None, None);
    assert_eq!(bytes.len(), 1024 + 2 * 4 * PARAMS as usize);
    let reader = read(bytes).unwrap();
    assert_eq!(reader.shuffle(), None);
    assert!(reader.read_at(Part::Master, 0, &mut [0.0]).unwrap_err().to_string().contains("master"));
}

/// llm.c does not save the detectors' windows (specification 1.2, defect 6), so its resumed runs cannot skip for 128 steps.
#[test]
fn defect_6_detector_windows_survive_bit_for_bit() {
    let window: Vec<f64> = (0..128).map(|i| 1.0 / f64::from(i + 3)).collect();
    let state = DetectorState { sum: window.iter().sum(), sum_sq: window.iter().map(|x| x * x).sum(), values: window };
    let saved = Extension { loss: state.clone(), norm: state, ..Extension::default() };
    let reader = read(write(&header(), Some(&shuffle()), Some(&saved))).unwrap();
    assert_eq!(reader.extension(), Some(&saved));
}

#[test]
fn writing_what_was_read_is_byte_identical() {
    let reader = read(full()).unwrap();
    assert!(write(reader.header(), reader.shuffle(), reader.extension()) == full());
}

#[test]
fn every_truncation_is_refused() {
    let good = full();
    for len in 0..good.len() {
        // Exactly llm.c's part is a file of llm.c.
        if len != LLM_C_END {
            offset(read(good[..len].to_vec()));
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_is_refused_or_found_by_the_checksum() {
    let good = full();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1 << (at % 8);
        assert!(read(bad).and_then(|r| r.verify()).is_err(), "byte {at}");
    }
}

#[test]
fn lies_are_refused_at_their_byte() {
    let lie = |at: usize, value: i32| offset(read(put(full(), at, &value.to_le_bytes())));
    assert_eq!(lie(0, 20240326), 0);
    assert_eq!(lie(4, 2), 4);
    assert_eq!(lie(8, 0), 8);
    assert_eq!(lie(12, 2), 12);
    assert_eq!(lie(12, -1), 12);
    assert_eq!(lie(16, 2), 16);
    assert_eq!(lie(20, -1), 20);
    assert_eq!(lie(40, -1), 40);
    assert_eq!(lie(120, 2), 120);
    assert_eq!(lie(128, 10), 128);
    assert_eq!(lie(SHUFFLE_AT + 8, 2), SHUFFLE_AT as u64 + 8);
    assert_eq!(lie(LLM_C_END - 2520 + 8, 0), (LLM_C_END - 2520 + 8) as u64);
    assert_eq!(lie(LLM_C_END, 0), LLM_C_END as u64);
}

#[test]
fn counts_larger_than_the_file_are_refused_without_allocating() {
    for count in [u64::MAX, u64::MAX / 4, 1 << 40] {
        offset(read(put(full(), SHUFFLE_AT, &count.to_le_bytes())));
        offset(read(put(full(), SHUFFLE_AT + 16, &count.to_le_bytes())));
        offset(read(put(full(), LLM_C_END + 8, &count.to_le_bytes())));
    }
}

#[test]
fn an_entry_that_appears_twice_is_no_permutation() {
    let entry = full()[SHUFFLE_AT + 24..][..4].to_vec();
    assert_eq!(offset(read(put(full(), SHUFFLE_AT + 28, &entry))), SHUFFLE_AT as u64 + 28);
}

#[test]
fn the_wrong_number_of_parameters_is_refused() {
    for params in [PARAMS - 1, PARAMS + 1, u64::MAX, u64::MAX / 12] {
        let result = StateReader::new(Source::from_bytes("state.bin", full()), params);
        offset(result);
    }
}

#[test]
fn arrays_out_of_order_or_of_the_wrong_length_cannot_be_written() {
    let writer = || StateWriter::new(Sink::memory(), &header(), PARAMS).unwrap();
    assert!(writer().write(Part::V, &[0.0]).is_err());
    assert!(writer().write(Part::M, &[0.0; PARAMS as usize + 1]).is_err());
    let mut w = writer();
    w.write(Part::M, &array(Part::M)).unwrap();
    assert!(w.write(Part::M, &[0.0]).is_err());
    assert!(w.finish(Some(&shuffle()), None).is_err());
    let mut w = StateWriter::new(Sink::memory(), &StateHeader { use_master: false, ..header() }, PARAMS).unwrap();
    w.write(Part::M, &array(Part::M)).unwrap();
    w.write(Part::V, &array(Part::V)).unwrap();
    assert!(w.write(Part::Master, &[0.0]).is_err());
    assert!(w.finish(None, None).unwrap_err().to_string().contains("shuffling"));
}

#[test]
fn a_rank_or_step_that_does_not_fit_cannot_be_written() {
    for bad in [StateHeader { rank: 2, ..header() }, StateHeader { step: 1 << 31, ..header() }] {
        assert!(StateWriter::new(Sink::memory(), &bad, PARAMS).is_err());
    }
}

fn touch(folder: &Path, names: &[&str]) {
    for name in names {
        fs::write(folder.join(name), b"x").unwrap();
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn names_are_llm_cs() {
    let dir = Path::new("out");
    assert_eq!(checkpoint::model_path(dir, 40), dir.join("model_00000040.bin"));
    assert_eq!(checkpoint::state_path(dir, 40, 3), dir.join("state_00000040_00003.bin"));
    assert_eq!(checkpoint::done_path(dir, 123456789), dir.join("DONE_123456789"));
}

#[test]
fn the_latest_marked_step_wins_over_a_later_unmarked_one() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(checkpoint::latest_complete(dir.path()).unwrap(), None);
    for step in [20, 100, 40] {
        let (model, state) = (format!("model_{step:08}.bin"), format!("state_{step:08}_00000.bin"));
        touch(dir.path(), &[&model, &state]);
        checkpoint::mark_done(dir.path(), step).unwrap();
    }
    touch(dir.path(), &["model_00000120.bin", "state_00000120_00000.bin", "DONE_", "DONE_12", "DONE_0000001x", "a"]);
    assert_eq!(checkpoint::latest_complete(dir.path()).unwrap(), Some(100));
}

#[test]
fn a_marker_without_its_files_is_an_error_that_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    touch(dir.path(), &["DONE_00000007", "state_00000007_00000.bin"]);
    let message = checkpoint::latest_complete(dir.path()).unwrap_err().to_string();
    assert!(message.contains("model_00000007.bin"), "{message}");
    touch(dir.path(), &["model_00000007.bin"]);
    fs::remove_file(dir.path().join("state_00000007_00000.bin")).unwrap();
    let message = checkpoint::latest_complete(dir.path()).unwrap_err().to_string();
    assert!(message.contains("state_00000007_00000.bin"), "{message}");
}

#[test]
fn retention_is_llm_cs_rule() {
    let rule = Retention { every: 10, keep: 2, major_every: 50 };
    let victims: Vec<_> = (1..=8).map(|i| rule.victim(i * 10)).collect();
    assert_eq!(victims, [None, None, Some(10), Some(20), Some(30), Some(40), None, Some(60)]);
    assert_eq!(Retention { major_every: 0, ..rule }.victim(70), Some(50));
    assert_eq!(Retention { keep: 0, ..rule }.victim(1000), None);
    assert_eq!(Retention { every: 0, ..rule }.victim(1000), None);
    assert_eq!(Retention { every: u64::MAX, ..rule }.victim(1000), None);
}

#[test]
fn deleting_a_step_takes_its_files_of_all_ranks_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    touch(
        dir.path(),
        &["model_00000010.bin", "state_00000010_00000.bin", "state_00000010_00001.bin", "DONE_00000010", "main.log"],
    );
    touch(dir.path(), &["model_00000020.bin", "DONE_00000020"]);
    checkpoint::delete(dir.path(), 10).unwrap();
    checkpoint::delete(dir.path(), 10).unwrap();
    assert_eq!(names(dir.path()), ["DONE_00000020", "main.log", "model_00000020.bin"]);
}

#[test]
fn incomplete_steps_are_removed_up_to_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    touch(dir.path(), &["model_00000010.bin", "state_00000015_00000.bin", "model_00000020.bin", "DONE_00000020"]);
    touch(dir.path(), &["model_00000030.bin"]);
    assert_eq!(checkpoint::remove_incomplete(dir.path(), 20).unwrap(), [10, 15]);
    assert_eq!(names(dir.path()), ["DONE_00000020", "model_00000020.bin", "model_00000030.bin"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_state_round_trips(
        seed: u32, shards in 1usize..6, samples in 0usize..40, draws in 0usize..700, rng_state: u64,
        window in prop::collection::vec(any::<f64>().prop_filter("comparable", |x| !x.is_nan()), 0..128),
        other in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let mut rng = Mt19937::new(seed);
        let order = (rng.permutation(shards), rng.permutation(samples));
        for _ in 0..draws {
            rng.random_u32();
        }
        let shuffle = ShuffleState { shards: order.0, samples: order.1, rng };
        let head = StateHeader { rng_state, shard_index: shards as u64 - 1, sample_index: samples as u64, ..header() };
        let extension = Extension {
            loss: DetectorState { values: window, sum: 0.5, sum_sq: 0.25 },
            other: vec![(*b"MORE", other)],
            ..Extension::default()
        };
        let bytes = write(&head, Some(&shuffle), Some(&extension));
        let reader = read(bytes.clone()).unwrap();
        prop_assert_eq!(reader.shuffle(), Some(&shuffle));
        prop_assert_eq!(reader.extension(), Some(&extension));
        prop_assert!(write(reader.header(), reader.shuffle(), reader.extension()) == bytes);
    }
}
