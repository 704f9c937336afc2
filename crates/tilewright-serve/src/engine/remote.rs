//! A scorer that lets the engine score.

use std::sync::Arc;

use tilewright_core::{Error, Result};
use tilewright_models::laya::{Row, RowScores, Scorer};

use super::{Engine, Failure, Mailbox, ModelId};

/// Stands for a model that lives on another thread.
#[derive(Debug)]
pub struct Remote {
    engine: Arc<Engine>,
    model: ModelId,
    mailbox: Option<Arc<Mailbox>>,
    failure: Option<Failure>,
}

impl Remote {
    /// Stands for `model`.
    pub(crate) fn new(engine: Arc<Engine>, model: ModelId) -> Self {
        Remote { engine, model, mailbox: None, failure: None }
    }

    /// Says for which request the next calls are.
    pub(crate) fn attach(&mut self, mailbox: Arc<Mailbox>) {
        self.mailbox = Some(mailbox);
        self.failure = None;
    }

    /// Ends that.
    pub(crate) fn release(&mut self) {
        self.mailbox = None;
    }

    /// What the engine said when the last call failed. The error that went through the agent has no room for it.
    pub(crate) fn take_failure(&mut self) -> Option<Failure> {
        self.failure.take()
    }

    fn call<T>(&mut self, call: impl FnOnce(&Engine, &Arc<Mailbox>) -> Result<T, Failure>) -> Result<T> {
        let failure = match &self.mailbox {
            Some(mailbox) => match call(&self.engine, mailbox) {
                Ok(value) => return Ok(value),
                Err(failure) => failure,
            },
            None => Failure::Model("scored for no request".into()),
        };
        let error = Error::config(format!("the engine did not score: {failure:?}"), "try again later");
        self.failure = Some(failure);
        Err(error)
    }
}

impl Scorer for Remote {
    fn score(&mut self, rows: &[Row]) -> Result<Vec<RowScores>> {
        let model = self.model;
        self.call(|engine, mailbox| engine.score(model, rows.to_vec(), mailbox))
    }

    fn embed(&mut self, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        let model = self.model;
        self.call(|engine, mailbox| engine.embed(model, rows, mailbox))
    }
}
