//! Loading Laya checkpoints: every way in which a folder can be wrong is refused by name, and nothing is ever written to it.

mod damaged;
mod validation;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tilewright_core::{DType, Result};
use tilewright_models::laya::{AgentConfig, Checkpoint, demo};
use tilewright_models::modernbert::EncoderConfig;

/// A tiny checkpoint in a folder that goes away with it.
pub(crate) struct Folder {
    _temp: tempfile::TempDir,
    pub(crate) path: PathBuf,
}

impl Folder {
    pub(crate) fn new() -> Self {
        Folder::of(|_, _| {})
    }

    pub(crate) fn of(change: impl FnOnce(&mut EncoderConfig, &mut AgentConfig)) -> Self {
        let mut encoder = demo::DemoShape::Tiny.encoder();
        encoder.hidden = 32;
        encoder.intermediate = 24;
        encoder.layers.truncate(3);
        let mut agent = demo::DemoShape::Tiny.agent();
        agent.head_layers = 1;
        change(&mut encoder, &mut agent);
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("checkpoint");
        demo::write_checkpoint(&path, &encoder, &agent, DType::F16, 7).unwrap();
        Folder { _temp: temp, path }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn open(&self) -> Result<Checkpoint> {
        Checkpoint::open(&self.path, None)
    }

    /// The message of the error that opening gives.
    #[track_caller]
    pub(crate) fn refused(&self) -> String {
        match self.open() {
            Ok(_) => panic!("the checkpoint was accepted"),
            Err(error) => error.to_string(),
        }
    }

    pub(crate) fn edit_json(&self, name: &str, edit: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.file(name);
        let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(value.as_object_mut().unwrap());
        std::fs::write(path, value.to_string()).unwrap();
    }

    pub(crate) fn edit_weights(&self, edit: impl FnOnce(&mut Weights)) {
        let path = self.file("model.safetensors");
        let mut weights = Weights::read(&path);
        edit(&mut weights);
        weights.write(&path);
    }
}

/// A safetensors file taken apart: name, type, shape, bytes.
pub(crate) struct Weights(pub(crate) Vec<(String, String, Vec<usize>, Vec<u8>)>);

impl Weights {
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        let number = |v: &Value| v.as_u64().unwrap() as usize;
        let tensors = header.iter().filter(|(name, _)| *name != "__metadata__").map(|(name, info)| {
            let shape = info["shape"].as_array().unwrap().iter().map(number).collect();
            let [start, end] = [0, 1].map(|i| 8 + length + number(&info["data_offsets"][i]));
            (name.clone(), info["dtype"].as_str().unwrap().to_owned(), shape, bytes[start..end].to_vec())
        });
        Weights(tensors.collect())
    }

    pub(crate) fn write(&self, path: &Path) {
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in &self.0 {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(name.clone(), serde_json::json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}));
            data.extend_from_slice(bytes);
        }
        write_raw(path, &Value::Object(header).to_string(), &data);
    }

    pub(crate) fn get(&mut self, name: &str) -> &mut (String, String, Vec<usize>, Vec<u8>) {
        self.0.iter_mut().find(|t| t.0 == name).unwrap_or_else(|| panic!("there is no {name}"))
    }

    pub(crate) fn remove(&mut self, name: &str) {
        let n = self.0.len();
        self.0.retain(|t| t.0 != name);
        assert_eq!(self.0.len(), n - 1, "there is no {name}");
    }

    pub(crate) fn add(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: usize) {
        self.0.push((name.into(), dtype.into(), shape.into(), vec![0; bytes]));
    }
}

pub(crate) fn write_raw(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    std::fs::write(path, bytes).unwrap();
}

/// Every file below a folder with its bytes and times.
pub(crate) fn snapshot(folder: &Path) -> Vec<(PathBuf, Vec<u8>, std::time::SystemTime)> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(snapshot(&path));
        } else {
            let time = path.metadata().unwrap().modified().unwrap();
            all.push((path.clone(), std::fs::read(&path).unwrap(), time));
        }
    }
    all.sort();
    all
}
