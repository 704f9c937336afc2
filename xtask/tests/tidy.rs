//! The tree keeps its own rules.

use std::process::Command;

#[test]
fn the_source_tree_is_tidy() {
    let output = Command::new(env!("CARGO_BIN_EXE_xtask")).arg("tidy").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn an_unknown_task_is_a_usage_error() {
    for words in [&["tydy"][..], &[]] {
        let output = Command::new(env!("CARGO_BIN_EXE_xtask")).args(words).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
    }
}
