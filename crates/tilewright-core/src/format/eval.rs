//! Evaluation files: multiple-choice examples such as HellaSwag's, already tokenized.

use std::path::Path;

use super::shard::token_error;
use super::{Finished, HEADER_BYTES, Header, Sink, Source, argument};
use crate::Result;

const MAGIC: i32 = 20240522;
const OP: &str = "format.eval";
/// The value that starts every example.
const START: u16 = u16::MAX;
/// Words before the context: start, byte length, index, label, completions, context length.
const FIXED_WORDS: usize = 6;

/// One question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EvalExample {
    /// Which completion is right.
    pub label: u16,
    /// The tokens that all completions share.
    pub context: Vec<u16>,
    /// The tokens of each completion.
    pub completions: Vec<Vec<u16>>,
}

impl EvalExample {
    fn words(&self) -> usize {
        FIXED_WORDS + self.context.len() + self.completions.iter().map(|c| 1 + c.len()).sum::<usize>()
    }
}

/// Reads all examples of a file; every token must be below `vocab`.
pub fn read_eval(path: &Path, vocab: usize) -> Result<Vec<EvalExample>> {
    read_eval_from(&Source::open(path)?, vocab)
}

/// Reads all examples of an open source.
pub fn read_eval_from(source: &Source, vocab: usize) -> Result<Vec<EvalExample>> {
    let header = Header::read(source, "an evaluation file")?;
    header.expect_magic(source, MAGIC, "an evaluation file")?;
    if header.get(1) != 1 {
        return Err(header.version_error(source, "1"));
    }
    let count = header.count(source, 2, "the number of examples", 0)?;
    let longest = header.count(source, 3, "the longest example's length", 0)?;
    let shortest = 2 * FIXED_WORDS as u64;
    source.check_range(HEADER_BYTES, shortest * count as u64, "the shortest possible set of so many examples")?;
    let mut examples = Vec::with_capacity(count);
    let mut offset = HEADER_BYTES;
    for index in 0..count {
        let mut fixed = [0; 2 * FIXED_WORDS];
        source.read_at(offset, &mut fixed, "an example's header")?;
        let bytes = u64::from(u16::from_le_bytes([fixed[2], fixed[3]]));
        if bytes > longest as u64 {
            let what = format!("example {index} has {bytes} bytes, the header promises at most {longest}");
            return Err(source.error(offset + 2, what, "write the file again"));
        }
        if bytes < shortest || !bytes.is_multiple_of(2) {
            let what = format!("example {index} claims {bytes} bytes, it needs an even number of at least {shortest}");
            return Err(source.error(offset + 2, what, "write the file again"));
        }
        let raw = source.read_vec(offset, bytes, "an example")?;
        let words: Vec<u16> = raw.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect();
        examples.push(parse(source, offset, index, &words, vocab)?);
        offset += bytes;
    }
    if offset != source.len() {
        let what = format!("{} bytes follow the last example", source.len() - offset);
        return Err(source.error(offset, what, "write the file again"));
    }
    Ok(examples)
}

fn parse(source: &Source, offset: u64, index: usize, words: &[u16], vocab: usize) -> Result<EvalExample> {
    let fail = |word: usize, what: String| source.error(offset + 2 * word as u64, what, "write the file again");
    if words[0] != START {
        return Err(fail(0, format!("example {index} starts with {} instead of {START}", words[0])));
    }
    if usize::from(words[2]) != index {
        return Err(fail(2, format!("example {index} says that it is number {}", words[2])));
    }
    let (label, completions) = (words[3], words[4]);
    if completions == 0 || label >= completions {
        return Err(fail(3, format!("label {label} is none of {completions} completions")));
    }
    let mut at = FIXED_WORDS - 1;
    let mut run = |what: &str| {
        let Some(&n) = words.get(at) else {
            return Err(fail(at, format!("example {index} ends before the length of {what}")));
        };
        let start = at + 1;
        let Some(tokens) = words.get(start..start + usize::from(n)) else {
            return Err(fail(at, format!("{what} of example {index} has {n} tokens, more than the example")));
        };
        if tokens.is_empty() {
            return Err(fail(at, format!("{what} of example {index} has no tokens")));
        }
        if let Some(i) = tokens.iter().position(|&t| usize::from(t) >= vocab) {
            return Err(token_error(source, offset + 2 * (start + i) as u64, tokens[i], vocab));
        }
        at = start + tokens.len();
        Ok(tokens.to_vec())
    };
    let context = run("the context")?;
    let completions = (0..completions).map(|i| run(&format!("completion {i}"))).collect::<Result<_>>()?;
    if at != words.len() {
        return Err(fail(at, format!("example {index} has {} words after its last completion", words.len() - at)));
    }
    Ok(EvalExample { label, context, completions })
}

/// Writes an evaluation file.
pub fn write_eval(mut sink: Sink, examples: &[EvalExample]) -> Result<Finished> {
    let mut longest = 0;
    let mut out: Vec<u8> = Vec::new();
    for (index, example) in examples.iter().enumerate() {
        let bad = |what: String| argument(OP, format!("example {index}: {what}"));
        let bytes = 2 * example.words();
        let size = u16::try_from(bytes).map_err(|_| bad(format!("{bytes} bytes, at most 65535 can be counted")))?;
        let number = u16::try_from(index).map_err(|_| bad("a file holds at most 65536 examples".into()))?;
        if usize::from(example.label) >= example.completions.len() {
            return Err(bad(format!("label {} is none of {} completions", example.label, example.completions.len())));
        }
        let runs = || std::iter::once(&example.context).chain(&example.completions);
        if runs().any(|r| r.is_empty() || r.contains(&START)) {
            return Err(bad(format!("an empty run of tokens, or the token {START}")));
        }
        longest = longest.max(bytes);
        // Each run is shorter than the example, whose length fits 16 bits.
        let fixed = [START, size, number, example.label, example.completions.len() as u16];
        let words = runs().flat_map(|r| std::iter::once(r.len() as u16).chain(r.iter().copied()));
        out.extend(fixed.into_iter().chain(words).flat_map(u16::to_le_bytes));
    }
    let mut header = Header::new(MAGIC, 1);
    header.set(2, examples.len() as i32);
    header.set(3, longest as i32);
    header.write(&mut sink)?;
    sink.write(&out)?;
    sink.finish()
}
