//! Copies between host and device that nobody waits for longer than needed: on a GPU they go through page-locked memory, in stream order.

use tilewright_core::Result;

use crate::Tensor;
#[cfg(feature = "cuda")]
use crate::runtime::cuda::pinned::Pinned;

/// Sends i32 values to one tensor again and again, such as the tokens of each batch.
pub struct Upload {
    tensor: Tensor,
    #[cfg(feature = "cuda")]
    pinned: Option<Pinned>,
}

impl Upload {
    /// For an i32 tensor.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        Ok(Upload {
            #[cfg(feature = "cuda")]
            pinned: Pinned::beside(tensor)?,
            tensor: tensor.clone(),
        })
    }

    /// Fills the tensor, in the order of the ops around it. Waits only for an earlier `send` that is not done yet.
    pub fn send(&self, values: &[i32]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(pinned) = self.pinned.as_ref().filter(|_| values.len() == self.tensor.numel()) {
            return pinned.send(self.tensor.cuda_address(), values);
        }
        self.tensor.write_i32(values)
    }
}

/// Fetches one f32 tensor again and again, such as the losses of each batch.
pub struct Download {
    tensor: Tensor,
    #[cfg(feature = "cuda")]
    pinned: Option<Pinned>,
}

impl Download {
    /// For an f32 tensor.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        Ok(Download {
            #[cfg(feature = "cuda")]
            pinned: Pinned::beside(tensor)?,
            tensor: tensor.clone(),
        })
    }

    /// Starts the copy, in the order of the ops around it; ops that follow do not delay it.
    pub fn start(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(pinned) = &self.pinned {
            return pinned.start(self.tensor.cuda_address());
        }
        Ok(())
    }

    /// Waits for the copy started last, not for what was launched behind it.
    pub fn finish(&self, out: &mut [f32]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(pinned) = self.pinned.as_ref().filter(|_| out.len() == self.tensor.numel()) {
            return pinned.finish(out);
        }
        self.tensor.read_f32_into(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::devices;
    use crate::{DType, Tensor};

    #[test]
    fn what_was_sent_last_is_there_and_what_was_started_last_comes_back() {
        for device in devices() {
            let ids = Tensor::zeros(&device, DType::I32, &[5]).unwrap();
            let upload = Upload::new(&ids).unwrap();
            let values = Tensor::zeros(&device, DType::F32, &[3]).unwrap();
            let download = Download::new(&values).unwrap();
            for round in 0..4 {
                upload.send(&[round, 1, 2, 3, -100]).unwrap();
                assert_eq!(ids.read_i32().unwrap(), [round, 1, 2, 3, -100], "{}", device.name());
                values.write_f32(&[round as f32, -1.0, 0.5]).unwrap();
                download.start().unwrap();
                let mut got = [f32::NAN; 3];
                download.finish(&mut got).unwrap();
                assert_eq!(got, [round as f32, -1.0, 0.5], "{}", device.name());
            }
            assert!(upload.send(&[1]).is_err() && download.finish(&mut [0.0]).is_err());
        }
    }
}
