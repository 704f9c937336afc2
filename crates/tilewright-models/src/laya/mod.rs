//! Laya checkpoints: a ModernBERT encoder with a decision head that scores marked options of a row.

mod config;
mod row;

pub use config::{AgentConfig, OptionLayout};
pub use row::{OptionPositions, QuestionType, Row, RowScores, Scorer};
