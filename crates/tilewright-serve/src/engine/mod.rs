//! The engine: rows of many requests through one device, a pack at a time.
//!
//! A model lives on the thread that loaded it. Requests are prepared on other threads with a [`Remote`] in place of the model; what they ask to be scored
//! lands in a [`Queue`], from which the models' threads take packs in turn. One pack runs at a time, so that a model has the whole device.

mod mailbox;
mod queue;
mod remote;
mod worker;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tilewright_decide::Agent;
use tilewright_models::laya::{Row, RowScores, Scorer};

pub use mailbox::{Failure, Mailbox};
pub use queue::{Queue, Waiting};
pub use remote::Remote;

use crate::metrics::Metrics;
use mailbox::Scored;
use queue::{Job, Pack, Work};

/// A checkpoint as a loader hands it over: what prepares rows, and what scores them.
pub struct Loaded {
    /// Tokenizer, configuration and calibration.
    pub agent: Agent<()>,
    /// The model. It stays on the thread that loaded it.
    pub scorer: Box<dyn Scorer>,
}

impl<S: Scorer + 'static> From<Agent<S>> for Loaded {
    fn from(agent: Agent<S>) -> Self {
        let (agent, scorer) = agent.detach();
        Loaded { agent, scorer: Box::new(scorer) }
    }
}

/// Loads a checkpoint, on the thread that will own it.
pub type Loader = Arc<dyn Fn() -> tilewright_decide::Result<Loaded> + Send + Sync>;

/// The number of a loaded model. A checkpoint that is loaded again gets a new one.
pub type ModelId = u64;

/// See the module's words.
#[derive(Debug)]
pub struct Engine {
    state: Mutex<State>,
    changed: Condvar,
    pack_tokens: usize,
    queued_tokens: usize,
    batch_tokens: usize,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct State {
    queue: Queue,
    /// Since when a pack is on the device, if one is.
    busy: Option<Instant>,
    models: Vec<ModelId>,
    next_model: ModelId,
}

impl Engine {
    /// An engine that runs `pack_tokens` at a time, refuses what would make more than `queued_tokens` wait, and passes of one request beyond `batch_tokens`.
    pub fn new(pack_tokens: usize, queued_tokens: usize, batch_tokens: usize, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Engine {
            state: Mutex::default(),
            changed: Condvar::new(),
            pack_tokens: pack_tokens.max(1),
            queued_tokens,
            batch_tokens,
            metrics,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that may panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What waits.
    pub fn waiting(&self) -> Waiting {
        self.lock().queue.waiting()
    }

    /// How long the pack that is on the device has been there. One that never ends is a device that hangs.
    pub fn busy_for(&self) -> Option<Duration> {
        self.lock().busy.map(|since| since.elapsed())
    }

    /// Tokens of a pack.
    pub fn pack_tokens(&self) -> usize {
        self.pack_tokens
    }

    /// Scores rows with a model. Blocks until they are scored, or the mailbox's request is over.
    pub(crate) fn score(
        &self,
        model: ModelId,
        rows: Vec<Row>,
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<RowScores>, Failure> {
        match self.run(model, Work::Rows(rows.into_iter().enumerate().collect()), mailbox)? {
            Scored::Rows(scores) => Ok(scores),
            Scored::Vectors(_) => Err(Failure::Model("rows came back as vectors".into())),
        }
    }

    /// Embeds rows of token ids, in passes of a pack at most.
    pub(crate) fn embed(
        &self,
        model: ModelId,
        rows: &[Vec<u32>],
        mailbox: &Arc<Mailbox>,
    ) -> Result<Vec<Vec<f32>>, Failure> {
        let mut vectors = Vec::with_capacity(rows.len());
        let mut rest = rows;
        while !rest.is_empty() {
            let mut tokens = 0;
            let fits = |row: &&Vec<u32>| {
                tokens += row.len();
                tokens <= self.pack_tokens
            };
            let n = rest.iter().take_while(fits).count().max(1);
            match self.run(model, Work::Texts(rest[..n].to_vec()), mailbox)? {
                Scored::Vectors(more) => vectors.extend(more),
                Scored::Rows(_) => return Err(Failure::Model("vectors came back as scores".into())),
            }
            rest = &rest[n..];
        }
        Ok(vectors)
    }

    fn run(&self, model: ModelId, work: Work, mailbox: &Arc<Mailbox>) -> Result<Scored, Failure> {
        let tokens = work.tokens();
        if tokens > self.batch_tokens {
            return Err(Failure::TooManyTokens { tokens, most: self.batch_tokens });
        }
        if let Some(over) = mailbox.over() {
            return Err(over);
        }
        {
            let mut state = self.lock();
            if !state.models.contains(&model) {
                return Err(Failure::Model("the model's thread has ended".into()));
            }
            // Also here, as a device that hangs takes nothing.
            self.metrics.abandoned.add(state.queue.drop_over() as u64);
            let waiting = state.queue.waiting();
            if waiting.jobs > 0 && waiting.tokens + tokens > self.queued_tokens {
                return Err(Failure::Full { tokens: waiting.tokens });
            }
            state.queue.push(Job::new(model, work, mailbox.clone()));
        }
        self.changed.notify_all();
        mailbox.wait()
    }

    /// Starts the thread of a model, which loads it. Returns when that is done.
    pub(crate) fn start(
        self: &Arc<Self>,
        name: &str,
        loader: Loader,
    ) -> Result<(ModelId, Agent<()>), tilewright_decide::Error> {
        let id = {
            let mut state = self.lock();
            state.next_model += 1;
            let id = state.next_model;
            state.models.push(id);
            id
        };
        let agent = worker::start(self.clone(), id, name, loader);
        if agent.is_err() {
            self.retire(id);
        }
        Ok((id, agent?))
    }

    /// Lets a model's thread end when it has no row left.
    pub(crate) fn retire(&self, id: ModelId) {
        self.lock().models.retain(|m| *m != id);
        self.changed.notify_all();
    }

    /// The next pack of a model; none when the model is retired and nothing waits for it. Takes the device.
    fn next(&self, id: ModelId) -> Option<Pack> {
        let mut state = self.lock();
        loop {
            self.metrics.abandoned.add(state.queue.drop_over() as u64);
            if state.busy.is_none() && state.queue.next_model() == Some(id) {
                state.busy = Some(Instant::now());
                return Some(state.queue.take(id, self.pack_tokens));
            }
            if !state.models.contains(&id) && !state.queue.holds(id) {
                return None;
            }
            // Now and then, so that what is over is told so while the device is busy.
            let (next, _) =
                self.changed.wait_timeout(state, Duration::from_millis(500)).unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
    }

    /// Hands out what a pack has brought, and gives the device back.
    fn finish(&self, results: Vec<(queue::Piece, Result<Scored, Failure>)>) {
        let delivered = {
            let mut state = self.lock();
            state.busy = None;
            state.queue.finish(results)
        };
        self.changed.notify_all();
        for (mailbox, result) in delivered {
            mailbox.deliver(result);
        }
    }
}
