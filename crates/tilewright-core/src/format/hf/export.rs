//! Writing `model.safetensors` and `config.json`.

use std::collections::HashMap;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::json;

use super::{NAMES, hf_shape, names};
use crate::format::{CHUNK, Finished, ParamSource, Sink, argument, encode_f32, param_counts};
use crate::fs::write_atomic;
use crate::gpt2::{Gpt2Config, PARAMS};
use crate::{DType, Error, Result};

const OP: &str = "format.hf.export";
/// The prefix of `GPT2LMHeadModel`.
const PREFIX: &str = "transformer.";

/// Writes `model.safetensors` and `config.json` into an existing folder, for `GPT2LMHeadModel.from_pretrained`.
pub fn export_folder(source: &dyn ParamSource, folder: &Path, dtype: DType) -> Result<()> {
    export_safetensors(source, Sink::create(&folder.join("model.safetensors"))?, dtype)?;
    write_atomic(&folder.join("config.json"), config_json(source.config(), dtype).as_bytes())
}

fn config_json(config: &Gpt2Config, dtype: DType) -> String {
    let end_of_text = config.vocab_size - 1;
    let torch = match dtype {
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        _ => "float32",
    };
    let value = json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "layer_norm_epsilon": 1e-5,
        "n_ctx": config.max_seq_len,
        "n_positions": config.max_seq_len,
        "n_embd": config.channels,
        "n_head": config.heads,
        "n_layer": config.layers,
        "tie_word_embeddings": true,
        "torch_dtype": torch,
        "vocab_size": config.vocab_size,
    });
    format!("{value:#}\n")
}

/// Writes the safetensors file, rounding to nearest even. Holds one layer's matrix at a time.
pub fn export_safetensors(source: &dyn ParamSource, mut sink: Sink, dtype: DType) -> Result<Finished> {
    let config = source.config();
    config.validate()?;
    let counts = param_counts(config).ok_or_else(|| argument(OP, format!("{config:?} is larger than a file")))?;
    let stored = match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        other => return Err(Error::config(format!("weights cannot be exported as {other}"), "use f32, f16 or bf16")),
    };
    let mut infos = Vec::new();
    let mut at = 0;
    for index in 0..PARAMS.len() {
        let shape = hf_shape(config, index);
        let bytes = shape.iter().product::<usize>() * dtype.size();
        for name in names(PREFIX, config, index) {
            infos.push((name, TensorInfo { dtype: stored, shape: shape.clone(), data_offsets: (at, at + bytes) }));
            at += bytes;
        }
    }
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let header = Metadata::new(Some(about), infos).map_err(|e| argument(OP, e.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|e| argument(OP, e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    sink.write(&(header.len() as u64).to_le_bytes())?;
    sink.write(&header)?;

    let mut bytes = Vec::new();
    let mut write = |values: &[f32], sink: &mut Sink| {
        values.chunks(CHUNK).try_for_each(|chunk| {
            bytes.clear();
            encode_f32(chunk, dtype, &mut bytes);
            sink.write(&bytes)
        })
    };
    for index in 0..PARAMS.len() {
        // Elements that are kept: all, but for the padded rows of the token embedding.
        let keep = if index == 0 { (config.vocab_size * config.channels) as u64 } else { counts[index] };
        let mut seen = 0;
        if NAMES[index].1 {
            let shape = hf_shape(config, index);
            let (inner, outer) = (shape[0], shape[1]);
            let mut matrix = Vec::with_capacity(inner * outer);
            let mut turned = vec![0.0; inner * outer];
            source.read_f32(index, &mut |mut chunk| {
                while !chunk.is_empty() {
                    let (now, later) = chunk.split_at(chunk.len().min(inner * outer - matrix.len()));
                    matrix.extend_from_slice(now);
                    chunk = later;
                    if matrix.len() == inner * outer {
                        for (o, row) in matrix.chunks_exact(inner).enumerate() {
                            for (i, &value) in row.iter().enumerate() {
                                turned[i * outer + o] = value;
                            }
                        }
                        write(&turned, &mut sink)?;
                        matrix.clear();
                        seen += turned.len() as u64;
                    }
                }
                Ok(())
            })?;
        } else {
            source.read_f32(index, &mut |chunk| {
                let now = (chunk.len() as u64).min(keep - seen);
                seen += now;
                write(&chunk[..now as usize], &mut sink)
            })?;
        }
        if seen != keep {
            return Err(argument(OP, format!("`{}` gave {seen} of {keep} elements", PARAMS[index].name)));
        }
    }
    sink.finish()
}
