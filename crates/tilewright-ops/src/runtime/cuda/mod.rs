//! CUDA: one context, one stream, arenas, kernels compiled at first use, cuBLASLt, graphs.
//!
//! Everything is loaded at run time, so a binary with this feature starts where there is no GPU and says what is missing. All work of a device
//! goes through one stream, in the order of the calls; reading a tensor waits for it. No managed memory is used.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::rc::Rc;

use tilewright_core::{Error, Result};

use crate::Tensor;
use driver::{Address, Driver, Handle, Status};
use nvrtc::Nvrtc;
use source::Values;

pub(crate) mod cublaslt;
pub mod doctor;
mod driver;
mod graph;
pub(crate) mod launch;
mod library;
pub(crate) mod memory;
pub mod nvrtc;
pub(crate) mod pinned;
pub mod source;
#[cfg(test)]
mod tests;
pub(crate) mod tiles;
mod timer;

pub use graph::Graph;
pub(crate) use launch::Arg;
pub(crate) use launch::Kernel;
pub use library::{FOLDERS_VARIABLE, Missing};
pub use source::Source;

/// Every file of kernels: what the offline check compiles and the table of resources lists.
pub const SOURCES: &[&Source] = crate::cuda_sources::ALL;

/// Bytes of scratch that a device holds from its start to its end: the workspace of cuBLASLt, and partial sums of ops without a workspace. All
/// work is in one stream, so one range serves all.
pub const SCRATCH_BYTES: usize = 32 << 20;

/// Bytes behind the scratch for f32 products that are added to a 16-bit tensor: cuBLASLt works in the scratch at the same time.
pub(crate) const SUMS_BYTES: usize = 16 << 20;

/// What a device holds besides arenas.
pub(crate) const HELD_BYTES: usize = SCRATCH_BYTES + SUMS_BYTES;

/// Left free when an arena is allocated, for the driver's own needs (modules, graphs, local memory).
pub(crate) const RESERVE_BYTES: usize = 256 << 20;

/// An opened device; see the module's words.
pub struct Cuda {
    driver: Driver,
    nvrtc: Nvrtc,
    ordinal: i32,
    context: Handle,
    stream: Handle,
    info: Info,
    cache: Option<PathBuf>,
    modules: RefCell<HashMap<(&'static str, Values), Handle>>,
    functions: RefCell<HashMap<(&'static str, &'static str, Values), Handle>>,
    blas: OnceCell<cublaslt::CublasLt>,
    scratch: Cell<Address>,
    live: Cell<usize>,
    peak: Cell<usize>,
    recording: Cell<bool>,
    launches: Cell<u64>,
    /// What the layer launched last has said of its result's rows.
    moments: Cell<Option<Moments>>,
    /// What the next layer may bring into the second-level cache: address and bytes. Forgotten when any memory is freed.
    expected: Cell<(Address, usize)>,
    /// Waits after every launch, so that a fault is reported by the op that made it.
    careful: bool,
}

/// Mean and squares around it of parts of each row of a matrix, at [`Cuda::sums`], part after part; see `few.cu`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    /// Where the matrix lies.
    pub(crate) x: Address,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) parts: usize,
    /// Columns of a part; of the last one what is left.
    pub(crate) width: usize,
    /// Launches up to the one that said it.
    pub(crate) launches: u64,
}

/// What the driver says of a device.
#[derive(Clone, Debug)]
pub struct Info {
    /// `NVIDIA H200`.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of the second-level cache.
    pub l2_bytes: usize,
    /// Shared memory that one block may ask for.
    pub shared_bytes: usize,
    /// Bytes of device memory.
    pub memory_bytes: usize,
}

