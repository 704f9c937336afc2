//! The logs of a run: `main.log` in llm.c's format and `log.jsonl`. A line is written with one call, so that a killed run leaves whole lines.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use tilewright_core::{Error, Result};

/// One line of `main.log`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Entry {
    /// A training step: its loss, learning rate and gradient norm.
    Train {
        /// Mean loss.
        loss: f32,
        /// Learning rate.
        lr: f32,
        /// Gradient norm before clipping.
        norm: f32,
    },
    /// A validation: its mean loss.
    Val(f32),
    /// A multiple-choice evaluation: the fraction of right answers.
    Eval(f32),
}

/// A line with its step.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Line {
    /// The step, from 0.
    pub step: usize,
    /// What was measured.
    pub entry: Entry,
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let step = self.step;
        match self.entry {
            Entry::Train { loss, lr, norm } => write!(f, "s:{step} trl:{loss:.4} lr:{lr:.6} norm:{norm:.2}"),
            Entry::Val(loss) => write!(f, "s:{step} tel:{loss:.4}"),
            Entry::Eval(accuracy) => write!(f, "s:{step} eval:{accuracy:.4}"),
        }
    }
}

impl Line {
    /// Reads a line back; `None` for anything that is not one.
    pub fn parse(line: &str) -> Option<Line> {
        let (step, rest) = line.strip_prefix("s:")?.split_once(' ')?;
        let step = step.parse().ok()?;
        let number = |text: &str, key: &str| text.strip_prefix(key)?.strip_prefix(':')?.parse::<f32>().ok();
        let fields: Vec<_> = rest.split(' ').collect();
        let entry = match fields.as_slice() {
            [a, b, c] => Entry::Train { loss: number(a, "trl")?, lr: number(b, "lr")?, norm: number(c, "norm")? },
            [a] => number(a, "tel").map(Entry::Val).or_else(|| number(a, "eval").map(Entry::Eval))?,
            _ => return None,
        };
        Some(Line { step, entry })
    }
}

/// A file of lines that a resumed run continues.
#[derive(Debug)]
pub struct LineFile {
    path: PathBuf,
    file: File,
}

impl LineFile {
    /// Opens a log: empty for a fresh run; on a resume with the lines for which `keep` holds, so that the continued log equals that of
    /// a run which was never disturbed. An unfinished last line is dropped.
    pub fn open(path: &Path, resume: bool, keep: impl Fn(&str) -> bool) -> Result<LineFile> {
        let mut text = String::new();
        if resume && path.exists() {
            let old = std::fs::read(path).map_err(Error::io("read", path))?;
            for line in String::from_utf8_lossy(&old).split_inclusive('\n').filter(|l| l.ends_with('\n')) {
                if keep(line.trim_end()) {
                    text.push_str(line);
                }
            }
        }
        let temporary = path.with_extension("tmp");
        std::fs::write(&temporary, text).map_err(Error::io("write", &temporary))?;
        std::fs::rename(&temporary, path).map_err(Error::io("rename", path))?;
        let file = OpenOptions::new().append(true).open(path).map_err(Error::io("open", path))?;
        Ok(LineFile { path: path.to_owned(), file })
    }

    /// Adds one line.
    pub fn write(&mut self, line: &str) -> Result<()> {
        self.file.write_all(format!("{line}\n").as_bytes()).map_err(Error::io("write", &self.path))
    }

    /// Brings everything written so far to the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(Error::io("sync", &self.path))
    }
}

/// `1.5e-4` as C prints it: `1.50e-04`.
pub fn scientific(value: f32) -> String {
    let text = format!("{value:.2e}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = exponent.strip_prefix('-').map_or(('+', exponent), |d| ('-', d));
    format!("{mantissa}e{sign}{digits:0>2}")
}

/// A z-score as llm.c prints it: `(+1.25z)`, `(+nanz)` before the window is full.
pub fn z_score(z: f64) -> String {
    if z.is_nan() { "(+nanz)".into() } else { format!("({z:+.2}z)") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_llmc_format() {
        let line = |entry| Line { step: 7, entry }.to_string();
        assert_eq!(line(Entry::Train { loss: 5.43219, lr: 3e-4, norm: 1.0 }), "s:7 trl:5.4322 lr:0.000300 norm:1.00");
        assert_eq!(line(Entry::Val(4.0)), "s:7 tel:4.0000");
        assert_eq!(line(Entry::Eval(0.29551)), "s:7 eval:0.2955");
    }

    #[test]
    fn lines_read_back_and_other_text_does_not() {
        for entry in [Entry::Train { loss: 5.5, lr: 0.25, norm: 1.5 }, Entry::Val(4.25), Entry::Eval(0.5)] {
            let line = Line { step: 12, entry };
            assert_eq!(Line::parse(&line.to_string()), Some(line));
        }
        for text in ["", "s:", "s:x tel:1", "s:1 tel:", "s:1 foo:1", "s:1 trl:1 lr:2", "step 1"] {
            assert_eq!(Line::parse(text), None, "{text}");
        }
    }

    #[test]
    fn a_fresh_log_is_empty_and_a_resumed_one_keeps_what_came_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("main.log");
        let before = |step: usize| move |l: &str| Line::parse(l).is_some_and(|l| l.step < step);
        let mut log = LineFile::open(&path, false, |_| true).unwrap();
        for step in 0..5 {
            log.write(&Line { step, entry: Entry::Val(step as f32) }.to_string()).unwrap();
        }
        log.sync().unwrap();
        drop(log);
        // A torn last line, as a power cut leaves it.
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.push_str("s:2 tel");
        std::fs::write(&path, text).unwrap();
        let mut log = LineFile::open(&path, true, before(3)).unwrap();
        log.write("s:3 tel:9.0000").unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "s:0 tel:0.0000\ns:1 tel:1.0000\ns:2 tel:2.0000\ns:3 tel:9.0000\n");
        LineFile::open(&path, false, |_| true).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "", "a fresh run starts an empty log");
    }

    #[test]
    fn a_log_that_cannot_be_written_names_its_path() {
        let message = LineFile::open(Path::new("/nonexistent/main.log"), false, |_| true).unwrap_err().to_string();
        assert!(message.contains("/nonexistent/main"), "{message}");
    }

    #[test]
    fn numbers_look_as_c_prints_them() {
        assert_eq!(scientific(3e-4), "3.00e-04");
        assert_eq!(scientific(0.0), "0.00e+00");
        assert_eq!(scientific(1.234e12), "1.23e+12");
        assert_eq!(z_score(f64::NAN), "(+nanz)");
        assert_eq!(z_score(1.254), "(+1.25z)");
        assert_eq!(z_score(-0.5), "(-0.50z)");
    }
}
