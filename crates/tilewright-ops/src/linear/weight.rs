//! A weight in the order in which the kernels read it.

use tilewright_core::{DType, Error, Result};

use super::cpu;
use crate::check::Check;
use crate::cpu::Isa;
use crate::{Device, Tensor};

/// How the rows of a weight are laid out in its panels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Layout {
    /// One after the other.
    Plain,
    /// The first `N/2` rows are activated, the last `N/2` are their gates (`Wi` of a GEGLU layer): both rows of a pair lie in the same panel.
    Gated,
}

/// A packed `(N, K)` weight on a device. Cloning copies the handle.
#[derive(Clone, Debug)]
pub struct Weight {
    memory: Tensor,
    panels: Panels,
}

/// The shape of a packed weight. Panels of `width` columns of the product follow each other, each over all of K: f32 as `[k][column]`, 16-bit types
/// in pairs of K as `[k / 2][column][2]`, an odd K padded with zeros. Columns past the end are zeros too. On a GPU a weight is one panel
/// of all N and lies as its rows, `[n][k]`, whatever the layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Panels {
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) precision: DType,
    pub(super) layout: Layout,
    /// Columns a panel, of both halves together when gated.
    pub(super) width: usize,
    /// Panels.
    pub(super) count: usize,
}

impl Panels {
    pub(super) fn new(isa: Isa, n: usize, k: usize, precision: DType, layout: Layout) -> Panels {
        let width = cpu::panel_width(isa);
        let count = match layout {
            Layout::Plain => n.div_ceil(width),
            Layout::Gated => (n / 2).div_ceil(width / 2),
        };
        Panels { n, k, precision, layout, width, count }
    }

    /// Elements of K in a panel.
    pub(super) fn padded_k(&self) -> usize {
        if self.precision == DType::F32 { self.k } else { self.k.next_multiple_of(2) }
    }

    /// Bytes of one panel, or `None` when it exceeds `usize`.
    fn checked_panel_bytes(&self) -> Option<usize> {
        self.padded_k().checked_mul(self.width)?.checked_mul(self.precision.size())
    }

    pub(super) fn panel_bytes(&self) -> usize {
        self.padded_k() * self.width * self.precision.size()
    }

    pub(super) fn bytes(&self) -> usize {
        self.panel_bytes() * self.count
    }

    /// Columns of the output that a panel makes.
    pub(super) fn out_columns(&self) -> usize {
        match self.layout {
            Layout::Plain => self.width,
            Layout::Gated => self.width / 2,
        }
    }
}

const OP: &str = "linear.pack";

/// Where packed memory must start, in bytes: a line of the cache. Slots of an arena do.
const ALIGN: usize = 64;

fn panels(device: &Device, n: usize, k: usize, precision: DType, layout: Layout) -> Result<Panels> {
    let check = Check::new(OP, device);
    if !precision.is_float() {
        return Err(Error::DType { op: OP, what: "precision", got: precision, want: "f32, f16 or bf16".into() });
    }
    check.argument(layout == Layout::Plain || n.is_multiple_of(2), || {
        format!("a gated weight has as many gates as activated rows, so an even number of rows, not {n}")
    })?;
    let panels = match device {
        Device::Cpu(cpu) => Panels::new(cpu.isa(), n, k, precision, layout),
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Panels { n, k, precision, layout, width: n, count: 1 },
        #[cfg(feature = "gpu")]
        Device::Gpu(_) => Panels { n, k, precision, layout, width: n, count: 1 },
        #[cfg(feature = "gpu")]
        Device::Null(null) if null.gpu().is_some() => Panels { n, k, precision, layout, width: n, count: 1 },
        // A plan is made for the processor that it is made on.
        Device::Null(_) => Panels::new(Isa::from_env(), n, k, precision, layout),
    };
    let bytes = panels.checked_panel_bytes().and_then(|b| b.checked_mul(panels.count));
    check.argument(bytes.is_some(), || format!("a weight of {n} x {k} exceeds the address space"))?;
    Ok(panels)
}

impl Weight {
    /// Bytes of an `(n, k)` weight packed for `device`: its rows rounded up to whole panels.
    pub fn packed_bytes(device: &Device, n: usize, k: usize, precision: DType, layout: Layout) -> Result<usize> {
        Ok(panels(device, n, k, precision, layout)?.bytes())
    }

    /// Packs `source`, an `(N, K)` tensor of any float type, into memory of its own.
    pub fn pack(device: &Device, source: &Tensor, precision: DType, layout: Layout) -> Result<Weight> {
        let (n, k) = source.shape().as_matrix();
        let bytes = Weight::packed_bytes(device, n, k, precision, layout)?;
        Weight::pack_into(device, source, precision, layout, &Tensor::zeros(device, DType::U8, &[bytes])?)
    }

    /// Packs `source` into `memory`, raw bytes of at least [`Weight::packed_bytes`] from a multiple of 64 on, such as a slot of an arena. The
    /// weight keeps the handle; whoever else holds one must not write to it.
    pub fn pack_into(
        device: &Device,
        source: &Tensor,
        precision: DType,
        layout: Layout,
        memory: &Tensor,
    ) -> Result<Weight> {
        let check = Check::new(OP, device);
        let (n, k) = source.shape().as_matrix();
        check.matrix("source", source, n, k)?;
        let panels = panels(device, n, k, precision, layout)?;
        check.on_device("memory", memory)?;
        if memory.dtype() != DType::U8 {
            return Err(Error::DType { op: OP, what: "memory", got: memory.dtype(), want: "u8".into() });
        }
        let bytes = panels.bytes();
        if memory.bytes() < bytes {
            let want = format!("at least {bytes} bytes for {n} x {k} in {precision}");
            return Err(Error::Shape { op: OP, what: "memory", got: memory.shape(), want });
        }
        check.argument(memory.offset.is_multiple_of(ALIGN), || {
            format!("`memory` starts at byte {} of its arena, not at a multiple of {ALIGN}; use a slot", memory.offset)
        })?;
        let memory = memory.slice(0, &[bytes])?;
        check.disjoint(&[("memory", &memory)], &[("source", source)])?;
        match device {
            Device::Cpu(cpu) => cpu::pack(cpu, source, &panels, &memory),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => super::cuda::pack(cuda, OP, source, precision, &memory)?,
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) => super::gpu::pack(gpu, OP, source, precision, &memory)?,
            Device::Null(null) => null.record(OP, 0, (source.bytes() + bytes) as u64),
        }
        Ok(Weight { memory, panels })
    }

    /// `(N, K)`.
    pub fn shape(&self) -> (usize, usize) {
        (self.panels.n, self.panels.k)
    }

    /// The type in which it is kept.
    pub fn dtype(&self) -> DType {
        self.panels.precision
    }

    /// How its rows are laid out.
    pub fn layout(&self) -> Layout {
        self.panels.layout
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.panels.bytes()
    }

    pub(super) fn memory(&self) -> &Tensor {
        &self.memory
    }

    pub(super) fn panels(&self) -> &Panels {
        &self.panels
    }
}
