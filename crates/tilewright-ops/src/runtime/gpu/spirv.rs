//! The SPIR-V that a large NVIDIA GPU would get, without one: a device that computes nothing and keeps the words of every kernel. What makes a kernel for
//! the matrix units fast or slow can be read there: how wide loads are, what stays in registers, how many products a loop has.

use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use cubecl::Compiler;
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
use cubecl_wgpu::SpirvCompiler;

use super::adapters::{Adapter, Api, Kind};
use super::{Capabilities, Core, Gpu};
use crate::matmul::gpu::Product;
use crate::{DType, Device, Tensor, attention};

/// Names and words of the kernels launched so far, or why one has none.
static COMPILED: Mutex<Vec<(String, Words)>> = Mutex::new(Vec::new());

type Words = Result<Vec<u32>, String>;

/// Opens a recording device.
fn open() -> Rc<Gpu> {
    static OPENED: Mutex<Option<Client>> = Mutex::new(None);
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let client = opened.get_or_insert_with(|| Client::load::<Recorder>(DeviceId::new(901, 0))).clone();
    let capabilities = Capabilities::read(&client);
    let adapter = Adapter {
        api: Api::Vulkan,
        number: 0,
        name: "SPIR-V only".into(),
        driver: String::new(),
        kind: Kind::Software,
        nth: 0,
    };
    let core = Rc::new(Core::new(client, adapter, capabilities, false));
    Rc::new(Gpu::with_scratch(core).unwrap())
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
        max_shared_memory_size: 48 << 10,
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
    let identity = DeviceIdentity { name: "SPIR-V".into(), fingerprint: "spirv".into(), physical: None };
    let memory = MemoryDeviceProperties::new(4 << 30, 32);
    let mut properties = DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System, identity);
    properties.register_address_type(AddressType::U32);
    let floats = [FloatKind::F16, FloatKind::BF16, FloatKind::F32].map(ElemType::Float);
    let words = [UIntKind::U8, UIntKind::U16, UIntKind::U32].map(ElemType::UInt);
    let others = [ElemType::Index, ElemType::Bool, ElemType::Int(IntKind::I32)];
    for ty in floats.into_iter().chain(words).chain(others) {
        properties.register_type_usage(ty, TypeUsage::all());
    }
    for factor in [FloatKind::F16, FloatKind::BF16].map(ElemType::Float) {
        let sum = ElemType::Float(FloatKind::F32);
        properties.features.matmul.cmma.insert(MmaConfig {
            a_type: factor,
            b_type: factor,
            cd_type: sum,
            m: 16,
            n: 16,
            k: 16,
        });
    }
    properties
}

