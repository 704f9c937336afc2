//! From text to token ids: one of the vocabularies that `data` offers.

use std::path::Path;

use anyhow::bail;
use tilewright_core::format::token_table::TokenTable;
use tilewright_core::tokenizer::Tokenizer;

/// A vocabulary.
pub struct Coder(Tokenizer);

impl Coder {
    /// The vocabulary of that name, or of that file.
    pub fn named(name: &str) -> anyhow::Result<Self> {
        let tokenizer = match name {
            "gpt2" => Tokenizer::gpt2(),
            "bytes" => Tokenizer::bytes(),
            file if Path::new(file).exists() => Tokenizer::open(Path::new(file))?,
            _ => bail!("there is no tokenizer `{name}`; use gpt2, bytes, or the path of tokenizer files"),
        };
        // A table alone may not say how to encode; learn that before hours of work.
        tokenizer.encode("a")?;
        Ok(Coder(tokenizer))
    }

    /// Whether only UTF-8 can be encoded.
    pub fn needs_utf8(&self) -> bool {
        self.0.name() != "bytes"
    }

    /// The end-of-text token.
    pub fn eot(&self) -> u16 {
        self.0.eot()
    }

    /// Appends the tokens of a piece of text, which is UTF-8 where [`needs_utf8`](Self::needs_utf8) asked for it.
    pub fn encode(&self, bytes: &[u8], out: &mut Vec<u16>) -> anyhow::Result<()> {
        if self.needs_utf8() {
            out.extend(self.0.encode(std::str::from_utf8(bytes)?)?);
        } else {
            out.extend(bytes.iter().map(|&b| u16::from(b)));
        }
        Ok(())
    }

    /// The table of all tokens.
    pub fn table(&self) -> &TokenTable {
        self.0.table()
    }
}
