//! `tilewright sample`: text from a trained model, token by token.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use tilewright_core::DType;
use tilewright_core::format::ParamSource;
use tilewright_core::format::model::ModelReader;
use tilewright_models::{Decoder, Gpt2, Options};
use tilewright_train::checkpoint::load_model;
use tilewright_train::sample::{Sampling, generate};
use tilewright_train::vocab::Vocabulary;

use crate::device::DeviceName;

/// Continue a text with a trained model.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Model file, as `train` and `convert` write it
    #[arg(long, value_name = "FILE")]
    model: PathBuf,
    /// Text to continue; without it the model starts a document
    #[arg(long, value_name = "TEXT", default_value = "")]
    prompt: String,
    /// Tokens to draw
    #[arg(long, value_name = "N", default_value_t = 200)]
    tokens: usize,
    /// Divides the logits: below 1 is more likely text, 0 always the likeliest token
    #[arg(long, value_name = "F", default_value_t = 0.8)]
    temperature: f32,
    /// Draw only from the N likeliest tokens; 0 from all
    #[arg(long, value_name = "N", default_value_t = 40)]
    top_k: usize,
    /// The same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 1337)]
    seed: u64,
    /// Tokenizer file; found beside the model, or by its vocabulary, when not given
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// Stop at the end of the document
    #[arg(long)]
    stop_at_end: bool,
    /// Where it runs: cpu, cuda, vulkan, metal or gpu, or cuda:N
    #[arg(long, value_name = "DEVICE", default_value_t)]
    device: DeviceName,
}

/// Runs the subcommand.
pub fn run(args: Args) -> Result<()> {
    if !(args.temperature.is_finite() && args.temperature >= 0.0) {
        anyhow::bail!("--temperature {} must be at least 0; try 0.8", args.temperature);
    }
    let reader = ModelReader::open(&args.model)?;
    let config = *reader.config();
    let vocab = match &args.tokenizer {
        Some(path) => Vocabulary::open(path)?,
        None => Vocabulary::of_model(&args.model, config.vocab_size)?,
    };
    if vocab.size() > config.vocab_size {
        anyhow::bail!(
            "the tokenizer has {} tokens, the model {}; give the model's own with --tokenizer",
            vocab.size(),
            config.vocab_size
        );
    }
    let mut prompt = vec![vocab.eot() as i32];
    if !args.prompt.is_empty() {
        prompt.extend(vocab.encode(&args.prompt)?);
    }
    let device = args.device.open()?;
    // bf16 files stay bf16 in memory; a token is bound by the reading of the weights.
    let dtype = if reader.dtype() == DType::BF16 { DType::BF16 } else { DType::F32 };
    let mut model = Gpt2::new(&device, config, Options { dtype, ..Options::evaluation(1, 1) })?;
    load_model(&mut model, &reader, &args.model)?;
    let window = config.max_seq_len.min(prompt.len() + args.tokens).max(1);
    let mut decoder = Decoder::new(&device, config, model.params(), window)?;
    let sampling = Sampling { tokens: args.tokens, temperature: args.temperature, top_k: args.top_k, seed: args.seed };
    let mut out = Utf8Stream::new(std::io::stdout().lock());
    let mut broken = None;
    out.write(args.prompt.as_bytes())?;
    generate(&mut decoder, &prompt, &sampling, &mut |token| {
        if args.stop_at_end && token as u32 == vocab.eot() {
            return Ok(false);
        }
        broken = out.write(&vocab.decode(token as u32)).err();
        Ok(broken.is_none())
    })?;
    match broken {
        Some(error) => Err(error).context("write the text"),
        None => out.finish().context("write the text"),
    }
}

/// Writes whole characters as soon as their bytes are there; tokens may end inside one.
struct Utf8Stream<W> {
    out: W,
    pending: Vec<u8>,
}

impl<W: Write> Utf8Stream<W> {
    fn new(out: W) -> Self {
        Utf8Stream { out, pending: Vec::new() }
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.pending.extend_from_slice(bytes);
        loop {
            match std::str::from_utf8(&self.pending) {
                Ok(text) => {
                    self.out.write_all(text.as_bytes())?;
                    self.pending.clear();
                    return self.out.flush();
                }
                Err(e) => {
                    let valid = e.valid_up_to();
                    self.out.write_all(&self.pending[..valid])?;
                    let Some(bad) = e.error_len() else {
                        self.pending.drain(..valid);
                        return self.out.flush();
                    };
                    self.out.write_all("\u{fffd}".as_bytes())?;
                    self.pending.drain(..valid + bad);
                }
            }
        }
    }

    fn finish(mut self) -> std::io::Result<()> {
        if !self.pending.is_empty() {
            self.out.write_all("\u{fffd}".as_bytes())?;
        }
        self.out.write_all(b"\n")?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(pieces: &[&[u8]]) -> (String, String) {
        let mut out = Vec::new();
        let mut s = Utf8Stream::new(&mut out);
        pieces.iter().for_each(|p| s.write(p).unwrap());
        let before = String::from_utf8(s.out.clone()).unwrap();
        s.finish().unwrap();
        (before, String::from_utf8(out).unwrap())
    }

    #[test]
    fn a_character_cut_by_tokens_appears_when_it_is_whole() {
        assert_eq!(stream(&[b"a\xc3", b"\xa9b"]).1, "a\u{e9}b\n");
        assert_eq!(stream(&[b"a\xc3"]), ("a".into(), "a\u{fffd}\n".into()));
    }

    #[test]
    fn bytes_that_are_no_text_are_replaced() {
        assert_eq!(stream(&[b"a\xff\xfeb"]).1, "a\u{fffd}\u{fffd}b\n");
    }
}
