//! Weights in memory: planned from the same code that then fills them.

use tilewright_core::{DType, Result};
use tilewright_ops::linear::{self, Activation, Forward, Layout, Normed, Weight, forward, normed};
use tilewright_ops::{Arena, Device, Plan, Slot, Tensor, layernorm};

/// Where tensors come from, by name: a file, or nothing at all on a null device.
pub(crate) type Source<'a> = dyn Fn(&Device, &str) -> Result<Tensor> + 'a;

/// A linear layer.
pub(crate) struct Linear {
    pub(crate) weight: Weight,
    pub(crate) bias: Option<Tensor>,
}

impl Linear {
    /// `out = activation(x @ weight^T + bias) + residual`.
    pub(crate) fn forward(
        &self,
        device: &Device,
        x: &Tensor,
        activation: Activation,
        residual: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let bias = self.bias.as_ref();
        forward(device, &Forward { x, weight: &self.weight, bias, activation, residual, out })
    }

    /// Says that this layer comes soon.
    pub(crate) fn soon(&self, device: &Device) {
        linear::soon(device, &self.weight);
    }

    /// `out = activation(LN(x) @ weight^T + bias)`; `norm.out` may or may not hold the normalised rows afterwards.
    pub(crate) fn normed(
        &self,
        device: &Device,
        norm: layernorm::Forward<'_>,
        activation: Activation,
        out: &Tensor,
    ) -> Result<()> {
        let (x, bias) = (norm.out, self.bias.as_ref());
        let layer = Forward { x, weight: &self.weight, bias, activation, residual: None, out };
        normed(device, &Normed { norm, layer })
    }
}

/// Scale and shift of a layer normalisation.
pub(crate) struct Norm {
    pub(crate) weight: Tensor,
    pub(crate) bias: Option<Tensor>,
    pub(crate) eps: f32,
}

/// Hands out weights in the order in which a model asks for them. A model is built twice: once on a null device, which plans, and once on its own device
/// with the planned arena.
pub(crate) struct Store<'a> {
    device: Device,
    source: &'a Source<'a>,
    /// Of the device that the plan is for.
    target: Device,
    plan: Plan,
    slots: Vec<Slot>,
    arena: Option<Arena>,
    taken: usize,
}

impl<'a> Store<'a> {
    /// Builds a model's weights on a device.
    pub(crate) fn build<T>(
        device: &Device,
        blank: &'a Source<'a>,
        source: &'a Source<'a>,
        model: impl Fn(&mut Store<'a>) -> Result<T>,
    ) -> Result<(T, Arena)> {
        let mut planner = Store {
            device: Device::null(device.threads()),
            source: blank,
            target: device.clone(),
            plan: Plan::new("weights"),
            slots: Vec::new(),
            arena: None,
            taken: 0,
        };
        model(&mut planner)?;
        let arena = Arena::allocate(device, planner.plan.clone())?;
        let mut filler = Store { device: device.clone(), source, arena: Some(arena.clone()), ..planner };
        Ok((model(&mut filler)?, arena))
    }

    /// The next slot.
    fn take(&mut self, name: &str, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        match &self.arena {
            None => {
                self.slots.push(self.plan.add(name, dtype, shape));
                Tensor::zeros(&self.device, dtype, shape)
            }
            Some(arena) => {
                let slot = self.slots[self.taken];
                self.taken += 1;
                Ok(arena.tensor(slot))
            }
        }
    }

    /// A tensor of the source, kept as f32.
    pub(crate) fn f32(&mut self, name: &str) -> Result<Tensor> {
        let source = (self.source)(&self.device, name)?;
        let tensor = self.take(name, DType::F32, &source.shape())?;
        tensor.write_f32(&source.read_f32()?)?;
        Ok(tensor)
    }

    /// Elements `start..start + n` of a tensor of the source, kept as f32.
    pub(crate) fn f32_part(&mut self, name: &str, start: usize, n: usize) -> Result<Tensor> {
        let source = (self.source)(&self.device, name)?.slice(start, &[n])?;
        let tensor = self.take(name, DType::F32, &[n])?;
        tensor.write_f32(&source.read_f32()?)?;
        Ok(tensor)
    }

    /// A tensor of the source where it lies.
    pub(crate) fn unpacked(&self, name: &str) -> Result<Tensor> {
        (self.source)(&self.device, name)
    }

    /// Whether slots are real: the planning pass needs no values.
    pub(crate) fn fills(&self) -> bool {
        self.arena.is_some()
    }

    /// A slot that the caller fills.
    pub(crate) fn slot(&mut self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.take(name, DType::F32, shape)
    }

    /// Rows `rows` of a weight, or all of it, packed.
    pub(crate) fn weight(
        &mut self,
        name: &str,
        rows: Option<std::ops::Range<usize>>,
        precision: DType,
        layout: Layout,
    ) -> Result<Weight> {
        let mut source = (self.source)(&self.device, name)?;
        let (n, k) = source.shape().as_matrix();
        let rows = rows.unwrap_or(0..n);
        source = source.slice(rows.start * k, &[rows.len(), k])?;
        let bytes = Weight::packed_bytes(&self.target, rows.len(), k, precision, layout)?;
        let memory = self.take(name, DType::U8, &[bytes])?;
        if self.arena.is_none() {
            // The null device packs for the best instruction set, which need not be the target's.
            return Weight::pack(&self.device, &source, precision, layout);
        }
        Weight::pack_into(&self.device, &source, precision, layout, &memory)
    }

    /// `{name}.weight` with `{name}.bias`, if there is one.
    pub(crate) fn linear(&mut self, name: &str, precision: DType, layout: Layout, bias: bool) -> Result<Linear> {
        Ok(Linear {
            weight: self.weight(&format!("{name}.weight"), None, precision, layout)?,
            bias: if bias { Some(self.f32(&format!("{name}.bias"))?) } else { None },
        })
    }

    /// `{name}.weight` with `{name}.bias`, if there is one.
    pub(crate) fn norm(&mut self, name: &str, eps: f32, bias: bool) -> Result<Norm> {
        Ok(Norm {
            weight: self.f32(&format!("{name}.weight"))?,
            bias: if bias { Some(self.f32(&format!("{name}.bias"))?) } else { None },
            eps,
        })
    }
}
