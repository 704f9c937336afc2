//! The backward pass: the forward's ops in reverse, each gradient written exactly where the memory plan says.

use tilewright_core::Result;
use tilewright_ops::gelu::Gelu;
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
        let last = self.config.layers - 1;
        self.layernorm_backward(
            d,
            &b.residual3.at(last)?,
            (&b.lnf_mean, &b.lnf_rstd),
            &self.params.tensors[param::LNFW],
            (&g[param::LNFW], &g[param::LNFB]),
            // The gradient of the stream is that of the bias behind the last projection that joined it.
            Some(&g[param::FCPROJB].index(last)?),
            None,
            (false, accumulate),
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
        let again = self.options.recompute >= Recompute::Gelu;
        matmul::backward_input(
            &self.device,
            &matmul::BackwardInput {
                dout: &d.residual,
                weight: &self.weight(param::FCPROJW, l)?,
                gelu: Some((Gelu::Tanh, &fch)),
                dx: &d.hidden,
                accumulate: false,
                activation: again.then_some(&fch_gelu),
                dx_sums: Some((&grad(param::FCB)?, accumulate)),
            },
        )?;
        self.linear_weight_backward(&d.residual, &fch_gelu, &grad(param::FCPROJW)?, accumulate)?;
        self.linear_input_backward(&d.hidden, &self.weight(param::FCW, l)?, &d.narrow)?;
        let ln2 = b.ln2.at(l)?;
        self.layernorm_backward(
            d,
            &b.residual2.at(l)?,
            (&b.ln2_mean.at(l)?, &b.ln2_rstd.at(l)?),
            &self.weight(param::LN2W, l)?,
            (&grad(param::LN2W)?, &grad(param::LN2B)?),
            Some(&grad(param::ATTPROJB)?),
            Some((&self.weight(param::LN2B, l)?, &ln2)),
            (true, accumulate),
        )?;
        self.linear_weight_backward(&d.hidden, &ln2, &grad(param::FCW)?, accumulate)
    }

    fn attention_backward(&self, d: &Gradients, grads: &ParamSet, l: usize, accumulate: bool) -> Result<()> {
        let b = &self.buffers;
        let grad = |index: usize| grads.tensors[index].index(l);
        let atty = b.atty.at(l)?;
        self.linear_weight_backward(&d.residual, &atty, &grad(param::ATTPROJW)?, accumulate)?;
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
                dqkv_sums: Some((&grad(param::QKVB)?, accumulate)),
                workspace: &b.workspace,
            },
        )?;
        let input = if l == 0 { b.encoded.view(&b.branch.shape())? } else { b.residual3.at(l - 1)? };
        self.linear_input_backward(&d.qkv, &self.weight(param::QKVW, l)?, &d.narrow)?;
        let ln1 = b.ln1.at(l)?;
        let below = if l == 0 { None } else { Some(grads.tensors[param::FCPROJB].index(l - 1)?) };
        self.layernorm_backward(
            d,
            &input,
            (&b.ln1_mean.at(l)?, &b.ln1_rstd.at(l)?),
            &self.weight(param::LN1W, l)?,
            (&grad(param::LN1W)?, &grad(param::LN1B)?),
            below.as_ref(),
            Some((&self.weight(param::LN1B, l)?, &ln1)),
            (true, accumulate),
        )?;
        self.linear_weight_backward(&d.qkv, &ln1, &grad(param::QKVW)?, accumulate)
    }

    /// The gradient of a bias comes from the op that made `dout`, on the way.
    fn linear_weight_backward(&self, dout: &Tensor, x: &Tensor, dweight: &Tensor, accumulate: bool) -> Result<()> {
        matmul::backward_weight(&self.device, &matmul::BackwardWeight { dout, x, dweight, dbias: None, accumulate })
    }

    fn linear_input_backward(&self, dout: &Tensor, weight: &Tensor, dx: &Tensor) -> Result<()> {
        let (gelu, activation, dx_sums) = (None, None, None);
        let args = matmul::BackwardInput { dout, weight, gelu, dx, accumulate: false, activation, dx_sums };
        matmul::backward_input(&self.device, &args)
    }

    /// From the gradient of a layernorm's output (in `narrow`) to that of the residual stream, with its sum over rows, and the layernorm's output where the
    /// forward's was not kept.
    fn layernorm_backward(
        &self,
        d: &Gradients,
        sum: &Tensor,
        (mean, rstd): (&Tensor, &Tensor),
        weight: &Tensor,
        (dweight, dbias): (&Tensor, &Tensor),
        dx_sums: Option<&Tensor>,
        again: Option<(&Tensor, &Tensor)>,
        (accumulate_dx, accumulate_params): (bool, bool),
    ) -> Result<()> {
        let again = again
            .filter(|_| self.options.recompute >= Recompute::GeluAndLayernorm)
            .map(|(bias, out)| layernorm::Again { bias: Some(bias), out });
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
                dx_sums,
                again,
                workspace: &self.buffers.workspace,
            },
        )
    }
}
