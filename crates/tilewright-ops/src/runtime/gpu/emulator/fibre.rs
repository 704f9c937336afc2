//! Threads of a group in one thread of the system: each has a stack, and control goes from one to the next where they say so.

use std::cell::UnsafeCell;

/// Bytes of a stack. Kernels keep their arrays on it.
const STACK: usize = 64 << 10;
/// From one stack to the next: not a power of two, so that their tops do not meet in one set of the cache.
const STRIDE: usize = STACK + 192;
/// What lies at the end of a stack that was not overrun.
const GUARD: u64 = 0x5AFE_57AC_4E2D_0F0F;

/// Whether control can go from stack to stack on this processor.
pub(super) const SUPPORTED: bool = cfg!(all(unix, any(target_arch = "x86_64", target_arch = "aarch64")));

/// A place to go on at: the top of a stack with the registers that a call keeps.
pub(super) type Place = *mut u8;

/// Stacks, each with where its fibre goes on.
pub(super) struct Stacks {
    // Written by code that the compiler does not see.
    memory: Box<[UnsafeCell<u64>]>,
    count: usize,
}

impl Stacks {
    pub(super) fn new(count: usize) -> Self {
        // Zeroed pages that the system hands out when they are touched; one stack more, into which the first one may run over before that is seen.
        let memory = vec![0u64; (count + 1) * STRIDE / 8].into_boxed_slice();
        // SAFETY: `UnsafeCell<u64>` has the layout of `u64`.
        let memory = unsafe { Box::from_raw(Box::into_raw(memory) as *mut [UnsafeCell<u64>]) };
        Stacks { memory, count }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    fn bottom(&self, i: usize) -> *mut u64 {
        assert!(i < self.count);
        // SAFETY: `count` stacks and the one in front lie within the memory.
        unsafe { self.memory.as_ptr().add((i + 1) * STRIDE / 8) as *mut u64 }
    }

    /// Prepares stack `i` to begin at `start`, which must never return.
    pub(super) fn begin(&self, i: usize, start: extern "C" fn() -> !) -> Place {
        let bottom = self.bottom(i);
        // SAFETY: all within stack `i`, which no fibre uses: it is about to begin.
        unsafe {
            bottom.write(GUARD);
            let top = bottom.cast::<u8>().add(STACK);
            let top = top.sub(top as usize % 16);
            frame(top, start)
        }
    }

    /// Whether the fibre of stack `i` stayed within it.
    pub(super) fn is_whole(&self, i: usize) -> bool {
        // SAFETY: the first word of stack `i`, which `begin` has written.
        unsafe { self.bottom(i).read() == GUARD }
    }
}

#[cfg(target_arch = "x86_64")]
unsafe fn frame(top: *mut u8, start: extern "C" fn() -> !) -> Place {
    // SAFETY: the caller's stack has room. Six registers, the address that `go` returns to, and a word in place of a caller's address, which
    // leaves the stack as a call would.
    unsafe {
        let place = top.cast::<usize>().sub(8);
        for i in 0..6 {
            place.add(i).write(0);
        }
        place.add(6).write(start as *const () as usize);
        place.add(7).write(0);
        place.cast()
    }
}

#[cfg(target_arch = "aarch64")]
unsafe fn frame(top: *mut u8, start: extern "C" fn() -> !) -> Place {
    // SAFETY: the caller's stack has room: twenty registers, of which the last of the first twelve is where `go` returns to.
    unsafe {
        let place = top.cast::<usize>().sub(20);
        for i in 0..20 {
            place.add(i).write(0);
        }
        place.add(11).write(start as *const () as usize);
        place.cast()
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
unsafe fn frame(_: *mut u8, _: extern "C" fn() -> !) -> Place {
    unreachable!("the device is not opened on this processor")
}

/// Keeps where this stack goes on in `from` and goes on at `to`.
///
/// # Safety
/// `to` must come from [`Stacks::begin`] or from an earlier `go`, and be used once.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub(super) unsafe extern "sysv64" fn go(from: *mut Place, to: Place) {
    // The registers that a function must leave as they were, then the other stack with its own.
    core::arch::naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [rdi], rsp",
        "mov rsp, rsi",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret"
    )
}

/// Keeps where this stack goes on in `from` and goes on at `to`.
///
/// # Safety
/// `to` must come from [`Stacks::begin`] or from an earlier `go`, and be used once.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
pub(super) unsafe extern "C" fn go(from: *mut Place, to: Place) {
    core::arch::naked_asm!(
        "sub sp, sp, #160",
        "stp x19, x20, [sp]",
        "stp x21, x22, [sp, #16]",
        "stp x23, x24, [sp, #32]",
        "stp x25, x26, [sp, #48]",
        "stp x27, x28, [sp, #64]",
        "stp x29, x30, [sp, #80]",
        "stp d8, d9, [sp, #96]",
        "stp d10, d11, [sp, #112]",
        "stp d12, d13, [sp, #128]",
        "stp d14, d15, [sp, #144]",
        "mov x9, sp",
        "str x9, [x0]",
        "mov sp, x1",
        "ldp x19, x20, [sp]",
        "ldp x21, x22, [sp, #16]",
        "ldp x23, x24, [sp, #32]",
        "ldp x25, x26, [sp, #48]",
        "ldp x27, x28, [sp, #64]",
        "ldp x29, x30, [sp, #80]",
        "ldp d8, d9, [sp, #96]",
        "ldp d10, d11, [sp, #112]",
        "ldp d12, d13, [sp, #128]",
        "ldp d14, d15, [sp, #144]",
        "add sp, sp, #160",
        "ret"
    )
}

/// Where there is no such way.
///
/// # Safety
/// Never called: no device is opened.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) unsafe extern "C" fn go(_: *mut Place, _: Place) {
    unreachable!("the device is not opened on this processor")
}
