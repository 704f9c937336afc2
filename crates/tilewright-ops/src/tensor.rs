//! Tensors: a dtype, a shape and a range of an arena. No strides, no generics, no autograd.

use std::fmt;
use std::rc::Rc;

use tilewright_core::{DType, Error, Result, Shape, bf16, f16};

use crate::Device;
use crate::cpu::Element;
use crate::cpu::buffer::CpuBuffer;
use crate::mapped::MappedFile;
use crate::null::Null;
#[cfg(feature = "cuda")]
use crate::runtime::cuda::memory::CudaBuffer;
#[cfg(feature = "gpu")]
use crate::runtime::gpu::memory::GpuBuffer;

/// The memory behind an arena.
#[derive(Clone)]
pub(crate) enum Storage {
    Cpu(Rc<CpuBuffer>),
    /// A file on the CPU, read only.
    Mapped(Rc<MappedFile>),
    #[cfg(feature = "cuda")]
    Cuda(Rc<CudaBuffer>),
    #[cfg(feature = "gpu")]
    Gpu(Rc<GpuBuffer>),
    Null(Rc<NullBuffer>),
}

/// A range of bytes that exists only in the accounts of a [`Null`] device.
pub(crate) struct NullBuffer {
    pub(crate) device: Rc<Null>,
    pub(crate) bytes: usize,
}

impl Drop for NullBuffer {
    fn drop(&mut self) {
        self.device.sub_live(self.bytes);
    }
}

/// A contiguous, row-major view of part of an arena. Cloning copies the handle, never the data.
///
/// Handles may alias; each op checks that its outputs overlap none of its other arguments. A tensor is not `Send`, so no two ops run at
/// once on the same memory.
#[derive(Clone)]
pub struct Tensor {
    pub(crate) storage: Storage,
    pub(crate) device: Device,
    /// Start, in bytes from the start of the arena.
    pub(crate) offset: usize,
    dtype: DType,
    shape: Shape,
}

impl Tensor {
    pub(crate) fn from_parts(storage: Storage, device: Device, offset: usize, dtype: DType, shape: Shape) -> Self {
        Tensor { storage, device, offset, dtype, shape }
    }

    /// A zero-filled tensor in an arena of its own. For tests and small things; models plan an [`crate::Arena`].
    pub fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Result<Self> {
        let mut plan = crate::Plan::new("tensor");
        let slot = plan.add("data", dtype, shape);
        Ok(crate::Arena::allocate(device, plan)?.tensor(slot))
    }

    /// A tensor in an arena of its own, converted from f32 values.
    pub fn from_f32(device: &Device, dtype: DType, shape: &[usize], values: &[f32]) -> Result<Self> {
        let t = Tensor::zeros(device, dtype, shape)?;
        t.write_f32(values)?;
        Ok(t)
    }

    /// An i32 tensor in an arena of its own.
    pub fn from_i32(device: &Device, shape: &[usize], values: &[i32]) -> Result<Self> {
        let t = Tensor::zeros(device, DType::I32, shape)?;
        t.write_i32(values)?;
        Ok(t)
    }

