//! Metal without a Mac: a device that computes nothing and keeps the Metal source of every kernel that is launched on it.
//!
//! Tests launch each op on it and hold what comes out to the limits of an Apple GPU and to `metal.txt`, which lists every kernel.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::Compiler;
use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::device::{DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::environment::stream::StreamId;
use cubecl::ir::features::{AtomicUsage, MmaConfig, TypeUsage};
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, IntKind, MemoryDeviceProperties,
    UIntKind,
};
use cubecl::prelude::*;
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    BufferBinding, CopyDescriptor, Handle, IoError, KernelArguments, MemoryLayout, MemoryLayoutDescriptor, MemoryLayoutPolicy,
    ProfileError, ProfilingToken, Server, ServerCommunication, ServerError, ServerStorage, ServerUtilities,
};
use cubecl_wgpu::MslCompiler;

use super::adapters::{Adapter, Api, Kind};
use super::{Capabilities, Core, Gpu, SCRATCH_BYTES};
use crate::runtime::gpu::memory::GpuBuffer;

/// What is known of one compiled kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Compiled {
    pub(crate) source: String,
    pub(crate) shared_bytes: usize,
}

static COMPILED: Mutex<BTreeMap<String, Compiled>> = Mutex::new(BTreeMap::new());

/// Every kernel that was launched on a recording device so far, by a name that says what it is specialised for.
pub(crate) fn compiled() -> BTreeMap<String, Compiled> {
    COMPILED.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Opens a recording device with the features of an Apple GPU (M1 and newer).
pub(crate) fn open() -> Rc<Gpu> {
    static OPENED: Mutex<Option<Client>> = Mutex::new(None);
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let client = opened.get_or_insert_with(|| Client::load::<Recorder>(DeviceId::new(900, 0))).clone();
    let capabilities = Capabilities::read(&client);
    let adapter = Adapter {
        api: Api::Metal,
        number: 0,
        name: "Metal source only".into(),
        driver: String::new(),
        kind: Kind::Software,
        nth: 0,
    };
    let core = Rc::new(Core {
        client,
        adapter,
        capabilities,
        live: Cell::new(0),
        peak: Cell::new(0),
        launches: Cell::new(0),
        careful: false,
    });
    let scratch = Rc::new(GpuBuffer::zeroed(core.clone(), &[0], SCRATCH_BYTES, "scratch").unwrap());
    Rc::new(Gpu { core, scratch })
}

struct Recorder {
    utilities: Arc<ServerUtilities>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

/// Memory is handed out by name and never exists.
struct Names;

impl MemoryLayoutPolicy for Names {
    fn apply(
        &self,
        service: cubecl::device::ServiceId,
        stream: StreamId,
        descriptors: &[MemoryLayoutDescriptor],
    ) -> (Handle, Vec<MemoryLayout>) {
        let bytes = |d: &MemoryLayoutDescriptor| (d.shape.iter().product::<usize>() * d.elem_size) as u64;
        let base = Handle::new(service, stream, descriptors.iter().map(bytes).sum());
        let layouts = descriptors.iter().map(|_| MemoryLayout::new(base.clone(), [1])).collect();
        (base, layouts)
    }
}

fn properties() -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 30,
        max_shared_memory_size: 32 << 10,
        max_cube_count: (65_535, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 1024),
        num_streaming_multiprocessors: None,
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: None,
        min_tensor_cores_dim: None,
        max_vector_size: 4,
        cube_mma_reserved_shared_memory: 0,
    };
    let identity = DeviceIdentity { name: "Metal source".into(), fingerprint: "metal".into(), physical: None };
    let memory = MemoryDeviceProperties::new(4 << 30, 32);
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity);
    properties.register_address_type(AddressType::U32);
    let floats = [FloatKind::F16, FloatKind::BF16, FloatKind::F32].map(ElemType::Float);
    let words = [UIntKind::U8, UIntKind::U16, UIntKind::U32].map(ElemType::UInt);
    let others = [ElemType::Index, ElemType::Bool, ElemType::Int(IntKind::I32)];
    for ty in floats.into_iter().chain(words).chain(others) {
        properties.register_type_usage(ty, TypeUsage::all());
    }
    let _ = AtomicUsage::all();
    for factor in [FloatKind::F16, FloatKind::F32].map(ElemType::Float) {
        let sum = ElemType::Float(FloatKind::F32);
        properties.features.matmul.cmma.insert(MmaConfig { a_type: factor, b_type: factor, cd_type: sum, m: 8, n: 8, k: 8 });
    }
    properties
}

impl DeviceService for Recorder {
    fn init(id: DeviceId) -> Self {
        let service = cubecl::device::ServiceId::of::<Self>(id);
        let target = cubecl::ir::TargetProperties { mma: Default::default() };
        let logger = Arc::new(cubecl_runtime::logging::ServerLogger::default());
        let (utilities, _) = ServerUtilities::init(service, "wgpu<msl>", properties(), target, logger, Names);
        Recorder { utilities: Arc::new(utilities) }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for Recorder {}

impl Server for Recorder {
    fn initialize_memory(
        &mut self,
        _: cubecl_runtime::memory_management::ManagedMemoryHandle,
        _: u64,
        _: StreamId,
    ) -> Result<(), ServerError> {
        Ok(())
    }

    fn logger(&self) -> Arc<cubecl_runtime::logging::ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities> {
        self.utilities.clone()
    }

    fn read(&mut self, wanted: Vec<CopyDescriptor>, _: StreamId) -> cubecl::future::DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros = |d: &CopyDescriptor| Bytes::from_bytes_vec(vec![0; d.shape.iter().product::<usize>() * d.elem_size]);
        let all = wanted.iter().map(zeros).collect();
        Box::pin(std::future::ready(Ok(all)))
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: Vec<BufferBinding>, _: StreamId) -> cubecl::future::DynFut<Result<(), ServerError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn check(&mut self, _: Vec<BufferBinding>, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    unsafe fn launch(
        &mut self,
        kernel: Box<dyn CubeKernel>,
        _: CubeCount,
        _: KernelArguments,
        _: StreamId,
        _: cubecl_runtime::server::LaunchMode,
    ) {
        let name = format!("{} {:?}", kernel.name(), kernel.id());
        let definition = kernel.define();
        let options = <MslCompiler as Compiler>::CompilationOptions::default();
        let compiled = match MslCompiler::default().compile(definition, &options) {
            Ok(text) => Compiled { source: text.source.clone(), shared_bytes: text.shared_memory_size },
            Err(error) => Compiled { source: format!("cannot be compiled: {error}"), shared_bytes: 0 },
        };
        COMPILED.lock().unwrap_or_else(PoisonError::into_inner).insert(name, compiled);
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
        Err(ProfileError::NotRegistered { backtrace: cubecl::environment::backtrace::BackTrace::capture() })
    }

    fn allocation_mode(&mut self, _: cubecl_runtime::memory_management::MemoryAllocationMode, _: StreamId) {}
}
