//! What every other crate of Tilewright speaks in: data types, shapes, errors, random numbers, file formats and the tokenizer.
//!
//! Nothing here knows of a GPU, a thread pool or a socket.

pub mod dtype;
pub mod error;
pub mod format;
pub mod fs;
pub mod gpt2;
pub mod rng;
pub mod shape;
pub mod tokenizer;

pub use dtype::DType;
pub use error::{Error, Result};
pub use half::{bf16, f16};
pub use shape::Shape;
