//! A byte-level BPE tokenizer of our own: every byte has a piece, so every text can be encoded; a few merges make common English shorter.

use serde_json::{Map, Value, json};

/// Pairs merged, the most frequent first. `Ġ` is the piece of a space.
const MERGES: [(&str, &str); 36] = [
    ("Ġ", "t"),
    ("Ġ", "a"),
    ("h", "e"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
    ("o", "r"),
    ("e", "n"),
    ("Ġ", "o"),
    ("Ġ", "c"),
    ("i", "s"),
    ("e", "s"),
    ("i", "t"),
    ("Ġ", "b"),
    ("Ġ", "f"),
    ("e", "d"),
    ("Ġ", "p"),
    ("in", "g"),
    ("Ġa", "n"),
    ("a", "l"),
    ("o", "u"),
    ("Ġ", "m"),
    ("Ġo", "f"),
    ("Ġt", "o"),
    ("l", "e"),
    ("s", "t"),
    ("Ġan", "d"),
    ("Ġ", "is"),
    ("Ġ", "re"),
    ("st", "ion"),
    ("i", "on"),
    ("on", "t"),
];

const CLS: &str = "[CLS]";
const SEP: &str = "[SEP]";
const PAD: &str = "[PAD]";
const MASK: &str = "[MASK]";
const UNK: &str = "[UNK]";

pub(super) struct Parts {
    /// `tokenizer.json`.
    pub(super) tokenizer: Value,
    /// `tokenizer_config.json`.
    pub(super) config: Value,
    /// Tokens, special ones included.
    pub(super) size: usize,
    /// Ids of special tokens by their roles.
    pub(super) ids: Vec<(&'static str, usize)>,
}

/// The printable character that stands for a byte in byte-level vocabularies: itself where it is printable, else one from U+0100 on.
fn piece(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("below U+0200")
}

pub(super) fn build() -> Parts {
    let mut vocab = Map::new();
    for byte in 0..=255 {
        vocab.insert(piece(byte).to_string(), json!(byte));
    }
    let mut merges = Vec::new();
    for (a, b) in MERGES {
        // A pair whose parts are not there yet would never be met.
        if vocab.contains_key(a) && vocab.contains_key(b) {
            let id = vocab.len();
            vocab.insert(format!("{a}{b}"), json!(id));
            merges.push(json!([a, b]));
        }
    }
    let added = |id: usize, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": content == MASK, "rstrip": false,
            "normalized": false, "special": true})
    };
    let first = vocab.len();
    let special = [UNK, CLS, SEP, PAD, MASK];
    let added: Vec<_> = special.iter().enumerate().map(|(i, s)| added(first + i, s)).collect();
    let size = first + special.len();
    let id = |token: &str| first + special.iter().position(|s| *s == token).expect("a special token");
    let roles = [("cls_token", CLS), ("bos_token", CLS), ("sep_token", SEP), ("eos_token", SEP), ("pad_token", PAD)];
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    Parts {
        tokenizer: json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": byte_level,
            "post_processor": null,
            "decoder": byte_level,
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                "vocab": vocab, "merges": merges},
        }),
        config: json!({
            "clean_up_tokenization_spaces": true,
            "cls_token": CLS,
            "sep_token": SEP,
            "pad_token": PAD,
            "mask_token": {"__type": "AddedToken", "content": MASK, "lstrip": true, "normalized": false, "rstrip": false,
                "single_word": false, "special": true},
            "unk_token": UNK,
            "model_input_names": ["input_ids", "attention_mask"],
            "model_max_length": 8192,
            "tokenizer_class": "PreTrainedTokenizerFast",
        }),
        size,
        ids: roles.iter().map(|&(role, token)| (role, id(token))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::Tokenizer;

    fn tokenizer() -> Tokenizer {
        Tokenizer::from_bytes(build().tokenizer.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn every_text_comes_back_from_its_tokens() {
        let t = tokenizer();
        for text in
            ["", "Where is my card?", " two  spaces\n\ttab", "Müller, 中文, \u{1F600}", "the restoration of an engine"]
        {
            let ids = t.encode_fast(text, false).unwrap().get_ids().to_vec();
            assert!(ids.iter().all(|&id| (id as usize) < build().size));
            assert_eq!(t.decode(&ids, false).unwrap(), text);
        }
    }

    #[test]
    fn merges_shorten_common_words() {
        let encoded = tokenizer().encode(" the and of", false).unwrap();
        assert_eq!(encoded.get_tokens(), ["Ġthe", "Ġand", "Ġof"]);
    }

    #[test]
    fn special_tokens_are_one_id_each_and_found_in_text() {
        let (t, parts) = (tokenizer(), build());
        for name in ["cls_token", "sep_token", "pad_token", "mask_token"] {
            let value = &parts.config[name];
            let content = value.as_str().or(value["content"].as_str()).unwrap();
            let id = t.token_to_id(content).unwrap();
            assert_eq!(t.encode_fast(content, false).unwrap().get_ids(), [id], "{name}");
        }
        assert_eq!(t.get_vocab_size(true), parts.size);
    }

    #[test]
    fn all_bytes_have_pieces_of_their_own() {
        let pieces: std::collections::BTreeSet<char> = (0..=255).map(piece).collect();
        assert_eq!(pieces.len(), 256);
        assert_eq!((piece(b' '), piece(b'a'), piece(0)), ('Ġ', 'a', 'Ā'));
    }
}
