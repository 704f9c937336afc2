//! Token shards, tokenizer files, evaluation files and debug states.

use std::fs;

use proptest::prelude::*;
use tilewright_core::format::debug_state::{DebugState, DebugStateReader, Variant, write_debug_state};
use tilewright_core::format::eval::{EvalExample, read_eval_from, write_eval};
use tilewright_core::format::shard::{ShardWriter, TokenShard};
use tilewright_core::format::token_table::{TokenTable, is_printable};
use tilewright_core::format::{Sink, Source};
use tilewright_core::gpt2::Gpt2Config;
use tilewright_core::{Error, Result};

fn memory(bytes: Vec<u8>) -> Source {
    Source::from_bytes("data.bin", bytes)
}

/// The offset of the format error.
fn offset<T: std::fmt::Debug>(result: Result<T>) -> u64 {
    match result.unwrap_err() {
        Error::Format { offset, path, .. } if path.to_str() == Some("data.bin") => offset,
        other => panic!("{other:?} is no format error of this file"),
    }
}

fn with_word(mut bytes: Vec<u8>, word: usize, value: i32) -> Vec<u8> {
    bytes[4 * word..4 * word + 4].copy_from_slice(&value.to_le_bytes());
    bytes
}

fn shard_bytes(tokens: &[u16]) -> Vec<u8> {
    let mut writer = ShardWriter::new(Sink::memory()).unwrap();
    for piece in tokens.chunks(3) {
        writer.write(piece).unwrap();
    }
    assert_eq!(writer.len(), tokens.len() as u64);
    writer.finish().unwrap().memory
}

mod shard {
    use super::*;

    #[test]
    fn bytes_are_llm_cs() {
        let bytes = shard_bytes(&[50256, 1, 2]);
        assert_eq!(bytes[..12], [0x88, 0xd8, 0x34, 0x01, 1, 0, 0, 0, 3, 0, 0, 0]);
        assert!(bytes[12..1024].iter().all(|&b| b == 0));
        assert_eq!(bytes[1024..], [0x50, 0xc4, 1, 0, 2, 0]);
    }

    #[test]
    fn tokens_are_read_at_any_offset() {
        let tokens: Vec<u16> = (0..1000).map(|i| i * 50).collect();
        let mut shard = TokenShard::new(memory(shard_bytes(&tokens)), 50257).unwrap();
        assert_eq!(shard.len(), 1000);
        for (start, n) in [(0, 1000), (999, 1), (17, 0), (1000, 0), (500, 257)] {
            let mut out = vec![0; n];
            shard.read_at(start as u64, &mut out).unwrap();
            assert_eq!(out, tokens[start..start + n], "{n} from {start}");
        }
    }

