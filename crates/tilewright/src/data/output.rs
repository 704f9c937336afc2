//! The shards of a data set: all of them or none.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use tilewright_core::format::Sink;
use tilewright_core::format::shard::{MAX_TOKENS, ShardWriter};
use tilewright_core::format::token_table::TokenTable;

/// A last shard below this is worth a word: a loader refuses shards smaller than one batch.
const SMALL_SHARD: u64 = 1 << 16;

/// Shards of one split.
struct Split {
    name: &'static str,
    current: Option<ShardWriter>,
    /// Names and tokens of the shards so far; the last one may still be open.
    files: Vec<(PathBuf, u64)>,
}

/// The data set being written.
pub struct Output {
    prefix: PathBuf,
    shard_tokens: u64,
    /// Tokens that still go to the validation split, when it is measured in tokens.
    val_tokens_left: u64,
    train: Split,
    val: Split,
    tokenizer: Option<PathBuf>,
    committed: bool,
}

/// What was written.
pub struct Written {
    /// Training tokens.
    pub train: u64,
    /// Validation tokens.
    pub val: u64,
    /// All shards with their tokens.
    pub files: Vec<(PathBuf, u64)>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Output {
    /// Starts a data set. Shards of an earlier one with this prefix are refused, or removed with `force`.
    pub fn create(prefix: &Path, shard_tokens: u64, val_tokens: Option<u64>, force: bool) -> anyhow::Result<Self> {
        if prefix.file_name().is_none() || prefix.is_dir() {
            bail!("--output {} names a folder; add the beginning of a file name, such as {0}/mydata", prefix.display());
        }
        if !(1..=MAX_TOKENS).contains(&shard_tokens) {
            bail!("a shard holds 1 to {MAX_TOKENS} tokens, not {shard_tokens}; use --shard-tokens 100M");
        }
        let folder = folder_of(prefix);
        std::fs::create_dir_all(folder).with_context(|| format!("create the folder {}", folder.display()))?;
        let old = existing(prefix)?;
        if let (false, Some(first)) = (force, old.first()) {
            bail!(
                "{} exists ({} files with this prefix); choose another --output, or replace them with --force",
                first.display(),
                old.len()
            );
        }
        for path in old {
            std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
        }
        let split = |name| Split { name, current: None, files: Vec::new() };
        Ok(Output {
            prefix: prefix.to_owned(),
            shard_tokens,
            val_tokens_left: val_tokens.unwrap_or(0),
            train: split("train"),
            val: split("val"),
            tokenizer: None,
            committed: false,
        })
    }

    /// Appends tokens to a split.
    pub fn write(&mut self, tokens: &[u16], validation: bool) -> anyhow::Result<()> {
        let to_val = if validation { tokens.len() } else { self.val_tokens_left.min(tokens.len() as u64) as usize };
        self.val_tokens_left = self.val_tokens_left.saturating_sub(to_val as u64);
        self.val.write(&self.prefix, self.shard_tokens, &tokens[..to_val])?;
        self.train.write(&self.prefix, self.shard_tokens, &tokens[to_val..])
    }

    /// Writes the tokenizer's table beside the shards.
    pub fn write_tokenizer(&mut self, table: &TokenTable) -> anyhow::Result<PathBuf> {
        let path = named(&self.prefix, "tokenizer.bin");
        table.write(Sink::create(&path)?)?;
        self.tokenizer = Some(path.clone());
        Ok(path)
    }

    /// Finishes the data set; without this, nothing of it stays.
    pub fn commit(mut self, wants_validation: bool) -> anyhow::Result<Written> {
        self.train.finish()?;
        self.val.finish()?;
        let total = |split: &Split| split.files.iter().map(|(_, n)| n).sum::<u64>();
        let (train, val) = (total(&self.train), total(&self.val));
        if train == 0 {
            bail!(
                "all {val} tokens went to the validation split, none are left to train on; use a smaller --val-fraction or --val-tokens"
            );
        }
        let mut warnings = Vec::new();
        if wants_validation && val == 0 {
            warnings.push("the input is too small for a validation split; none was written".to_owned());
        }
        for split in [&self.train, &self.val] {
            if let Some((path, n)) = split.files.last().filter(|(_, n)| *n < SMALL_SHARD) {
                warnings.push(format!(
                    "{} holds only {n} tokens; training on it needs batch x seq-len below that",
                    path.display()
                ));
            }
        }
        self.committed = true;
        let files = self.train.files.iter().chain(&self.val.files).cloned().collect();
        Ok(Written { train, val, files, warnings })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if !self.committed {
            (self.train.current, self.val.current) = (None, None);
            let shards = self.train.files.iter().chain(&self.val.files).map(|(path, _)| path);
            for path in shards.chain(&self.tokenizer) {
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

impl Split {
    fn write(&mut self, prefix: &Path, shard_tokens: u64, mut tokens: &[u16]) -> anyhow::Result<()> {
        while !tokens.is_empty() {
            let writer = match &mut self.current {
                Some(writer) => writer,
                None => {
                    let path = named(prefix, &format!("{}_{:06}.bin", self.name, self.files.len()));
                    self.files.push((path.clone(), 0));
                    self.current.insert(ShardWriter::create(&path)?)
                }
            };
            let n = (shard_tokens - writer.len()).min(tokens.len() as u64) as usize;
            writer.write(&tokens[..n])?;
            tokens = &tokens[n..];
            if writer.len() == shard_tokens {
                self.finish()?;
            }
        }
        Ok(())
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        if let (Some(writer), Some(file)) = (self.current.take(), self.files.last_mut()) {
            file.1 = writer.len();
            writer.finish()?;
        }
        Ok(())
    }
}

fn folder_of(prefix: &Path) -> &Path {
    prefix.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `PREFIX_rest`.
fn named(prefix: &Path, rest: &str) -> PathBuf {
    let mut name = prefix.file_name().unwrap_or_default().to_owned();
    name.push("_");
    name.push(rest);
    prefix.with_file_name(name)
}

/// Files of an earlier data set with this prefix.
fn existing(prefix: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let folder = folder_of(prefix);
    let own = |name: &str| {
        let own = prefix.file_name().and_then(|p| p.to_str()).and_then(|p| name.strip_prefix(p));
        let shard = |rest: &str| {
            rest.strip_suffix(".bin").is_some_and(|n| n.len() == 6 && n.bytes().all(|b| b.is_ascii_digit()))
        };
        own.is_some_and(|rest| {
            rest == "_tokenizer.bin" || ["_train_", "_val_"].iter().any(|s| rest.strip_prefix(s).is_some_and(shard))
        })
    };
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(own) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright_core::format::shard::TokenShard;

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> =
            std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn tokens(path: &Path) -> Vec<u16> {
        let mut shard = TokenShard::open(path, 1 << 16).unwrap();
        let mut out = vec![0; shard.len() as usize];
        shard.read_at(0, &mut out).unwrap();
        out
    }

    #[test]
    fn shards_fill_up_and_the_first_tokens_are_the_validation_split() {
        let dir = tempfile::tempdir().unwrap();
        let mut output = Output::create(&dir.path().join("x"), 4, Some(5), false).unwrap();
        for chunk in (0..17u16).collect::<Vec<_>>().chunks(3) {
            output.write(chunk, false).unwrap();
        }
        let written = output.commit(true).unwrap();
        assert_eq!((written.val, written.train), (5, 12));
        assert_eq!(
            names(dir.path()),
            ["x_train_000000.bin", "x_train_000001.bin", "x_train_000002.bin", "x_val_000000.bin", "x_val_000001.bin"]
        );
        assert_eq!(tokens(&dir.path().join("x_val_000001.bin")), [4]);
        assert_eq!(tokens(&dir.path().join("x_train_000000.bin")), [5, 6, 7, 8]);
        assert_eq!(tokens(&dir.path().join("x_train_000002.bin")), [13, 14, 15, 16]);
    }

    #[test]
    fn an_abandoned_data_set_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let mut output = Output::create(&dir.path().join("x"), 4, None, false).unwrap();
        output.write(&[1; 10], false).unwrap();
        output.write(&[1; 10], true).unwrap();
        assert!(!names(dir.path()).is_empty());
        drop(output);
        assert_eq!(names(dir.path()), Vec::<String>::new());
    }

    #[test]
    fn an_earlier_data_set_is_replaced_only_by_force_and_nothing_else_with_it() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["x_train_000000.bin", "x_train_000007.bin", "x_val_notes.bin", "xy_train_000000.bin"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let prefix = dir.path().join("x");
        let refused = Output::create(&prefix, 4, None, false).err().unwrap().to_string();
        assert!(refused.contains("x_train_000000.bin") && refused.contains("--force"), "{refused}");
        Output::create(&prefix, 4, None, true).unwrap();
        assert_eq!(names(dir.path()), ["x_val_notes.bin", "xy_train_000000.bin"]);
    }

    #[test]
    fn nothing_left_to_train_on_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let mut output = Output::create(&dir.path().join("x"), 4, Some(100), false).unwrap();
        output.write(&[1; 10], false).unwrap();
        assert!(output.commit(true).err().unwrap().to_string().contains("--val-tokens"));
        assert!(names(dir.path()).is_empty());
    }

    #[test]
    fn a_folder_is_no_prefix_and_a_shard_has_its_limits() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Output::create(dir.path(), 4, None, false).err().unwrap().to_string().contains("names a folder"));
        for n in [0, MAX_TOKENS + 1] {
            assert!(Output::create(&dir.path().join("x"), n, None, false).is_err(), "{n}");
        }
    }
}
