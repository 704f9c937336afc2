//! The bytes behind each token id, and the tokenizer `.bin` that holds them: enough to decode, not to encode.

use std::path::Path;

use super::{DAMAGED, Finished, HEADER_BYTES, Header, Sink, Source, argument};
use crate::Result;

const MAGIC: i32 = 20240328;
const OP: &str = "format.token_table";
/// The end-of-text token that version 1 files imply.
const EOT_V1: usize = 50256;

/// Token bytes by id.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TokenTable {
    bytes: Vec<u8>,
    // Where each token ends in `bytes`.
    ends: Vec<u32>,
    eot: usize,
}

impl TokenTable {
    /// A table of tokens, each of 1 to 255 bytes.
    pub fn new<'a>(tokens: impl IntoIterator<Item = &'a [u8]>, eot: usize) -> Result<Self> {
        let mut table = TokenTable { bytes: Vec::new(), ends: Vec::new(), eot };
        for (id, token) in tokens.into_iter().enumerate() {
            if token.is_empty() || token.len() > 255 {
                return Err(argument(OP, format!("token {id} has {} bytes, 1 to 255 are possible", token.len())));
            }
            table.bytes.extend_from_slice(token);
            table.ends.push(table.bytes.len() as u32);
        }
        if eot >= table.len() || table.len() > 1 << 16 {
            let what =
                format!("end-of-text {eot} of {} tokens; ids are 16 bits and the end is one of them", table.len());
            return Err(argument(OP, what));
        }
        Ok(table)
    }

    /// Tokens in the table.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Never: a table has at least its end-of-text token.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The end-of-text token.
    pub fn eot(&self) -> usize {
        self.eot
    }

    /// The bytes of a token; `None` for an id outside the table.
    pub fn get(&self, id: usize) -> Option<&[u8]> {
        let end = *self.ends.get(id)? as usize;
        let start = id.checked_sub(1).map_or(0, |p| self.ends[p] as usize);
        Some(&self.bytes[start..end])
    }

    /// All tokens in order.
    pub fn iter(&self) -> impl Iterator<Item = &[u8]> {
        (0..self.len()).filter_map(|id| self.get(id))
    }

    /// Opens a tokenizer file of version 1 or 2.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(&Source::open(path)?)
    }

    /// Reads a tokenizer file.
    pub fn read(source: &Source) -> Result<Self> {
        let header = Header::read(source, "a tokenizer file")?;
        header.expect_magic(source, MAGIC, "a tokenizer file")?;
        let vocab = header.count(source, 2, "the vocabulary size", 1)?;
        if vocab > 1 << 16 {
            let what = format!("the vocabulary size is {vocab}, 16-bit ids reach {}", 1 << 16);
            return Err(source.error(8, what, "use a GPT-2 tokenizer file"));
        }
        let (eot, at) = match header.get(1) {
            1 => (EOT_V1, 8),
            2 => (header.count(source, 3, "the end-of-text token", 0)?, 12),
            _ => return Err(header.version_error(source, "1 and 2")),
        };
        if eot >= vocab {
            return Err(source.error(at, format!("end-of-text {eot} is outside the vocabulary of {vocab}"), DAMAGED));
        }
        source.check_range(HEADER_BYTES, 2 * vocab as u64, "the shortest table of that many tokens")?;
        // Read only as much as the largest possible table, whatever follows.
        let body = (source.len() - HEADER_BYTES).min(256 * vocab as u64);
        let raw = source.read_vec(HEADER_BYTES, body, "the tokens")?;
        let mut table =
            TokenTable { bytes: Vec::with_capacity(raw.len() - vocab), ends: Vec::with_capacity(vocab), eot };
        let mut at = 0;
        for id in 0..vocab {
            let offset = HEADER_BYTES + at as u64;
            let len = raw.get(at).map_or(0, |&n| n as usize);
            let Some(token) = raw.get(at + 1..at + 1 + len).filter(|t| !t.is_empty()) else {
                let what = match raw.get(at) {
                    Some(0) => format!("token {id} has length 0"),
                    _ => format!("the file ends inside token {id} of {vocab}"),
                };
                return Err(source.error(offset, what, "copy or write the file again"));
            };
            table.bytes.extend_from_slice(token);
            table.ends.push(table.bytes.len() as u32);
            at += 1 + len;
        }
        let end = HEADER_BYTES + at as u64;
        if end != source.len() {
            let what = format!("{} bytes follow the last token", source.len() - end);
            return Err(source.error(end, what, "copy or write the file again"));
        }
        Ok(table)
    }

    /// Writes a version 2 file.
    pub fn write(&self, mut sink: Sink) -> Result<Finished> {
        let mut header = Header::new(MAGIC, 2);
        header.set(2, self.len() as i32);
        header.set(3, self.eot as i32);
        header.write(&mut sink)?;
        let mut out = Vec::with_capacity(self.bytes.len() + self.len());
        for token in self.iter() {
            out.push(token.len() as u8);
            out.extend_from_slice(token);
        }
        sink.write(&out)?;
        sink.finish()
    }
}

/// llm.c's printing rule: a token that is one byte is shown only when that byte is printable ASCII or white space.
pub fn is_printable(token: &[u8]) -> bool {
    match token {
        [] => false,
        [b] => (b' '..=b'~').contains(b) || (b'\t'..=b'\r').contains(b),
        _ => true,
    }
}
