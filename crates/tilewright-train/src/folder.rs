//! The run folder: `config.json`, `main.log`, `log.jsonl`, `loss.svg`, `sample.txt`, and the checkpoints.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tilewright_core::format::checkpoint;
use tilewright_core::fs::{remove_abandoned, write_atomic};
use tilewright_core::{Error, Result};

use crate::log::{Entry, Line, LineFile};
use crate::svg::LossCurve;

/// An open run folder.
pub struct RunFolder {
    path: PathBuf,
    main: LineFile,
    json: LineFile,
    train: Vec<(usize, f64)>,
    val: Vec<(usize, f64)>,
    samples: String,
}

const SAMPLE_HEAD: &str = "=== step ";

impl RunFolder {
    /// Creates a folder (readable by its owner only, as llm.c does) or takes an existing one.
    pub fn create(path: &Path) -> Result<()> {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(path).map_err(Error::io("create folder", path))
    }

    /// The step to resume from. On a fresh start the folder must not hold checkpoints of another run, unless those may be deleted.
    pub fn claim(path: &Path, resume: bool, overwrite: bool) -> Result<Option<u64>> {
        remove_abandoned(path)?;
        let latest = checkpoint::latest_complete(path)?;
        if resume {
            if let Some(step) = latest {
                // Files without a marker below it are the rest of a deletion that was cut short.
                checkpoint::remove_incomplete(path, step)?;
            }
            return Ok(latest);
        }
        if let Some(step) = latest {
            if !overwrite {
                return Err(Error::config(
                    format!("{} holds a run's checkpoint of step {step}", path.display()),
                    "continue it with --resume, choose another --output, or delete its checkpoints with --overwrite",
                ));
            }
            for step in checkpoint::list(path)?.into_keys() {
                checkpoint::delete(path, step)?;
            }
        }
        Ok(None)
    }

