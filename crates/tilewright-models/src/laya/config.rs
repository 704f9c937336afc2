//! `rl_agent_config.json`.

use serde_json::{Map, Value};

/// How the options of a question are laid out; a property of the weights.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OptionLayout {
    /// One after another.
    #[default]
    Sequential,
    /// Side by side: each option starts at the same position and sees no other.
    Parallel,
}

/// The agent's configuration, as the file says it: temperatures are raw, neither checked nor clamped.
#[derive(Clone, PartialEq, Debug)]
pub struct AgentConfig {
    /// Name of the base encoder; for people.
    pub encoder: String,
    /// Layers of the decision head.
    pub head_layers: usize,
    /// Tokens of a row, special tokens included.
    pub max_len: usize,
    /// Tokens of instructions and options.
    pub head_max_len: usize,
    /// Classes of the action head.
    pub act_classes: usize,
    /// `temperature`: one a [`super::QuestionType`].
    pub temperature: [Value; 3],
    /// `temperature_by_options`, by bucket.
    pub temperature_by_options: Map<String, Value>,
    /// `option_layout`.
    pub option_layout: OptionLayout,
}
