//! GPUs through Vulkan and Metal: one device over CubeCL, and the only folder that names it. Ops write their kernels (`gpu.rs`) in the
//! language that [`prelude`] brings, and launch them with what lies here.
//!
//! One client a device, one stream a thread, work in the order of the calls; reading a tensor waits for it. Arenas are allocations of their
//! own outside the library's pools, so what a device holds is what was planned. A kernel that cannot be compiled or launched does not fail
//! its call: the tensors it should have written fail when they are read, which names the kernel; `TILEWRIGHT_GPU_CAREFUL=1` waits behind
//! every launch and fails there.

use std::cell::Cell;
use std::rc::Rc;

use cubecl::client::Client;
use tilewright_core::{DType, Error, Result, Shape};

use crate::tensor::Storage;
use crate::{Device, Tensor};
use memory::GpuBuffer;
use pace::Pace;

mod adapters;
mod capabilities;
pub mod doctor;
#[cfg(all(test, feature = "metal"))]
pub(crate) mod emulator;
pub(crate) mod graph;
pub(crate) mod launch;
pub(crate) mod math;
pub(crate) mod memory;
#[cfg(all(test, feature = "metal"))]
pub(crate) mod metal;
pub(crate) mod pace;
pub(crate) mod packs;
#[cfg(all(test, any(feature = "metal", feature = "vulkan")))]
mod recorder;
#[cfg(test)]
mod speed;
#[cfg(all(test, feature = "vulkan"))]
mod spirv;
#[cfg(test)]
mod sweep;
#[cfg(test)]
mod tests;

pub use adapters::{Adapter, Api, Kind, adapters};
pub use capabilities::{Capabilities, MatrixTile};

/// What a file of kernels needs.
pub(crate) mod prelude {
    pub(crate) use super::launch::{Storage, UNITS};
    pub(crate) use super::math::*;
    pub(crate) use super::packs::*;
    pub(crate) use cubecl::ir::{ElemType, FloatKind, UIntKind};
    pub(crate) use cubecl::prelude::*;
}

/// Bytes of scratch that a device holds from its start to its end: partial sums of ops without a workspace. All work is in one stream, so one
/// range serves all.
pub const SCRATCH_BYTES: usize = 16 << 20;

/// An opened device; see the module's words.
pub struct Gpu {
    core: Rc<Core>,
    scratch: Rc<GpuBuffer>,
}

/// What a device and its buffers share.
pub struct Core {
    client: Client,
    adapter: Adapter,
    capabilities: Capabilities,
    live: Cell<usize>,
    peak: Cell<usize>,
    launches: Cell<u64>,
    /// Launches are recorded, not run.
    recording: Cell<bool>,
    pub(crate) pace: Pace,
    careful: bool,
}

impl std::ops::Deref for Gpu {
    type Target = Core;

    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Gpu {
    /// Opens adapter `number` of [`adapters`].
    ///
    /// # Errors
    /// What is missing (loader, driver, adapter, a feature of the driver) and how to get it.
    pub fn open(api: Api, number: usize) -> Result<Self> {
        let (adapter, client) = adapters::open(api, number)?;
        let capabilities = Capabilities::read(&client);
        capabilities.check(&adapter)?;
        let careful = std::env::var_os("TILEWRIGHT_GPU_CAREFUL").is_some();
        Gpu::with_scratch(Rc::new(Core::new(client, adapter, capabilities, careful)))
    }

    fn with_scratch(core: Rc<Core>) -> Result<Self> {
        let scratch = GpuBuffer::zeroed(core.clone(), &[0], SCRATCH_BYTES, "the device's scratch")?.out_of_accounts();
        core.peak.set(0);
        Ok(Gpu { core, scratch: Rc::new(scratch) })
    }

    pub(crate) fn core(&self) -> Rc<Core> {
        self.core.clone()
    }

    /// The first `bytes` of the device's own scratch; `device` is this one's handle.
    pub(crate) fn scratch(&self, op: &'static str, device: &Device, bytes: usize) -> Result<Tensor> {
        if bytes > SCRATCH_BYTES {
            let what = format!(
                "{bytes} bytes of partial sums are needed, {SCRATCH_BYTES} are there; use smaller or fewer tensors"
            );
            return Err(Error::Argument { op, what });
        }
        let storage = Storage::Gpu(self.scratch.clone());
        Ok(Tensor::from_parts(storage, device.clone(), 0, DType::U8, Shape::new(&[bytes])))
    }
}

impl Core {
    fn new(client: Client, adapter: Adapter, capabilities: Capabilities, careful: bool) -> Self {
        Core {
            client,
            pace: Pace::from_env(adapter.is_software()),
            adapter,
            capabilities,
            live: Cell::new(0),
            peak: Cell::new(0),
            launches: Cell::new(0),
            recording: Cell::new(false),
            careful,
        }
    }

    /// Whether launches are recorded now, so that nothing can be read.
    pub(crate) fn recording(&self) -> bool {
        self.recording.get()
    }

    /// Whether runs of ops that repeat are recorded: not where each launch is waited for, nor where `TILEWRIGHT_GPU_GRAPHS=0` asks for none, nor on what
    /// stands for an Apple GPU in tests.
    pub(crate) fn records(&self) -> bool {
        let stands_in = self.adapter.api == Api::Metal && self.adapter.is_software();
        !self.careful && !stands_in && std::env::var_os("TILEWRIGHT_GPU_GRAPHS").is_none_or(|v| v != "0")
    }

    /// Bytes that arenas can still take, where the driver says how many there are.
    pub(crate) fn free_bytes(&self) -> Option<usize> {
        self.capabilities.memory_bytes.map(|all| all.saturating_sub(self.live_bytes()))
    }

    /// `vulkan:0 (NVIDIA H200)`.
    pub fn name(&self) -> String {
        format!("{}:{} ({})", self.adapter.api.name(), self.adapter.number, self.adapter.name)
    }

    /// What the driver says of it.
    pub fn adapter(&self) -> &Adapter {
        &self.adapter
    }

    /// What kernels are specialised by, read once.
    pub fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// Bytes of arenas alive now.
    pub fn live_bytes(&self) -> usize {
        self.live.get()
    }

    /// The most that [`Core::live_bytes`] has been.
    pub fn peak_bytes(&self) -> usize {
        self.peak.get()
    }

    /// Kernels launched so far.
    pub fn launches(&self) -> u64 {
        self.launches.get()
    }

    /// Waits for everything that was launched.
    pub fn synchronize(&self) -> Result<()> {
        let done = cubecl::future::block_on(self.client.sync());
        self.check("gpu.synchronize", done)
    }

    /// The library's error in ours.
    fn check<T>(&self, op: &'static str, result: std::result::Result<T, cubecl::server::ServerError>) -> Result<T> {
        result.map_err(|error| {
            // The first lines name the cause; a backtrace of the library's own frames follows.
            let text = error.to_string();
            let cause = text.split("Backtrace").next().unwrap_or_default().trim().replace('\n', " ");
            Error::Driver {
                op,
                device: self.name(),
                what: cause,
                hint: "a fault of an earlier launch shows late: run again with TILEWRIGHT_GPU_CAREFUL=1 to find its op"
                    .into(),
            }
        })
    }
}

/// A device handle for [`crate::Device::gpu`].
pub(crate) fn open(api: Api, number: usize) -> Result<Rc<Gpu>> {
    Ok(Rc::new(Gpu::open(api, number)?))
}
