//! The header that all llm.c files share: 256 32-bit words.

use super::{DAMAGED, Sink, Source};
use crate::{Error, Result};

pub(crate) const HEADER_BYTES: u64 = 1024;

pub(crate) struct Header {
    words: [i32; 256],
}

impl Header {
    pub(crate) fn new(magic: i32, version: i32) -> Self {
        let mut words = [0; 256];
        words[0] = magic;
        words[1] = version;
        Header { words }
    }

    pub(crate) fn read(source: &Source, what: &str) -> Result<Self> {
        let mut bytes = [0; HEADER_BYTES as usize];
        source.read_at(0, &mut bytes, &format!("the header of {what}"))?;
        let mut words = [0; 256];
        for (w, b) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *w = i32::from_le_bytes(*b);
        }
        Ok(Header { words })
    }

    pub(crate) fn write(&self, sink: &mut Sink) -> Result<()> {
        let bytes: Vec<u8> = self.words.iter().flat_map(|w| w.to_le_bytes()).collect();
        sink.write(&bytes)
    }

    pub(crate) fn get(&self, word: usize) -> i32 {
        self.words[word]
    }

    pub(crate) fn set(&mut self, word: usize, value: i32) {
        self.words[word] = value;
    }

    /// The 64-bit value at words `word` and `word + 1`.
    pub(crate) fn get_u64(&self, word: usize) -> u64 {
        u64::from(self.words[word] as u32) | (u64::from(self.words[word + 1] as u32) << 32)
    }

    pub(crate) fn set_u64(&mut self, word: usize, value: u64) {
        self.words[word] = value as i32;
        self.words[word + 1] = (value >> 32) as i32;
    }

    pub(crate) fn expect_magic(&self, source: &Source, magic: i32, what: &str) -> Result<()> {
        if self.words[0] != magic {
            let found = match kind_of(self.words[0]) {
                Some(kind) => format!("this is {kind}, not {what}"),
                None => format!("magic number {} where {what} has {magic}", self.words[0]),
            };
            return Err(source.error(0, found, format!("give the path of {what}")));
        }
        Ok(())
    }

    pub(crate) fn version_error(&self, source: &Source, want: &str) -> Error {
        let what = format!("version {} of this format is not known, only {want}", self.words[1]);
        source.error(4, what, "write the file again with a current program")
    }

    /// A word that counts something: `min` or more.
    pub(crate) fn count(&self, source: &Source, word: usize, name: &str, min: i32) -> Result<usize> {
        let value = self.words[word];
        if value < min {
            let what = format!("{name} is {value}, it must be at least {min}");
            return Err(source.error(4 * word as u64, what, DAMAGED));
        }
        Ok(value as usize)
    }

    pub(crate) fn flag(&self, source: &Source, word: usize, name: &str) -> Result<bool> {
        match self.words[word] {
            0 => Ok(false),
            1 => Ok(true),
            other => {
                let what = format!("{name} is {other}, it must be 0 or 1");
                Err(source.error(4 * word as u64, what, DAMAGED))
            }
        }
    }
}

/// What a known magic number announces, for messages about a file of the wrong kind.
pub(crate) fn kind_of(magic: i32) -> Option<&'static str> {
    Some(match magic {
        20240326 => "a model file",
        20240327 => "a debug state",
        20240328 => "a tokenizer file",
        20240520 => "a token shard",
        20240522 => "an evaluation file",
        20240527 => "an optimiser state",
        20240801 => "a Llama-3 token shard",
        _ => return None,
    })
}
