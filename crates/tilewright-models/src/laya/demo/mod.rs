//! Checkpoints with random weights in the real format: for trying the program, for tests, and for measuring full-size shapes without their weights.

mod tokenizer;
mod weights;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tilewright_core::fs::{sync_folder_of, write_atomic};
use tilewright_core::{DType, Error, Result};

use super::checkpoint::{AGENT, ENCODER, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS};
use super::config::{AgentConfig, OptionLayout};
use super::params;
use crate::modernbert::{EncoderConfig, every};

/// Which checkpoint to write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DemoShape {
    /// A model of 0.3 million parameters: answers at once, and means nothing.
    Tiny,
    /// The shape of the English checkpoint: ModernBERT-large, 421 million parameters, 847 MB.
    Large,
    /// The shape of the multilingual checkpoint: mmBERT-base, 322 million parameters, 644 MB.
    MmbertBase,
}

impl DemoShape {
    /// The encoder's sizes.
    pub fn encoder(self) -> EncoderConfig {
        match self {
            DemoShape::Tiny => EncoderConfig {
                vocab_size: 320,
                hidden: 64,
                intermediate: 96,
                heads: 4,
                layers: every(6, 3),
                local_attention: 32,
                max_positions: 2048,
                ..EncoderConfig::modernbert_large()
            },
            DemoShape::Large => EncoderConfig::modernbert_large(),
            DemoShape::MmbertBase => EncoderConfig::mmbert_base(),
        }
    }

    /// The agent's configuration.
    pub fn agent(self) -> AgentConfig {
        let (encoder, max_len, head_max_len) = match self {
            DemoShape::Tiny => ("tilewright/demo", 512, 192),
            DemoShape::Large => ("answerdotai/ModernBERT-large", 512, 192),
            DemoShape::MmbertBase => ("jhu-clsp/mmBERT-base", 1024, 256),
        };
        AgentConfig {
            encoder: encoder.into(),
            head_layers: 2,
            max_len,
            head_max_len,
            act_classes: 2,
            temperature: [1.0, 1.0, 1.0].map(Value::from),
            temperature_by_options: serde_json::Map::new(),
            option_layout: OptionLayout::Sequential,
        }
    }
}

/// Writes a checkpoint with F16 weights drawn from `seed`: the same seed, the same bytes. The tokenizer is byte-level with a few merges.
///
/// # Errors
/// When `dir` exists: nothing is ever overwritten. The folder appears whole or not at all.
pub fn write(dir: &Path, shape: DemoShape, seed: u32) -> Result<()> {
    write_checkpoint(dir, &shape.encoder(), &shape.agent(), DType::F16, seed)
}

/// [`write()`] for any sizes and any float storage.
pub fn write_checkpoint(
    dir: &Path,
    encoder: &EncoderConfig,
    agent: &AgentConfig,
    dtype: DType,
    seed: u32,
) -> Result<()> {
    if dir.symlink_metadata().is_ok() {
        let what = format!("{} exists already, and nothing is overwritten", dir.display());
        return Err(Error::config(what, "give the name of a folder that does not exist"));
    }
    let Some(name) = dir.file_name() else {
        return Err(Error::config(
            format!("`{}` does not name a folder", dir.display()),
            "give the name of a new folder",
        ));
    };
    if !dtype.is_float() {
        return Err(Error::config(format!("weights cannot be stored as {dtype}"), "use f16, bf16 or f32"));
    }
    let parts = tokenizer::build();
    if parts.size > encoder.vocab_size {
        let what = format!("`vocab_size` {} is below the {} tokens of the tokenizer", encoder.vocab_size, parts.size);
        return Err(Error::config(what, "use a larger vocabulary"));
    }
    let temp =
        Temporary::create(dir.with_file_name(format!(".{}.{}.tilewright.tmp", name.display(), std::process::id())))?;
    let create = |name: &str| {
        let path = temp.0.join(name);
        std::fs::create_dir(&path).map_err(Error::io("create", &path))
    };
    create("encoder")?;
    create("tokenizer")?;
    let text = |name: &str, value: &Value| {
        write_atomic(
            &temp.0.join(name),
            serde_json::to_string_pretty(value).expect("a value of texts and numbers").as_bytes(),
        )
    };
    text(AGENT, &agent_json(agent))?;
    let mut config = encoder.to_json();
    // Other programs check these against the vocabulary, whose size they would take for the released one's.
    for (role, id) in &parts.ids {
        config[format!("{role}_id")] = json!(id);
    }
    text(ENCODER, &config)?;
    text(TOKENIZER, &parts.tokenizer)?;
    text(TOKENIZER_CONFIG, &parts.config)?;
    let params = params::all(encoder, agent.head_layers, agent.act_classes);
    weights::write(&temp.0.join(WEIGHTS), &params, dtype, seed)?;
    // A rename onto a folder made meanwhile fails unless that is empty.
    std::fs::rename(&temp.0, dir).map_err(Error::io("rename to", dir))?;
    sync_folder_of(dir)
}

/// The agent's file.
fn agent_json(agent: &AgentConfig) -> Value {
    let costs: serde_json::Map<_, _> = (1..agent.act_classes)
        .map(|i| (if i == 1 { "escalate".into() } else { format!("escalate_{i}") }, json!(0.5)))
        .collect();
    json!({
        "encoder": agent.encoder,
        "head_layers": agent.head_layers,
        "max_len": agent.max_len,
        "head_max_len": agent.head_max_len,
        "act_costs": costs,
        "amp_dtype": "bf16",
        "temperature": agent.temperature,
        "temperature_by_options": agent.temperature_by_options,
        "option_layout": agent.option_layout.name(),
        "model_name": "random weights",
    })
}

/// A folder under construction; removed when it is dropped under its first name.
struct Temporary(PathBuf);

impl Temporary {
    fn create(path: PathBuf) -> Result<Self> {
        // Only a dead process of our id can have left it.
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir(&path).map_err(Error::io("create", &path))?;
        Ok(Temporary(path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
