//! Helpers of the ops' case tables.

use crate::cpu::{Cpu, Isa};
use crate::{DType, Device, Tensor};
use std::rc::Rc;

/// A small generator for test data: not for statistics, only for the same numbers on every machine.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn bits(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    /// Roughly normal, mean 0, the given standard deviation.
    pub(crate) fn normal(&mut self, std: f32) -> f32 {
        let sum: f32 = (0..12).map(|_| self.bits() as f32 / 4_294_967_296.0).sum();
        (sum - 6.0) * std
    }

    pub(crate) fn normals(&mut self, n: usize, std: f32) -> Vec<f32> {
        (0..n).map(|_| self.normal(std)).collect()
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }
}

/// Every device that case tables run on here: [`cpus`] and the GPUs that the environment asks for (see [`gpus`]).
pub(crate) fn devices() -> Vec<Device> {
    let gpus = gpus();
    if leaves_cpus_out() { gpus } else { cpus().into_iter().chain(gpus).collect() }
}

/// Where a case of production size is run: two threads at the best instruction set, and GPUs that are no software.
pub(crate) fn production_devices() -> Vec<Device> {
    let gpus = gpus().into_iter().filter(|d| !is_software(d));
    if leaves_cpus_out() { gpus.collect() } else { std::iter::once(Device::cpu_with_threads(2)).chain(gpus).collect() }
}

/// Whether a device is a GPU, whose sums have another order and whose products of 16-bit types have 16-bit factors.
pub(crate) fn is_gpu(device: &Device) -> bool {
    !matches!(device, Device::Cpu(_) | Device::Null(_))
}

/// Whether a device is a GPU through Vulkan or Metal: its kernels compute in f32 alone, and drivers may round divisions and roots as they like.
pub(crate) fn is_portable(device: &Device) -> bool {
    #[cfg(feature = "gpu")]
    return matches!(device, Device::Gpu(_));
    #[cfg(not(feature = "gpu"))]
    {
        let _ = device;
        false
    }
}

/// Whether a device is a driver that computes on the processor.
pub(crate) fn is_software(device: &Device) -> bool {
    #[cfg(feature = "gpu")]
    return matches!(device, Device::Gpu(gpu) if gpu.adapter().is_software());
    #[cfg(not(feature = "gpu"))]
    {
        let _ = device;
        false
    }
}

/// [`gpus`] through Vulkan or Metal.
pub(crate) fn portable_gpus() -> impl Iterator<Item = Device> {
    gpus().into_iter().filter(is_portable)
}

/// [`gpus`] that are no software: for large calls.
pub(crate) fn hardware_gpus() -> Vec<Device> {
    gpus().into_iter().filter(|d| !is_software(d)).collect()
}

fn leaves_cpus_out() -> bool {
    ["TILEWRIGHT_TEST_CUDA", "TILEWRIGHT_TEST_GPU"]
        .iter()
        .any(|name| std::env::var(name).is_ok_and(|v| v == "only" || v == "emulate"))
}

/// The GPUs that the environment asks for, one handle a thread: `TILEWRIGHT_TEST_CUDA` NVIDIA's, `TILEWRIGHT_TEST_GPU` that through Vulkan or Metal;
/// `1` adds one, `only` leaves the processor out, `emulate` leaves it out too and runs Metal's text on it. Asked for and not there is a failure,
/// not a skip.
pub(crate) fn gpus() -> Vec<Device> {
    thread_local!(static GPUS: std::cell::OnceCell<Held> = const { std::cell::OnceCell::new() });
    let open = || {
        let asked = |name: &str| std::env::var_os(name).is_some();
        let cuda = asked("TILEWRIGHT_TEST_CUDA").then(Held::cuda);
        let gpu = std::env::var_os("TILEWRIGHT_TEST_GPU").map(|how| match how.to_str() {
            Some("emulate") => emulated(),
            _ => Device::gpu(0).unwrap(),
        });
        Held(cuda.into_iter().chain(gpu).collect())
    };
    GPUS.with(|gpus| gpus.get_or_init(open).0.clone())
}

/// A thread's handles. Every test has a thread of its own: a CUDA device is handed on to the next one when a thread ends, with its modules, rather than closed
/// among the destructors of the thread, where the driver's own may have run already.
struct Held(Vec<Device>);

#[cfg(feature = "cuda")]
mod idle {
    use std::rc::Rc;
    use std::sync::Mutex;

    use super::{Device, Held};
    use crate::runtime::cuda::Cuda;

    /// The only handle of a device that no thread uses.
    struct Idle(Rc<Cuda>);

    // SAFETY: nobody else holds the device, and what it holds belongs to the process: each call makes the context that thread's own (`Cuda::enter`).
    unsafe impl Send for Idle {}

    static IDLE: Mutex<Vec<Idle>> = Mutex::new(Vec::new());

    impl Held {
        pub(super) fn cuda() -> Device {
            let idle = IDLE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
            idle.map_or_else(|| Device::cuda(0).unwrap(), |Idle(cuda)| Device::Cuda(cuda))
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            for device in self.0.drain(..) {
                let Device::Cuda(cuda) = device else { continue };
                if Rc::strong_count(&cuda) == 1 && !cuda.recording() {
                    IDLE.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(Idle(cuda));
                } else {
                    // Left by a test that failed in the middle: nobody may go on with it.
                    std::mem::forget(cuda);
                }
            }
        }
    }
}

