//! The tokenizer of a checkpoint: text to ids and back, and its four special tokens.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use crate::error::{Error, Result};

/// A loaded tokenizer. Padding and truncation are off; rows are cut as ids. Clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    mask_text: String,
    cls: u32,
    sep: u32,
    pad: u32,
    mask: u32,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Tokenizer { cls, sep, pad, mask, mask_text, .. } = self;
        write!(f, "Tokenizer {{ cls: {cls}, sep: {sep}, pad: {pad}, mask: {mask} {mask_text:?} }}")
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` and `tokenizer_config.json` of a folder, which is `tokenizer/` in a checkpoint. Nothing is written.
    pub fn open(dir: &Path) -> Result<Self> {
        let file = dir.join("tokenizer.json");
        let bytes = std::fs::read(&file).map_err(tilewright_core::Error::io("read", &file))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|e| Error::file(&file, e, "it should be a tokenizer of the Hugging Face library `tokenizers`"))?;
        inner.with_padding(None);
        // Shared by all calls, so that its state may never depend on one of them (trap 26).
        inner.with_truncation(None).map_err(|e| Error::file(&file, e, "truncation could not be switched off"))?;

        let names = dir.join("tokenizer_config.json");
        let text = std::fs::read_to_string(&names).map_err(tilewright_core::Error::io("read", &names))?;
        let config: Value = serde_json::from_str(&text)
            .map_err(|e| Error::file(&names, e, "it should be a JSON object that names the special tokens"))?;
        let special = |key: &str| -> Result<(String, u32)> {
            let entry = config.get(key).map(|v| v.get("content").unwrap_or(v));
            let Some(content) = entry.and_then(Value::as_str).filter(|s| !s.is_empty()) else {
                let what = format!("no `{key}`");
                return Err(Error::file(&names, what, "name it, as a string or as an object with `content`"));
            };
            let Some(id) = inner.token_to_id(content) else {
                let what = format!("`{key}` is {content:?}, which tokenizer.json does not know");
                return Err(Error::file(&names, what, "the two files should come from one checkpoint"));
            };
            Ok((content.to_owned(), id))
        };
        let (_, cls) = special("cls_token")?;
        let (_, sep) = special("sep_token")?;
        let (_, pad) = special("pad_token")?;
        let (mask_text, mask) = special("mask_token")?;
        Ok(Tokenizer { inner: Arc::new(inner), mask_text, cls, sep, pad, mask })
    }

    /// The ids of a text with the mask token's text replaced by a space, so that no marker can come from outside. No special tokens are added; others
    /// that the text spells out become their ids, as they do for the model's authors.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if text.contains(&self.mask_text) {
            self.encode_verbatim(&text.replace(&self.mask_text, " "))
        } else {
            self.encode_verbatim(text)
        }
    }

    /// The ids of a text just as it is.
    pub(crate) fn encode_verbatim(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = self.inner.encode_fast(text, false).map_err(|e| {
            tilewright_core::Error::config(format!("the tokenizer refused a text: {e}"), "check tokenizer.json")
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids; special tokens stay in it and spaces are not cleaned up.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        self.inner.decode(ids, false).map_err(|e| {
            tilewright_core::Error::config(format!("the tokenizer could not decode: {e}"), "check tokenizer.json")
                .into()
        })
    }

    /// The vocabulary's spelling of one id.
    pub fn piece(&self, id: u32) -> String {
        self.inner.id_to_token(id).unwrap_or_else(|| format!("<{id}>"))
    }

    /// The id at the start of a row.
    pub fn cls(&self) -> u32 {
        self.cls
    }

    /// The id between the parts of a row, and at its end.
    pub fn sep(&self) -> u32 {
        self.sep
    }

    /// The id that other engines fill up rows with; this one packs them.
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// The id in front of each option.
    pub fn mask(&self) -> u32 {
        self.mask
    }
}
