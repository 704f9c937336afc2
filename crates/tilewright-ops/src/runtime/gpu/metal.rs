//! Metal without a Mac: a device that computes nothing and keeps the Metal source of every kernel that is launched on it.
//!
//! Tests launch each op on it and hold what comes out to the limits of an Apple GPU and to `metal.txt`, which lists every kernel.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};

use cubecl::Compiler;
use cubecl::client::Client;
use cubecl::ir::{DeviceProperties, FloatKind};
use cubecl::prelude::*;
use cubecl_wgpu::MslCompiler;

use super::Gpu;
use super::adapters::Api;
use super::recorder::{self, Target};

/// What is known of one compiled kernel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Compiled {
    pub(crate) source: String,
    pub(crate) shared_bytes: usize,
}

/// What stands before the reason where there is no source.
const REFUSED: &str = "cannot be compiled: ";

/// Of each recording device.
static COMPILED: Mutex<BTreeMap<u16, BTreeMap<String, Compiled>>> = Mutex::new(BTreeMap::new());

/// Every kernel that was launched on [`open`]'s device so far, by a name that says what it is specialised for.
pub(crate) fn compiled() -> BTreeMap<String, Compiled> {
    compiled_by(0)
}

fn compiled_by(number: u16) -> BTreeMap<String, Compiled> {
    COMPILED.lock().unwrap_or_else(PoisonError::into_inner).get(&number).cloned().unwrap_or_default()
}

/// Opens a recording device with the features of an Apple GPU (M1 and newer).
pub(crate) fn open() -> Rc<Gpu> {
    open_number(0)
}

