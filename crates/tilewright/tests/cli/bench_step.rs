use std::io::Write;
use std::process::{Command, Stdio};

/// Feeds a worker of the smallest model and gives back exit code, output and complaint.
fn worker(commands: &str) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.args(["bench-step", "--model", "d6", "--batch", "1", "--seq-len", "5", "--clip", "1"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(commands.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_worker_answers_each_run_with_seconds_and_loss_until_it_is_told_to_quit() {
    let (code, out, err) = worker("run\nrun\nquit\nrun\n");
    assert_eq!(code, Some(0), "{err}");
    let lines: Vec<_> = out.lines().collect();
    assert_eq!((lines.len(), lines[0]), (3, "ready"), "{out}");
    for line in &lines[1..] {
        let (seconds, loss) = line.split_once(" loss=").unwrap();
        assert!(seconds.parse::<f64>().unwrap() > 0.0);
        let loss = loss.parse::<f64>().unwrap();
        // A random model knows nothing: ln(50257) = 10.82.
        assert!((loss - 10.82).abs() < 1.0, "{loss}");
    }
    assert_ne!(lines[1].split_once('=').unwrap().1, lines[2].split_once('=').unwrap().1, "the batches are distinct");
}

#[test]
fn the_worker_refuses_other_words() {
    let (code, _, err) = worker("go\n");
    assert_eq!(code, Some(1));
    assert!(err.contains("`run` and `quit`") && err.contains("`go`"), "{err}");
}
