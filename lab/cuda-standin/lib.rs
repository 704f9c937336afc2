//! A stand-in for NVIDIA's driver and cuBLASLt: a shared library that answers the calls of the CUDA device, computes nothing and checks what it is told.
//! Addresses must lie in memory that is allocated, launches must fit what the machine code says of the kernel, graphs must be replayed while their memory lives.
//! `.ci/cuda-host` puts it in the place of both libraries, so that the host's side of the device runs on a machine without a GPU.

#![allow(missing_docs, non_snake_case, clippy::missing_safety_doc)]

mod blas;
mod cubin;
mod state;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use state::{Function, Handle, MEMORY, MULTIPROCESSORS, SHARED_PER_BLOCK, Status, Work, answer};

/// Writes through an out-pointer of the caller.
fn give<T>(out: *mut T, value: T) -> Result<(), String> {
    if out.is_null() {
        return Err("an out-pointer is null".into());
    }
    // SAFETY: an out-pointer of the documented type, not null.
    unsafe { out.write(value) };
    Ok(())
}

/// Declares functions of the driver that answer by a body over the state.
macro_rules! driver {
    ($($name:ident($($arg:ident: $t:ty),*) |$state:ident| $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($arg: $t),*) -> Status {
                answer(stringify!($name), |$state| {
                    let _ = &$state;
                    $body
                })
            }
        )*
    };
}

