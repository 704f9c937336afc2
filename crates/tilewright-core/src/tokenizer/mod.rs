//! Text to token ids and back.

mod vocab_files;

use std::fmt;
use std::path::Path;

use tiktoken_rs::CoreBPE;

use crate::format::token_table::TokenTable;
use crate::format::{Sink, Source};
use crate::gpt2::VOCAB_SIZE;
use crate::{Error, Result};

/// How the end-of-text token is spelled.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// Ids of the byte tokenizer: 256 bytes and the end of text.
pub const BYTES_VOCAB_SIZE: usize = 257;

/// Whitespace runs of this many characters are cut for the regex engine, whose stack they would overflow.
const LONG_WHITESPACE: usize = 256;

/// A vocabulary of at most 65536 tokens, and (unless it came from a file that can only decode) the way to encode with it.
pub struct Tokenizer {
    table: TokenTable,
    encoder: Encoder,
}

enum Encoder {
    Bytes,
    Gpt2(&'static CoreBPE),
    Loaded(Box<CoreBPE>),
    DecodeOnly,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer").field("name", &self.name()).field("vocab_size", &self.vocab_size()).finish()
    }
}

impl Tokenizer {
    /// GPT-2's byte-pair encoding. The first call builds its tables, which takes about a tenth of a second.
    pub fn gpt2() -> Self {
        let bpe = tiktoken_rs::r50k_base_singleton();
        let tokens: Vec<Vec<u8>> =
            (0..VOCAB_SIZE as u32).map(|id| bpe.decode_bytes(&[id]).unwrap_or_default()).collect();
        let table =
            TokenTable::new(tokens.iter().map(Vec::as_slice), VOCAB_SIZE - 1).expect("the crate's vocabulary is whole");
        Tokenizer { table, encoder: Encoder::Gpt2(bpe) }
    }

    /// One token a byte, and the end of text: the tokenizer of small models.
    pub fn bytes() -> Self {
        let all: [u8; 256] = std::array::from_fn(|b| b as u8);
        let tokens = all.chunks(1).chain([END_OF_TEXT.as_bytes()]);
        let table = TokenTable::new(tokens, BYTES_VOCAB_SIZE - 1).expect("257 tokens of a byte or more");
        Tokenizer { table, encoder: Encoder::Bytes }
    }

    /// The built-in tokenizer that makes models of this vocabulary.
    pub fn for_vocab(vocab_size: usize) -> Result<Self> {
        match vocab_size {
            BYTES_VOCAB_SIZE => Ok(Self::bytes()),
            VOCAB_SIZE => Ok(Self::gpt2()),
            other => Err(Error::config(
                format!("no built-in tokenizer has {other} tokens"),
                format!("give a tokenizer file; built in are bytes ({BYTES_VOCAB_SIZE}) and GPT-2 ({VOCAB_SIZE})"),
            )),
        }
    }

    /// Opens a tokenizer: a `.bin`, or a folder (or the `.json` in it) with `vocab.json` and `merges.txt`, or `encoder.json` and `vocab.bpe`.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_dir() || path.extension().is_some_and(|e| e == "json") {
            vocab_files::open(path)
        } else {
            Ok(Self::from_table(TokenTable::open(path)?))
        }
    }

    /// Reads a tokenizer `.bin`.
    pub fn read_bin(source: &Source) -> Result<Self> {
        Ok(Self::from_table(TokenTable::read(source)?))
    }

    /// A table of tokens. It can encode only when it is one of the built-in vocabularies: the table alone does not say how.
    pub fn from_table(table: TokenTable) -> Self {
        if let Ok(known) = Self::for_vocab(table.len())
            && known.table == table
        {
            return known;
        }
        Tokenizer { table, encoder: Encoder::DecodeOnly }
    }

    /// The name for logs.
    pub fn name(&self) -> &'static str {
        match self.encoder {
            Encoder::Bytes => "bytes",
            Encoder::Gpt2(_) => "gpt2",
            Encoder::Loaded(_) => "bpe",
            Encoder::DecodeOnly => "decode-only",
        }
    }

    /// The number of tokens.
    pub fn vocab_size(&self) -> usize {
        self.table.len()
    }

    /// The end-of-text token, which starts every document.
    pub fn eot(&self) -> u16 {
        self.table.eot() as u16
    }

    /// The bytes behind each id.
    pub fn table(&self) -> &TokenTable {
        &self.table
    }

    /// Encodes text. Nothing in it is special: `<|endoftext|>` is encoded as the characters that it is.
    pub fn encode(&self, text: &str) -> Result<Vec<u16>> {
        let bpe = match &self.encoder {
            Encoder::Bytes => return Ok(text.bytes().map(u16::from).collect()),
            Encoder::Gpt2(bpe) => bpe,
            Encoder::Loaded(bpe) => &**bpe,
            Encoder::DecodeOnly => {
                return Err(Error::config(
                    "this tokenizer file can decode, but it does not say how to encode",
                    "give a folder with vocab.json and merges.txt, or one of the built-in tokenizers",
                ));
            }
        };
        let mut tokens = Vec::with_capacity(text.len() / 3);
        for piece in split_long_whitespace(text) {
            tokens.extend(bpe.encode_ordinary(piece).into_iter().map(|id| id as u16));
        }
        Ok(tokens)
    }

    /// The bytes of some tokens; ids outside the vocabulary give U+FFFD.
    pub fn decode_bytes(&self, tokens: &[u16]) -> Vec<u8> {
        let token = |&id: &u16| self.table.get(id.into()).unwrap_or("\u{fffd}".as_bytes());
        tokens.iter().flat_map(token).copied().collect()
    }

    /// The text of some tokens; bytes that are no UTF-8 give U+FFFD.
    pub fn decode(&self, tokens: &[u16]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(tokens)).into_owned()
    }

    /// Decodes token by token.
    pub fn stream(&self) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, pending: Vec::new() }
    }

    /// Writes the decoder as llm.c's tokenizer `.bin`, version 2.
    pub fn write_bin(&self, path: &Path) -> Result<()> {
        self.table.write(Sink::create(path)?).map(|_| ())
    }
}

