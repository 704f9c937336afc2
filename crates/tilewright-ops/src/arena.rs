//! Arenas: everything a program needs is planned as named slots, then allocated once. Nothing is allocated after the first step.

use std::rc::Rc;

use tilewright_core::{DType, Error, Result, Shape};

use crate::Device;
use crate::cpu::buffer::CpuBuffer;
#[cfg(feature = "cuda")]
use crate::runtime::cuda::memory::CudaBuffer;
#[cfg(feature = "gpu")]
use crate::runtime::gpu::memory::GpuBuffer;
use crate::tensor::{NullBuffer, Storage, Tensor};

/// Every slot starts at a multiple of this: enough for a cache line, an AVX-512 register and a GPU's widest load.
pub const ALIGN: usize = 256;

/// A slot of a [`Plan`], and of the arena that it becomes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(usize);

/// One planned buffer.
#[derive(Clone, Debug)]
pub struct SlotPlan {
    /// Its name, for the planner's table.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: Shape,
    /// Start in the arena, in bytes.
    pub offset: usize,
}

/// The layout of an arena before it exists.
#[derive(Clone, Debug)]
pub struct Plan {
    name: &'static str,
    slots: Vec<SlotPlan>,
    bytes: usize,
}

impl Plan {
    /// An empty plan; the name appears in error messages and tables.
    pub fn new(name: &'static str) -> Self {
        Plan { name, slots: Vec::new(), bytes: 0 }
    }

    /// Adds a slot behind the others.
    pub fn add(&mut self, name: impl Into<String>, dtype: DType, shape: &[usize]) -> Slot {
        let shape = Shape::new(shape);
        let offset = self.bytes;
        let bytes = shape.numel().checked_mul(dtype.size()).and_then(|n| n.checked_next_multiple_of(ALIGN));
        let name = name.into();
        self.bytes = bytes
            .and_then(|n| offset.checked_add(n))
            .unwrap_or_else(|| panic!("arena `{}` exceeds usize at slot `{name}` {shape}", self.name));
        self.slots.push(SlotPlan { name, dtype, shape, offset });
        Slot(self.slots.len() - 1)
    }

    /// The arena's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The slots in order.
    pub fn slots(&self) -> &[SlotPlan] {
        &self.slots
    }

    /// Total bytes, padding included.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// One allocation, cut into the slots of a [`Plan`].
#[derive(Clone)]
pub struct Arena {
    plan: Rc<Plan>,
    device: Device,
    storage: Storage,
}

impl Arena {
    /// Allocates a planned arena, zero-filled.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] before anything is allocated, when the device does not have the room.
    pub fn allocate(device: &Device, plan: Plan) -> Result<Self> {
        let storage = match device {
            Device::Cpu(cpu) => Storage::Cpu(Rc::new(CpuBuffer::zeroed(cpu.clone(), plan.bytes).map_err(|available| {
                Error::OutOfMemory {
                    what: format!("arena `{}`", plan.name),
                    device: device.name(),
                    wanted: plan.bytes as u64,
                    available,
                    hint: "use a smaller batch, sequence or model, or a higher recompute mode; `tilewright plan` shows what fits".into(),
                }
            })?)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let what = format!("arena `{}`", plan.name);
                Storage::Cuda(Rc::new(CudaBuffer::zeroed(cuda.clone(), plan.bytes, &what)?))
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => {
                let what = format!("arena `{}`", plan.name);
                let starts: Vec<usize> = plan.slots.iter().map(|s| s.offset).collect();
                Storage::Gpu(Rc::new(GpuBuffer::zeroed(gpu.core(), &starts, plan.bytes, &what)?))
            }
            Device::Null(null) => {
                null.add_live(plan.bytes);
                Storage::Null(Rc::new(NullBuffer { device: null.clone(), bytes: plan.bytes }))
            }
        };
        Ok(Arena { plan: Rc::new(plan), device: device.clone(), storage })
    }

    /// The tensor of a slot.
    pub fn tensor(&self, slot: Slot) -> Tensor {
        let s = &self.plan.slots[slot.0];
        Tensor::from_parts(self.storage.clone(), self.device.clone(), s.offset, s.dtype, s.shape)
    }

    /// The layout.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}
