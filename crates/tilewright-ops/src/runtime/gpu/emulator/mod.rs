//! Metal without a Mac, computed: a device whose memory is the host's, and whose kernels are Metal's text compiled as C++.
//!
//! [`text`] makes the text into C++, [`compile`] calls the system's compiler, [`machine`] runs the threads of a group on stacks of their own
//! ([`fibre`]) and watches them. What it finds fails the reads that follow, as a driver's fault would: a load or store outside of its buffer or
//! array, one that is not ordered with another thread's by a barrier, threadgroup memory read before it is written, a barrier or simdgroup
//! operation that not all threads reach. It computes with the processor's floats; how Apple's compiler rounds is not known from it.

mod compile;
mod fibre;
mod machine;
#[cfg(test)]
mod tests;
mod text;

use std::collections::HashMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::Compiler as _;
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::device::{DeviceId, DeviceService, ServerUtilitiesHandle, ServiceId};
use cubecl::environment::backtrace::BackTrace;
use cubecl::environment::stream::StreamId;
use cubecl::future::DynFut;
use cubecl::prelude::*;
use cubecl::profile::ProfileDuration;
use cubecl::server::{
    BufferBinding, CopyDescriptor, KernelArguments, ProfileError, ProfilingToken, Server, ServerCommunication,
    ServerError, ServerStorage, ServerUtilities,
};
use cubecl_runtime::id::KernelId;
use cubecl_runtime::memory_management::ManagedMemoryHandle;
use cubecl_runtime::server::KernelResource;
use cubecl_runtime::storage::ManagedResource;
use cubecl_wgpu::MslCompiler;

use super::adapters::{Adapter, Api, Kind};
use super::metal::properties;
use super::recorder::{Names, Nothing};
use super::{Capabilities, Core, Gpu};
use compile::{Compiler, Object};
use machine::{Bound, Job, Machine, Touched};

/// Bindings of a kernel on an Apple GPU, scalars included.
const MOST_BUFFERS: usize = 31;

/// Accesses are followed in ranges of no more bytes: their record takes eight times as many.
const FOLLOWED: usize = 4 << 20;

/// How many machines run at once.
fn machines() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get().min(8))
}

/// Opens the device; each call may be served by another machine, so that tests on several threads do not wait for each other.
///
/// # Panics
/// Without a C++ compiler that can do it, or on a processor for which stacks are not switched.
pub(crate) fn open() -> Rc<Gpu> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    static OPENED: Mutex<Vec<Client>> = Mutex::new(Vec::new());
    Compiler::here().unwrap();
    let number = NEXT.fetch_add(1, Ordering::Relaxed) % machines();
    let client = {
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        while opened.len() <= number {
            let id = DeviceId::new(901, opened.len() as _);
            opened.push(Client::load::<Emulator>(id));
        }
        opened[number].clone()
    };
    let capabilities = Capabilities::read(&client);
    let adapter = Adapter {
        api: Api::Metal,
        number,
        name: "Metal's text on the processor".into(),
        driver: String::new(),
        kind: Kind::Software,
        nth: 0,
    };
    let careful = std::env::var_os("TILEWRIGHT_GPU_CAREFUL").is_some();
    let core = Rc::new(Core::new(client, adapter, capabilities, careful));
    Rc::new(Gpu::with_scratch(core).unwrap())
}

/// A compiled kernel.
struct Kernel {
    object: Object,
    path: PathBuf,
    group: [u32; 3],
    shared_bytes: usize,
    meets: bool,
}

/// Memory of a handle.
struct Memory {
    handle: ManagedMemoryHandle,
    words: Box<[u64]>,
    /// Made when a launch first takes a range that is followed.
    touched: Vec<Touched>,
}

impl Memory {
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: bytes have no alignment and any value; the borrow is that of the words.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast(), self.words.len() * 8) }
    }
}

struct Emulator {
    utilities: Arc<ServerUtilities>,
    machine: Machine,
    memory: HashMap<usize, Memory>,
    /// What went wrong first on a stream: every read and wait of it says so from then on.
    failed: HashMap<StreamId, String>,
}

impl std::fmt::Debug for Emulator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Emulator")
    }
}

