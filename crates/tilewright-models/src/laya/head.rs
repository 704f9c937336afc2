//! The decision head: transformer layers over the encoder's states, a scorer of markers, and the action head.

use tilewright_core::{DType, Error, Result};
use tilewright_ops::Tensor;
use tilewright_ops::gelu::Gelu;
use tilewright_ops::linear::{Activation, Layout};

use super::row::RowScores;
use crate::modernbert::block::{Block, normalise, pick};
use crate::modernbert::buffers::{Pack, Views};
use crate::modernbert::encoder::{Encoder, Observer, Of, split};
use crate::modernbert::store::{Linear, Norm, Store};

/// Added to the variance of the head's layer normalisations, whatever the encoder's is.
const EPS: f32 = 1e-5;

/// Probabilities below this count as this in the entropy's logarithm.
const SMALLEST: f32 = 1e-9;

/// Options that the fourth feature measures by.
const MOST_OPTIONS: f32 = 255.0;

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
                projection: split(store, &weight, &bias, hidden, precision, true)?,
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
        self.states_and_logits(encoder, v, observe)?;
        self.scores(v, pack)
    }

    /// The scores of the pack's rows, which come first in the buffers.
    pub(crate) fn scores(&self, v: &Views, pack: &Pack) -> Result<Vec<RowScores>> {
        self.act(v, pack, v.logits.read_f32()?)
    }

    /// All that needs no answer on the host: the logits, and the states of the first tokens.
    pub(crate) fn states_and_logits(&self, encoder: &Encoder, v: &mut Views, observe: &mut Observer<'_>) -> Result<()> {
        let d = v.x.shape()[1];
        if let Some((last, layers)) = self.layers.split_last() {
            encoder.forward(v, observe)?;
            let types = v.wide(d)?;
            pick(&v.device, &self.type_emb, &v.types, &types)?;
            // The type's vector joins the stream inside the first layer's norm.
            let mut pending = Some(&types);
            for (j, layer) in layers.iter().enumerate() {
                layer.forward(v, pending.take())?;
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
        pick(&v.device, &v.sx, &v.firsts, &v.firsts_x)?;
        self.score(v)
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

    fn act(&self, v: &Views, pack: &Pack, logits: Vec<f32>) -> Result<Vec<RowScores>> {
        let (rows, d) = (pack.rows(), v.x.shape()[1]);
        let states = v.firsts_x.read_f32()?;
        let mut inputs = Vec::with_capacity(v.act[0].numel());
        let mut scores = Vec::with_capacity(rows);
        let mut rest = &logits[..];
        for (row, state) in states.chunks_exact(d).take(rows).enumerate() {
            let markers = (pack.selected_starts[row + 1] - pack.selected_starts[row] - 1) as usize;
            let (own, others) = rest.split_at(markers);
            rest = others;
            inputs.extend_from_slice(state);
            inputs.extend(features(own));
            scores.push(RowScores { logits: own.to_vec(), act_logits: Vec::new() });
        }
        inputs.resize(v.act[0].numel(), 0.0);
        v.act[0].write_f32(&inputs)?;
        self.act_hidden.forward(&v.device, &v.act[0], Activation::Gelu(Gelu::Erf), None, &v.act[1])?;
        self.act_out.forward(&v.device, &v.act[1], Activation::None, None, &v.act[2])?;
        let act = v.act[2].read_f32()?;
        let classes = v.act[2].shape()[1];
        for (row, act) in scores.iter_mut().zip(act.chunks_exact(classes)) {
            row.act_logits = act.to_vec();
        }
        Ok(scores)
    }
}

/// What the action head knows of the options: the largest probability, its lead, the entropy in units of its maximum, and how many there are.
fn features(logits: &[f32]) -> [f32; 4] {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut p: Vec<f32> = logits.iter().map(|l| (l - largest).exp()).collect();
    let sum: f32 = p.iter().sum();
    p.iter_mut().for_each(|p| *p /= sum);
    let entropy = -p.iter().map(|p| p * p.max(SMALLEST).ln()).sum::<f32>();
    // Two options at least, so that a single one divides by no zero.
    let options = logits.len().max(2) as f32;
    p.sort_by(|a, b| b.total_cmp(a));
    let second = p.get(1).copied().unwrap_or(0.0);
    [p[0], p[0] - second, entropy / options.ln(), options / MOST_OPTIONS]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trap_19_a_single_option_has_a_lead_of_one() {
        assert_eq!(features(&[-3.5]), [1.0, 1.0, 0.0, 2.0 / 255.0]);
    }

    #[test]
    fn equal_options_have_no_lead_and_full_entropy() {
        let [top, lead, entropy, count] = features(&[0.25; 4]);
        assert_eq!((top, lead, count), (0.25, 0.0, 4.0 / 255.0));
        assert!((entropy - 1.0).abs() < 1e-6, "{entropy}");
    }

    #[test]
    fn features_do_not_depend_on_the_order_of_options_or_on_a_common_shift() {
        let a = features(&[1.0, 3.0, -2.0]);
        assert_eq!(a, features(&[3.0, 5.0, 0.0]));
        let b = features(&[3.0, -2.0, 1.0]);
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6), "{a:?} {b:?}");
        assert!(a[0] > 0.85 && (a[1] - (a[0] - (1.0f32 - 3.0).exp() * a[0])).abs() < 1e-6, "{a:?}");
    }

    #[test]
    fn trap_18_the_head_count_follows_the_hidden_size() {
        assert_eq!([1024, 768, 64, 32, 100, 128].map(|d| heads(d).unwrap()), [16, 12, 1, 1, 1, 2]);
        assert!(heads(1000).unwrap_err().to_string().contains("1000"));
    }
}
