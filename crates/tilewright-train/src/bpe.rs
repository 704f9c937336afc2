//! A compact byte-pair vocabulary, learned from a text in a second: small models deserve small vocabularies.
//!
//! Tokens 0 to 255 are the bytes, then the merges in the order in which they were learned, and last the end-of-text token. The rank of a
//! token is its id, so the table alone (the `.bin` file of llm.c's tokenizer) is enough to encode: join the adjacent pair whose union has
//! the smallest id, until none is in the table.

use std::collections::{HashMap, HashSet};

use tilewright_core::{Error, Result};

/// A byte-pair vocabulary.
#[derive(Clone, Debug)]
pub struct Bpe {
    tokens: Vec<Vec<u8>>,
    ranks: HashMap<Vec<u8>, u32>,
    eot: u32,
}

/// The name that stands for the end-of-text token in tokenizer files; no text encodes to it.
pub const EOT_TEXT: &str = "<|endoftext|>";

impl Bpe {
    /// Learns `vocab_size - 257` merges from a text; 257 is the plain byte vocabulary.
    pub fn learn(text: &str, vocab_size: usize) -> Result<Self> {
        if !(257..=65535).contains(&vocab_size) {
            let what =
                format!("a vocabulary of {vocab_size} tokens cannot hold the 256 bytes and end-of-text in 16 bits");
            return Err(Error::config(what, "use --vocab-size from 257 to 65535"));
        }
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|b| vec![b]).collect();
        let mut counts: HashMap<&str, u64> = HashMap::new();
        for piece in pieces(text) {
            *counts.entry(piece).or_default() += 1;
        }
        // Sorted, so that the order of the hash map cannot be seen in the result.
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_unstable();
        let mut words: Vec<(Vec<u32>, u64)> =
            counts.into_iter().map(|(w, n)| (w.bytes().map(u32::from).collect(), n)).collect();
        let mut pairs: HashMap<(u32, u32), u64> = HashMap::new();
        let mut places: HashMap<(u32, u32), HashSet<usize>> = HashMap::new();
        for (i, (word, n)) in words.iter().enumerate() {
            for pair in word.windows(2) {
                *pairs.entry((pair[0], pair[1])).or_default() += n;
                places.entry((pair[0], pair[1])).or_default().insert(i);
            }
        }
        while tokens.len() + 1 < vocab_size {
            // The most frequent pair; of equals the one with the smallest ids.
            let best = pairs.iter().filter(|(_, n)| **n > 1).max_by_key(|(p, n)| (**n, std::cmp::Reverse(**p)));
            let Some((&(a, b), _)) = best else { break };
            let id = tokens.len() as u32;
            let joined = [tokens[a as usize].as_slice(), &tokens[b as usize]].concat();
            tokens.push(joined);
            for i in places.remove(&(a, b)).unwrap_or_default() {
                let (word, n) = &mut words[i];
                for pair in word.windows(2) {
                    if let Some(count) = pairs.get_mut(&(pair[0], pair[1])) {
                        *count = count.saturating_sub(*n);
                    }
                }
                *word = merge(word, (a, b), id);
                for pair in word.windows(2) {
                    *pairs.entry((pair[0], pair[1])).or_default() += *n;
                    places.entry((pair[0], pair[1])).or_default().insert(i);
                }
            }
            pairs.remove(&(a, b));
        }
        let eot = tokens.len() as u32;
        tokens.push(EOT_TEXT.as_bytes().to_vec());
        Self::from_tokens(tokens, eot)
    }

    /// A vocabulary from its table; every byte must be a token.
    pub fn from_tokens(tokens: Vec<Vec<u8>>, eot: u32) -> Result<Self> {
        let mut ranks = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if id as u32 != eot {
                ranks.entry(token.clone()).or_insert(id as u32);
            }
        }
        let missing = (0..=255u8).find(|b| !ranks.contains_key(std::slice::from_ref(b)));
        if missing.is_some() || eot as usize >= tokens.len() {
            return Err(Error::config(
                format!(
                    "a table of {} tokens with end-of-text {eot} and without byte {missing:?} encodes nothing",
                    tokens.len()
                ),
                "use the tokenizer.bin that lies beside the checkpoint",
            ));
        }
        Ok(Bpe { tokens, ranks, eot })
    }

    /// The byte strings of all tokens.
    pub fn tokens(&self) -> &[Vec<u8>] {
        &self.tokens
    }

    /// The end-of-text token.
    pub fn eot(&self) -> u32 {
        self.eot
    }

    /// Token ids of a text.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        let mut known: HashMap<&str, Vec<u32>> = HashMap::new();
        let mut out = Vec::with_capacity(text.len() / 2);
        for piece in pieces(text) {
            out.extend(known.entry(piece).or_insert_with(|| self.encode_piece(piece.as_bytes())).iter());
        }
        out
    }

    fn encode_piece(&self, piece: &[u8]) -> Vec<u32> {
        // Boundaries of the current tokens in the piece.
        let mut cuts: Vec<usize> = (0..=piece.len()).collect();
        while cuts.len() > 2 {
            let pairs = (0..cuts.len() - 2).filter_map(|i| Some((*self.ranks.get(&piece[cuts[i]..cuts[i + 2]])?, i)));
            let Some((_, at)) = pairs.min() else { break };
            cuts.remove(at + 1);
        }
        cuts.windows(2).map(|w| self.ranks[&piece[w[0]..w[1]]]).collect()
    }

    /// The bytes of a token; nothing for the end of text and for ids outside the table.
    pub fn decode(&self, id: u32) -> &[u8] {
        if id == self.eot { &[] } else { self.tokens.get(id as usize).map_or(&[], Vec::as_slice) }
    }
}

