//! Paired benchmarks of commands: no claim without a paired run.
//!
//! A [`plan`] names arms, inputs and rules; a [`session`] runs the arms alternately, in one sitting, on the same inputs, and keeps a [`record`] of
//! every call; [`summary`] and [`stats`] turn a record into verdicts; [`report`] shows them, [`compare`] sets two records side by side, and
//! [`claims`] holds published numbers to their records. Arms are commands that speak [`protocol`], or any program at all, timed as a whole.
//!
//! Nothing here knows a kernel: what is measured stays outside, and a failing arm is a row of the record, not the end of the run.

pub mod arm;
pub mod claims;
pub mod compare;
pub mod inputs;
pub mod load;
pub mod machine;
pub mod order;
pub mod plan;
pub mod protocol;
pub mod record;
pub mod report;
pub mod rng;
pub mod session;
pub mod stats;
pub mod summary;
mod sys;
