//! The encoder: its weights, and its layers in order.

use tilewright_core::{DType, Error, Result};
use tilewright_ops::linear::{Activation, Layout};
use tilewright_ops::{Tensor, encoder_attention, rope};

use super::block::{Block, Projection, normalise, pick};
use super::buffers::Views;
use super::store::{Linear, Norm, Store};
use super::{EncoderConfig, LayerKind};

/// Whose states an [`Observer`] is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Of {
    /// Every token's.
    All,
    /// The selected tokens'.
    Selected,
}

/// Called after each stage with its name and its states.
pub(crate) type Observer<'a> = dyn FnMut(&str, Of, &Tensor) -> Result<()> + 'a;

pub(crate) struct Encoder {
    table: Tensor,
    norm: Norm,
    layers: Vec<Block>,
    final_norm: Norm,
}

impl Encoder {
    /// Loads the weights. `split_last`: the last layer can be run for selected tokens alone.
    pub(crate) fn load(
        store: &mut Store<'_>,
        config: &EncoderConfig,
        table: &Tensor,
        prefix: &str,
        precision: DType,
        split_last: bool,
    ) -> Result<Self> {
        let head = config.head_size();
        if head > encoder_attention::MAX_HEAD {
            return Err(Error::config(
                format!("heads of {head} channels are not supported, at most {}", encoder_attention::MAX_HEAD),
                "use an encoder with more heads",
            ));
        }
        let full = Self::rope(store, config, LayerKind::Full)?;
        let sliding = if config.full_theta == config.sliding_theta {
            full.clone()
        } else {
            Self::rope(store, config, LayerKind::Sliding)?
        };
        let (d, eps) = (config.hidden, config.norm_eps);
        let norm = store.norm(&format!("{prefix}embeddings.norm"), eps, config.norm_bias)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, &kind) in config.layers.iter().enumerate() {
            let p = format!("{prefix}layers.{i}.");
            // Layer 0 has none: the embedding's norm has done it.
            let norm1 =
                if i == 0 { None } else { Some(store.norm(&format!("{p}attn_norm"), eps, config.norm_bias)?) };
            let name = format!("{p}attn.Wqkv");
            let projection = if split_last && i + 1 == config.layers.len() {
                split(store, &format!("{name}.weight"), &format!("{name}.bias"), d, precision, config.attention_bias)?
            } else {
                Projection::Whole(store.linear(&name, precision, Layout::Plain, config.attention_bias)?)
            };
            layers.push(Block {
                norm1,
                projection,
                out: store.linear(&format!("{p}attn.Wo"), precision, Layout::Plain, config.attention_bias)?,
                norm2: store.norm(&format!("{p}mlp_norm"), eps, config.norm_bias)?,
                up: store.linear(&format!("{p}mlp.Wi"), precision, Layout::Gated, config.mlp_bias)?,
                activation: Activation::Geglu,
                down: store.linear(&format!("{p}mlp.Wo"), precision, Layout::Plain, config.mlp_bias)?,
                heads: config.heads,
                rope: Some(match kind {
                    LayerKind::Full => full.clone(),
                    LayerKind::Sliding => sliding.clone(),
                }),
                window: (kind == LayerKind::Sliding).then_some(config.half_window()),
                hides_options: true,
            });
        }
        let final_norm = store.norm(&format!("{prefix}final_norm"), eps, config.norm_bias)?;
        Ok(Encoder { table: table.clone(), norm, layers, final_norm })
    }

    fn rope(store: &mut Store<'_>, config: &EncoderConfig, kind: LayerKind) -> Result<Tensor> {
        let table = store.slot(&format!("rope.{}", kind.name()), &[config.max_positions, config.head_size()])?;
        if store.fills() {
            rope::fill_table(&table, config.theta(kind))?;
        }
        Ok(table)
    }

    /// The final hidden states of every token, in `v.x`.
    pub(crate) fn forward(&self, v: &mut Views, observe: &mut Observer<'_>) -> Result<()> {
        self.embed(v, observe)?;
        for (i, layer) in self.layers.iter().enumerate() {
            layer.forward(v, None, self.layers.get(i + 1))?;
            observe(&format!("encoder.layers.{i}"), Of::All, &v.x)?;
        }
        normalise(v, &self.final_norm, &v.x, None, &v.z)?;
        v.take_final();
        observe("encoder.final_norm", Of::All, &v.x)
    }

    /// The final hidden states of the selected tokens, in `v.sx`.
    pub(crate) fn forward_selected(&self, v: &mut Views, observe: &mut Observer<'_>) -> Result<()> {
        self.embed(v, observe)?;
        let (last, layers) = self.layers.split_last().expect("a configuration has a layer");
        for (i, layer) in layers.iter().enumerate() {
            layer.forward(v, None, self.layers.get(i + 1))?;
            observe(&format!("encoder.layers.{i}"), Of::All, &v.x)?;
        }
        last.forward_selected(v, None)?;
        observe(&format!("encoder.layers.{}", layers.len()), Of::Selected, &v.sx)?;
        normalise(v, &self.final_norm, &v.sx, None, &v.sz)?;
        v.take_final_selected();
        observe("encoder.final_norm", Of::Selected, &v.sx)
    }

    fn embed(&self, v: &Views, observe: &mut Observer<'_>) -> Result<()> {
        pick(&v.device, &self.table, &v.ids, &v.z)?;
        normalise(v, &self.norm, &v.z, None, &v.x)?;
        observe("embeddings", Of::All, &v.x)
    }
}

/// A packed weight for queries and one for keys and values, from one `(3D, D)` tensor.
pub(crate) fn split(
    store: &mut Store<'_>,
    weight: &str,
    bias: &str,
    d: usize,
    precision: DType,
    has_bias: bool,
) -> Result<Projection> {
    let mut part = |rows: std::ops::Range<usize>| -> Result<Linear> {
        let start = rows.start;
        let n = rows.len();
        Ok(Linear {
            weight: store.weight(weight, Some(rows), precision, Layout::Plain)?,
            bias: if has_bias { Some(store.f32_part(bias, start, n)?) } else { None },
        })
    };
    Ok(Projection::Split { q: part(0..d)?, kv: part(d..3 * d)? })
}
