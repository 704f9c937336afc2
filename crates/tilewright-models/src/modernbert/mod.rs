//! ModernBERT, an encoder for inference: rows of token ids in, one hidden state a token out.
//!
//! `x = LN(embedding[id])`; each layer `x += Wo(attention(LN(x)))`, `x += Wo(gelu(a) * b)` with `(a, b) = Wi(LN(x))`; `h = LN(x)` at the end.
//! Layer 0 has no norm before its attention: the embedding's norm has done it. Positions enter through RoPE alone, with a base of its own for
//! layers that see the whole row and for those that see a window. Rows are packed one behind the other; there is no padding.

pub(crate) mod block;
pub(crate) mod buffers;
mod config;
pub(crate) mod encoder;
mod params;
pub(crate) mod store;

pub(crate) use config::every;
pub use config::{EncoderConfig, LayerKind};
