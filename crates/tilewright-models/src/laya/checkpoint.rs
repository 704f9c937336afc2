//! A checkpoint's folder: found, verified and validated, never written to.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use tilewright_core::{Error, Result};
use tilewright_ops::{Device, Tensor};

use super::config::{AgentConfig, Draft};
use super::digest::{self, Digests};
use super::params;
use super::tensors::TensorFile;
use crate::modernbert::EncoderConfig;

/// Names inside of a checkpoint.
pub(crate) const AGENT: &str = "rl_agent_config.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const ENCODER: &str = "encoder/config.json";
pub(crate) const TOKENIZER: &str = "tokenizer/tokenizer.json";
pub(crate) const TOKENIZER_CONFIG: &str = "tokenizer/tokenizer_config.json";

/// A checkpoint whose configuration and weights fit each other. The weights are mapped, not read.
pub struct Checkpoint {
    dir: PathBuf,
    agent: AgentConfig,
    encoder: EncoderConfig,
    tensors: TensorFile,
}

impl Checkpoint {
    /// Opens and validates a folder.
    ///
    /// `sha256` is checked before anything is parsed; without it the environment's sums are ([`digest::DIGESTS_ENV`]).
    ///
    /// # Errors
    /// In this order: no folder; a sum that does not match; a missing file; a configuration that cannot be read; tensors that are unreadable, spelled
    /// twice, of wrong shape, missing, unknown or of a type that cannot be read; a wrong list of temperatures; lengths that do not fit.
    pub fn open(dir: &Path, sha256: Option<&Digests>) -> Result<Self> {
        if !dir.is_dir() {
            return Err(absent(dir, "there is no such folder; give the folder of a Laya checkpoint"));
        }
        match sha256 {
            Some(digests) => digest::verify(dir, digests)?,
            None => {
                let asked = digest::from_env(std::env::var(digest::DIGESTS_ENV).ok().as_deref())?;
                asked.map_or(Ok(()), |digests| digest::verify(dir, &digests))?;
            }
        }
        for name in [AGENT, WEIGHTS, ENCODER] {
            if !dir.join(name).is_file() {
                return Err(absent(&dir.join(name), MISSING));
            }
        }
        let agent_path = dir.join(AGENT);
        let draft = Draft::parse(&read(&agent_path)?, &agent_path)?;
        let encoder_path = dir.join(ENCODER);
        let encoder = EncoderConfig::parse(&read(&encoder_path)?, &encoder_path)?;
        let tensors = TensorFile::open(&dir.join(WEIGHTS))?;
        tensors.check(&params::all(&encoder, draft.head_layers(), draft.act_classes()))?;
        let agent = draft.finish(&agent_path)?;
        agent.check_lengths(&agent_path, encoder.max_positions)?;
        Ok(Checkpoint { dir: dir.to_owned(), agent, encoder, tensors })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// `rl_agent_config.json`.
    pub fn agent(&self) -> &AgentConfig {
        &self.agent
    }

    /// `encoder/config.json`.
    pub fn encoder(&self) -> &EncoderConfig {
        &self.encoder
    }

    /// Elements of all tensors in the file.
    pub fn parameter_count(&self) -> u64 {
        self.tensors.parameter_count()
    }

    /// The SHA-256 of `model.safetensors`. Reads all of it, so it is computed only when asked for.
    pub fn model_hash(&self) -> Result<String> {
        digest::sha256(self.tensors.file.path())
    }

    /// Gives the memory of what was read of the weights' file back.
    pub(crate) fn forget_pages(&self) {
        self.tensors.file.forget_pages();
    }

    /// A tensor of the file, in place; on the CPU none of it is read before an op asks for it.
    pub fn tensor(&self, device: &Device, name: &str) -> Result<Tensor> {
        self.tensors.tensor(device, name)
    }

    /// A tensor of the file in memory of its own.
    pub fn read_tensor(&self, device: &Device, name: &str) -> Result<Tensor> {
        self.tensors.read(device, name)
    }
}

const MISSING: &str = "there is no such file; a Laya checkpoint holds rl_agent_config.json, model.safetensors, encoder/config.json, \
                       tokenizer/tokenizer.json and tokenizer/tokenizer_config.json: fetch the whole folder";

pub(crate) fn absent(path: &Path, what: &str) -> Error {
    Error::Io { action: "open", path: path.to_owned(), source: std::io::Error::new(ErrorKind::NotFound, what) }
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(Error::io("read", path))
}
