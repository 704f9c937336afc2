//! Batches of tokens from shard files, in llm.c's order, read ahead by a thread.
//!
//! The consumer and the reading thread each hold a copy of the [`Order`]: the thread's runs ahead, the consumer's tells where training
//! stands, which is what a checkpoint saves.

mod order;
mod prefetch;
mod shards;

pub use order::{Order, Place};
pub use shards::{Geometry, ShardSet};

use tilewright_core::Result;

use prefetch::Prefetch;

/// Gives batch after batch, for ever.
pub struct Loader {
    shards: ShardSet,
    order: Order,
    seed: Option<u32>,
    source: Source,
    tokens: Vec<i32>,
}

enum Source {
    /// The consumer reads: validation, where order restarts often.
    Direct,
    /// A thread reads ahead.
    Thread(Prefetch),
}

/// One batch: `B * T` inputs and their targets, the inputs shifted by one.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Batch<'a> {
    /// Input tokens.
    pub inputs: &'a [i32],
    /// Target tokens.
    pub targets: &'a [i32],
}

impl Loader {
    /// A loader over shards, shuffled when there is a seed (llm.c: 42 + rank), with a thread that reads ahead when `prefetch` is set.
    pub fn new(shards: ShardSet, seed: Option<u32>, prefetch: bool) -> Result<Self> {
        let order = Order::new(shards.samples(), seed);
        let tokens = vec![0; shards.geometry().sample_tokens()];
        let source = if prefetch { Source::Thread(Prefetch::start(&shards, order.clone())) } else { Source::Direct };
        Ok(Loader { shards, order, seed, source, tokens })
    }

    /// The shards.
    pub fn shards(&self) -> &ShardSet {
        &self.shards
    }

    /// Where the consumer stands.
    pub fn order(&self) -> &Order {
        &self.order
    }

    /// Continues at a saved position.
    pub fn restore(&mut self, order: Order) {
        if let Source::Thread(thread) = &mut self.source {
            *thread = Prefetch::start(&self.shards, order.clone());
        }
        self.order = order;
    }

    /// Starts again as if new: what validation does each time, so that its losses can be compared.
    pub fn rewind(&mut self) {
        self.restore(Order::new(self.shards.samples(), self.seed));
    }

    /// The next batch.
    pub fn next_batch(&mut self) -> Result<Batch<'_>> {
        let place = self.order.next_place();
        match &mut self.source {
            Source::Direct => self.shards.read(place, &mut self.tokens)?,
            Source::Thread(thread) => thread.next(&mut self.tokens)?,
        }
        let n = self.tokens.len() - 1;
        Ok(Batch { inputs: &self.tokens[..n], targets: &self.tokens[1..] })
    }
}

#[cfg(test)]
mod tests;
