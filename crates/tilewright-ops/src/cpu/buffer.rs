//! Page-aligned, zero-filled memory, counted on its device.

use std::rc::Rc;

use memmap2::MmapMut;

use super::{Cpu, memory};

pub(crate) struct CpuBuffer {
    // Kept for its mapping; all access goes through `ptr`.
    _map: Option<MmapMut>,
    ptr: *mut u8,
    bytes: usize,
    device: Rc<Cpu>,
}

impl CpuBuffer {
    /// Maps `bytes` zeroed bytes, backed by huge pages where the system has them. The error is the number of bytes available.
    pub(crate) fn zeroed(device: Rc<Cpu>, bytes: usize) -> Result<Self, u64> {
        let available = memory::available();
        if bytes as u64 > available {
            return Err(available);
        }
        // An empty map is an error to the system; a dangling pointer serves an empty arena.
        let (map, ptr) = if bytes == 0 {
            (None, std::ptr::without_provenance_mut(crate::arena::ALIGN))
        } else {
            let mut map = MmapMut::map_anon(bytes).map_err(|_| available)?;
            #[cfg(target_os = "linux")]
            if bytes >= 4 << 20 {
                // A hint only: without huge pages everything works, with more misses of the address cache.
                let _ = map.advise(memmap2::Advice::HugePage);
            }
            let ptr = map.as_mut_ptr();
            (Some(map), ptr)
        };
        device.live.set(device.live.get() + bytes);
        Ok(CpuBuffer { _map: map, ptr, bytes, device })
    }

    pub(crate) fn ptr(&self) -> *mut u8 {
        self.ptr
    }
}

impl Drop for CpuBuffer {
    fn drop(&mut self) {
        self.device.live.set(self.device.live.get() - self.bytes);
    }
}
