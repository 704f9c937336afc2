//! What stands in for telemetry in a program without it.

use axum::http::{HeaderMap, Method};
use tilewright_core::{Error, Result};

use super::Told;

/// There is none.
#[derive(Debug)]
pub enum Telemetry {}

/// There is none.
#[derive(Debug)]
pub enum Trace {}

impl Telemetry {
    /// An error that says so.
    ///
    /// # Errors
    /// Always.
    pub fn open(endpoint: &str) -> Result<Self> {
        let what = format!("spans cannot be sent to {endpoint}: this program was built without OpenTelemetry");
        Err(Error::config(what, "build it with --features otel, or leave the address out"))
    }

    /// Never called.
    pub fn begin(&self, _: &Method, _: &'static str, _: &HeaderMap) -> Trace {
        match *self {}
    }

    /// Never called.
    pub fn close(&self) {
        match *self {}
    }
}

impl Trace {
    /// Never called.
    pub fn end(self, _: u16, _: &str, _: Option<&str>, _: Option<&Told>) {
        match self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_it_says_how_to_get_it() {
        let error = Telemetry::open("http://collector:4318/v1/traces").unwrap_err().to_string();
        assert!(error.contains("collector:4318") && error.contains("--features otel"), "{error}");
    }
}
