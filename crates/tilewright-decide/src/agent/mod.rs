//! The agent: a scorer with a tokenizer, a configuration and a calibration.

mod long;
mod narrow;
mod open;

pub use long::Windows;
pub use narrow::{Embed, SHORTLIST_K, TOURNAMENT_GROUP};
pub use open::OpenOptions;

use std::collections::HashMap;
use std::sync::Arc;

use serde_json::Value;
use tilewright_models::laya::{AgentConfig, Row, RowScores, Scorer};

use crate::answer::Answer;
use crate::calibrate::{Calibration, CalibrationFile, Identity};
use crate::error::{Error, Result, value_error};
use crate::gate::Gate;
use crate::observer::Observer;
use crate::prediction::{Prediction, Provenance};
use crate::prompt::{Budget, Head, HeadCache, PromptRow, StateTokens};
use crate::python::repr_str;
use crate::question::{Question, as_questions, check_state, parse_questions};
use crate::tokenizer::Tokenizer;
use crate::usage::{OptionUsage, StateUsage, Truncated, Usage};

/// What a call may ask for besides states and questions.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct PredictOptions {
    /// A language tag such as "de-AT": selects temperatures, if the calibration has any for it.
    pub lang: Option<String>,
    /// Tokens of a row, instead of the checkpoint's.
    pub max_len: Option<usize>,
    /// Tokens of instructions and options, instead of the checkpoint's.
    pub head_max_len: Option<usize>,
    /// States at a time. Accepted and not needed: rows are packed without padding, and a result never depends on its batch.
    pub batch_size: Option<usize>,
    /// Accepted and not needed, as above.
    pub sort_by_length: bool,
    /// Marks answers that are not confident enough.
    pub gate: Option<Gate>,
}

/// What an agent refuses to try.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// The longest row. Positions beyond those that the encoder was built for give answers without a meaning.
    pub row_tokens: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { row_tokens: 8192 }
    }
}

/// Answers questions about states.
#[derive(Debug)]
pub struct Agent<S> {
    scorer: S,
    tokenizer: Tokenizer,
    config: AgentConfig,
    calibration: Calibration,
    limits: Limits,
    provenance: Provenance,
    heads: HeadCache,
    observer: Option<Box<dyn Observer>>,
}

/// A row of one question against one state, before the model has read it.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) head: Arc<Head>,
    pub(crate) prompt: PromptRow,
}

impl<S> Agent<S> {
    /// An agent of the same checkpoint around another scorer. The tokenizer is shared. For servers, where many threads prepare rows and one
    /// scores them. The observer stays with the original.
    pub fn share<T>(&self, scorer: T) -> Agent<T> {
        Agent {
            scorer,
            tokenizer: self.tokenizer.clone(),
            config: self.config.clone(),
            calibration: self.calibration.clone(),
            limits: self.limits,
            provenance: self.provenance.clone(),
            heads: HeadCache::default(),
            observer: None,
        }
    }

    /// Takes the scorer out; what is left can be shared.
    pub fn detach(self) -> (Agent<()>, S) {
        (self.share(()), self.scorer)
    }

    /// Where its answers come from.
    pub fn provenance(&self) -> &Provenance {
        &self.provenance
    }

    /// Its calibration; the warnings are there.
    pub fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// The checkpoint's configuration.
    pub fn config(&self) -> &AgentConfig {
        &self.config
    }

    /// The checkpoint's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// What it refuses to try.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The model.
    pub fn scorer_mut(&mut self) -> &mut S {
        &mut self.scorer
    }
}

impl<S: Scorer> Agent<S> {
    /// Puts an agent together. The calibration is the checkpoint's own.
    pub fn new(scorer: S, tokenizer: Tokenizer, config: AgentConfig) -> Self {
        let calibration = Calibration::of_checkpoint(&config);
        Agent {
            scorer,
            tokenizer,
            config,
            calibration,
            limits: Limits::default(),
            provenance: Provenance::default(),
            heads: HeadCache::default(),
            observer: None,
        }
    }

    /// Sets the limits.
    pub fn with_limits(mut self, limits: Limits) -> Self {
        self.limits = limits;
        self
    }

    /// Says where the weights come from.
    pub fn with_model(mut self, name: Option<String>, sha256: Option<String>) -> Self {
        self.provenance.model = name;
        self.provenance.model_sha256 = sha256;
        self
    }

    /// Adds temperatures by language; see [`Calibration::with_languages`].
    pub fn with_languages(mut self, overrides: &Value) -> Result<Self> {
        self.calibration = self.calibration.with_languages(overrides)?;
        Ok(self)
    }

    /// Uses a calibration file. One that was fitted for another checkpoint is used and warned about.
    pub fn with_calibration(mut self, file: &CalibrationFile) -> Self {
        self.calibration = self.calibration.with_file(file);
        let difference = file.identity.as_ref().and_then(|fitted| fitted.difference(&self.identity()));
        if let Some(difference) = difference {
            self.calibration
                .warn(format!("the calibration was fitted for another checkpoint ({difference}); it is used anyway"));
        }
        self.provenance.calibration = file.id.clone();
        self
    }