impl Emulator {
    fn state(&self, stream: StreamId) -> Result<(), ServerError> {
        match self.failed.get(&stream) {
            Some(reason) => Err(ServerError::Generic { reason: reason.clone(), backtrace: BackTrace::default() }),
            None => Ok(()),
        }
    }

    fn fail(&mut self, stream: StreamId, reason: String) {
        self.failed.entry(stream).or_insert(reason);
    }

    /// The bytes that a binding names.
    fn range(&mut self, binding: &BufferBinding) -> Result<&mut [u8], String> {
        let range = binding.range();
        let memory = self.memory.get_mut(&binding.memory.id().value).ok_or("memory that was never allocated")?;
        let (start, end) = (range.start as usize, range.end as usize);
        memory.bytes().get_mut(start..end).ok_or_else(|| format!("bytes {start}..{end} of a smaller allocation"))
    }

    fn run(&mut self, kernel: &dyn CubeKernel, count: &CubeCount, arguments: &KernelArguments) -> Result<(), String> {
        let CubeCount::Static(x, y, z) = *count else {
            return Err("a number of groups that a kernel has computed".into());
        };
        let limit = self.utilities.properties.hardware.max_cube_count;
        if x > limit.0 || y > limit.1 || z > limit.2 {
            return Err(format!("{x} x {y} x {z} groups; the device has {limit:?}"));
        }
        let kernel = kernel_of(kernel)?;
        if arguments.resources.len() + 1 > MOST_BUFFERS {
            return Err(format!("{} buffers; there may be {}", arguments.resources.len(), MOST_BUFFERS - 1));
        }
        let mut buffers = Vec::new();
        for resource in &arguments.resources {
            let KernelResource::Buffer(binding) = resource else { return Err("a tensor map".into()) };
            let alignment = self.utilities.properties.memory.alignment;
            if !binding.range().start.is_multiple_of(alignment) {
                let start = binding.range().start;
                return Err(format!("buffer {} starts at byte {start}, no multiple of {alignment}", buffers.len()));
            }
            let bytes = self.range(binding)?;
            let (low, bytes) = (bytes.as_mut_ptr(), bytes.len());
            let start = binding.range().start as usize;
            let memory = self.memory.get_mut(&binding.memory.id().value).ok_or("memory that was never allocated")?;
            let followed = bytes <= FOLLOWED && start.is_multiple_of(2);
            if followed && memory.touched.is_empty() {
                memory.touched = vec![[0; 4]; memory.words.len() * 4];
            }
            // SAFETY: as many records as pairs of bytes, and the range lies in the memory.
            let touched =
                if followed { unsafe { memory.touched.as_mut_ptr().add(start / 2) } } else { std::ptr::null_mut() };
            buffers.push(Bound { low, bytes, touched });
        }
        let job = Job {
            entry: kernel.object.entry,
            meets: kernel.meets,
            shared_bytes: kernel.shared_bytes,
            group: kernel.group,
            groups: [x, y, z],
            buffers: &buffers,
            info: &arguments.info.data,
        };
        // SAFETY: the library's macros have matched the arguments with the kernel's parameters; memory is this server's, which does one thing at a time.
        unsafe { self.machine.run(&job) }.map_err(|error| format!("{error} ({})", kernel.path.display()))
    }
}

/// The compiled kernel, by the library's own name for it; those of all machines are kept together.
fn kernel_of(kernel: &dyn CubeKernel) -> Result<Arc<Kernel>, String> {
    type Kernels = HashMap<KernelId, Result<Arc<Kernel>, String>>;
    static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);
    let kernels = || KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let id = kernel.id();
    if let Some(there) = kernels().get_or_insert_default().get(&id) {
        return there.clone();
    }
    // Not under the lock: it takes a moment.
    let compile = || {
        let definition = cubecl_runtime::kernel::define_kernel(kernel).map_err(|e| e.to_string())?;
        let dim = definition.settings.cube_dim;
        let options = <MslCompiler as cubecl::Compiler>::CompilationOptions::default();
        let metal = MslCompiler::default().compile(definition, &options).map_err(|e| e.to_string())?;
        let text = text::translate(&metal.source)?;
        let (object, path) = Compiler::here()?.build(&text.source)?;
        let group = [dim.x, dim.y, dim.z];
        Ok(Arc::new(Kernel { object, path, group, shared_bytes: text.shared_bytes, meets: text.meets }))
    };
    let made = compile();
    kernels().get_or_insert_default().entry(id).or_insert(made).clone()
}

