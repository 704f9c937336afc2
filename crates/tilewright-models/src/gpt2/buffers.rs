//! The activations and workspaces of one micro-batch, planned once.

use tilewright_core::gpt2::Gpt2Config;
use tilewright_core::{DType, Result};
use tilewright_ops::{
    Arena, Device, Download, Plan, Slot, Tensor, Upload, attention, embedding, layernorm, linear_cross_entropy,
};

use super::{Options, Recompute};

/// An activation of every layer: one a layer where the backward needs it, else one buffer that the layers share.
pub(crate) struct Stack {
    tensor: Tensor,
    shared: bool,
}

impl Stack {
    pub(crate) fn at(&self, layer: usize) -> Result<Tensor> {
        self.tensor.index(if self.shared { 0 } else { layer })
    }
}

/// What only the backward pass writes.
pub(crate) struct Gradients {
    /// `(N, C)`: gradient of the residual stream.
    pub(crate) residual: Tensor,
    /// `(N, C)`: gradient at the output of a layernorm or of the attention.
    pub(crate) narrow: Tensor,
    /// `(N, 4C)`: gradient at the MLP's hidden layer.
    pub(crate) hidden: Tensor,
    /// `(B, T, 3C)`: gradient of q, k, v; shares `hidden`'s memory, since the two are never alive together.
    pub(crate) qkv: Tensor,
}

/// See the module's words. `N = B * T`.
pub(crate) struct Buffers {
    pub(crate) arenas: Vec<Arena>,
    /// `(B, T)` i32.
    pub(crate) tokens: Tensor,
    /// `(B, T)` i32.
    pub(crate) targets: Tensor,
    /// The host's side of the two.
    pub(crate) send_tokens: Upload,
    pub(crate) send_targets: Upload,
    /// `(N)` f32.
    pub(crate) losses: Tensor,
    /// The host's side.
    pub(crate) fetch_losses: Download,
    /// `(N)` f32: log-sum-exp of an evaluation.
    pub(crate) lse_head: Tensor,
    /// `(1)` f32.
    pub(crate) norm: Tensor,
    pub(crate) fetch_norm: Download,
    /// `(B, T, C)`.
    pub(crate) encoded: Tensor,
    pub(crate) ln1: Stack,
    pub(crate) ln1_mean: Stack,
    pub(crate) ln1_rstd: Stack,
    pub(crate) qkv: Stack,
    pub(crate) atty: Stack,
    pub(crate) att_lse: Stack,
    /// The stream after the attention of each layer.
    pub(crate) residual2: Stack,
    pub(crate) ln2: Stack,
    pub(crate) ln2_mean: Stack,
    pub(crate) ln2_rstd: Stack,
    /// The argument of GELU.
    pub(crate) fch: Stack,
    pub(crate) fch_gelu: Stack,
    /// The stream after each layer.
    pub(crate) residual3: Stack,
    /// `(N, C)`: output of the attention's or the MLP's projection, until the next layernorm adds it to the stream.
    pub(crate) branch: Tensor,
    pub(crate) lnf: Tensor,
    pub(crate) lnf_mean: Tensor,
    pub(crate) lnf_rstd: Tensor,
    pub(crate) grads: Option<Gradients>,
    pub(crate) workspace: Tensor,
}

