//! Copies between host and device that nobody waits for longer than needed: on a GPU they go through page-locked memory, in stream order.

#[cfg(feature = "gpu")]
use std::cell::RefCell;

use tilewright_core::Result;

use crate::Tensor;
#[cfg(feature = "cuda")]
use crate::runtime::cuda::pinned::Pinned;
#[cfg(feature = "gpu")]
use crate::runtime::gpu::memory::Reading;
#[cfg(feature = "gpu")]
use crate::tensor::Storage;

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

    /// The same for the tensor's first elements alone.
    pub fn send_front(&self, values: &[i32]) -> Result<()> {
        let front = self.tensor.slice(0, &[values.len()])?;
        #[cfg(feature = "cuda")]
        if let Some(pinned) = self.pinned.as_ref().filter(|_| !values.is_empty()) {
            return pinned.send(front.cuda_address(), values);
        }
        front.write_i32(values)
    }
}

/// Fetches one f32 tensor again and again, such as the losses of each batch.
pub struct Download {
    tensor: Tensor,
    #[cfg(feature = "cuda")]
    pinned: Option<Pinned>,
    #[cfg(feature = "gpu")]
    reading: RefCell<Option<Reading>>,
}

impl Download {
    /// For an f32 tensor.
    pub fn new(tensor: &Tensor) -> Result<Self> {
        Ok(Download {
            #[cfg(feature = "cuda")]
            pinned: Pinned::beside(tensor)?,
            #[cfg(feature = "gpu")]
            reading: RefCell::default(),
            tensor: tensor.clone(),
        })
    }

    /// Starts the copy, in the order of the ops around it; ops that follow do not delay it.
    pub fn start(&self) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(pinned) = &self.pinned {
            return pinned.start(self.tensor.cuda_address(), self.tensor.bytes());
        }
        self.start_reading(&self.tensor)
    }

    /// On a GPU through Vulkan or Metal.
    fn start_reading(&self, what: &Tensor) -> Result<()> {
        #[cfg(feature = "gpu")]
        if let Storage::Gpu(buffer) = &what.storage {
            // One that nobody waited for ends before the next starts.
            drop(self.reading.take());
            if what.numel() > 0 {
                *self.reading.borrow_mut() = Some(buffer.start_download(what.offset, what.bytes())?);
            }
        }
        let _ = what;
        Ok(())
    }

    /// Waits for what [`Download::start_reading`] started, if it was as much; else the tensor is read as it is now.
    fn finish_reading(&self, what: &Tensor, out: &mut [f32]) -> Result<()> {
        #[cfg(feature = "gpu")]
        if let Some(reading) = self.reading.take()
            && reading.bytes() == what.bytes()
            && out.len() == what.numel()
        {
            return reading.finish(out);
        }
        what.read_f32_into(out)
    }

    /// The same for the tensor's first `n` elements alone, which [`Download::finish_front`] waits for.
    pub fn start_front(&self, n: usize) -> Result<()> {
        let front = self.tensor.slice(0, &[n])?;
        #[cfg(feature = "cuda")]
        if let Some(pinned) = self.pinned.as_ref().filter(|_| n > 0) {
            return pinned.start(front.cuda_address(), front.bytes());
        }
        self.start_reading(&front)
    }

    /// Waits for as many elements as were started last.
    pub fn finish_front(&self, out: &mut [f32]) -> Result<()> {
        let front = self.tensor.slice(0, &[out.len()])?;
        #[cfg(feature = "cuda")]
        if let Some(pinned) = self.pinned.as_ref().filter(|_| !out.is_empty()) {
            return pinned.finish(out);
        }
        self.finish_reading(&front, out)
    }

    /// Waits for the copy started last, not for what was launched behind it.
    pub fn finish(&self, out: &mut [f32]) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Some(pinned) = self.pinned.as_ref().filter(|_| out.len() == self.tensor.numel()) {
            return pinned.finish(out);
        }
        self.finish_reading(&self.tensor, out)
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

    #[test]
    fn what_follows_a_start_does_not_change_what_comes_back() {
        for device in devices().into_iter().filter(|d| d.is_gpu()) {
            let values = Tensor::zeros(&device, DType::F32, &[1000]).unwrap();
            let download = Download::new(&values).unwrap();
            let mut got = vec![f32::NAN; 1000];
            values.write_f32(&[1.5; 1000]).unwrap();
            download.start().unwrap();
            values.zero();
            download.finish(&mut got).unwrap();
            assert!(got.iter().all(|&x| x == 1.5), "{}", device.name());
            // One that nobody waited for is forgotten.
            download.start().unwrap();
            values.write_f32(&[2.5; 1000]).unwrap();
            download.start().unwrap();
            download.finish(&mut got).unwrap();
            assert!(got.iter().all(|&x| x == 2.5), "{}", device.name());
            // Nor does it, or one asked for in another length, harm what is read later.
            for n in [1000, 999, 8, 1000] {
                download.start().unwrap();
                download.start_front(n).unwrap();
                assert!(download.finish(&mut [0.0]).is_err(), "a front is not the whole");
                assert!(values.slice(0, &[n]).unwrap().read_f32().unwrap().iter().all(|&x| x == 2.5));
                download.start_front(8).unwrap();
                download.finish_front(&mut got[..4]).unwrap();
                assert!(values.read_f32().unwrap().iter().all(|&x| x == 2.5));
            }
            drop(download);
            assert!(values.read_f32().unwrap().iter().all(|&x| x == 2.5));
        }
    }

    #[test]
    fn a_front_is_sent_and_fetched_and_the_rest_stays() {
        for device in devices() {
            let ids = Tensor::from_i32(&device, &[5], &[9; 5]).unwrap();
            let upload = Upload::new(&ids).unwrap();
            let values = Tensor::from_f32(&device, DType::F32, &[3], &[1.0, 2.0, 3.0]).unwrap();
            let download = Download::new(&values).unwrap();
            for front in [&[1, 2, 3][..], &[], &[7], &[4, 5, 6, 7, 8]] {
                upload.send_front(front).unwrap();
                assert_eq!(&ids.read_i32().unwrap()[..front.len()], front, "{}", device.name());
            }
            upload.send_front(&[0]).unwrap();
            assert_eq!(ids.read_i32().unwrap(), [0, 5, 6, 7, 8]);
            let mut got = [f32::NAN; 2];
            download.start_front(2).unwrap();
            download.finish_front(&mut got).unwrap();
            assert_eq!(got, [1.0, 2.0]);
            download.start_front(0).unwrap();
            download.finish_front(&mut []).unwrap();
            assert!(upload.send_front(&[1; 6]).is_err() && download.start_front(4).is_err());
        }
    }
}
