//! Typed decisions over HTTP: one process that any Jev client can use, safe by default.
//!
//! | module | what |
//! |---|---|
//! | [`http`] | routes, bodies, connections |
//! | `wire`, [`dialect`] | bodies in, envelopes out, in the two dialects |
//! | [`service`] | calls in, outcomes out: what HTTP and MCP share |
//! | [`models`] | checkpoints: loaded, unloaded, exchanged |
//! | [`engine`] | rows of many requests through one device, a pack at a time |
//! | [`mcp`], [`playground`] | the tools for language models, the page for people |
//! | [`auth`], [`audit`], [`metrics`] | keys, records, counts |
//! | [`telemetry`] | spans for a collector, with the feature `otel` |
//!
//! A request's way: connection, key, body, [`wire::parse`], a place, a thread that prepares rows ([`tilewright_decide::Agent`] around an
//! [`engine::Remote`]), the queue, a pack on the device, answers on the thread, the envelope. Dropping the future of [`service::Service::call`] at any point
//! of it gives everything back.

pub mod audit;
pub mod auth;
pub mod config;
pub mod dialect;
pub mod engine;
pub mod fault;
pub mod http;
pub mod mcp;
pub mod metrics;
pub mod models;
pub mod playground;
mod pulse;
pub mod run;
pub mod service;
pub mod telemetry;
pub mod wire;

pub use config::{Config, Dialect, Limits, Timing, Tournament};
pub use engine::{Loaded, Loader};
pub use http::AppState;
pub use models::{Keeping, ModelSource};
pub use run::{Logs, Server, logs, run};
