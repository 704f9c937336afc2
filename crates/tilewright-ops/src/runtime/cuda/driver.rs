//! The functions of the driver that are used, and no others.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::library::functions;

/// `CUresult`; 0 is success.
pub(super) type Status = c_int;
/// `CUdeviceptr`.
pub(super) type Address = u64;
/// `CUcontext`, `CUstream`, `CUevent`, `CUmodule`, `CUfunction`, `CUgraph`, `CUgraphExec`: pointers that only the driver looks behind.
pub(super) type Handle = *mut c_void;

functions! {
    /// libcuda.
    struct Driver returns Status {
        init = "cuInit"(c_uint);
        driver_version = "cuDriverGetVersion"(*mut c_int);
        device_count = "cuDeviceGetCount"(*mut c_int);
        device_get = "cuDeviceGet"(*mut c_int, c_int);
        device_name = "cuDeviceGetName"(*mut c_char, c_int, c_int);
        device_attribute = "cuDeviceGetAttribute"(*mut c_int, c_int, c_int);
        device_total = "cuDeviceTotalMem_v2"(*mut usize, c_int);
        context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, c_int);
        context_set = "cuCtxSetCurrent"(Handle);
        alloc = "cuMemAlloc_v2"(*mut Address, usize);
        free = "cuMemFree_v2"(Address);
        host_alloc = "cuMemAllocHost_v2"(*mut *mut c_void, usize);
        host_free = "cuMemFreeHost"(*mut c_void);
        memory_info = "cuMemGetInfo_v2"(*mut usize, *mut usize);
        copy_to_device = "cuMemcpyHtoDAsync_v2"(Address, *const c_void, usize, Handle);
        copy_to_host = "cuMemcpyDtoHAsync_v2"(*mut c_void, Address, usize, Handle);
        copy_on_device = "cuMemcpyDtoDAsync_v2"(Address, Address, usize, Handle);
        fill_bytes = "cuMemsetD8Async"(Address, u8, usize, Handle);
        stream_create = "cuStreamCreate"(*mut Handle, c_uint);
        stream_destroy = "cuStreamDestroy_v2"(Handle);
        stream_synchronize = "cuStreamSynchronize"(Handle);
        event_create = "cuEventCreate"(*mut Handle, c_uint);
        event_destroy = "cuEventDestroy_v2"(Handle);
        event_record = "cuEventRecord"(Handle, Handle);
        event_synchronize = "cuEventSynchronize"(Handle);
        event_elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle);
        module_load = "cuModuleLoadData"(*mut Handle, *const c_void);
        module_unload = "cuModuleUnload"(Handle);
        module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
        function_set = "cuFuncSetAttribute"(Handle, c_int, c_int);
        launch = "cuLaunchKernel"(
            Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void,
        );
        launch_with = "cuLaunchKernelEx"(*const LaunchConfig, Handle, *mut *mut c_void, *mut *mut c_void);
        capture_begin = "cuStreamBeginCapture_v2"(Handle, c_int);
        capture_end = "cuStreamEndCapture"(Handle, *mut Handle);
        graph_instantiate = "cuGraphInstantiateWithFlags"(*mut Handle, Handle, u64);
        graph_launch = "cuGraphLaunch"(Handle, Handle);
        graph_exec_destroy = "cuGraphExecDestroy"(Handle);
        graph_destroy = "cuGraphDestroy"(Handle);
        error_name = "cuGetErrorName"(Status, *mut *const c_char);
        error_string = "cuGetErrorString"(Status, *mut *const c_char);
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
pub(super) struct LaunchConfig {
    pub(super) grid: [c_uint; 3],
    pub(super) block: [c_uint; 3],
    pub(super) shared: c_uint,
    pub(super) stream: Handle,
    pub(super) attributes: *mut LaunchAttribute,
    pub(super) count: c_uint,
}

/// `CUlaunchAttribute`: which, and its value.
#[repr(C)]
pub(super) struct LaunchAttribute {
    id: c_int,
    unused: c_int,
    value: [u64; 8],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel waits for what is in front of it by itself.
    pub(super) fn early() -> Self {
        LaunchAttribute { id: 6, unused: 0, value: [1, 0, 0, 0, 0, 0, 0, 0] }
    }
}

/// `CU_STREAM_NON_BLOCKING`.
pub(super) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads may allocate while this one records.
pub(super) const CAPTURE_THREAD_LOCAL: c_int = 1;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
pub(super) const MAX_DYNAMIC_SHARED: c_int = 8;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: Status = 2;

/// `CUdevice_attribute` values.
pub(super) mod attribute {
    use std::ffi::c_int;

    pub(crate) const MULTIPROCESSORS: c_int = 16;
    pub(crate) const L2_BYTES: c_int = 38;
    pub(crate) const MAJOR: c_int = 75;
    pub(crate) const MINOR: c_int = 76;
    pub(crate) const SHARED_PER_BLOCK: c_int = 97;
}

impl Driver {
    /// The driver's own words for a status.
    pub(super) fn words(&self, status: Status) -> String {
        let text = |f: unsafe extern "C" fn(Status, *mut *const c_char) -> Status| {
            let mut p = std::ptr::null();
            // SAFETY: the driver hands out static strings.
            unsafe {
                if f(status, &mut p) == 0 && !p.is_null() {
                    std::ffi::CStr::from_ptr(p).to_string_lossy().into_owned()
                } else {
                    format!("status {status}")
                }
            }
        };
        format!("{} ({})", text(self.error_string), text(self.error_name))
    }
}
