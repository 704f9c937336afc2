//! A slice that the tasks of one parallel loop write in disjoint parts.

use std::marker::PhantomData;

/// Hands out parts of a mutable slice to tasks. The borrow lasts as long as the handle, so nothing else can touch the memory meanwhile.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    _data: PhantomData<&'a mut [T]>,
}

// SAFETY: the callers of `part` promise that no two live parts overlap, so this is no more than a mutable slice split among threads.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(data: &'a mut [T]) -> Self {
        Disjoint { ptr: data.as_mut_ptr(), len: data.len(), _data: PhantomData }
    }

    /// Elements `start..end`.
    ///
    /// # Safety
    /// No two parts that are alive at once may overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, start: usize, end: usize) -> &'a mut [T] {
        assert!(start <= end && end <= self.len, "part {start}..{end} of a slice of {}", self.len);
        // SAFETY: inside the slice, as just checked; disjoint by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), end - start) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_fill_their_own_parts() {
        let mut data = vec![0usize; 103];
        let parts = Disjoint::new(&mut data);
        crate::cpu::pool::ThreadPool::new(3).run(11, &|i, _| {
            // SAFETY: each task takes its own ten elements.
            let part = unsafe { parts.part(i * 10, (i * 10 + 10).min(103)) };
            part.fill(i + 1);
        });
        assert!(data.iter().enumerate().all(|(i, &v)| v == i / 10 + 1));
    }

    #[test]
    #[should_panic(expected = "part 1..5 of a slice of 4")]
    fn a_part_outside_the_slice_is_refused() {
        let mut data = [0u8; 4];
        // SAFETY: the only part; it is never made.
        let _ = unsafe { Disjoint::new(&mut data).part(1, 5) };
    }
}
