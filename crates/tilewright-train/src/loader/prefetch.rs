//! The thread that reads batches ahead.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use tilewright_core::{Error, Result};

use super::{Order, ShardSet};

/// Batches that may wait; a batch is small next to a training step.
const AHEAD: usize = 3;

/// A running reader.
pub(super) struct Prefetch {
    // Dropped first, so that a thread that waits to send sees the end and returns.
    full: Option<Receiver<Result<Vec<i32>>>>,
    empty: Option<SyncSender<Vec<i32>>>,
    thread: Option<JoinHandle<()>>,
}

impl Prefetch {
    /// Starts reading at a position.
    pub(super) fn start(shards: &ShardSet, mut order: Order) -> Self {
        let (send_full, full) = sync_channel(AHEAD);
        let (empty, take_empty) = sync_channel::<Vec<i32>>(AHEAD);
        let tokens = shards.geometry().sample_tokens();
        for _ in 0..AHEAD {
            empty.send(vec![0; tokens]).expect("the channel has room for all buffers");
        }
        let mut shards = shards.clone();
        let work = move || {
            // Buffers circulate: none is allocated while training.
            while let Ok(mut buffer) = take_empty.recv() {
                let result = shards.read(order.next_place(), &mut buffer);
                let failed = result.is_err();
                if send_full.send(result.map(|()| buffer)).is_err() || failed {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("loader".into()).spawn(work).expect("a thread can be started");
        Prefetch { full: Some(full), empty: Some(empty), thread: Some(thread) }
    }

    /// Swaps the next batch into `tokens`.
    pub(super) fn next(&mut self, tokens: &mut Vec<i32>) -> Result<()> {
        let full = self.full.as_ref().expect("present until drop");
        let buffer = full.recv().map_err(|_| Error::Argument {
            op: "loader",
            what: "the reading thread has ended after an earlier error; start the run again".into(),
        })??;
        let old = std::mem::replace(tokens, buffer);
        // The thread may have ended with an error that the next call reports.
        let _ = self.empty.as_ref().expect("present until drop").send(old);
        Ok(())
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.full = None;
        self.empty = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
