//! The decision head: transformer layers over the encoder's states, a scorer of markers, and the action head.

use tilewright_core::{DType, Error, Result};
use tilewright_ops::gelu::Gelu;
use tilewright_ops::linear::{Activation, Layout};
use tilewright_ops::{Tensor, option_features};

use super::row::RowScores;
use crate::modernbert::block::{Block, Projection, normalise, pick};
use crate::modernbert::buffers::{Pack, Views};
use crate::modernbert::encoder::{Encoder, Observer, Of, split};
use crate::modernbert::store::{Linear, Norm, Store};

/// Added to the variance of the head's layer normalisations, whatever the encoder's is.
const EPS: f32 = 1e-5;

/// Heads of the head's attention: it has its own count, not the encoder's.
pub(crate) fn heads(hidden: usize) -> Result<usize> {
    let heads = (hidden / 64).max(1);
    if hidden.is_multiple_of(heads) {
        return Ok(heads);
    }
    let what = format!("a hidden size of {hidden} does not divide into the decision head's {heads} heads");
    Err(Error::config(what, "a Laya checkpoint has a hidden size that is a multiple of its 64th part, such as 768"))
}

pub(crate) struct Head {
    type_emb: Tensor,
    layers: Vec<Block>,
    scorer_norm: Norm,
    scorer_hidden: Linear,
    scorer_out: Linear,
    act_hidden: Linear,
    act_out: Linear,
}

impl Head {
    /// `between`: the type of what lies between ops.
    pub(crate) fn load(
        store: &mut Store<'_>,
        hidden: usize,
        layers: usize,
        precision: DType,
        between: DType,
    ) -> Result<Self> {
        let heads = heads(hidden)?;
        let type_emb = store.f32("type_emb.weight")?;
        let mut blocks = Vec::with_capacity(layers);
        for j in 0..layers {
            let p = format!("head.layers.{j}.");
            let (weight, bias) = (format!("{p}self_attn.in_proj_weight"), format!("{p}self_attn.in_proj_bias"));
            blocks.push(Block {
                norm1: Some(store.norm(&format!("{p}norm1"), EPS, true)?),
                // Of the last layer queries are made for a few tokens only.
                projection: if j + 1 == layers {
                    split(store, &weight, &bias, hidden, precision, true)?
                } else {
                    let weight = store.weight(&weight, None, precision, Layout::Plain)?;
                    Projection::Whole(Linear { weight, bias: Some(store.f32(&bias)?) })
                },
                out: store.linear(&format!("{p}self_attn.out_proj"), precision, Layout::Plain, true)?,
                norm2: store.norm(&format!("{p}norm2"), EPS, true)?,
                up: store.linear(&format!("{p}linear1"), precision, Layout::Plain, true)?,
                // Everything around it is GELU; this one is not.
                activation: Activation::Relu,
                down: store.linear(&format!("{p}linear2"), precision, Layout::Plain, true)?,
                heads,
                rope: None,
                window: None,
                hides_options: false,
            });
        }
        // A few rows go through what follows: f32 costs nothing there. The scorer reads what lies between ops.
        let mut small = |name: &str, precision| store.linear(name, precision, Layout::Plain, true);
        let (scorer_hidden, scorer_out) = (small("scorer.1", between)?, small("scorer.3", between)?);
        let (act_hidden, act_out) = (small("act_head.0", DType::F32)?, small("act_head.2", DType::F32)?);
        let scorer_norm = store.norm("scorer.0", EPS, true)?;
        Ok(Head { type_emb, layers: blocks, scorer_norm, scorer_hidden, scorer_out, act_hidden, act_out })
    }

    /// Encoder and head over a pack. Of the last layer only the rows are computed that are read: each first token and the markers.
    pub(crate) fn forward(
        &self,
        encoder: &Encoder,
        v: &mut Views,
        pack: &Pack,
        observe: &mut Observer<'_>,
    ) -> Result<Vec<RowScores>> {
        self.answer(encoder, v, observe)?;
        Ok(scores(v, pack, &v.answers.read_f32()?))
    }

    /// Computes the answers, into `v.answers`. Needs nothing of the host.
    pub(crate) fn answer(&self, encoder: &Encoder, v: &mut Views, observe: &mut Observer<'_>) -> Result<()> {
        let d = v.x.shape()[1];
        if let Some((last, layers)) = self.layers.split_last() {
            encoder.forward(v, observe)?;
            let types = v.wide(d)?;
            pick(&v.device, &self.type_emb, &v.types, &types)?;
            // The type's vector joins the stream inside the first layer's norm.
            let mut pending = Some(&types);
            for (j, layer) in layers.iter().enumerate() {
                layer.forward(v, pending.take(), self.layers.get(j + 1))?;
                observe(&format!("head.layers.{j}"), Of::All, &v.x)?;
            }
            last.forward_selected(v, pending)?;
            observe(&format!("head.layers.{}", layers.len()), Of::Selected, &v.sx)?;
            normalise(v, &self.scorer_norm, &v.sx, None, &v.sy)?;
        } else {
            encoder.forward_selected(v, observe)?;
            let types = v.swide.slice(0, &v.sx.shape())?;
            pick(&v.device, &self.type_emb, &v.selected_types, &types)?;
            normalise(v, &self.scorer_norm, &v.sx, Some(&types), &v.sy)?;
        }
        self.score(v)?;
        self.act(v)
    }

    /// One logit a marker, from the normalised selected tokens in `v.sy`.
    fn score(&self, v: &Views) -> Result<()> {
        let (markers, d) = (v.markers.numel(), v.x.shape()[1]);
        let inputs = v.sq.slice(0, &[markers, d])?;
        pick(&v.device, &v.sy, &v.markers, &inputs)?;
        let hidden = v.swide.slice(0, &[markers, d])?;
        self.scorer_hidden.forward(&v.device, &inputs, Activation::Gelu(Gelu::Erf), None, &hidden)?;
        self.scorer_out.forward(&v.device, &hidden, Activation::None, None, &v.logits)
    }

    /// The action head, from the final states of the first tokens and the logits.
    fn act(&self, v: &Views) -> Result<()> {
        option_features::forward(
            &v.device,
            &option_features::Forward {
                states: &v.sx,
                firsts: &v.firsts,
                logits: &v.logits,
                starts: &v.logit_starts,
                out: &v.act[0],
            },
        )?;
        self.act_hidden.forward(&v.device, &v.act[0], Activation::Gelu(Gelu::Erf), None, &v.act[1])?;
        self.act_out.forward(&v.device, &v.act[1], Activation::None, None, &v.act[2])
    }
}

/// The scores of the pack's rows, which come first in the buffers, from the answers of a pass over it.
pub(crate) fn scores(v: &Views, pack: &Pack, answers: &[f32]) -> Vec<RowScores> {
    let act = answers[v.act_at()..].chunks_exact(v.act[2].shape()[1]);
    let row = |(span, act): (&[i32], &[f32])| RowScores {
        logits: answers[span[0] as usize..span[1] as usize].to_vec(),
        act_logits: act.to_vec(),
    };
    pack.logit_starts.windows(2).zip(act).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trap_18_the_head_count_follows_the_hidden_size() {
        assert_eq!([1024, 768, 64, 32, 100, 128].map(|d| heads(d).unwrap()), [16, 12, 1, 1, 1, 2]);
        assert!(heads(1000).unwrap_err().to_string().contains("1000"));
    }
}
