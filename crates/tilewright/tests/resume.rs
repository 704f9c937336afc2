//! The program, killed at random moments and resumed: the end must be the one of a run that nobody disturbed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use tilewright_core::format::shard::ShardWriter;
use tilewright_core::rng::XorShift;

const STEPS: usize = 60;

fn shard(path: &Path, seed: u64, n: usize) {
    let mut rng = XorShift::new(seed);
    let tokens: Vec<u16> = (0..n).map(|i| ((i as u32 * 3 + rng.random_u32() % 4) % 61) as u16).collect();
    let mut writer = ShardWriter::create(path).unwrap();
    writer.write(&tokens).unwrap();
    writer.finish().unwrap();
}

struct Runs {
    dir: tempfile::TempDir,
    flags: Vec<String>,
}

impl Runs {
    /// A tiny model on two shards; `extra` in llm.c's spelling or ours.
    fn new(extra: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for (name, seed, n) in [("t_0.bin", 1, 900), ("t_1.bin", 2, 700), ("v.bin", 3, 200)] {
            shard(&dir.path().join(name), seed, n);
        }
        let flags = "-i t_*.bin -j v.bin -b 2 -t 16 -l 0.003 -u 5 -v 20 -m 2 -s 30 -g 20 \
                     --vocab-size 61 --layers 2 --heads 3 --channels 48";
        let steps = if extra.contains("-x ") { String::new() } else { format!("-x {STEPS}") };
        let flags = format!("{flags} {steps} {extra}");
        Runs { dir, flags: flags.split_whitespace().map(str::to_owned).collect() }
    }

    fn folder(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, folder: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command
            .current_dir(self.dir.path())
            .args(["--threads", "1", "train", "-y", "1", "-o", folder])
            .args(&self.flags);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command
    }

    /// Runs to the end; gives the time that it took.
    fn finish(&self, folder: &str) -> Duration {
        let start = Instant::now();
        let output = self.command(folder).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        start.elapsed()
    }

    /// Kills runs in a folder after random times, resuming each time, until one ends by itself. Gives the number of kills.
    fn torment(&self, folder: &str, rng: &mut XorShift, longest: Duration) -> usize {
        for kills in 0.. {
            let mut child = self.command(folder).spawn().unwrap();
            let patience = longest.mul_f32(rng.random_f32());
            let start = Instant::now();
            let ended = loop {
                if let Some(status) = child.try_wait().unwrap() {
                    break Some(status);
                }
                if start.elapsed() >= patience {
                    break None;
                }
                std::thread::sleep(Duration::from_micros(200));
            };
            if let Some(status) = ended {
                assert!(status.success(), "a resumed run failed: {}", stderr(child));
                return kills;
            }
            // SIGKILL on Unix: nothing is flushed, no destructor runs.
            child.kill().unwrap();
            child.wait().unwrap();
        }
        unreachable!("the loop returns")
    }

    fn assert_same(&self, a: &str, b: &str) {
        let (a, b) = (self.folder(a), self.folder(b));
        let names = |folder: &Path| -> Vec<String> {
            let mut names: Vec<_> =
                fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        };
        assert_eq!(names(&a), names(&b), "the same files, and no temporary one");
        for name in names(&a) {
            if name != "log.jsonl" {
                assert!(fs::read(a.join(&name)).unwrap() == fs::read(b.join(&name)).unwrap(), "{name} differs");
            }
        }
        let lines = |f: &Path| fs::read_to_string(f.join("log.jsonl")).unwrap().lines().count();
        assert_eq!(lines(&a), lines(&b), "lines of log.jsonl");
    }
}

fn stderr(child: std::process::Child) -> String {
    child.wait_with_output().map(|o| String::from_utf8_lossy(&o.stderr).into_owned()).unwrap_or_default()
}

fn kill_and_resume(extra: &str, seed: u64, at_least: usize) {
    let runs = Runs::new(extra);
    let whole = runs.finish("whole");
    let mut rng = XorShift::new(seed);
    let (mut kills, mut round) = (0, 0);
    while kills < at_least {
        let folder = format!("cut_{round}");
        // A run must come past its next checkpoint now and then, or it would never end.
        kills += runs.torment(&folder, &mut rng, whole.mul_f32(0.7));
        runs.assert_same("whole", &folder);
        round += 1;
        assert!(round < 100, "only {kills} kills in {round} runs");
    }
    println!("{kills} kills in {round} runs of {whole:?}");
}

#[test]
fn killed_at_random_moments_and_resumed_the_end_is_byte_identical() {
    kill_and_resume("-n 7", 1, 20);
}

#[test]
fn killed_while_checkpoints_are_written_at_every_step_the_end_is_byte_identical() {
    kill_and_resume("-n 1 -nk 3 -nm 20", 2, 20);
}

#[test]
fn killed_with_bf16_masters_accumulation_and_outlier_windows_the_end_is_byte_identical() {
    kill_and_resume("-n 3 -nk 2 -d 64 --dtype bf16 -sl 2 -sg 2 -r 2", 3, 20);
}

#[cfg(unix)]
#[test]
fn ctrl_c_finishes_the_step_writes_a_checkpoint_and_says_how_to_resume() {
    let runs = Runs::new("-n 1000 -x 1000000");
    let mut command = runs.command("run");
    command.stdout(Stdio::piped());
    let child = command.spawn().unwrap();
    let log = runs.folder("run").join("main.log");
    let start = Instant::now();
    while !fs::read_to_string(&log).is_ok_and(|t| t.lines().count() > 10) {
        assert!(start.elapsed() < Duration::from_secs(60), "no step was made");
        std::thread::sleep(Duration::from_millis(5));
    }
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("stopped after") && text.contains("tilewright train --resume --output run"), "{text}");
    let steps = fs::read_to_string(&log).unwrap().lines().filter(|l| l.contains("trl:")).count();
    assert!(runs.folder("run").join(format!("DONE_{steps:08}")).exists(), "a checkpoint of step {steps}");
}
