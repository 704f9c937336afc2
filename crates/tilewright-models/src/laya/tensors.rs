//! `model.safetensors`: a read-only mapping, its header checked against the file and against what the configuration expects.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use tilewright_core::{DType, Error, Result};
use tilewright_ops::{Device, MappedFile, Tensor};

use super::params::{OPTIONAL, Param, canonical};

const HINT: &str = "give the model.safetensors that was saved with these configuration files, or fetch it again";

/// Without one tensor below each of these a file is no Laya checkpoint at all.
const PREFIXES: [&str; 4] = ["encoder.", "type_emb.", "scorer.", "act_head."];

/// Bytes of a header at most, its length with it: the format's limit.
const LONGEST_HEADER: usize = 100_000_008;

/// Bytes that are read at a time.
const CHUNK: usize = 4 << 20;

/// Mismatches and missing names that an error lists; it counts the rest.
const LISTED_SHAPES: usize = 5;
const LISTED_NAMES: usize = 3;

/// A tensor in the file.
#[derive(Clone, Debug)]
pub(crate) struct Stored {
    /// Its name there, which may be laya-mlx's spelling.
    pub(crate) name: String,
    /// `None`: a type that cannot be read.
    pub(crate) dtype: Option<DType>,
    foreign: String,
    pub(crate) shape: Vec<usize>,
    /// Bytes in the file.
    pub(crate) bytes: Range<usize>,
}

/// See the module's words.
pub(crate) struct TensorFile {
    pub(crate) file: Rc<MappedFile>,
    /// By canonical name.
    pub(crate) tensors: BTreeMap<String, Stored>,
    /// How many are spelled as laya-mlx spells them.
    pub(crate) renamed: usize,
}

impl TensorFile {
    /// Maps a file and reads its header. Nothing is compared with a configuration yet.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = MappedFile::open(path)?;
        let bad = |what: String| Error::format(path, 0, what, HINT);
        let (data, meta) = header(&file)?.map_err(|e| bad(format!("the safetensors header is not valid: {e}")))?;
        let mut tensors = BTreeMap::new();
        let mut renamed = 0;
        let mut names = meta.offset_keys();
        names.sort();
        for stored in names {
            let info = meta.info(&stored).expect("a name of this header");
            let name = canonical(&stored);
            renamed += usize::from(name != stored);
            let tensor = Stored {
                dtype: match info.dtype {
                    Dtype::F32 => Some(DType::F32),
                    Dtype::F16 => Some(DType::F16),
                    Dtype::BF16 => Some(DType::BF16),
                    _ => None,
                },
                foreign: format!("{:?}", info.dtype),
                shape: info.shape.clone(),
                bytes: data + info.data_offsets.0..data + info.data_offsets.1,
                name: stored,
            };
            let (first, second) = (name.clone(), tensor.name.clone());
            if let Some(other) = tensors.insert(name, tensor) {
                return Err(bad(format!("`{}` and `{second}` are two spellings of one tensor, `{first}`", other.name)));
            }
        }
        Ok(TensorFile { file, tensors, renamed })
    }

    fn error(&self, what: impl Into<String>) -> Error {
        Error::format(self.file.path(), 8, what, HINT)
    }

    /// Compares the header with what the configuration expects: prefixes, shapes, missing names, extra names, types, in this order.
    pub(crate) fn check(&self, expected: &[Param]) -> Result<()> {
        for prefix in PREFIXES {
            if !self.tensors.keys().any(|name| name.starts_with(prefix)) {
                return Err(self.error(format!("no tensor's name begins with `{prefix}`; this is no Laya checkpoint")));
            }
        }
        let mismatch = |(name, shape): &Param| {
            let stored = self.tensors.get(name).filter(|s| s.shape != *shape)?;
            Some(format!("{}: expected {}, found {}", stored.name, dims(shape), dims(&stored.shape)))
        };
        let wrong: Vec<_> = expected.iter().filter_map(mismatch).collect();
        if !wrong.is_empty() {
            let listed = list(&wrong, LISTED_SHAPES, "; ");
            return Err(self.error(format!("{} not of the configuration's shape: {listed}", are(wrong.len()))));
        }
        let missing: Vec<_> = expected
            .iter()
            .filter(|(name, _)| name != OPTIONAL && !self.tensors.contains_key(name))
            .map(|(name, _)| name.clone())
            .collect();
        if !missing.is_empty() {
            let listed = list(&missing, LISTED_NAMES, ", ");
            return Err(self.error(format!("{} missing: {listed}", are(missing.len()))));
        }
        let names: std::collections::BTreeSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        let extra: Vec<_> =
            self.tensors.iter().filter(|(n, _)| !names.contains(n.as_str())).map(|(_, s)| s.name.clone()).collect();
        if !extra.is_empty() {
            let listed = list(&extra, LISTED_NAMES, ", ");
            return Err(self.error(format!("{} no part of the model: {listed}", are(extra.len()))));
        }
        let unread: Vec<_> = self
            .tensors
            .values()
            .filter(|s| s.dtype.is_none())
            .map(|s| format!("{} is {}", s.name, s.foreign))
            .collect();
        if !unread.is_empty() {
            let listed = list(&unread, LISTED_NAMES, ", ");
            return Err(self.error(format!(
                "{} of a type that cannot be read; F32, F16 and BF16 can: {listed}",
                are(unread.len())
            )));
        }
        Ok(())
    }

    /// A tensor that [`TensorFile::check`] has seen, where it lies in the file. One that is not aligned to its elements, which no current writer makes,
    /// is copied, and so is every tensor for a GPU.
    pub(crate) fn tensor(&self, device: &Device, name: &str) -> Result<Tensor> {
        let stored = self.tensors.get(name).and_then(|s| Some((s, s.dtype?)));
        let (stored, dtype) = stored.ok_or_else(|| self.error(format!("there is no tensor `{name}`")))?;
        if !device.is_gpu() && self.file.is_aligned(stored.bytes.start, dtype) {
            return Tensor::mapped(device, &self.file, stored.bytes.start, dtype, &stored.shape);
        }
        let copy = Tensor::zeros(device, dtype, &stored.shape)?;
        copy.write_bytes(0, &self.file.bytes()[stored.bytes.clone()])?;
        Ok(copy)
    }

    /// The same in memory of its own: nothing that is done to the file later can be felt, and a file that is cut meanwhile is an error.
    pub(crate) fn read(&self, device: &Device, name: &str) -> Result<Tensor> {
        let stored = self.tensors.get(name).and_then(|s| Some((s, s.dtype?)));
        let (stored, dtype) = stored.ok_or_else(|| self.error(format!("there is no tensor `{name}`")))?;
        let copy = Tensor::zeros(device, dtype, &stored.shape)?;
        let mut chunk = vec![0; stored.bytes.len().min(CHUNK)];
        for start in (0..stored.bytes.len()).step_by(CHUNK) {
            let part = &mut chunk[..(stored.bytes.len() - start).min(CHUNK)];
            self.file.read(stored.bytes.start + start, part)?;
            copy.write_bytes(start, part)?;
        }
        Ok(copy)
    }

    /// Elements of all tensors.
    pub(crate) fn parameter_count(&self) -> u64 {
        self.tensors.values().map(|s| s.shape.iter().product::<usize>() as u64).sum()
    }

    /// How many tensors are stored in each type.
    pub(crate) fn dtypes(&self) -> Vec<(String, usize)> {
        let mut counts = BTreeMap::new();
        for stored in self.tensors.values() {
            *counts.entry(stored.foreign.clone()).or_insert(0) += 1;
        }
        counts.into_iter().collect()
    }
}

