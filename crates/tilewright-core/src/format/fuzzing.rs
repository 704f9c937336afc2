//! The bodies of the fuzz targets in `fuzz/`, which an ordinary test runs over the committed seeds and their mutations too.
//!
//! Whatever the bytes, a reader must not panic or allocate more than the input justifies; what it accepts must be readable to the end, and writing that must
//! give a file which reads the same.

use super::debug_state::DebugStateReader;
use super::eval::{read_eval_from, write_eval};
use super::hf::{HfReader, ImportOptions, export_safetensors};
use super::model::{ModelReader, write_model};
use super::shard::{ShardWriter, TokenShard};
use super::state::{Part, StateReader, StateWriter};
use super::token_table::TokenTable;
use super::{CHUNK, ParamSource, Sink, Source};
use crate::gpt2::{Gpt2Config, PARAMS};
use crate::{DType, Error, Result};

/// A fuzz target's name and body, which says whether it accepted the file.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// All targets.
pub const TARGETS: [Target; 7] = [
    ("model", fuzz_model),
    ("state", fuzz_state),
    ("shard", fuzz_shard),
    ("tokenizer", fuzz_tokenizer),
    ("eval", fuzz_eval),
    ("debug_state", fuzz_debug_state),
    ("safetensors", fuzz_safetensors),
];

/// The model that debug states are read with.
pub const DEBUG_CONFIG: Gpt2Config =
    Gpt2Config { max_seq_len: 4, vocab_size: 5, padded_vocab_size: 6, layers: 1, heads: 1, channels: 2 };

/// The parameters that states are read with.
pub const STATE_PARAMS: u64 = 3;

/// The vocabulary that shards and evaluations are read with.
pub const VOCAB: usize = 257;

fn source(data: &[u8]) -> Source {
    Source::from_bytes("fuzz", data.to_vec())
}

/// Every refusal is about the file's content; anything else is a bug.
fn accept<T>(result: Result<T>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(Error::Format { .. }) => None,
        Err(other) => panic!("not a format error: {other}"),
    }
}

/// The bits of all parameters.
fn params(source: &dyn ParamSource) -> Vec<u32> {
    let mut all = Vec::new();
    for index in 0..PARAMS.len() {
        let read = source.read_f32(index, &mut |chunk| {
            all.extend(chunk.iter().map(|x| x.to_bits()));
            Ok(())
        });
        read.expect("sizes were checked");
    }
    assert_eq!(all.len(), source.config().parameter_count(), "elements");
    all
}

/// A model `.bin`.
pub fn fuzz_model(data: &[u8]) -> bool {
    let Some(reader) = accept(ModelReader::new(source(data))) else { return false };
    let written = write_model(&reader, Sink::memory(), DType::F32).expect("a readable model is writable").memory;
    let again = ModelReader::new(Source::from_bytes("again", written)).expect("what was written is readable");
    assert_eq!(again.config(), reader.config());
    assert_eq!(params(&again), params(&reader));
    true
}

/// An optimiser state.
pub fn fuzz_state(data: &[u8]) -> bool {
    let Some(reader) = accept(StateReader::new(source(data), STATE_PARAMS)) else { return false };
    accept(reader.verify());
    let mut writer = StateWriter::new(Sink::memory(), reader.header(), STATE_PARAMS).expect("the header was read");
    for part in [Part::M, Part::V, Part::Master] {
        if part != Part::Master || reader.header().use_master {
            reader.stream(part, &mut |chunk| writer.write(part, chunk)).expect("sizes were checked");
        }
    }
    let written = writer.finish(reader.shuffle(), reader.extension()).expect("a readable state is writable");
    let again = StateReader::new(Source::from_bytes("again", written.memory), STATE_PARAMS).expect("readable again");
    again.verify().expect("a fresh checksum");
    assert_eq!(again.header(), reader.header());
    assert_eq!(again.shuffle(), reader.shuffle());
    true
}

/// A token shard.
pub fn fuzz_shard(data: &[u8]) -> bool {
    let Some(mut shard) = accept(TokenShard::new(source(data), VOCAB)) else { return false };
    let checked = accept(shard.check()).is_some();
    let mut tokens = vec![0; shard.len().min(CHUNK as u64) as usize];
    if accept(shard.read_at(0, &mut tokens)).is_some() && tokens.len() as u64 == shard.len() {
        assert!(checked && tokens.iter().all(|&t| usize::from(t) < VOCAB));
        let mut writer = ShardWriter::new(Sink::memory()).expect("memory");
        writer.write(&tokens).expect("it was read");
        let written = writer.finish().expect("memory").memory;
        assert_eq!(written[1024..], data[1024..]);
    }
    true
}

/// A tokenizer `.bin`.
pub fn fuzz_tokenizer(data: &[u8]) -> bool {
    let Some(table) = accept(TokenTable::read(&source(data))) else { return false };
    assert!(table.iter().all(|t| !t.is_empty()) && table.eot() < table.len());
    let written = table.write(Sink::memory()).expect("memory").memory;
    assert_eq!(written[1024..], data[1024..]);
    assert_eq!(TokenTable::read(&Source::from_bytes("again", written)).expect("readable again"), table);
    true
}

/// An evaluation file.
pub fn fuzz_eval(data: &[u8]) -> bool {
    let Some(examples) = accept(read_eval_from(&source(data), VOCAB)) else { return false };
    let written = write_eval(Sink::memory(), &examples).expect("readable examples are writable").memory;
    assert_eq!(written[1024..], data[1024..]);
    true
}

/// A debug state of [`DEBUG_CONFIG`].
pub fn fuzz_debug_state(data: &[u8]) -> bool {
    let Some(reader) = accept(DebugStateReader::new(source(data), &DEBUG_CONFIG)) else { return false };
    let tokens = reader.batch() * reader.seq_len();
    for ids in [accept(reader.inputs()), accept(reader.targets())].into_iter().flatten() {
        assert!(ids.len() == tokens && ids.iter().all(|&id| (0..DEBUG_CONFIG.vocab_size as i32).contains(&id)));
    }
    let mut count = 0;
    let mut tally = |chunk: &[f32]| {
        count += chunk.len();
        Ok(())
    };
    reader.logits(&mut tally).expect("sizes were checked");
    for index in 0..PARAMS.len() {
        reader.gradient(index, &mut tally).expect("sizes were checked");
    }
    assert_eq!(count, tokens * DEBUG_CONFIG.vocab_size + DEBUG_CONFIG.parameter_count());
    reader.loss().expect("sizes were checked");
    true
}

/// A safetensors file of a GPT-2 with one head.
pub fn fuzz_safetensors(data: &[u8]) -> bool {
    let options = ImportOptions { heads: Some(1), vocab_multiple: 4 };
    let Some(reader) = accept(HfReader::from_bytes("fuzz", data.to_vec(), None, &options)) else { return false };
    let written = export_safetensors(&reader, Sink::memory(), DType::F32).expect("memory").memory;
    let again = HfReader::from_bytes("again", written, None, &options).expect("what was written is readable");
    assert_eq!(again.config(), reader.config());
    assert_eq!(params(&again), params(&reader));
    true
}
