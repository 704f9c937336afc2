//! Token shards: a header and 16-bit token ids.

use std::path::Path;

use super::{Finished, HEADER_BYTES, Header, Sink, Source, argument};
use crate::{Error, Result};

const MAGIC: i32 = 20240520;
const MAGIC_LLAMA3: i32 = 20240801;
const OP: &str = "format.shard";

/// The largest number of tokens that the header can count.
pub const MAX_TOKENS: u64 = i32::MAX as u64;

/// Random access to the tokens of a shard.
#[derive(Debug)]
pub struct TokenShard {
    source: Source,
    tokens: u64,
    vocab: usize,
    buffer: Vec<u8>,
}

impl TokenShard {
    /// Opens a shard and checks header and length. Tokens are checked against `vocab` as they are read.
    pub fn open(path: &Path, vocab: usize) -> Result<Self> {
        Self::new(Source::open(path)?, vocab)
    }

    /// Checks header and length of an open source.
    pub fn new(source: Source, vocab: usize) -> Result<Self> {
        let header = Header::read(&source, "a token shard")?;
        if header.get(0) == MAGIC_LLAMA3 {
            let what = "this is a Llama-3 token shard with 32-bit ids; only 16-bit GPT-2 shards can be trained on";
            return Err(source.error(0, what, "make shards from the text with `tilewright data`"));
        }
        header.expect_magic(&source, MAGIC, "a token shard")?;
        match header.get(1) {
            1 => {}
            3 => {
                let what = "this is llm.mojo's debug state, not a token shard";
                return Err(source.error(4, what, "give the path of a token shard"));
            }
            _ => return Err(header.version_error(&source, "1")),
        }
        let tokens = header.count(&source, 2, "the token count", 0)? as u64;
        let want = HEADER_BYTES + 2 * tokens;
        if source.len() != want {
            let what = format!("{tokens} tokens make {want} bytes, this file has {}", source.len());
            return Err(source.error(source.len().min(want), what, "copy or write the shard again"));
        }
        Ok(TokenShard { source, tokens, vocab, buffer: Vec::new() })
    }

    /// Tokens in the shard.
    pub fn len(&self) -> u64 {
        self.tokens
    }

    /// Whether the shard has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// Fills `out` with the tokens from `start` on. The buffer behind it is kept, so equal requests allocate once.
    pub fn read_at(&mut self, start: u64, out: &mut [u16]) -> Result<()> {
        if start.checked_add(out.len() as u64).is_none_or(|end| end > self.tokens) {
            let what = format!(
                "{} tokens from {start} on were asked of {}, which has {}",
                out.len(),
                self.path().display(),
                self.tokens
            );
            return Err(argument(OP, what));
        }
        let offset = HEADER_BYTES + 2 * start;
        self.buffer.resize(2 * out.len(), 0);
        self.source.read_at(offset, &mut self.buffer, "tokens")?;
        let mut largest = 0;
        for (o, b) in out.iter_mut().zip(self.buffer.as_chunks::<2>().0) {
            *o = u16::from_le_bytes(*b);
            largest = largest.max(*o);
        }
        if largest as usize >= self.vocab {
            let i = out.iter().position(|&t| t as usize >= self.vocab).unwrap_or(0);
            return Err(token_error(&self.source, offset + 2 * i as u64, out[i], self.vocab));
        }
        Ok(())
    }

    /// Checks every token.
    pub fn check(&mut self) -> Result<()> {
        let mut chunk = vec![0; (super::CHUNK as u64).min(self.tokens) as usize];
        let mut start = 0;
        while start < self.tokens {
            let n = (chunk.len() as u64).min(self.tokens - start);
            self.read_at(start, &mut chunk[..n as usize])?;
            start += n;
        }
        Ok(())
    }
}

pub(super) fn token_error(source: &Source, offset: u64, token: u16, vocab: usize) -> Error {
    let what = format!("token {token} is outside the vocabulary of {vocab}");
    source.error(offset, what, "use the model whose tokenizer made the file, or make the file again")
}

/// Writes a shard; the count is filled in at the end.
#[derive(Debug)]
pub struct ShardWriter {
    sink: Sink,
    tokens: u64,
    buffer: Vec<u8>,
}

impl ShardWriter {
    /// Starts a shard.
    pub fn create(path: &Path) -> Result<Self> {
        Self::new(Sink::create(path)?)
    }

    /// Starts writing to a sink.
    pub fn new(mut sink: Sink) -> Result<Self> {
        Header::new(MAGIC, 1).write(&mut sink)?;
        Ok(ShardWriter { sink, tokens: 0, buffer: Vec::new() })
    }

    /// Tokens written so far.
    pub fn len(&self) -> u64 {
        self.tokens
    }

    /// Whether nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Appends tokens.
    pub fn write(&mut self, tokens: &[u16]) -> Result<()> {
        if self.tokens + tokens.len() as u64 > MAX_TOKENS {
            let what = format!("a shard holds at most {MAX_TOKENS} tokens; start another one");
            return Err(argument(OP, what));
        }
        for chunk in tokens.chunks(super::CHUNK) {
            self.buffer.clear();
            self.buffer.extend(chunk.iter().flat_map(|t| t.to_le_bytes()));
            self.sink.write(&self.buffer)?;
        }
        self.tokens += tokens.len() as u64;
        Ok(())
    }

    /// Fills in the count and makes the file appear.
    pub fn finish(mut self) -> Result<Finished> {
        self.sink.patch(8, &(self.tokens as i32).to_le_bytes())?;
        self.sink.finish()
    }
}
