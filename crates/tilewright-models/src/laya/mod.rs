//! Laya checkpoints: a ModernBERT encoder with a decision head that scores marked options of a row.
//!
//! `h = encoder(row) + type_emb[question]`; `head_layers` pre-norm layers with a ReLU MLP and full attention; `logit = scorer(h[marker])` an
//! option; action logits from the state of `[CLS]` and four features of the options' probabilities. Rows do not see each other.

mod checkpoint;
mod config;
pub mod demo;
pub mod digest;
mod head;
mod inspect;
mod model;
mod params;
mod plan;
mod row;
mod tensors;

pub use checkpoint::Checkpoint;
pub use config::{AgentConfig, OptionLayout};
pub use digest::Digests;
pub use inspect::{FileEntry, Inspection, SpecialToken, inspect};
pub use model::{GPU_PACK_TOKENS, Laya, LoadOptions, PACK_TOKENS, Passes, RECORDED_SHAPES, SHAPE_POLICY, Stage};
pub use plan::{PlanOptions, plan};
pub use row::{OptionPositions, QuestionType, Row, RowScores, Scorer};