/// Turns tokens into text as they come, holding back a character until its last byte is there.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    pending: Vec<u8>,
}

impl StreamDecoder<'_> {
    /// The text that this token completes; often all of it, sometimes nothing.
    pub fn push(&mut self, token: u16) -> String {
        self.pending.extend(self.tokenizer.decode_bytes(&[token]));
        let mut text = String::new();
        let mut at = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
            at += chunk.valid().len();
            let bad = chunk.invalid();
            if at + bad.len() == self.pending.len() && is_prefix_of_char(bad) {
                break;
            }
            if !bad.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
                at += bad.len();
            }
        }
        self.pending.drain(..at);
        text
    }

    /// What is left when no more tokens come: a replacement for an unfinished character.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// Whether more bytes could turn these, which are no valid UTF-8, into a character.
fn is_prefix_of_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

/// Cuts text where GPT-2's splitting pattern has a boundary in any case: before the last character of a long run of whitespace that something follows.
///
/// The pattern gives all but that last character to one piece, and a run that ends its text wholly to one piece, so the pieces are those of the uncut text. The
/// uncut text would make the regex engine remember every character of the run and fail.
fn split_long_whitespace(text: &str) -> impl Iterator<Item = &str> {
    let mut cuts = Vec::new();
    let (mut run, mut last) = (0, 0);
    for (at, c) in text.char_indices() {
        if c.is_whitespace() {
            run += 1;
            last = at;
        } else {
            if run >= LONG_WHITESPACE {
                cuts.push(last);
            }
            run = 0;
        }
    }
    cuts.push(text.len());
    let mut start = 0;
    cuts.into_iter().map(move |end| &text[std::mem::replace(&mut start, end)..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpt2_encodes_as_published() {
        let t = Tokenizer::gpt2();
        assert_eq!(
            t.encode("Hello world, it's  a\n\n test   ").unwrap(),
            [15496, 995, 11, 340, 338, 220, 257, 628, 1332, 220, 220, 220]
        );
        assert_eq!((t.vocab_size(), t.eot()), (50257, 50256));
        assert_eq!(t.decode(&[50256]), "<|endoftext|>");
        assert_eq!(t.table().get(0), Some(b"!" as &[u8]));
    }

    #[test]
    fn the_end_of_text_in_a_text_is_not_special() {
        let t = Tokenizer::gpt2();
        let tokens = t.encode(END_OF_TEXT).unwrap();
        assert!(tokens.len() > 1 && !tokens.contains(&t.eot()));
        assert_eq!(t.decode(&tokens), END_OF_TEXT);
    }

    #[test]
    fn text_survives_encoding_and_decoding() {
        for t in [Tokenizer::gpt2(), Tokenizer::bytes()] {
            for text in
                ["", "a", "naïve 日本語 😀\u{1f468}\u{200d}\u{1f469}", "\u{0}\u{7f}\r\n\t  x", "don't I'LL 12345 ½²"]
            {
                assert_eq!(t.decode(&t.encode(text).unwrap()), text, "{t:?}");
            }
        }
    }

    #[test]
    fn whitespace_of_any_length_is_encoded() {
        let t = Tokenizer::gpt2();
        for blank in [" ", "\n", "\u{2003}", "\t \r\n"] {
            for n in [1, 255, 256, 257, 100_000] {
                for end in ["", "x", "!", "\n"] {
                    let text = format!("a{}{end}", blank.repeat(n));
                    assert_eq!(t.decode(&t.encode(&text).unwrap()), text, "{n} of {blank:?}");
                }
            }
        }
    }

    #[test]
    fn cutting_whitespace_does_not_change_the_tokens() {
        let Encoder::Gpt2(bpe) = Tokenizer::gpt2().encoder else { panic!("not GPT-2") };
        let t = Tokenizer::gpt2();
        for blank in [" ", "\n", "\t ", "\u{a0}"] {
            for n in [2, 256, 300] {
                for (start, end) in [("", ""), ("a", "b"), (".", "'s"), ("1", "!"), ("a\n", "\n2"), ("", "é")] {
                    let text = format!("{start}{}{end}", blank.repeat(n));
                    let want: Vec<u16> = bpe.encode_ordinary(&text).into_iter().map(|id| id as u16).collect();
                    assert_eq!(t.encode(&text).unwrap(), want, "{n} of {blank:?} between {start:?} and {end:?}");
                }
            }
        }
    }

    #[test]
    fn long_words_are_encoded() {
        let text = "a".repeat(50_000) + &"!".repeat(50_000);
        assert_eq!(Tokenizer::gpt2().decode(&Tokenizer::gpt2().encode(&text).unwrap()), text);
    }

    #[test]
    fn bytes_are_their_own_ids() {
        let t = Tokenizer::bytes();
        assert_eq!(t.encode("aé").unwrap(), [97, 0xc3, 0xa9]);
        assert_eq!((t.vocab_size(), t.eot(), t.name()), (257, 256, "bytes"));
    }

    #[test]
    fn a_character_is_held_back_until_it_is_complete() {
        let t = Tokenizer::bytes();
        let mut stream = t.stream();
        let parts: Vec<String> = "a€b".bytes().map(|b| stream.push(b.into())).collect();
        assert_eq!(parts, ["a", "", "", "€", "b"]);
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn broken_characters_are_replaced_as_soon_as_they_are_known_to_be_broken() {
        let t = Tokenizer::bytes();
        let mut stream = t.stream();
        assert_eq!(stream.push(0xff), "\u{fffd}");
        assert_eq!(stream.push(0xe2), "");
        assert_eq!(stream.push(u16::from(b'x')), "\u{fffd}x");
        assert_eq!(stream.push(0xe2), "");
        assert_eq!(stream.finish(), "\u{fffd}");
    }

    #[test]
    fn streaming_gives_the_text_of_decoding_at_once() {
        for t in [Tokenizer::gpt2(), Tokenizer::bytes()] {
            let mut tokens = t.encode("x😀é\u{fffd}").unwrap();
            tokens.extend([200, 150, 97, 250, 65_000, 230, 156]);
            let mut stream = t.stream();
            let mut text: String = tokens.iter().map(|&id| stream.push(id)).collect();
            text += &stream.finish();
            assert_eq!(text, t.decode(&tokens), "{t:?}");
        }
    }

    #[test]
    fn an_id_outside_the_vocabulary_is_shown_as_such() {
        assert_eq!(Tokenizer::bytes().decode(&[97, 300, 98]), "a\u{fffd}b");
    }

    #[test]
    fn a_written_tokenizer_is_recognised_and_can_encode_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.bin");
        for t in [Tokenizer::gpt2(), Tokenizer::bytes()] {
            t.write_bin(&path).unwrap();
            let read = Tokenizer::open(&path).unwrap();
            assert_eq!((read.name(), read.table()), (t.name(), t.table()));
            assert_eq!(read.encode("abc").unwrap(), t.encode("abc").unwrap());
        }
    }

    #[test]
    fn another_table_decodes_but_refuses_to_encode() {
        let t = Tokenizer::from_table(TokenTable::new([b"ab" as &[u8], b"c"], 1).unwrap());
        assert_eq!(t.decode(&[1, 0]), "cab");
        assert!(t.encode("c").unwrap_err().to_string().contains("merges.txt"));
    }

    #[test]
    fn only_known_vocabularies_have_a_built_in_tokenizer() {
        assert_eq!(Tokenizer::for_vocab(257).unwrap().name(), "bytes");
        assert_eq!(Tokenizer::for_vocab(50257).unwrap().name(), "gpt2");
        assert!(Tokenizer::for_vocab(50304).unwrap_err().to_string().contains("50257"));
    }
}
