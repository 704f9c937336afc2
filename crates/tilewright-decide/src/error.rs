//! What a request can get wrong. Kinds and messages are those of the `laya` package, so that programs which read them keep working.

use std::path::Path;

/// The result of a call of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong between a request and its answers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument of the wrong type as a whole: questions that are no object, a state that is null.
    #[error("{0}")]
    Type(String),
    /// A value that cannot be used, such as a question that cannot be asked.
    #[error("{0}")]
    Value(String),
    /// A JSON schema that cannot be asked as questions; the message begins with the path.
    #[error("{0}")]
    Schema(String),
    /// A file that is missing, unreadable or not what it should be; or the model failed.
    #[error(transparent)]
    Core(#[from] tilewright_core::Error),
}

impl Error {
    /// The name of the kind: `TypeError`, `ValueError`, `SchemaError`, or `Error` for files and the model.
    pub fn kind(&self) -> &'static str {
        match self {
            Error::Type(_) => "TypeError",
            Error::Value(_) => "ValueError",
            Error::Schema(_) => "SchemaError",
            Error::Core(_) => "Error",
        }
    }

    /// Whether the caller can put it right by sending another request.
    pub fn is_request(&self) -> bool {
        !matches!(self, Error::Core(_))
    }

    /// A file that does not hold what it should.
    pub(crate) fn file(path: &Path, what: impl std::fmt::Display, hint: &str) -> Self {
        Error::Core(tilewright_core::Error::config(format!("{}: {what}", path.display()), hint))
    }
}

/// `Err(Error::Value(..))` with a formatted message.
macro_rules! value_error {
    ($($arg:tt)*) => { Err($crate::Error::Value(format!($($arg)*))) };
}

/// `Err(Error::Type(..))` with a formatted message.
macro_rules! type_error {
    ($($arg:tt)*) => { Err($crate::Error::Type(format!($($arg)*))) };
}

/// `Err(Error::Schema(..))` with a formatted message.
macro_rules! schema_error {
    ($($arg:tt)*) => { Err($crate::Error::Schema(format!($($arg)*))) };
}

pub(crate) use {schema_error, type_error, value_error};
