//! What a server does, without any protocol: calls in, outcomes out. HTTP and MCP are two ways in.

mod answer;
mod narrow;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;
use tilewright_decide::{Gate, Prediction};
use tokio::sync::Semaphore;

use crate::config::{Limits, Timing, Tournament};
use crate::engine::{Engine, Failure, Late, Mailbox, Spent};
use crate::fault::Fault;
use crate::metrics::Metrics;
use crate::models::Models;

/// What is wanted of the states.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum Task {
    /// The answers to the questions.
    #[default]
    Predict,
    /// The same for states of any length, read in windows.
    Long {
        /// Tokens of a window.
        window: Option<usize>,
        /// Tokens from one to the next.
        stride: Option<usize>,
    },
    /// The answers, where each choice keeps the options that are most similar to the question and the state.
    Shortlist {
        /// So many of them.
        k: usize,
    },
    /// The answers, where large choices are narrowed in groups and the probabilities are those of the last round.
    Tournament {
        /// Options of a group.
        group: usize,
    },
    /// Values in the shape of a JSON schema, which asks instead of the questions.
    Decide {
        /// The schema.
        schema: Value,
    },
    /// The rows as the model reads them, token by token.
    Explain,
}

/// One request, whatever way it came.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Call {
    /// At least one.
    pub states: Vec<Value>,
    /// Definitions by id.
    pub questions: Value,
    /// What is wanted.
    pub task: Task,
    /// The name of a checkpoint; names that nobody knows leave the choice to the router.
    pub model: Option<String>,
    /// Chooses by task.
    pub hint_task: Option<String>,
    /// The language of the states.
    pub lang: Option<String>,
    /// A weaker hint at it.
    pub lang_guess: Option<String>,
    /// Tokens of a row.
    pub max_len: Option<usize>,
    /// Tokens of instructions and options.
    pub head_max_len: Option<usize>,
    /// Marks answers that are not confident enough.
    pub gate: Option<Gate>,
}

/// What came of one state.
#[derive(Clone, PartialEq, Debug)]
pub struct Outcome {
    /// The answers, with `routing` among the extras if a checkpoint was chosen.
    pub prediction: Prediction,
    /// The details of [`Task::Decide`], the explanations of [`Task::Explain`].
    pub details: Option<Value>,
    /// The checkpoint that answered.
    pub model: String,
    /// SHA-256 of its weights, if that was computed.
    pub model_sha256: Option<String>,
}

/// Outcomes of a call, in the order of its states.
#[derive(Clone, PartialEq, Debug)]
pub struct Reply {
    /// One a state.
    pub outcomes: Vec<Outcome>,
    /// From the start of the work to its end.
    pub took: Duration,
    /// The engine's share of it.
    pub spent: Spent,
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Cancelled => Fault::Cancelled,
            Failure::Deadline => Fault::Deadline,
            Failure::Full { tokens } => Fault::Busy(format!("server busy: {tokens} tokens wait; try again later")),
            Failure::NoTime(late) => {
                let Late { alone, done, left, .. } = late;
                let (retry, tenth) = (late.retry(), |seconds: f64| (seconds * 10.0).round() / 10.0);
                let message = if alone > left {
                    format!(
                        "this request alone would take about {} s here, and it has {}; send less in one request, or allow more time",
                        tenth(alone),
                        tenth(left)
                    )
                } else {
                    format!(
                        "server busy: this request would be answered after about {} s, and it has {}, or would make others late; try again in {} s",
                        tenth(done),
                        tenth(left),
                        retry.as_secs_f64().ceil()
                    )
                };
                Fault::NoTime { message, retry }
            }
            Failure::TooManyTokens { tokens, most } => {
                Fault::TooLarge(format!("the request needs {tokens} tokens in one pass; the limit is {most}"))
            }
            Failure::Model(what) => Fault::Failed(what),
        }
    }
}

/// See the module's words.
pub struct Service {
    /// The checkpoints.
    pub models: Arc<Models>,
    /// The device.
    pub engine: Arc<Engine>,
    /// The counts.
    pub metrics: Arc<Metrics>,
    /// Sizes.
    pub limits: Limits,
    /// Times.
    pub timing: Timing,
    tournament: Option<Tournament>,
    places: Arc<Semaphore>,
    draining: AtomicBool,
    ready: AtomicBool,
}

/// Cancels a request when it is dropped before its answer is there.
struct Leaving(Arc<Mailbox>);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Service {
    /// A service of these checkpoints.
    pub fn new(
        models: Arc<Models>,
        engine: Arc<Engine>,
        metrics: Arc<Metrics>,
        limits: Limits,
        timing: Timing,
        tournament: Option<Tournament>,
    ) -> Self {
        let places = Arc::new(Semaphore::new(limits.concurrent.min(Semaphore::MAX_PERMITS)));
        let (draining, ready) = (AtomicBool::new(false), AtomicBool::new(false));
        Service { models, engine, metrics, limits, timing, tournament, places, draining, ready }
    }

    /// Options of a choice that are accepted.
    pub fn most_options(&self) -> usize {
        if self.tournament.is_some() { self.limits.narrowed_options } else { self.limits.options }
    }

    /// Which choices are narrowed in groups.
    pub fn tournament(&self) -> Option<Tournament> {
        self.tournament
    }

    /// Requests that are being answered.
    pub fn in_flight(&self) -> usize {
        self.limits.concurrent.saturating_sub(self.places.available_permits())
    }

    /// Says that no new request is welcome.
    pub fn drain(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Whether that was said.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Says that the checkpoints to begin with are loaded.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::SeqCst);
    }

    /// Whether requests will be answered soon.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst) && !self.is_draining()
    }

    /// Refuses at once if there is no place, before the body is read.
    pub fn has_place(&self) -> Result<(), Fault> {
        if self.is_draining() {
            return Err(Fault::Busy("the server is about to stop".into()));
        }
        if self.places.available_permits() == 0 {
            return Err(self.full());
        }
        Ok(())
    }

    fn full(&self) -> Fault {
        let n = self.limits.concurrent;
        Fault::Busy(format!("server busy: {n} requests are being answered; try again later"))
    }

    /// Answers a call. Dropping the future cancels it: what waits is dropped, what is on the device is forgotten.
    pub async fn call(self: &Arc<Self>, call: Call) -> Result<Reply, Fault> {
        self.call_within(call, self.timing.request).await
    }

    /// The same with a time of its own.
    pub async fn call_within(self: &Arc<Self>, call: Call, time: Duration) -> Result<Reply, Fault> {
        self.has_place()?;
        let place = self.places.clone().try_acquire_owned().map_err(|_| self.full())?;
        let start = Instant::now();
        let mailbox = Arc::new(Mailbox::new(start + time.min(self.timing.request)));
        let leaving = Leaving(mailbox.clone());
        let service = self.clone();
        // Preparing and answering are computation, and waiting for the device blocks.
        let work = tokio::task::spawn_blocking(move || {
            let outcomes = service.answer(&call, &mailbox);
            drop(place);
            outcomes.map(|outcomes| (outcomes, mailbox.spent()))
        });
        let result = work.await;
        drop(leaving);
        let took = start.elapsed();
        match result {
            Ok(outcomes) => outcomes.map(|(outcomes, spent)| Reply { outcomes, took, spent }),
            Err(error) => Err(Fault::Failed(format!("answering panicked: {error}"))),
        }
    }
}
