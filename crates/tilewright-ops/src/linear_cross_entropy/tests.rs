//! The case tables of the loss head: every device of this machine, every storage type, shapes that fit no tile.

mod contract;
mod forward;
mod gradients;
mod training;
#[cfg(feature = "gpu")]
mod units;

use super::cpu::Layout;
use super::{Backward, Forward, ForwardBackward, backward_with, forward_backward_with, forward_with, reference};
use crate::testing::{Random, poisoned, random, workspace};
use crate::{DType, Device, Result, Tensor};

const IGNORE: i32 = -100;

/// `(N, D, V, Vp)`: one of everything, primes, `Vp % 16 != 0` (bug 10), `V == Vp`, odd widths (bug 28), padding of a tile and more.
const SHAPES: [[usize; 4]; 12] = [
    [1, 1, 1, 1],
    [1, 33, 29, 37],
    [2, 5, 2, 128],
    [3, 16, 64, 64],
    [5, 33, 29, 37],
    [7, 13, 50, 64],
    [8, 767, 61, 61],
    [13, 3, 17, 300],
    [16, 64, 128, 128],
    [17, 31, 127, 128],
    [31, 33, 257, 384],
    [129, 24, 53, 64],
];

/// Inputs on a device, and their exact values.
#[derive(Clone)]
struct Head {
    device: Device,
    n: usize,
    d: usize,
    vocab: usize,
    vp: usize,
    hidden: Tensor,
    weight: Tensor,
    targets: Vec<i32>,
    dloss: f32,
    /// What `dweight` holds before an accumulating call; NaN means to overwrite.
    start: f32,
    hidden64: Vec<f64>,
    weight64: Vec<f64>,
}

impl Head {
    /// Logits of standard deviation near 1, no ignored row, NaN in the padding rows of the weight: whoever reads them is found out.
    fn new(device: &Device, dtype: DType, [n, d, vocab, vp]: [usize; 4]) -> Head {
        Head::scaled(device, dtype, [n, d, vocab, vp], 1.0)
    }

    fn scaled(device: &Device, dtype: DType, [n, d, vocab, vp]: [usize; 4], std: f32) -> Head {
        let mut rng = Random::new((n * 31 + d * 17 + vocab * 7 + vp) as u64);
        let (hidden, hidden64) = random(device, dtype, &[n, d], 1.0, &mut rng);
        let mut values = rng.normals(vp * d, std / (d as f32).sqrt());
        values[vocab * d..].fill(f32::NAN);
        let weight = Tensor::from_f32(device, dtype, &[vp, d], &values).unwrap();
        let weight64 = weight.read_f32().unwrap().into_iter().map(f64::from).collect();
        let targets = (0..n).map(|_| rng.below(vocab) as i32).collect();
        let dloss = 1.0 / n as f32;
        let device = device.clone();
        Head { device, n, d, vocab, vp, hidden, weight, targets, dloss, start: f32::NAN, hidden64, weight64 }
    }

    fn with_targets(mut self, target: impl Fn(usize) -> i32) -> Head {
        self.targets = (0..self.n).map(target).collect();
        self
    }

    /// Ignores all rows that the predicate names.
    fn ignoring(mut self, ignored: impl Fn(usize) -> bool) -> Head {
        for (row, target) in self.targets.iter_mut().enumerate().filter(|(row, _)| ignored(*row)) {
            let _ = row;
            *target = IGNORE;
        }
        self
    }

    /// Adds to a `dweight` that holds this value everywhere.
    fn adding_to(mut self, start: f32) -> Head {
        self.start = start;
        self
    }

    /// Puts a weight row at `factor` times a hidden row, so that the row's logit there is large.
    fn planting(mut self, row: usize, column: usize, factor: f32) -> Head {
        let d = self.d;
        let mut values = self.weight.read_f32().unwrap();
        let hidden = self.hidden.read_f32().unwrap();
        for j in 0..d {
            values[column * d + j] = factor * hidden[row * d + j];
        }
        self.weight.write_f32(&values).unwrap();
        self.weight64 = self.weight.read_f32().unwrap().into_iter().map(f64::from).collect();
        self
    }

    /// The same head without the ignored rows.
    fn compacted(&self) -> Head {
        let keep: Vec<usize> = (0..self.n).filter(|&row| self.targets[row] != IGNORE).collect();
        let hidden = self.hidden.read_f32().unwrap();
        let rows: Vec<f32> = keep.iter().flat_map(|&row| hidden[row * self.d..][..self.d].to_vec()).collect();
        let hidden = Tensor::from_f32(&self.device, self.hidden.dtype(), &[keep.len(), self.d], &rows).unwrap();
        let targets = keep.iter().map(|&row| self.targets[row]).collect();
        let hidden64 = rows.into_iter().map(f64::from).collect();
        Head { n: keep.len(), hidden, targets, hidden64, ..self.clone() }
    }

