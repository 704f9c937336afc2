//! GPT-2: pre-layernorm transformer with learned positions and a tied head, written out forward and backward.
//!
//! `x = wte[token] + wpe[position]`; each block `x += attproj(attention(ln1(x)))`, `x += fcproj(gelu(fc(ln2(x))))`;
//! loss `= cross_entropy(lnf(x) @ wte^T)`, computed without the logits. Every buffer is planned before the first step.

mod backward;
mod buffers;
mod decode;
mod forward;
mod init;
mod update;

use std::cell::RefCell;
use std::collections::HashMap;

use tilewright_core::gpt2::{Gpt2Config, PARAMS};
use tilewright_core::{DType, Error, Result};
use tilewright_ops::{Arena, Device, Plan, Replay, Tensor};

use buffers::Buffers;
pub use decode::Decoder;
pub use update::AdamW;

/// Indices of the parameter tensors, in the order of [`PARAMS`].
pub mod param {
    #![allow(missing_docs)]
    pub const WTE: usize = 0;
    pub const WPE: usize = 1;
    pub const LN1W: usize = 2;
    pub const LN1B: usize = 3;
    pub const QKVW: usize = 4;
    pub const QKVB: usize = 5;
    pub const ATTPROJW: usize = 6;
    pub const ATTPROJB: usize = 7;
    pub const LN2W: usize = 8;
    pub const LN2B: usize = 9;
    pub const FCW: usize = 10;
    pub const FCB: usize = 11;
    pub const FCPROJW: usize = 12;
    pub const FCPROJB: usize = 13;
    pub const LNFW: usize = 14;
    pub const LNFB: usize = 15;
}

/// Added to the variance of every layer normalisation.
pub const LAYERNORM_EPS: f32 = 1e-5;

/// The target of rows that do not count towards the loss.
pub const IGNORE_INDEX: i32 = -100;

/// Which activations are computed again in the backward pass instead of being kept.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Recompute {
    /// Everything is kept.
    None,
    /// The output of GELU is recomputed from its stored argument.
    #[default]
    Gelu,
    /// The outputs of `ln1` and `ln2` too, from their stored statistics.
    GeluAndLayernorm,
}

impl TryFrom<u32> for Recompute {
    type Error = Error;

    /// llm.c's numbers: 0, 1, 2.
    fn try_from(mode: u32) -> Result<Self> {
        match mode {
            0 => Ok(Recompute::None),
            1 => Ok(Recompute::Gelu),
            2 => Ok(Recompute::GeluAndLayernorm),
            _ => Err(Error::config(
                format!("there is no recompute mode {mode}"),
                "use 0 (keep all), 1 (recompute GELU) or 2 (GELU and layernorm)",
            )),
        }
    }
}

/// What a [`Gpt2`] is built for. All memory follows from it and from the configuration.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Options {
    /// Rows of a micro-batch, `B`.
    pub batch: usize,
    /// Tokens of a row, `T`.
    pub seq_len: usize,
    /// Activation recompute.
    pub recompute: Recompute,
    /// Storage of parameters, gradients and activations; arithmetic is f32.
    pub dtype: DType,
    /// Gradients, moments and per-layer activations are planned too; without it only losses can be computed.
    pub train: bool,
    /// f32 master copies of the parameters; useful with 16-bit storage.
    pub masters: bool,
    /// Positions of the sampling cache, planned with the rest; 0 has none.
    pub decode_len: usize,
}

impl Options {
    /// f32 training at a batch and length, llm.c's default recompute mode, no sampling cache.
    pub fn training(batch: usize, seq_len: usize) -> Self {
        Options {
            batch,
            seq_len,
            recompute: Recompute::default(),
            dtype: DType::F32,
            train: true,
            masters: false,
            decode_len: 0,
        }
    }

    /// Losses only.
    pub fn evaluation(batch: usize, seq_len: usize) -> Self {
        Options { train: false, ..Options::training(batch, seq_len) }
    }

    fn validate(&self, config: &Gpt2Config) -> Result<()> {
        config.validate()?;
        if self.batch == 0 || self.seq_len == 0 {
            let what = format!("batch {} and sequence length {} must be positive", self.batch, self.seq_len);
            return Err(Error::config(what, "use --batch 4 --seq-len 64 for a start"));
        }
        let longest = self.seq_len.max(self.decode_len);
        if longest > config.max_seq_len {
            let what = format!("sequence length {longest} exceeds the model's {} positions", config.max_seq_len);
            return Err(Error::config(what, format!("use at most --seq-len {}", config.max_seq_len)));
        }
        if !self.dtype.is_float() {
            return Err(Error::config(
                format!("parameters cannot be stored as {}", self.dtype),
                "use f32, bf16 or f16",
            ));
        }
        Ok(())
    }
}

/// Sixteen tensors in the order of [`PARAMS`], in one arena.
pub(crate) struct ParamSet {
    pub(crate) arena: Arena,
    pub(crate) tensors: Vec<Tensor>,
}

impl ParamSet {
    fn allocate(device: &Device, name: &'static str, config: &Gpt2Config, dtype: DType) -> Result<Self> {
        let mut plan = Plan::new(name);
        let slots: Vec<_> =
            PARAMS.iter().enumerate().map(|(i, p)| plan.add(p.name, dtype, &config.param_shape(i))).collect();
        let arena = Arena::allocate(device, plan)?;
        let tensors = slots.into_iter().map(|s| arena.tensor(s)).collect();
        Ok(ParamSet { arena, tensors })
    }
}