fn merge(word: &[u32], pair: (u32, u32), id: u32) -> Vec<u32> {
    let mut out = Vec::with_capacity(word.len());
    let mut i = 0;
    while i < word.len() {
        if i + 1 < word.len() && (word[i], word[i + 1]) == pair {
            out.push(id);
            i += 2;
        } else {
            out.push(word[i]);
            i += 1;
        }
    }
    out
}

/// Cuts a text into the pieces that no token crosses: a run of letters, of digits or of other marks, each with one space before it, and runs of
/// white space.
fn pieces(text: &str) -> impl Iterator<Item = &str> {
    #[derive(PartialEq)]
    enum Class {
        Letter,
        Digit,
        Space,
        Other,
    }
    fn class(c: char) -> Class {
        match c {
            c if c.is_alphabetic() => Class::Letter,
            c if c.is_numeric() => Class::Digit,
            c if c.is_whitespace() => Class::Space,
            _ => Class::Other,
        }
    }
    let mut rest = text;
    std::iter::from_fn(move || {
        let mut chars = rest.char_indices();
        let (_, first) = chars.next()?;
        let mut kind = class(first);
        if first == ' ' {
            match chars.next() {
                Some((_, second)) if class(second) != Class::Space => kind = class(second),
                Some(_) => {}
                None => return Some(std::mem::take(&mut rest)),
            }
        }
        let end = chars.find(|(_, c)| class(*c) != kind).map_or(rest.len(), |(i, _)| i);
        let (piece, tail) = rest.split_at(end);
        rest = tail;
        Some(piece)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str =
        "the cat and the hat and the rat sat on the mat; the end. The cat said: \"the hat!\"\n\nIt was 1813.";

    #[test]
    fn pieces_cover_the_text_and_end_at_class_changes() {
        let got: Vec<_> = pieces(" a\n\nMr. B, 18  x ").collect();
        assert_eq!(got, [" a", "\n\n", "Mr", ".", " B", ",", " 18", "  ", "x", " "]);
        for text in [TEXT, "", " ", "  ", "\u{e9}t\u{e9} \u{1f600}!"] {
            assert_eq!(pieces(text).collect::<String>(), text);
        }
    }

    #[test]
    fn encoding_decodes_to_the_same_bytes() {
        for size in [257, 270, 300] {
            let bpe = Bpe::learn(TEXT, size).unwrap();
            for text in [TEXT, "", "unseen words \u{e9}\u{1f600}\u{0}", "<|endoftext|>"] {
                let ids = bpe.encode(text);
                let bytes: Vec<u8> = ids.iter().flat_map(|id| bpe.decode(*id)).copied().collect();
                assert_eq!(bytes, text.as_bytes());
                assert!(!ids.contains(&bpe.eot()), "no text encodes to end-of-text");
            }
        }
    }

    #[test]
    fn frequent_words_become_one_token() {
        let bpe = Bpe::learn(TEXT, 300).unwrap();
        assert_eq!(bpe.encode(" the").len(), 1);
        assert!(bpe.encode(TEXT).len() * 3 < TEXT.len() * 2);
    }

    #[test]
    fn learning_twice_gives_the_same_table() {
        assert_eq!(Bpe::learn(TEXT, 300).unwrap().tokens(), Bpe::learn(TEXT, 300).unwrap().tokens());
    }

    #[test]
    fn encoding_replays_the_merges_that_were_learned() {
        // The piece " the" is learned by merges; encoding by rank must reach the same tokens as applying all merges in order.
        let bpe = Bpe::learn(TEXT, 300).unwrap();
        for piece in pieces(TEXT) {
            let mut word: Vec<u32> = piece.bytes().map(u32::from).collect();
            for id in 256..bpe.eot() {
                loop {
                    let joined = |w: &[u32]| [bpe.decode(w[0]), bpe.decode(w[1])].concat() == bpe.decode(id);
                    let Some(at) = word.windows(2).position(joined) else { break };
                    word.splice(at..at + 2, [id]);
                }
            }
            assert_eq!(bpe.encode(piece), word, "{piece:?}");
        }
    }

    #[test]
    fn a_text_without_repeats_yields_a_smaller_vocabulary() {
        let bpe = Bpe::learn("abc", 1024).unwrap();
        assert_eq!((bpe.tokens().len(), bpe.eot()), (257, 256));
    }

    #[test]
    fn sizes_that_cannot_be_are_refused() {
        for size in [0, 256, 65536] {
            assert!(Bpe::learn(TEXT, size).unwrap_err().to_string().contains("--vocab-size"));
        }
        assert!(Bpe::from_tokens(vec![vec![1]], 0).is_err());
    }
}
