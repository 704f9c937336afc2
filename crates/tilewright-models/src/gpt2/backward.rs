//! The backward pass: the forward's ops in reverse, each gradient written exactly where the memory plan says.

use tilewright_core::Result;
use tilewright_ops::gelu::{self, Gelu};
use tilewright_ops::{Tensor, attention, embedding, layernorm, linear_cross_entropy, matmul};

use super::buffers::Gradients;
use super::forward::sum;
use super::{Gpt2, IGNORE_INDEX, ParamSet, Recompute, Replays, param};

impl Gpt2 {
    /// Loss and gradients of one micro-batch. Returns the sum of the row losses.
    ///
    /// Gradients are overwritten, or added to with `accumulate` (from the second micro-batch of a step on). `dloss` is the weight of each row
    /// in the step's loss: `1 / (B * T * micro-batches)`.
    pub fn forward_backward(&mut self, tokens: &[i32], targets: &[i32], accumulate: bool, dloss: f32) -> Result<f32> {
        self.train_state("gpt2.forward_backward")?;
        self.load(tokens, targets)?;
        let mut replays = self.replays.borrow_mut();
        let Replays { head, layers, .. } = &mut *replays;
        // A caller that changes the weight of a row all the time must not fill the memory with records.
        if head.len() > 8 {
            head.clear();
        }
        let first = head.entry((accumulate, dloss.to_bits())).or_default();
        first.run(&self.device, || self.forward_and_head(accumulate, dloss))?;
        // The losses come back while the rest of the backward pass runs.
        self.buffers.fetch_losses.start()?;
        layers[usize::from(accumulate)].run(&self.device, || self.layers_backward(accumulate))?;
        let mut losses = vec![0.0; tokens.len()];
        self.buffers.fetch_losses.finish(&mut losses)?;
        Ok(sum(&losses) as f32)
    }

    /// The forward pass, the losses, and the gradients of the head.
    fn forward_and_head(&self, accumulate: bool, dloss: f32) -> Result<()> {
        let state = self.train_state("gpt2.forward_backward")?;
        let b = &self.buffers;
        let d = b.grads.as_ref().expect("training buffers are planned with the training state");
        self.forward()?;
        linear_cross_entropy::forward_backward(
            &self.device,
            &linear_cross_entropy::ForwardBackward {
                hidden: &b.lnf,
                weight: &self.params.tensors[param::WTE],
                vocab: self.config.vocab_size,
                targets: &b.targets,
                ignore_index: IGNORE_INDEX,
                losses: &b.losses,
                dloss,
                dhidden: &d.narrow,
                dweight: &state.grads.tensors[param::WTE],
                accumulate_dweight: accumulate,
                workspace: &b.workspace,
            },
        )
    }

    /// The rest of the backward pass, from the gradient of `lnf` to that of the embeddings.
    fn layers_backward(&self, accumulate: bool) -> Result<()> {
        let state = self.train_state("gpt2.forward_backward")?;
        let b = &self.buffers;
        let d = b.grads.as_ref().expect("training buffers are planned with the training state");
        let g = &state.grads.tensors;
        self.layernorm_backward(
            d,
            &b.residual3.at(self.config.layers - 1)?,
            (&b.lnf_mean, &b.lnf_rstd),
            &self.params.tensors[param::LNFW],
            (&g[param::LNFW], &g[param::LNFB]),
            false,
            accumulate,
        )?;
        for l in (0..self.config.layers).rev() {
            self.mlp_backward(d, &state.grads, l, accumulate)?;
            self.attention_backward(d, &state.grads, l, accumulate)?;
        }
        embedding::backward(
            &self.device,
            &embedding::Backward {
                tokens: &b.tokens,
                dout: &d.residual.view(&b.encoded.shape())?,
                vocab: self.config.vocab_size,
                dwte: &g[param::WTE],
                dwpe: &g[param::WPE],
                accumulate_dwpe: accumulate,
                workspace: &b.workspace,
            },
        )
    }

