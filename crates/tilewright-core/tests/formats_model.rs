//! llm.c's model files: round trips, conversion, and every lie that a header can tell.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use tilewright_core::format::model::{ModelReader, ModelWriter, convert_model, write_model};
use tilewright_core::format::{ParamSource, Sink, Source};
use tilewright_core::gpt2::{Gpt2Config, PARAMS};
use tilewright_core::{DType, Error, bf16};

const TINY: Gpt2Config =
    Gpt2Config { max_seq_len: 7, vocab_size: 29, padded_vocab_size: 37, layers: 2, heads: 3, channels: 12 };

fn values(config: &Gpt2Config) -> Vec<f32> {
    (0..config.parameter_count()).map(|i| (i as f32 * 0.37).sin() * 3.0).collect()
}

fn bytes_of(config: &Gpt2Config, dtype: DType) -> Vec<u8> {
    let all = values(config);
    let mut writer = ModelWriter::new(Sink::memory(), config, dtype).unwrap();
    let mut at = 0;
    for i in 0..PARAMS.len() {
        let n = config.param_numel(i);
        // In two pieces, to exercise the bookkeeping.
        writer.write_f32(i, &all[at..at + n / 2]).unwrap();
        writer.write_f32(i, &all[at + n / 2..at + n]).unwrap();
        at += n;
    }
    writer.finish().unwrap().memory
}

fn read_all(source: &dyn ParamSource) -> Vec<f32> {
    let mut out = Vec::new();
    for i in 0..PARAMS.len() {
        source
            .read_f32(i, &mut |chunk| {
                out.extend_from_slice(chunk);
                Ok(())
            })
            .unwrap();
    }
    out
}

/// The offset and the message of the error that these bytes give.
fn refusal(bytes: Vec<u8>) -> (u64, String) {
    let error = ModelReader::new(Source::from_bytes("tiny.bin", bytes)).unwrap_err();
    let message = error.to_string();
    assert!(message.contains("tiny.bin") && message.contains("byte "), "{message}");
    let Error::Format { offset, .. } = error else { panic!("{error:?} is no format error") };
    (offset, message)
}

fn with_word(word: usize, value: i32) -> Vec<u8> {
    let mut bytes = bytes_of(&TINY, DType::F32);
    bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

#[test]
fn an_f32_model_is_read_back_exactly() {
    let reader = ModelReader::new(Source::from_bytes("m", bytes_of(&TINY, DType::F32))).unwrap();
    assert_eq!((*reader.config(), reader.dtype()), (TINY, DType::F32));
    assert_eq!(read_all(&reader), values(&TINY));
}

#[test]
fn a_bf16_model_holds_the_values_rounded_to_nearest_even() {
    let reader = ModelReader::new(Source::from_bytes("m", bytes_of(&TINY, DType::BF16))).unwrap();
    assert_eq!(reader.dtype(), DType::BF16);
    let want: Vec<f32> = values(&TINY).iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
    assert_eq!(read_all(&reader), want);
}

#[test]
fn the_header_words_are_llm_cs() {
    let bytes = bytes_of(&TINY, DType::BF16);
    let words: Vec<i32> = bytes[..1024].as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
    assert_eq!(words[..9], [20240326, 5, 7, 29, 2, 3, 12, 37, 0]);
    assert!(words[9..].iter().all(|&w| w == 0));
    assert_eq!(bytes.len(), 1024 + 2 * TINY.parameter_count());
}

#[test]
fn d12_files_have_llm_cs_sizes() {
    let config = Gpt2Config::from_descriptor("d12").unwrap();
    assert_eq!(1024 + 4 * config.parameter_count() as u64, 497_904_640);
    assert_eq!(1024 + 2 * config.parameter_count() as u64, 248_952_832);
}

#[test]
fn rewriting_a_model_is_byte_identical() {
    for dtype in [DType::F32, DType::BF16] {
        let bytes = bytes_of(&TINY, dtype);
        let reader = ModelReader::new(Source::from_bytes("m", bytes.clone())).unwrap();
        let written = write_model(&reader, Sink::memory(), dtype).unwrap();
        assert!(written.memory == bytes, "{dtype}");
        assert_eq!(written.crc32, reader.crc32().unwrap(), "{dtype}");
    }
}

#[test]
fn stored_bytes_can_be_copied_without_conversion() {
    let bytes = bytes_of(&TINY, DType::BF16);
    let reader = ModelReader::new(Source::from_bytes("m", bytes.clone())).unwrap();
    let mut writer = ModelWriter::new(Sink::memory(), &TINY, DType::BF16).unwrap();
    for i in 0..PARAMS.len() {
        reader.read_bytes(i, &mut |chunk| writer.write_bytes(i, chunk)).unwrap();
    }
    assert!(writer.finish().unwrap().memory == bytes);
}

#[test]
fn part_of_a_tensor_can_be_read() {
    let reader = ModelReader::new(Source::from_bytes("m", bytes_of(&TINY, DType::F32))).unwrap();
    let mut out = [0.0; 5];
    reader.read_f32_at(1, 3, &mut out).unwrap();
    let start = TINY.param_numel(0) + 3;
    assert_eq!(out, values(&TINY)[start..start + 5]);
    let past = reader.tensor_len(1) - 4;
    assert!(reader.read_f32_at(1, past, &mut out).unwrap_err().to_string().contains("`wpe`"));
}

#[test]
fn conversion_between_files_narrows_and_widens() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("a32.bin"), bytes_of(&TINY, DType::F32)).unwrap();
    convert_model(&path("a32.bin"), &path("a16.bin"), DType::BF16).unwrap();
    assert!(fs::read(path("a16.bin")).unwrap() == bytes_of(&TINY, DType::BF16));
    convert_model(&path("a16.bin"), &path("b32.bin"), DType::F32).unwrap();
    convert_model(&path("b32.bin"), &path("b16.bin"), DType::BF16).unwrap();
    assert!(fs::read(path("b16.bin")).unwrap() == bytes_of(&TINY, DType::BF16));
}