    #[test]
    fn reading_past_the_end_is_refused() {
        let mut shard = TokenShard::new(memory(shard_bytes(&[1, 2, 3])), 10).unwrap();
        for start in [2, 3, u64::MAX] {
            assert!(shard.read_at(start, &mut [0; 2]).unwrap_err().to_string().contains("data.bin"));
        }
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_refused_at_its_byte() {
        let mut shard = TokenShard::new(memory(shard_bytes(&[1, 2, 300, 3])), 257).unwrap();
        shard.read_at(0, &mut [0; 2]).unwrap();
        assert_eq!(offset(shard.read_at(1, &mut [0; 3])), 1024 + 4);
        assert_eq!(offset(shard.check()), 1024 + 4);
        let message = shard.check().unwrap_err().to_string();
        assert!(message.contains("token 300") && message.contains("257"), "{message}");
    }

    #[test]
    fn a_count_that_differs_from_the_length_is_refused() {
        let good = shard_bytes(&[1, 2, 3]);
        for count in [0, 2, 4, i32::MAX] {
            offset(TokenShard::new(memory(with_word(good.clone(), 2, count)), 10));
        }
        assert_eq!(offset(TokenShard::new(memory(with_word(good.clone(), 2, -1)), 10)), 8);
        let mut odd = good.clone();
        odd.push(0);
        assert_eq!(offset(TokenShard::new(memory(odd), 10)), good.len() as u64);
    }

    #[test]
    fn other_kinds_of_files_are_named() {
        let good = shard_bytes(&[1]);
        let message = |bytes| TokenShard::new(memory(bytes), 10).unwrap_err().to_string();
        assert!(message(with_word(good.clone(), 0, 20240801)).contains("Llama-3"));
        assert!(message(with_word(good.clone(), 0, 20240326)).contains("a model file"));
        assert!(message(with_word(good.clone(), 1, 3)).contains("debug state"));
        assert!(message(with_word(good.clone(), 1, 2)).contains("version 2"));
        assert!(message(b"hello".to_vec()).contains("truncated"));
    }

    /// llm.c truncates byte offsets to 32 bits (specification 1.2, defect 2); a sparse file shows that we do not.
    #[test]
    fn defect_2_offsets_beyond_two_gibibytes_are_read() {
        use std::io::{Seek, SeekFrom, Write};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("big.bin");
        let tokens: u64 = 1_600_000_000;
        let mut file = fs::File::create(&path).unwrap();
        file.write_all(&with_word(shard_bytes(&[]), 2, tokens as i32)).unwrap();
        if file.set_len(1024 + 2 * tokens).is_err() {
            return; // A file system without sparse files of this size has nothing to show.
        }
        file.seek(SeekFrom::End(-4)).unwrap();
        file.write_all(&[7, 0, 9, 0]).unwrap();
        let mut shard = TokenShard::open(&path, 50257).unwrap();
        let mut out = [1; 3];
        shard.read_at(tokens - 3, &mut out).unwrap();
        assert_eq!(out, [0, 7, 9]);
    }

    #[test]
    fn an_unfinished_shard_never_appears() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let mut writer = ShardWriter::create(&path).unwrap();
        writer.write(&[1, 2, 3]).unwrap();
        drop(writer);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        let mut writer = ShardWriter::create(&path).unwrap();
        writer.write(&[1, 2, 3]).unwrap();
        writer.finish().unwrap();
        assert_eq!(TokenShard::open(&path, 10).unwrap().len(), 3);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn any_tokens_round_trip(tokens in prop::collection::vec(any::<u16>(), 0..500)) {
            let mut shard = TokenShard::new(memory(shard_bytes(&tokens)), 1 << 16).unwrap();
            let mut out = vec![0; tokens.len()];
            shard.read_at(0, &mut out).unwrap();
            prop_assert_eq!(out, tokens);
        }
    }
}

mod tokenizer_file {
    use super::*;

    fn table() -> TokenTable {
        TokenTable::new([b"a" as &[u8], b" the", &[0xff], &[b'x'; 255]], 3).unwrap()
    }

    fn bytes() -> Vec<u8> {
        table().write(Sink::memory()).unwrap().memory
    }

    #[test]
    fn a_table_round_trips() {
        let read = TokenTable::read(&memory(bytes())).unwrap();
        assert_eq!(read, table());
        assert_eq!((read.len(), read.eot(), read.get(1), read.get(4)), (4, 3, Some(b" the" as &[u8]), None));
        assert!(read.write(Sink::memory()).unwrap().memory == bytes());
    }

