//! llm.c's model `.bin`: a header and the sixteen parameter tensors, all f32 (version 3) or all bf16 (version 5).

use std::path::Path;

use super::{CHUNK, Finished, HEADER_BYTES, Header, ParamSource, Sink, Source, argument, decode_f32, encode_f32};
use super::{DAMAGED, param_counts};
use crate::gpt2::{Gpt2Config, PARAMS};
use crate::{DType, Error, Result};

const MAGIC: i32 = 20240326;
const OP: &str = "format.model";

/// Reads a model file tensor by tensor, in any order.
#[derive(Debug)]
pub struct ModelReader {
    source: Source,
    config: Gpt2Config,
    dtype: DType,
    counts: [u64; 16],
}

impl ModelReader {
    /// Opens a file and checks its header and length.
    pub fn open(path: &Path) -> Result<Self> {
        Self::new(Source::open(path)?)
    }

    /// Checks header and length of an open source.
    pub fn new(source: Source) -> Result<Self> {
        let header = Header::read(&source, "a model file")?;
        header.expect_magic(&source, MAGIC, "a model file")?;
        let dtype = match header.get(1) {
            3 => DType::F32,
            5 => DType::BF16,
            _ => return Err(header.version_error(&source, "3 (f32) and 5 (bf16)")),
        };
        let size = |word, name| header.count(&source, word, name, 1);
        let config = Gpt2Config {
            max_seq_len: size(2, "the sequence length")?,
            vocab_size: size(3, "the vocabulary size")?,
            layers: size(4, "the number of layers")?,
            heads: size(5, "the number of heads")?,
            channels: size(6, "the number of channels")?,
            padded_vocab_size: size(7, "the padded vocabulary size")?,
        };
        if !config.channels.is_multiple_of(config.heads) {
            let what = format!("{} heads do not divide {} channels", config.heads, config.channels);
            return Err(source.error(20, what, DAMAGED));
        }
        if config.padded_vocab_size < config.vocab_size {
            let what = format!(
                "the padded vocabulary {} is smaller than the vocabulary {}",
                config.padded_vocab_size, config.vocab_size
            );
            return Err(source.error(28, what, DAMAGED));
        }
        let Some(counts) = param_counts(&config) else {
            return Err(source.error(8, "the sizes multiply to more bytes than a file can have", DAMAGED));
        };
        let want = HEADER_BYTES + counts.iter().sum::<u64>() * dtype.size() as u64;
        if source.len() != want {
            let what =
                format!("a {dtype} model of these sizes has {want} bytes, this file has {} ({config:?})", source.len());
            return Err(source.error(source.len().min(want), what, "copy or write the file again"));
        }
        Ok(ModelReader { source, config, dtype, counts })
    }

    /// Elements of tensor `index`.
    pub fn tensor_len(&self, index: usize) -> u64 {
        self.counts[index]
    }

    /// Where tensor `index` starts in the file, in bytes.
    pub fn tensor_offset(&self, index: usize) -> u64 {
        HEADER_BYTES + self.counts[..index].iter().sum::<u64>() * self.dtype.size() as u64
    }

    /// Streams the stored little-endian bytes of tensor `index` in chunks of whole elements.
    pub fn read_bytes(&self, index: usize, sink: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let size = self.dtype.size();
        let bytes = self.counts[index] * size as u64;
        self.source.stream(self.tensor_offset(index), bytes, size, PARAMS[index].name, sink)
    }