#[cfg(not(feature = "cuda"))]
impl Held {
    fn cuda() -> Device {
        Device::cuda(0).unwrap()
    }
}

#[cfg(feature = "metal")]
fn emulated() -> Device {
    Device::Gpu(crate::runtime::gpu::emulator::open())
}

#[cfg(not(feature = "metal"))]
fn emulated() -> Device {
    panic!("TILEWRIGHT_TEST_GPU=emulate wants the feature metal")
}

/// The processor as several devices: the CPU at each instruction set of this machine, with one, two and three threads at the best one.
/// Prints once which sets this machine lacks.
pub(crate) fn cpus() -> Vec<Device> {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        for isa in Isa::ALL.into_iter().filter(|i| !i.is_available()) {
            println!("not run: this machine lacks {}", isa.name());
        }
    });
    let best = Isa::detect();
    let mut all: Vec<_> = Isa::available().into_iter().map(|isa| Device::Cpu(Rc::new(Cpu::new(2, isa)))).collect();
    all.extend([1, 3].map(|threads| Device::Cpu(Rc::new(Cpu::new(threads, best)))));
    all
}

/// A tensor of random normals rounded to `dtype`, and its exact values in f64 for the reference.
pub(crate) fn random(device: &Device, dtype: DType, shape: &[usize], std: f32, rng: &mut Random) -> (Tensor, Vec<f64>) {
    let n = shape.iter().product();
    let t = Tensor::from_f32(device, dtype, shape, &rng.normals(n, std)).unwrap();
    let exact = t.read_f32().unwrap().into_iter().map(f64::from).collect();
    (t, exact)
}

/// An output tensor filled with a poison that no right answer holds, so that an element never written is seen.
pub(crate) fn poisoned(device: &Device, dtype: DType, shape: &[usize]) -> Tensor {
    let t = Tensor::zeros(device, dtype, shape).unwrap();
    t.write_f32(&vec![f32::NAN; t.numel()]).unwrap();
    t
}

/// Scratch of so many bytes, filled with NaN patterns.
pub(crate) fn workspace(device: &Device, bytes: usize) -> Tensor {
    let t = Tensor::zeros(device, DType::U8, &[bytes]).unwrap();
    t.write_bytes(0, &vec![0xFF; bytes]).unwrap();
    t
}

/// Asserts `|got - want| <= atol + rtol * |want|` for every element, and names the first that differs.
#[track_caller]
pub(crate) fn assert_close(what: &str, got: &Tensor, want: &[f64], atol: f64, rtol: f64) {
    let got = got.read_f32().unwrap();
    assert_eq!(got.len(), want.len(), "{what}: element count");
    for (i, (&g, &w)) in got.iter().zip(want).enumerate() {
        let bound = atol + rtol * w.abs();
        assert!((f64::from(g) - w).abs() <= bound, "{what}[{i}]: got {g}, want {w}, allowed {bound:e}");
    }
}

/// The same bits on processors and through CUDA. Through Vulkan and Metal, where a driver may fuse a product with a sum and round a division or a root
/// as it likes, some units in the last place of f32.
#[track_caller]
pub(crate) fn assert_bits(device: &Device, what: &str, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{what} on {}: element count", device.name());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g.to_bits() == w.to_bits() || g == w;
        let near = is_portable(device) && (g - w).abs() <= 1e-9 + 1e-6 * w.abs();
        assert!(same || near, "{what}[{i}] on {}: got {g:e}, want {w:e}", device.name());
    }
}

/// `(atol, rtol)` of specification 2.3 for an op whose result is stored in `dtype`.
pub(crate) fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F32 => (1e-6, 1e-5),
        DType::F16 => (1e-3, 1e-2),
        DType::BF16 => (5e-3, 2e-2),
        other => unreachable!("{other} is not a float"),
    }
}

/// The float storage types.
pub(crate) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A copy of a float tensor that starts one element behind an aligned address, or as little behind it as the device can bind: kernels may assume no
/// more than that.
pub(crate) fn unaligned(t: &Tensor) -> Tensor {
    let moved = unaligned_zeros(t.device(), t.dtype(), &t.shape(), 1);
    moved.copy_from(t).unwrap();
    moved
}

/// Zeros that start so many elements behind an aligned address, or as little behind it as the device can bind.
pub(crate) fn unaligned_zeros(device: &Device, dtype: DType, shape: &[usize], behind: usize) -> Tensor {
    let behind = behind.max(binding(device) / dtype.size());
    let n: usize = shape.iter().product();
    Tensor::zeros(device, dtype, &[n + behind]).unwrap().slice(behind, shape).unwrap()
}

/// A copy in a slot of its own, which every device can bind.
pub(crate) fn in_a_slot(t: &Tensor) -> Tensor {
    let own = Tensor::zeros(t.device(), t.dtype(), &t.shape()).unwrap();
    own.copy_from(t).unwrap();
    own
}

/// A tensor that a kernel takes starts at a multiple of so many bytes, or of its element if that is more.
fn binding(device: &Device) -> usize {
    #[cfg(feature = "gpu")]
    if let Device::Gpu(gpu) = device {
        return gpu.capabilities().alignment;
    }
    let _ = device;
    1
}
