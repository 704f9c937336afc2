use super::{tilewright, tilewright_in};
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn no_arguments_show_the_commands_and_are_a_usage_error() {
    let help = tilewright(&[]).refused();
    for command in ["decide", "inspect", "data", "plan", "convert", "doctor"] {
        assert!(help.contains(command), "{help}");
    }
    assert!(!help.contains("bench-step"), "the benchmark's worker is no command for people");
}

#[test]
fn an_unknown_command_or_flag_is_a_usage_error() {
    assert!(tilewright(&["trian"]).refused().contains("trian"));
    assert!(tilewright(&["doctor", "--jsn"]).refused().contains("--json"), "the nearest flag is offered");
}

#[test]
fn every_command_has_help_and_the_version() {
    for command in ["decide", "inspect", "data", "plan", "convert", "doctor"] {
        assert!(tilewright(&[command, "--help"]).ok().contains("--threads"), "{command}");
        assert!(tilewright(&[command, "--version"]).ok().contains(env!("CARGO_PKG_VERSION")), "{command}");
    }
}

#[test]
fn numbers_of_threads_that_no_machine_runs_are_refused_by_flag_and_by_environment() {
    assert!(tilewright(&["--threads", "0", "doctor"]).refused().contains("--threads"));
    assert!(tilewright(&["doctor", "--threads", "many"]).refused().contains("--threads"));
    assert!(
        tilewright(&["doctor", "--threads", "100000"]).refused().contains("write 1 to 4096"),
        "no system has these"
    );
    let run = tilewright_in(Path::new("."), &["doctor"], &[("TILEWRIGHT_THREADS", "-1")]);
    assert!(run.refused().contains("-1"));
}

#[test]
fn the_flag_beats_the_environment() {
    let run = |args: &[&str]| tilewright_in(Path::new("."), args, &[("TILEWRIGHT_THREADS", "3")]).ok();
    assert!(run(&["doctor"]).contains("3 threads"));
    assert!(run(&["doctor", "--threads", "5"]).contains("5 threads"));
}

#[test]
fn a_reader_that_leaves_early_is_no_error() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    // The plan of a large model takes long enough for the pipe to be closed before anything is printed.
    command.args(["plan", "--model", "gpt3:c12288"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