    /// Reads part of tensor `index` as f32, from element `start` on, into `out`.
    pub fn read_f32_at(&self, index: usize, start: u64, out: &mut [f32]) -> Result<()> {
        let size = self.dtype.size() as u64;
        if start.checked_add(out.len() as u64).is_none_or(|end| end > self.counts[index]) {
            let what = format!(
                "`{}` has {} elements, asked for {} from {start} on",
                PARAMS[index].name,
                self.counts[index],
                out.len()
            );
            return Err(argument(OP, what));
        }
        let mut offset = self.tensor_offset(index) + start * size;
        let mut buffer = vec![0; out.len().min(CHUNK) * size as usize];
        for piece in out.chunks_mut(CHUNK) {
            let bytes = &mut buffer[..piece.len() * size as usize];
            self.source.read_at(offset, bytes, PARAMS[index].name)?;
            decode_f32(bytes, self.dtype, piece);
            offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// CRC-32 of the whole file, as [`ModelWriter::finish`] returned it when the file was written.
    pub fn crc32(&self) -> Result<u32> {
        let mut crc = crc32fast::Hasher::new();
        self.source.stream(0, self.source.len(), 4, "the file", &mut |chunk| {
            crc.update(chunk);
            Ok(())
        })?;
        Ok(crc.finalize())
    }
}

impl ParamSource for ModelReader {
    fn config(&self) -> &Gpt2Config {
        &self.config
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn read_f32(&self, index: usize, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        self.source.stream_f32(self.tensor_offset(index), self.counts[index], self.dtype, PARAMS[index].name, sink)
    }
}

/// Writes a model file: the tensors in order, each in as many pieces as is convenient.
#[derive(Debug)]
pub struct ModelWriter {
    sink: Sink,
    dtype: DType,
    counts: [u64; 16],
    // The tensor being written and the elements of it that are done; moves on as soon as a tensor is complete.
    index: usize,
    done: u64,
    buffer: Vec<u8>,
}

impl ModelWriter {
    /// Starts a file of f32 (version 3) or bf16 (version 5).
    pub fn create(path: &Path, config: &Gpt2Config, dtype: DType) -> Result<Self> {
        Self::new(Sink::create(path)?, config, dtype)
    }

    /// Starts writing to a sink.
    pub fn new(mut sink: Sink, config: &Gpt2Config, dtype: DType) -> Result<Self> {
        config.validate()?;
        let version = match dtype {
            DType::F32 => 3,
            DType::BF16 => 5,
            other => {
                return Err(Error::config(
                    format!("a model .bin cannot hold {other}"),
                    "write f32 or bf16, or export safetensors",
                ));
            }
        };
        let sizes = [
            config.max_seq_len,
            config.vocab_size,
            config.layers,
            config.heads,
            config.channels,
            config.padded_vocab_size,
        ];
        let mut header = Header::new(MAGIC, version);
        for (word, size) in (2..).zip(sizes) {
            let size = i32::try_from(size).map_err(|_| argument(OP, format!("{size} does not fit the header")))?;
            header.set(word, size);
        }
        let counts = param_counts(config).ok_or_else(|| argument(OP, format!("{config:?} is larger than a file")))?;
        header.write(&mut sink)?;
        Ok(ModelWriter { sink, dtype, counts, index: 0, done: 0, buffer: Vec::new() })
    }

    fn claim(&mut self, index: usize, elements: usize) -> Result<()> {
        if elements == 0 {
            return Ok(());
        }
        if index != self.index || index >= PARAMS.len() {
            let name = |i: usize| PARAMS.get(i).map_or("none", |p| p.name);
            let what = format!("`{}` was written when the next tensor is `{}`", name(index), name(self.index));
            return Err(argument(OP, what));
        }
        self.done += elements as u64;
        if self.done > self.counts[index] {
            let what =
                format!("`{}` has {} elements, {} were written", PARAMS[index].name, self.counts[index], self.done);
            return Err(argument(OP, what));
        }
        if self.done == self.counts[index] {
            self.index += 1;
            self.done = 0;
        }
        Ok(())
    }

    /// Appends elements of tensor `index`, rounded to nearest even when the file holds bf16.
    pub fn write_f32(&mut self, index: usize, values: &[f32]) -> Result<()> {
        self.claim(index, values.len())?;
        for chunk in values.chunks(CHUNK) {
            self.buffer.clear();
            encode_f32(chunk, self.dtype, &mut self.buffer);
            self.sink.write(&self.buffer)?;
        }
        Ok(())
    }

    /// Appends elements of tensor `index` that already are little-endian bytes of the file's dtype.
    pub fn write_bytes(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        if !bytes.len().is_multiple_of(self.dtype.size()) {
            return Err(argument(OP, format!("{} bytes are no whole number of {} elements", bytes.len(), self.dtype)));
        }
        self.claim(index, bytes.len() / self.dtype.size())?;
        self.sink.write(bytes)
    }

    /// Checks that every tensor is complete and makes the file appear.
    pub fn finish(self) -> Result<Finished> {
        if self.index != PARAMS.len() {
            let what = format!(
                "`{}` is incomplete: {} of {} elements were written",
                PARAMS[self.index].name, self.done, self.counts[self.index]
            );
            return Err(argument(OP, what));
        }
        self.sink.finish()
    }
}

/// Writes any parameter source as a model file, streaming.
pub fn write_model(source: &dyn ParamSource, sink: Sink, dtype: DType) -> Result<Finished> {
    let mut writer = ModelWriter::new(sink, source.config(), dtype)?;
    for index in 0..PARAMS.len() {
        source.read_f32(index, &mut |chunk| writer.write_f32(index, chunk))?;
    }
    writer.finish()
}

/// Converts a model file to f32 or bf16 (to nearest even); NaN payloads aside, widening and narrowing again restores the bf16 file.
pub fn convert_model(from: &Path, to: &Path, dtype: DType) -> Result<()> {
    let reader = ModelReader::open(from)?;
    write_model(&reader, Sink::create(to)?, dtype).map(|_| ())
}
