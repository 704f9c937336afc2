//! The CPU device: a pool of threads, run-time detection of instruction sets, and what its kernels share.

pub(crate) mod buffer;
pub(crate) mod disjoint;
pub(crate) mod element;
pub(crate) mod gemm;
pub mod isa;
pub(crate) mod math;
pub mod memory;
pub mod peak;
pub mod pool;
pub(crate) mod tiles;

use std::cell::{Cell, RefCell, RefMut};

pub use element::Element;
pub use isa::Isa;
use pool::ThreadPool;

/// A processor: threads, instruction set, and the packing buffers of the matrix product.
pub struct Cpu {
    pool: ThreadPool,
    isa: Isa,
    bf16_dot: bool,
    live: Cell<usize>,
    scratch: RefCell<gemm::Scratch>,
}

/// Bytes that a CPU device of `threads` threads holds apart from arenas.
pub fn scratch_bytes(threads: usize) -> usize {
    gemm::Scratch::bytes(threads)
}

impl Cpu {
    /// A CPU with `threads` worker threads (the caller is one of them) and one instruction set.
    ///
    /// # Panics
    /// When this machine lacks the instruction set.
    pub fn new(threads: usize, isa: Isa) -> Self {
        assert!(isa.is_available(), "this machine has no {}", isa.name());
        let threads = threads.max(1);
        Cpu {
            pool: ThreadPool::new(threads),
            isa,
            bf16_dot: isa == Isa::Avx512 && isa::detect_bf16_dot(),
            live: Cell::new(0),
            scratch: RefCell::new(gemm::Scratch::new(threads)),
        }
    }

    /// Threads from `TILEWRIGHT_THREADS`, else one a logical core; instruction set from `TILEWRIGHT_ISA`, else the best one here.
    pub fn from_env() -> Self {
        Cpu::new(default_threads(), Isa::from_env())
    }

    /// The number of threads that run kernels.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// The thread pool.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// The instruction set of the kernels.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Whether kernels may use the processor's dot product of pairs of bf16 (AVX512-BF16).
    pub fn has_bf16_dot(&self) -> bool {
        self.bf16_dot
    }

    /// The same CPU as a processor without AVX512-BF16 would be.
    pub fn without_bf16_dot(self) -> Self {
        Cpu { bf16_dot: false, ..self }
    }

    /// Bytes of arenas alive on this device.
    pub fn live_bytes(&self) -> usize {
        self.live.get()
    }

    pub(crate) fn scratch(&self) -> RefMut<'_, gemm::Scratch> {
        self.scratch.borrow_mut()
    }
}

/// `TILEWRIGHT_THREADS`, else the parallelism that the system grants this process.
pub fn default_threads() -> usize {
    let env = std::env::var("TILEWRIGHT_THREADS").ok().and_then(|v| v.parse().ok()).filter(|&n| n > 0);
    env.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}
