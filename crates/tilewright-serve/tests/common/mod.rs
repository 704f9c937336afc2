//! Checkpoints, scorers that misbehave, and a server with a client.
#![allow(dead_code, reason = "each test program uses some of it")]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};
use tilewright_core::{Error, Result};
use tilewright_decide::{Agent, OpenOptions, Tokenizer};
use tilewright_models::laya::demo::{self, DemoShape};
use tilewright_models::laya::{Checkpoint, Laya, LoadOptions, Row, RowScores, Scorer};
use tilewright_serve::engine::Engine;
use tilewright_serve::http::AppState;
use tilewright_serve::metrics::Metrics;
use tilewright_serve::models::Models;
use tilewright_serve::run::Server;
use tilewright_serve::service::Service;
use tilewright_serve::{Config, Keeping, Loaded, Loader, ModelSource};
use tokio::sync::oneshot;

/// A demo checkpoint that all tests of a program share.
pub fn checkpoint() -> &'static Path {
    static DIR: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    &DIR.get_or_init(|| {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("demo");
        demo::write(&dir, DemoShape::Tiny, 7).unwrap();
        (temp, dir)
    })
    .1
}

/// A demo checkpoint of one's own.
pub fn write_checkpoint(dir: &Path, seed: u32) {
    demo::write(dir, DemoShape::Tiny, seed).unwrap();
}

pub fn open(dir: &Path) -> Agent<Laya> {
    Agent::open(dir, &OpenOptions::default()).unwrap()
}

/// A checkpoint with its own model, as the program loads it.
pub fn real(name: Option<&str>, dir: &Path) -> ModelSource {
    let folder = dir.to_owned();
    let loader: Loader = Arc::new(move || {
        let load = LoadOptions { mapped: false, ..LoadOptions::default() };
        Ok(Loaded::from(Agent::open(&folder, &OpenOptions { load, hash: true, ..OpenOptions::default() })?))
    });
    ModelSource { name: name.map(str::to_owned), dir: Some(dir.to_owned()), loader }
}

type Score = dyn Fn(&[Row]) -> Result<()> + Send + Sync;

/// Scores by a hash of the row, after doing something else.
pub struct Fake(Arc<Score>);

impl Scorer for Fake {
    fn score(&mut self, rows: &[Row]) -> Result<Vec<RowScores>> {
        (self.0)(rows)?;
        Ok(rows.iter().map(scores).collect())
    }

    fn embed(&mut self, rows: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        Ok(rows.iter().map(|ids| vec![ids.len() as f32, 1.0]).collect())
    }
}

fn scores(row: &Row) -> RowScores {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    row.ids.iter().for_each(|id| hash = (hash ^ u64::from(*id)).wrapping_mul(0x100_0000_01b3));
    let logit = |i: usize| ((hash >> (i % 40)) & 0xff) as f32 / 64.0;
    RowScores { logits: (0..row.markers.len()).map(logit).collect(), act_logits: vec![logit(3), 0.0] }
}

/// A checkpoint whose model does `score` first.
pub fn fake(name: Option<&str>, score: impl Fn(&[Row]) -> Result<()> + Send + Sync + 'static) -> ModelSource {
    let score: Arc<Score> = Arc::new(score);
    let loader: Loader = Arc::new(move || {
        let dir = checkpoint();
        let config = Checkpoint::open(dir, None)?.agent().clone();
        let agent = Agent::new(Fake(score.clone()), Tokenizer::open(&dir.join("tokenizer"))?, config);
        Ok(Loaded::from(agent))
    });
    ModelSource { name: name.map(str::to_owned), dir: None, loader }
}

/// Whether a row holds a text.
pub fn holds(text: &str) -> impl Fn(&Row) -> bool + Send + Sync + 'static {
    let ids = Tokenizer::open(&checkpoint().join("tokenizer")).unwrap().encode(text).unwrap();
    move |row: &Row| row.ids.windows(ids.len()).any(|w| w == ids)
}

pub fn broken() -> Error {
    Error::config("the planned failure", "nothing")
}

/// Counts calls.
#[derive(Clone, Default)]
pub struct Calls(Arc<AtomicUsize>);

impl Calls {
    pub fn count(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    pub fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// A service without sockets.
pub fn service(config: &Config, sources: Vec<ModelSource>, keeping: &Keeping) -> Arc<Service> {
    let metrics = Arc::new(Metrics::default());
    let engine = Engine::new(1024, config.limits.queued_tokens, config.limits.batch_tokens, metrics.clone());
    let models = Arc::new(Models::new(engine.clone(), metrics.clone(), sources, keeping).unwrap());
    let service =
        Service::new(models, engine, metrics, config.limits.clone(), config.timing.clone(), config.tournament);
    Arc::new(service)
}

/// A server on a free port, on a thread of its own.
pub struct Running {
    pub address: SocketAddr,
    pub state: Arc<AppState>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<tilewright_decide::Result<()>>>,
}

impl Running {
    pub fn start(config: Config, sources: Vec<ModelSource>) -> Self {
        Self::start_with(config, sources, Keeping::default())
    }

    pub fn start_with(mut config: Config, sources: Vec<ModelSource>, keeping: Keeping) -> Self {
        config.bind.set_port(0);
        let (tell, told) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let result = runtime.block_on(async {
                let server = Server::bind(config, sources, &keeping, 1024).await?;
                tell.send((server.address().unwrap(), server.state().clone())).unwrap();
                server
                    .run(async {
                        let _ = stopped.await;
                    })
                    .await
            });
            runtime.shutdown_timeout(Duration::from_secs(5));
            result
        });
        let (address, state) = told.recv().expect("the server did not start");
        let running = Running { address, state, stop: Some(stop), thread: Some(thread) };
        until("ready", || running.get("/health").status == 200);
        running
    }

    /// Tells it to stop, without waiting.
    pub fn tell_to_stop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
    }

    /// Waits for its end.
    pub fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.send("POST", path, &[], body.to_string().as_bytes())
    }

    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = self.connect();
        stream.write_all(&request(method, path, headers, body)).unwrap();
        Answer::read(&mut stream)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.tell_to_stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    headers.iter().for_each(|(name, value)| head.push_str(&format!("{name}: {value}\r\n")));
    if method == "POST" {
        head.push_str(&format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len()));
    }
    head.push_str("\r\n");
    [head.as_bytes(), body].concat()
}

/// A response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads until the connection ends.
    pub fn read(stream: &mut TcpStream) -> Self {
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| {
            panic!("no response: {:?}", String::from_utf8_lossy(&bytes));
        });
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_ascii_lowercase();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head, body: bytes[end + 4..].to_vec() }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", String::from_utf8_lossy(&self.body)))
    }
}

/// Waits until something holds.
pub fn until(what: &str, holds: impl Fn() -> bool) {
    for _ in 0..2_000 {
        if holds() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("waited for: {what}");
}

/// One question of each type.
pub fn questions() -> Value {
    json!({
        "refund": {"type": "noul", "instructions": "Is a refund requested?"},
        "team": {"type": "choice", "instructions": "Who handles it?", "criteria": {"billing": "money", "it": null}},
        "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "furious"]},
    })
}

pub fn ask(state: &str) -> Value {
    json!({"state": state, "questions": questions()})
}
