//! A device that computes nothing and hands every kernel that is launched on it to a compiler: what a GPU would get can be read without one.

use std::marker::PhantomData;
use std::rc::Rc;
use std::sync::Arc;

use cubecl::bytes::Bytes;
use cubecl::client::Client;
use cubecl::device::{DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::environment::stream::StreamId;
use cubecl::ir::features::{MmaConfig, TypeUsage};
use cubecl::ir::{
    AddressType, DeviceIdentity, DeviceProperties, ElemType, FloatKind, HardwareProperties, IntKind,
    MemoryDeviceProperties, UIntKind,
};
use cubecl::prelude::*;
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    BufferBinding, CopyDescriptor, Handle, IoError, KernelArguments, MemoryLayout, MemoryLayoutDescriptor,
    MemoryLayoutPolicy, ProfileError, ProfilingToken, Server, ServerCommunication, ServerError, ServerStorage,
    ServerUtilities,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle, StorageId, StorageUtilization};

use super::adapters::{Adapter, Api, Kind};
use super::{Capabilities, Core, Gpu};

/// What the kernels are compiled for.
pub(super) trait Target: Send + Sync + 'static {
    /// The library's name of the runtime.
    const RUNTIME: &'static str;
    /// As which adapter it is shown.
    const API: Api;

    /// What the device can do.
    fn properties() -> DeviceProperties;

    /// Compiles a kernel and keeps it, for the device of this number.
    fn keep(number: u16, kernel: Box<dyn CubeKernel>);
}

/// The client of a device; of a number, always the same.
pub(super) fn client<T: Target>(number: u16) -> Client {
    Client::load::<Recorder<T>>(DeviceId::new(900 + T::API as u16, number))
}

/// Opens a device by its client.
pub(super) fn open<T: Target>(client: Client) -> Rc<Gpu> {
    let capabilities = Capabilities::read(&client);
    let name = format!("{} only", T::RUNTIME);
    let adapter = Adapter { api: T::API, number: 0, name, driver: String::new(), kind: Kind::Software, nth: 0 };
    let core = Rc::new(Core::new(client, adapter, capabilities, false));
    Rc::new(Gpu::with_scratch(core).unwrap())
}

struct Recorder<T> {
    number: u16,
    utilities: Arc<ServerUtilities>,
    target: PhantomData<T>,
}

impl<T> std::fmt::Debug for Recorder<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Recorder")
    }
}

/// Memory is handed out by name; here it never exists.
pub(super) struct Names;

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

/// A GPU with subgroups of 32, as the library sees it: `shared_bytes` of shared memory, matrix units that take `factors` in square tiles of `edge`.
pub(super) fn properties(name: &str, shared_bytes: usize, factors: [FloatKind; 2], edge: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 30,
        max_shared_memory_size: shared_bytes,
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
    let identity = DeviceIdentity { name: name.into(), fingerprint: name.into(), physical: None };
    let memory = MemoryDeviceProperties::new(4 << 30, 32);
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity);
    properties.register_address_type(AddressType::U32);
    let floats = [FloatKind::F16, FloatKind::BF16, FloatKind::F32].map(ElemType::Float);
    let words = [UIntKind::U8, UIntKind::U16, UIntKind::U32].map(ElemType::UInt);
    let others = [ElemType::Index, ElemType::Bool, ElemType::Int(IntKind::I32)];
    for ty in floats.into_iter().chain(words).chain(others) {
        properties.register_type_usage(ty, TypeUsage::all());
    }
    for factor in factors.map(ElemType::Float) {
        let sum = ElemType::Float(FloatKind::F32);
        properties.features.matmul.cmma.insert(MmaConfig {
            a_type: factor,
            b_type: factor,
            cd_type: sum,
            m: edge,
            n: edge,
            k: edge,
        });
    }
    properties
}

impl<T: Target> DeviceService for Recorder<T> {
    fn init(id: DeviceId) -> Self {
        let service = cubecl::device::ServiceId::of::<Self>(id);
        let target = cubecl::ir::TargetProperties { mma: Default::default() };
        let logger = Arc::new(cubecl_runtime::logging::ServerLogger::default());
        let (utilities, _) = ServerUtilities::init(service, T::RUNTIME, T::properties(), target, logger, Names);
        Recorder { number: id.index_id, utilities: Arc::new(utilities), target: PhantomData }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl<T: Target> ServerCommunication for Recorder<T> {}

/// There is nothing to store that the library would know of.
pub(super) struct Nothing;

impl ComputeStorage for Nothing {
    type Resource = ();

    fn alignment(&self) -> usize {
        1
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        Ok(())
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        Ok(StorageHandle::new(StorageId::new(), StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, _: StorageId) {}

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        0
    }
}

impl<T: Target> ServerStorage for Recorder<T> {
    type Storage = Nothing;

    fn get_resource(&mut self, binding: BufferBinding, _: StreamId) -> Result<ManagedResource<()>, ServerError> {
        Ok(ManagedResource::new(binding.memory, ()))
    }
}

impl<T: Target> Server for Recorder<T> {
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

    fn read(
        &mut self,
        wanted: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> cubecl::future::DynFut<Result<Vec<Bytes>, ServerError>> {
        let zeros =
            |d: &CopyDescriptor| Bytes::from_bytes_vec(vec![0; d.shape.iter().product::<usize>() * d.elem_size]);
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
        _: cubecl_runtime::dry_run::LaunchMode,
    ) {
        T::keep(self.number, kernel);
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
