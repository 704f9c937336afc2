//! Checks of the source tree: `cargo xtask tidy`.

fn main() {}
