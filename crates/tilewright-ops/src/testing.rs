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

/// Every device that case tables run on here: [`cpus`] and, with `TILEWRIGHT_TEST_CUDA=1`, the GPU; `TILEWRIGHT_TEST_CUDA=only` leaves the CPUs out.
pub(crate) fn devices() -> Vec<Device> {
    let gpus = gpus();
    if !gpus.is_empty() && std::env::var("TILEWRIGHT_TEST_CUDA").is_ok_and(|v| v == "only") {
        return gpus;
    }
    cpus().into_iter().chain(gpus).collect()
}

/// Where a case of production size is run: two threads at the best instruction set, and the GPU.
pub(crate) fn production_devices() -> Vec<Device> {
    let gpus = gpus();
    if !gpus.is_empty() && std::env::var("TILEWRIGHT_TEST_CUDA").is_ok_and(|v| v == "only") {
        return gpus;
    }
    std::iter::once(Device::cpu_with_threads(2)).chain(gpus).collect()
}

/// Whether a device is a GPU, whose sums have another order and whose products of 16-bit types have 16-bit factors.
pub(crate) fn is_gpu(device: &Device) -> bool {
    !matches!(device, Device::Cpu(_) | Device::Null(_))
}

/// The GPU that the environment asks for, one handle a thread. Asked for and not there is a failure, not a skip.
#[cfg(feature = "cuda")]
pub(crate) fn gpus() -> Vec<Device> {
    thread_local!(static GPU: std::cell::OnceCell<Device> = const { std::cell::OnceCell::new() });
    if std::env::var_os("TILEWRIGHT_TEST_CUDA").is_none() {
        return Vec::new();
    }
    vec![GPU.with(|gpu| gpu.get_or_init(|| Device::cuda(0).unwrap()).clone())]
}

/// No GPU in this build.
#[cfg(not(feature = "cuda"))]
pub(crate) fn gpus() -> Vec<Device> {
    Vec::new()
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

/// A copy of a float tensor that starts one element behind an aligned address: kernels may assume no more than the element's alignment.
pub(crate) fn unaligned(t: &Tensor) -> Tensor {
    let moved = Tensor::zeros(t.device(), t.dtype(), &[t.numel() + 1]).unwrap().slice(1, &t.shape()).unwrap();
    moved.copy_from(t).unwrap();
    moved
}
