//! The SPIR-V that a large NVIDIA GPU would get, without one: a device that computes nothing and keeps the words of every kernel. What makes a kernel for
//! the matrix units fast or slow can be read there: how wide loads are, what stays in registers, how many products a loop has.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use cubecl::Compiler;
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, FloatKind};
use cubecl::prelude::*;
use cubecl_wgpu::SpirvCompiler;

use super::Gpu;
use super::adapters::Api;
use super::recorder::{self, Target};
use crate::matmul::gpu::Product;
use crate::{DType, Device, Tensor, attention, linear_cross_entropy};

/// Names and words of the kernels launched so far, or why one has none, with the number of their device.
static COMPILED: Mutex<Vec<(u16, String, Words)>> = Mutex::new(Vec::new());

type Words = Result<Vec<u32>, String>;

/// Opens one of several recording devices, so that a test sees what it has launched itself.
fn open(number: u16) -> Rc<Gpu> {
    static OPENED: Mutex<BTreeMap<u16, Client>> = Mutex::new(BTreeMap::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    recorder::open::<Spirv>(opened.entry(number).or_insert_with(|| recorder::client::<Spirv>(number)).clone())
}

struct Spirv;

impl Target for Spirv {
    const RUNTIME: &'static str = "wgpu<spirv>";
    const API: Api = Api::Vulkan;

    fn properties() -> DeviceProperties {
        recorder::properties("SPIR-V", 48 << 10, [FloatKind::F16, FloatKind::BF16], 16)
    }

    fn keep(number: u16, kernel: Box<dyn CubeKernel>) {
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
        COMPILED.lock().unwrap_or_else(PoisonError::into_inner).push((number, name, words));
    }
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

/// What a kernel of a device named so has of each: function variables, matrix loads, those aligned to 16 bytes, products, other loads of 16 bytes, loops.
fn counts(number: u16, kernel: &str) -> [usize; 6] {
    let all = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let (_, name, words) = all.iter().find(|(n, name, _)| *n == number && name.contains(kernel)).expect("launched");
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
    let gpu = open(0);
    let device = Device::Gpu(gpu.clone());
    let [a, b, c] = [(); 3].map(|()| Tensor::zeros(&device, DType::BF16, &[4096, 4096]).unwrap());
    let product = Product::plain((&a, 4096, 1), (&b, 4096, 1), (&c, 4096));
    product.run(&gpu, "spirv", 4096, 4096, 4096).unwrap();
    device.synchronize().unwrap();
    let [variables, loads, aligned, products, wide, loops] = counts(0, "matrix_kernel");
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
    let device = Device::Gpu(open(1));
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
    for (kernel, expected) in [("units_forward", 24), ("units_queries", 24), ("units_keys", 32)] {
        let [variables, loads, aligned, products, ..] = counts(1, kernel);
        assert_eq!((variables, products), (0, expected), "{kernel}");
        assert_eq!(loads, aligned, "{kernel}: fragments that are not read by 16 bytes");
    }
}

#[test]
fn the_fused_heads_kernels_keep_their_logits_in_registers() {
    let device = Device::Gpu(open(2));
    let (n, d, vocab, vp) = (4096, 768, 50_257, 50_304);
    let zeros = |dtype, shape: &[usize]| Tensor::zeros(&device, dtype, shape).unwrap();
    let [hidden, dhidden] = [(); 2].map(|()| zeros(DType::BF16, &[n, d]));
    let [weight, dweight] = [(); 2].map(|()| zeros(DType::BF16, &[vp, d]));
    let bytes = linear_cross_entropy::forward_backward_workspace_bytes(&device, n, d, vp);
    let args = linear_cross_entropy::ForwardBackward {
        hidden: &hidden,
        weight: &weight,
        vocab,
        targets: &zeros(DType::I32, &[n]),
        ignore_index: -100,
        losses: &zeros(DType::F32, &[n]),
        dloss: 1.0,
        dhidden: &dhidden,
        dweight: &dweight,
        accumulate_dweight: false,
        workspace: &zeros(DType::U8, &[bytes]),
    };
    linear_cross_entropy::forward_backward(&device, &args).unwrap();
    device.synchronize().unwrap();
    // 128 x 128 x 32 in planes of 64 x 64, as a product has them: sixteen packs a unit, and two quads for each of sixteen tiles. Sums of a row are met by its other
    // unit's four times.
    for (kernel, wide) in [("units::sums_kernel", 16 + 32 + 4), ("units::gradients_kernel", 16 + 32)] {
        let [variables, loads, aligned, products, loaded, loops] = counts(2, kernel);
        assert_eq!((variables, loads, products, loops), (0, 16, 32, 1), "{kernel}");
        assert_eq!((loads, loaded), (aligned, wide), "{kernel}: what is not read by 16 bytes");
    }
}
