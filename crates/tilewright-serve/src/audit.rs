//! One line of JSON for each answered request: who asked, what (as a hash), which weights answered, what they said.
//!
//! A thread of its own writes, so that a slow disk slows no answer. What cannot be written is counted and told in `/health`; the server goes on.

use std::fs::{File, OpenOptions};
use std::io::{Seek, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use serde_json::Value;
use tilewright_core::{Error, Result};

use crate::metrics::Metrics;

/// Lines that wait for the disk.
const WAITING: usize = 4096;

enum Message {
    Line(String),
    Reopen,
    Flush(SyncSender<()>),
}

/// See the module's words.
#[derive(Debug)]
pub struct Audit {
    tell: Option<SyncSender<Message>>,
    error: Arc<Mutex<Option<String>>>,
    metrics: Arc<Metrics>,
    writer: Option<JoinHandle<()>>,
}

impl Audit {
    /// Opens the file to append, readable by its owner alone.
    ///
    /// # Errors
    /// When it cannot be opened: a server that was told to keep records does not start without.
    pub fn open(path: &Path, metrics: Arc<Metrics>) -> Result<Self> {
        let file = append(path).map_err(Error::io("open to append", path))?;
        let (tell, told) = sync_channel(WAITING);
        let error = Arc::new(Mutex::new(None));
        let (shared, counts, path) = (error.clone(), metrics.clone(), path.to_owned());
        let writer = std::thread::Builder::new()
            .name("audit".into())
            .spawn(move || run(&told, file, &path, &shared, &counts))
            .map_err(|e| Error::config(format!("the system refused a thread: {e}"), "free some"))?;
        Ok(Audit { tell: Some(tell), error, metrics, writer: Some(writer) })
    }

    fn send(&self, message: Message) {
        let Some(tell) = &self.tell else { return };
        if let Err(TrySendError::Full(Message::Line(_)) | TrySendError::Disconnected(Message::Line(_))) =
            tell.try_send(message)
        {
            self.metrics.audit_failures.add(1);
            *self.error.lock().unwrap_or_else(PoisonError::into_inner) =
                Some("lines come faster than the disk takes them".into());
        }
    }

    /// Writes a record, soon.
    pub fn record(&self, record: &Value) {
        self.send(Message::Line(record.to_string()));
    }

    /// Opens the file anew: for whoever moves it away.
    pub fn reopen(&self) {
        self.send(Message::Reopen);
    }

    /// Waits until everything before is on its way to the disk.
    pub fn flush(&self) {
        let (tell, told) = sync_channel(1);
        if let Some(sender) = &self.tell
            && sender.send(Message::Flush(tell)).is_ok()
        {
            let _ = told.recv();
        }
    }

    /// Why the last line could not be written, if so.
    pub fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Audit {
    fn drop(&mut self) {
        self.tell = None;
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

fn append(path: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.append(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

fn run(told: &Receiver<Message>, mut file: File, path: &Path, error: &Mutex<Option<String>>, metrics: &Metrics) {
    let tell = |result: std::io::Result<()>, what: &str| {
        let text = result.err().map(|e| format!("{what} {}: {e}", path.display()));
        let mut last = error.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(text) = &text
            && last.is_none()
        {
            tracing::error!("audit: {text}");
        }
        *last = text;
    };
    for message in told {
        match message {
            Message::Line(mut line) => {
                line.push('\n');
                let result = whole(&mut file, line.as_bytes());
                if result.is_err() {
                    metrics.audit_failures.add(1);
                }
                tell(result, "write");
            }
            Message::Reopen => match append(path) {
                Ok(opened) => file = opened,
                Err(e) => tell(Err(e), "open"),
            },
            Message::Flush(done) => {
                let _ = done.send(());
            }
        }
    }
}

/// A line whole or not at all: what a full disk left of it is cut off again.
fn whole(file: &mut File, line: &[u8]) -> std::io::Result<()> {
    let before = file.stream_position().and_then(|_| file.metadata()).map(|m| m.len());
    let result = file.write_all(line);
    if result.is_err()
        && let Ok(before) = before
    {
        let _ = file.set_len(before);
    }
    result
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn records_are_lines_of_json_and_are_appended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        for n in 0..2 {
            let audit = Audit::open(&path, Arc::default()).unwrap();
            audit.record(&json!({"n": n}));
            audit.flush();
            assert_eq!(audit.error(), None);
        }
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "{\"n\":0}\n{\"n\":1}\n");
    }

    #[test]
    fn a_file_that_was_moved_away_is_opened_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("audit.jsonl");
        let audit = Audit::open(&path, Arc::default()).unwrap();
        audit.record(&json!(1));
        audit.flush();
        std::fs::rename(&path, dir.path().join("old")).unwrap();
        audit.reopen();
        audit.record(&json!(2));
        audit.flush();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "2\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_counted_and_told_and_nothing_else_happens() {
        let metrics = Arc::new(Metrics::default());
        let audit = Audit::open(Path::new("/dev/full"), metrics.clone()).unwrap();
        audit.record(&json!({"n": 1}));
        audit.record(&json!({"n": 2}));
        audit.flush();
        assert_eq!(metrics.audit_failures.get(), 2);
        assert!(audit.error().unwrap().contains("/dev/full"));
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Audit::open(&dir.path().join("no/such"), Arc::default()).is_err());
    }
}