impl Cuda {
    /// Opens device `ordinal`.
    ///
    /// # Errors
    /// What is missing (driver, device, NVRTC, cuBLASLt) and how to get it.
    pub fn open(ordinal: usize) -> Result<Self> {
        let driver = Driver::load(&library::DRIVER).map_err(missing)?;
        let nvrtc = Nvrtc::open().map_err(missing)?;
        let device = || format!("cuda:{ordinal}");
        let check = |call: &str, status: Status| refused(&driver, "cuda.open", &device(), call, status);
        let ordinal_c = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (mut count, mut id) = (0, 0);
        // SAFETY: out-pointers to locals, here and below.
        unsafe {
            check("cuInit", (driver.init)(0))?;
            check("cuDeviceGetCount", (driver.device_count)(&mut count))?;
        }
        if ordinal_c >= count {
            return Err(Error::config(
                format!("there is no CUDA device {ordinal}; the driver lists {count}"),
                "choose a lower number, or check CUDA_VISIBLE_DEVICES and `nvidia-smi`",
            ));
        }
        let (mut context, mut stream) = (std::ptr::null_mut(), std::ptr::null_mut());
        unsafe {
            check("cuDeviceGet", (driver.device_get)(&mut id, ordinal_c))?;
            check("cuDevicePrimaryCtxRetain", (driver.context_retain)(&mut context, id))?;
            check("cuCtxSetCurrent", (driver.context_set)(context))?;
            check("cuStreamCreate", (driver.stream_create)(&mut stream, driver::STREAM_NON_BLOCKING))?;
        }
        let info = Info::read(&driver, id);
        let newest = nvrtc.architectures().into_iter().max().unwrap_or(0);
        if info.capability.0 < 8 {
            let (major, minor) = info.capability;
            return Err(Error::Unsupported {
                op: "cuda.open",
                device: info.name,
                what: format!("compute capability {major}.{minor}"),
                hint: "use a GPU of capability 8.0 (Ampere) or newer, or --device cpu".into(),
            });
        }
        if info.capability.0 * 10 + info.capability.1 > newest && newest > 0 {
            let (a, b) = nvrtc.version();
            return Err(Error::config(
                format!(
                    "NVRTC {a}.{b} at {} knows nothing newer than sm_{newest}; {} needs more",
                    nvrtc.path(),
                    info.name
                ),
                "install a newer NVRTC",
            ));
        }
        let cuda = Cuda {
            nvrtc,
            ordinal: id,
            context,
            stream,
            info,
            cache: source::cache_folder(),
            modules: RefCell::default(),
            functions: RefCell::default(),
            blas: OnceCell::new(),
            scratch: Cell::new(0),
            live: Cell::new(0),
            peak: Cell::new(0),
            recording: Cell::new(false),
            launches: Cell::new(0),
            moments: Cell::new(None),
            expected: Cell::new((0, 0)),
            careful: std::env::var_os("TILEWRIGHT_CUDA_CAREFUL").is_some(),
            driver,
        };
        cuda.scratch.set(cuda.allocate(HELD_BYTES, "the device's scratch")?);
        cuda.blas.set(cublaslt::CublasLt::open(&cuda)?).ok().expect("set once");
        Ok(cuda)
    }

    /// What the driver says of the device.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// `cuda:0 (NVIDIA H200)`.
    pub fn name(&self) -> String {
        format!("cuda:{} ({})", self.ordinal, self.info.name)
    }

    /// Bytes of arenas alive now.
    pub fn live_bytes(&self) -> usize {
        self.live.get()
    }

    /// The most that [`Cuda::live_bytes`] has been.
    pub fn peak_bytes(&self) -> usize {
        self.peak.get()
    }

    /// Kernels and matrix products launched so far, outside graphs.
    pub fn launches(&self) -> u64 {
        self.launches.get()
    }

    /// Whether f32 products round their inputs to TF32 (`TILEWRIGHT_TF32=1`), for messages.
    pub fn tf32(&self) -> bool {
        self.blas().tf32()
    }

    /// Waits for everything that was launched.
    pub fn synchronize(&self) -> Result<()> {
        self.enter();
        // SAFETY: the stream lives as long as `self`.
        self.check("cuda.synchronize", "cuStreamSynchronize", unsafe { (self.driver.stream_synchronize)(self.stream) })
    }

    /// Whether launches are being recorded into a graph instead of run.
    pub(crate) fn recording(&self) -> bool {
        self.recording.get()
    }

    /// The device's own scratch: [`SCRATCH_BYTES`] bytes.
    pub(crate) fn scratch(&self) -> Address {
        self.scratch.get()
    }

    /// [`SUMS_BYTES`] bytes that cuBLASLt does not work in.
    pub(crate) fn sums(&self) -> Address {
        self.scratch.get() + SCRATCH_BYTES as u64
    }

    /// Keeps what the launch just made has said of its result, until anything else happens on the device.
    pub(crate) fn keep_moments(&self, moments: Moments) {
        self.moments.set(Some(Moments { launches: self.launches.get(), ..moments }));
    }

    /// What was said of these rows, if nothing has happened since.
    pub(crate) fn moments(&self, x: Address, rows: usize, columns: usize) -> Option<Moments> {
        let same = |m: &Moments| m.launches == self.launches.get() && (m.x, m.rows, m.columns) == (x, rows, columns);
        self.moments.get().filter(same)
    }

    /// Memory may have changed, or will when a record is replayed.
    pub(crate) fn forget_moments(&self) {
        self.moments.set(None);
    }

    /// Memory that is read soon.
    pub(crate) fn expect(&self, memory: &Tensor) {
        self.expected.set((memory.cuda_address(), memory.bytes()));
    }

    /// What was expected last, once.
    pub(crate) fn take_expected(&self) -> (Address, usize) {
        self.expected.replace((0, 0))
    }

