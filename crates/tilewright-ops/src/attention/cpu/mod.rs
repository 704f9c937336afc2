//! Attention on the processor. A task owns one (batch, head), or a fixed share of it where there are few of them; it packs its operands to
//! f32 rows padded to whole registers and works in blocks that stay in the first two cache levels:
//!
//! - [`forward`]: for a block of queries, over blocks of keys: `S = Q K^T`, online softmax, `O += P V`;
//! - [`backward`]: for a block of keys, over blocks of queries: `S` and `dP = dO V^T` again, then `dV += P^T dO`, `dK += dS^T Q`,
//!   `dQ += dS K`. `dQ` of the whole (batch, head) is kept in f32 next to it.
//!
//! The shares depend on the shape alone, so the bits do not depend on the number of threads.

mod backward;
mod decode;
mod forward;

pub(super) use backward::{Tensors as BackwardTensors, backward};
pub(super) use decode::{Tensors as DecodeTensors, decode};
pub(super) use forward::forward;

use crate::cpu::tiles::simd::WIDTH;
use crate::cpu::tiles::{Cut, Shared, log2_scale};

/// Queries of a block.
const QUERIES: usize = 64;
/// Keys of a block of the backward pass; as [`QUERIES`], so that only blocks of equal index lie on the diagonal.
const BACKWARD_KEYS: usize = QUERIES;
/// Tasks to aim for where the heads alone give fewer.
const TASKS: usize = 32;
/// Blocks that a share has at least on average: packing must stay small against the products.
const SHARE: usize = 4;

/// Sizes of one call.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) head: usize,
}

impl Sizes {
    fn c(&self) -> usize {
        self.heads * self.head
    }

    /// A packed row: the head size in whole registers.
    fn stride(&self) -> usize {
        self.head.next_multiple_of(WIDTH)
    }

    /// Into how many shares the blocks of one (batch, head) are dealt, like cards.
    fn shares(&self) -> usize {
        let most = self.t.div_ceil(QUERIES).div_ceil(SHARE);
        TASKS.div_ceil((self.b * self.heads).max(1)).min(most).max(1)
    }

    /// First elements of (batch, head) in a `(B, T, 3C)` and a `(B, T, C)` tensor, and in `(B, H, T)`.
    fn starts(&self, pair: usize) -> (usize, usize, usize) {
        let (batch, head) = (pair / self.heads, pair % self.heads);
        let (rows, column) = (batch * self.t, head * self.head);
        (rows * 3 * self.c() + column, rows * self.c() + column, pair * self.t)
    }
}

/// f32 elements of workspace that forward and backward need, for so many threads.
pub(super) fn workspace_floats(sizes: Sizes, threads: usize) -> usize {
    let forward = forward::Layout::new(sizes).floats * threads;
    let backward = backward::Layout::new(sizes);
    forward.max(backward.floats * threads + backward.shared_floats)
}