/// One of several, so that a test sees what it has launched itself.
fn open_number(number: u16) -> Rc<Gpu> {
    static OPENED: Mutex<BTreeMap<u16, Client>> = Mutex::new(BTreeMap::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    recorder::open::<Msl>(opened.entry(number).or_insert_with(|| recorder::client::<Msl>(number)).clone())
}

/// An Apple GPU, M1 or newer, as the library sees it.
pub(super) fn properties() -> DeviceProperties {
    recorder::properties("Metal source", 32 << 10, [FloatKind::F16, FloatKind::F32], 8)
}

struct Msl;

impl Target for Msl {
    const RUNTIME: &'static str = "wgpu<msl>";
    const API: Api = Api::Metal;

    fn properties() -> DeviceProperties {
        properties()
    }

    fn keep(number: u16, kernel: Box<dyn CubeKernel>) {
        let name = format!("{} {:?}", kernel.name(), kernel.id());
        let definition = kernel.define();
        let options = <MslCompiler as Compiler>::CompilationOptions::default();
        let compiled = match MslCompiler::default().compile(definition, &options) {
            Ok(text) => Compiled { source: text.source.clone(), shared_bytes: text.shared_memory_size },
            Err(error) => Compiled { source: format!("{REFUSED}{error}"), shared_bytes: 0 },
        };
        COMPILED.lock().unwrap_or_else(PoisonError::into_inner).entry(number).or_default().insert(name, compiled);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gelu::{self, Gelu};
    use crate::testing::FLOATS;
    use crate::{DType, Device, Tensor};

    fn zeros(device: &Device, dtype: DType, shape: &[usize]) -> Tensor {
        Tensor::zeros(device, dtype, shape).unwrap()
    }

    /// The device of [`launch_all`], on which nothing else is launched.
    const LISTED: u16 = 1;

    /// Launches every kernel of every op in every storage type, with what it can be specialised for.
    fn launch_all() {
        let device = Device::Gpu(open_number(LISTED));
        for dtype in FLOATS {
            let t = |shape: &[usize]| zeros(&device, dtype, shape);
            let f = |shape: &[usize]| zeros(&device, DType::F32, shape);
            let ids = |shape: &[usize]| zeros(&device, DType::I32, shape);
            for kind in [Gelu::Tanh, Gelu::Erf] {
                gelu::forward(&device, &gelu::Forward { kind, x: &t(&[8]), out: &t(&[8]) }).unwrap();
                gelu::backward(&device, &gelu::Backward { kind, x: &t(&[8]), dout: &t(&[8]), dx: &t(&[8]) }).unwrap();
            }
            let table = t(&[4, 8]);
            crate::gather::forward(
                &device,
                &crate::gather::Forward { table: &table, index: &ids(&[3]), out: &f(&[3, 8]) },
            )
            .unwrap();
            let rope = crate::rope::Forward { x: &t(&[3, 8]), heads: 2, positions: &ids(&[3]), table: &f(&[4, 4]) };
            crate::rope::forward(&device, &rope).unwrap();
            embedding(&device, dtype);
            layernorm(&device, dtype, 8);
            layernorm(&device, dtype, 5);
            products(&device, dtype);
            attention(&device, dtype);
            let tensors = [t(&[8])];
            crate::global_norm::forward(&device, &crate::global_norm::Forward { tensors: &tensors, out: &f(&[1]) })
                .unwrap();
            adamw(&device, dtype, 8);
            adamw(&device, dtype, 5);
            head(&device, dtype);
            encoder(&device, dtype);
        }
        let f = |shape: &[usize]| zeros(&device, DType::F32, shape);
        let ids = |shape: &[usize]| zeros(&device, DType::I32, shape);
        let (states, firsts, logits, starts, out) = (&f(&[2, 8]), &ids(&[1]), &f(&[3]), &ids(&[2]), &f(&[1, 12]));
        let args = crate::option_features::Forward { states, firsts, logits, starts, out };
        crate::option_features::forward(&device, &args).unwrap();
        device.synchronize().unwrap();
    }

    fn embedding(device: &Device, dtype: DType) {
        use crate::embedding::{Backward, Forward, backward, backward_workspace_bytes, forward};
        let t = |shape: &[usize]| zeros(device, dtype, shape);
        // Ids of two digits, positions of two chunks.
        let (tokens, wte, wpe) = (zeros(device, DType::I32, &[2, 20]), t(&[50, 8]), t(&[20, 8]));
        let out = t(&[2, 20, 8]);
        forward(device, &Forward { tokens: &tokens, wte: &wte, wpe: &wpe, vocab: 50, position: 0, out: &out }).unwrap();
        let workspace = zeros(device, DType::U8, &[backward_workspace_bytes(device, 2, 20)]);
        for accumulate_dwpe in [false, true] {
            let args = Backward {
                tokens: &tokens,
                dout: &out,
                vocab: 50,
                dwte: &wte,
                dwpe: &wpe,
                accumulate_dwpe,
                workspace: &workspace,
            };
            backward(device, &args).unwrap();
        }
    }

    /// Rows of whole packs, and others.
    fn layernorm(device: &Device, dtype: DType, c: usize) {
        use crate::layernorm::*;
        let t = |shape: &[usize]| zeros(device, dtype, shape);
        let (x, weight, bias, out, branch, sum) = (t(&[3, c]), t(&[c]), t(&[c]), t(&[3, c]), t(&[3, c]), t(&[3, c]));
        let (mean, rstd) = (zeros(device, DType::F32, &[3]), zeros(device, DType::F32, &[3]));
        for bias in [None, Some(&bias)] {
            for residual in [false, true] {
                let residual = residual.then_some(Residual { branch: &branch, sum: &sum });
                let args =
                    Forward { x: &x, residual, weight: &weight, bias, eps: 1e-5, out: &out, mean: &mean, rstd: &rstd };
                forward(device, &args).unwrap();
            }
            recompute(device, &Recompute { sum: &sum, weight: &weight, bias, mean: &mean, rstd: &rstd, out: &out })
                .unwrap();
        }
        let workspace = zeros(device, DType::U8, &[backward_workspace_bytes(device, 3, c)]);
        for accumulate in [false, true] {
            let args = Backward {
                dout: &out,
                sum: &sum,
                weight: &weight,
                mean: &mean,
                rstd: &rstd,
                dx: &x,
                accumulate_dx: accumulate,
                dweight: &t(&[c]),
                dbias: Some(&bias),
                accumulate_params: accumulate,
                dx_sums: None,
                again: None,
                workspace: &workspace,
            };
            backward(device, &args).unwrap();
        }
    }

    fn products(device: &Device, dtype: DType) {
        use crate::matmul::*;
        let t = |shape: &[usize]| zeros(device, dtype, shape);
        let (x, weight, bias, out, pre) = (t(&[3, 8]), t(&[5, 8]), t(&[5]), t(&[3, 5]), t(&[3, 5]));
        for (gelu, pre_gelu) in [(None, None), (Some(Gelu::Tanh), Some(&pre)), (Some(Gelu::Erf), None)] {
            forward(device, &Forward { x: &x, weight: &weight, bias: Some(&bias), gelu, pre_gelu, out: &out }).unwrap();
        }
        for accumulate in [false, true] {
            for gelu in [None, Some((Gelu::Tanh, &t(&[3, 8])))] {
                backward_input(
                    device,
                    &BackwardInput {
                        dout: &out,
                        weight: &weight,
                        gelu,
                        dx: &x,
                        accumulate,
                        activation: None,
                        dx_sums: None,
                    },
                )
                .unwrap();
            }
            let args = BackwardWeight { dout: &out, x: &x, dweight: &weight, dbias: Some(&bias), accumulate };
            backward_weight(device, &args).unwrap();
            let args = BackwardWeight { dout: &x, x: &out, dweight: &t(&[8, 5]), dbias: Some(&t(&[8])), accumulate };
            backward_weight(device, &args).unwrap();
        }
        // What only a large GPU's products get.
        let Device::Gpu(core) = device else { unreachable!("a recorder is a GPU") };
        let (a, b, out) = (t(&[256, 16]), t(&[256, 16]), t(&[16, 16]));
        for accumulate in [false, true] {
            let plain = gpu::Product::plain((&a, 1, 16), (&b, 1, 16), (&out, 16));
            let product = gpu::Product { accumulate, ..plain };
            let way = gpu::matrix::Way::of(core, &product, [16, 16, 256]);
            let Some(way) = way.and_then(|way| way.choose(core, 16, 16).map(|blocks| (way, blocks))) else { continue };
            product.in_parts(device, core, "matmul.parts", [16, 16, 256], way, 128).unwrap();
        }
        use crate::linear::{self, Activation, Layout, Weight};
        for activation in [Activation::None, Activation::Gelu(Gelu::Erf), Activation::Relu, Activation::Geglu] {
            let gated = activation == Activation::Geglu;
            let layout = if gated { Layout::Gated } else { Layout::Plain };
            let weight = Weight::pack(device, &zeros(device, DType::F32, &[6, 8]), dtype, layout).unwrap();
            let (x, out) =
                (zeros(device, DType::F32, &[3, 8]), zeros(device, DType::F32, &[3, if gated { 3 } else { 6 }]));
            for residual in [None, Some(&out)] {
                let args = linear::Forward { x: &x, weight: &weight, bias: None, activation, residual, out: &out };
                linear::forward(device, &args).unwrap();
            }
        }
    }

    fn attention(device: &Device, dtype: DType) {
        use crate::attention::*;
        let t = |shape: &[usize]| zeros(device, dtype, shape);
        for head in [64, 128, 256] {
            let (qkv, out, lse) = (t(&[1, 3, 3 * head]), t(&[1, 3, head]), zeros(device, DType::F32, &[1, 1, 3]));
            let workspace = zeros(device, DType::U8, &[workspace_bytes(device, 1, 3, head, 1)]);
            let (mask, heads) = (Mask::Causal, 1);
            forward(device, &Forward { qkv: &qkv, heads, mask, out: &out, lse: &lse, workspace: &workspace }).unwrap();
            let (dqkv, dout) = (t(&[1, 3, 3 * head]), t(&[1, 3, head]));
            let args = Backward {
                qkv: &qkv,
                heads,
                mask,
                out: &out,
                lse: &lse,
                dout: &dout,
                dqkv: &dqkv,
                dqkv_sums: None,
                workspace: &workspace,
            };
            backward(device, &args).unwrap();
            let cache = || t(&[1, 4, head]);
            let args = Decode {
                qkv: &t(&[1, 3 * head]),
                heads,
                position: 2,
                k_cache: &cache(),
                v_cache: &cache(),
                out: &t(&[1, head]),
            };
            decode(device, &args).unwrap();
        }
    }

    fn encoder(device: &Device, dtype: DType) {
        use crate::encoder_attention::*;
        let Device::Gpu(gpu) = device else { unreachable!("a recording device") };
        let t = |shape: &[usize]| zeros(device, dtype, shape);
        let ids = |n: usize| zeros(device, DType::I32, &[n]);
        let (row_starts, positions, option_ids, tokens) = (ids(2), ids(3), ids(3), ids(2));
        let selected = Selected { starts: &row_starts, tokens: &tokens };
        for head in [64, 128] {
            let workspace = zeros(device, DType::U8, &[workspace_bytes(device, 1, 1, head)]);
            let (qkv, q) = (t(&[3, 3 * head]), t(&[2, head]));
            let given = [(None, None, None), (None, Some(2), None), (Some(selected), Some(2), Some(&positions))];
            for (selected, window, positions) in given {
                for option_ids in [None, Some(&option_ids)] {
                    let queries = if selected.is_some() { &q } else { &qkv };
                    let args = Forward {
                        q: queries,
                        kv: &qkv,
                        rotation: None,
                        longest: None,
                        key_column: head,
                        heads: 1,
                        row_starts: &row_starts,
                        selected,
                        window,
                        positions,
                        option_ids,
                        out: &t(&[queries.shape().as_matrix().0, head]),
                        workspace: &workspace,
                    };
                    // Past the checks: the recording device would read no valid lengths.
                    gpu::forward(gpu, &args, queries.shape().as_matrix().0, head).unwrap();
                }
            }
        }
    }

    fn adamw(device: &Device, dtype: DType, n: usize) {
        use crate::adamw::*;
        let f = |shape: &[usize]| zeros(device, DType::F32, shape);
        let (param, master, norm) = (zeros(device, dtype, &[n]), f(&[n]), f(&[1]));
        for master in [None, Some(&master)] {
            let args = Update {
                param: &param,
                master,
                grad: &zeros(device, dtype, &[n]),
                m: &f(&[n]),
                v: &f(&[n]),
                lr: 1e-3,
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                weight_decay: 0.1,
                step: 1,
                grad_scale: 1.0,
                clip: Some(Clip { norm: &norm, max_norm: 1.0 }),
                rounding: Rounding::Stochastic { seed: 1 },
                layers: 1,
                zero_grad: true,
            };
            update(device, &args).unwrap();
        }
        round(device, &Round { master: &master, param: &param, rounding: Rounding::Nearest, layers: 1 }).unwrap();
    }

    fn head(device: &Device, dtype: DType) {
        use crate::linear_cross_entropy::*;
        let t = |shape: &[usize]| zeros(device, dtype, shape);
        let f = |shape: &[usize]| zeros(device, DType::F32, shape);
        let (hidden, weight, targets) = (t(&[3, 8]), t(&[5, 8]), zeros(device, DType::I32, &[3]));
        let bytes = forward_backward_workspace_bytes(device, 3, 8, 5);
        let args = ForwardBackward {
            hidden: &hidden,
            weight: &weight,
            vocab: 5,
            targets: &targets,
            ignore_index: -100,
            losses: &f(&[3]),
            dloss: 1.0,
            dhidden: &t(&[3, 8]),
            dweight: &t(&[5, 8]),
            accumulate_dweight: false,
            workspace: &zeros(device, DType::U8, &[bytes]),
        };
        forward_backward(device, &args).unwrap();
    }

    /// One line a kernel: its name, in how many variants it was compiled, the most threadgroup memory of one.
    fn summary(all: &BTreeMap<String, Compiled>) -> String {
        let mut kernels: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for (name, kernel) in all {
            let name = name.split(' ').next().unwrap().trim_start_matches("tilewright_ops::");
            let entry = kernels.entry(name.rsplit_once("::").map_or(name, |(module, _)| module)).or_default();
            *entry = (entry.0 + 1, entry.1.max(kernel.shared_bytes));
        }
        kernels.iter().map(|(name, (variants, shared))| format!("{name} {variants} {shared}\n")).collect()
    }

    #[test]
    fn every_kernel_has_metal_source_within_the_limits_of_an_apple_gpu() {
        launch_all();
        let all = compiled_by(LISTED);
        if let Some(folder) = std::env::var_os("TILEWRIGHT_METAL_OUT") {
            std::fs::create_dir_all(&folder).unwrap();
            for (i, (name, c)) in all.iter().enumerate() {
                std::fs::write(
                    std::path::Path::new(&folder).join(format!("{i:03}.metal")),
                    format!("// {name}\n{}", c.source),
                )
                .unwrap();
            }
        }
        for (name, kernel) in &all {
            let source = &kernel.source;
            assert!(!source.starts_with(REFUSED), "{name}: {source}");
            assert!(source.contains("[[kernel]]") || source.contains("kernel void"), "{name}: {source}");
            assert!(kernel.shared_bytes <= 32 << 10, "{name}: {} bytes of threadgroup memory", kernel.shared_bytes);
            assert!(!source.contains("double"), "{name}: 64-bit floats");
        }
        let listed = include_str!("metal.txt");
        let now = summary(&all);
        assert!(now == listed, "runtime/gpu/metal.txt should be:\n{now}");
        // Every op has its kernels.
        for op in [
            "gelu",
            "gather",
            "rope",
            "embedding",
            "layernorm",
            "matmul",
            "linear",
            "attention",
            "global_norm",
            "adamw",
            "linear_cross_entropy",
            "encoder_attention",
            "option_features",
        ] {
            assert!(all.keys().any(|name| name.contains(&format!("::{op}::gpu::"))), "{op} has no kernel");
        }
    }
}
