//! Runs of ops that repeat with the same tensors and scalars: recorded once on a device that can, and replayed with one call.

use tilewright_core::Result;

use crate::Device;
#[cfg(feature = "cuda")]
use crate::runtime::cuda::Graph;
#[cfg(feature = "gpu")]
use crate::runtime::gpu::graph::Graph as GpuGraph;

/// A run of ops whose arguments never change between calls, such as a forward and backward pass over planned buffers.
///
/// The first call runs the ops, which compiles kernels and finds algorithms; the second records them; all later ones replay the record. A device
/// without graphs runs the ops every time, so the caller needs no other path. What lies in the tensors may change; which tensors and scalars are
/// used must not, nor may the ops copy to or from the host. Checks of values on the host (token ids) are made while the ops run, not when a record
/// is replayed: the caller makes its own.
#[derive(Default)]
pub struct Replay {
    calls: u64,
    #[cfg(feature = "cuda")]
    graph: Option<Graph>,
    #[cfg(feature = "gpu")]
    gpu_graph: Option<GpuGraph>,
    /// Seconds that a piece of the first run should have taken.
    #[cfg(feature = "gpu")]
    piece: f64,
}

/// Launches that a GPU's driver is handed at one time.
#[cfg(feature = "gpu")]
const PIECE: f64 = 32.0;

impl Replay {
    /// Runs or replays.
    pub fn run(&mut self, device: &Device, ops: impl FnOnce() -> Result<()>) -> Result<()> {
        self.calls += 1;
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) if self.calls > 1 => {
                if self.graph.is_none() {
                    self.graph = Some(Graph::record(cuda, ops)?);
                }
                self.graph.as_ref().expect("just recorded").replay()
            }
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) if self.calls == 1 => {
                let now = || (gpu.pace.expected(), gpu.launches());
                let (seconds, launches) = now();
                ops()?;
                let pieces = ((now().1 - launches) as f64 / PIECE).max(1.0);
                self.piece = (now().0 - seconds) / pieces;
                Ok(())
            }
            // A record is handed to the driver in pieces of the library's choice; where one would hold the GPU for longer than it may, launches are cheap
            // beside what they compute anyway.
            #[cfg(feature = "gpu")]
            Device::Gpu(gpu) if gpu.records() && self.piece <= gpu.pace.budget() => {
                if self.gpu_graph.is_none() {
                    self.gpu_graph = Some(GpuGraph::record(gpu.core(), ops)?);
                }
                self.gpu_graph.as_ref().expect("just recorded").replay()
            }
            _ => ops(),
        }
    }

    /// Whether the ops were recorded.
    pub fn is_recorded(&self) -> bool {
        #[cfg(feature = "gpu")]
        if self.gpu_graph.is_some() {
            return true;
        }
        #[cfg(feature = "cuda")]
        return self.graph.is_some();
        #[cfg(not(feature = "cuda"))]
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gelu::{self, Gelu};
    use crate::testing::{devices, is_gpu};
    use crate::{DType, Tensor};

    #[test]
    fn a_replay_sees_what_lies_in_the_tensors_now() {
        for device in devices() {
            let x = Tensor::from_f32(&device, DType::F32, &[2], &[0.0, 10.0]).unwrap();
            let out = Tensor::zeros(&device, DType::F32, &[2]).unwrap();
            let mut replay = Replay::default();
            for value in [1.0f32, 20.0, 30.0, 40.0] {
                x.write_f32(&[0.0, value]).unwrap();
                let ops = || gelu::forward(&device, &gelu::Forward { kind: Gelu::Tanh, x: &x, out: &out });
                replay.run(&device, ops).unwrap();
                let got = out.read_f32().unwrap();
                assert!((got[1] - value).abs() < 0.2, "{got:?} of {value} on {}", device.name());
            }
            assert_eq!(replay.is_recorded(), is_gpu(&device), "{}", device.name());
        }
    }

    #[test]
    fn a_copy_to_the_host_cannot_be_recorded_and_leaves_the_device_usable() {
        for device in devices().into_iter().filter(is_gpu) {
            let x = Tensor::from_f32(&device, DType::F32, &[2], &[0.0, 10.0]).unwrap();
            let mut replay = Replay::default();
            replay.run(&device, || x.read_f32().map(|_| ())).unwrap();
            let error = replay.run(&device, || x.read_f32().map(|_| ())).unwrap_err().to_string();
            assert!(error.contains("part of a graph"), "{error}");
            assert_eq!(x.read_f32().unwrap(), [0.0, 10.0]);
        }
    }
}
