//! The case table of attention.

mod backward;
mod contract;
mod decode;
mod forward;
mod properties;
mod regressions;

use super::reference::{self, Sizes};
use super::{Backward, Forward, Mask, workspace_bytes};
use crate::testing::{Random, assert_close, poisoned, random, workspace};
use crate::{DType, Device, Tensor};

fn sizes(b: usize, heads: usize, t: usize, head: usize) -> Sizes {
    Sizes { b, heads, t, head }
}

/// The cases of specification 2.3: batch, heads, length, head size.
const SPECIFIED: [(usize, usize, usize, usize); 10] = [
    (2, 4, 16, 32),
    (1, 2, 7, 13),
    (2, 2, 8, 3),
    (1, 2, 8, 128),
    (2, 4, 1, 32),
    (1, 12, 64, 64),
    (1, 4, 9, 32),
    (1, 4, 17, 32),
    (4, 12, 64, 64),
    (1, 2, 5, 8),
];

/// `(atol, rtol)` of specification 2.3 for attention.
fn tolerance(dtype: DType) -> (f64, f64) {
    match dtype {
        DType::F32 => (1e-6, 1e-5),
        DType::F16 => (5e-3, 2e-2),
        DType::BF16 => (1.5e-2, 3.5e-2),
        other => unreachable!("{other} is not a float"),
    }
}

/// A call's tensors on a device and the exact values of its inputs.
struct Call {
    sizes: Sizes,
    device: Device,
    qkv: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dqkv: Tensor,
    dqkv_sums: Tensor,
    workspace: Tensor,
    exact_qkv: Vec<f64>,
    exact_dout: Vec<f64>,
}

impl Call {
    fn new(device: &Device, dtype: DType, sizes: Sizes, std: f32, seed: u64) -> Self {
        let mut rng = Random::new(seed);
        let Sizes { b, heads, t, .. } = sizes;
        let c = sizes.c();
        let (qkv, exact_qkv) = random(device, dtype, &[b, t, 3 * c], std, &mut rng);
        let (dout, exact_dout) = random(device, dtype, &[b, t, c], 1.0, &mut rng);
        Call {
            sizes,
            device: device.clone(),
            qkv,
            out: poisoned(device, dtype, &[b, t, c]),
            lse: poisoned(device, DType::F32, &[b, heads, t]),
            dout,
            dqkv: poisoned(device, dtype, &[b, t, 3 * c]),
            dqkv_sums: poisoned(device, dtype, &[3 * c]),
            workspace: workspace(device, workspace_bytes(device, b, t, c, heads)),
            exact_qkv,
            exact_dout,
        }
    }

    fn forward(&self) {
        let args = Forward {
            qkv: &self.qkv,
            heads: self.sizes.heads,
            mask: Mask::Causal,
            out: &self.out,
            lse: &self.lse,
            workspace: &self.workspace,
        };
        super::forward(&self.device, &args).unwrap();
    }

    fn backward(&self) {
        let args = Backward {
            qkv: &self.qkv,
            heads: self.sizes.heads,
            mask: Mask::Causal,
            out: &self.out,
            lse: &self.lse,
            dout: &self.dout,
            dqkv: &self.dqkv,
            dqkv_sums: Some((&self.dqkv_sums, false)),
            workspace: &self.workspace,
        };
        super::backward(&self.device, &args).unwrap();
    }

    fn name(&self) -> String {
        format!("{:?} {} on {}", self.sizes, self.qkv.dtype(), self.device.name())
    }

    #[track_caller]
    fn check_forward(&self, atol: f64, rtol: f64) {
        self.forward();
        let (out, lse) = reference::forward(self.sizes, &self.exact_qkv);
        assert_close(&format!("out of {}", self.name()), &self.out, &out, atol, rtol);
        assert_close(&format!("lse of {}", self.name()), &self.lse, &lse, 1e-5, 1e-6);
    }

    /// After a forward. The sum over up to `T` queries in `dk` and `dv` scales the absolute tolerance by the largest value.
    #[track_caller]
    fn check_backward(&self, atol: f64, rtol: f64) {
        let want = reference::backward(self.sizes, &self.exact_qkv, &self.exact_dout);
        self.backward();
        let largest = want.iter().fold(1.0f64, |m, x| m.max(x.abs()));
        assert_close(&format!("dqkv of {}", self.name()), &self.dqkv, &want, atol * largest, rtol);
        let width = 3 * self.sizes.c();
        let mut sums = vec![0.0; width];
        for row in want.chunks_exact(width) {
            sums.iter_mut().zip(row).for_each(|(s, x)| *s += x);
        }
        let rows = ((want.len() / width) as f64).sqrt();
        assert_close(
            &format!("dqkv_sums of {}", self.name()),
            &self.dqkv_sums,
            &sums,
            2.0 * rows * atol * largest,
            rtol,
        );
    }
}

fn bits(t: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; t.bytes()];
    t.read_bytes(0, &mut bytes).unwrap();
    bytes
}
