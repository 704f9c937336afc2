//! A pre-norm transformer layer: `x += out(attention(LN(x)))`, `x += down(activation(up(LN(x))))`. Encoder and decision head are made of it.

use tilewright_core::Result;
use tilewright_ops::encoder_attention::{self, Rotation, Selected};
use tilewright_ops::gather;
use tilewright_ops::layernorm::{self, Residual};
use tilewright_ops::linear::Activation;
use tilewright_ops::{Device, Tensor};

use super::buffers::Views;
use super::store::{Linear, Norm};

/// How a layer makes queries, keys and values.
#[allow(clippy::large_enum_variant)] // A few dozen of them live, in a list that is never moved.
pub(crate) enum Projection {
    /// By one product.
    Whole(Linear),
    /// By two, so that queries can be made for a few tokens only.
    Split {
        /// `(D, D)`.
        q: Linear,
        /// `(2D, D)`.
        kv: Linear,
    },
}

pub(crate) struct Block {
    pub(crate) norm1: Option<Norm>,
    pub(crate) projection: Projection,
    pub(crate) out: Linear,
    pub(crate) norm2: Norm,
    pub(crate) up: Linear,
    pub(crate) activation: Activation,
    pub(crate) down: Linear,
    pub(crate) heads: usize,
    /// The RoPE table; none leaves queries and keys as they are.
    pub(crate) rope: Option<Tensor>,
    /// How far a query sees.
    pub(crate) window: Option<usize>,
    /// Tokens of different options do not see each other.
    pub(crate) hides_options: bool,
}

impl Block {
    /// Columns of the layer's hidden units.
    fn hidden(&self) -> usize {
        self.down.weight.shape().1
    }

    /// The weight that the layer reads first.
    fn first(&self) -> &Linear {
        match &self.projection {
            Projection::Whole(qkv) => qkv,
            Projection::Split { kv, .. } => kv,
        }
    }

    /// Updates the stream `v.x` of every token. `pending` is added to it first. `next` is the layer that comes behind.
    pub(crate) fn forward(&self, v: &Views, pending: Option<&Tensor>, next: Option<&Block>) -> Result<()> {
        let (n, d) = (v.x.shape()[0], v.x.shape()[1]);
        let (q, kv, key_column) = match &self.projection {
            Projection::Whole(qkv) => {
                let all = v.wide(3 * d)?;
                self.out.soon(&v.device);
                match &self.norm1 {
                    Some(norm) => qkv.normed(
                        &v.device,
                        norm_args(norm, &v.x, pending, &v.y, &statistics(v, n)?),
                        Activation::None,
                        &all,
                    )?,
                    None => qkv.forward(&v.device, &v.x, Activation::None, None, &all)?,
                }
                (all.clone(), all, d)
            }
            Projection::Split { q, kv } => {
                let input = self.input(v, pending)?;
                let (keys, queries) = (v.wide(2 * d)?, v.wide.slice(2 * d * n, &[n, d])?);
                q.soon(&v.device);
                kv.forward(&v.device, input, Activation::None, None, &keys)?;
                q.forward(&v.device, input, Activation::None, None, &queries)?;
                (queries, keys, 0)
            }
        };
        self.attend(v, &q, &kv, key_column, None, &v.y)?;
        self.up.soon(&v.device);
        self.out.forward(&v.device, &v.y, Activation::None, Some(&v.x), &v.x)?;
        let hidden = v.wide(self.hidden())?;
        let statistics = statistics(v, n)?;
        let norm2 = norm_args(&self.norm2, &v.x, None, &v.y, &statistics);
        self.down.soon(&v.device);
        self.up.normed(&v.device, norm2, self.activation, &hidden)?;
        if let Some(next) = next {
            next.first().soon(&v.device);
        }
        self.down.forward(&v.device, &hidden, Activation::None, Some(&v.x), &v.x)
    }

