//! A run of launches recorded once: kernels, addresses and scalars are looked up then, and a replay only encodes them again.

use std::rc::Rc;

use cubecl::client::Graph as Recorded;
use tilewright_core::{Error, Result};

use super::Core;

/// What was recorded, and the memory that it touches: the library keeps the pages where they are while this lives.
pub(crate) struct Graph {
    core: Rc<Core>,
    recorded: Recorded,
    launches: u64,
}

impl Graph {
    /// Records what `ops` launches, without running it. Everything in it must have run once before, so that no kernel is compiled meanwhile.
    pub(crate) fn record(core: Rc<Core>, ops: impl FnOnce() -> Result<()>) -> Result<Self> {
        const OP: &str = "gpu.graph";
        if core.recording.get() {
            let what = "a graph is being recorded already; record one at a time".into();
            return Err(Error::Argument { op: OP, what });
        }
        let client = &core.client;
        core.check(OP, client.graph_prepare())?;
        if let Err(error) = core.check(OP, client.start_capture()) {
            // What was prepared is given up by the only call that is left; its own answer says nothing new.
            let _ = client.stop_capture();
            return Err(error);
        }
        let before = core.launches.get();
        core.recording.set(true);
        let result = ops();
        core.recording.set(false);
        let ended = client.stop_capture();
        result?;
        let recorded = core.check(OP, ended)?;
        let launches = core.launches.get() - before;
        core.launches.set(before);
        Ok(Graph { core, recorded, launches })
    }

    /// Runs it again, in the order of the calls.
    pub(crate) fn replay(&self) -> Result<()> {
        self.core.launches.set(self.core.launches.get() + self.launches);
        // SAFETY: the record holds the pages of all that its kernels touch; a device has one thread and one stream, on which all reads and writes of
        // its tensors go too.
        let replayed = unsafe { self.recorded.replay() };
        self.core.check("gpu.graph", replayed)
    }
}
