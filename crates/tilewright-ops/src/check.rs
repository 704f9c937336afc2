//! Argument checks shared by all ops. Each op builds one [`Check`] and runs it before any kernel.

use tilewright_core::{DType, Error, Result, Shape};

use crate::{Device, Tensor};

pub(crate) struct Check<'a> {
    pub(crate) op: &'static str,
    pub(crate) device: &'a Device,
}

impl<'a> Check<'a> {
    pub(crate) fn new(op: &'static str, device: &'a Device) -> Self {
        Check { op, device }
    }

    /// Device, float storage and shape of one argument.
    pub(crate) fn float(&self, what: &'static str, t: &Tensor, shape: &[usize]) -> Result<()> {
        if !t.dtype().is_float() {
            return Err(Error::DType { op: self.op, what, got: t.dtype(), want: "f32, f16 or bf16".into() });
        }
        self.shape(what, t, shape)
    }

    /// Device, exact dtype and shape of one argument.
    pub(crate) fn typed(&self, what: &'static str, t: &Tensor, dtype: DType, shape: &[usize]) -> Result<()> {
        if t.dtype() != dtype {
            return Err(Error::DType { op: self.op, what, got: t.dtype(), want: dtype.to_string() });
        }
        self.shape(what, t, shape)
    }

    /// Device and shape of one argument.
    pub(crate) fn shape(&self, what: &'static str, t: &Tensor, shape: &[usize]) -> Result<()> {
        self.on_device(what, t)?;
        if t.shape().dims() != shape {
            return Err(Error::Shape { op: self.op, what, got: t.shape(), want: Shape::new(shape).to_string() });
        }
        Ok(())
    }

    /// Device and matrix view of one argument: leading dimensions may be folded.
    pub(crate) fn matrix(&self, what: &'static str, t: &Tensor, rows: usize, cols: usize) -> Result<()> {
        self.on_device(what, t)?;
        if !t.dtype().is_float() {
            return Err(Error::DType { op: self.op, what, got: t.dtype(), want: "f32, f16 or bf16".into() });
        }
        if t.shape().as_matrix() != (rows, cols) {
            return Err(Error::Shape { op: self.op, what, got: t.shape(), want: format!("({rows}, {cols})") });
        }
        Ok(())
    }

    /// The argument lives where the op runs.
    pub(crate) fn on_device(&self, what: &'static str, t: &Tensor) -> Result<()> {
        if !t.device().same(self.device) {
            return Err(Error::Device { op: self.op, what, got: t.device().name(), want: self.device.name() });
        }
        Ok(())
    }

    /// A scalar argument's range.
    pub(crate) fn argument(&self, ok: bool, what: impl FnOnce() -> String) -> Result<()> {
        if ok { Ok(()) } else { Err(Error::Argument { op: self.op, what: what() }) }
    }

    /// A workspace is large enough.
    pub(crate) fn workspace(&self, t: &Tensor, bytes: usize) -> Result<()> {
        self.on_device("workspace", t)?;
        if t.bytes() < bytes {
            return Err(Error::Shape {
                op: self.op,
                what: "workspace",
                got: t.shape(),
                want: format!("at least {bytes} bytes"),
            });
        }
        Ok(())
    }

    /// No output shares memory with another output or with an input, and all can be written. Arguments that may be updated in place are
    /// left out of `inputs` by the caller, whose contract says so.
    pub(crate) fn disjoint(
        &self,
        outputs: &[(&'static str, &Tensor)],
        inputs: &[(&'static str, &Tensor)],
    ) -> Result<()> {
        for (i, (output, o)) in outputs.iter().enumerate() {
            if o.is_read_only() {
                return Err(Error::ReadOnly { op: self.op, what: output });
            }
            for (other, t) in outputs[i + 1..].iter().chain(inputs) {
                if o.overlaps(t) {
                    return Err(Error::Overlap { op: self.op, output, other });
                }
            }
        }
        Ok(())
    }
}
