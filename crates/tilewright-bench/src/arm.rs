//! Running arms: a process that speaks the protocol, or a plain command timed as a whole. Whatever an arm does, the harness goes on.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::inputs::hex;
use crate::protocol::{self, Answer, MAX_LINE, Nonsense, Request, shortened};
use crate::record::FaultKind;
use crate::sys;

/// What went wrong with an arm.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The class of it.
    pub kind: FaultKind,
    /// In words.
    pub message: String,
    /// The end of what it said on standard error.
    pub stderr: String,
}

impl Fault {
    /// Without words from the arm.
    pub fn new(kind: FaultKind, message: impl Into<String>) -> Self {
        Fault { kind, message: message.into(), stderr: String::new() }
    }
}

/// How to start an arm.
#[derive(Debug, Clone)]
pub struct Launch {
    /// Program and arguments, expanded.
    pub command: Vec<String>,
    /// Added to the environment.
    pub env: Vec<(String, String)>,
}

impl Launch {
    fn command(&self) -> Command {
        use std::os::unix::process::CommandExt;
        let mut command = Command::new(&self.command[0]);
        // A group of its own: Ctrl-C reaches the harness alone, and a kill reaches all that the arm began.
        command.args(&self.command[1..]).envs(self.env.iter().cloned()).stderr(Stdio::piped()).process_group(0);
        command
    }

    fn spawn(&self, command: &mut Command) -> Result<Child, Fault> {
        command.spawn().map_err(|e| Fault::new(FaultKind::Start, format!("`{}` does not start: {e}", self.command[0])))
    }
}

/// Keeps the last bytes of a stream, so that a talkative arm neither blocks nor fills the memory.
fn keep_tail(mut stream: impl Read + Send + 'static) -> (Arc<Mutex<Vec<u8>>>, std::thread::JoinHandle<()>) {
    const TAIL: usize = 2048;
    let tail = Arc::new(Mutex::new(Vec::new()));
    let kept = tail.clone();
    let thread = std::thread::spawn(move || {
        let mut buffer = [0; 4096];
        while let Ok(n @ 1..) = stream.read(&mut buffer) {
            let mut tail = kept.lock().unwrap_or_else(|e| e.into_inner());
            tail.extend_from_slice(&buffer[..n]);
            let excess = tail.len().saturating_sub(TAIL);
            tail.drain(..excess);
        }
    });
    (tail, thread)
}

fn text(tail: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&tail.lock().unwrap_or_else(|e| e.into_inner())).trim().to_owned()
}

/// A line of an arm, or why there is none.
type Line = Result<String, String>;

/// An arm that speaks the protocol.
pub struct Speaker {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<Line>,
    stderr: Arc<Mutex<Vec<u8>>>,
    collected: bool,
}

impl Speaker {
    /// Starts the process; it says nothing until asked.
    pub fn start(launch: &Launch) -> Result<Self, Fault> {
        let mut child = launch.spawn(launch.command().stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(Fault::new(FaultKind::Start, "no pipes to the process"));
        };
        let stdin = child.stdin.take();
        // Few lines wait: an arm that floods its output is stopped by the pipe, not kept in memory.
        let (sender, lines) = sync_channel(4);
        std::thread::spawn(move || {
            let mut reader = BufReader::new(stdout);
            loop {
                let mut bytes = Vec::new();
                let line = match reader.by_ref().take(MAX_LINE as u64 + 1).read_until(b'\n', &mut bytes) {
                    Ok(0) => return,
                    Ok(_) if bytes.last() != Some(&b'\n') && bytes.len() > MAX_LINE => {
                        Err("a line without end".to_owned())
                    }
                    Ok(_) => String::from_utf8(bytes).map_err(|_| "bytes that are no UTF-8".to_owned()),
                    Err(e) => Err(e.to_string()),
                };
                let last = line.is_err();
                if sender.send(line).is_err() || last {
                    return;
                }
            }
        });
        let (stderr, _) = keep_tail(stderr);
        Ok(Speaker { child, stdin, lines, stderr, collected: false })
    }

    /// Of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks, and waits for the answer at most `limit`. After a fault the process is dead.
    pub fn ask(&mut self, request: &Request, limit: Duration, stop: &AtomicBool) -> Result<Answer, Fault> {
        self.try_ask(request, limit, stop).map_err(|mut fault| {
            if fault.kind == FaultKind::Crash {
                fault.message = format!("{} during `{}`", self.how_it_ended(), request.word());
            }
            self.kill();
            fault.stderr = text(&self.stderr);
            fault
        })
    }

