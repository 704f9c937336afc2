//! Debug state: one batch with its logits, loss and gradients, which a trainer is checked against.
//!
//! llm.c writes magic 20240327 version 2. llm.mojo writes magic 20240520 (which is also the token shards') version 3: the same content followed by activations.

use std::path::Path;

use super::{DAMAGED, Finished, HEADER_BYTES, Header, Sink, Source, argument, param_counts};
use crate::gpt2::{Gpt2Config, PARAMS};
use crate::{DType, Result};

const MAGIC: i32 = 20240327;
const MAGIC_MOJO: i32 = 20240520;
const OP: &str = "format.debug_state";

/// Which program's layout a debug state has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Variant {
    /// llm.c's: ends after the gradients.
    LlmC,
    /// llm.mojo's: activations follow.
    LlmMojo,
}

/// Reads a debug state of a known model.
#[derive(Debug)]
pub struct DebugStateReader {
    source: Source,
    variant: Variant,
    vocab: usize,
    batch: usize,
    seq_len: usize,
    counts: [u64; 16],
    // Byte offsets of logits, loss, gradients and whatever follows.
    logits: u64,
    loss: u64,
    grads: u64,
    end: u64,
}

impl DebugStateReader {
    /// Opens a debug state that was made with a model of this shape: the file does not say.
    pub fn open(path: &Path, config: &Gpt2Config) -> Result<Self> {
        Self::new(Source::open(path)?, config)
    }

    /// Checks header and length of an open source.
    pub fn new(source: Source, config: &Gpt2Config) -> Result<Self> {
        let header = Header::read(&source, "a debug state")?;
        let variant = match (header.get(0), header.get(1)) {
            (MAGIC, 2) => Variant::LlmC,
            (MAGIC_MOJO, 3) => Variant::LlmMojo,
            (MAGIC_MOJO, 1) => {
                return Err(source.error(0, "this is a token shard, not a debug state", "give a debug state"));
            }
            (MAGIC | MAGIC_MOJO, _) => return Err(header.version_error(&source, "2 (llm.c) and 3 (llm.mojo)")),
            _ => {
                header.expect_magic(&source, MAGIC, "a debug state")?;
                unreachable!("the magic number is another one")
            }
        };
        let batch = header.count(&source, 2, "the batch size", 1)?;
        let seq_len = header.count(&source, 3, "the sequence length", 1)?;
        if seq_len > config.max_seq_len {
            let what = format!("the sequence length is {seq_len}, the model has {} positions", config.max_seq_len);
            return Err(source.error(12, what, "give the model that the state was made with"));
        }
        let Some(counts) = param_counts(config) else {
            return Err(argument(OP, format!("{config:?} is larger than a file")));
        };
        // Batch and length are below 2^31 each and so is the vocabulary: 128 bits hold every product.
        let tokens = batch as u128 * seq_len as u128;
        let logits = u128::from(HEADER_BYTES) + 8 * tokens;
        let loss = logits + 4 * tokens * config.vocab_size as u128;
        let grads = loss + 4;
        let end = grads + 4 * counts.iter().map(|&n| u128::from(n)).sum::<u128>();
        let len = u128::from(source.len());
        let fits = if variant == Variant::LlmC { len == end } else { len >= end };
        if !fits {
            let what = format!(
                "a debug state of batch {batch}, length {seq_len} for {config:?} has {end} bytes, this file has {len}"
            );
            let hint = "copy the file again, and give the model that it was made with";
            return Err(source.error(len.min(end) as u64, what, hint));
        }
        let [logits, loss, grads, end] = [logits, loss, grads, end].map(|x| x as u64);
        let vocab = config.vocab_size;
        Ok(DebugStateReader { source, variant, vocab, batch, seq_len, counts, logits, loss, grads, end })
    }

