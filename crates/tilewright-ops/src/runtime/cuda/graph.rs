//! Graphs: a run of launches recorded once and replayed with one call.

use std::rc::Rc;

use tilewright_core::{Error, Result};

use super::Cuda;
use super::driver::{self, Handle};

/// A recorded run of launches, with the addresses that it had then. The tensors that it touches must outlive it; models keep both.
pub struct Graph {
    device: Rc<Cuda>,
    executable: Handle,
}

impl Graph {
    /// Records what `launches` launches, without running it. Everything in it must have run once before, so that no kernel is compiled and no
    /// algorithm is searched while recording.
    pub fn record(device: &Rc<Cuda>, launches: impl FnOnce() -> Result<()>) -> Result<Self> {
        const OP: &str = "cuda.graph";
        if device.recording() {
            return Err(Error::Argument {
                op: OP,
                what: "a graph is being recorded already; record one at a time".into(),
            });
        }
        device.enter();
        let f = &device.driver;
        // SAFETY: the stream is the device's own; out-pointers to locals; what is made is destroyed on every path.
        unsafe {
            device.check(OP, "cuStreamBeginCapture", (f.capture_begin)(device.stream, driver::CAPTURE_THREAD_LOCAL))?;
            device.recording.set(true);
            // What a record reads it has to make.
            device.forget_moments();
            let result = launches();
            device.forget_moments();
            device.recording.set(false);
            let mut graph = std::ptr::null_mut();
            let ended = (f.capture_end)(device.stream, &mut graph);
            let made = result.and_then(|()| device.check(OP, "cuStreamEndCapture", ended)).and_then(|()| {
                let mut executable = std::ptr::null_mut();
                device.check(OP, "cuGraphInstantiate", (f.graph_instantiate)(&mut executable, graph, 0))?;
                Ok(executable)
            });
            if !graph.is_null() {
                (f.graph_destroy)(graph);
            }
            Ok(Graph { device: device.clone(), executable: made? })
        }
    }

    /// Runs it again, in stream order.
    pub fn replay(&self) -> Result<()> {
        self.device.enter();
        self.device.forget_moments();
        // SAFETY: both live as long as `self`.
        let status = unsafe { (self.device.driver.graph_launch)(self.executable, self.device.stream) };
        self.device.check("cuda.graph", "cuGraphLaunch", status)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.enter();
        // SAFETY: made by `record`, destroyed once, after its last run.
        unsafe {
            (self.device.driver.stream_synchronize)(self.device.stream);
            (self.device.driver.graph_exec_destroy)(self.executable);
        }
    }
}