impl Buffers {
    pub(crate) fn allocate(device: &Device, config: &Gpt2Config, options: &Options) -> Result<Self> {
        let Gpt2Config { layers: l, channels: c, heads: h, padded_vocab_size: vp, .. } = *config;
        let Options { batch: b, seq_len: t, dtype, train, recompute, .. } = *options;
        let n = b * t;

        let mut plan = Plan::new("activations");
        let stack = |plan: &mut Plan, name: &str, keep: bool, dtype: DType, dims: &[usize]| {
            let shared = !(train && keep);
            let dims: Vec<_> = std::iter::once(if shared { 1 } else { l }).chain(dims.iter().copied()).collect();
            (plan.add(name, dtype, &dims), shared)
        };
        let tokens = plan.add("tokens", DType::I32, &[b, t]);
        let targets = plan.add("targets", DType::I32, &[b, t]);
        let losses = plan.add("losses", DType::F32, &[n]);
        let lse_head = plan.add("head lse", DType::F32, &[n]);
        let norm = plan.add("gradient norm", DType::F32, &[1]);
        let encoded = plan.add("encoded", dtype, &[b, t, c]);
        let keep_ln = recompute < Recompute::GeluAndLayernorm;
        let ln1 = stack(&mut plan, "ln1", keep_ln, dtype, &[n, c]);
        let ln1_mean = stack(&mut plan, "ln1 mean", true, DType::F32, &[n]);
        let ln1_rstd = stack(&mut plan, "ln1 rstd", true, DType::F32, &[n]);
        let qkv = stack(&mut plan, "qkv", true, dtype, &[b, t, 3 * c]);
        let atty = stack(&mut plan, "attention", true, dtype, &[b, t, c]);
        let att_lse = stack(&mut plan, "attention lse", true, DType::F32, &[b, h, t]);
        let residual2 = stack(&mut plan, "residual after attention", true, dtype, &[n, c]);
        let ln2 = stack(&mut plan, "ln2", keep_ln, dtype, &[n, c]);
        let ln2_mean = stack(&mut plan, "ln2 mean", true, DType::F32, &[n]);
        let ln2_rstd = stack(&mut plan, "ln2 rstd", true, DType::F32, &[n]);
        let fch = stack(&mut plan, "mlp hidden", true, dtype, &[n, 4 * c]);
        let fch_gelu = stack(&mut plan, "mlp gelu", recompute < Recompute::Gelu, dtype, &[n, 4 * c]);
        let residual3 = stack(&mut plan, "residual after mlp", true, dtype, &[n, c]);
        let branch = plan.add("branch", dtype, &[n, c]);
        let lnf = plan.add("lnf", dtype, &[n, c]);
        let lnf_mean = plan.add("lnf mean", DType::F32, &[n]);
        let lnf_rstd = plan.add("lnf rstd", DType::F32, &[n]);
        let activations = Arena::allocate(device, plan)?;

        let mut plan = Plan::new("activation gradients");
        let gradient_slots = train.then(|| {
            let mut add = |name: &str, dims: &[usize]| plan.add(name, dtype, dims);
            [add("d residual", &[n, c]), add("d layernorm", &[n, c]), add("d mlp hidden", &[n, 4 * c])]
        });
        let gradients = Arena::allocate(device, plan)?;
        let grads = match gradient_slots {
            Some([residual, narrow, hidden]) => {
                let hidden = gradients.tensor(hidden);
                let qkv = hidden.slice(0, &[b, t, 3 * c])?;
                Some(Gradients { residual: gradients.tensor(residual), narrow: gradients.tensor(narrow), hidden, qkv })
            }
            None => None,
        };

        let mut bytes = attention::workspace_bytes(device, b, t, c, h)
            .max(linear_cross_entropy::forward_workspace_bytes(device, n, c, vp));
        if train {
            bytes = bytes
                .max(linear_cross_entropy::forward_backward_workspace_bytes(device, n, c, vp))
                .max(layernorm::backward_workspace_bytes(device, n, c))
                .max(embedding::backward_workspace_bytes(device, b, t));
        }
        let mut plan = Plan::new("workspace");
        let workspace = plan.add("workspace", DType::U8, &[bytes]);
        let workspaces = Arena::allocate(device, plan)?;

        let one = |slot: Slot| activations.tensor(slot);
        let many = |(slot, shared): (Slot, bool)| Stack { tensor: activations.tensor(slot), shared };
        Ok(Buffers {
            send_tokens: Upload::new(&one(tokens))?,
            send_targets: Upload::new(&one(targets))?,
            fetch_losses: Download::new(&one(losses))?,
            tokens: one(tokens),
            targets: one(targets),
            losses: one(losses),
            lse_head: one(lse_head),
            norm: one(norm),
            fetch_norm: Download::new(&one(norm))?,
            encoded: one(encoded),
            ln1: many(ln1),
            ln1_mean: many(ln1_mean),
            ln1_rstd: many(ln1_rstd),
            qkv: many(qkv),
            atty: many(atty),
            att_lse: many(att_lse),
            residual2: many(residual2),
            ln2: many(ln2),
            ln2_mean: many(ln2_mean),
            ln2_rstd: many(ln2_rstd),
            fch: many(fch),
            fch_gelu: many(fch_gelu),
            residual3: many(residual3),
            branch: one(branch),
            lnf: one(lnf),
            lnf_mean: one(lnf_mean),
            lnf_rstd: one(lnf_rstd),
            grads,
            workspace: workspaces.tensor(workspace),
            arenas: vec![activations, gradients, workspaces],
        })
    }
}
