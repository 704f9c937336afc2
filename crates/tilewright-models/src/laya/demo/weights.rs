//! Random values for every tensor, streamed into a safetensors file.

use std::path::Path;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use serde_json::{Map, json};
use tilewright_core::fs::AtomicFile;
use tilewright_core::rng::Mt19937;
use tilewright_core::{DType, Result};

use crate::laya::params::Param;

/// Values made at a time.
const CHUNK: usize = 1 << 16;

/// Writes the tensors in the order given, with values of a scale at which a forward pass neither dies out nor explodes.
pub(super) fn write(path: &Path, params: &[Param], dtype: DType, seed: u32) -> Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".into(), json!({"format": "pt"}));
    let mut end = 0;
    for (name, shape) in params {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.size();
        let kind = match dtype {
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            _ => "F32",
        };
        header.insert(name.clone(), json!({"dtype": kind, "shape": shape, "data_offsets": [start, end]}));
    }
    let mut header = serde_json::Value::Object(header).to_string().into_bytes();
    // The data begins at a multiple of 8, as the format's own writers do.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = AtomicFile::create(path)?;
    file.write(&(header.len() as u64).to_le_bytes())?;
    file.write(&header)?;
    let mut rng = Mt19937::new(seed);
    let (mut values, mut bytes) = (vec![0.0; CHUNK], Vec::with_capacity(4 * CHUNK));
    for (name, shape) in params {
        let mut left: usize = shape.iter().product();
        let (centre, reach) = scale(name, shape, params.len());
        while left > 0 {
            let values = &mut values[..left.min(CHUNK)];
            rng.uniform_fill(values);
            values.iter_mut().for_each(|v| *v = centre + reach * (2.0 * *v - 1.0));
            bytes.clear();
            encode(values, dtype, &mut bytes);
            file.write(&bytes)?;
            left -= values.len();
        }
    }
    file.commit()
}

/// Centre and half width of a tensor's uniform distribution.
fn scale(name: &str, shape: &[usize], tensors: usize) -> (f32, f32) {
    let fan_in = *shape.last().expect("no tensor is a scalar") as f32;
    // A uniform distribution of half width sqrt(3) has unit variance.
    let unit = 3f32.sqrt();
    let norm = name.contains("norm") || name.starts_with("scorer.0");
    match name {
        "temperature" => (1.0, 0.0),
        _ if norm && name.ends_with("weight") => (1.0, 0.2),
        _ if shape.len() == 1 => (0.0, 0.1),
        _ if name.contains("embeddings") => (0.0, unit),
        "type_emb.weight" => (0.0, unit / 2.0),
        "scorer.3.weight" | "act_head.2.weight" => (0.0, 2.0 * unit / fan_in.sqrt()),
        // What is added to the residual stream, shrunk by the number of additions.
        _ if name.contains("Wo.") || name.contains("out_proj") || name.contains("linear2") => {
            (0.0, 4.0 * unit / (fan_in * (tensors as f32).sqrt()).sqrt())
        }
        _ => (0.0, unit / fan_in.sqrt()),
    }
}

fn encode(values: &[f32], dtype: DType, out: &mut Vec<u8>) {
    match dtype {
        DType::F16 => {
            let mut halves = vec![f16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            out.extend(halves.iter().flat_map(|x| x.to_le_bytes()));
        }
        DType::BF16 => out.extend(values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
        _ => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
    }
}