    /// Sets who is told of calls.
    pub fn with_observer(mut self, observer: Box<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// What a calibration of this agent should record.
    pub fn identity(&self) -> Identity {
        Identity::new(&self.config, self.provenance.model.clone(), self.provenance.model_sha256.clone())
    }

    /// The answers to `questions` about one state.
    pub fn predict(&mut self, state: &Value, questions: &Value, options: &PredictOptions) -> Result<Prediction> {
        let mut results = self.predict_batch(std::slice::from_ref(state), questions, options)?;
        Ok(results.pop().unwrap_or_default())
    }

    /// The answers to the same questions about each state, in order. All rows run together; equal rows run once.
    pub fn predict_batch(
        &mut self,
        states: &[Value],
        questions: &Value,
        options: &PredictOptions,
    ) -> Result<Vec<Prediction>> {
        if let Some(observer) = &mut self.observer {
            observer.predict_start(states, questions);
        }
        let results = self.answer(states, questions, options);
        if let Some(observer) = &mut self.observer {
            match &results {
                Ok(results) => observer.predict_end(results),
                Err(error) => observer.predict_error(error),
            }
        }
        results
    }

    fn answer(&mut self, states: &[Value], questions: &Value, options: &PredictOptions) -> Result<Vec<Prediction>> {
        let map = as_questions(questions)?;
        states.iter().try_for_each(check_state)?;
        if map.is_empty() || states.is_empty() {
            return Ok(vec![Prediction::default(); states.len()]);
        }
        let questions = parse_questions(questions)?;
        let asked = self.ask(states, &questions, options)?;
        let scores = self.score(&asked)?;

        let mut results = Vec::with_capacity(states.len());
        for (asked, scores) in asked.chunks(questions.len()).zip(scores.chunks(questions.len())) {
            let mut answers = Vec::with_capacity(questions.len());
            for (question, scores) in questions.iter().zip(scores) {
                let mut answer = Answer::new(question, scores, &self.calibration, options.lang.as_deref())?;
                answer.judge(options.gate.as_ref());
                answers.push(answer);
            }
            results.push(Prediction { answers, usage: usage(&questions, asked), ..Prediction::default() });
        }
        Ok(results)
    }

    /// The token budget of a call.
    pub(crate) fn budget(&self, options: &PredictOptions) -> Budget {
        Budget {
            max_len: options.max_len.unwrap_or(self.config.max_len),
            head_max_len: options.head_max_len.unwrap_or(self.config.head_max_len),
        }
    }

    /// The rows of all states and questions, states first.
    pub(crate) fn ask(
        &mut self,
        states: &[Value],
        questions: &[Question],
        options: &PredictOptions,
    ) -> Result<Vec<Asked>> {
        let budget = self.budget(options);
        let mut asked = Vec::with_capacity(states.len() * questions.len());
        for state in states {
            let state = StateTokens::new(&self.tokenizer, state)?;
            for question in questions {
                let head = self.heads.head(&self.tokenizer, question, budget.head_max_len)?;
                let layout = self.config.option_layout;
                let prompt = PromptRow::build(&self.tokenizer, question, &head, &state, budget, layout)?;
                let tokens = prompt.row.ids.len();
                if tokens > self.limits.row_tokens {
                    return value_error!(
                        "question {}: its row has {tokens} tokens, and this checkpoint reads at most {}; lower max_len",
                        repr_str(&question.id),
                        self.limits.row_tokens
                    );
                }
                asked.push(Asked { head, prompt });
            }
        }
        Ok(asked)
    }

    /// The scores of rows, in order. Equal ones are scored once.
    pub(crate) fn score(&mut self, asked: &[Asked]) -> Result<Vec<RowScores>> {
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let mut unique: Vec<Row> = Vec::new();
        let mut seen: HashMap<&Row, usize> = HashMap::new();
        let mut index = Vec::with_capacity(asked.len());
        for Asked { prompt, .. } in asked {
            index.push(*seen.entry(&prompt.row).or_insert_with(|| {
                unique.push(prompt.row.clone());
                unique.len() - 1
            }));
        }
        let scores = self.scorer.score(&unique)?;
        if scores.len() != unique.len() {
            let what = format!("the model scored {} of {} rows", scores.len(), unique.len());
            return Err(Error::Core(tilewright_core::Error::config(
                what,
                "this is a fault of the program, please report it",
            )));
        }
        Ok(index.into_iter().map(|i| scores[i].clone()).collect())
    }
}

/// The usage of one state's rows.
fn usage(questions: &[Question], asked: &[Asked]) -> Usage {
    let cut = questions.iter().zip(asked).filter(|(_, a)| a.prompt.state_dropped() > 0);
    let dropped = asked.iter().map(|a| a.prompt.state_dropped()).max().unwrap_or(0);
    let collided = questions.iter().zip(asked).filter(|(_, a)| a.head.distinct < a.head.options.len());
    Usage {
        input_tokens: asked.iter().map(|a| a.prompt.row.ids.len()).sum(),
        state: Some(StateUsage {
            tokens: asked.first().map_or(0, |a| a.prompt.state_tokens),
            dropped,
            truncated: Truncated::State(dropped > 0),
            questions: cut.map(|(q, _)| q.id.clone()).collect(),
        }),
        options: collided
            .map(|(q, a)| {
                let Head { options, distinct, tokens_per_option, .. } = &*a.head;
                let entry =
                    OptionUsage { total: options.len(), distinct: *distinct, tokens_per_option: *tokens_per_option };
                (q.id.clone(), entry)
            })
            .collect(),
        windows: None,
    }
}