    fn reference(&self) -> reference::Problem<'_> {
        reference::Problem {
            hidden: &self.hidden64,
            weight: &self.weight64,
            targets: &self.targets,
            ignore_index: IGNORE,
            d: self.d,
            vocab: self.vocab,
        }
    }

    /// The reference's `(dhidden, dweight)`, with what `dweight` held before, and without the NaN that the weight's padding holds.
    fn reference_gradients(&self) -> (Vec<f64>, Vec<f64>) {
        let (dhidden, mut dweight) = self.reference().backward(f64::from(self.dloss));
        if !self.start.is_nan() {
            dweight.iter_mut().for_each(|w| *w += f64::from(self.start));
        }
        (dhidden, dweight)
    }

    fn targets(&self) -> Tensor {
        Tensor::from_i32(&self.device, &[self.n], &self.targets).unwrap()
    }

    fn dweight(&self) -> Tensor {
        let t = poisoned(&self.device, self.weight.dtype(), &[self.vp, self.d]);
        t.write_f32(&vec![self.start; t.numel()]).unwrap();
        t
    }

    /// `(losses, lse)`
    fn forward(&self, layout: &Layout) -> Result<(Tensor, Tensor)> {
        let [losses, lse] = [(); 2].map(|()| poisoned(&self.device, DType::F32, &[self.n]));
        let args = Forward {
            hidden: &self.hidden,
            weight: &self.weight,
            vocab: self.vocab,
            targets: &self.targets(),
            ignore_index: IGNORE,
            losses: &losses,
            lse: &lse,
            workspace: &workspace(&self.device, layout.bytes_on(&self.device)),
        };
        forward_with(&self.device, &args, layout)?;
        Ok((losses, lse))
    }

    /// `(dhidden, dweight)`
    fn backward(&self, lse: &Tensor, layout: &Layout) -> Result<(Tensor, Tensor)> {
        let dhidden = poisoned(&self.device, self.hidden.dtype(), &[self.n, self.d]);
        let dweight = self.dweight();
        let args = Backward {
            hidden: &self.hidden,
            weight: &self.weight,
            vocab: self.vocab,
            targets: &self.targets(),
            ignore_index: IGNORE,
            lse,
            dloss: self.dloss,
            dhidden: &dhidden,
            dweight: &dweight,
            accumulate_dweight: !self.start.is_nan(),
            workspace: &workspace(&self.device, layout.bytes_on(&self.device)),
        };
        backward_with(&self.device, &args, layout)?;
        Ok((dhidden, dweight))
    }

    /// `(losses, dhidden, dweight)`
    fn train(&self, layout: &Layout) -> Result<(Tensor, Tensor, Tensor)> {
        let losses = poisoned(&self.device, DType::F32, &[self.n]);
        let dhidden = poisoned(&self.device, self.hidden.dtype(), &[self.n, self.d]);
        let dweight = self.dweight();
        let args = ForwardBackward {
            hidden: &self.hidden,
            weight: &self.weight,
            vocab: self.vocab,
            targets: &self.targets(),
            ignore_index: IGNORE,
            losses: &losses,
            dloss: self.dloss,
            dhidden: &dhidden,
            dweight: &dweight,
            accumulate_dweight: !self.start.is_nan(),
            workspace: &workspace(&self.device, layout.bytes_on(&self.device)),
        };
        forward_backward_with(&self.device, &args, layout)?;
        Ok((losses, dhidden, dweight))
    }

    fn forward_layout(&self, rows: usize, cols: usize) -> Layout {
        Layout::forward_tiled(self.device.threads(), self.n, self.d, self.vp, rows, cols)
    }

    fn backward_layout(&self, rows: usize, cols: usize, sum_rows: usize) -> Layout {
        Layout::backward_tiled(self.device.threads(), self.n, self.d, self.vp, rows, cols, sum_rows)
    }

    fn training_layout(&self, rows: usize, cols: usize) -> Layout {
        Layout::training_tiled(self.device.threads(), self.n, self.d, self.vp, rows, cols)
    }
}

fn bits(t: &Tensor) -> Vec<u32> {
    t.read_f32().unwrap().into_iter().map(f32::to_bits).collect()
}

fn values(t: &Tensor) -> Vec<f64> {
    t.read_f32().unwrap().into_iter().map(f64::from).collect()
}
