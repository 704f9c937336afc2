//! Typed decisions: text and typed questions in, calibrated probabilities out, in one pass of a Laya checkpoint.
//!
//! Pure functions around a [`tilewright_models::laya::Scorer`]: no sockets, no threads. Behaviour follows the `laya` package, version 0.4.15.