impl DeviceService for Emulator {
    fn init(id: DeviceId) -> Self {
        let service = ServiceId::of::<Self>(id);
        let target = cubecl::ir::TargetProperties { mma: Default::default() };
        let logger = Arc::new(cubecl_runtime::logging::ServerLogger::default());
        let (utilities, _) = ServerUtilities::init(service, "wgpu<msl>", properties(), target, logger, Names);
        let (memory, failed) = (HashMap::new(), HashMap::new());
        Emulator { utilities: Arc::new(utilities), machine: Machine::new(), memory, failed }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for Emulator {}

impl ServerStorage for Emulator {
    type Storage = Nothing;

    fn get_resource(&mut self, binding: BufferBinding, _: StreamId) -> Result<ManagedResource<()>, ServerError> {
        Ok(ManagedResource::new(binding.memory, ()))
    }
}

impl Server for Emulator {
    fn initialize_memory(&mut self, handle: ManagedMemoryHandle, size: u64, _: StreamId) -> Result<(), ServerError> {
        self.memory.retain(|_, memory| !memory.handle.is_free());
        let id = handle.descriptor().id.value;
        // What nobody has written is no number.
        let words = vec![u64::MAX; size.div_ceil(8) as usize].into_boxed_slice();
        self.memory.insert(id, Memory { handle, words, touched: Vec::new() });
        Ok(())
    }

    fn logger(&self) -> Arc<cubecl_runtime::logging::ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(&mut self, wanted: Vec<CopyDescriptor>, stream: StreamId) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let mut all = Vec::new();
        for d in wanted {
            let bytes = d.shape.iter().product::<usize>() * d.elem_size;
            match self.range(&d.handle).map(|range| range.get(..bytes).map(<[u8]>::to_vec)) {
                Ok(Some(bytes)) => all.push(Bytes::from_bytes_vec(bytes)),
                Ok(None) => self.fail(stream, format!("a read of {bytes} bytes from a smaller range")),
                Err(error) => self.fail(stream, error),
            }
        }
        let result = self.state(stream).map(|()| all);
        Box::pin(std::future::ready(result))
    }

    fn write(&mut self, writes: Vec<(CopyDescriptor, Bytes)>, stream: StreamId) {
        for (d, bytes) in writes {
            match self.range(&d.handle).map(|range| range.get_mut(..bytes.len()).map(|to| to.copy_from_slice(&bytes))) {
                Ok(Some(())) => {}
                Ok(None) => self.fail(stream, format!("a write of {} bytes to a smaller range", bytes.len())),
                Err(error) => self.fail(stream, error),
            }
        }
    }

    fn sync(&mut self, _: Vec<BufferBinding>, stream: StreamId) -> DynFut<Result<(), ServerError>> {
        let state = self.state(stream);
        Box::pin(std::future::ready(state))
    }

    fn check(&mut self, _: Vec<BufferBinding>, stream: StreamId) -> Result<(), ServerError> {
        self.state(stream)
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        count: CubeCount,
        arguments: KernelArguments,
        stream: StreamId,
        _: cubecl_runtime::dry_run::LaunchMode,
    ) {
        if let Err(error) = self.run(&*kernel, &count, &arguments) {
            let name = kernel.name();
            self.fail(stream, format!("{}: {error}", name.split('<').next().unwrap_or(name)));
        }
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_report(&mut self, _: StreamId) -> Option<cubecl::StreamMemoryReport> {
        None
    }

    fn memory_cleanup(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Ok(ProfilingToken { id: 0 })
    }

    fn end_profile(&mut self, _: StreamId, _: ProfilingToken) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: BackTrace::capture() })
    }

    fn allocation_mode(&mut self, _: cubecl_runtime::memory_management::MemoryAllocationMode, _: StreamId) {}
}