impl DeviceService for Recorder {
    fn init(id: DeviceId) -> Self {
        let service = cubecl::device::ServiceId::of::<Self>(id);
        let target = cubecl::ir::TargetProperties { mma: Default::default() };
        let logger = Arc::new(cubecl_runtime::logging::ServerLogger::default());
        let (utilities, _) = ServerUtilities::init(service, "wgpu<spirv>", properties(), target, logger, Names);
        Recorder { utilities: Arc::new(utilities) }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

impl ServerCommunication for Recorder {}

/// There is nothing to store.
struct Nothing;

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

impl ServerStorage for Recorder {
    type Storage = Nothing;

    fn get_resource(&mut self, binding: BufferBinding, _: StreamId) -> Result<ManagedResource<()>, ServerError> {
        Ok(ManagedResource::new(binding.memory, ()))
    }
}

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
        let name = kernel.name().to_string();
        let mut options = <SpirvCompiler as Compiler>::CompilationOptions::default();
        let (all, vulkan) = ((&mut options.supports_u64, &mut options.supports_vulkan_compiler), &mut options.vulkan);
        (*all.0, *all.1) = (true, true);
        vulkan.max_spirv_version = (1, 6);
        vulkan.max_vector_size = 4;
        vulkan.push_constant_size = 256;
        vulkan.supports_explicit_smem = true;
        vulkan.supports_uniform_standard_layout = true;
        let words = match SpirvCompiler.compile(kernel.define(), &options) {
            Ok(kernel) => Ok(kernel.assembled_module),
            Err(error) => Err(error.to_string()),
        };
        COMPILED.lock().unwrap_or_else(PoisonError::into_inner).push((name, words));
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

/// Instructions of a module: their codes and their words.
fn instructions(words: &[u32]) -> Vec<(u32, &[u32])> {
    let mut all = Vec::new();
    let mut at = 5;
    while at < words.len() {
        let length = (words[at] >> 16) as usize;
        all.push((words[at] & 0xFFFF, &words[at..at + length]));
        at += length;
    }
    all
}

/// Codes of SPIR-V.
const VARIABLE: u32 = 59;
const LOAD: u32 = 61;
const LOOP: u32 = 246;
const MATRIX_LOAD: u32 = 4457;
const MATRIX_MUL_ADD: u32 = 4459;
/// The storage class of variables of a function.
const FUNCTION: u32 = 7;
/// The bit of memory operands behind which the alignment stands.
const ALIGNED: u32 = 2;

/// What a kernel named so has of each: function variables, matrix loads, those aligned to 16 bytes, products, other loads of 16 bytes, loops.
fn counts(kernel: &str) -> [usize; 6] {
    let all = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let (name, words) = all.iter().find(|(name, _)| name.contains(kernel)).expect("launched");
    let words = words.as_ref().unwrap_or_else(|error| panic!("{name}: {error}"));
    let all = instructions(words);
    let of = |code: u32| all.iter().filter(move |(c, _)| *c == code);
    let last = |w: &[u32]| w[w.len() - 1] == 16 && w[w.len() - 2] & ALIGNED != 0;
    [
        of(VARIABLE).filter(|(_, w)| w[3] == FUNCTION).count(),
        of(MATRIX_LOAD).count(),
        of(MATRIX_LOAD).filter(|(_, w)| last(w)).count(),
        of(MATRIX_MUL_ADD).count(),
        of(LOAD).filter(|(_, w)| w.len() > 5 && last(w)).count(),
        of(LOOP).count(),
    ]
}

#[test]
fn a_products_loop_loads_by_16_bytes_and_keeps_its_sums_in_registers() {
    let gpu = open();
    let device = Device::Gpu(gpu.clone());
    let [a, b, c] = [(); 3].map(|()| Tensor::zeros(&device, DType::BF16, &[4096, 4096]).unwrap());
    let product = Product::plain((&a, 4096, 1), (&b, 4096, 1), (&c, 4096));
    product.run(&gpu, "spirv", 4096, 4096, 4096).unwrap();
    device.synchronize().unwrap();
    let [variables, loads, aligned, products, wide, loops] = counts("matrix_kernel");
    assert_eq!(variables, 0, "something lies in memory of the function");
    assert_eq!(loads, aligned, "fragments that are not read by 16 bytes");
    assert_eq!(loops, 1);
    // 128 x 128 x 32 in planes of 64 x 64: two steps of four and four fragments, sixteen products each. Eight packs a unit in front of the loop, eight in it, and
    // two quads for each of sixteen tiles of sums.
    assert_eq!([loads, products], [16, 32]);
    assert_eq!(wide, 16 + 32);
}

#[test]
fn attentions_kernels_keep_their_sums_in_registers() {
    let device = Device::Gpu(open());
    let (b, t, heads, head) = (1, 128, 2, 64);
    let c = heads * head;
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
    let [qkv, dqkv] = [(); 2].map(|()| zeros(DType::BF16, &[b, t, 3 * c]));
    let [out, dout] = [(); 2].map(|()| zeros(DType::BF16, &[b, t, c]));
    let lse = zeros(DType::F32, &[b, heads, t]);
    let workspace = zeros(DType::U8, &[attention::workspace_bytes(&device, b, t, c, heads)]);
    let mask = attention::Mask::Causal;
    let (qkv, out, lse, dout, dqkv, workspace, dqkv_sums) = (&qkv, &out, &lse, &dout, &dqkv, &workspace, None);
    attention::forward(&device, &attention::Forward { qkv, heads, mask, out, lse, workspace }).unwrap();
    let args = attention::Backward { qkv, heads, mask, out, lse, dout, dqkv, dqkv_sums, workspace };
    attention::backward(&device, &args).unwrap();
    device.synchronize().unwrap();
    // Scores twice and values; scores, their gradients and sums; both, and two sums.
    for (kernel, expected) in [("units_forward", 48), ("units_queries", 48), ("units_keys", 64)] {
        let [variables, loads, aligned, products, ..] = counts(kernel);
        assert_eq!((variables, products), (0, expected), "{kernel}");
        assert_eq!(loads, aligned, "{kernel}: fragments that are not read by 16 bytes");
    }
}
