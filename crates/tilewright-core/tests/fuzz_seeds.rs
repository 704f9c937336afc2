//! Runs the fuzz targets over their committed seeds and thousands of deterministic mutations of them.
//!
//! The seeds in `fuzz/corpus/` are files that the writers make here; `TILEWRIGHT_WRITE_SEEDS=1 cargo test --test fuzz_seeds` renews them.

use std::fs;
use std::path::{Path, PathBuf};

use tilewright_core::format::debug_state::{DebugState, write_debug_state};
use tilewright_core::format::eval::{EvalExample, write_eval};
use tilewright_core::format::fuzzing::{DEBUG_CONFIG, STATE_PARAMS, TARGETS};
use tilewright_core::format::hf::export_safetensors;
use tilewright_core::format::model::{ModelReader, ModelWriter};
use tilewright_core::format::shard::ShardWriter;
use tilewright_core::format::state::{DetectorState, Extension, Part, ShuffleState, StateHeader, StateWriter};
use tilewright_core::format::token_table::TokenTable;
use tilewright_core::format::{Sink, Source};
use tilewright_core::gpt2::{Gpt2Config, PARAMS};
use tilewright_core::rng::Mt19937;
use tilewright_core::{DType, Result};

const MUTATIONS: usize = 4000;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus")
}

fn model(dtype: DType) -> Result<Vec<u8>> {
    let config = Gpt2Config { max_seq_len: 2, vocab_size: 3, padded_vocab_size: 4, layers: 1, heads: 1, channels: 2 };
    let mut writer = ModelWriter::new(Sink::memory(), &config, dtype)?;
    for index in 0..PARAMS.len() {
        writer.write_f32(index, &vec![index as f32 + 0.5; config.param_numel(index)])?;
    }
    Ok(writer.finish()?.memory)
}

fn state(llm_c: bool) -> Result<Vec<u8>> {
    let header = StateHeader {
        procs: 1,
        rank: 0,
        use_master: !llm_c,
        should_shuffle: true,
        step: 7,
        rng_state: 13_371_337,
        rng_state_last_update: 99,
        shard_index: 0,
        sample_index: 2,
    };
    let mut writer = StateWriter::new(Sink::memory(), &header, STATE_PARAMS)?;
    for part in [Part::M, Part::V, Part::Master] {
        if part != Part::Master || header.use_master {
            writer.write(part, &[0.25; STATE_PARAMS as usize])?;
        }
    }
    let mut rng = Mt19937::new(42);
    let shuffle = ShuffleState { shards: rng.permutation(2), samples: rng.permutation(5), rng };
    let extension = Extension {
        loss: DetectorState { values: vec![4.5, 4.25], sum: 8.75, sum_sq: 38.3 },
        model_crc32: Some(1),
        other: vec![(*b"NOTE", b"hello".to_vec())],
        ..Extension::default()
    };
    Ok(writer.finish(Some(&shuffle), (!llm_c).then_some(&extension))?.memory)
}

/// Valid files of each target.
fn seeds(target: &str) -> Result<Vec<(&'static str, Vec<u8>)>> {
    Ok(match target {
        "model" => vec![("f32", model(DType::F32)?), ("bf16", model(DType::BF16)?)],
        "state" => vec![("full", state(false)?), ("llmc", state(true)?)],
        "shard" => {
            let mut writer = ShardWriter::new(Sink::memory())?;
            writer.write(&[256, 72, 101, 108, 108, 111])?;
            vec![("hello", writer.finish()?.memory), ("empty", ShardWriter::new(Sink::memory())?.finish()?.memory)]
        }
        "tokenizer" => {
            let table = TokenTable::new([b"a" as &[u8], b" the", &[0xff], b"<|endoftext|>"], 3)?;
            vec![("four", table.write(Sink::memory())?.memory)]
        }
        "eval" => {
            let example = EvalExample { label: 1, context: vec![1, 2, 3], completions: vec![vec![4], vec![5, 6]] };
            vec![
                ("two", write_eval(Sink::memory(), &[example.clone(), EvalExample { label: 0, ..example }])?.memory),
                ("none", write_eval(Sink::memory(), &[])?.memory),
            ]
        }
        "debug_state" => {
            let state = DebugState {
                batch: 1,
                seq_len: 3,
                inputs: &[0, 1, 2],
                targets: &[1, 2, 4],
                logits: &[0.5; 15],
                loss: 1.5,
                gradients: &vec![-1.0; DEBUG_CONFIG.parameter_count()],
            };
            let llmc = write_debug_state(Sink::memory(), &DEBUG_CONFIG, &state)?.memory;
            let mut mojo = llmc.clone();
            mojo[..8].copy_from_slice(&[20240520i32.to_le_bytes(), 3i32.to_le_bytes()].concat());
            mojo.extend([0; 8]);
            vec![("llmc", llmc), ("llmmojo", mojo)]
        }
        "safetensors" => {
            let export = |dtype| -> Result<Vec<u8>> {
                let reader = ModelReader::new(Source::from_bytes("seed", model(DType::F32)?))?;
                Ok(export_safetensors(&reader, Sink::memory(), dtype)?.memory)
            };
            vec![("f32", export(DType::F32)?), ("f16", export(DType::F16)?)]
        }
        other => panic!("no seeds for the target {other}"),
    })
}

