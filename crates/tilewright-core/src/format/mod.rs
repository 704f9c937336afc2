//! File formats: llm.c's model, state, shard, tokenizer, evaluation and debug files, and Hugging Face safetensors.
//!
//! All are little endian. Readers check every size that a header claims against the length of the file before they allocate or read anything, and report a
//! lie as [`Error::Format`] with path and byte offset. Writers stream through [`crate::fs::AtomicFile`].

pub mod checkpoint;
pub mod debug_state;
pub mod eval;
pub mod hf;
pub mod model;
pub mod shard;
pub mod state;
pub mod token_table;

#[doc(hidden)]
pub mod fuzzing;

mod header;
mod sink;
mod source;

pub(crate) use header::{HEADER_BYTES, Header};
pub use sink::{Finished, Sink};
pub use source::Source;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::gpt2::Gpt2Config;
use crate::{DType, Error, Result};

/// Elements handed on at a time by streaming readers.
pub(crate) const CHUNK: usize = 1 << 16;

/// The advice for a header that contradicts itself.
pub(crate) const DAMAGED: &str = "the header is damaged; copy or write the file again";

/// Whatever holds the sixteen tensors of a GPT-2: a model `.bin`, a safetensors file.
pub trait ParamSource {
    /// The sizes of the model.
    fn config(&self) -> &Gpt2Config;

    /// The element type in the file.
    fn dtype(&self) -> DType;

    /// Streams tensor `index` of [`PARAMS`](crate::gpt2::PARAMS) as f32 in llm.c's layout, in pieces of unspecified lengths.
    fn read_f32(&self, index: usize, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()>;
}

/// Decodes little-endian elements of a float dtype into `out`, which must have exactly as many.
pub(crate) fn decode_f32(bytes: &[u8], dtype: DType, out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.size(), "element count");
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16::from_le_bytes(*b).to_f32();
            }
        }
        DType::F16 => {
            // The slice conversion uses the hardware's instruction where there is one.
            let halves: Vec<f16> = bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)).collect();
            halves.convert_to_f32_slice(out);
        }
        other => unreachable!("{other} is not a float"),
    }
}

/// Appends little-endian elements of a float dtype, rounded to nearest even.
pub(crate) fn encode_f32(values: &[f32], dtype: DType, out: &mut Vec<u8>) {
    match dtype {
        DType::F32 => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
        DType::BF16 => out.extend(values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
        DType::F16 => {
            let mut halves = vec![f16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            out.extend(halves.iter().flat_map(|x| x.to_le_bytes()));
        }
        other => unreachable!("{other} is not a float"),
    }
}

/// Elements of each parameter tensor; `None` when the sum of all their bytes does not fit a file.
pub(crate) fn param_counts(config: &Gpt2Config) -> Option<[u64; 16]> {
    // Sizes come from 31-bit header words, so no product of a shape reaches 128 bits.
    let counts: [u128; 16] =
        std::array::from_fn(|i| config.param_shape(i).into_iter().map(|d| d as u128).product::<u128>());
    let total: u128 = counts.iter().sum();
    (total * 4 <= i64::MAX as u128).then(|| counts.map(|n| n as u64))
}

pub(crate) fn argument(op: &'static str, what: impl Into<String>) -> Error {
    Error::Argument { op, what: what.into() }
}
