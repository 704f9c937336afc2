//! Where a format is written to: an atomic file, or memory for tests and fuzzing. Counts and checksums what passes.

use std::path::Path;

use crate::Result;
use crate::fs::AtomicFile;

/// The receiving end of a writer.
#[derive(Debug)]
pub struct Sink {
    target: Target,
    written: u64,
    crc: crc32fast::Hasher,
}

#[derive(Debug)]
enum Target {
    File(AtomicFile),
    Memory(Vec<u8>),
}

/// What a finished [`Sink`] leaves.
#[derive(Debug)]
pub struct Finished {
    /// Bytes written.
    pub len: u64,
    /// CRC-32 (IEEE) of the bytes in the order in which they were first written; later patches do not count.
    pub crc32: u32,
    /// The bytes, when the sink was in memory.
    pub memory: Vec<u8>,
}

impl Sink {
    /// A file that appears when the sink is finished, and not before.
    pub fn create(path: &Path) -> Result<Self> {
        Ok(Sink { target: Target::File(AtomicFile::create(path)?), written: 0, crc: crc32fast::Hasher::new() })
    }

    /// A sink in memory.
    pub fn memory() -> Self {
        Sink { target: Target::Memory(Vec::new()), written: 0, crc: crc32fast::Hasher::new() }
    }

    /// Bytes written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// CRC-32 of the bytes written so far.
    pub fn crc32(&self) -> u32 {
        self.crc.clone().finalize()
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.target {
            Target::File(file) => file.write(bytes)?,
            Target::Memory(memory) => memory.extend_from_slice(bytes),
        }
        self.crc.update(bytes);
        self.written += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn patch(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        match &mut self.target {
            Target::File(file) => file.patch(offset, bytes),
            Target::Memory(memory) => {
                memory[offset as usize..][..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
        }
    }

    pub(crate) fn finish(self) -> Result<Finished> {
        let memory = match self.target {
            Target::File(file) => {
                file.commit()?;
                Vec::new()
            }
            Target::Memory(memory) => memory,
        };
        Ok(Finished { len: self.written, crc32: self.crc.finalize(), memory })
    }
}
