//! Generating text token by token with the sampling cache.

use tilewright_core::rng::XorShift;
use tilewright_core::{Error, Result};
use tilewright_models::Decoder;

/// How tokens are drawn.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// Tokens to draw.
    pub tokens: usize,
    /// Divides the logits; 0 always takes the likeliest token.
    pub temperature: f32,
    /// Draw only from so many of the likeliest tokens; 0 is all.
    pub top_k: usize,
    /// Seed of the generator.
    pub seed: u64,
}

/// Continues a prompt, which starts with end-of-text as every document does. Each new token goes to `emit`, which may stop the
/// generation by returning `false`.
///
/// When the cache is full the later half of the text is read again from position 0, so a sample may be longer than the model's window.
pub fn generate(
    decoder: &mut Decoder,
    prompt: &[i32],
    sampling: &Sampling,
    emit: &mut dyn FnMut(i32) -> Result<bool>,
) -> Result<()> {
    if prompt.is_empty() {
        return Err(Error::Argument {
            op: "generate",
            what: "the prompt needs at least one token, end-of-text".into(),
        });
    }
    let capacity = decoder.capacity();
    let mut rng = XorShift::new(sampling.seed);
    let mut text = prompt.to_vec();
    decoder.reset();
    let mut pending = text.len().saturating_sub(capacity);
    for _ in 0..sampling.tokens {
        if decoder.position() + (text.len() - pending) > capacity {
            decoder.reset();
            pending = text.len() - (capacity / 2).clamp(1, text.len());
        }
        for &token in &text[pending..] {
            decoder.step(token)?;
        }
        pending = text.len();
        let next = decoder.sample(sampling.temperature, sampling.top_k, rng.random_f32())?;
        text.push(next);
        if !emit(next)? {
            break;
        }
    }
    Ok(())
}
