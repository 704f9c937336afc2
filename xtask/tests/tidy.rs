//! The program behind `cargo xtask`.

use std::process::Command;

#[test]
fn an_unknown_task_is_a_usage_error() {
    for words in [&["tydy"][..], &[]] {
        let output = Command::new(env!("CARGO_BIN_EXE_xtask")).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
    }
}
