//! A device that computes nothing: it records what would be launched and how many bytes would live, and allocates none of them.

use std::cell::{Cell, RefCell};
#[cfg(any(feature = "cuda", feature = "gpu"))]
use std::rc::Rc;

#[cfg(feature = "cuda")]
use crate::runtime::cuda::Cuda;
#[cfg(feature = "gpu")]
use crate::runtime::gpu::Gpu;

/// What one op call would have launched.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The op, as `folder.function`.
    pub op: &'static str,
    /// Floating-point operations, a multiply-add counted as two.
    pub flops: u64,
    /// Bytes that the op must read and write at least once.
    pub bytes: u64,
}

/// See the module's words.
pub struct Null {
    threads: usize,
    live: Cell<usize>,
    launches: RefCell<Vec<Launch>>,
    /// The GPU whose buffers are planned; without one a processor's are.
    #[cfg(feature = "cuda")]
    cuda: Option<Rc<Cuda>>,
    #[cfg(feature = "gpu")]
    gpu: Option<Rc<Gpu>>,
}

impl Null {
    pub(crate) fn new(threads: usize) -> Self {
        Null {
            threads: threads.max(1),
            live: Cell::new(0),
            launches: RefCell::new(Vec::new()),
            #[cfg(feature = "cuda")]
            cuda: None,
            #[cfg(feature = "gpu")]
            gpu: None,
        }
    }

    /// Stands for a GPU through Vulkan or Metal.
    #[cfg(feature = "gpu")]
    pub(crate) fn of_gpu(gpu: Rc<Gpu>) -> Self {
        Null { gpu: Some(gpu), ..Null::new(1) }
    }

    /// The GPU through Vulkan or Metal that it stands for.
    #[cfg(feature = "gpu")]
    pub(crate) fn gpu(&self) -> Option<&Rc<Gpu>> {
        self.gpu.as_ref()
    }

    /// Stands for a GPU.
    #[cfg(feature = "cuda")]
    pub(crate) fn of_cuda(cuda: Rc<Cuda>) -> Self {
        Null { cuda: Some(cuda), ..Null::new(1) }
    }

    /// The GPU that it stands for.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(&self) -> Option<&Rc<Cuda>> {
        self.cuda.as_ref()
    }

    /// The number of worker threads of the CPU that this device stands for.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Bytes of arenas that would be alive.
    pub fn live_bytes(&self) -> usize {
        self.live.get()
    }

    pub(crate) fn add_live(&self, bytes: usize) {
        self.live.set(self.live.get() + bytes);
    }

    pub(crate) fn sub_live(&self, bytes: usize) {
        self.live.set(self.live.get() - bytes);
    }

    /// Notes a launch; every op calls this in place of its kernel.
    pub fn record(&self, op: &'static str, flops: u64, bytes: u64) {
        self.launches.borrow_mut().push(Launch { op, flops, bytes });
    }

    /// The launches since the last call, in order.
    pub fn take_launches(&self) -> Vec<Launch> {
        self.launches.take()
    }
}
