//! The forward pass and the losses.

use tilewright_core::{Error, Result};
use tilewright_ops::gelu::Gelu;
use tilewright_ops::layernorm::Residual;
use tilewright_ops::{Tensor, attention, embedding, layernorm, linear_cross_entropy, matmul};

use super::{Gpt2, IGNORE_INDEX, LAYERNORM_EPS, param};

impl Gpt2 {
    /// Mean loss over the rows that count, without gradients.
    ///
    /// `tokens` and `targets` are `(B, T)`; a target of [`IGNORE_INDEX`] does not count.
    pub fn loss(&mut self, tokens: &[i32], targets: &[i32]) -> Result<f32> {
        let mut losses = vec![0.0; tokens.len()];
        self.row_losses(tokens, targets, &mut losses)?;
        let counted = targets.iter().filter(|&&t| t != IGNORE_INDEX).count();
        Ok((sum(&losses) / counted.max(1) as f64) as f32)
    }

    /// The loss of every row, without gradients: `-log p(target)`, 0 where the target is [`IGNORE_INDEX`].
    pub fn row_losses(&mut self, tokens: &[i32], targets: &[i32], losses: &mut [f32]) -> Result<()> {
        self.load(tokens, targets)?;
        let b = &self.buffers;
        self.replays.borrow_mut().evaluation.run(&self.device, || {
            self.forward()?;
            linear_cross_entropy::forward(
                &self.device,
                &linear_cross_entropy::Forward {
                    hidden: &b.lnf,
                    weight: &self.params.tensors[param::WTE],
                    vocab: self.config.vocab_size,
                    targets: &b.targets,
                    ignore_index: IGNORE_INDEX,
                    losses: &b.losses,
                    lse: &b.lse_head,
                    workspace: &b.workspace,
                },
            )
        })?;
        b.fetch_losses.start()?;
        b.fetch_losses.finish(losses)
    }

    /// Logits of every row for a caller that wants to look at them: `(B * T, V)` values. Tests and tools; training never builds them.
    pub fn logits(&mut self, tokens: &[i32]) -> Result<Vec<f32>> {
        let targets = vec![IGNORE_INDEX; tokens.len()];
        self.load(tokens, &targets)?;
        self.forward()?;
        let (n, vp, v) = (tokens.len(), self.config.padded_vocab_size, self.config.vocab_size);
        let out = Tensor::zeros(&self.device, self.options.dtype, &[n, vp])?;
        self.linear(&self.buffers.lnf, &self.params.tensors[param::WTE], None, &out)?;
        let padded = out.read_f32()?;
        Ok(padded.chunks_exact(vp).flat_map(|row| &row[..v]).copied().collect())
    }

    /// Uploads a micro-batch.
    pub(super) fn load(&self, tokens: &[i32], targets: &[i32]) -> Result<()> {
        let n = self.options.batch * self.options.seq_len;
        for (what, len) in [("tokens", tokens.len()), ("targets", targets.len())] {
            if len != n {
                return Err(Error::Argument {
                    op: "gpt2.load",
                    what: format!(
                        "{what} holds {len} ids, the model was built for {} x {} = {n}",
                        self.options.batch, self.options.seq_len
                    ),
                });
            }
        }
        // Here, where the ids are: a replay of recorded ops checks nothing, and reading them back would stall a GPU.
        let vocab = self.config.vocab_size;
        let known = |id: i32| usize::try_from(id).is_ok_and(|id| id < vocab);
        let unknown = |what: &str, ids: &[i32], at: usize| {
            let (id, t) = (ids[at], self.options.seq_len);
            let what = format!(
                "{what} hold id {id} at (b, t) = ({}, {}), outside 0..{vocab}; check that the data was made with this model's tokenizer",
                at / t,
                at % t
            );
            Error::Argument { op: "gpt2.load", what }
        };
        if let Some(at) = tokens.iter().position(|&id| !known(id)) {
            return Err(unknown("tokens", tokens, at));
        }
        if let Some(at) = targets.iter().position(|&id| !known(id) && id != IGNORE_INDEX) {
            return Err(unknown("targets", targets, at));
        }
        self.buffers.send_tokens.send(tokens)?;
        self.buffers.send_targets.send(targets)
    }

