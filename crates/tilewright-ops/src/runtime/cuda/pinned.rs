//! Page-locked host memory beside one tensor: copies from and to it run beside the host's work.

use std::cell::Cell;
use std::ffi::c_void;
use std::rc::Rc;

use tilewright_core::Result;

use super::Cuda;
use super::driver::{Address, Handle};
use crate::Tensor;
use crate::tensor::Storage;

/// Memory of the size of one tensor of 4-byte elements, and the event of the copy made last.
pub(crate) struct Pinned {
    device: Rc<Cuda>,
    memory: *mut c_void,
    bytes: usize,
    done: Handle,
    pending: Cell<bool>,
}

impl Pinned {
    /// `None` where the tensor is not on such a device, or is empty.
    pub(crate) fn beside(tensor: &Tensor) -> Result<Option<Self>> {
        let (Storage::Cuda(buffer), bytes @ 1..) = (&tensor.storage, tensor.bytes()) else { return Ok(None) };
        let device = buffer.device.clone();
        device.enter();
        let mut pinned = Pinned {
            memory: std::ptr::null_mut(),
            bytes,
            done: std::ptr::null_mut(),
            pending: Cell::new(false),
            device: device.clone(),
        };
        // SAFETY: out-pointers; what is made is destroyed in `drop`.
        unsafe {
            device.check("cuda.pinned", "cuMemAllocHost", (device.driver.host_alloc)(&mut pinned.memory, bytes))?;
            // 2: without a time stamp.
            device.check("cuda.pinned", "cuEventCreate", (device.driver.event_create)(&mut pinned.done, 2))?;
        }
        Ok(Some(pinned))
    }

    fn wait(&self) -> Result<()> {
        if !self.pending.replace(false) {
            return Ok(());
        }
        self.device.enter();
        // SAFETY: the event lives as long as `self`.
        let status = unsafe { (self.device.driver.event_synchronize)(self.done) };
        self.device.check("cuda.pinned", "cuEventSynchronize", status)
    }

    fn mark(&self) -> Result<()> {
        // SAFETY: as in `wait`.
        let status = unsafe { (self.device.driver.event_record)(self.done, self.device.stream) };
        self.pending.set(true);
        self.device.check("cuda.pinned", "cuEventRecord", status)
    }

    /// Copies to the device once the earlier copy is done with the memory. `values` has no more elements than the tensor.
    pub(crate) fn send(&self, to: Address, values: &[i32]) -> Result<()> {
        debug_assert!(size_of_val(values) <= self.bytes);
        self.device.not_recording("cuda.upload")?;
        self.wait()?;
        self.device.enter();
        self.device.forget_moments();
        // SAFETY: the values fit the memory, and no copy reads it; the device's range is the tensor's.
        let status = unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), self.memory.cast::<i32>(), values.len());
            (self.device.driver.copy_to_device)(to, self.memory, size_of_val(values), self.device.stream)
        };
        self.device.check("cuda.upload", "cuMemcpyHtoDAsync", status)?;
        self.mark()
    }

    /// Starts a copy of so many bytes, no more than the tensor's, to the host.
    pub(crate) fn start(&self, from: Address, bytes: usize) -> Result<()> {
        debug_assert!(bytes <= self.bytes);
        self.device.not_recording("cuda.download")?;
        self.wait()?;
        self.device.enter();
        // SAFETY: as in `send`.
        let status = unsafe { (self.device.driver.copy_to_host)(self.memory, from, bytes, self.device.stream) };
        self.device.check("cuda.download", "cuMemcpyDtoHAsync", status)?;
        self.mark()
    }

    /// Waits for that copy, of which `out` is the first part.
    pub(crate) fn finish(&self, out: &mut [f32]) -> Result<()> {
        debug_assert!(size_of_val(out) <= self.bytes);
        self.wait()?;
        // SAFETY: the memory has the tensor's size and is written by nobody now.
        unsafe { std::ptr::copy_nonoverlapping(self.memory.cast::<f32>(), out.as_mut_ptr(), out.len()) };
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.wait();
        self.device.enter();
        // SAFETY: made by `beside`, destroyed once, after the last copy.
        unsafe {
            if !self.done.is_null() {
                (self.device.driver.event_destroy)(self.done);
            }
            if !self.memory.is_null() {
                (self.device.driver.host_free)(self.memory);
            }
        }
    }
}
