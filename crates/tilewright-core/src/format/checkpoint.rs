//! The files of a checkpoint in an output folder: `model_%08d.bin`, `state_%08d_%05d.bin` for each process, and the empty `DONE_%08d` that is created last.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::fs::{sync_folder_of, write_atomic};
use crate::{Error, Result};

/// The parameters of a step.
pub fn model_path(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("model_{step:08}.bin"))
}

/// The optimiser state of one process at a step.
pub fn state_path(folder: &Path, step: u64, rank: usize) -> PathBuf {
    folder.join(format!("state_{step:08}_{rank:05}.bin"))
}

/// The marker that says that a step's files are complete.
pub fn done_path(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("DONE_{step:08}"))
}

/// What a folder holds of one step.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CheckpointFiles {
    /// Whether the marker is there.
    pub done: bool,
    /// Whether the model is there.
    pub model: bool,
    /// The ranks whose state is there, ascending.
    pub ranks: Vec<usize>,
}

fn digits(text: &str, at_least: usize) -> Option<u64> {
    (text.len() >= at_least && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

/// All steps of which anything lies in the folder, ascending.
pub fn list(folder: &Path) -> Result<BTreeMap<u64, CheckpointFiles>> {
    let mut steps: BTreeMap<u64, CheckpointFiles> = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
        let name = entry.map_err(Error::io("list", folder))?.file_name();
        let Some(name) = name.to_str() else { continue };
        if let Some(step) = name.strip_prefix("DONE_").and_then(|s| digits(s, 8)) {
            steps.entry(step).or_default().done = true;
        } else if let Some(stem) = name.strip_suffix(".bin") {
            if let Some(step) = stem.strip_prefix("model_").and_then(|s| digits(s, 8)) {
                steps.entry(step).or_default().model = true;
            } else if let Some((step, rank)) = stem.strip_prefix("state_").and_then(|s| s.split_once('_'))
                && let (Some(step), Some(rank)) = (digits(step, 8), digits(rank, 5))
            {
                steps.entry(step).or_default().ranks.push(rank as usize);
            }
        }
    }
    steps.values_mut().for_each(|s| s.ranks.sort_unstable());
    Ok(steps)
}

/// Declares a step complete. The other files must be on disk by now.
pub fn mark_done(folder: &Path, step: u64) -> Result<()> {
    write_atomic(&done_path(folder, step), &[])
}

/// The largest step that is marked complete; `None` when there is none. A marker whose files are gone is an error, not a reason to resume from an older step.
pub fn latest_complete(folder: &Path) -> Result<Option<u64>> {
    let Some((step, files)) = list(folder)?.into_iter().rfind(|(_, files)| files.done) else {
        return Ok(None);
    };
    let missing = match files {
        CheckpointFiles { model: false, .. } => model_path(folder, step),
        CheckpointFiles { ref ranks, .. } if ranks.first() != Some(&0) => state_path(folder, step, 0),
        _ => return Ok(Some(step)),
    };
    let what =
        format!("{} says that step {step} is complete, but there is no such file", done_path(folder, step).display());
    Err(Error::format(&missing, 0, what, "restore the file, or remove the DONE marker to resume from the step before"))
}

/// Which checkpoints to keep: llm.c's `-n`, `-nk` and `-nm`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Retention {
    /// A checkpoint is written every so many steps.
    pub every: u64,
    /// Checkpoints to keep; 0 keeps all.
    pub keep: u64,
    /// Multiples of this are never deleted; 0 for none.
    pub major_every: u64,
}

impl Retention {
    /// The step whose checkpoint goes when that of `step` is complete.
    pub fn victim(&self, step: u64) -> Option<u64> {
        if self.keep == 0 {
            return None;
        }
        let old = step.checked_sub(self.keep.checked_mul(self.every)?).filter(|&s| s > 0 && s < step)?;
        (self.major_every == 0 || !old.is_multiple_of(self.major_every)).then_some(old)
    }
}

/// Removes the checkpoint of a step, the marker first, so that what is left after a crash does not look complete. Absent files are fine.
pub fn delete(folder: &Path, step: u64) -> Result<()> {
    let Some(files) = list(folder)?.remove(&step) else { return Ok(()) };
    let marker = done_path(folder, step);
    if files.done {
        fs::remove_file(&marker).map_err(Error::io("remove", &marker))?;
        sync_folder_of(&marker)?;
    }
    let model = files.model.then(|| model_path(folder, step));
    for path in model.into_iter().chain(files.ranks.iter().map(|&rank| state_path(folder, step, rank))) {
        fs::remove_file(&path).map_err(Error::io("remove", &path))?;
    }
    Ok(())
}

/// Removes what interrupted writes and deletions left of steps up to `latest` that are not marked complete; returns those steps. For the start of a run only.
pub fn remove_incomplete(folder: &Path, latest: u64) -> Result<Vec<u64>> {
    let steps: Vec<u64> = list(folder)?.into_iter().filter(|(s, f)| *s <= latest && !f.done).map(|(s, _)| s).collect();
    for &step in &steps {
        delete(folder, step)?;
    }
    Ok(steps)
}
