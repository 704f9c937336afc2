//! The engine: rows of many requests through one device, a pack at a time.
//!
//! A model lives on the thread that loaded it. Requests are prepared on other threads with a [`Remote`] in place of the model; what they ask to be scored
//! lands in a [`Queue`], from which the models' threads take packs in turn. One pack runs at a time, so that a model has the whole device. A request that could
//! not be answered in its time is refused when it comes.

mod forecast;
mod mailbox;
mod queue;
mod remote;
mod worker;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tilewright_decide::Agent;
use tilewright_models::laya::{Row, RowScores, Scorer};

pub use forecast::Late;
pub use mailbox::{Failure, Mailbox, Spent};
pub use queue::{Queue, Waiting};
pub use remote::Remote;

use crate::metrics::Metrics;
use forecast::{Outlook, Pace, Waits};
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
    busy: Option<Busy>,
    models: Vec<(ModelId, Pace)>,
    next_model: ModelId,
}

/// A pack on the device.
#[derive(Clone, Copy, Debug)]
struct Busy {
    model: ModelId,
    tokens: usize,
    since: Instant,
}

impl State {
    /// Whether a model's thread is there.
    fn holds(&self, model: ModelId) -> bool {
        self.models.iter().any(|(id, _)| *id == model)
    }

    /// Seconds a token of a model, once that is known.
    fn pace(&self, model: ModelId, enough: usize) -> Option<f64> {
        self.models.iter().find(|(id, _)| *id == model)?.1.per_token(enough)
    }

    /// Seconds until the pack on the device is expected to be done. One that is overdue is expected to need as much again: a device that hangs promises nothing.
    fn until_free(&self, enough: usize) -> f64 {
        let Some(busy) = self.busy else { return 0.0 };
        let Some(pace) = self.pace(busy.model, enough) else { return 0.0 };
        (busy.tokens as f64 * pace - busy.since.elapsed().as_secs_f64()).abs()
    }

    /// What waits, and seconds a token of each model; 0 where that is not known yet.
    fn ahead(&self, enough: usize) -> (Vec<Waits>, impl Fn(ModelId) -> f64) {
        let paces: Vec<(ModelId, f64)> =
            self.models.iter().map(|(id, pace)| (*id, pace.per_token(enough).unwrap_or(0.0))).collect();
        let pace = move |model| paces.iter().find(|(id, _)| *id == model).map_or(0.0, |(_, pace)| *pace);
        (self.queue.ahead(Instant::now()), pace)
    }
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
        self.lock().busy.map(|busy| busy.since.elapsed())
    }

    /// How long all that waits is expected to take; zero while that is not known.
    pub fn backlog(&self) -> Duration {
        let state = self.lock();
        let (waiting, pace) = state.ahead(self.pack_tokens);
        let free = state.until_free(self.pack_tokens);
        let total = Outlook { free, waiting: &waiting, served: &[], budget: self.pack_tokens, pace: &pace }.total();
        Duration::try_from_secs_f64(total).unwrap_or(Duration::MAX)
    }

    /// Why a request with so many tokens should not be let in, if so. Before a pace is known everyone is.
    fn late(&self, state: &State, model: ModelId, tokens: usize, mailbox: &Mailbox) -> Option<Late> {
        let known = &state.models.iter().find(|(id, _)| *id == model)?.1;
        let alone = tokens as f64 * known.per_token(self.pack_tokens)?;
        let left = mailbox.deadline().saturating_duration_since(Instant::now()).as_secs_f64();
        let (mut waiting, pace) = state.ahead(self.pack_tokens);
        if waiting.is_empty() && state.busy.is_none() && known.may_try(alone, left) {
            return None;
        }
        waiting.push(Waits { model, tokens, left });
        let (free, served) = (state.until_free(self.pack_tokens), state.queue.served());
        Outlook { free, waiting: &waiting, served, budget: self.pack_tokens, pace: &pace }.refusal()
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
            if !state.holds(model) {
                return Err(Failure::Model("the model's thread has ended".into()));
            }
            // Also here, as a device that hangs takes nothing.
            self.metrics.abandoned.add(state.queue.drop_over() as u64);
            let waiting = state.queue.waiting();
            if waiting.jobs > 0 && waiting.tokens + tokens > self.queued_tokens {
                return Err(Failure::Full { tokens: waiting.tokens });
            }
            // Who has been let in goes on: a later pass of his is not turned away.
            if mailbox.is_new()
                && let Some(late) = self.late(&state, model, tokens, mailbox)
            {
                self.metrics.late.add(1);
                return Err(Failure::NoTime(late));
            }
            mailbox.let_in();
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
            state.models.push((id, Pace::default()));
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
        self.lock().models.retain(|(m, _)| *m != id);
        self.changed.notify_all();
    }

    /// The next pack of a model; none when the model is retired and nothing waits for it. Takes the device.
    fn next(&self, id: ModelId) -> Option<Pack> {
        let mut state = self.lock();
        loop {
            self.metrics.abandoned.add(state.queue.drop_over() as u64);
            if state.busy.is_none() && state.queue.next_model() == Some(id) {
                let pack = state.queue.take(id, self.pack_tokens);
                state.busy = Some(Busy { model: id, tokens: pack.tokens(), since: Instant::now() });
                return Some(pack);
            }
            if !state.holds(id) && !state.queue.holds(id) {
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
            let mut took = Duration::ZERO;
            if let Some(Busy { model, tokens, since }) = state.busy.take() {
                took = since.elapsed();
                // A pack that failed says nothing about one that does not.
                if results.iter().any(|(_, result)| result.is_ok())
                    && let Some((_, pace)) = state.models.iter_mut().find(|(id, _)| *id == model)
                {
                    pace.observe(tokens, took);
                }
            }
            state.queue.finish(results, took)
        };
        self.changed.notify_all();
        for (mailbox, result) in delivered {
            mailbox.deliver(result);
        }
    }
}
