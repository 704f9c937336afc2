//! Device memory: allocations of an arena's slots, exact accounts, copies.

use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use cubecl::bytes::Bytes;
use cubecl::server::{Handle, ServerError};
use tilewright_core::{Error, Result};

use super::Core;
use super::launch::{self, UNITS};

/// The memory of one arena: one allocation, or several where the device's buffers are smaller. A slot never lies in two.
pub(crate) struct GpuBuffer {
    pub(crate) device: Rc<Core>,
    bytes: usize,
    parts: Vec<Part>,
}

struct Part {
    /// First byte in the arena.
    start: usize,
    bytes: usize,
    handle: Handle,
}

/// A copy to the host that is on its way.
pub(crate) struct Reading {
    device: Rc<Core>,
    bytes: usize,
    /// None once it was waited for.
    read: Option<Read>,
    done: Option<Copied>,
}

type Copied = std::result::Result<Vec<Bytes>, ServerError>;
type Read = Pin<Box<dyn Future<Output = Copied>>>;

impl Reading {
    /// How much was asked for.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Waits for it; `out` has as many bytes.
    pub(crate) fn finish(mut self, out: &mut [f32]) -> Result<()> {
        let copied = self.wait().expect("waited for once");
        let pieces = self.device.check("gpu.download", copied)?;
        let words = pieces.iter().flat_map(|piece| piece.chunks_exact(WORD));
        for (x, word) in out.iter_mut().zip(words) {
            *x = f32::from_le_bytes(word.try_into().expect("four bytes"));
        }
        Ok(())
    }

    fn wait(&mut self) -> Option<Copied> {
        let read = self.read.take()?;
        Some(self.done.take().unwrap_or_else(|| cubecl::future::block_on(read)))
    }
}

impl Drop for Reading {
    /// Staging memory that is given back before its copy is done stays mapped, and the driver refuses the next copy into it.
    fn drop(&mut self) {
        let _ = self.wait();
    }
}

/// Bytes of one transfer between host and device: staging memory is as large.
const TRANSFER: usize = 64 << 20;

/// Copies between host and device go by these.
const WORD: usize = 4;

impl GpuBuffer {
    /// Zero-filled memory for slots that start at `starts` and end at `bytes`. Refused, with nothing allocated, where it does not fit.
    pub(crate) fn zeroed(device: Rc<Core>, starts: &[usize], bytes: usize, what: &str) -> Result<Self> {
        let capabilities = device.capabilities();
        let available = capabilities.memory_bytes.unwrap_or(usize::MAX).saturating_sub(device.live_bytes());
        let refused = |wanted: usize, available: usize, hint: &str| Error::OutOfMemory {
            what: what.to_owned(),
            device: device.name(),
            wanted: wanted as u64,
            available: available as u64,
            hint: hint.to_owned(),
        };
        if bytes > available {
            let hint =
                "use a smaller batch, sequence or model, or a higher recompute mode; `tilewright plan` shows what fits";
            return Err(refused(bytes, available, hint));
        }
        let mut cuts = cut(starts, bytes, capabilities.buffer_bytes).map_err(|slot| {
            refused(
                slot,
                capabilities.buffer_bytes,
                "one buffer of this device holds no more; use a smaller batch, sequence or model",
            )
        })?;
        if cuts.is_empty() {
            // Something to point at.
            cuts.push((0, 256));
        }
        let client = &device.client;
        let parts = cuts
            .iter()
            .map(|&(start, bytes)| {
                // An allocation of its own, given back when the arena goes.
                let handle = client.memory_dedicated_allocation((), |()| client.empty(bytes));
                Part { start, bytes, handle }
            })
            .collect();
        device.live.set(device.live.get() + bytes);
        device.peak.set(device.peak.get().max(device.live.get()));
        let buffer = GpuBuffer { device, bytes, parts };
        buffer.fill_zero(0, bytes)?;
        let handles = buffer.parts.iter().map(|p| &p.handle);
        let allocated = cubecl::future::block_on(buffer.device.client.sync_buffers(handles));
        buffer.device.check("gpu.allocate", allocated)?;
        Ok(buffer)
    }

    /// The same memory as part of the device itself, which counts for no arena.
    pub(super) fn out_of_accounts(mut self) -> Self {
        self.device.live.set(self.device.live.get() - self.bytes);
        self.bytes = 0;
        self
    }

    /// The handle of `bytes` bytes from `at` on, which lie in one part.
    pub(super) fn handle(&self, at: usize, bytes: usize) -> Handle {
        let i = self.parts.partition_point(|p| p.start <= at).saturating_sub(1);
        let part = &self.parts[i];
        let start = at - part.start;
        debug_assert!(start + bytes <= part.bytes, "a slot lies in one part");
        part.handle.clone().offset_start(start as u64).offset_end((part.bytes - start - bytes) as u64)
    }

    /// Calls `f` with the start and the length of each piece of `bytes` bytes from `at` on that lies in one part and within a transfer.
    fn pieces(&self, at: usize, bytes: usize, mut f: impl FnMut(usize, usize) -> Result<()>) -> Result<()> {
        for part in &self.parts {
            let (mut from, to) = (at.max(part.start), (at + bytes).min(part.start + part.bytes));
            while from < to {
                let piece = (to - from).min(TRANSFER);
                f(from, piece)?;
                from += piece;
            }
        }
        Ok(())
    }