driver! {
    cuInit(_flags: c_uint) |state| { Ok(()) }
    cuDriverGetVersion(out: *mut c_int) |state| { give(out, 13_000) }
    cuDeviceGetCount(out: *mut c_int) |state| { give(out, 1) }
    cuDeviceGet(out: *mut c_int, ordinal: c_int) |state| {
        if ordinal == 0 { give(out, 0) } else { Err(format!("no device {ordinal}")) }
    }
    cuDeviceGetName(out: *mut c_char, bytes: c_int, _device: c_int) |state| {
        let name = c"stand-in".to_bytes_with_nul();
        if bytes as usize >= name.len() {
            // SAFETY: the caller's buffer has so many bytes.
            unsafe { std::ptr::copy_nonoverlapping(name.as_ptr().cast(), out, name.len()) };
        }
        Ok(())
    }
    cuDeviceGetAttribute(out: *mut c_int, which: c_int, _device: c_int) |state| {
        give(out, match which {
            16 => MULTIPROCESSORS as c_int,
            38 => 50 << 20,
            75 => 9,
            76 => 0,
            97 => SHARED_PER_BLOCK as c_int,
            other => return Err(format!("attribute {other} is not known here")),
        })
    }
    cuDeviceTotalMem_v2(out: *mut usize, _device: c_int) |state| { give(out, MEMORY) }
    cuDevicePrimaryCtxRetain(out: *mut Handle, _device: c_int) |state| { give(out, 0x11 as Handle) }
    cuCtxSetCurrent(context: Handle) |state| {
        if context as usize == 0x11 { Ok(()) } else { Err("no such context".into()) }
    }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |state| {
        give(free, MEMORY - state.held())?;
        give(total, MEMORY)
    }
    cuMemAlloc_v2(out: *mut u64, bytes: usize) |state| { give(out, state.allocate(bytes)?) }
    cuMemFree_v2(address: u64) |state| { state.free(address) }
    cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) |state| {
        // The host's own memory, kept apart from the device's by never being in its table.
        give(out, Box::leak(vec![0u64; bytes.div_ceil(8)].into_boxed_slice()).as_mut_ptr().cast())
    }
    cuMemFreeHost(_memory: *mut c_void) |state| { Ok(()) }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: Handle) |state| {
        if !state.work(stream, "cuMemcpyHtoDAsync".into(), vec![(to, bytes)])? {
            return Err("a copy from the host is being recorded".into());
        }
        // SAFETY: the device's range is allocated, the host's is the caller's.
        unsafe { std::ptr::copy_nonoverlapping(from.cast::<u8>(), to as *mut u8, bytes) };
        Ok(())
    }
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: Handle) |state| {
        if state.work(stream, "cuMemcpyDtoHAsync".into(), vec![(from, bytes)])? {
            // SAFETY: as above.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to.cast::<u8>(), bytes) };
        }
        Ok(())
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: Handle) |state| {
        if to.abs_diff(from) < bytes as u64 {
            return Err(format!("{bytes} bytes from {from:#x} to {to:#x} overlap"));
        }
        if state.work(stream, "cuMemcpyDtoDAsync".into(), vec![(from, bytes), (to, bytes)])? {
            // SAFETY: both ranges are allocated and apart.
            unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
        }
        Ok(())
    }
    cuMemsetD8Async(address: u64, byte: u8, bytes: usize, stream: Handle) |state| {
        if state.work(stream, "cuMemsetD8Async".into(), vec![(address, bytes)])? {
            // SAFETY: the range is allocated.
            unsafe { std::ptr::write_bytes(address as *mut u8, byte, bytes) };
        }
        Ok(())
    }
    cuStreamCreate(out: *mut Handle, _flags: c_uint) |state| { give(out, state.handle("stream")) }
    cuStreamDestroy_v2(stream: Handle) |state| {
        let at = state.destroy("stream", stream)?;
        if state.recording.remove(&at).is_some() { Err("destroyed while it is recorded".into()) } else { Ok(()) }
    }
    cuStreamSynchronize(stream: Handle) |state| {
        let at = state.known("stream", stream)?;
        if state.recording.contains_key(&at) { Err("waited for while it is recorded".into()) } else { Ok(()) }
    }
    cuEventCreate(out: *mut Handle, _flags: c_uint) |state| { give(out, state.handle("event")) }
    cuEventDestroy_v2(event: Handle) |state| { state.destroy("event", event).map(|_| ()) }
    cuEventRecord(event: Handle, stream: Handle) |state| {
        state.known("event", event)?;
        state.known("stream", stream).map(|_| ())
    }
    cuEventSynchronize(event: Handle) |state| { state.known("event", event).map(|_| ()) }
    cuEventElapsedTime(out: *mut f32, start: Handle, stop: Handle) |state| {
        state.known("event", start)?;
        state.known("event", stop)?;
        give(out, 0.01)
    }
    cuModuleLoadData(out: *mut Handle, image: *const c_void) |state| {
        // The header says how long the image is: its table of sections comes last.
        // SAFETY: the caller gives a whole ELF file.
        let image = unsafe {
            let header = std::slice::from_raw_parts(image.cast::<u8>(), 64);
            let number = |at: usize, size: usize| header[at..at + size].iter().rev().fold(0usize, |n, &b| n << 8 | usize::from(b));
            let programs = number(0x20, 8) + number(0x36, 2) * number(0x38, 2);
            let sections = number(0x28, 8) + number(0x3a, 2) * number(0x3c, 2);
            std::slice::from_raw_parts(image.cast::<u8>(), programs.max(sections))
        };
        let kernels = cubin::kernels(image).ok_or("the image is no machine code")?;
        let module = state.handle("module");
        state.modules.insert(module as usize, kernels);
        give(out, module)
    }
    cuModuleUnload(module: Handle) |state| {
        let at = state.destroy("module", module)?;
        state.modules.remove(&at);
        Ok(())
    }
    cuModuleGetFunction(out: *mut Handle, module: Handle, name: *const c_char) |state| {
        // SAFETY: a C string of the caller.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
        let module = state.known("module", module)?;
        let kernel = state.modules[&module].get(&name).ok_or_else(|| format!("the module has no {name}"))?.clone();
        state.functions.push(Function { module, name, kernel, allowed: 48 << 10 });
        give(out, state.functions.len() as Handle)
    }
    cuFuncSetAttribute(function: Handle, which: c_int, value: c_int) |state| {
        let own = state.functions.get_mut((function as usize).wrapping_sub(1)).ok_or("no such function")?;
        if which != 8 || value < 0 || value as u32 + own.kernel.shared > SHARED_PER_BLOCK {
            return Err(format!("attribute {which} to {value}: {} has {} bytes of its own", own.name, own.kernel.shared));
        }
        own.allowed = value as u32;
        Ok(())
    }
    cuLaunchKernel(
        function: Handle, x: c_uint, y: c_uint, z: c_uint, threads: c_uint, ty: c_uint, tz: c_uint, shared: c_uint, stream: Handle,
        parameters: *mut *mut c_void, _extra: *mut *mut c_void
    ) |state| {
        if ty != 1 || tz != 1 {
            return Err("blocks of one dimension only".into());
        }
        state.launch(function, [x, y, z], threads, shared, stream, parameters)
    }
    cuLaunchKernelEx(config: *const Config, function: Handle, parameters: *mut *mut c_void, _extra: *mut *mut c_void) |state| {
        // SAFETY: the caller's structure, as documented.
        let Config { grid, block, shared, stream, .. } = unsafe { &*config };
        state.launch(function, *grid, block[0], *shared, *stream, parameters)
    }
    cuStreamBeginCapture_v2(stream: Handle, _mode: c_int) |state| {
        let at = state.known("stream", stream)?;
        if state.recording.insert(at, Vec::new()).is_some() { Err("it is recorded already".into()) } else { Ok(()) }
    }
    cuStreamEndCapture(stream: Handle, out: *mut Handle) |state| {
        let at = state.known("stream", stream)?;
        let list = state.recording.remove(&at).ok_or("it is not recorded")?;
        let graph = state.handle("graph");
        state.graphs.insert(graph as usize, list);
        give(out, graph)
    }
    cuGraphInstantiateWithFlags(out: *mut Handle, graph: Handle, _flags: u64) |state| {
        let at = state.known("graph", graph)?;
        let list = state.graphs[&at].clone();
        if list.is_empty() {
            return Err("nothing was recorded".into());
        }
        let executable = state.handle("executable graph");
        state.graphs.insert(executable as usize, list);
        give(out, executable)
    }
    cuGraphLaunch(graph: Handle, stream: Handle) |state| {
        let at = state.known("executable graph", graph)?;
        let stream = state.known("stream", stream)?;
        if state.recording.contains_key(&stream) {
            return Err("a graph is replayed while another is recorded".into());
        }
        state.replays += 1;
        let list: Vec<Work> = state.graphs[&at].clone();
        list.iter().try_for_each(|work| state.verify(work))
    }
    cuGraphExecDestroy(graph: Handle) |state| {
        let at = state.destroy("executable graph", graph)?;
        state.graphs.remove(&at);
        Ok(())
    }
    cuGraphDestroy(graph: Handle) |state| {
        let at = state.destroy("graph", graph)?;
        state.graphs.remove(&at);
        Ok(())
    }
    cuTensorMapEncodeTiled(
        map: *mut [u64; 16], kind: c_int, rank: c_uint, address: u64, sizes: *const u64, strides: *const u64, boxes: *const c_uint, steps: *const c_uint,
        _interleave: c_int, swizzle: c_int, _promotion: c_int, _fill: c_int
    ) |state| {
        // SAFETY: arrays of the lengths that the rank asks for.
        let (sizes, stride, boxes, steps) =
            unsafe { (*sizes.cast::<[u64; 2]>(), *strides, *boxes.cast::<[u32; 2]>(), *steps.cast::<[u32; 2]>()) };
        if rank != 2 || ![6, 9].contains(&kind) || swizzle != 3 || steps != [1, 1] {
            return Err(format!("rank {rank}, type {kind}, swizzle {swizzle}: not what the kernels over tiles use"));
        }
        if !address.is_multiple_of(16) || !stride.is_multiple_of(16) || stride < 2 * sizes[0] || sizes.contains(&0) {
            return Err(format!("{address:#x}, sizes {sizes:?}, rows {stride} bytes apart"));
        }
        if boxes[0] != 64 || boxes[1] == 0 || boxes[1] > 256 {
            return Err(format!("boxes of {boxes:?}"));
        }
        state.check("a matrix", address, (stride * (sizes[1] - 1) + 2 * sizes[0]) as usize)?;
        give(map, [address; 16])
    }
    cuGetErrorName(status: Status, out: *mut *const c_char) |state| {
        give(out, if status == 0 { c"CUDA_SUCCESS".as_ptr() } else { c"STAND_IN_REFUSED".as_ptr() })
    }
}

/// Outside the state's lock, which `answer` holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_status: Status, out: *mut *const c_char) -> Status {
    // SAFETY: an out-pointer of the caller.
    unsafe { out.write(state::last_words()) };
    0
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
    attributes: *mut c_void,
    count: c_uint,
}

/// What was done so far: launches, products, replays, live handles, bytes held. For tests.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_counts(out: *mut [u64; 5]) -> Status {
    answer("standin_counts", |state| {
        give(out, [state.launches, state.products, state.replays, state.handles.len() as u64, state.held() as u64])
    })
}