#[test]
fn a_file_can_be_converted_onto_itself() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.bin");
    fs::write(&path, bytes_of(&TINY, DType::F32)).unwrap();
    convert_model(&path, &path, DType::BF16).unwrap();
    assert!(fs::read(&path).unwrap() == bytes_of(&TINY, DType::BF16));
}

#[test]
fn tensors_longer_than_a_chunk_survive() {
    let config = Gpt2Config { vocab_size: 3000, padded_vocab_size: 3072, channels: 24, ..TINY };
    for dtype in [DType::F32, DType::BF16] {
        let bytes = bytes_of(&config, dtype);
        let reader = ModelReader::new(Source::from_bytes("m", bytes.clone())).unwrap();
        assert!(write_model(&reader, Sink::memory(), dtype).unwrap().memory == bytes, "{dtype}");
        let mut wte = vec![0.0; config.param_numel(0)];
        reader.read_f32_at(0, 0, &mut wte).unwrap();
        assert_eq!(wte.last(), read_all(&reader)[..wte.len()].last());
    }
}

#[test]
fn a_wrong_magic_number_is_refused() {
    assert_eq!(refusal(with_word(0, 1)).0, 0);
    let (_, message) = refusal(with_word(0, 20240520));
    assert!(message.contains("this is a token shard"), "{message}");
}

#[test]
fn an_unknown_version_is_refused() {
    for version in [1, 2, 4, 6, -3] {
        let (offset, message) = refusal(with_word(1, version));
        assert!(offset == 4 && message.contains(&version.to_string()), "{message}");
    }
}

#[test]
fn a_version_of_the_other_precision_does_not_fit_the_length() {
    assert!(refusal(with_word(1, 5)).1.contains("bytes"));
}

#[test]
fn sizes_must_be_positive() {
    for word in 2..8 {
        for value in [0, -1, i32::MIN] {
            assert_eq!(refusal(with_word(word, value)).0, 4 * word as u64, "word {word} = {value}");
        }
    }
}

#[test]
fn heads_must_divide_channels() {
    assert_eq!(refusal(with_word(5, 5)).0, 20);
}

#[test]
fn the_padded_vocabulary_must_hold_the_vocabulary() {
    assert_eq!(refusal(with_word(3, 38)).0, 12 + 16);
}

#[test]
fn sizes_whose_product_overflows_are_refused_without_allocating() {
    let mut bytes = with_word(2, i32::MAX);
    for word in 2..8 {
        bytes[4 * word..4 * word + 4].copy_from_slice(&i32::MAX.to_le_bytes());
    }
    assert!(refusal(bytes).1.contains("more bytes than a file can have"));
}

#[test]
fn a_size_larger_than_the_file_is_refused_without_allocating() {
    assert!(refusal(with_word(2, i32::MAX)).1.contains("bytes"));
}

