//! The tokens of a run: shards as given, or made from a text.

use std::path::Path;

use tilewright_core::format::model::ModelReader;
use tilewright_core::format::shard::ShardWriter;
use tilewright_core::format::token_table::TokenTable;
use tilewright_core::format::{ParamSource, Sink};
use tilewright_core::{Error, Result};

use crate::bpe::Bpe;
use crate::config::{Data, Model, TrainConfig};
use crate::loader::{Geometry, ShardSet};
use crate::vocab::Vocabulary;

/// Two novels by Jane Austen; see `data/README.md`.
pub const BUNDLED_TEXT: &str = include_str!("../data/austen.txt");

/// The last part of a text that is held back for validation: one in so many.
const VAL_PART: usize = 20;

/// The tokens of a run.
pub struct Prepared {
    /// Training shards.
    pub train: ShardSet,
    /// Validation shards.
    pub val: Option<ShardSet>,
    /// What the tokens mean.
    pub vocab: Vocabulary,
    /// One line about them.
    pub summary: String,
}

/// Opens the shards, after making them when the data is a text. `folder` is where made files go.
pub fn prepare(config: &TrainConfig, folder: &Path) -> Result<Prepared> {
    let geometry = Geometry::single(config.batch, config.seq_len);
    match &config.data {
        Data::Shards { train, val, vocab_size } => {
            let (vocab_size, vocab) = match &config.model {
                Model::File(path) => {
                    let size = ModelReader::open(path)?.config().vocab_size;
                    (&size.clone(), Vocabulary::of_model(path, size)?)
                }
                _ => (vocab_size, Vocabulary::of_size(*vocab_size)?),
            };
            let pattern = if config.overfit { val.as_ref().unwrap_or(train) } else { train };
            let train = ShardSet::find(pattern, "--data", geometry, *vocab_size)?;
            let val = val.as_ref().map(|p| ShardSet::find(p, "--val-data", geometry, *vocab_size)).transpose()?;
            let summary = format!("{} tokens in {} shards", train.tokens(), train.len());
            Ok(Prepared { train, val, vocab, summary })
        }
        Data::Text { path, vocab_size } => {
            let read;
            let (text, name) = match path {
                None => (BUNDLED_TEXT, "two novels by Jane Austen".to_owned()),
                Some(path) => {
                    read = read_text(path)?;
                    (read.as_str(), path.display().to_string())
                }
            };
            let vocab = match &config.model {
                // A trained model keeps the vocabulary that it was trained with.
                Model::File(path) => Vocabulary::of_model(path, ModelReader::open(path)?.config().vocab_size)?,
                _ => Vocabulary::Learned(Bpe::learn(text, *vocab_size)?),
            };
            let (train, val) = split(text);
            let [train_file, val_file] = ["train.bin", "val.bin"].map(|n| folder.join(n));
            write_shard(&train_file, &vocab, train)?;
            write_shard(&val_file, &vocab, val)?;
            if let Vocabulary::Learned(bpe) = &vocab {
                let table = TokenTable::new(bpe.tokens().iter().map(Vec::as_slice), bpe.eot() as usize)?;
                table.write(Sink::create(&folder.join("tokenizer.bin"))?)?;
            }
            let size = vocab.size();
            let too_short = |e| match e {
                Error::Format { what, .. } => Error::config(
                    format!("{name} is too short to train on: {what}"),
                    "use a longer text, or a smaller --batch or --seq-len",
                ),
                other => other,
            };
            let val_set = ShardSet::open(&[val_file], geometry, size).map_err(too_short)?;
            let train_set = ShardSet::open(&[train_file], geometry, size).map_err(too_short)?;
            let train_set = if config.overfit { val_set.clone() } else { train_set };
            let summary = format!(
                "{name}: {:.1} MB, {} tokens of a vocabulary of {size}",
                text.len() as f64 / 1e6,
                train_set.tokens() + val_set.tokens()
            );
            Ok(Prepared { train: train_set, val: Some(val_set), vocab, summary })
        }
    }
}

fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
    String::from_utf8(bytes).map_err(|e| {
        let offset = e.utf8_error().valid_up_to() as u64;
        Error::format(path, offset, "this is not UTF-8 text", "give a plain text file, or shards with --data")
    })
}

/// Training and validation part; the cut lies behind a line.
fn split(text: &str) -> (&str, &str) {
    let want = text.len() - text.len() / VAL_PART;
    let cut = text.as_bytes()[want..].iter().position(|b| *b == b'\n').map_or(want, |i| want + i + 1);
    let cut = (cut..=text.len()).find(|i| text.is_char_boundary(*i)).unwrap_or(text.len());
    text.split_at(cut)
}

/// One shard with one document, which end-of-text precedes.
fn write_shard(path: &Path, vocab: &Vocabulary, text: &str) -> Result<()> {
    let mut tokens = vec![vocab.eot() as u16];
    tokens.extend(vocab.encode(text)?.into_iter().map(|t| t as u16));
    let mut writer = ShardWriter::create(path)?;
    writer.write(&tokens)?;
    writer.finish().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bundled_text_becomes_shards_that_decode_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = TrainConfig::for_text(None);
        config.data = Data::Text { path: None, vocab_size: 512 };
        let prepared = prepare(&config, dir.path()).unwrap();
        let Vocabulary::Learned(bpe) = &prepared.vocab else { panic!("a text has a learned vocabulary") };
        assert_eq!(bpe.tokens().len(), 512);
        let mut text = Vec::new();
        for name in ["train.bin", "val.bin"] {
            let raw = std::fs::read(dir.path().join(name)).unwrap();
            for pair in raw[1024..].chunks(2) {
                text.extend_from_slice(bpe.decode(u32::from(u16::from_le_bytes([pair[0], pair[1]]))));
            }
        }
        assert!(text == BUNDLED_TEXT.as_bytes());
        let table = TokenTable::open(&dir.path().join("tokenizer.bin")).unwrap();
        assert_eq!((table.len(), table.eot()), (512, bpe.eot() as usize));
    }

    #[test]
    fn a_text_of_ones_own_is_read_and_a_short_one_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("book.txt");
        std::fs::write(&path, "It was a dark night.\n".repeat(400)).unwrap();
        let mut config = TrainConfig::for_text(Some(path.clone()));
        (config.batch, config.seq_len) = (1, 4);
        prepare(&config, dir.path()).unwrap();
        std::fs::write(&path, "short").unwrap();
        let message = prepare(&config, dir.path()).err().unwrap().to_string();
        assert!(message.contains("book.txt") && message.contains("--seq-len"), "{message}");
        std::fs::write(&path, b"ab\xff").unwrap();
        let message = prepare(&config, dir.path()).err().unwrap().to_string();
        assert!(message.contains("book.txt: byte 2") && message.contains("UTF-8"), "{message}");
        std::fs::remove_file(&path).unwrap();
        assert!(prepare(&config, dir.path()).err().unwrap().to_string().contains("book.txt"));
    }

    #[test]
    fn the_split_cuts_behind_a_line() {
        let text = "line\n".repeat(100);
        let (train, val) = split(&text);
        assert_eq!((train.len(), val.len()), (480, 20));
        let (train, val) = split("\u{e9}\u{e9}\u{e9}");
        assert_eq!(format!("{train}{val}"), "\u{e9}\u{e9}\u{e9}");
    }
}
