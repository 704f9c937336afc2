//! What clients, disks and operators do to a server: none of it may take it down, and none may be answered with a fault of the server's own.
#![cfg(unix)]

#[path = "../served/mod.rs"]
mod served;

mod bodies;
mod clients;
mod files;
mod load;
mod protocol;