    #[test]
    fn bytes_are_llm_cs() {
        let b = bytes();
        assert_eq!(b[..20], [0xc8, 0xd7, 0x34, 0x01, 2, 0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(b[1024..1033], [1, b'a', 4, b' ', b't', b'h', b'e', 1, 0xff]);
    }

    #[test]
    fn version_1_implies_the_end_of_text_of_gpt2() {
        let tokens: Vec<Vec<u8>> = (0..50257u32).map(|i| i.to_string().into_bytes()).collect();
        let table = TokenTable::new(tokens.iter().map(Vec::as_slice), 7).unwrap();
        let v1 = with_word(table.write(Sink::memory()).unwrap().memory, 1, 1);
        assert_eq!(TokenTable::read(&memory(v1)).unwrap().eot(), 50256);
        assert_eq!(offset(TokenTable::read(&memory(with_word(bytes(), 1, 1)))), 8);
    }

    #[test]
    fn every_truncation_is_refused() {
        let good = bytes();
        for len in 0..good.len() {
            offset(TokenTable::read(&memory(good[..len].to_vec())));
        }
    }

    #[test]
    fn lies_are_refused_at_their_byte() {
        let read = |bytes| TokenTable::read(&memory(bytes));
        assert_eq!(offset(read(with_word(bytes(), 0, 1))), 0);
        assert_eq!(offset(read(with_word(bytes(), 1, 3))), 4);
        for vocab in [0, -1, 65537, i32::MAX] {
            assert_eq!(offset(read(with_word(bytes(), 2, vocab))), 8);
        }
        for eot in [-1, 4, i32::MAX] {
            assert_eq!(offset(read(with_word(bytes(), 3, eot))), 12);
        }
        let mut zero = bytes();
        zero[1024] = 0;
        assert_eq!(offset(read(zero)), 1024);
        let mut trailing = bytes();
        trailing.push(0);
        assert_eq!(offset(read(trailing)), bytes().len() as u64);
    }

    #[test]
    fn tokens_that_a_length_byte_cannot_hold_are_refused() {
        assert!(TokenTable::new([b"" as &[u8]], 0).is_err());
        assert!(TokenTable::new([&[0u8; 256] as &[u8]], 0).is_err());
        assert!(TokenTable::new([b"a" as &[u8]], 1).is_err());
    }

    #[test]
    fn single_unprintable_bytes_are_not_printed() {
        for (token, shown) in
            [(b"a" as &[u8], true), (b"\n", true), (b" ", true), (b"~", true), (&[0x7f], false), (&[0xff], false)]
        {
            assert_eq!(is_printable(token), shown, "{token:?}");
        }
        assert!(is_printable(&[0xff, 0xfe]) && !is_printable(b"") && !is_printable(&[7]));
    }
}

mod eval {
    use super::*;

    fn examples() -> Vec<EvalExample> {
        let example = |label, n: u16| EvalExample {
            label,
            context: (0..n).collect(),
            completions: (1..5).map(|k| vec![n; k]).collect(),
        };
        vec![example(0, 3), example(3, 1), example(1, 40)]
    }

    fn bytes() -> Vec<u8> {
        write_eval(Sink::memory(), &examples()).unwrap().memory
    }

    fn read(bytes: Vec<u8>) -> Result<Vec<EvalExample>> {
        read_eval_from(&memory(bytes), 100)
    }

    #[test]
    fn examples_round_trip() {
        assert_eq!(read(bytes()).unwrap(), examples());
        assert!(write_eval(Sink::memory(), &read(bytes()).unwrap()).unwrap().memory == bytes());
    }

    #[test]
    fn words_are_llm_cs() {
        let b = bytes();
        let words: Vec<u16> = b[1024..].as_chunks::<2>().0.iter().map(|w| u16::from_le_bytes(*w)).collect();
        // Start, bytes, index, label, completions, then counted runs.
        assert_eq!(words[..12], [65535, 46, 0, 0, 4, 3, 0, 1, 2, 1, 3, 2]);
        assert_eq!(i32::from_le_bytes(b[8..12].try_into().unwrap()), 3);
        assert_eq!(i32::from_le_bytes(b[12..16].try_into().unwrap()), 120);
    }

    #[test]
    fn every_truncation_and_an_extension_are_refused() {
        let good = bytes();
        for len in 0..good.len() {
            offset(read(good[..len].to_vec()));
        }
        let mut long = good.clone();
        long.extend([0, 0]);
        assert_eq!(offset(read(long)), good.len() as u64);
    }

    #[test]
    fn lies_are_refused_at_their_byte() {
        let with = |word: usize, value: u16| {
            let mut b = bytes();
            b[1024 + 2 * word..][..2].copy_from_slice(&value.to_le_bytes());
            offset(read(b)) - 1024
        };
        assert_eq!(with(0, 1), 0, "start");
        assert_eq!(with(1, 10), 2, "shorter than its fixed words");
        assert_eq!(with(1, 47), 2, "odd length");
        assert_eq!(with(1, 200), 2, "longer than the longest");
        assert_eq!(with(2, 1), 4, "index");
        assert_eq!(with(3, 4), 6, "label");
        assert_eq!(with(4, 0), 6, "no completions");
        assert_eq!(with(5, 0), 10, "no context");
        assert_eq!(with(5, 60000), 10, "context beyond the example");
        assert_eq!(with(6, 100), 12, "token outside the vocabulary");
        assert_eq!(offset(read(with_word(bytes(), 1, 2))), 4);
        assert_eq!(offset(read(with_word(bytes(), 2, -1))), 8);
        offset(read(with_word(bytes(), 2, i32::MAX)));
        offset(read(with_word(bytes(), 3, 5)));
    }

    #[test]
    fn examples_that_the_format_cannot_hold_are_refused() {
        let good = examples().remove(0);
        for bad in [
            EvalExample { label: 4, ..good.clone() },
            EvalExample { context: vec![], ..good.clone() },
            EvalExample { context: vec![65535], ..good.clone() },
            EvalExample { context: vec![1; 40_000], ..good.clone() },
            EvalExample { completions: vec![vec![]], ..good },
        ] {
            assert!(write_eval(Sink::memory(), &[bad]).unwrap_err().to_string().contains("example 0"));
        }
    }
}

mod debug_state {
    use super::*;

    const TINY: Gpt2Config =
        Gpt2Config { max_seq_len: 7, vocab_size: 5, padded_vocab_size: 8, layers: 1, heads: 2, channels: 4 };

    fn bytes() -> Vec<u8> {
        let logits: Vec<f32> = (0..30).map(|i| i as f32).collect();
        let gradients: Vec<f32> = (0..TINY.parameter_count()).map(|i| -(i as f32)).collect();
        let state = DebugState {
            batch: 2,
            seq_len: 3,
            inputs: &[0, 1, 2, 3, 4, 0],
            targets: &[1, 2, 3, 4, 0, 1],
            logits: &logits,
            loss: 1.5,
            gradients: &gradients,
        };
        write_debug_state(Sink::memory(), &TINY, &state).unwrap().memory
    }

    fn collect(read: impl FnOnce(&mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()>) -> Vec<f32> {
        let mut out = Vec::new();
        read(&mut |chunk| {
            out.extend_from_slice(chunk);
            Ok(())
        })
        .unwrap();
        out
    }

    fn check(reader: &DebugStateReader) {
        assert_eq!((reader.batch(), reader.seq_len()), (2, 3));
        assert_eq!(reader.inputs().unwrap(), [0, 1, 2, 3, 4, 0]);
        assert_eq!(reader.targets().unwrap(), [1, 2, 3, 4, 0, 1]);
        assert_eq!(collect(|sink| reader.logits(sink)), (0..30).map(|i| i as f32).collect::<Vec<_>>());
        assert_eq!(reader.loss().unwrap(), 1.5);
        assert_eq!(collect(|sink| reader.gradient(1, sink))[0], -32.0);
        let last = collect(|sink| reader.gradient(15, sink));
        assert_eq!(last.last(), Some(&-(TINY.parameter_count() as f32 - 1.0)));
    }

    #[test]
    fn llm_cs_variant_is_read_back() {
        let reader = DebugStateReader::new(memory(bytes()), &TINY).unwrap();
        assert_eq!((reader.variant(), reader.activation_bytes()), (Variant::LlmC, 0));
        check(&reader);
    }

    #[test]
    fn llm_mojos_variant_is_recognised_with_its_activations() {
        let mut mojo = with_word(with_word(bytes(), 0, 20240520), 1, 3);
        mojo.extend([0; 48]);
        let reader = DebugStateReader::new(memory(mojo), &TINY).unwrap();
        assert_eq!((reader.variant(), reader.activation_bytes()), (Variant::LlmMojo, 48));
        check(&reader);
    }

    #[test]
    fn the_published_file_has_the_size_of_the_formula() {
        let c = Gpt2Config::from_descriptor("d12").unwrap();
        assert_eq!(1024 + 4 * (2 * 256 + 256 * c.vocab_size + 1 + c.parameter_count()) as u64, 549_369_860);
    }

    #[test]
    fn a_shard_is_not_taken_for_a_debug_state() {
        let shard = with_word(with_word(bytes(), 0, 20240520), 1, 1);
        let message = DebugStateReader::new(memory(shard), &TINY).unwrap_err().to_string();
        assert!(message.contains("token shard"), "{message}");
    }

    #[test]
    fn lies_are_refused() {
        let read = |bytes| DebugStateReader::new(memory(bytes), &TINY);
        assert_eq!(offset(read(with_word(bytes(), 0, 5))), 0);
        assert_eq!(offset(read(with_word(bytes(), 1, 1))), 4);
        assert_eq!(offset(read(with_word(bytes(), 2, 0))), 8);
        assert_eq!(offset(read(with_word(bytes(), 3, 8))), 12);
        offset(read(with_word(bytes(), 2, i32::MAX)));
        let good = bytes();
        offset(read(good[..good.len() - 1].to_vec()));
        let mut long = good.clone();
        long.push(0);
        assert_eq!(offset(read(long)), good.len() as u64);
        let bigger = Gpt2Config { channels: 6, ..TINY };
        assert!(DebugStateReader::new(memory(good), &bigger).is_err());
    }

    #[test]
    fn a_token_outside_the_vocabulary_is_refused_at_its_byte() {
        let mut bad = bytes();
        bad[1024 + 8] = 9;
        assert_eq!(offset(DebugStateReader::new(memory(bad), &TINY).unwrap().inputs()), 1024 + 8);
        let mut bad = bytes();
        bad[1024 + 24..][..4].copy_from_slice(&(-1i32).to_le_bytes());
        assert_eq!(offset(DebugStateReader::new(memory(bad), &TINY).unwrap().targets()), 1024 + 24);
    }
}
