//! The optimiser step over all parameters.

use tilewright_core::Result;
use tilewright_core::gpt2::{PARAMS, ParamInfo};
use tilewright_ops::{adamw, global_norm};

use super::{Gpt2, TrainState};

/// Hyper-parameters of one optimiser step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f32,
    /// First-moment decay.
    pub beta1: f32,
    /// Second-moment decay.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Decay every tensor, not only matrices and embeddings.
    pub decay_all: bool,
    /// The step's number, from 1.
    pub step: u64,
    /// Multiplies every gradient before clipping.
    pub grad_scale: f32,
    /// Clips by the norm that [`Gpt2::grad_norm`] found last.
    pub max_norm: Option<f32>,
    /// One seed a tensor for stochastic rounding to bf16; `None` rounds to nearest.
    pub stochastic_seeds: Option<[u32; 16]>,
}

impl Gpt2 {
    /// The L2 norm of all gradients; kept on the device for the clipping of [`Gpt2::update`].
    pub fn grad_norm(&mut self) -> Result<f32> {
        self.start_grad_norm()?;
        self.finish_grad_norm()
    }

    /// Launches [`Gpt2::grad_norm`] without waiting for it: an update behind it can be on its way before [`Gpt2::finish_grad_norm`].
    pub fn start_grad_norm(&mut self) -> Result<()> {
        let state = self.train_state("gpt2.grad_norm")?;
        let out = &self.buffers.norm;
        self.replays.borrow_mut().norm.run(&self.device, || {
            global_norm::forward(&self.device, &global_norm::Forward { tensors: &state.grads.tensors, out })
        })?;
        self.buffers.fetch_norm.start()
    }

    /// Waits for the norm that was started last.
    pub fn finish_grad_norm(&self) -> Result<f32> {
        let mut norm = [0.0];
        self.buffers.fetch_norm.finish(&mut norm)?;
        Ok(norm[0])
    }

    /// One AdamW step. With `max_norm`, call [`Gpt2::start_grad_norm`] first. Gradients are left as they are: the next micro-batch overwrites them.
    pub fn update(&mut self, adamw: &AdamW) -> Result<()> {
        let TrainState { grads, m, v, masters } = self.train_state("gpt2.update")?;
        let update = |(i, info): (usize, &ParamInfo)| adamw::Update {
            param: &self.params.tensors[i],
            master: masters.as_ref().map(|s| &s.tensors[i]),
            grad: &grads.tensors[i],
            m: &m.tensors[i],
            v: &v.tensors[i],
            lr: adamw.lr,
            beta1: adamw.beta1,
            beta2: adamw.beta2,
            eps: adamw.eps,
            weight_decay: if info.decayed || adamw.decay_all { adamw.weight_decay } else { 0.0 },
            step: adamw.step,
            grad_scale: adamw.grad_scale,
            clip: adamw.max_norm.map(|max_norm| adamw::Clip { norm: &self.buffers.norm, max_norm }),
            rounding: rounding(adamw.stochastic_seeds.map(|s| s[i])),
            layers: self.stacked_layers(i),
            zero_grad: false,
        };
        let all: Vec<_> = PARAMS.iter().enumerate().map(update).collect();
        adamw::update_all(&self.device, &all)
    }

    /// Fills the master weights from the parameters: after loading or initialising a model without saved masters.
    pub fn masters_from_params(&mut self) -> Result<()> {
        let mut row = Vec::new();
        for (param, master) in self.params().iter().zip(self.masters()) {
            // In pieces: a whole f32 copy of a 16-bit embedding would be the run's largest allocation.
            for start in (0..param.numel()).step_by(1 << 20) {
                let len = (param.numel() - start).min(1 << 20);
                row.resize(len, 0.0);
                param.slice(start, &[len])?.read_f32_into(&mut row)?;
                master.slice(start, &[len])?.write_f32(&row)?;
            }
        }
        Ok(())
    }

    /// Rounds the parameters again from the master weights with the seeds of an earlier update: what a resume does.
    pub fn params_from_masters(&mut self, stochastic_seeds: Option<[u32; 16]>) -> Result<()> {
        for (i, master) in self.masters().iter().enumerate() {
            adamw::round(
                &self.device,
                &adamw::Round {
                    master,
                    param: &self.params.tensors[i],
                    rounding: rounding(stochastic_seeds.map(|s| s[i])),
                    layers: self.stacked_layers(i),
                },
            )?;
        }
        Ok(())
    }

    fn stacked_layers(&self, index: usize) -> usize {
        if PARAMS[index].stacked { self.config.layers } else { 1 }
    }
}

fn rounding(seed: Option<u32>) -> adamw::Rounding {
    match seed {
        Some(seed) => adamw::Rounding::Stochastic { seed },
        None => adamw::Rounding::Nearest,
    }
}
