//! Every kernel of Tilewright. An op is a folder; `ls` of it is its support matrix.
//!
//! Letters used in all contracts: `B` batch, `T` sequence length, `C` channels, `H` heads, `hs` head size (`C = H * hs`), `N` rows
//! of a matrix view (`B * T`), `M`/`K`/`N` of a matrix product, `D` width of the loss head, `V` vocabulary, `Vp` padded vocabulary.
//! `=` means that a buffer is overwritten, `+=` that it is accumulated into. All tensors are contiguous and row-major.
//!
//! | op | contract |
//! |---|---|
//! | [`matmul`] | linear layers: forward with bias and GELU, and the three backward forms |
//! | [`layernorm`] | layer normalisation, fused with the residual add, forward and backward |
//! | [`attention`] | flash attention, forward, backward and one-token decoding |
//! | [`encoder_attention`] | bidirectional attention over packed rows: full, sliding window, isolated options, selected queries |
//! | [`gelu`] | GELU, tanh and exact, forward and backward |
//! | [`embedding`] | token and position embedding, deterministic backward |
//! | [`linear`] | linear layers of inference: weights packed once, resident in f32, bf16 or f16 |
//! | [`gather`] | rows of a table, also of one in a mapped file |
//! | [`rope`] | rotary position embedding, half rotation |
//! | [`option_features`] | what an action head reads: a state, and how sure the logits of a row's options are |
//! | [`linear_cross_entropy`] | the loss of a language model without the `(N, V)` logits |
//! | [`global_norm`] | the L2 norm over many tensors |
//! | [`adamw`] | AdamW with clipping, weight decay, master weights and stochastic rounding |
//! | [`sampling`] | softmax sampling of one token |

// Kernels in the portable GPU language keep to what it compiles: it knows no `div_ceil`, and a condition beside a read would not guard it.
#![cfg_attr(
    feature = "gpu",
    allow(
        clippy::assign_op_pattern,
        clippy::collapsible_if,
        clippy::excessive_precision,
        clippy::manual_div_ceil,
        clippy::implicit_saturating_sub
    )
)]

pub mod adamw;
pub mod arena;
pub mod attention;
mod check;
pub mod cpu;
#[cfg(feature = "cuda")]
mod cuda_sources;
pub mod device;
pub mod embedding;
pub mod encoder_attention;
pub mod gather;
pub mod gelu;
pub mod global_norm;
pub mod layernorm;
pub mod linear;
pub mod linear_cross_entropy;
pub mod mapped;
pub mod matmul;
pub mod null;
pub mod option_features;
pub mod replay;
pub mod rope;
pub mod runtime;
pub mod sampling;
pub mod tensor;
pub mod transfer;

#[cfg(test)]
pub(crate) mod testing;

pub use arena::{Arena, Plan, Slot};
pub use device::Device;
pub use mapped::MappedFile;
pub use replay::Replay;
pub use tensor::Tensor;
pub use tilewright_core::{DType, Error, Result, Shape};
pub use transfer::{Download, Upload};
