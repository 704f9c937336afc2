//! Random initialisation, value by value the one of llm.c and PyTorch.

use tilewright_core::Result;
use tilewright_core::rng::Mt19937;
use tilewright_ops::Tensor;

use super::{Gpt2, param};

/// Standard deviation of every random weight but the projections back into the residual stream.
const STD: f32 = 0.02;

/// Values drawn at a time; a multiple of the generator's blocks of 16, so that the pieces join to one long draw.
const PIECE: usize = 1 << 16;

impl Gpt2 {
    /// Draws all weights from one mt19937 stream in llm.c's order: layernorm weights 1, biases 0, everything else `N(0, 0.02)`, the
    /// projections into the residual stream `N(0, 0.02 / sqrt(2 L))`. Padded vocabulary rows stay 0. llm.c's seed is 42.
    pub fn init_random(&mut self, seed: u32) -> Result<()> {
        let mut rng = Mt19937::new(seed);
        let layers = self.config.layers;
        let residual_std = STD / (2.0 * layers as f32).sqrt();
        for tensor in self.params() {
            tensor.zero();
        }
        for index in [param::LN1W, param::LN2W, param::LNFW] {
            let tensor = &self.params()[index];
            tensor.write_f32(&vec![1.0; tensor.numel()])?;
        }
        for layer in 0..layers {
            if layer == 0 {
                let wte = &self.params()[param::WTE];
                let real = wte.slice(0, &[self.config.vocab_size, self.config.channels])?;
                draw(&mut rng, &real, STD)?;
                draw(&mut rng, &self.params()[param::WPE], STD)?;
            }
            for (index, std) in
                [(param::QKVW, STD), (param::ATTPROJW, residual_std), (param::FCW, STD), (param::FCPROJW, residual_std)]
            {
                draw(&mut rng, &self.weight(index, layer)?, std)?;
            }
        }
        self.masters_from_params()
    }
}

fn draw(rng: &mut Mt19937, tensor: &Tensor, std: f32) -> Result<()> {
    let flat = tensor.view(&[tensor.numel()])?;
    let mut values = Vec::with_capacity(2 * PIECE);
    let mut start = 0;
    while start < flat.numel() {
        let left = flat.numel() - start;
        // The last piece takes the remainder along: a draw that ends inside a block of 16 redraws its last 16 values.
        let len = if left >= 2 * PIECE { PIECE } else { left };
        values.resize(len, 0.0);
        rng.normal_fill(&mut values, 0.0, std);
        flat.slice(start, &[len])?.write_f32(&values)?;
        start += len;
    }
    Ok(())
}