    fn try_ask(&mut self, request: &Request, limit: Duration, stop: &AtomicBool) -> Result<Answer, Fault> {
        if let Ok(line) = self.lines.try_recv() {
            let line = line.unwrap_or_else(|e| e);
            return Err(Fault::new(
                FaultKind::Garbage,
                format!("spoke before it was asked: `{}`", shortened(line.trim())),
            ));
        }
        let crash = || Fault::new(FaultKind::Crash, "");
        let stdin = self.stdin.as_mut().ok_or_else(crash)?;
        writeln!(stdin, "{}", request.line()).and_then(|()| stdin.flush()).map_err(|_| crash())?;
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(Duration::from_millis(100))) {
                Ok(Ok(line)) => {
                    return protocol::parse(line.trim_end(), request.word()).map_err(|nonsense| match nonsense {
                        Nonsense::Garbage(what) => Fault::new(FaultKind::Garbage, what),
                        Nonsense::NegativeTime(what) => Fault::new(FaultKind::ImpossibleTime, what),
                        Nonsense::Refused(what) => Fault::new(FaultKind::Refused, format!("the arm says: {what}")),
                    });
                }
                Ok(Err(what)) => return Err(Fault::new(FaultKind::Garbage, what)),
                Err(RecvTimeoutError::Disconnected) => return Err(crash()),
                Err(RecvTimeoutError::Timeout) if stop.load(Ordering::Relaxed) => {
                    return Err(Fault::new(FaultKind::Interrupted, "interrupted"));
                }
                Err(RecvTimeoutError::Timeout) if left.is_zero() => {
                    let what = format!("no answer to `{}` in {:.1} s", request.word(), limit.as_secs_f64());
                    return Err(Fault::new(FaultKind::Timeout, what));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Waits a moment for the end, so that the reason can be told.
    fn how_it_ended(&mut self) -> String {
        use std::os::unix::process::ExitStatusExt;
        self.stdin = None;
        for _ in 0..50 {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.collected = true;
                    return match (status.code(), status.signal()) {
                        (Some(code), _) => format!("ended with exit code {code}"),
                        (_, Some(signal)) => format!("was ended by signal {signal}"),
                        _ => "ended".to_owned(),
                    };
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(10)),
                Err(_) => break,
            }
        }
        "closed its output and went on".to_owned()
    }

    /// Says goodbye; exit code 0 is expected.
    pub fn quit(mut self, limit: Duration) -> Result<(), Fault> {
        let never = AtomicBool::new(false);
        self.ask(&Request::Quit {}, limit, &never)?;
        self.stdin = None;
        let end = Instant::now() + limit;
        while Instant::now() < end {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.collected = true;
                    let bad = !status.success();
                    let fault = || Fault {
                        stderr: text(&self.stderr),
                        ..Fault::new(FaultKind::Crash, format!("after `quit`: {status}"))
                    };
                    return if bad { Err(fault()) } else { Ok(()) };
                }
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(_) => break,
            }
        }
        Err(Fault::new(FaultKind::Timeout, "still there after `quit`"))
    }

    fn kill(&mut self) {
        self.stdin = None;
        if !self.collected {
            sys::kill_group(self.child.id());
            let _ = self.child.wait();
            self.collected = true;
        }
    }
}

impl Drop for Speaker {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A whole process, from start to end.
#[derive(Debug, Clone)]
pub struct Whole {
    /// From before the start to the end.
    pub wall: Duration,
    /// User and system time.
    pub cpu: Duration,
    /// Largest resident set, in bytes.
    pub peak_rss: u64,
    /// SHA-256 of standard output.
    pub output: String,
}

/// Runs a plain command to its end.
pub fn run_whole(launch: &Launch, limit: Duration, stop: &AtomicBool) -> Result<Whole, Fault> {
    let mut command = launch.command();
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let start = Instant::now();
    let mut child = launch.spawn(&mut command)?;
    let pid = child.id();
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    // Drained beside the wait, or a full pipe would stop the command.
    let digest = std::thread::spawn(move || {
        let mut hasher = Sha256::new();
        stdout.map(|mut out| std::io::copy(&mut out, &mut hasher));
        hex(&hasher.finalize())
    });
    let (stderr, stderr_thread) = match stderr {
        Some(stream) => keep_tail(stream),
        None => keep_tail(std::io::empty()),
    };
    // A watchdog ends the group at the limit; the child is collected only after the watchdog has been told, so its number is still its own.
    let ended = (Mutex::new(false), Condvar::new());
    let (waited, wall, reason) = std::thread::scope(|scope| {
        let watchdog = scope.spawn(|| {
            let mut done = ended.0.lock().unwrap_or_else(|e| e.into_inner());
            let end = start + limit;
            loop {
                let reason = match (stop.load(Ordering::Relaxed), Instant::now() >= end) {
                    _ if *done => return None,
                    (true, _) => FaultKind::Interrupted,
                    (_, true) => FaultKind::Timeout,
                    _ => {
                        let left = end.saturating_duration_since(Instant::now()).min(Duration::from_millis(100));
                        done = ended.1.wait_timeout(done, left).unwrap_or_else(|e| e.into_inner()).0;
                        continue;
                    }
                };
                sys::kill_group(pid);
                return Some(reason);
            }
        });
        let waited = sys::wait_without_collecting(pid);
        let wall = start.elapsed();
        *ended.0.lock().unwrap_or_else(|e| e.into_inner()) = true;
        ended.1.notify_all();
        (waited, wall, watchdog.join().unwrap_or(None))
    });
    // Children that it left behind would hold the pipes open.
    sys::kill_group(pid);
    let usage = waited.and_then(|()| sys::collect(pid));
    let output = digest.join().unwrap_or_default();
    let _ = stderr_thread.join();
    let fault = |kind, message: String| Fault { kind, message, stderr: text(&stderr) };
    match reason {
        Some(FaultKind::Timeout) => {
            return Err(fault(FaultKind::Timeout, format!("not done in {:.1} s", limit.as_secs_f64())));
        }
        Some(kind) => return Err(fault(kind, "interrupted".to_owned())),
        None => {}
    }
    let usage = usage.map_err(|e| fault(FaultKind::Crash, format!("lost the process: {e}")))?;
    match (usage.code, usage.signal) {
        (Some(0), _) => Ok(Whole { wall, cpu: usage.cpu, peak_rss: usage.peak_rss, output }),
        (Some(code), _) => Err(fault(FaultKind::Crash, format!("ended with exit code {code}"))),
        (_, signal) => Err(fault(FaultKind::Crash, format!("was ended by signal {}", signal.unwrap_or(0)))),
    }
}
