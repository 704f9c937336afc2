//! GPT-2 style vocabularies as OpenAI (`encoder.json`, `vocab.bpe`) and Hugging Face (`vocab.json`, `merges.txt`) publish them.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use tiktoken_rs::CoreBPE;

use super::{END_OF_TEXT, Encoder, Tokenizer};
use crate::format::Source;
use crate::format::token_table::TokenTable;
use crate::{Error, Result};

/// GPT-2's splitting pattern.
const PATTERN: &str = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s";
/// Far above any vocabulary of 65536 tokens.
const MAX_FILE_BYTES: u64 = 64 << 20;
const HINT: &str = "give the tokenizer files of a GPT-2 style model";

pub(super) fn open(path: &Path) -> Result<Tokenizer> {
    let folder = if path.is_dir() { path } else { path.parent().unwrap_or(Path::new(".")) };
    for (vocab, merges) in [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")] {
        let (vocab, merges) = (folder.join(vocab), folder.join(merges));
        if vocab.is_file() && (path.is_dir() || path == vocab) {
            return load(&read(&vocab)?, &vocab, &read(&merges)?, &merges);
        }
    }
    let what = format!("{} holds neither vocab.json nor encoder.json", folder.display());
    Err(Error::config(what, "name such a file, or its folder, or a tokenizer .bin"))
}

fn read(path: &Path) -> Result<Vec<u8>> {
    let source = Source::open(path)?;
    if source.len() > MAX_FILE_BYTES {
        return Err(source.error(
            MAX_FILE_BYTES,
            format!("{} bytes are too many for a vocabulary", source.len()),
            HINT,
        ));
    }
    source.read_vec(0, source.len(), "the file")
}

/// The byte behind each character of GPT-2's printable alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on.
fn alphabet() -> HashMap<char, u8> {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=u8::MAX).filter(|&b| !printable(b)).zip('\u{100}'..).map(|(b, c)| (c, b));
    (0..=u8::MAX).filter(|&b| printable(b)).map(|b| (char::from(b), b)).chain(others).collect()
}