    pub(crate) fn blas(&self) -> &cublaslt::CublasLt {
        self.blas.get().expect("opened with the device")
    }

    /// Makes this device's context the thread's own: two devices may live on one thread.
    fn enter(&self) {
        // SAFETY: the context is retained by `self`.
        unsafe { (self.driver.context_set)(self.context) };
    }

    fn check(&self, op: &'static str, call: &str, status: Status) -> Result<()> {
        refused(&self.driver, op, &self.name(), call, status)
    }

    /// The function of a kernel, compiled or read from the cache at its first use.
    fn function(&self, op: &'static str, kernel: &Kernel) -> Result<Handle> {
        let key = (kernel.source.name, kernel.entry, kernel.values);
        if let Some(&function) = self.functions.borrow().get(&key) {
            return Ok(function);
        }
        let module = self.module(op, kernel)?;
        let mut function = std::ptr::null_mut();
        let entry = CString::new(kernel.entry).expect("no NUL in a kernel's name");
        // SAFETY: the module is loaded, the name is a C string.
        let status = unsafe { (self.driver.module_function)(&mut function, module, entry.as_ptr()) };
        self.check(op, &format!("cuModuleGetFunction({}, {})", kernel.source.name, kernel.entry), status)?;
        self.functions.borrow_mut().insert(key, function);
        Ok(function)
    }

    fn module(&self, op: &'static str, kernel: &Kernel) -> Result<Handle> {
        let key = (kernel.source.name, kernel.values);
        if let Some(&module) = self.modules.borrow().get(&key) {
            return Ok(module);
        }
        let architecture = source::architecture(self.info.capability);
        let values = &kernel.values[..kernel.source.parameters.len()];
        let image = source::image(&self.nvrtc, kernel.source, &architecture, values, self.cache.as_deref());
        let image = image.map_err(|what| Error::Driver {
            op,
            device: self.name(),
            what,
            hint: "this is a fault of the kernel or of the NVRTC in use; report it with this text".into(),
        })?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the image is a whole ELF file made for this architecture.
        let status = unsafe { (self.driver.module_load)(&mut module, image.as_ptr().cast()) };
        self.check(op, &format!("cuModuleLoadData({})", kernel.source.name), status)?;
        self.modules.borrow_mut().insert(key, module);
        Ok(module)
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        self.enter();
        self.blas.take();
        // SAFETY: everything was made by this device and nothing uses it any more: buffers and graphs hold an `Rc` of it.
        unsafe {
            (self.driver.stream_synchronize)(self.stream);
            if self.scratch.get() != 0 {
                (self.driver.free)(self.scratch.get());
            }
            for module in self.modules.borrow().values() {
                (self.driver.module_unload)(*module);
            }
            // The process keeps its primary context: making one again takes a quarter of a second.
            (self.driver.stream_destroy)(self.stream);
        }
    }
}

impl Info {
    fn read(driver: &Driver, device: i32) -> Self {
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: an out-pointer.
            unsafe { (driver.device_attribute)(&mut value, which, device) };
            value
        };
        let mut name = [0u8; 128];
        let mut total = 0;
        // SAFETY: a buffer and its length; an out-pointer.
        unsafe {
            (driver.device_name)(name.as_mut_ptr().cast(), name.len() as i32, device);
            (driver.device_total)(&mut total, device);
        }
        let name = name.split(|&b| b == 0).next().unwrap_or_default();
        Info {
            name: String::from_utf8_lossy(name).into_owned(),
            capability: (attribute(driver::attribute::MAJOR), attribute(driver::attribute::MINOR)),
            multiprocessors: attribute(driver::attribute::MULTIPROCESSORS) as u32,
            l2_bytes: attribute(driver::attribute::L2_BYTES) as usize,
            shared_bytes: attribute(driver::attribute::SHARED_PER_BLOCK) as usize,
            memory_bytes: total,
        }
    }
}

fn refused(driver: &Driver, op: &'static str, device: &str, call: &str, status: Status) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(Error::Driver {
        op,
        device: device.to_owned(),
        what: format!("{call} failed: {}", driver.words(status)),
        hint: "a fault in an earlier launch shows late: run again with TILEWRIGHT_CUDA_CAREFUL=1 to find its op".into(),
    })
}

fn missing(missing: Missing) -> Error {
    Error::config(
        format!("CUDA cannot be used: {} was not found ({})", missing.what, missing.reason),
        missing.hint.to_owned(),
    )
}

/// A device handle for [`crate::Device::cuda`].
pub(crate) fn open(ordinal: usize) -> Result<Rc<Cuda>> {
    Ok(Rc::new(Cuda::open(ordinal)?))
}
