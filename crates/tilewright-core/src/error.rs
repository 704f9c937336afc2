//! One error type for the libraries. Every message names what is wrong, where, and the next thing to try.

use std::path::{Path, PathBuf};

use crate::{DType, Shape};

/// The result of a library call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong below the command line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor's shape does not fit the op's contract.
    #[error("{op}: `{what}` has shape {got}, the contract wants {want}")]
    Shape {
        /// The op, as `folder.function`.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its shape.
        got: Shape,
        /// The shape that was expected, in words or numbers.
        want: String,
    },
    /// A tensor's dtype does not fit the op's contract.
    #[error("{op}: `{what}` is stored as {got}, the contract wants {want}")]
    DType {
        /// The op.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// Its dtype.
        got: DType,
        /// What was expected.
        want: String,
    },
    /// A tensor lives on another device than the one the op runs on.
    #[error("{op}: `{what}` lives on {got}, but the op runs on {want}; copy the tensor there first")]
    Device {
        /// The op.
        op: &'static str,
        /// The argument.
        what: &'static str,
        /// The tensor's device.
        got: String,
        /// The device of the call.
        want: String,
    },
    /// An output shares memory with another argument.
    #[error("{op}: output `{output}` overlaps `{other}` in memory; give the output its own slot of the arena")]
    Overlap {
        /// The op.
        op: &'static str,
        /// The output argument.
        output: &'static str,
        /// The other argument.
        other: &'static str,
    },
    /// A call would write to a tensor that cannot be written.
    #[error("{op}: `{what}` lies in a mapped file and is read-only; give the call a slot of an arena to write to")]
    ReadOnly {
        /// The op or function.
        op: &'static str,
        /// The argument.
        what: &'static str,
    },
    /// A scalar argument is out of its range.
    #[error("{op}: {what}")]
    Argument {
        /// The op or function.
        op: &'static str,
        /// What is wrong and what is allowed.
        what: String,
    },
    /// The device cannot do this.
    #[error("{op} on {device}: {what} is not supported; {hint}")]
    Unsupported {
        /// The op.
        op: &'static str,
        /// The device.
        device: String,
        /// The missing thing.
        what: String,
        /// The next thing to try.
        hint: String,
    },
    /// There is not enough memory; nothing was allocated.
    #[error("{what} needs {wanted} bytes on {device}, {available} are available; {hint}")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// The device.
        device: String,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes available.
        available: u64,
        /// The next thing to try.
        hint: String,
    },
    /// A call of a device's driver or library failed.
    #[error("{op} on {device}: {what}; {hint}")]
    Driver {
        /// The op.
        op: &'static str,
        /// The device.
        device: String,
        /// The call, what it was given and the driver's words.
        what: String,
        /// The next thing to try.
        hint: String,
    },
    /// A file does not hold what its format promises.
    #[error("{}: byte {offset}: {what}; {hint}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// Where in the file, in bytes.
        offset: u64,
        /// What was found there and what was expected.
        what: String,
        /// The next thing to try.
        hint: String,
    },
    /// The operating system refused a file operation.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was tried: `open`, `read`, `write`, `rename`.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// A configuration that cannot be run.
    #[error("{what}; {hint}")]
    Config {
        /// What is wrong.
        what: String,
        /// The next thing to try.
        hint: String,
    },
}

impl Error {
    /// A [`Error::Format`] at a byte offset.
    pub fn format(path: &Path, offset: u64, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Format { path: path.to_owned(), offset, what: what.into(), hint: hint.into() }
    }

    /// A [`Error::Config`].
    pub fn config(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Error::Config { what: what.into(), hint: hint.into() }
    }

    /// Wraps an I/O error with what was tried on which file; made for `map_err`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }
}