    /// Everything up to `lnf`, from the tokens uploaded last.
    pub(super) fn forward(&self) -> Result<()> {
        let b = &self.buffers;
        let p = &self.params.tensors;
        embedding::forward(
            &self.device,
            &embedding::Forward {
                tokens: &b.tokens,
                wte: &p[param::WTE],
                wpe: &p[param::WPE],
                vocab: self.config.vocab_size,
                position: 0,
                out: &b.encoded,
            },
        )?;
        let mut stream = b.encoded.view(&b.branch.shape())?;
        for l in 0..self.config.layers {
            // The branch of the previous layer's MLP joins the stream inside ln1; the first layer has none.
            let residual3 = if l == 0 { None } else { Some(b.residual3.at(l - 1)?) };
            self.layernorm(
                &stream,
                residual3.as_ref(),
                (&self.weight(param::LN1W, l)?, &self.weight(param::LN1B, l)?),
                (&b.ln1.at(l)?, &b.ln1_mean.at(l)?, &b.ln1_rstd.at(l)?),
            )?;
            if let Some(sum) = residual3 {
                stream = sum;
            }
            self.linear(
                &b.ln1.at(l)?,
                &self.weight(param::QKVW, l)?,
                Some(&self.weight(param::QKVB, l)?),
                &b.qkv.at(l)?,
            )?;
            attention::forward(
                &self.device,
                &attention::Forward {
                    qkv: &b.qkv.at(l)?,
                    heads: self.config.heads,
                    mask: attention::Mask::Causal,
                    out: &b.atty.at(l)?,
                    lse: &b.att_lse.at(l)?,
                    workspace: &b.workspace,
                },
            )?;
            self.linear(
                &b.atty.at(l)?,
                &self.weight(param::ATTPROJW, l)?,
                Some(&self.weight(param::ATTPROJB, l)?),
                &b.branch,
            )?;
            let residual2 = b.residual2.at(l)?;
            self.layernorm(
                &stream,
                Some(&residual2),
                (&self.weight(param::LN2W, l)?, &self.weight(param::LN2B, l)?),
                (&b.ln2.at(l)?, &b.ln2_mean.at(l)?, &b.ln2_rstd.at(l)?),
            )?;
            stream = residual2;
            matmul::forward(
                &self.device,
                &matmul::Forward {
                    x: &b.ln2.at(l)?,
                    weight: &self.weight(param::FCW, l)?,
                    bias: Some(&self.weight(param::FCB, l)?),
                    gelu: Some(Gelu::Tanh),
                    pre_gelu: Some(&b.fch.at(l)?),
                    out: &b.fch_gelu.at(l)?,
                },
            )?;
            self.linear(
                &b.fch_gelu.at(l)?,
                &self.weight(param::FCPROJW, l)?,
                Some(&self.weight(param::FCPROJB, l)?),
                &b.branch,
            )?;
        }
        let last = b.residual3.at(self.config.layers - 1)?;
        self.layernorm(&stream, Some(&last), (&p[param::LNFW], &p[param::LNFB]), (&b.lnf, &b.lnf_mean, &b.lnf_rstd))
    }

    /// `out = x @ weight^T + bias`.
    pub(super) fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: &Tensor) -> Result<()> {
        matmul::forward(&self.device, &matmul::Forward { x, weight, bias, gelu: None, pre_gelu: None, out })
    }

    /// Normalises the stream, after adding the pending branch to it when `sum` says where the sum goes.
    fn layernorm(
        &self,
        x: &Tensor,
        sum: Option<&Tensor>,
        (weight, bias): (&Tensor, &Tensor),
        (out, mean, rstd): (&Tensor, &Tensor, &Tensor),
    ) -> Result<()> {
        layernorm::forward(
            &self.device,
            &layernorm::Forward {
                x,
                residual: sum.map(|sum| Residual { branch: &self.buffers.branch, sum }),
                weight,
                bias: Some(bias),
                eps: LAYERNORM_EPS,
                out,
                mean,
                rstd,
            },
        )
    }
}

/// Sum of the row losses in f64: 4096 rows of loss 11 lose digits in f32.
pub(super) fn sum(losses: &[f32]) -> f64 {
    losses.iter().map(|&l| f64::from(l)).sum()
}