    /// Computes the stream of the selected tokens alone, into `v.sx`: other tokens of a last layer matter only through their keys and values.
    pub(crate) fn forward_selected(&self, v: &Views, pending: Option<&Tensor>) -> Result<()> {
        let Projection::Split { q, kv } = &self.projection else {
            // A whole projection cannot leave anything out.
            self.forward(v, pending, None)?;
            return pick(&v.device, &v.x, &v.selected, &v.sx);
        };
        let d = v.x.shape()[1];
        let input = self.input(v, pending)?;
        pick(&v.device, &v.x, &v.selected, &v.sx)?;
        pick(&v.device, input, &v.selected, &v.sy)?;
        let keys = v.wide(2 * d)?;
        kv.forward(&v.device, input, Activation::None, None, &keys)?;
        q.forward(&v.device, &v.sy, Activation::None, None, &v.sq)?;
        let selected = Selected { starts: &v.selected_starts, tokens: &v.selected };
        self.attend(v, &v.sq, &keys, 0, Some(selected), &v.sy)?;
        self.up.soon(&v.device);
        self.out.forward(&v.device, &v.sy, Activation::None, Some(&v.sx), &v.sx)?;
        let s = v.sx.shape()[0];
        let hidden = v.swide.slice(0, &[s, self.hidden()])?;
        let statistics = statistics(v, s)?;
        let norm2 = norm_args(&self.norm2, &v.sx, None, &v.sy, &statistics);
        self.down.soon(&v.device);
        self.up.normed(&v.device, norm2, self.activation, &hidden)?;
        self.down.forward(&v.device, &hidden, Activation::None, Some(&v.sx), &v.sx)
    }

    /// The normalised stream, in `v.y`; the stream itself for a layer without a norm there.
    fn input<'v>(&self, v: &'v Views, pending: Option<&Tensor>) -> Result<&'v Tensor> {
        match &self.norm1 {
            Some(norm) => {
                normalise(v, norm, &v.x, pending, &v.y)?;
                Ok(&v.y)
            }
            None => Ok(&v.x),
        }
    }

    fn attend(
        &self,
        v: &Views,
        q: &Tensor,
        kv: &Tensor,
        key_column: usize,
        selected: Option<Selected<'_>>,
        out: &Tensor,
    ) -> Result<()> {
        let option_ids = v.option_ids.as_ref().filter(|_| self.hides_options);
        encoder_attention::forward(
            &v.device,
            &encoder_attention::Forward {
                q,
                kv,
                rotation: self.rope.as_ref().map(|table| Rotation {
                    table,
                    positions: &v.positions,
                    query_positions: selected.map(|_| &v.selected_positions),
                }),
                longest: v.longest,
                key_column,
                heads: self.heads,
                row_starts: &v.row_starts,
                selected,
                window: self.window,
                // Without explicit positions the index in the row is the position, and only the band need be visited.
                positions: option_ids.map(|_| &v.positions),
                option_ids,
                out,
                workspace: &v.workspace,
            },
        )
    }
}

/// Where a normalisation of `n` rows leaves mean and inverse deviation.
fn statistics(v: &Views, n: usize) -> Result<[Tensor; 2]> {
    Ok([v.mean.slice(0, &[n])?, v.rstd.slice(0, &[n])?])
}

/// `out = LN(x)`; `pending` is added to `x` in place before.
fn norm_args<'a>(
    norm: &'a Norm,
    x: &'a Tensor,
    pending: Option<&'a Tensor>,
    out: &'a Tensor,
    [mean, rstd]: &'a [Tensor; 2],
) -> layernorm::Forward<'a> {
    layernorm::Forward {
        x,
        residual: pending.map(|branch| Residual { branch, sum: x }),
        weight: &norm.weight,
        bias: norm.bias.as_ref(),
        eps: norm.eps,
        out,
        mean,
        rstd,
    }
}

/// `out = LN(x)`; `pending` is added to `x` in place before.
pub(crate) fn normalise(v: &Views, norm: &Norm, x: &Tensor, pending: Option<&Tensor>, out: &Tensor) -> Result<()> {
    layernorm::forward(&v.device, &norm_args(norm, x, pending, out, &statistics(v, x.shape()[0])?))
}

/// Rows of a table.
pub(crate) fn pick(device: &Device, table: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
    gather::forward(device, &gather::Forward { table, index, out })
}
