//! The settings of a run. Written to `config.json` in the run folder, and read back by a resume.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tilewright_core::gpt2::{Gpt2Config, VOCAB_SIZE};
use tilewright_core::{DType, Error, Result};

use crate::schedule::{Curve, Schedule};
use crate::thermal::CoolDown;

/// Where tokens come from.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Data {
    /// A plain text, or the bundled one: a vocabulary is learned from it and shards are written into the run folder.
    Text {
        /// The file; `None` is the bundled text.
        path: Option<PathBuf>,
        /// Tokens of the learned vocabulary, end-of-text included.
        vocab_size: usize,
    },
    /// Token shards.
    Shards {
        /// Glob pattern of the training shards.
        train: String,
        /// Glob pattern of the validation shards.
        val: Option<String>,
        /// Vocabulary of the shards.
        vocab_size: usize,
    },
}

/// The model to train.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Model {
    /// A named size, randomly initialised: `d12`, `gpt3:c768`.
    Named(String),
    /// A size of one's own, randomly initialised.
    Sized {
        /// Transformer blocks.
        layers: usize,
        /// Attention heads.
        heads: usize,
        /// Width.
        channels: usize,
    },
    /// A checkpoint to start from.
    File(PathBuf),
}

/// All settings of a run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// The tokens.
    pub data: Data,
    /// The model.
    pub model: Model,
    /// Rows of a micro-batch.
    pub batch: usize,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Tokens of an optimiser step; `None` is one micro-batch.
    pub total_batch: Option<usize>,
    /// Optimiser steps; `None` is one epoch.
    pub steps: Option<usize>,
    /// Learning-rate curve.
    pub schedule: Curve,
    /// Peak learning rate.
    pub lr: f32,
    /// Warm-up steps.
    pub warmup: usize,
    /// Last learning rate as a fraction of the peak.
    pub final_lr_fraction: f32,
    /// AdamW's first decay.
    pub beta1: f32,
    /// AdamW's second decay.
    pub beta2: f32,
    /// AdamW's epsilon.
    pub eps: f32,
    /// Decoupled weight decay of matrices and embeddings.
    pub weight_decay: f32,
    /// Largest gradient norm; 0 does not clip.
    pub clip: f32,
    /// Skip updates whose loss z-score exceeds this; 0 is off.
    pub skip_loss_z: f64,
    /// Skip updates whose gradient-norm z-score exceeds this; 0 is off.
    pub skip_grad_z: f64,
    /// Visit the training samples in llm.c's shuffled order.
    pub shuffle: bool,
    /// Train on the first batch of the validation data, again and again.
    pub overfit: bool,
    /// Validate every so many steps; 0 is never.
    pub val_every: usize,
    /// At most so many validation batches; `None` is the whole split.
    pub val_batches: Option<usize>,
    /// A multiple-choice file to score at each validation after the first.
    pub eval_file: Option<PathBuf>,
    /// Sample every so many steps; 0 is never.
    pub sample_every: usize,
    /// Tokens of a sample.
    pub sample_tokens: usize,
    /// Sampling temperature.
    pub temperature: f32,
    /// Sample only from the most likely tokens; 0 is all.
    pub top_k: usize,
    /// Text that a sample continues.
    pub prompt: Option<String>,
    /// Seed of the samples.
    pub sample_seed: u64,
    /// Write a checkpoint every so many steps and at the end; `Some(0)` never writes one, `None` only at the end.
    pub checkpoint_every: Option<usize>,
    /// Keep so many checkpoints; 0 keeps all.
    pub checkpoint_keep: usize,
    /// Checkpoints of multiples of this are never deleted; 0 is off.
    pub checkpoint_major: usize,
    /// Storage of parameters and activations: `f32`, `bf16` or `f16`.
    pub dtype: String,
    /// Keep f32 master weights beside 16-bit parameters.
    pub masters: bool,
    /// Activation recompute mode 0, 1 or 2.
    pub recompute: u32,
    /// Seed of the initialisation.
    pub seed: u32,
    /// The machine's peak, for the utilisation figure.
    pub peak_gflops: Option<f64>,
    /// When to rest, as `--cool-down` has it; see [`CoolDown`].
    #[serde(default)]
    pub cool_down: Option<String>,
}

