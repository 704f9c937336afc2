//! The device of a call. An enum, so that models hold one type and no generic parameter of any runtime leaves this crate.

use std::fmt;
use std::rc::Rc;

use crate::cpu::Cpu;
use crate::null::Null;
#[cfg(feature = "cuda")]
use crate::runtime::cuda::{self, Cuda};
#[cfg(feature = "gpu")]
use crate::runtime::gpu::{self, Gpu};

/// Where tensors live and ops run. Cheap to clone; one owner thread (a device is neither `Send` nor `Sync`).
#[derive(Clone)]
#[non_exhaustive]
pub enum Device {
    /// This computer's processor: SIMD kernels on a pool of threads.
    Cpu(Rc<Cpu>),
    /// An NVIDIA GPU.
    #[cfg(feature = "cuda")]
    Cuda(Rc<Cuda>),
    /// A GPU through Vulkan or Metal.
    #[cfg(feature = "gpu")]
    Gpu(Rc<Gpu>),
    /// Computes nothing, records launches and bytes, and allocates nothing: the planner's device.
    Null(Rc<Null>),
}

impl Device {
    /// The CPU with the number of threads and instruction set chosen by [`Cpu::from_env`].
    pub fn cpu() -> Self {
        Device::Cpu(Rc::new(Cpu::from_env()))
    }

    /// The CPU with exactly `threads` threads.
    pub fn cpu_with_threads(threads: usize) -> Self {
        Device::Cpu(Rc::new(Cpu::new(threads, crate::cpu::Isa::detect())))
    }

    /// A device that stands for a CPU of `threads` threads in plans.
    pub fn null(threads: usize) -> Self {
        Device::Null(Rc::new(Null::new(threads)))
    }

    /// The NVIDIA GPU `ordinal`.
    ///
    /// # Errors
    /// What is missing (driver, GPU, NVRTC, cuBLASLt) and how to get it; without the feature `cuda`, how to build with it.
    pub fn cuda(ordinal: usize) -> tilewright_core::Result<Self> {
        #[cfg(feature = "cuda")]
        return cuda::open(ordinal).map(Device::Cuda);
        #[cfg(not(feature = "cuda"))]
        Err(tilewright_core::Error::config(
            format!("device cuda:{ordinal}: this program was built without CUDA"),
            "build with `--features cuda`, or use --device cpu",
        ))
    }

    /// GPU `number` through Vulkan.
    ///
    /// # Errors
    /// What is missing (loader, driver, adapter) and how to get it; without the feature `vulkan`, how to build with it.
    pub fn vulkan(number: usize) -> tilewright_core::Result<Self> {
        #[cfg(feature = "gpu")]
        return gpu::open(gpu::Api::Vulkan, number).map(Device::Gpu);
        #[cfg(not(feature = "gpu"))]
        Err(not_built("vulkan", number))
    }

    /// GPU `number` through Metal.
    ///
    /// # Errors
    /// As for [`Device::vulkan`].
    pub fn metal(number: usize) -> tilewright_core::Result<Self> {
        #[cfg(feature = "gpu")]
        return gpu::open(gpu::Api::Metal, number).map(Device::Gpu);
        #[cfg(not(feature = "gpu"))]
        Err(not_built("metal", number))
    }

    /// GPU `number` through this system's interface: Metal on Apple's, Vulkan elsewhere.
    ///
    /// # Errors
    /// As for [`Device::vulkan`].
    pub fn gpu(number: usize) -> tilewright_core::Result<Self> {
        if cfg!(target_vendor = "apple") { Device::metal(number) } else { Device::vulkan(number) }
    }

    /// A device that computes and allocates nothing, and whose buffers and scratch have the sizes that they have here.
    pub fn planner(&self) -> Self {
        match self {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Device::Null(Rc::new(Null::of_cuda(cuda.clone()))),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Device::Null(Rc::new(Null::of_gpu(gpu.clone()))),
            Device::Null(null) => Device::Null(null.clone()),
            _ => Device::null(self.threads()),
        }
    }

    /// Bytes that arenas can still take on a device with memory of its own; `None` where the memory is the computer's.
    pub fn free_bytes(&self) -> tilewright_core::Result<Option<usize>> {
        match self {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.free_bytes().map(|free| Some(free.saturating_sub(cuda::RESERVE_BYTES))),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => Ok(gpu.free_bytes()),
            _ => Ok(None),
        }
    }

    /// The GPU through Vulkan or Metal whose sizes count: the device itself, or what a planner stands for.
    #[cfg(feature = "gpu")]
    pub(crate) fn gpu_sizes(&self) -> Option<&Rc<Gpu>> {
        match self {
            Device::Gpu(gpu) => Some(gpu),
            Device::Null(null) => null.gpu(),
            _ => None,
        }
    }

