//! What the attention kernels share: a vector type an instruction set, small products on blocks that stay near, the passes between them.

pub(crate) mod product;
pub(crate) mod rows;
pub(crate) mod simd;

use simd::WIDTH;

/// `log2(e) / sqrt(hs)`: what turns `q.k` into an exponent of two.
pub(crate) fn log2_scale(head: usize) -> f32 {
    (std::f64::consts::LOG2_E / (head as f64).sqrt()) as f32
}

/// Hands out consecutive parts of a thread's workspace, each at a multiple of a cache line.
pub(crate) struct Cut {
    pub(crate) next: usize,
}

impl Cut {
    pub(crate) fn new() -> Self {
        Cut { next: 0 }
    }

    pub(crate) fn take(&mut self, floats: usize) -> usize {
        let at = self.next;
        self.next += floats.next_multiple_of(WIDTH);
        at
    }
}

/// Asks for rows of `head` elements, `stride` apart, to be brought near while something else is computed.
pub(crate) fn fetch_rows<T>(ptr: *const T, stride: usize, rows: usize, head: usize) {
    const LINE: usize = 64;
    for row in 0..rows {
        let start = ptr.wrapping_add(row * stride).cast::<u8>();
        for byte in (0..head * size_of::<T>()).step_by(LINE) {
            prefetch(start.wrapping_add(byte));
        }
    }
}

#[inline(always)]
fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// A pointer that tasks share; each writes its own elements.
pub(crate) struct Shared<T>(pub(crate) *mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    /// # Safety
    /// `start` lies within the memory.
    pub(crate) unsafe fn at(self, start: usize) -> *mut T {
        unsafe { self.0.add(start) }
    }
}

// SAFETY: only an address; what is done with it is argued where it is done.
unsafe impl<T> Send for Shared<T> {}
unsafe impl<T> Sync for Shared<T> {}