impl TrainConfig {
    /// llm.c's settings, for shards.
    pub fn for_shards(train: String, val: Option<String>) -> Self {
        TrainConfig {
            data: Data::Shards { train, val, vocab_size: VOCAB_SIZE },
            model: Model::Named("d12".into()),
            batch: 4,
            seq_len: 1024,
            total_batch: None,
            steps: None,
            schedule: Curve::Cosine,
            lr: 3e-4,
            warmup: 0,
            final_lr_fraction: 1.0,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.0,
            clip: 1.0,
            skip_loss_z: 0.0,
            skip_grad_z: 0.0,
            shuffle: true,
            overfit: false,
            val_every: 20,
            val_batches: Some(20),
            eval_file: None,
            sample_every: 20,
            sample_tokens: 64,
            temperature: 1.0,
            top_k: 0,
            prompt: None,
            sample_seed: 1337,
            checkpoint_every: None,
            checkpoint_keep: 0,
            checkpoint_major: 0,
            dtype: "f32".into(),
            masters: true,
            recompute: 1,
            seed: 42,
            peak_gflops: None,
            cool_down: None,
        }
    }

    /// A small model on a plain text: 2.0 million parameters and 1.8 million tokens, within two minutes on two cores of a server.
    pub fn for_text(path: Option<PathBuf>) -> Self {
        TrainConfig {
            data: Data::Text { path, vocab_size: 1024 },
            model: Model::Sized { layers: 4, heads: 6, channels: 192 },
            batch: 8,
            seq_len: 128,
            steps: Some(1800),
            lr: 2e-3,
            warmup: 100,
            final_lr_fraction: 0.05,
            weight_decay: 0.1,
            val_every: 200,
            val_batches: Some(16),
            sample_every: 500,
            sample_tokens: 160,
            temperature: 0.8,
            top_k: 40,
            recompute: 0,
            ..Self::for_shards(String::new(), None)
        }
    }

    /// The storage type.
    pub fn storage(&self) -> Result<DType> {
        match self.dtype.as_str() {
            "f32" => Ok(DType::F32),
            "bf16" => Ok(DType::BF16),
            "f16" => Ok(DType::F16),
            other => {
                Err(Error::config(format!("parameters cannot be stored as `{other}`"), "use --dtype f32, bf16 or f16"))
            }
        }
    }

    /// When to rest.
    pub fn cool_down(&self) -> Result<Option<CoolDown>> {
        self.cool_down.as_deref().map(str::parse).transpose()
    }

    /// Whether f32 masters are kept: only 16-bit storage has a use for them.
    pub fn has_masters(&self) -> Result<bool> {
        Ok(self.masters && self.storage()? != DType::F32)
    }

    /// Micro-batches of an optimiser step.
    pub fn accumulation(&self) -> Result<usize> {
        let micro = self.batch * self.seq_len;
        let total = self.total_batch.unwrap_or(micro);
        if micro == 0 || total == 0 || !total.is_multiple_of(micro) {
            let what = format!(
                "--total-batch {total} is not a multiple of --batch {} x --seq-len {} = {micro} tokens",
                self.batch, self.seq_len
            );
            let near = (total + micro / 2) / micro.max(1) * micro;
            return Err(Error::config(what, format!("use --total-batch {}", near.max(micro))));
        }
        Ok(total / micro)
    }

    /// Tokens of an optimiser step.
    pub fn tokens_per_step(&self) -> usize {
        self.total_batch.unwrap_or(self.batch * self.seq_len)
    }

    /// The learning-rate schedule of a run of `steps` steps.
    pub fn schedule(&self, steps: usize) -> Schedule {
        Schedule {
            curve: self.schedule,
            peak: self.lr,
            warmup: self.warmup,
            steps,
            final_fraction: self.final_lr_fraction,
        }
    }

    /// The sizes of a randomly initialised model; `None` when they come from a file.
    pub fn model_config(&self, vocab_size: usize) -> Result<Option<Gpt2Config>> {
        let mut config = match &self.model {
            Model::File(_) => return Ok(None),
            Model::Named(name) => Gpt2Config::from_descriptor(name)?,
            &Model::Sized { layers, heads, channels } => Gpt2Config {
                max_seq_len: self.seq_len,
                vocab_size,
                padded_vocab_size: vocab_size,
                layers,
                heads,
                channels,
            },
        };
        config.vocab_size = vocab_size;
        config.padded_vocab_size = vocab_size.next_multiple_of(128);
        config.validate()?;
        Ok(Some(config))
    }