    /// Copies from the host, in the order of the calls.
    pub(crate) fn upload(&self, at: usize, from: &[u8]) -> Result<()> {
        self.pieces(at, from.len(), |start, len| {
            let data = &from[start - at..start - at + len];
            // Whole words; what surrounds the bytes asked for stays as it is.
            let (first, last) = (start / WORD * WORD, (start + len).next_multiple_of(WORD));
            let words = if (first, last) == (start, start + len) {
                data.to_vec()
            } else {
                let mut words = vec![0; last - first];
                if first < start {
                    self.download(first, &mut words[..WORD])?;
                }
                if start + len < last {
                    let end = words.len() - WORD;
                    self.download(last - WORD, &mut words[end..])?;
                }
                words[start - first..start - first + len].copy_from_slice(data);
                words
            };
            let handle = self.handle(first, last - first);
            self.device.client.write(&handle, launch::host_bytes(words));
            Ok(())
        })
    }

    /// Copies to the host, after everything launched so far.
    pub(crate) fn download(&self, at: usize, to: &mut [u8]) -> Result<()> {
        self.pieces(at, to.len(), |start, len| {
            let (first, last) = (start / WORD * WORD, (start + len).next_multiple_of(WORD));
            let read = self.device.client.read_one(self.handle(first, last - first));
            let read = self.device.check("gpu.download", read)?;
            to[start - at..start - at + len].copy_from_slice(&read[start - first..start - first + len]);
            Ok(())
        })
    }

    /// Starts to copy bytes to the host, in the order of the calls: what is launched from now on does not change them. Whole words.
    pub(crate) fn start_download(&self, at: usize, bytes: usize) -> Result<Reading> {
        debug_assert!(at.is_multiple_of(WORD) && bytes.is_multiple_of(WORD), "whole words");
        let mut handles = Vec::new();
        self.pieces(at, bytes, |start, len| {
            handles.push(self.handle(start, len));
            Ok(())
        })?;
        let client = self.device.client.clone();
        let mut read: Read = Box::pin(async move { client.read_async(handles).await });
        // The first poll hands the copy to the driver.
        let done = match read.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(done) => Some(done),
            Poll::Pending => None,
        };
        Ok(Reading { device: self.device.clone(), bytes, read: Some(read), done })
    }

    /// Sets bytes to zero, in the order of the calls.
    pub(crate) fn fill_zero(&self, at: usize, bytes: usize) -> Result<()> {
        let end = at + bytes;
        // The kernel's range starts where the device can bind one.
        let bound = self.device.capabilities().alignment.max(WORD);
        let (first, last) = (at.next_multiple_of(bound).min(end), (end / WORD * WORD).max(at));
        if first >= last {
            return self.upload(at, &vec![0; bytes]);
        }
        self.upload(at, &vec![0; first - at])?;
        self.upload(last, &vec![0; end - last])?;
        for part in &self.parts {
            let (from, to) = (first.max(part.start), last.min(part.start + part.bytes));
            if from < to {
                let words = (to - from) / WORD;
                let cubes = words.div_ceil(UNITS as usize * 4);
                launch::fill_words(&self.device, self.handle(from, to - from), words, cubes)?;
            }
        }
        Ok(())
    }

    /// Copies `bytes` bytes on the device, in the order of the calls.
    pub(crate) fn copy_from(&self, at: usize, source: &GpuBuffer, from: usize, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let bound = self.device.capabilities().alignment;
        let starts = |u: usize| at.is_multiple_of(u.max(bound)) && from.is_multiple_of(u.max(bound));
        let unit = [4, 2].into_iter().find(|u| starts(*u) && bytes.is_multiple_of(*u));
        match unit {
            Some(unit) if unit == 4 || self.device.capabilities().bf16 => {
                let (to, from) = (self.handle(at, bytes), source.handle(from, bytes));
                launch::copy(&self.device, from, to, bytes / unit, unit)
            }
            _ => {
                let mut host = vec![0; bytes];
                source.download(from, &mut host)?;
                self.upload(at, &host)
            }
        }
    }
}

impl Drop for GpuBuffer {
    fn drop(&mut self) {
        self.device.live.set(self.device.live.get() - self.bytes);
    }
}

/// Cuts an arena at starts of slots into parts of at most `most` bytes; the bytes of a slot that is larger are the error.
fn cut(starts: &[usize], bytes: usize, most: usize) -> std::result::Result<Vec<(usize, usize)>, usize> {
    let mut cuts = Vec::new();
    let mut start = 0;
    let ends = starts.iter().copied().filter(|&s| s > 0).chain([bytes]);
    let mut last = 0;
    for end in ends {
        if end - start > most {
            if last > start {
                cuts.push((start, last - start));
                start = last;
            }
            if end - start > most {
                return Err(end - start);
            }
        }
        last = end;
    }
    if bytes > start {
        cuts.push((start, bytes - start));
    }
    Ok(cuts)
}

#[cfg(test)]
mod tests {
    use super::cut;

    #[test]
    fn an_arena_is_cut_at_starts_of_slots() {
        assert_eq!(cut(&[0, 10, 30], 60, 100), Ok(vec![(0, 60)]));
        assert_eq!(cut(&[0, 10, 30], 60, 30), Ok(vec![(0, 30), (30, 30)]));
        assert_eq!(cut(&[0, 10, 30], 60, 59), Ok(vec![(0, 30), (30, 30)]));
        assert_eq!(cut(&[], 0, 10), Ok(vec![]));
        assert_eq!(cut(&[0], 7, 7), Ok(vec![(0, 7)]));
    }

    #[test]
    fn a_slot_that_exceeds_a_buffer_is_refused_by_its_size() {
        assert_eq!(cut(&[0, 10], 60, 49), Err(50));
        assert_eq!(cut(&[0], 60, 49), Err(60));
    }
}