    fn mlp_backward(&self, d: &Gradients, grads: &ParamSet, l: usize, accumulate: bool) -> Result<()> {
        let b = &self.buffers;
        let grad = |index: usize| grads.tensors[index].index(l);
        let fch = b.fch.at(l)?;
        let fch_gelu = b.fch_gelu.at(l)?;
        if self.options.recompute >= Recompute::Gelu {
            gelu::forward(&self.device, &gelu::Forward { kind: Gelu::Tanh, x: &fch, out: &fch_gelu })?;
        }
        self.linear_weight_backward(
            &d.residual,
            &fch_gelu,
            &grad(param::FCPROJW)?,
            &grad(param::FCPROJB)?,
            accumulate,
        )?;
        matmul::backward_input(
            &self.device,
            &matmul::BackwardInput {
                dout: &d.residual,
                weight: &self.weight(param::FCPROJW, l)?,
                gelu: Some((Gelu::Tanh, &fch)),
                dx: &d.hidden,
                accumulate: false,
            },
        )?;
        let residual2 = b.residual2.at(l)?;
        let stats = (&b.ln2_mean.at(l)?, &b.ln2_rstd.at(l)?);
        let ln2 = b.ln2.at(l)?;
        self.recompute_layernorm(&residual2, stats, (param::LN2W, param::LN2B), l, &ln2)?;
        self.linear_weight_backward(&d.hidden, &ln2, &grad(param::FCW)?, &grad(param::FCB)?, accumulate)?;
        self.linear_input_backward(&d.hidden, &self.weight(param::FCW, l)?, &d.narrow)?;
        self.layernorm_backward(
            d,
            &residual2,
            stats,
            &self.weight(param::LN2W, l)?,
            (&grad(param::LN2W)?, &grad(param::LN2B)?),
            true,
            accumulate,
        )
    }

    fn attention_backward(&self, d: &Gradients, grads: &ParamSet, l: usize, accumulate: bool) -> Result<()> {
        let b = &self.buffers;
        let grad = |index: usize| grads.tensors[index].index(l);
        let atty = b.atty.at(l)?;
        self.linear_weight_backward(&d.residual, &atty, &grad(param::ATTPROJW)?, &grad(param::ATTPROJB)?, accumulate)?;
        self.linear_input_backward(&d.residual, &self.weight(param::ATTPROJW, l)?, &d.narrow)?;
        attention::backward(
            &self.device,
            &attention::Backward {
                qkv: &b.qkv.at(l)?,
                heads: self.config.heads,
                mask: attention::Mask::Causal,
                out: &atty,
                lse: &b.att_lse.at(l)?,
                dout: &d.narrow.view(&atty.shape())?,
                dqkv: &d.qkv,
                workspace: &b.workspace,
            },
        )?;
        let input = if l == 0 { b.encoded.view(&b.branch.shape())? } else { b.residual3.at(l - 1)? };
        let stats = (&b.ln1_mean.at(l)?, &b.ln1_rstd.at(l)?);
        let ln1 = b.ln1.at(l)?;
        self.recompute_layernorm(&input, stats, (param::LN1W, param::LN1B), l, &ln1)?;
        self.linear_weight_backward(&d.qkv, &ln1, &grad(param::QKVW)?, &grad(param::QKVB)?, accumulate)?;
        self.linear_input_backward(&d.qkv, &self.weight(param::QKVW, l)?, &d.narrow)?;
        self.layernorm_backward(
            d,
            &input,
            stats,
            &self.weight(param::LN1W, l)?,
            (&grad(param::LN1W)?, &grad(param::LN1B)?),
            true,
            accumulate,
        )
    }

    fn recompute_layernorm(
        &self,
        sum: &Tensor,
        (mean, rstd): (&Tensor, &Tensor),
        (weight, bias): (usize, usize),
        layer: usize,
        out: &Tensor,
    ) -> Result<()> {
        if self.options.recompute < Recompute::GeluAndLayernorm {
            return Ok(());
        }
        let (weight, bias) = (&self.weight(weight, layer)?, &self.weight(bias, layer)?);
        layernorm::recompute(&self.device, &layernorm::Recompute { sum, weight, bias: Some(bias), mean, rstd, out })
    }

    fn linear_weight_backward(
        &self,
        dout: &Tensor,
        x: &Tensor,
        dweight: &Tensor,
        dbias: &Tensor,
        accumulate: bool,
    ) -> Result<()> {
        matmul::backward_weight(
            &self.device,
            &matmul::BackwardWeight { dout, x, dweight, dbias: Some(dbias), accumulate },
        )
    }

    fn linear_input_backward(&self, dout: &Tensor, weight: &Tensor, dx: &Tensor) -> Result<()> {
        matmul::backward_input(&self.device, &matmul::BackwardInput { dout, weight, gelu: None, dx, accumulate: false })
    }

    /// From the gradient of a layernorm's output (in `narrow`) to that of the residual stream.
    fn layernorm_backward(
        &self,
        d: &Gradients,
        sum: &Tensor,
        (mean, rstd): (&Tensor, &Tensor),
        weight: &Tensor,
        (dweight, dbias): (&Tensor, &Tensor),
        accumulate_dx: bool,
        accumulate_params: bool,
    ) -> Result<()> {
        layernorm::backward(
            &self.device,
            &layernorm::Backward {
                dout: &d.narrow,
                sum,
                weight,
                mean,
                rstd,
                dx: &d.residual,
                accumulate_dx,
                dweight,
                dbias: Some(dbias),
                accumulate_params,
                workspace: &self.buffers.workspace,
            },
        )
    }
}
