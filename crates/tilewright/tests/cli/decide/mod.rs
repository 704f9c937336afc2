//! Typed decisions on the command line, on the tiny checkpoints that recorded results exist for.

mod batch;
mod labelled;
mod one;
mod route;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{Run, tilewright_in};

/// The checkpoints of the recorded results.
fn checkpoint(name: &str) -> String {
    fixture(name).display().to_string()
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../tilewright-models/tests/fixtures/laya")).join(name)
}

/// One recorded case.
fn case(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(fixture(&format!("cases/{name}.json"))).unwrap()).unwrap()
}

impl Run {
    /// Its complaint, of a run that must have failed in its work, perhaps after notes about the checkpoint.
    fn complaint(self) -> String {
        assert_eq!(self.code, Some(1), "{}{}", self.out, self.err);
        assert!(self.err.contains("error: ") && !self.err.contains("panicked"), "{}", self.err);
        self.err
    }
}

/// A folder with files, in which the program runs.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new(files: &[(&str, String)]) -> Self {
        let folder = Folder(tempfile::tempdir().unwrap());
        files.iter().for_each(|(name, content)| folder.write(name, content));
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: &str) {
        std::fs::write(self.path(name), content).unwrap();
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Runs `tilewright decide` with these words; `EN`, `MULTI` and `PARALLEL` are the tiny checkpoints.
    fn decide(&self, words: &[&str]) -> Run {
        let mut args = vec!["decide".to_owned()];
        args.extend(words.iter().map(|word| {
            let mut word = (*word).to_owned();
            for (short, name) in [("EN", "tiny-en"), ("MULTI", "tiny-multi"), ("PARALLEL", "tiny-parallel")] {
                if word == short || word.ends_with(&format!("={short}")) {
                    word.truncate(word.len() - short.len());
                    word += &checkpoint(name);
                }
            }
            word
        }));
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        tilewright_in(self.0.path(), &args, &[("TILEWRIGHT_THREADS", "2")])
    }

    /// The same, and the JSON that it prints.
    fn json(&self, words: &[&str]) -> Value {
        let mut words = words.to_vec();
        words.push("--json");
        serde_json::from_str(&self.decide(&words).ok()).unwrap()
    }
}

/// Three questions, one of each type.
fn questions() -> String {
    json!({
        "urgent": {"type": "noul", "instructions": "Is it urgent?"},
        "team": {"type": "choice", "instructions": "Who handles it?", "criteria": {"billing": "money", "it": "computers"}},
        "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "furious"]},
    })
    .to_string()
}

fn with_questions() -> Folder {
    Folder::new(&[("q.json", questions())])
}

/// Whether a path holds a file.
fn exists(path: &Path) -> bool {
    path.is_file()
}
