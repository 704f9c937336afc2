//! Load: how a server behaves when requests come whether it is ready or not.
//!
//! | module | what |
//! |---|---|
//! | [`mix`] | what is asked: a JSON Lines file, drawn by weight |
//! | [`http`] | connections that are kept, answers that are whole, deadlines |
//! | [`drive`] | an open loop of Poisson arrivals, a closed one of busy connections |
//! | [`histogram`] | latencies to three significant digits |
//! | [`measure`] | outcomes to rows: latency from when a request was *due*, so that no stall hides those who waited for it |
//! | [`session`] | one rate, a sweep for capacity, two servers in alternating blocks |
//! | [`record`], [`report`] | one JSON file, a text, a page |

pub mod drive;
pub mod histogram;
pub mod http;
pub mod measure;
pub mod mix;
mod plot;
pub mod record;
pub mod report;
pub mod session;