    /// Measures a GPU through Vulkan or Metal for some milliseconds, so that no launch holds it for longer than a desktop bears. Says what was measured;
    /// `None` where nothing needs to be.
    pub fn calibrate(&self) -> tilewright_core::Result<Option<String>> {
        match self {
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => gpu.calibrate(self).map(|()| Some(gpu.pace.describe())),
            _ => Ok(None),
        }
    }

    /// The GPU whose sizes count: the device itself, or what a planner stands for.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_sizes(&self) -> Option<&Rc<Cuda>> {
        match self {
            Device::Cuda(cuda) => Some(cuda),
            Device::Null(null) => null.cuda(),
            _ => None,
        }
    }

    /// Whether it has memory of its own, into which files cannot be mapped.
    pub fn is_gpu(&self) -> bool {
        !matches!(self, Device::Cpu(_) | Device::Null(_))
    }

    /// Whether it is a driver that computes on the processor, which serves tests: they are reduced there.
    pub fn is_software(&self) -> bool {
        #[cfg(feature = "gpu")]
        if let Device::Gpu(gpu) = self {
            return gpu.adapter().is_software();
        }
        false
    }

    /// A short name for messages and records: `cpu (avx512, 2 threads)`, `null`.
    pub fn name(&self) -> String {
        match self {
            Device::Cpu(cpu) => format!("cpu ({}, {} threads)", cpu.isa().name(), cpu.threads()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.name(),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => gpu.name(),
            Device::Null(_) => "null".to_owned(),
        }
    }

    /// Worker threads of a processor; workspaces are sized by it.
    pub fn threads(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.threads(),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 1,
            #[cfg(feature = "gpu")]
            Device::Gpu(_) => 1,
            Device::Null(null) => null.threads(),
        }
    }

    /// Runs `work`; on a GPU also tells the milliseconds that what was launched took, and waits for it. On CUDA by the GPU's own clock; through Vulkan and
    /// Metal by the host's, from when nothing was left to do until nothing is again.
    pub fn timed(&self, work: impl FnOnce() -> tilewright_core::Result<()>) -> tilewright_core::Result<Option<f32>> {
        match self {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.timed(work).map(Some),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                gpu.synchronize()?;
                let start = std::time::Instant::now();
                work()?;
                gpu.synchronize()?;
                Ok(Some(1e3 * start.elapsed().as_secs_f32()))
            }
            _ => work().map(|()| None),
        }
    }

    /// Bytes that the device itself holds (packing buffers of the matrix product), apart from any arena. Constant for its lifetime.
    pub fn scratch_bytes(&self) -> usize {
        #[cfg(feature = "cuda")]
        if self.cuda_sizes().is_some() {
            return cuda::HELD_BYTES;
        }
        #[cfg(feature = "gpu")]
        if self.gpu_sizes().is_some() {
            return 0;
        }
        crate::cpu::scratch_bytes(self.threads())
    }

    /// Waits for all work given to the device. Only a timing needs it: reading a tensor waits by itself.
    pub fn synchronize(&self) -> tilewright_core::Result<()> {
        match self {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.synchronize(),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => gpu.synchronize(),
            _ => Ok(()),
        }
    }

    /// Bytes of arenas alive on this device now.
    pub fn live_bytes(&self) -> usize {
        match self {
            Device::Cpu(cpu) => cpu.live_bytes(),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.live_bytes(),
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => gpu.live_bytes(),
            Device::Null(null) => null.live_bytes(),
        }
    }

    /// Whether two handles are the same device.
    pub fn same(&self, other: &Device) -> bool {
        match (self, other) {
            (Device::Cpu(a), Device::Cpu(b)) => Rc::ptr_eq(a, b),
            #[cfg(feature = "cuda")]
            (Device::Cuda(a), Device::Cuda(b)) => Rc::ptr_eq(a, b),
            #[cfg(feature = "gpu")]
            (Device::Gpu(a), Device::Gpu(b)) => Rc::ptr_eq(a, b),
            (Device::Null(a), Device::Null(b)) => Rc::ptr_eq(a, b),
            _ => false,
        }
    }
}

#[cfg(not(feature = "gpu"))]
fn not_built(name: &str, number: usize) -> tilewright_core::Error {
    tilewright_core::Error::config(
        format!("device {name}:{number}: this program was built without {name}"),
        format!("build with `--features {name}`, or use --device cpu"),
    )
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}
