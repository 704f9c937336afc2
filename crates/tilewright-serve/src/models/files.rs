//! Whether the files of a checkpoint have changed.

use std::path::Path;
use std::time::SystemTime;

/// The files that answers depend on.
const FILES: [&str; 5] = [
    "rl_agent_config.json",
    "model.safetensors",
    "encoder/config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
];

/// What a file looked like: length, time of change and identity.
type Look = Option<(u64, Option<SystemTime>, u64)>;

/// What the files of a checkpoint looked like. Equal stamps mean that nobody wrote to them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stamp([Look; FILES.len()]);

impl Stamp {
    /// Of a folder. Files that are missing are part of it.
    pub fn of(dir: &Path) -> Self {
        Stamp(FILES.map(|name| {
            let meta = std::fs::metadata(dir.join(name)).ok()?;
            Some((meta.len(), meta.modified().ok(), identity(&meta)))
        }))
    }
}

#[cfg(unix)]
fn identity(meta: &std::fs::Metadata) -> u64 {
    std::os::unix::fs::MetadataExt::ino(meta)
}

#[cfg(not(unix))]
fn identity(_: &std::fs::Metadata) -> u64 {
    0
}

/// When the weights were last changed.
pub(super) fn changed_at(dir: &Path) -> Option<SystemTime> {
    std::fs::metadata(dir.join("model.safetensors")).ok()?.modified().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_changes_with_length_time_and_identity_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("model.safetensors");
        let none = Stamp::of(dir.path());
        std::fs::write(&file, b"one").unwrap();
        let one = Stamp::of(dir.path());
        assert_ne!(none, one);
        assert_eq!(one, Stamp::of(dir.path()));
        std::fs::write(&file, b"longer").unwrap();
        assert_ne!(one, Stamp::of(dir.path()));
        let before = Stamp::of(dir.path());
        let other = dir.path().join("other");
        std::fs::write(&other, b"longer").unwrap();
        std::fs::rename(&other, &file).unwrap();
        assert_ne!(before, Stamp::of(dir.path()));
    }
}
