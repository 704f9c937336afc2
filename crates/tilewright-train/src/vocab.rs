//! What token ids mean: GPT-2's vocabulary or plain bytes, a learned vocabulary, or nothing that is known.

use std::path::Path;

use tilewright_core::format::token_table::TokenTable;
use tilewright_core::gpt2::VOCAB_SIZE;
use tilewright_core::tokenizer::{BYTES_VOCAB_SIZE, Tokenizer};
use tilewright_core::{Error, Result};

use crate::bpe::Bpe;

/// A vocabulary.
pub enum Vocabulary {
    /// A built-in one.
    Known(Box<Tokenizer>),
    /// One that was learned from a text.
    Learned(Bpe),
    /// Only its size is known; ids are shown as numbers.
    Ids(usize),
}

impl Vocabulary {
    /// The vocabulary of shards or of a model of which only the size is known.
    pub fn of_size(size: usize) -> Result<Self> {
        match size {
            VOCAB_SIZE | BYTES_VOCAB_SIZE => Ok(Vocabulary::Known(Box::new(Tokenizer::for_vocab(size)?))),
            0 => Err(Error::config("a vocabulary needs tokens", "use --vocab-size 50257 for GPT-2's")),
            _ => Ok(Vocabulary::Ids(size)),
        }
    }

    /// The vocabulary of a tokenizer file. The table of a learned vocabulary is enough to encode with it: see [`crate::bpe`].
    pub fn open(path: &Path) -> Result<Self> {
        if path.extension().is_some_and(|e| e == "bin") {
            let table = TokenTable::open(path)?;
            if table.len() != VOCAB_SIZE {
                let tokens = table.iter().map(<[u8]>::to_vec).collect();
                return Ok(Vocabulary::Learned(Bpe::from_tokens(tokens, table.eot() as u32)?));
            }
        }
        Ok(Vocabulary::Known(Box::new(Tokenizer::open(path)?)))
    }

    /// The vocabulary of a model file: `tokenizer.bin` in its folder, or what its size tells.
    pub fn of_model(model: &Path, size: usize) -> Result<Self> {
        let beside = model.with_file_name("tokenizer.bin");
        if size == VOCAB_SIZE || !beside.exists() {
            return Self::of_size(size);
        }
        let found = Self::open(&beside)?;
        if found.size() != size {
            return Err(Error::config(
                format!("{} has {} tokens, the model {size}", beside.display(), found.size()),
                "put the model's own tokenizer.bin beside it",
            ));
        }
        Ok(found)
    }

    /// Number of tokens.
    pub fn size(&self) -> usize {
        match self {
            Vocabulary::Known(tokenizer) => tokenizer.vocab_size(),
            Vocabulary::Learned(bpe) => bpe.tokens().len(),
            Vocabulary::Ids(size) => *size,
        }
    }

    /// The end-of-text token, with which every document begins.
    pub fn eot(&self) -> u32 {
        match self {
            Vocabulary::Known(tokenizer) => tokenizer.eot().into(),
            Vocabulary::Learned(bpe) => bpe.eot(),
            Vocabulary::Ids(size) => *size as u32 - 1,
        }
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<i32>> {
        match self {
            Vocabulary::Known(tokenizer) => Ok(tokenizer.encode(text)?.into_iter().map(i32::from).collect()),
            Vocabulary::Learned(bpe) => Ok(bpe.encode(text).into_iter().map(|t| t as i32).collect()),
            Vocabulary::Ids(size) => Err(Error::config(
                format!("nothing is known about the vocabulary of {size} tokens, so a text cannot be encoded"),
                "put its tokenizer.bin beside the model",
            )),
        }
    }

    /// The bytes that a token stands for; nothing for the end of text.
    pub fn decode(&self, id: u32) -> Vec<u8> {
        match self {
            _ if id == self.eot() => Vec::new(),
            Vocabulary::Known(tokenizer) => tokenizer.decode_bytes(&[id as u16]),
            Vocabulary::Learned(bpe) => bpe.decode(id).to_vec(),
            Vocabulary::Ids(_) => format!("{id} ").into_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_core::format::Sink;

    fn round_trip(vocab: &Vocabulary, text: &str) {
        let ids = vocab.encode(text).unwrap();
        assert!(ids.iter().all(|id| (*id as usize) < vocab.size()));
        let bytes: Vec<u8> = ids.iter().flat_map(|id| vocab.decode(*id as u32)).collect();
        assert_eq!(bytes, text.as_bytes());
    }

    #[test]
    fn gpt2_and_bytes_are_known_by_their_size() {
        let gpt2 = Vocabulary::of_size(50257).unwrap();
        assert_eq!((gpt2.size(), gpt2.eot()), (50257, 50256));
        assert_eq!(gpt2.encode("Hello world").unwrap(), [15496, 995]);
        let bytes = Vocabulary::of_size(257).unwrap();
        assert_eq!((bytes.size(), bytes.eot()), (257, 256));
        for vocab in [gpt2, bytes] {
            round_trip(&vocab, "It is a truth, \u{e9}t\u{e9} 1813!\n");
            assert!(vocab.decode(vocab.eot()).is_empty());
        }
    }

    #[test]
    fn an_unknown_vocabulary_shows_numbers_and_encodes_nothing() {
        let ids = Vocabulary::of_size(29).unwrap();
        assert_eq!((ids.size(), ids.eot(), ids.decode(7)), (29, 28, b"7 ".to_vec()));
        assert!(ids.encode("a").unwrap_err().to_string().contains("tokenizer.bin"));
        assert!(Vocabulary::of_size(0).is_err());
    }

    #[test]
    fn a_learned_vocabulary_is_found_beside_the_model_and_encodes_alike() {
        let dir = tempfile::tempdir().unwrap();
        let text = "to be or not to be, that is the question; to be is to do";
        let bpe = Bpe::learn(text, 264).unwrap();
        let table = TokenTable::new(bpe.tokens().iter().map(Vec::as_slice), bpe.eot() as usize).unwrap();
        table.write(Sink::create(&dir.path().join("tokenizer.bin")).unwrap()).unwrap();
        let model = dir.path().join("model_00000001.bin");
        let found = Vocabulary::of_model(&model, 264).unwrap();
        round_trip(&found, text);
        let ids: Vec<i32> = bpe.encode(text).into_iter().map(|t| t as i32).collect();
        assert_eq!(found.encode(text).unwrap(), ids);
        let message = Vocabulary::of_model(&model, 265).err().unwrap().to_string();
        assert!(message.contains("264") && message.contains("265"), "{message}");
    }
}
