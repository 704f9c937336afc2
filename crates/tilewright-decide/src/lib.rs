//! Typed decisions: text and typed questions in, calibrated probabilities out, in one pass of a Laya checkpoint.
//!
//! Pure functions around a [`tilewright_models::laya::Scorer`]: no sockets, no threads. Behaviour follows the `laya` package, version 0.4.15.
//!
//! | module | from | to |
//! |---|---|---|
//! | `question` | JSON definitions | checked [`Question`]s with option texts |
//! | `prompt` | a question and a state | a row of token ids |
//! | `answer` | the logits of a row | an [`Answer`] |
//! | `calibrate` | checkpoint, file, language | the temperature of each answer |
//! | `gate` | an answer | passed or abstained |
//! | `agent` | states and questions | [`Prediction`]s: batches, long states, shortlists, tournaments |
//! | `schema` | a JSON schema | questions, and answers as its values |
//! | [`route`] | a state and hints | which checkpoint answers; a router of loaded ones |
//! | [`evaluate`], [`fit`] | answers and labels | accuracy and calibration with intervals; fitted temperatures |
//! | [`presets`] | a name | ready-made questions |
//!
//! ```no_run
//! use serde_json::json;
//! use tilewright_decide::{Agent, OpenOptions, PredictOptions};
//!
//! let mut agent = Agent::open("laya".as_ref(), &OpenOptions::default())?;
//! let questions = json!({"refund": {"type": "noul", "instructions": "Is a refund requested?"}});
//! let result = agent.predict(&"Please send my money back.".into(), &questions, &PredictOptions::default())?;
//! println!("{}", result.to_json());
//! # Ok::<(), tilewright_decide::Error>(())
//! ```

mod agent;
mod answer;
mod calibrate;
mod distribution;
mod error;
pub mod evaluate;
mod explain;
pub mod fit;
mod gate;
mod json;
mod observer;
mod prediction;
pub mod presets;
mod prompt;
mod python;
mod question;
pub mod route;
mod schema;
mod tokenizer;
mod usage;

pub use agent::{Agent, Embed, Limits, OpenOptions, PredictOptions, SHORTLIST_K, TOURNAMENT_GROUP, Windows};
pub use answer::{Answer, AnswerValue, Window};
pub use calibrate::{
    Applied, BUCKETS, Binning, Calibration, CalibrationFile, Identity, TEMPERATURE_RANGE, Temperatures, bucket,
};
pub use distribution::{Distribution, TOLERANCE};
pub use error::{Error, Result};
pub use explain::{Explanation, Part, Segment, Token};
pub use gate::{Abstention, Gate, Verdict};
pub use json::{float, float_text, json_text, round4};
pub use observer::Observer;
pub use prediction::{Prediction, Provenance};
pub use prompt::{Budget, Cut, Head, PromptRow, StateTokens};
pub use question::{Question, parse_questions};
pub use schema::{Decision, schema_questions};
pub use tokenizer::Tokenizer;
pub use usage::{OptionUsage, StateUsage, Truncated, Usage};
