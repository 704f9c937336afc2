//! What a model will hold, without loading it: the code that allocates, run on the null device.

use tilewright_core::{DType, Result};

use super::config::AgentConfig;
use super::model::Laya;
use crate::modernbert::EncoderConfig;
use crate::plan::Report;

/// The work that a plan is made for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanOptions {
    /// How weights are kept.
    pub precision: DType,
    /// Threads of the CPU.
    pub threads: usize,
    /// Tokens of the largest pack.
    pub tokens: usize,
    /// Rows of the largest pack.
    pub rows: usize,
    /// Options of all its rows.
    pub options: usize,
}

impl Laya {
    /// Arenas by purpose, real or planned. The embedding table is in none of them: it stays in its file.
    pub fn report(&self) -> Report {
        Report::new(&self.arenas(), self.device(), self.parameter_count() as usize)
    }
}

/// Plans a model for packs of a size.
///
/// # Errors
/// The same that loading such a model gives for impossible sizes.
pub fn plan(agent: &AgentConfig, encoder: &EncoderConfig, options: &PlanOptions) -> Result<Report> {
    let mut model = Laya::blank(agent, encoder, options.precision, options.threads, options.tokens)?;
    model.reserve(options.tokens, options.rows, options.rows + options.options)?;
    Ok(model.report())
}
