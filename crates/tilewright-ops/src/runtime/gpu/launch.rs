//! Launches: grids within the device's limits, storage types of kernels, tensors as their arguments.

use cubecl::ir::{ElemType, FloatKind, UIntKind};
use cubecl::prelude::*;
use cubecl::server::Handle;
use tilewright_core::{DType, Error, Result};

use super::Core;
use crate::Tensor;
use crate::tensor::Storage as Memory;

/// Units of a group, of every kernel that has no reason for another number: every device has as many.
pub(crate) const UNITS: u32 = 256;

/// How a kernel sees elements of a storage type: bf16 are 16-bit integers, which every device can store and [`super::math::widen`] reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Storage {
    /// The type of the buffer.
    pub(crate) elem: ElemType,
    /// Whether its integers are bf16.
    pub(crate) bf16: bool,
}

impl Storage {
    /// Of a float type, on any device.
    pub(crate) fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 => Storage { elem: ElemType::Float(FloatKind::F16), bf16: false },
            DType::BF16 => Storage { elem: ElemType::UInt(UIntKind::U16), bf16: true },
            _ => Storage { elem: ElemType::Float(FloatKind::F32), bf16: false },
        }
    }
}

impl Core {
    /// How kernels see a float type; refused before any launch where the device cannot store it.
    pub(crate) fn storage(&self, op: &'static str, dtype: DType) -> Result<Storage> {
        let have = match dtype {
            DType::F32 => true,
            DType::F16 => self.capabilities().f16,
            DType::BF16 => self.capabilities().bf16,
            _ => false,
        };
        if have {
            return Ok(Storage::of(dtype));
        }
        let hint = "use f32 on this device, or another device; `tilewright doctor` lists what each supports".to_owned();
        Err(Error::Unsupported { op, device: self.name(), what: format!("storage in {dtype}"), hint })
    }

    /// A tensor as an argument: where it starts must be what the device can bind.
    pub(crate) fn arg(&self, op: &'static str, t: &Tensor) -> Result<BufferArg> {
        let Memory::Gpu(buffer) = &t.storage else { unreachable!("the op's check let it through") };
        let alignment = self.capabilities().alignment.max(t.dtype().size());
        if !t.offset.is_multiple_of(alignment) {
            return Err(Error::Unsupported {
                op,
                device: self.name(),
                what: format!(
                    "a tensor that starts at byte {} of its arena, not at a multiple of {alignment}",
                    t.offset
                ),
                hint: "give it a slot of its own".into(),
            });
        }
        if u32::try_from(t.numel()).is_err() {
            let what = format!("a tensor of {} elements; kernels count in 32 bits", t.numel());
            return Err(Error::Unsupported { op, device: self.name(), what, hint: "use a smaller batch".into() });
        }
        // SAFETY: the length is that of the tensor, whose bytes the arena holds.
        Ok(unsafe { BufferArg::from_raw_parts(buffer.handle(t.offset, t.bytes()), t.numel()) })
    }

    /// So many groups, within the device's limits. Kernels take their number from `CUBE_POS` and pass over those that are too many.
    pub(crate) fn grid(&self, groups: usize) -> CubeCount {
        let [most, ..] = self.capabilities().groups;
        let x = groups.clamp(1, most);
        let y = groups.div_ceil(x).max(1);
        // Nearly square beyond the limit, so that few are too many.
        let x = if y > 1 { groups.div_ceil(y) } else { x };
        CubeCount::Static(x as u32, y as u32, 1)
    }

    /// Groups for `n` elements of an elementwise kernel, each unit with a few.
    pub(crate) fn spread(&self, n: usize) -> CubeCount {
        const MOST: usize = 1 << 14;
        self.grid(n.div_ceil(UNITS as usize).min(MOST))
    }

    /// Notes a launch that writes `outputs`; waits for it where `TILEWRIGHT_GPU_CAREFUL` asks.
    pub(crate) fn launched(&self, op: &'static str, outputs: &[&Tensor]) -> Result<()> {
        self.launches.set(self.launches.get() + 1);
        if !self.careful {
            return Ok(());
        }
        let handles: Vec<Handle> = outputs
            .iter()
            .filter_map(|t| match &t.storage {
                Memory::Gpu(buffer) => Some(buffer.handle(t.offset, t.bytes())),
                _ => None,
            })
            .collect();
        self.check(op, cubecl::future::block_on(self.client.sync_buffers(&handles)))
    }

    /// For launches.
    pub(crate) fn client(&self) -> &Client {
        &self.client
    }
}

/// Bytes as the library takes them.
pub(super) fn host_bytes(bytes: Vec<u8>) -> cubecl::bytes::Bytes {
    cubecl::bytes::Bytes::from_bytes_vec(bytes)
}

#[cube(launch_unchecked)]
fn fill_kernel(out: &mut [u32], n: usize) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        out[i] = 0u32;
        i += step;
    }
}

#[cube(launch_unchecked)]
fn copy_kernel<E: Numeric>(from: &[E], to: &mut [E], n: usize, #[define(E)] _elem: ElemType) {
    let step = CUBE_COUNT * CUBE_DIM as usize;
    let mut i = ABSOLUTE_POS;
    while i < n {
        to[i] = from[i];
        i += step;
    }
}

pub(super) fn fill_words(gpu: &Core, handle: Handle, words: usize, groups: usize) -> Result<()> {
    // SAFETY: the kernel stays below `words`, which is the length of the range.
    unsafe {
        let out = BufferArg::from_raw_parts(handle, words);
        fill_kernel::launch_unchecked(&gpu.client, gpu.grid(groups.min(1 << 14)), CubeDim::new_1d(UNITS), out, words);
    }
    gpu.launched("gpu.fill", &[])
}

pub(super) fn copy(gpu: &Core, from: Handle, to: Handle, n: usize, unit: usize) -> Result<()> {
    let elem = ElemType::UInt(if unit == 4 { UIntKind::U32 } else { UIntKind::U16 });
    // SAFETY: the kernel stays below `n`, which is the length of both ranges.
    unsafe {
        let (from, to) = (BufferArg::from_raw_parts(from, n), BufferArg::from_raw_parts(to, n));
        copy_kernel::launch_unchecked(&gpu.client, gpu.spread(n), CubeDim::new_1d(UNITS), from, to, n, elem);
    }
    gpu.launched("gpu.copy", &[])
}