#[test]
fn a_truncated_file_is_refused_at_its_end() {
    let good = bytes_of(&TINY, DType::F32);
    for len in [0, 1, 1023, 1024, good.len() - 1] {
        let (offset, _) = refusal(good[..len].to_vec());
        assert!(offset == len as u64 || len < 1024, "length {len}, offset {offset}");
    }
}

#[test]
fn trailing_bytes_are_refused() {
    let mut bytes = bytes_of(&TINY, DType::F32);
    let end = bytes.len() as u64;
    bytes.push(0);
    assert_eq!(refusal(bytes).0, end);
}

#[test]
fn a_missing_file_and_a_folder_name_their_path() {
    let dir = tempfile::tempdir().unwrap();
    for path in [dir.path().join("none.bin"), dir.path().to_owned()] {
        let message = ModelReader::open(&path).unwrap_err().to_string();
        assert!(message.contains(path.to_str().unwrap()), "{message}");
    }
}

#[test]
fn tensors_out_of_order_are_refused_by_name() {
    let mut writer = ModelWriter::new(Sink::memory(), &TINY, DType::F32).unwrap();
    let message = writer.write_f32(1, &[0.0]).unwrap_err().to_string();
    assert!(message.contains("`wpe`") && message.contains("`wte`"), "{message}");
}

#[test]
fn too_many_elements_are_refused() {
    let mut writer = ModelWriter::new(Sink::memory(), &TINY, DType::F32).unwrap();
    assert!(writer.write_f32(0, &vec![0.0; TINY.param_numel(0) + 1]).is_err());
}

#[test]
fn writing_past_the_last_tensor_is_refused() {
    let all = values(&TINY);
    let mut writer = ModelWriter::new(Sink::memory(), &TINY, DType::F32).unwrap();
    for i in 0..PARAMS.len() {
        writer.write_f32(i, &all[..TINY.param_numel(i)]).unwrap();
    }
    assert!(writer.write_f32(15, &[0.0]).is_err());
    assert!(writer.write_f32(16, &[0.0]).is_err());
}

#[test]
fn an_incomplete_model_never_appears() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.bin");
    let mut writer = ModelWriter::create(&path, &TINY, DType::F32).unwrap();
    writer.write_f32(0, &vec![0.0; TINY.param_numel(0)]).unwrap();
    assert!(writer.finish().unwrap_err().to_string().contains("`wpe` is incomplete"));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn f16_and_impossible_models_cannot_be_written() {
    assert!(ModelWriter::new(Sink::memory(), &TINY, DType::F16).is_err());
    assert!(ModelWriter::new(Sink::memory(), &Gpt2Config { heads: 5, ..TINY }, DType::F32).is_err());
    let huge = Gpt2Config { max_seq_len: 1 << 33, ..TINY };
    assert!(ModelWriter::new(Sink::memory(), &huge, DType::F32).is_err());
}

#[test]
fn half_an_element_cannot_be_written() {
    let mut writer = ModelWriter::new(Sink::memory(), &TINY, DType::F32).unwrap();
    assert!(writer.write_bytes(0, &[0; 6]).is_err());
}

#[test]
fn writing_into_a_missing_folder_is_an_error() {
    assert!(ModelWriter::create(Path::new("no/such/folder/m.bin"), &TINY, DType::F32).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_shape_round_trips(t in 1usize..9, v in 1usize..20, pad in 0usize..9, l in 1usize..4, nh in 1usize..4, hs in 1usize..5) {
        let config = Gpt2Config {
            max_seq_len: t, vocab_size: v, padded_vocab_size: v + pad, layers: l, heads: nh, channels: nh * hs,
        };
        for dtype in [DType::F32, DType::BF16] {
            let bytes = bytes_of(&config, dtype);
            let reader = ModelReader::new(Source::from_bytes("m", bytes.clone())).unwrap();
            prop_assert_eq!(reader.config(), &config);
            prop_assert!(write_model(&reader, Sink::memory(), dtype).unwrap().memory == bytes);
        }
    }

    #[test]
    fn any_change_of_the_header_or_length_is_an_error_or_a_consistent_model(at in 0usize..40, byte: u8, cut in 0usize..9000) {
        let mut bytes = bytes_of(&TINY, DType::F32);
        bytes[at] = byte;
        bytes.truncate(bytes.len().saturating_sub(cut));
        if let Ok(reader) = ModelReader::new(Source::from_bytes("m", bytes)) {
            prop_assert_eq!(read_all(&reader).len(), reader.config().parameter_count());
        }
    }
}
