//! Where a request waits for the engine, and where it is told that its client has left.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tilewright_models::laya::RowScores;

use super::Late;

/// Why the engine did not score.
#[derive(Clone, PartialEq, Debug)]
pub enum Failure {
    /// The client has left.
    Cancelled,
    /// The time of the request has passed.
    Deadline,
    /// Too much waits already.
    Full {
        /// Tokens that wait.
        tokens: usize,
    },
    /// It would not be answered in its time, or make another miss his.
    NoTime(Late),
    /// One pass of the request is larger than any may be.
    TooManyTokens {
        /// Its tokens.
        tokens: usize,
        /// The limit.
        most: usize,
    },
    /// The model failed, or panicked.
    Model(String),
}

/// What the engine gives back.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Scored {
    Rows(Vec<RowScores>),
    Vectors(Vec<Vec<f32>>),
}

/// Where a request's time in the engine went.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Spent {
    /// Waiting for the device.
    pub queue: Duration,
    /// On the device, together with others.
    pub compute: Duration,
    /// Its tokens.
    pub tokens: usize,
    /// The packs that they were in.
    pub packs: usize,
}

/// One a request: a request has one pass under way at most.
#[derive(Debug)]
pub struct Mailbox {
    deadline: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    cancelled: bool,
    let_in: bool,
    spent: Spent,
    result: Option<Result<Scored, Failure>>,
}

impl Mailbox {
    /// A mailbox of a request that must be answered by `deadline`.
    pub fn new(deadline: Instant) -> Self {
        Mailbox { deadline, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the request's time is over.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// Whether the engine has not begun with it.
    pub(super) fn is_new(&self) -> bool {
        !self.lock().let_in
    }

    /// The engine begins with it.
    pub(super) fn let_in(&self) {
        self.lock().let_in = true;
    }

    /// Adds what a pass took.
    pub(super) fn account(&self, pass: Spent) {
        let spent = &mut self.lock().spent;
        spent.queue += pass.queue;
        spent.compute += pass.compute;
        spent.tokens += pass.tokens;
        spent.packs += pass.packs;
    }

    /// What its passes took so far.
    pub fn spent(&self) -> Spent {
        self.lock().spent
    }

    /// The client has left. What waits for it is dropped.
    pub fn cancel(&self) {
        self.lock().cancelled = true;
        self.changed.notify_all();
    }

    /// Why nobody waits any more, if so.
    pub fn over(&self) -> Option<Failure> {
        if self.lock().cancelled {
            return Some(Failure::Cancelled);
        }
        (Instant::now() >= self.deadline).then_some(Failure::Deadline)
    }

    /// Puts the result in.
    pub(crate) fn deliver(&self, result: Result<Scored, Failure>) {
        self.lock().result = Some(result);
        self.changed.notify_all();
    }

    /// Waits for the result, or until the request is over.
    pub(crate) fn wait(&self) -> Result<Scored, Failure> {
        let mut state = self.lock();
        loop {
            if let Some(result) = state.result.take() {
                return result;
            }
            if state.cancelled {
                return Err(Failure::Cancelled);
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Deadline);
            }
            (state, _) = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