    /// A read-only tensor that is part of a file in memory, `shape` elements of `dtype` from byte `offset` of the file on. Nothing is read or
    /// copied before an op asks for it; the tensor keeps the file mapped, and its bytes count as no arena's. On a null device it takes
    /// nothing at all.
    ///
    /// # Errors
    /// [`Error::Format`] when the file does not reach that far, or when the elements would not lie at multiples of their size: copy those
    /// into an arena with [`MappedFile::bytes`] and [`Tensor::write_bytes`].
    pub fn mapped(
        device: &Device,
        file: &Rc<MappedFile>,
        offset: usize,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self> {
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        file.check_range(offset, elements, dtype)?;
        let storage = match device {
            Device::Cpu(_) => Storage::Mapped(file.clone()),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => return Err(not_mapped(device)),
            #[cfg(feature = "gpu")]
            Device::Gpu(_) => return Err(not_mapped(device)),
            Device::Null(null) => Storage::Null(Rc::new(NullBuffer { device: null.clone(), bytes: 0 })),
        };
        Ok(Tensor::from_parts(storage, device.clone(), offset, dtype, Shape::new(shape)))
    }

    /// Whether it can only be read: part of a mapped file.
    pub fn is_read_only(&self) -> bool {
        matches!(self.storage, Storage::Mapped(_))
    }

    /// The storage type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The dimensions.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// The number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// The size in bytes.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }

    /// The device that holds it.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The same elements under another shape of the same element count.
    pub fn view(&self, shape: &[usize]) -> Result<Tensor> {
        let shape = Shape::new(shape);
        if shape.numel() != self.numel() {
            let want = format!("a view of {} elements, not {shape}", self.numel());
            return Err(Error::Shape { op: "tensor.view", what: "self", got: self.shape, want });
        }
        Ok(Tensor { shape, ..self.clone() })
    }

    /// `shape` elements from element `start` on: a layer of a stacked weight, a prefix of a workspace.
    pub fn slice(&self, start: usize, shape: &[usize]) -> Result<Tensor> {
        let shape = Shape::new(shape);
        if start.checked_add(shape.numel()).is_none_or(|end| end > self.numel()) {
            let want = format!("at least {} elements from element {start} on for {shape}", shape.numel());
            return Err(Error::Shape { op: "tensor.slice", what: "self", got: self.shape, want });
        }
        Ok(Tensor { shape, offset: self.offset + start * self.dtype.size(), ..self.clone() })
    }

    /// Entry `index` of the outermost dimension: `(L, C, C)` gives `(C, C)`.
    pub fn index(&self, index: usize) -> Result<Tensor> {
        let Some((&lead, rest)) = self.shape.dims().split_first().filter(|(lead, _)| index < **lead) else {
            let want = format!("an outermost dimension above {index}");
            return Err(Error::Shape { op: "tensor.index", what: "self", got: self.shape, want });
        };
        let _ = lead;
        let rest = Shape::new(rest);
        self.slice(index * rest.numel(), &rest)
    }

    /// A workspace (or any tensor) seen as `shape` elements of `dtype` from byte `start` on. `start` must be a multiple of the element size.
    pub fn reinterpret(&self, start: usize, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        let shape = Shape::new(shape);
        let end = shape.numel().checked_mul(dtype.size()).and_then(|n| n.checked_add(start));
        if end.is_none_or(|end| end > self.bytes()) || !(self.offset + start).is_multiple_of(dtype.size()) {
            let want = format!("room for {shape} of {dtype} from byte {start} on, aligned to {} bytes", dtype.size());
            return Err(Error::Shape { op: "tensor.reinterpret", what: "self", got: self.shape, want });
        }
        Ok(Tensor {
            storage: self.storage.clone(),
            device: self.device.clone(),
            offset: self.offset + start,
            dtype,
            shape,
        })
    }

    /// Whether two tensors share any byte.
    pub fn overlaps(&self, other: &Tensor) -> bool {
        let same = match (&self.storage, &other.storage) {
            (Storage::Cpu(a), Storage::Cpu(b)) => Rc::ptr_eq(a, b),
            (Storage::Mapped(a), Storage::Mapped(b)) => Rc::ptr_eq(a, b),
            #[cfg(feature = "cuda")]
            (Storage::Cuda(a), Storage::Cuda(b)) => Rc::ptr_eq(a, b),
            #[cfg(feature = "gpu")]
            (Storage::Gpu(a), Storage::Gpu(b)) => Rc::ptr_eq(a, b),
            (Storage::Null(a), Storage::Null(b)) => Rc::ptr_eq(a, b),
            _ => false,
        };
        same && self.bytes() > 0
            && other.bytes() > 0
            && self.offset < other.offset + other.bytes()
            && other.offset < self.offset + self.bytes()
    }

    /// Whether two tensors are exactly the same bytes.
    pub fn same_memory(&self, other: &Tensor) -> bool {
        self.overlaps(other) && self.offset == other.offset && self.bytes() == other.bytes()
    }

    /// Copies the elements out as f32, whatever float type they are stored in. On a null device the values are zeros.
    pub fn read_f32(&self) -> Result<Vec<f32>> {
        let mut out = vec![0.0; self.numel()];
        self.read_f32_into(&mut out)?;
        Ok(out)
    }

    /// [`Tensor::read_f32`] into a slice of the caller's.
    pub fn read_f32_into(&self, out: &mut [f32]) -> Result<()> {
        self.check_len("tensor.read_f32", out.len())?;
        match (&self.storage, self.dtype) {
            (Storage::Null(_), d) if d.is_float() => out.fill(0.0),
            (Storage::Cpu(_) | Storage::Mapped(_), DType::F32) => self.load::<f32>(out),
            (Storage::Cpu(_) | Storage::Mapped(_), DType::F16) => self.load::<f16>(out),
            (Storage::Cpu(_) | Storage::Mapped(_), DType::BF16) => self.load::<bf16>(out),
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), DType::F32) => self.fetch::<f32>(out)?,
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), DType::F16) => self.fetch::<f16>(out)?,
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), DType::BF16) => self.fetch::<bf16>(out)?,
            #[cfg(feature = "gpu")]
            (Storage::Gpu(_), DType::F32) => self.fetch::<f32>(out)?,
            #[cfg(feature = "gpu")]
            (Storage::Gpu(_), DType::F16) => self.fetch::<f16>(out)?,
            #[cfg(feature = "gpu")]
            (Storage::Gpu(_), DType::BF16) => self.fetch::<bf16>(out)?,
            (_, got) => {
                return Err(Error::DType { op: "tensor.read_f32", what: "self", got, want: "a float type".into() });
            }
        }
        Ok(())
    }

    /// Fills the tensor from f32 values, rounding to nearest even where it is stored in fewer bits.
    pub fn write_f32(&self, values: &[f32]) -> Result<()> {
        self.check_writable("tensor.write_f32")?;
        self.check_len("tensor.write_f32", values.len())?;
        match (&self.storage, self.dtype) {
            (Storage::Null(_), d) if d.is_float() => {}
            (Storage::Cpu(_), DType::F32) => self.store::<f32>(values),
            (Storage::Cpu(_), DType::F16) => self.store::<f16>(values),
            (Storage::Cpu(_), DType::BF16) => self.store::<bf16>(values),
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), DType::F32) => self.send::<f32>(values)?,
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), DType::F16) => self.send::<f16>(values)?,
            #[cfg(feature = "cuda")]
            (Storage::Cuda(_), DType::BF16) => self.send::<bf16>(values)?,
            #[cfg(feature = "gpu")]
            (Storage::Gpu(_), DType::F32) => self.send::<f32>(values)?,
            #[cfg(feature = "gpu")]
            (Storage::Gpu(_), DType::F16) => self.send::<f16>(values)?,
            #[cfg(feature = "gpu")]
            (Storage::Gpu(_), DType::BF16) => self.send::<bf16>(values)?,
            (_, got) => {
                return Err(Error::DType { op: "tensor.write_f32", what: "self", got, want: "a float type".into() });
            }
        }
        Ok(())
    }

    /// Copies i32 elements out.
    pub fn read_i32(&self) -> Result<Vec<i32>> {
        self.check_dtype("tensor.read_i32", DType::I32)?;
        Ok(match &self.storage {
            Storage::Null(_) => vec![0; self.numel()],
            #[cfg(feature = "cuda")]
            Storage::Cuda(_) => self.fetch_i32()?,
            #[cfg(feature = "gpu")]
            Storage::Gpu(_) => self.fetch_i32()?,
            // SAFETY: the dtype is I32, and no op is running (a tensor is not `Send`).
            Storage::Cpu(_) | Storage::Mapped(_) => unsafe { self.slice_of::<i32>() }.to_vec(),
        })
    }

    /// The elements of an i32 tensor for a check before a launch: `None` where there is nothing to read (a null device) or no time to (a graph is
    /// being recorded; who records one has run the same call before).
    pub(crate) fn ids(&self) -> Result<Option<std::borrow::Cow<'_, [i32]>>> {
        self.check_dtype("tensor.ids", DType::I32)?;
        match &self.storage {
            Storage::Null(_) => Ok(None),
            #[cfg(feature = "cuda")]
            Storage::Cuda(buffer) if buffer.device.recording() => Ok(None),
            #[cfg(feature = "gpu")]
            Storage::Gpu(buffer) if buffer.device.recording() => Ok(None),
            // SAFETY: the dtype is I32, and no op is running (a tensor is not `Send`).
            Storage::Cpu(_) | Storage::Mapped(_) => Ok(Some(unsafe { self.slice_of::<i32>() }.into())),
            #[cfg(feature = "cuda")]
            Storage::Cuda(_) => Ok(Some(self.read_i32()?.into())),
            #[cfg(feature = "gpu")]
            Storage::Gpu(_) => Ok(Some(self.read_i32()?.into())),
        }
    }

    /// Fills the tensor with i32 values.
    pub fn write_i32(&self, values: &[i32]) -> Result<()> {
        self.check_writable("tensor.write_i32")?;
        self.check_dtype("tensor.write_i32", DType::I32)?;
        self.check_len("tensor.write_i32", values.len())?;
        if let Storage::Cpu(_) = &self.storage {
            // SAFETY: as in `read_i32`; the slice lives only for this copy.
            unsafe { self.slice_of_mut::<i32>() }.copy_from_slice(values);
        }
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(buffer) = &self.storage {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            buffer.device.upload(self.cuda_address(), &bytes)?;
        }
        #[cfg(feature = "gpu")]
        if let Storage::Gpu(buffer) = &self.storage {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            buffer.upload(self.offset, &bytes)?;
        }
        Ok(())
    }

    /// Copies raw little-endian bytes from byte `start` on: for files.
    pub fn read_bytes(&self, start: usize, out: &mut [u8]) -> Result<()> {
        self.check_range("tensor.read_bytes", start, out.len())?;
        match &self.storage {
            Storage::Null(_) => out.fill(0),
            #[cfg(feature = "cuda")]
            Storage::Cuda(buffer) => buffer.device.download(self.cuda_address() + start as u64, out)?,
            #[cfg(feature = "gpu")]
            Storage::Gpu(buffer) => buffer.download(self.offset + start, out)?,
            // SAFETY: any element type may be read as bytes; the slice lives only for this copy.
            Storage::Cpu(_) | Storage::Mapped(_) => {
                out.copy_from_slice(&unsafe { self.bytes_slice() }[start..start + out.len()]);
            }
        }
        Ok(())
    }

    /// Writes raw little-endian bytes from byte `start` on: for files.
    pub fn write_bytes(&self, start: usize, bytes: &[u8]) -> Result<()> {
        self.check_writable("tensor.write_bytes")?;
        self.check_range("tensor.write_bytes", start, bytes.len())?;
        if let Storage::Cpu(_) = &self.storage {
            // SAFETY: every bit pattern is a valid element of every dtype; the slice lives only for this copy.
            let all = unsafe { self.bytes_slice_mut() };
            all[start..start + bytes.len()].copy_from_slice(bytes);
        }
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(buffer) = &self.storage {
            buffer.device.upload(self.cuda_address() + start as u64, bytes)?;
        }
        #[cfg(feature = "gpu")]
        if let Storage::Gpu(buffer) = &self.storage {
            buffer.upload(self.offset + start, bytes)?;
        }
        Ok(())
    }

    /// Sets every byte to zero.
    ///
    /// # Panics
    /// When the tensor is read-only.
    pub fn zero(&self) {
        assert!(!self.is_read_only(), "tensor.zero: the tensor lies in a mapped file and is read-only");
        if let Storage::Cpu(_) = &self.storage {
            // SAFETY: as in `write_bytes`.
            unsafe { self.bytes_slice_mut() }.fill(0);
        }
        #[cfg(feature = "cuda")]
        if let Storage::Cuda(buffer) = &self.storage {
            // A fault of the device shows at the next call that can report it.
            let _ = buffer.device.fill(self.cuda_address(), 0, self.bytes());
        }
        #[cfg(feature = "gpu")]
        if let Storage::Gpu(buffer) = &self.storage {
            // As above.
            let _ = buffer.fill_zero(self.offset, self.bytes());
        }
    }

    /// Copies the elements of a tensor of the same dtype and element count.
    pub fn copy_from(&self, src: &Tensor) -> Result<()> {
        self.check_writable("tensor.copy_from")?;
        self.check_dtype("tensor.copy_from", src.dtype)?;
        self.check_len("tensor.copy_from", src.numel())?;
        if self.overlaps(src) {
            return Err(Error::Overlap { op: "tensor.copy_from", output: "self", other: "src" });
        }
        if let (Storage::Cpu(_), Storage::Cpu(_) | Storage::Mapped(_)) = (&self.storage, &src.storage) {
            // SAFETY: the ranges are disjoint and live only for this copy.
            unsafe { self.bytes_slice_mut().copy_from_slice(src.bytes_slice()) };
        }
        #[cfg(feature = "cuda")]
        if let (Storage::Cuda(buffer), Storage::Cuda(_)) = (&self.storage, &src.storage) {
            buffer.device.copy(self.cuda_address(), src.cuda_address(), self.bytes())?;
        }
        #[cfg(feature = "gpu")]
        if let (Storage::Gpu(to), Storage::Gpu(from)) = (&self.storage, &src.storage) {
            to.copy_from(self.offset, from, src.offset, self.bytes())?;
        }
        Ok(())
    }

    fn load<T: Element>(&self, out: &mut [f32]) {
        // SAFETY: the caller matched the dtype; no op is running.
        let src = unsafe { self.slice_of::<T>() };
        for (o, s) in out.iter_mut().zip(src) {
            *o = s.to_f32();
        }
    }

    fn store<T: Element>(&self, values: &[f32]) {
        // SAFETY: as in `load`; the slice lives only for this copy.
        let dst = unsafe { self.slice_of_mut::<T>() };
        for (d, v) in dst.iter_mut().zip(values) {
            *d = T::from_f32(*v);
        }
    }

    /// The address on the GPU; 0 elsewhere.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_address(&self) -> u64 {
        match &self.storage {
            Storage::Cuda(buffer) => buffer.address + self.offset as u64,
            _ => 0,
        }
    }

    #[cfg(any(feature = "cuda", feature = "gpu"))]
    fn fetch_i32(&self) -> Result<Vec<i32>> {
        let mut bytes = vec![0; self.bytes()];
        self.read_bytes(0, &mut bytes)?;
        Ok(bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
    }

    /// Copies from a GPU and widens on the host.
    #[cfg(any(feature = "cuda", feature = "gpu"))]
    fn fetch<T: Element>(&self, out: &mut [f32]) -> Result<()> {
        let mut values = vec![T::default(); self.numel()];
        // SAFETY: every bit pattern is a float; the slice covers exactly the vector.
        let bytes = unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast::<u8>(), self.bytes()) };
        self.read_bytes(0, bytes)?;
        out.iter_mut().zip(values).for_each(|(o, v)| *o = v.to_f32());
        Ok(())
    }

    /// Rounds on the host and copies to a GPU.
    #[cfg(any(feature = "cuda", feature = "gpu"))]
    fn send<T: Element>(&self, values: &[f32]) -> Result<()> {
        let values: Vec<T> = values.iter().map(|&v| T::from_f32(v)).collect();
        // SAFETY: floats have no padding; the slice covers exactly the vector.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), self.bytes()) };
        self.write_bytes(0, bytes)
    }

    fn check_len(&self, op: &'static str, len: usize) -> Result<()> {
        if len != self.numel() {
            return Err(Error::Shape { op, what: "self", got: self.shape, want: format!("{len} elements") });
        }
        Ok(())
    }

    fn check_writable(&self, op: &'static str) -> Result<()> {
        if self.is_read_only() { Err(Error::ReadOnly { op, what: "self" }) } else { Ok(()) }
    }

    fn check_dtype(&self, op: &'static str, want: DType) -> Result<()> {
        if self.dtype != want {
            return Err(Error::DType { op, what: "self", got: self.dtype, want: want.to_string() });
        }
        Ok(())
    }

    fn check_range(&self, op: &'static str, start: usize, len: usize) -> Result<()> {
        if start.checked_add(len).is_none_or(|end| end > self.bytes()) {
            return Err(Error::Shape {
                op,
                what: "self",
                got: self.shape,
                want: format!("bytes {start}..+{len} inside it"),
            });
        }
        Ok(())
    }

    /// The elements, for a kernel.
    ///
    /// # Safety
    /// `T` must be the type of the dtype, the tensor must live on the CPU, and nothing may write to its memory while the slice lives.
    pub(crate) unsafe fn slice_of<T>(&self) -> &[T] {
        let bytes = unsafe { self.bytes_slice() };
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        debug_assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()));
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.numel()) }
    }

    /// The elements, for a kernel that writes them.
    ///
    /// # Safety
    /// As for [`Tensor::slice_of`], and nothing else may read or write the memory while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_of_mut<T>(&self) -> &mut [T] {
        let bytes = unsafe { self.bytes_slice_mut() };
        debug_assert_eq!(size_of::<T>(), self.dtype.size());
        debug_assert!((bytes.as_ptr() as usize).is_multiple_of(align_of::<T>()));
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), self.numel()) }
    }

    unsafe fn bytes_slice(&self) -> &[u8] {
        match &self.storage {
            Storage::Cpu(buffer) => unsafe { std::slice::from_raw_parts(buffer.ptr().add(self.offset), self.bytes()) },
            Storage::Mapped(file) => &file.bytes()[self.offset..self.offset + self.bytes()],
            _ => &[],
        }
    }

    #[allow(clippy::mut_from_ref)]
    unsafe fn bytes_slice_mut(&self) -> &mut [u8] {
        match &self.storage {
            Storage::Cpu(buffer) => unsafe {
                std::slice::from_raw_parts_mut(buffer.ptr().add(self.offset), self.bytes())
            },
            Storage::Mapped(_) => unreachable!("a mapped tensor is never written; the op's check let it through"),
            _ => &mut [],
        }
    }
}

#[cfg(any(feature = "cuda", feature = "gpu"))]
fn not_mapped(device: &Device) -> Error {
    Error::Unsupported {
        op: "tensor.mapped",
        device: device.name(),
        what: "a file mapped into its memory".into(),
        hint: "copy the bytes with `Tensor::write_bytes`".into(),
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} on {}", self.dtype, self.shape, self.device.name())
    }
}
