//! The `tilewright` program.

fn main() {}