fn load(vocab: &[u8], vocab_path: &Path, merges: &[u8], merges_path: &Path) -> Result<Tokenizer> {
    let bad_vocab = |offset: usize, what: String| Error::format(vocab_path, offset as u64, what, HINT);
    let ids: BTreeMap<String, u32> =
        serde_json::from_slice(vocab).map_err(|e| bad_vocab(0, format!("no JSON object of token ids: {e}")))?;
    if ids.is_empty() || ids.len() > 1 << 16 {
        return Err(bad_vocab(0, format!("{} tokens, 1 to 65536 are possible", ids.len())));
    }
    let Some(&eot) = ids.get(END_OF_TEXT) else {
        return Err(bad_vocab(0, format!("there is no {END_OF_TEXT} token")));
    };
    let alphabet = alphabet();
    let decode = |token: &str| token.chars().map(|c| alphabet.get(&c).copied()).collect::<Option<Vec<u8>>>();
    let mut tokens: Vec<Option<Vec<u8>>> = vec![None; ids.len()];
    for (token, &id) in &ids {
        // Tokens outside the alphabet are special ones, which stand for themselves.
        let bytes = decode(token).unwrap_or_else(|| token.clone().into_bytes());
        match tokens.get_mut(id as usize) {
            Some(slot @ None) => *slot = Some(bytes),
            _ => {
                return Err(bad_vocab(
                    0,
                    format!("id {id} of {token:?} is taken twice or beyond {} tokens", ids.len()),
                ));
            }
        }
    }
    let bytes_of = |id: u32| tokens[id as usize].clone().unwrap_or_default();
    let table = TokenTable::new(tokens.iter().flatten().map(Vec::as_slice), eot as usize)
        .map_err(|e| bad_vocab(0, e.to_string()))?;

    // The encoder takes a token's id for its rank, so ids must follow the order of the merges, as they do in files of this kind.
    let mut ranks: Vec<(Vec<u8>, u32)> = Vec::new();
    for c in alphabet.keys() {
        let Some(&id) = ids.get(c.to_string().as_str()) else {
            return Err(bad_vocab(0, format!("the single byte {c:?} is no token")));
        };
        ranks.push((bytes_of(id), id));
    }
    let mut last = None;
    let mut offset = 0;
    for line in merges.split(|&b| b == b'\n') {
        let bad = |what: String| Error::format(merges_path, offset as u64, what, HINT);
        let text = std::str::from_utf8(line).map_err(|_| bad("the line is not UTF-8".into()))?.trim_end_matches('\r');
        if !(text.is_empty() || offset == 0 && text.starts_with("#version")) {
            let known = |token: &str| ids.get(token).copied();
            let Some((left, right)) = text.split_once(' ') else {
                return Err(bad(format!("{text:?} is no pair of tokens")));
            };
            let (Some(_), Some(_), Some(id)) = (known(left), known(right), known(&format!("{left}{right}"))) else {
                return Err(bad(format!("{text:?} merges tokens that the vocabulary does not have")));
            };
            if last.is_some_and(|last| id <= last) {
                return Err(bad(format!("{text:?} has an id that does not follow the order of the merges")));
            }
            last = Some(id);
            ranks.push((bytes_of(id), id));
        }
        offset += line.len() + 1;
    }
    let special = [(END_OF_TEXT.to_owned(), eot)].into_iter().collect();
    // The encoder panics when two tokens share an id or spelling.
    let (mut by_id, mut by_bytes) = (ranks.clone(), ranks.clone());
    by_id.sort_unstable_by_key(|r| r.1);
    by_id.dedup_by_key(|r| r.1);
    by_bytes.sort_unstable();
    by_bytes.dedup_by(|a, b| a.0 == b.0);
    if by_id.len() != ranks.len() || by_bytes.len() != ranks.len() {
        return Err(bad_vocab(0, "two tokens have the same id or the same bytes".into()));
    }
    let bpe = CoreBPE::new(ranks.into_iter().collect(), special, PATTERN).map_err(|e| bad_vocab(0, e.to_string()))?;
    let known = Tokenizer::from_table(table);
    // The files of GPT-2 itself need no encoder of their own.
    if matches!(known.encoder, Encoder::Gpt2(_)) {
        return Ok(known);
    }
    Ok(Tokenizer { encoder: Encoder::Loaded(Box::new(bpe)), ..known })
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    /// `vocab.json` and `merges.txt` of the first `size` tokens of GPT-2 and the end of text. A merge is found by encoding the token with smaller ones only.
    fn files(size: usize) -> (String, String) {
        let table = Tokenizer::gpt2().table().clone();
        let chars: HashMap<u8, char> = alphabet().into_iter().map(|(c, b)| (b, c)).collect();
        let spell = |bytes: &[u8]| bytes.iter().map(|b| chars[b]).collect::<String>();
        let ids: HashMap<&[u8], usize> = table.iter().take(size).zip(0..).collect();
        let mut merges = String::from("#version: 0.2\n");
        let mut vocab: BTreeMap<String, usize> = BTreeMap::new();
        for (id, token) in table.iter().take(size).enumerate() {
            vocab.insert(spell(token), id);
            if id >= 256 {
                let mut parts: Vec<&[u8]> = token.chunks(1).collect();
                while parts.len() > 2 {
                    let joined = |i: usize| {
                        let bytes = [parts[i], parts[i + 1]].concat();
                        ids.get(&bytes[..]).filter(|&&r| r < id).copied().unwrap_or(usize::MAX)
                    };
                    let best = (0..parts.len() - 1).min_by_key(|&i| joined(i)).unwrap();
                    let start = parts[..best].iter().map(|p| p.len()).sum::<usize>();
                    let len = parts[best].len() + parts[best + 1].len();
                    parts.splice(best..best + 2, [&token[start..start + len]]);
                }
                writeln!(merges, "{} {}", spell(parts[0]), spell(parts[1])).unwrap();
            }
        }
        vocab.insert(END_OF_TEXT.to_owned(), size);
        (serde_json::to_string(&vocab).unwrap(), merges)
    }

    fn load_texts(vocab: &str, merges: &str) -> Result<Tokenizer> {
        load(vocab.as_bytes(), Path::new("vocab.json"), merges.as_bytes(), Path::new("merges.txt"))
    }

    const TEXT: &str = "The quick brown fox isn't 123 years old;\n\n  naïve 日本語 😀!!  ";

    #[test]
    fn the_files_of_gpt2_make_the_tokenizer_of_gpt2() {
        let (vocab, merges) = files(50256);
        let t = load_texts(&vocab, &merges).unwrap();
        assert_eq!(t.name(), "gpt2");
        assert_eq!(t.encode(TEXT).unwrap(), Tokenizer::gpt2().encode(TEXT).unwrap());
    }

    #[test]
    fn a_smaller_vocabulary_merges_less_and_decodes_to_the_same_text() {
        let dir = tempfile::tempdir().unwrap();
        let (vocab, merges) = files(1000);
        for (v, m) in [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")] {
            let dir = dir.path().join(v.trim_end_matches(".json"));
            std::fs::create_dir(&dir).unwrap();
            std::fs::write(dir.join(v), &vocab).unwrap();
            std::fs::write(dir.join(m), &merges).unwrap();
            for path in [dir.clone(), dir.join(v)] {
                let t = Tokenizer::open(&path).unwrap();
                assert_eq!((t.name(), t.vocab_size(), t.eot()), ("bpe", 1001, 1000));
                let tokens = t.encode(TEXT).unwrap();
                assert!(tokens.len() > Tokenizer::gpt2().encode(TEXT).unwrap().len());
                assert_eq!(t.decode(&tokens), TEXT);
                // A token among the first thousand is found whole.
                assert_eq!(t.encode(" the").unwrap(), Tokenizer::gpt2().encode(" the").unwrap());
            }
        }
    }

    #[test]
    fn contradictions_are_refused_with_their_file() {
        let (vocab, merges) = files(300);
        let refuse = |vocab: &str, merges: &str, words: &str| {
            let message = load_texts(vocab, merges).unwrap_err().to_string();
            assert!(message.contains(words), "{message}");
        };
        refuse("[]", &merges, "vocab.json");
        refuse("{}", &merges, "0 tokens");
        refuse(&vocab.replace(END_OF_TEXT, "<end>"), &merges, END_OF_TEXT);
        refuse(&vocab.replace("\"!\":0", "\"!\":1"), &merges, "taken twice");
        refuse(&vocab.replace("\"!\":0", "\"!\":9999"), &merges, "beyond");
        refuse(&vocab.replace("\"!\":0", "\"!!!!\":0"), &merges, "single byte");
        refuse(&vocab, &format!("{merges}a\n"), "no pair");
        refuse(&vocab, &format!("{merges}zz qq\n"), "does not have");
        let mut lines: Vec<&str> = merges.lines().collect();
        lines.swap(3, 4);
        refuse(&vocab, &lines.join("\n"), "merges.txt");
    }

    #[test]
    fn a_folder_without_the_files_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Tokenizer::open(dir.path()).unwrap_err().to_string().contains("vocab.json"));
        std::fs::write(dir.path().join("vocab.json"), "{}").unwrap();
        assert!(Tokenizer::open(dir.path()).unwrap_err().to_string().contains("merges.txt"));
    }
}
