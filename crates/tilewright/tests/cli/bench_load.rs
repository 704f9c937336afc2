use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::{Run, tilewright};

/// Answers everything with 200, or with 401 where the key is not `k`.
fn serve() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/v1/systemone", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            std::thread::spawn(move || {
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                loop {
                    let (mut length, mut key) = (0, false);
                    let mut line = String::new();
                    while line != "\r\n" {
                        line.clear();
                        if reader.read_line(&mut line).unwrap_or(0) == 0 {
                            return;
                        }
                        key |= line == "Authorization: Bearer k\r\n";
                        if let Some(value) = line.strip_prefix("Content-Length: ") {
                            length = value.trim().parse().unwrap();
                        }
                    }
                    reader.read_exact(&mut vec![0; length]).unwrap();
                    let status = if key { 200 } else { 401 };
                    let _ =
                        stream.write_all(format!("HTTP/1.1 {status} X\r\nContent-Length: 2\r\n\r\n{{}}").as_bytes());
                }
            });
        }
    });
    url
}

fn command(folder: &Path, words: &[&str]) -> Command {
    std::fs::write(folder.join("mix.jsonl"), "{\"state\":\"a\",\"questions\":{}}\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.current_dir(folder).args(["bench", "load"]).args(words).env("LOAD_KEY", "k");
    command.args(["--mix", "mix.jsonl", "--out", "records", "--warm-up", "0"]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn finish(child: std::process::Child) -> Run {
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn a_run_leaves_a_record_and_a_page_and_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let words = [
        &serve(),
        "--rate",
        "100",
        "--seconds",
        "0.4",
        "--key-env",
        "LOAD_KEY",
        "--header",
        "X-Secret: hush",
        "--html",
        "page.html",
    ];
    let out = finish(command(folder.path(), &words).spawn().unwrap()).ok();
    assert!(out.contains("x 200") && out.contains("latency   p50"), "{out}");
    let record = out.lines().find_map(|l| l.strip_prefix("record: ")).unwrap();
    let record = folder.path().join(record);
    let text = std::fs::read_to_string(&record).unwrap();
    assert!(!text.contains("hush") && !text.contains("Bearer"), "{text}");
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("<svg") && !page.contains("hush"));
    // What `bench report` makes of it is the same.
    let record = record.to_str().unwrap();
    assert_eq!(tilewright(&["bench", "report", record]).ok(), out.split("record: ").next().unwrap());
}

#[test]
fn a_server_that_refuses_the_key_is_told_and_fails_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let run = finish(command(folder.path(), &[&serve(), "--rate", "50", "--seconds", "0.4"]).spawn().unwrap());
    assert!(run.out.contains("401: {}"), "{}", run.out);
    assert!(run.code == Some(1) && run.err.contains("not one request was answered"), "{}", run.err);
}

#[cfg(unix)]
#[test]
fn ctrl_c_keeps_what_was_measured() {
    let folder = tempfile::tempdir().unwrap();
    let words = [&serve(), "--rate", "100", "--seconds", "60", "--key-env", "LOAD_KEY"];
    let child = command(folder.path(), &words).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let run = finish(child);
    assert_eq!(run.code, Some(1), "{}", run.err);
    assert!(run.err.contains("stopping") && run.out.contains("PARTIAL: interrupted"), "{}{}", run.out, run.err);
    let files: Vec<_> = std::fs::read_dir(folder.path().join("records")).unwrap().flatten().collect();
    assert_eq!(files.len(), 1);
}

#[test]
fn a_mix_that_cannot_be_read_is_told_with_its_line() {
    let folder = tempfile::tempdir().unwrap();
    let mix = folder.path().join("bad.jsonl");
    std::fs::write(&mix, "{}\n{\"state\"\n").unwrap();
    let error =
        tilewright(&["bench", "load", "http://127.0.0.1:9", "--rate", "1", "--mix", mix.to_str().unwrap()]).failed();
    assert!(error.contains("line 2"), "{error}");
}
