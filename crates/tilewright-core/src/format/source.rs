//! Bytes that are read at offsets: a file, or memory for tests and fuzzing.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{CHUNK, decode_f32};
use crate::{DType, Error, Result};

/// An open file (or bytes in its place) of known length.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    data: Data,
    len: u64,
}

#[derive(Debug)]
enum Data {
    File(File),
    Memory(Vec<u8>),
}

impl Source {
    /// Opens a file.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let meta = file.metadata().map_err(Error::io("open", path))?;
        if !meta.is_file() {
            return Err(Error::config(format!("{} is not a regular file", path.display()), "give the path of a file"));
        }
        Ok(Source { path: path.to_owned(), data: Data::File(file), len: meta.len() })
    }

    /// Bytes in memory; `name` stands for the path in messages.
    pub fn from_bytes(name: impl Into<PathBuf>, bytes: Vec<u8>) -> Self {
        Source { path: name.into(), len: bytes.len() as u64, data: Data::Memory(bytes) }
    }

    /// The file's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file's length in bytes when it was opened.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// An [`Error::Format`] in this file.
    pub(crate) fn error(&self, offset: u64, what: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::format(&self.path, offset, what, hint)
    }

    /// Fails unless `bytes` bytes lie at `offset`.
    pub(crate) fn check_range(&self, offset: u64, bytes: u64, what: &str) -> Result<()> {
        if offset.checked_add(bytes).is_none_or(|end| end > self.len) {
            let what =
                format!("{what} needs {bytes} bytes here, but the file ends at byte {} (truncated file?)", self.len);
            return Err(self.error(offset, what, "copy or write the file again"));
        }
        Ok(())
    }

    /// Fills `out` from `offset` on.
    pub(crate) fn read_at(&self, offset: u64, out: &mut [u8], what: &str) -> Result<()> {
        self.check_range(offset, out.len() as u64, what)?;
        match &self.data {
            Data::Memory(bytes) => {
                out.copy_from_slice(&bytes[offset as usize..][..out.len()]);
                Ok(())
            }
            Data::File(file) => read_file_at(file, offset, out).map_err(Error::io("read", &self.path)),
        }
    }

    /// Reads `bytes` bytes; nothing is allocated unless the file has them.
    pub(crate) fn read_vec(&self, offset: u64, bytes: u64, what: &str) -> Result<Vec<u8>> {
        self.check_range(offset, bytes, what)?;
        let mut out = vec![0; bytes as usize];
        self.read_at(offset, &mut out, what)?;
        Ok(out)
    }

    /// Streams a range in chunks whose lengths are multiples of `unit`, as the range's must be.
    pub(crate) fn stream(
        &self,
        mut offset: u64,
        mut bytes: u64,
        unit: usize,
        what: &str,
        sink: &mut dyn FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        self.check_range(offset, bytes, what)?;
        let mut buffer = vec![0; (CHUNK as u64 * unit as u64).min(bytes) as usize];
        while bytes > 0 {
            let n = (buffer.len() as u64).min(bytes) as usize;
            self.read_at(offset, &mut buffer[..n], what)?;
            sink(&buffer[..n])?;
            offset += n as u64;
            bytes -= n as u64;
        }
        Ok(())
    }

    /// Streams `count` elements as f32.
    pub(crate) fn stream_f32(
        &self,
        offset: u64,
        count: u64,
        dtype: DType,
        what: &str,
        sink: &mut dyn FnMut(&[f32]) -> Result<()>,
    ) -> Result<()> {
        let bytes = count.saturating_mul(dtype.size() as u64);
        self.check_range(offset, bytes, what)?;
        let mut values = vec![0.0; count.min(CHUNK as u64) as usize];
        self.stream(offset, bytes, dtype.size(), what, &mut |chunk| {
            let out = &mut values[..chunk.len() / dtype.size()];
            decode_f32(chunk, dtype, out);
            sink(out)
        })
    }
}

#[cfg(unix)]
fn read_file_at(file: &File, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, out, offset)
}

#[cfg(windows)]
fn read_file_at(file: &File, mut offset: u64, mut out: &mut [u8]) -> std::io::Result<()> {
    while !out.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, out, offset)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => {
                out = &mut out[n..];
                offset += n as u64;
            }
        }
    }
    Ok(())
}
