//! Flash attention: `softmax(scale * q k^T + mask) v` in tiles, never a `T x T` buffer, forward and backward, any `T`, head sizes 3 to 256.
//!
//! `q`, `k` and `v` lie in one `(B, T, 3C)` tensor as llm.c lays them: columns `[0, C)` q, `[C, 2C)` k, `[2C, 3C)` v, head `h` in columns
//! `h*hs..(h+1)*hs` of each third. `lse[b, h, t]` is the natural log of the sum of `exp(scale * q.k)` over the visible keys: all that the
//! backward needs beside the output. Statistics and accumulation in f32. Deterministic for any number of threads.

use tilewright_core::{Error, Result};

use crate::{Device, Tensor};

/// Which keys a query sees.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Mask {
    /// Keys at or before the query.
    Causal,
}

/// `out (B, T, C) = attention(qkv (B, T, 3C))`.
pub struct Forward<'a> {
    /// `(B, T, 3C)`, read.
    pub qkv: &'a Tensor,
    /// `H`; divides `C`.
    pub heads: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `(B, T, C)`, `=`, heads side by side.
    pub out: &'a Tensor,
    /// `(B, H, T)` f32, `=`, saved for backward.
    pub lse: &'a Tensor,
    /// [`workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// `dqkv (B, T, 3C)` from `dout (B, T, C)`.
pub struct Backward<'a> {
    /// `(B, T, 3C)`, read.
    pub qkv: &'a Tensor,
    /// `H`.
    pub heads: usize,
    /// Which keys a query sees.
    pub mask: Mask,
    /// `(B, T, C)`, read: the forward's output.
    pub out: &'a Tensor,
    /// `(B, H, T)` f32, read.
    pub lse: &'a Tensor,
    /// `(B, T, C)`, read.
    pub dout: &'a Tensor,
    /// `(B, T, 3C)`, `=`.
    pub dqkv: &'a Tensor,
    /// [`workspace_bytes`] bytes, overwritten.
    pub workspace: &'a Tensor,
}

/// One new token a row against a cache: writes its `k` and `v` at `position`, then attends to positions `0..=position`.
pub struct Decode<'a> {
    /// `(B, 3C)`, read: the new token's q, k, v.
    pub qkv: &'a Tensor,
    /// `H`.
    pub heads: usize,
    /// Where the new token stands, below `Tmax`.
    pub position: usize,
    /// `(B, Tmax, C)`, row `position` written.
    pub k_cache: &'a Tensor,
    /// `(B, Tmax, C)`, row `position` written.
    pub v_cache: &'a Tensor,
    /// `(B, C)`, `=`.
    pub out: &'a Tensor,
}

/// Bytes of workspace that [`forward`] and [`backward`] need.
pub fn workspace_bytes(device: &Device, b: usize, t: usize, c: usize, heads: usize) -> usize {
    let _ = (device, b, t, c, heads);
    0
}

/// Runs [`Forward`].
pub fn forward(device: &Device, args: &Forward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "attention.forward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Backward`].
pub fn backward(device: &Device, args: &Backward<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "attention.backward",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}

/// Runs [`Decode`].
pub fn decode(device: &Device, args: &Decode<'_>) -> Result<()> {
    let _ = args;
    Err(Error::Unsupported {
        op: "attention.decode",
        device: device.name(),
        what: "this op".into(),
        hint: "it is being built".into(),
    })
}
