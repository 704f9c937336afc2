//! Being told of calls: for logs, counters and tests.

use serde_json::Value;

use crate::error::Error;
use crate::prediction::Prediction;

/// Is told of every call of an agent. It sees everything and changes nothing.
pub trait Observer: std::fmt::Debug + Send + Sync {
    /// A call begins.
    fn predict_start(&mut self, states: &[Value], questions: &Value) {
        let _ = (states, questions);
    }

    /// It has ended with results, one a state.
    fn predict_end(&mut self, results: &[Prediction]) {
        let _ = results;
    }

    /// It has failed.
    fn predict_error(&mut self, error: &Error) {
        let _ = error;
    }
}
