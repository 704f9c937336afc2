//! An agent from a checkpoint's folder.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tilewright_models::laya::{Checkpoint, Laya, LoadOptions};

use super::{Agent, Limits};
use crate::calibrate::CalibrationFile;
use crate::error::Result;
use crate::tokenizer::Tokenizer;

/// How a checkpoint becomes an agent.
#[derive(Clone, Debug, Default)]
pub struct OpenOptions {
    /// Precision, device and expected sums.
    pub load: LoadOptions,
    /// Temperatures by language; see [`crate::Calibration::with_languages`].
    pub languages: Option<Value>,
    /// A calibration file.
    pub calibration: Option<PathBuf>,
    /// Whether to compute the hash of the weights, which reads all of them.
    pub hash: bool,
}

impl Agent<Laya> {
    /// Opens a checkpoint. Nothing in its folder is written.
    pub fn open(dir: &Path, options: &OpenOptions) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir, options.load.sha256.as_ref())?;
        let tokenizer = Tokenizer::open(&dir.join("tokenizer"))?;
        let model = Laya::load(&checkpoint, &options.load)?;
        let sha256 = if options.hash { Some(checkpoint.model_hash()?) } else { None };
        let name = dir.file_name().map(|name| name.to_string_lossy().into_owned());
        let limits = Limits { row_tokens: checkpoint.encoder().max_positions };
        let mut agent =
            Agent::new(model, tokenizer, checkpoint.agent().clone()).with_limits(limits).with_model(name, sha256);
        if let Some(languages) = &options.languages {
            agent = agent.with_languages(languages)?;
        }
        if let Some(path) = &options.calibration {
            agent = agent.with_calibration(&CalibrationFile::load(path)?);
        }
        Ok(agent)
    }
}