/// One of many ways to damage a file; sometimes several of them.
fn mutate(rng: &mut Mt19937, seed: &[u8]) -> Vec<u8> {
    const WORDS: [i32; 12] = [0, 1, -1, 2, 3, 5, 127, 255, 256, 65535, i32::MAX, i32::MIN];
    let mut bytes = seed.to_vec();
    for _ in 0..=rng.random_u32() % 3 {
        let mut below = |n: usize| rng.random_u32() as usize % n.max(1);
        // Headers hold the interesting fields: half of all hits go there.
        let span = if below(2) == 0 { bytes.len().min(140) } else { bytes.len() };
        let at = below(span);
        match below(8) {
            0 if at < bytes.len() => bytes[at] ^= 1 << below(8),
            1 if at < bytes.len() => bytes[at] = below(256) as u8,
            2 => bytes.truncate(below(bytes.len() + 1)),
            3 => bytes.extend(std::iter::repeat_n(below(256) as u8, below(9))),
            4 => {
                let (word, value) = (at / 4 * 4, WORDS[below(WORDS.len())]);
                if let Some(slot) = bytes.get_mut(word..word + 4) {
                    slot.copy_from_slice(&value.to_le_bytes());
                }
            }
            5 => {
                let end = (at + below(16)).min(bytes.len());
                bytes.drain(at.min(end)..end);
            }
            6 => {
                let end = (at + below(16)).min(bytes.len());
                let copy = bytes[at.min(end)..end].to_vec();
                bytes.splice(at..at, copy);
            }
            _ => {
                let other = below(bytes.len());
                if at < bytes.len() && other < bytes.len() {
                    bytes.swap(at, other);
                }
            }
        }
    }
    bytes
}

fn run(target: &str) {
    let (_, body) = TARGETS.into_iter().find(|(name, _)| *name == target).unwrap();
    let folder = corpus().join(target);
    let mut rng = Mt19937::new(target.bytes().map(u32::from).sum());
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} has no seeds", folder.display());
    for path in paths {
        let seed = fs::read(&path).unwrap();
        body(&seed);
        body(&[]);
        for _ in 0..MUTATIONS {
            body(&mutate(&mut rng, &seed));
        }
    }
}

#[test]
fn committed_seeds_are_what_the_writers_make() {
    for (target, body) in TARGETS {
        let folder = corpus().join(target);
        for (name, bytes) in seeds(target).unwrap() {
            let path = folder.join(name);
            if std::env::var_os("TILEWRIGHT_WRITE_SEEDS").is_some() {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            assert!(fs::read(&path).unwrap() == bytes, "{} is out of date", path.display());
            assert!(body(&bytes), "{} is not accepted", path.display());
        }
    }
}

#[test]
fn every_single_byte_change_of_a_small_seed_is_survived() {
    for (target, body) in TARGETS {
        let seed = &seeds(target).unwrap()[0].1;
        for at in 0..seed.len() {
            let mut bytes = seed.clone();
            for value in [0, 1, 0x7f, 0x80, 0xff, seed[at] ^ 1] {
                bytes[at] = value;
                body(&bytes);
            }
        }
    }
}

#[test]
fn every_truncation_of_a_seed_is_survived() {
    for (target, body) in TARGETS {
        for (_, seed) in seeds(target).unwrap() {
            for len in 0..seed.len() {
                body(&seed[..len]);
            }
        }
    }
}

#[test]
fn mutated_models_are_survived() {
    run("model");
}

#[test]
fn mutated_states_are_survived() {
    run("state");
}

#[test]
fn mutated_shards_are_survived() {
    run("shard");
}

#[test]
fn mutated_tokenizers_are_survived() {
    run("tokenizer");
}

#[test]
fn mutated_evaluations_are_survived() {
    run("eval");
}

#[test]
fn mutated_debug_states_are_survived() {
    run("debug_state");
}

#[test]
fn mutated_safetensors_are_survived() {
    run("safetensors");
}
