//! The case table: shapes, activations and precisions on every device of the machine.

mod contract;
mod fused;
mod invariance;
mod values;

use std::rc::Rc;

use super::*;
use crate::cpu::{Cpu, Isa};
use crate::testing::{FLOATS, Random, assert_close, poisoned, random};

/// The devices of the machine, and its best processor as one without a dot product of bf16.
fn devices() -> Vec<Device> {
    let mut all = crate::testing::devices();
    all.push(Device::Cpu(Rc::new(Cpu::new(2, Isa::detect()).without_bf16_dot())));
    all
}

const ACTIVATIONS: [Activation; 5] =
    [Activation::None, Activation::Gelu(Gelu::Tanh), Activation::Gelu(Gelu::Erf), Activation::Relu, Activation::Geglu];

fn layout(activation: Activation) -> Layout {
    if activation == Activation::Geglu { Layout::Gated } else { Layout::Plain }
}

/// A layer with all its tensors, weight given in some float type, and the exact numbers.
struct Case {
    shape: (usize, usize, usize),
    precision: DType,
    activation: Activation,
    x: (Tensor, Vec<f64>),
    source: (Tensor, Vec<f64>),
    weight: Weight,
    bias: Option<(Tensor, Vec<f64>)>,
    residual: Option<(Tensor, Vec<f64>)>,
}

impl Case {
    fn new(
        device: &Device,
        (m, n, k): (usize, usize, usize),
        source: DType,
        precision: DType,
        activation: Activation,
        extras: bool,
    ) -> Case {
        let rng = &mut Random::new((m * 7 + n * 5 + k) as u64);
        let x = random(device, DType::F32, &[m, k], 1.0, rng);
        let source = random(device, source, &[n, k], 1.0 / (k as f32).sqrt(), rng);
        let bias = extras.then(|| random(device, DType::F32, &[n], 1.0, rng));
        let columns = if activation == Activation::Geglu { n / 2 } else { n };
        let residual = extras.then(|| random(device, DType::F32, &[m, columns], 1.0, rng));
        let weight = Weight::pack(device, &source.0, precision, layout(activation)).unwrap();
        Case { shape: (m, n, k), precision, activation, x, source, weight, bias, residual }
    }

    fn columns(&self) -> usize {
        if self.activation == Activation::Geglu { self.shape.1 / 2 } else { self.shape.1 }
    }

    fn run(&self, device: &Device, out: &Tensor) {
        self.run_on(device, &self.x.0, self.residual.as_ref().map(|(t, _)| t), out).unwrap();
    }

    fn run_on(&self, device: &Device, x: &Tensor, residual: Option<&Tensor>, out: &Tensor) -> Result<()> {
        let Case { weight, activation, .. } = self;
        let bias = self.bias.as_ref().map(|(t, _)| t);
        forward(device, &Forward { x, weight, bias, activation: *activation, residual, out })
    }

    fn expected(&self) -> Vec<f64> {
        let exact = |t: &Option<(Tensor, Vec<f64>)>| t.as_ref().map(|(_, v)| v.clone());
        // GPUs round the input to the type of the weight; the reference does it for bf16 alone.
        let rounds = crate::testing::is_gpu(self.x.0.device());
        let kept = |&v: &f64| if rounds { reference::kept(self.precision, v) } else { v };
        reference::forward(
            &self.x.1.iter().map(kept).collect::<Vec<_>>(),
            &self.source.1,
            exact(&self.bias).as_deref(),
            self.activation,
            exact(&self.residual).as_deref(),
            self.precision,
            self.shape,
        )
    }

    fn check(&self, device: &Device) {
        let out = poisoned(device, DType::F32, &[self.shape.0, self.columns()]);
        self.run(device, &out);
        let what = format!("{} {:?} {} {:?}", device.name(), self.shape, self.precision, self.activation);
        let (atol, rtol) = tolerance(self.precision);
        assert_close(&what, &out, &self.expected(), atol, rtol);
    }
}

/// Sums of unit size. The reference rounds operands as the kernels do, so all precisions differ from it by sums in f32 alone.
fn tolerance(precision: DType) -> (f64, f64) {
    if precision == DType::BF16 { (1e-5, 1e-5) } else { (5e-6, 5e-6) }
}
