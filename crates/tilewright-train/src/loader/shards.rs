//! The shard files of one split, checked when they are opened.

use std::path::{Path, PathBuf};

use tilewright_core::format::shard::TokenShard;
use tilewright_core::{Error, Result};

use super::Place;

/// How shards are cut into samples.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Rows of a batch.
    pub batch: usize,
    /// Tokens of a row.
    pub seq_len: usize,
    /// Processes that share each sample step; each reads its own slice.
    pub processes: usize,
    /// This process.
    pub rank: usize,
}

impl Geometry {
    /// One process.
    pub fn single(batch: usize, seq_len: usize) -> Self {
        Geometry { batch, seq_len, processes: 1, rank: 0 }
    }

    /// Inputs of one process's batch.
    pub fn batch_tokens(&self) -> usize {
        self.batch * self.seq_len
    }

    /// Tokens that one batch reads: its inputs and one more for the last target.
    pub fn sample_tokens(&self) -> usize {
        self.batch_tokens() + 1
    }

    /// Samples in a shard: the last token of each is the next one's first, so one token is left over at least.
    fn samples(&self, tokens: u64) -> u64 {
        tokens.saturating_sub(1) / (self.processes * self.batch_tokens()) as u64
    }
}

#[derive(Clone, Debug)]
struct Entry {
    path: PathBuf,
    tokens: u64,
}

/// The shards that a pattern names, in sorted order. Clones share nothing: each opens files of its own.
#[derive(Debug)]
pub struct ShardSet {
    entries: Vec<Entry>,
    geometry: Geometry,
    vocab: usize,
    open: Option<(usize, TokenShard)>,
    buffer: Vec<u16>,
}

impl Clone for ShardSet {
    fn clone(&self) -> Self {
        let entries = self.entries.clone();
        ShardSet { entries, geometry: self.geometry, vocab: self.vocab, open: None, buffer: Vec::new() }
    }
}

impl ShardSet {
    /// Finds and checks the shards of a glob pattern. `flag` is how the user gave it.
    pub fn find(pattern: &str, flag: &str, geometry: Geometry, vocab: usize) -> Result<Self> {
        let paths = glob::glob(pattern).map_err(|e| {
            Error::config(format!("{flag} `{pattern}` is no pattern: {e}"), "quote it, as in 'data/train_*.bin'")
        })?;
        let mut found = Vec::new();
        for path in paths {
            found.push(path.map_err(|e| Error::Io { action: "list", path: e.path().to_owned(), source: e.into() })?);
        }
        found.sort();
        if found.is_empty() {
            return Err(Error::config(
                format!("no file matches {flag} `{pattern}`"),
                "make shards from text with `tilewright data`, or leave the flag out to train on the bundled text",
            ));
        }
        Self::open(&found, geometry, vocab)
    }

    /// Checks these shards.
    pub fn open(paths: &[PathBuf], geometry: Geometry, vocab: usize) -> Result<Self> {
        let mut entries = Vec::with_capacity(paths.len());
        for path in paths {
            let tokens = TokenShard::open(path, vocab)?.len();
            if geometry.samples(tokens) == 0 {
                let needed = geometry.processes * geometry.batch_tokens() + 1;
                return Err(Error::format(
                    path,
                    8,
                    format!(
                        "the shard holds {tokens} tokens, a batch of {} x {} needs {needed}",
                        geometry.batch, geometry.seq_len
                    ),
                    "use a smaller --batch or --seq-len, or larger shards",
                ));
            }
            entries.push(Entry { path: path.clone(), tokens });
        }
        Ok(ShardSet { entries, geometry, vocab, open: None, buffer: Vec::new() })
    }

    /// How they are cut.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Samples of each shard.
    pub fn samples(&self) -> Vec<usize> {
        self.entries.iter().map(|e| self.geometry.samples(e.tokens) as usize).collect()
    }

    /// Tokens in all shards.
    pub fn tokens(&self) -> u64 {
        self.entries.iter().map(|e| e.tokens).sum()
    }

    /// Tokens at the ends of shards that fill no sample and are never read.
    pub fn left_over(&self) -> u64 {
        let read = |e: &Entry| {
            self.geometry.samples(e.tokens) * (self.geometry.processes * self.geometry.batch_tokens()) as u64
        };
        self.entries.iter().map(|e| e.tokens - read(e)).sum()
    }

    /// The file of a shard.
    pub fn path(&self, shard: usize) -> &Path {
        &self.entries[shard].path
    }

    /// Number of shards.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never: a set without shards cannot be opened.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Reads one sample: `B * T + 1` tokens, each checked against the vocabulary.
    pub fn read(&mut self, place: Place, out: &mut [i32]) -> Result<()> {
        if self.open.as_ref().is_none_or(|(shard, _)| *shard != place.shard) {
            self.open = Some((place.shard, TokenShard::open(&self.entries[place.shard].path, self.vocab)?));
        }
        let (_, shard) = self.open.as_mut().expect("opened above");
        let g = &self.geometry;
        let index = place.sample as u64 * g.processes as u64 + g.rank as u64;
        self.buffer.resize(g.sample_tokens(), 0);
        shard.read_at(index * g.batch_tokens() as u64, &mut self.buffer)?;
        for (o, t) in out.iter_mut().zip(&self.buffer) {
            *o = i32::from(*t);
        }
        Ok(())
    }
}