/// What exists only for training.
pub(crate) struct TrainState {
    pub(crate) grads: ParamSet,
    pub(crate) m: ParamSet,
    pub(crate) v: ParamSet,
    pub(crate) masters: Option<ParamSet>,
}

/// A GPT-2 with all its buffers.
pub struct Gpt2 {
    config: Gpt2Config,
    options: Options,
    device: Device,
    params: ParamSet,
    train: Option<TrainState>,
    buffers: Buffers,
    decoder: Option<Decoder>,
    replays: RefCell<Replays>,
}

/// The repeated runs of ops; a device that can records them once and replays them.
#[derive(Default)]
pub(crate) struct Replays {
    /// Forward pass and losses.
    evaluation: Replay,
    /// Forward pass, losses and the head's gradients, by `accumulate` and the bits of a row's weight.
    head: HashMap<(bool, u32), Replay>,
    /// The rest of the backward pass, by `accumulate`.
    layers: [Replay; 2],
    /// The norm of all gradients.
    norm: Replay,
}

impl Gpt2 {
    /// Plans and allocates everything; parameters are zero until [`Gpt2::init_random`] or a checkpoint fills them.
    ///
    /// # Errors
    /// [`Error::Config`] for impossible sizes, [`Error::OutOfMemory`] before an arena that does not fit; on a device with memory of its own, before the first
    /// arena when the plan of all does not fit.
    pub fn new(device: &Device, config: Gpt2Config, options: Options) -> Result<Self> {
        if let Some(free) = device.free_bytes()? {
            let planned = Self::allocate(&device.planner(), config, options)?;
            let wanted: usize = planned.arenas().iter().map(|plan| plan.bytes()).sum();
            if wanted > free {
                let Options { batch, seq_len, dtype, .. } = options;
                return Err(Error::OutOfMemory {
                    what: format!("the plan of B={batch} T={seq_len} in {dtype}"),
                    device: device.name(),
                    wanted: wanted as u64,
                    available: free as u64,
                    hint: "use a smaller batch, sequence or model, or a higher recompute mode; `tilewright plan` with the same --device shows what fits"
                        .into(),
                });
            }
        }
        Self::allocate(device, config, options)
    }

    fn allocate(device: &Device, config: Gpt2Config, options: Options) -> Result<Self> {
        options.validate(&config)?;
        let params = ParamSet::allocate(device, "parameters", &config, options.dtype)?;
        let train = if options.train {
            Some(TrainState {
                grads: ParamSet::allocate(device, "gradients", &config, options.dtype)?,
                m: ParamSet::allocate(device, "first moments", &config, DType::F32)?,
                v: ParamSet::allocate(device, "second moments", &config, DType::F32)?,
                masters: if options.masters {
                    Some(ParamSet::allocate(device, "master weights", &config, DType::F32)?)
                } else {
                    None
                },
            })
        } else {
            None
        };
        let buffers = Buffers::allocate(device, &config, &options)?;
        let decoder = match options.decode_len {
            0 => None,
            len => Some(Decoder::new(device, config, &params.tensors, len)?),
        };
        let replays = RefCell::default();
        Ok(Gpt2 { config, options, device: device.clone(), params, train, buffers, decoder, replays })
    }

    /// The model's sizes.
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// What it was built for.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// Where it lives.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The parameters, in the order of [`PARAMS`].
    pub fn params(&self) -> &[Tensor] {
        &self.params.tensors
    }

    /// The gradients; empty without training.
    pub fn grads(&self) -> &[Tensor] {
        self.train.as_ref().map_or(&[], |t| &t.grads.tensors)
    }

    /// First moments; empty without training.
    pub fn m(&self) -> &[Tensor] {
        self.train.as_ref().map_or(&[], |t| &t.m.tensors)
    }

    /// Second moments; empty without training.
    pub fn v(&self) -> &[Tensor] {
        self.train.as_ref().map_or(&[], |t| &t.v.tensors)
    }

    /// f32 master weights; empty unless asked for.
    pub fn masters(&self) -> &[Tensor] {
        self.train.as_ref().and_then(|t| t.masters.as_ref()).map_or(&[], |m| &m.tensors)
    }

    /// The sampling cache, when [`Options::decode_len`] planned one.
    pub fn decoder(&mut self) -> Option<&mut Decoder> {
        self.decoder.as_mut()
    }

    /// The arenas, in the order of their allocation: names, slots and bytes.
    pub fn arenas(&self) -> Vec<&Plan> {
        let mut all = vec![self.params.arena.plan()];
        if let Some(t) = &self.train {
            all.extend([&t.grads, &t.m, &t.v].map(|s| s.arena.plan()));
            all.extend(t.masters.as_ref().map(|s| s.arena.plan()));
        }
        all.extend(self.buffers.arenas.iter().map(Arena::plan));
        all.extend(self.decoder.as_ref().map(|d| d.arena.plan()));
        all
    }

    /// Bytes by purpose: every arena, then the device's own scratch.
    pub fn accounting(&self) -> Vec<(&'static str, usize)> {
        let mut all: Vec<_> = self.arenas().into_iter().map(|p| (p.name(), p.bytes())).collect();
        all.push(("device scratch", self.device.scratch_bytes()));
        all
    }

    pub(crate) fn train_state(&self, op: &'static str) -> Result<&TrainState> {
        self.train.as_ref().ok_or_else(|| Error::Argument {
            op,
            what: "the model was built without training buffers; set Options::train".into(),
        })
    }

    /// Layer `layer` of stacked parameter `index`.
    pub(crate) fn weight(&self, index: usize, layer: usize) -> Result<Tensor> {
        self.params.tensors[index].index(layer)
    }
}

#[cfg(test)]
mod tests;
