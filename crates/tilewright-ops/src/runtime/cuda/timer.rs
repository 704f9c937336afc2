//! Device time between two points of the stream.

use tilewright_core::Result;

use super::Cuda;

impl Cuda {
    /// Milliseconds of device time that the launches of `work` took. Waits for them.
    pub fn timed(&self, work: impl FnOnce() -> Result<()>) -> Result<f32> {
        self.enter();
        let f = &self.driver;
        let (mut start, mut stop) = (std::ptr::null_mut(), std::ptr::null_mut());
        let mut milliseconds = 0.0;
        // SAFETY: out-pointers to locals; the stream lives as long as `self`; both events are destroyed on every path that made them.
        unsafe {
            self.check("cuda.timed", "cuEventCreate", (f.event_create)(&mut start, 0))?;
            self.check("cuda.timed", "cuEventCreate", (f.event_create)(&mut stop, 0))?;
            let measured = self
                .check("cuda.timed", "cuEventRecord", (f.event_record)(start, self.stream))
                .and_then(|()| work())
                .and_then(|()| self.check("cuda.timed", "cuEventRecord", (f.event_record)(stop, self.stream)))
                .and_then(|()| self.check("cuda.timed", "cuEventSynchronize", (f.event_synchronize)(stop)))
                .and_then(|()| {
                    self.check("cuda.timed", "cuEventElapsedTime", (f.event_elapsed)(&mut milliseconds, start, stop))
                });
            (f.event_destroy)(start);
            (f.event_destroy)(stop);
            measured?;
        }
        Ok(milliseconds)
    }
}