    /// The layout.
    pub fn variant(&self) -> Variant {
        self.variant
    }

    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Tokens of each sequence.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Bytes of activations after the gradients; 0 in llm.c's variant.
    pub fn activation_bytes(&self) -> u64 {
        self.source.len() - self.end
    }

    fn ids(&self, offset: u64, what: &str) -> Result<Vec<i32>> {
        let bytes = self.source.read_vec(offset, 4 * (self.batch * self.seq_len) as u64, what)?;
        let ids: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect();
        if let Some(i) = ids.iter().position(|&id| id < 0 || id as usize >= self.vocab) {
            let what = format!("token {} in {what} is outside the vocabulary of {}", ids[i], self.vocab);
            return Err(self.source.error(offset + 4 * i as u64, what, DAMAGED));
        }
        Ok(ids)
    }

    /// The input ids, `(batch, seq_len)`.
    pub fn inputs(&self) -> Result<Vec<i32>> {
        self.ids(HEADER_BYTES, "the inputs")
    }

    /// The target ids, `(batch, seq_len)`.
    pub fn targets(&self) -> Result<Vec<i32>> {
        self.ids(HEADER_BYTES + 4 * (self.batch * self.seq_len) as u64, "the targets")
    }

    /// Streams the logits, `(batch, seq_len, vocab)` without padding.
    pub fn logits(&self, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        self.source.stream_f32(self.logits, (self.loss - self.logits) / 4, DType::F32, "the logits", sink)
    }

    /// The mean loss of the batch.
    pub fn loss(&self) -> Result<f32> {
        let mut bytes = [0; 4];
        self.source.read_at(self.loss, &mut bytes, "the loss")?;
        Ok(f32::from_le_bytes(bytes))
    }

    /// Streams the gradient of parameter tensor `index`.
    pub fn gradient(&self, index: usize, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let offset = self.grads + 4 * self.counts[..index].iter().sum::<u64>();
        self.source.stream_f32(offset, self.counts[index], DType::F32, PARAMS[index].name, sink)
    }
}

/// The content of a debug state to be written.
#[derive(Clone, Copy, Debug)]
pub struct DebugState<'a> {
    /// Sequences in the batch.
    pub batch: usize,
    /// Tokens of each sequence.
    pub seq_len: usize,
    /// `(batch, seq_len)`.
    pub inputs: &'a [i32],
    /// `(batch, seq_len)`.
    pub targets: &'a [i32],
    /// `(batch, seq_len, vocab)`.
    pub logits: &'a [f32],
    /// The mean loss.
    pub loss: f32,
    /// All gradients, in parameter order.
    pub gradients: &'a [f32],
}

/// Writes llm.c's variant.
pub fn write_debug_state(mut sink: Sink, config: &Gpt2Config, state: &DebugState) -> Result<Finished> {
    config.validate()?;
    let tokens = state.batch * state.seq_len;
    for (what, got, want) in [
        ("inputs", state.inputs.len(), tokens),
        ("targets", state.targets.len(), tokens),
        ("logits", state.logits.len(), tokens * config.vocab_size),
        ("gradients", state.gradients.len(), config.parameter_count()),
    ] {
        if got != want {
            return Err(argument(OP, format!("{got} {what} were given, the shapes want {want}")));
        }
    }
    let mut header = Header::new(MAGIC, 2);
    for (word, size) in [(2, state.batch), (3, state.seq_len)] {
        let size = i32::try_from(size).map_err(|_| argument(OP, format!("{size} does not fit the header")))?;
        header.set(word, size);
    }
    header.write(&mut sink)?;
    let mut bytes = Vec::new();
    for ids in [state.inputs, state.targets] {
        bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    }
    sink.write(&bytes)?;
    for values in [state.logits, &[state.loss], state.gradients] {
        for chunk in values.chunks(super::CHUNK) {
            bytes.clear();
            super::encode_f32(chunk, DType::F32, &mut bytes);
            sink.write(&bytes)?;
        }
    }
    sink.finish()
}
