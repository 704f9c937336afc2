//! Device memory: one allocation an arena, exact accounts, copies.

use std::rc::Rc;

use tilewright_core::{Error, Result};

use super::driver::{self, Address};
use super::{Cuda, RESERVE_BYTES};

/// The memory of one arena.
pub(crate) struct CudaBuffer {
    pub(crate) device: Rc<Cuda>,
    pub(crate) address: Address,
    pub(crate) bytes: usize,
}

impl CudaBuffer {
    /// Zero-filled memory. Refused, with nothing allocated, where it does not fit.
    pub(crate) fn zeroed(device: Rc<Cuda>, bytes: usize, what: &str) -> Result<Self> {
        let address = if bytes == 0 { 0 } else { device.allocate(bytes, what)? };
        device.live.set(device.live.get() + bytes);
        device.peak.set(device.peak.get().max(device.live.get()));
        let buffer = CudaBuffer { device, address, bytes };
        buffer.device.fill(buffer.address, 0, bytes)?;
        Ok(buffer)
    }
}

impl Drop for CudaBuffer {
    fn drop(&mut self) {
        self.device.live.set(self.device.live.get() - self.bytes);
        if self.address != 0 {
            self.device.enter();
            self.device.expected.set((0, 0));
            // SAFETY: allocated by `zeroed`, freed once. The driver waits for launches that use it.
            unsafe { (self.device.driver.free)(self.address) };
        }
    }
}

impl Cuda {
    /// Bytes of device memory that nobody holds.
    pub fn free_bytes(&self) -> Result<usize> {
        self.enter();
        let (mut free, mut total) = (0, 0);
        // SAFETY: two out-pointers.
        let status = unsafe { (self.driver.memory_info)(&mut free, &mut total) };
        self.check("cuda.free_bytes", "cuMemGetInfo", status)?;
        Ok(free)
    }

    pub(super) fn allocate(&self, bytes: usize, what: &str) -> Result<Address> {
        let available = self.free_bytes()?;
        let too_much = |available: usize| Error::OutOfMemory {
            what: what.to_owned(),
            device: self.name(),
            wanted: bytes as u64,
            available: available as u64,
            hint:
                "use a smaller batch, sequence or model, or a higher recompute mode; `tilewright plan` shows what fits"
                    .into(),
        };
        if bytes.saturating_add(RESERVE_BYTES) > available {
            return Err(too_much(available.saturating_sub(RESERVE_BYTES)));
        }
        let mut address = 0;
        // SAFETY: an out-pointer.
        match unsafe { (self.driver.alloc)(&mut address, bytes) } {
            driver::OUT_OF_MEMORY => Err(too_much(available)),
            status => self.check("cuda.allocate", &format!("cuMemAlloc({bytes})"), status).map(|()| address),
        }
    }

    /// Sets bytes, in stream order.
    pub(crate) fn fill(&self, address: Address, byte: u8, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter();
        self.forget_moments();
        // SAFETY: the caller owns the range.
        let status = unsafe { (self.driver.fill_bytes)(address, byte, bytes, self.stream) };
        self.check("cuda.fill", "cuMemsetD8Async", status)
    }

    /// Copies from the host; returns when the host's memory may be reused.
    pub(crate) fn upload(&self, address: Address, from: &[u8]) -> Result<()> {
        if from.is_empty() {
            return Ok(());
        }
        self.not_recording("cuda.upload")?;
        self.enter();
        self.forget_moments();
        // SAFETY: the caller owns the device range; the host range is a live slice, and the copy is waited for.
        let status = unsafe { (self.driver.copy_to_device)(address, from.as_ptr().cast(), from.len(), self.stream) };
        self.check("cuda.upload", "cuMemcpyHtoDAsync", status)?;
        self.synchronize()
    }

    /// Copies to the host, after everything launched so far.
    pub(crate) fn download(&self, address: Address, to: &mut [u8]) -> Result<()> {
        if to.is_empty() {
            return Ok(());
        }
        self.not_recording("cuda.download")?;
        self.enter();
        // SAFETY: as in `upload`.
        let status = unsafe { (self.driver.copy_to_host)(to.as_mut_ptr().cast(), address, to.len(), self.stream) };
        self.check("cuda.download", "cuMemcpyDtoHAsync", status)?;
        self.synchronize()
    }

    /// Copies on the device, in stream order.
    pub(crate) fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.enter();
        self.forget_moments();
        // SAFETY: the caller owns both ranges and has checked that they are disjoint.
        let status = unsafe { (self.driver.copy_on_device)(to, from, bytes, self.stream) };
        self.check("cuda.copy", "cuMemcpyDtoDAsync", status)
    }

    pub(super) fn not_recording(&self, op: &'static str) -> Result<()> {
        if self.recording() {
            let what = "a copy between host and device cannot be part of a graph; make it before or after".to_owned();
            return Err(Error::Argument { op, what });
        }
        Ok(())
    }
}