/// Where the data begin, and what the header says. It is read, not looked at through the mapping: a file may be cut while it is opened.
fn header(file: &MappedFile) -> Result<Result<(usize, Metadata), SafeTensorError>> {
    let mut head = vec![0; file.len().min(8)];
    file.read(0, &mut head)?;
    if let Ok(told) = <[u8; 8]>::try_from(&head[..]) {
        // One that claims to be longer than any may be is refused below by its first bytes.
        let told = usize::try_from(u64::from_le_bytes(told)).unwrap_or(usize::MAX).saturating_add(8);
        head.resize(if told > LONGEST_HEADER { 8 } else { told.min(file.len()) }, 0);
        file.read(0, &mut head)?;
    }
    Ok(match SafeTensors::read_metadata(&head) {
        // All is well but that the data are not in `head`.
        Err(SafeTensorError::MetadataIncompleteBuffer) => match serde_json::from_slice::<Metadata>(&head[8..]) {
            Ok(meta) if head.len() + meta.data_len() == file.len() => Ok((head.len(), meta)),
            Ok(_) => Err(SafeTensorError::MetadataIncompleteBuffer),
            Err(e) => Err(SafeTensorError::InvalidHeaderDeserialization(e)),
        },
        other => other.map(|(n, meta)| (8 + n, meta)),
    })
}

fn dims(shape: &[usize]) -> String {
    let dims: Vec<_> = shape.iter().map(usize::to_string).collect();
    format!("({})", dims.join(", "))
}

fn are(n: usize) -> String {
    if n == 1 { "1 tensor is".into() } else { format!("{n} tensors are") }
}

fn list(all: &[String], most: usize, separator: &str) -> String {
    let mut text = all[..all.len().min(most)].join(separator);
    if all.len() > most {
        text.push_str(&format!("{separator}and {} more", all.len() - most));
    }
    text
}
