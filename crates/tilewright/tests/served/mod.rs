//! A server of a random small checkpoint, as a process of its own, and the simplest of clients.
#![allow(dead_code)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A running server.
pub struct Server {
    pub child: Child,
    pub address: SocketAddr,
    pub url: String,
    /// Its checkpoint.
    pub model: PathBuf,
    /// What it said on standard error.
    pub log: Arc<Mutex<String>>,
    /// Whatever a test wants to lay down.
    pub folder: tempfile::TempDir,
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }
}

/// A request that every checkpoint answers.
pub const ASK: &str = r#"{"state": "My card was charged twice", "questions": {"refund": {"type": "noul", "instructions": "Is a refund requested?"}}}"#;

/// Writes a random small checkpoint.
pub fn demo(folder: &Path, seed: u32) {
    let seed = seed.to_string();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    let output = command.args(["decide", "demo", "--seed", &seed]).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

impl Server {
    /// Starts one and waits until it is ready.
    pub fn start(flags: &[&str], environment: &[(&str, &str)]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("demo");
        demo(&model, 1337);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
        command.args(["--threads", "1", "serve", "--port", "0", "--model"]).arg(&model).args(flags);
        command.current_dir(folder.path()).env_remove("TILEWRIGHT_KEYS").envs(environment.iter().copied());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::new(Mutex::new(String::new()));
        let mut before = String::new();
        let address = lines.by_ref().map_while(Result::ok).find_map(|line| {
            before += &format!("{line}\n");
            line.split("http://").nth(1)?.split([' ', '/']).next()?.parse().ok()
        });
        let address: SocketAddr = address.unwrap_or_else(|| panic!("the server says where it listens: {before}"));
        let kept = log.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                *kept.lock().unwrap() += &format!("{line}\n");
            }
        });
        let server = Server { child, address, url: format!("http://{address}"), model, log, folder };
        let end = Instant::now() + Duration::from_secs(30);
        while server.get("/health").status != 200 {
            assert!(Instant::now() < end, "never ready: {}", server.log.lock().unwrap());
            std::thread::sleep(Duration::from_millis(20));
        }
        server
    }

    /// A bare connection.
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect_timeout(&self.address, Duration::from_secs(10)).unwrap();
        // A machine that does other things may stand still for half a minute.
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"), b"")
    }

    pub fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        self.post_with(path, "", body)
    }

    /// With further lines of its head.
    pub fn post_with(&self, path: &str, lines: &str, body: impl AsRef<[u8]>) -> Answer {
        let body = body.as_ref();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{lines}Content-Length: {}\r\n\r\n",
            body.len()
        );
        self.send(&head, body)
    }

    fn send(&self, head: &str, body: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(head.as_bytes()).unwrap();
        // A server that refuses a body need not read it.
        let _ = stream.write_all(body);
        read(&mut stream).expect("a whole answer")
    }

    /// That it is still there, answers, and holds on to nothing.
    pub fn is_well(&mut self) {
        assert!(self.child.try_wait().unwrap().is_none(), "the server has ended: {}", self.log.lock().unwrap());
        let answer = self.post("/laya/v1/systemone", ASK);
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        let end = Instant::now() + Duration::from_secs(20);
        loop {
            let health = self.get("/health").json();
            if health["in_flight"] == 0 && health["queue"]["requests"] == 0 {
                break;
            }
            assert!(Instant::now() < end, "something is held on to: {health}");
            std::thread::sleep(Duration::from_millis(50));
        }
        let log = self.log.lock().unwrap();
        assert!(!log.contains("panicked"), "{log}");
    }

    /// A number that the system tells of the process.
    pub fn status(&self, name: &str) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).unwrap_or("0");
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// Resident bytes.
    pub fn resident(&self) -> u64 {
        self.status("VmRSS") * 1024
    }

    /// A number of `/metrics`.
    pub fn metric(&self, name: &str) -> f64 {
        let text = String::from_utf8(self.get("/metrics").body).unwrap();
        let line = text.lines().find(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with(' ')));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).rsplit(' ').next().unwrap().parse().unwrap()
    }

    #[cfg(unix)]
    pub fn signal(&self, signal: rustix::process::Signal) {
        rustix::process::kill_process(rustix::process::Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One answer; `None` where the connection ended before it did.
pub fn read(stream: &mut TcpStream) -> Option<Answer> {
    let mut bytes = Vec::new();
    let mut chunk = [0; 16 << 10];
    loop {
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            let length = head.lines().find_map(|l| {
                let (name, value) = l.split_once(':')?;
                name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().unwrap())
            })?;
            if bytes.len() >= end + 4 + length {
                let status = head.split(' ').nth(1)?.parse().ok()?;
                return Some(Answer { status, head, body: bytes[end + 4..end + 4 + length].to_vec() });
            }
        }
        match stream.read(&mut chunk) {
            Ok(0) | Err(_) => return None,
            Ok(n) => bytes.extend_from_slice(&chunk[..n]),
        }
    }
}
