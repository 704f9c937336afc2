//! What Metal gets: matrix instructions in every kernel that is named after them, on elements of the factors' type.

use crate::runtime::gpu::metal;
use crate::{DType, Device, Tensor, attention, matmul};

/// Launches what a training step would on the recording device, which keeps no memory that rows of an encoder could be found in.
fn launch(device: &Device) {
    let t = |shape: &[usize]| Tensor::zeros(device, DType::F16, shape).unwrap();
    let f = |shape: &[usize]| Tensor::zeros(device, DType::F32, shape).unwrap();
    let (m, n, k) = (130, 72, 40);
    let (x, weight, out) = (t(&[m, k]), t(&[n, k]), t(&[m, n]));
    let args = matmul::Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out: &out };
    matmul::forward(device, &args).unwrap();
    let (activation, dx_sums) = (None, None);
    let args = matmul::BackwardInput {
        dout: &out,
        weight: &weight,
        gelu: None,
        dx: &x,
        accumulate: false,
        activation,
        dx_sums,
    };
    matmul::backward_input(device, &args).unwrap();
    let args = matmul::BackwardWeight { dout: &out, x: &x, dweight: &weight, dbias: None, accumulate: false };
    matmul::backward_weight(device, &args).unwrap();
    let (b, tokens, heads, head) = (1, 70, 2, 64);
    let c = heads * head;
    let (qkv, out, dout, dqkv) =
        (t(&[b, tokens, 3 * c]), t(&[b, tokens, c]), t(&[b, tokens, c]), t(&[b, tokens, 3 * c]));
    let lse = f(&[b, heads, tokens]);
    let bytes = attention::workspace_bytes(device, b, tokens, c, heads);
    let workspace = Tensor::zeros(device, DType::U8, &[bytes]).unwrap();
    let mask = attention::Mask::Causal;
    let (qkv, out, lse, workspace) = (&qkv, &out, &lse, &workspace);
    attention::forward(device, &attention::Forward { qkv, heads, mask, out, lse, workspace }).unwrap();
    let (dout, dqkv, dqkv_sums) = (&dout, &dqkv, None);
    let args = attention::Backward { qkv, heads, mask, out, lse, dout, dqkv, dqkv_sums, workspace };
    attention::backward(device, &args).unwrap();
}

#[test]
fn metal_text_of_16_bit_kernels_multiplies_on_the_matrix_units() {
    let device = Device::Gpu(metal::open());
    launch(&device);
    device.synchronize().unwrap();
    let all = metal::compiled();
    for kernel in ["matrix_kernel", "units_forward_kernel", "units_queries_kernel", "units_keys_kernel"] {
        let of_kernel = |name: &&String| name.split(' ').next().unwrap().contains(kernel);
        let found: Vec<_> = all.iter().filter(|(name, _)| of_kernel(name)).collect();
        assert!(!found.is_empty(), "{kernel} was not launched");
        for (name, kernel) in found {
            let source = &kernel.source;
            for word in ["simdgroup_multiply_accumulate", "simdgroup_load", "simdgroup_store"] {
                assert!(source.contains(word), "{name} lacks {word}:\n{source}");
            }
            // Fragments of halves are loaded through pointers to halves: Metal has no other.
            let loads = source.lines().filter(|line| line.contains("simdgroup_load"));
            for line in loads {
                assert!(line.contains("threadgroup half"), "{name}: {line}");
            }
            assert!(kernel.shared_bytes <= 32 << 10, "{name}: {} bytes of threadgroup memory", kernel.shared_bytes);
        }
    }
}