    /// Opens the logs: empty, or with what was written before the step to resume from.
    pub fn open(path: &Path, resume: Option<u64>) -> Result<Self> {
        let before = |step: usize| resume.is_some_and(|r| (step as u64) < r);
        let main_path = path.join("main.log");
        let main = LineFile::open(&main_path, resume.is_some(), |l| Line::parse(l).is_some_and(|l| before(l.step)))?;
        let json = LineFile::open(&path.join("log.jsonl"), resume.is_some(), |l| {
            let value: Option<Value> = serde_json::from_str(l).ok();
            value.and_then(|v| v["step"].as_u64()).is_some_and(|s| before(s as usize))
        })?;
        let sample_path = path.join("sample.txt");
        let mut samples = String::new();
        if resume.is_some() && sample_path.exists() {
            let old = std::fs::read_to_string(&sample_path).map_err(Error::io("read", &sample_path))?;
            for part in old.split_inclusive(SAMPLE_HEAD) {
                // Each part but the first begins with the step of its sample, and all end with the head of the next.
                let step = part.split_once(' ').and_then(|(s, _)| s.parse::<usize>().ok());
                if step.is_some_and(before) {
                    samples.push_str(SAMPLE_HEAD);
                    samples.push_str(part.strip_suffix(SAMPLE_HEAD).unwrap_or(part));
                }
            }
        }
        let mut folder = RunFolder { path: path.to_owned(), main, json, train: Vec::new(), val: Vec::new(), samples };
        let text = std::fs::read_to_string(&main_path).map_err(Error::io("read", &main_path))?;
        for line in text.lines().filter_map(Line::parse) {
            folder.remember(&line);
        }
        Ok(folder)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn remember(&mut self, line: &Line) {
        match line.entry {
            Entry::Train { loss, .. } => self.train.push((line.step, f64::from(loss))),
            Entry::Val(loss) => self.val.push((line.step, f64::from(loss))),
            Entry::Eval(_) => {}
        }
    }

    /// Adds a line to `main.log`, and an object with more figures to `log.jsonl`.
    pub fn log(&mut self, line: Line, figures: &Value) -> Result<()> {
        let text = line.to_string();
        // The printed value, which is what a resumed run reads back: the curve must not depend on where a run was cut.
        self.remember(&Line::parse(&text).unwrap_or(line));
        self.main.write(&text)?;
        self.json.write(&figures.to_string())
    }

    /// Adds an object to `log.jsonl` alone; its `step` says up to which checkpoint a resume keeps it.
    pub fn note(&mut self, figures: &Value) -> Result<()> {
        self.json.write(&figures.to_string())
    }

    /// Adds a sample and writes `sample.txt`.
    pub fn sample(&mut self, step: usize, text: &str) -> Result<()> {
        self.samples.push_str(&format!("{SAMPLE_HEAD}{step} ===\n{text}\n\n"));
        write_atomic(&self.path.join("sample.txt"), self.samples.as_bytes())
    }

    /// Draws `loss.svg`.
    pub fn draw(&self, title: &str) -> Result<()> {
        let curve = LossCurve { title, train: &self.train, val: &self.val };
        write_atomic(&self.path.join("loss.svg"), curve.render().as_bytes())
    }

    /// Brings the logs to the disk; before a checkpoint, so that a resume finds the lines before it.
    pub fn sync(&self) -> Result<()> {
        self.main.sync()?;
        self.json.sync()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(folder: &mut RunFolder, steps: std::ops::Range<usize>) {
        for step in steps {
            let entry = Entry::Train { loss: 5.0 - step as f32, lr: 0.1, norm: 1.0 };
            folder.log(Line { step, entry }, &json!({"step": step, "loss": 5 - step})).unwrap();
            folder.sample(step, &format!("text {step}\nof two lines, === not a head ===")).unwrap();
        }
        folder.sync().unwrap();
        folder.draw("t").unwrap();
    }

    fn read(dir: &Path) -> Vec<String> {
        ["main.log", "log.jsonl", "sample.txt", "loss.svg"]
            .map(|n| std::fs::read_to_string(dir.join(n)).unwrap())
            .to_vec()
    }

    #[test]
    fn a_resumed_folder_equals_an_undisturbed_one() {
        let (whole, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        run(&mut RunFolder::open(whole.path(), None).unwrap(), 0..5);
        run(&mut RunFolder::open(cut.path(), None).unwrap(), 0..4);
        run(&mut RunFolder::open(cut.path(), Some(2)).unwrap(), 2..5);
        assert_eq!(read(whole.path()), read(cut.path()));
        assert_eq!(read(cut.path())[2].matches(SAMPLE_HEAD).count(), 5);
    }

    #[test]
    fn a_fresh_run_starts_empty_files() {
        let dir = tempfile::tempdir().unwrap();
        run(&mut RunFolder::open(dir.path(), None).unwrap(), 0..5);
        run(&mut RunFolder::open(dir.path(), None).unwrap(), 0..1);
        assert_eq!(read(dir.path())[0].lines().count(), 1);
    }

    #[test]
    fn a_used_folder_is_refused_resumed_or_cleared() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path();
        assert_eq!(RunFolder::claim(path, false, false).unwrap(), None);
        std::fs::write(checkpoint::model_path(path, 5), b"m").unwrap();
        std::fs::write(checkpoint::state_path(path, 5, 0), b"s").unwrap();
        checkpoint::mark_done(path, 5).unwrap();
        std::fs::write(checkpoint::model_path(path, 3), b"rest of a deletion").unwrap();
        std::fs::write(checkpoint::model_path(path, 7), b"never marked").unwrap();
        let message = RunFolder::claim(path, false, false).unwrap_err().to_string();
        assert!(
            message.contains("step 5") && message.contains("--resume") && message.contains("--overwrite"),
            "{message}"
        );
        assert_eq!(RunFolder::claim(path, true, false).unwrap(), Some(5));
        assert!(!checkpoint::model_path(path, 3).exists());
        assert_eq!(RunFolder::claim(path, false, true).unwrap(), None);
        assert!(checkpoint::list(path).unwrap().is_empty());
    }

    #[cfg(unix)]
    #[test]
    fn a_new_folder_is_private() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b");
        RunFolder::create(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        RunFolder::create(&path).unwrap();
        std::fs::write(path.join("file"), b"").unwrap();
        let message = RunFolder::create(&path.join("file")).unwrap_err().to_string();
        assert!(message.contains("file"), "{message}");
    }
}