    /// Checks what can be checked before any file is read.
    pub fn validate(&self) -> Result<()> {
        self.storage()?;
        self.accumulation()?;
        self.cool_down()?;
        let positive = |value: f32, flag: &str| {
            if value.is_finite() && value >= 0.0 {
                return Ok(());
            }
            Err(Error::config(
                format!("{flag} {value} must be a finite number of at least 0"),
                format!("try {flag} 0.1"),
            ))
        };
        positive(self.lr, "--lr")?;
        positive(self.final_lr_fraction, "--final-lr-fraction")?;
        positive(self.weight_decay, "--weight-decay")?;
        positive(self.clip, "--clip")?;
        positive(self.temperature, "--temperature")?;
        for (beta, flag) in [(self.beta1, "--beta1"), (self.beta2, "--beta2")] {
            if !(0.0..1.0).contains(&beta) {
                return Err(Error::config(format!("{flag} {beta} is outside [0, 1)"), format!("try {flag} 0.9")));
            }
        }
        if self.recompute > 2 {
            return Err(Error::config(
                format!("there is no recompute mode {}", self.recompute),
                "use --recompute 0, 1 or 2",
            ));
        }
        if self.eval_file.is_some() && self.batch < 4 {
            return Err(Error::config(
                format!("multiple-choice evaluation needs four rows a batch, not --batch {}", self.batch),
                "use --batch 4 or more, or leave --hellaswag out",
            ));
        }
        if self.overfit && matches!(&self.data, Data::Shards { val: None, .. }) {
            return Err(Error::config("--overfit trains on the validation data and there is none", "give --val-data"));
        }
        Ok(())
    }

    /// As `config.json`.
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a plain struct serialises") + "\n"
    }

    /// From `config.json`.
    pub fn from_json(text: &str, path: &std::path::Path) -> Result<Self> {
        serde_json::from_str(text).map_err(|e| {
            let offset =
                text.split_inclusive('\n').take(e.line().saturating_sub(1)).map(str::len).sum::<usize>() + e.column();
            Error::format(
                path,
                offset as u64,
                e.to_string(),
                "repair it, or give all settings as flags in a new --output folder",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn config_json_round_trips() {
        for config in [TrainConfig::for_text(None), TrainConfig::for_shards("a*.bin".into(), Some("b.bin".into()))] {
            config.validate().unwrap();
            assert_eq!(TrainConfig::from_json(&config.to_json(), Path::new("config.json")).unwrap(), config);
        }
    }

    #[test]
    fn broken_config_json_names_path_and_offset() {
        let text = TrainConfig::for_text(None).to_json().replace("\"warmup\"", "\"warmupp\"");
        let message = TrainConfig::from_json(&text, Path::new("runs/x/config.json")).unwrap_err().to_string();
        assert!(message.contains("runs/x/config.json: byte ") && message.contains("warmupp"), "{message}");
    }

    #[test]
    fn total_batch_counts_micro_batches_or_names_the_nearest() {
        let mut config = TrainConfig::for_shards(String::new(), None);
        (config.batch, config.seq_len) = (4, 64);
        assert_eq!(config.accumulation().unwrap(), 1);
        config.total_batch = Some(1024);
        assert_eq!(config.accumulation().unwrap(), 4);
        config.total_batch = Some(1000);
        let message = config.accumulation().unwrap_err().to_string();
        assert!(message.contains("--total-batch 1000") && message.contains("use --total-batch 1024"), "{message}");
        config.total_batch = Some(0);
        assert!(config.accumulation().is_err());
    }

    #[test]
    fn bad_settings_name_their_flag() {
        let good = TrainConfig::for_text(None);
        for (flag, bad) in [
            ("--lr", TrainConfig { lr: f32::NAN, ..good.clone() }),
            ("--clip", TrainConfig { clip: -1.0, ..good.clone() }),
            ("--beta2", TrainConfig { beta2: 1.0, ..good.clone() }),
            ("--dtype", TrainConfig { dtype: "fp8".into(), ..good.clone() }),
            ("--recompute", TrainConfig { recompute: 3, ..good.clone() }),
            ("--batch", TrainConfig { batch: 2, eval_file: Some("x".into()), ..good.clone() }),
            ("--val-data", TrainConfig { overfit: true, ..TrainConfig::for_shards("a".into(), None) }),
        ] {
            let message = bad.validate().unwrap_err().to_string();
            assert!(message.contains(flag), "{flag}: {message}");
        }
    }

    #[test]
    fn a_sized_model_takes_the_vocabulary_of_its_data() {
        let config = TrainConfig::for_text(None).model_config(1000).unwrap().unwrap();
        assert_eq!((config.vocab_size, config.padded_vocab_size, config.max_seq_len), (1000, 1024, 128));
        let named = TrainConfig::for_shards(String::new(), None).model_config(VOCAB_SIZE).unwrap().unwrap();
        assert_eq!(named, Gpt2Config::from_descriptor("d12").unwrap());
    }

    #[test]
    fn masters_exist_only_beside_sixteen_bit_storage() {
        let mut config = TrainConfig::for_text(None);
        assert!(!config.has_masters().unwrap());
        config.dtype = "bf16".into();
        assert!(config.has_masters().unwrap());
        config.masters = false;
        assert!(!config.has_masters().unwrap());
    }
}
