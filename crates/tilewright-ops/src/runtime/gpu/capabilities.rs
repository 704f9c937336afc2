//! What a device can do: read once, so that no kernel asks the library again and nothing assumes one vendor's numbers.

use cubecl::client::Client;
use cubecl::ir::features::TypeUsage;
use cubecl::ir::{ElemType, FloatKind, UIntKind};
use tilewright_core::{DType, Error, Result};

use super::adapters::{Adapter, Api};

/// A shape that the matrix units multiply: `(m, k) * (k, n)` of `factors`, summed in f32.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MatrixTile {
    /// Type of both factors.
    pub factors: DType,
    /// Rows of the product.
    pub m: usize,
    /// Columns of the product.
    pub n: usize,
    /// What is summed over.
    pub k: usize,
}

/// See the module's words.
#[derive(Clone, PartialEq, Debug)]
pub struct Capabilities {
    /// The compiler that serves it: `wgpu<spirv>` or `wgpu<msl>`.
    pub compiler: &'static str,
    /// Smallest and largest number of units that run as one; equal where the device has but one size.
    pub subgroup: [usize; 2],
    /// Whether kernels can store and compute f16.
    pub f16: bool,
    /// Whether 16-bit integers can be stored: what bf16 in memory is to the kernels that have no other use for it.
    pub bf16: bool,
    /// Whether the device itself knows bf16.
    pub bf16_native: bool,
    /// What the matrix units multiply, in f32 sums.
    pub tiles: Vec<MatrixTile>,
    /// Bytes of memory that the units of one group can share.
    pub shared_bytes: usize,
    /// Units of a group, at most.
    pub group: usize,
    /// Groups of a launch in each dimension, at most.
    pub groups: [usize; 3],
    /// Buffers that a kernel can take.
    pub bindings: usize,
    /// Bytes of one buffer, at most.
    pub buffer_bytes: usize,
    /// A tensor that a kernel takes starts at a multiple of this, or of its element if that is more.
    pub alignment: usize,
    /// Bytes of memory, where the driver says.
    pub memory_bytes: Option<usize>,
}

/// Bytes of one allocation that every Vulkan driver grants.
const ADDRESSED_BYTES: usize = 1 << 30;

impl Capabilities {
    pub(super) fn read(client: &Client) -> Self {
        let properties = client.properties();
        let (hardware, memory) = (&properties.hardware, &properties.memory);
        let stored = |ty: ElemType| properties.type_usage(ty).contains(TypeUsage::Buffer);
        let float = |kind| stored(ElemType::Float(kind));
        let f32 = ElemType::Float(FloatKind::F32);
        let tiles = properties.features.matmul.cmma.iter().filter_map(|tile| {
            let factors = match tile.a_type {
                ElemType::Float(FloatKind::F16) => DType::F16,
                ElemType::Float(FloatKind::BF16) => DType::BF16,
                _ => return None,
            };
            let [m, n, k] = [tile.m, tile.n, tile.k].map(|x| x as usize);
            (tile.b_type == tile.a_type && tile.cd_type == f32).then_some(MatrixTile { factors, m, n, k })
        });
        let (x, y, z) = hardware.max_cube_count;
        let compiler = client.name();
        // Through Vulkan kernels take addresses, to which the limits of bound buffers do not apply; elsewhere buffers are bound.
        let addressed = compiler.contains("spirv");
        let bound = usize::try_from(memory.max_page_size).unwrap_or(usize::MAX);
        Capabilities {
            compiler,
            subgroup: [hardware.plane_size_min as usize, hardware.plane_size_max as usize],
            f16: float(FloatKind::F16),
            bf16: stored(ElemType::UInt(UIntKind::U16)),
            bf16_native: float(FloatKind::BF16),
            tiles: tiles.collect(),
            shared_bytes: hardware.max_shared_memory_size,
            group: hardware.max_units_per_cube as usize,
            groups: [x as usize, y as usize, z as usize],
            bindings: hardware.max_bindings as usize,
            buffer_bytes: if addressed { bound.max(ADDRESSED_BYTES) } else { bound },
            alignment: if addressed { 1 } else { memory.alignment as usize },
            memory_bytes: memory.max_memory().map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
        }
    }

    /// Refuses what no kernel of ours runs on.
    pub(super) fn check(&self, adapter: &Adapter) -> Result<()> {
        const UNITS: usize = super::launch::UNITS as usize;
        let lacks = |what: String, hint: &str| {
            let device = format!("{}:{} ({})", adapter.api.name(), adapter.number, adapter.name);
            Err(Error::Unsupported { op: "gpu.open", device, what, hint: hint.into() })
        };
        let wanted = match adapter.api {
            Api::Vulkan => "spirv",
            Api::Metal => "msl",
        };
        if !self.compiler.contains(wanted) {
            return lacks(
                format!("kernels in its own language (the library chose {})", self.compiler),
                "it lacks Vulkan's memory model or buffer addresses; update the driver, or use --device cpu",
            );
        }
        if self.group < UNITS {
            return lacks(format!("groups of {UNITS} units (it has {})", self.group), "use --device cpu");
        }
        if self.shared_bytes < 32 << 10 {
            return lacks(format!("32 KiB of shared memory (it has {} bytes)", self.shared_bytes), "use --device cpu");
        }
        Ok(())
    }

    /// The tile for products of these factors, if the matrix units have one.
    pub fn tile(&self, factors: DType) -> Option<MatrixTile> {
        self.tiles.iter().copied().filter(|t| t.factors == factors).max_by_key(|t| t.m * t.n * t.k)
    }
}
