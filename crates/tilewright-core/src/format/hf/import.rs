//! Reading `model.safetensors`.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::Metadata;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use super::{NAMES, VOCAB_MULTIPLE, hf_shape, names};
use crate::format::{CHUNK, ParamSource, decode_f32, param_counts};
use crate::gpt2::{Gpt2Config, PARAMS};
use crate::{DType, Error, Result};

/// Output rows of a transposed matrix that are gathered at a time: a cache line of f32 from each input row.
const TILE: usize = 16;
const HINT: &str = "give the model.safetensors of a GPT-2 (GPT2LMHeadModel or GPT2Model)";

/// What a safetensors file does not say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImportOptions {
    /// Attention heads, when there is no `config.json`.
    pub heads: Option<usize>,
    /// The rows of the token embedding are padded with zeros to a multiple of this.
    pub vocab_multiple: usize,
}

impl Default for ImportOptions {
    fn default() -> Self {
        ImportOptions { heads: None, vocab_multiple: VOCAB_MULTIPLE }
    }
}

enum Bytes {
    Mapped(Mmap),
    Memory(Vec<u8>),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Memory(bytes) => bytes,
        }
    }
}

#[derive(Clone, Debug)]
struct Tensor {
    dtype: DType,
    // Bytes in the file.
    start: usize,
    end: usize,
}

/// A GPT-2 in a safetensors file, seen in llm.c's order and layout.
pub struct HfReader {
    bytes: Bytes,
    config: Gpt2Config,
    // The tensors of each parameter, by layer.
    tensors: Vec<Vec<Tensor>>,
}

impl std::fmt::Debug for HfReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HfReader").field("config", &self.config).finish_non_exhaustive()
    }
}

impl HfReader {
    /// Opens a safetensors file, or the `model.safetensors` of a folder, with the `config.json` beside it if there is one.
    pub fn open(path: &Path, options: &ImportOptions) -> Result<Self> {
        let file = if path.is_dir() { path.join("model.safetensors") } else { path.to_owned() };
        let folder = file.parent().unwrap_or(Path::new("."));
        if !file.exists() && folder.join("model.safetensors.index.json").exists() {
            let what = format!("{} is split into several files", file.display());
            return Err(Error::config(
                what,
                "save the model again with a larger max_shard_size, so that it is one file",
            ));
        }
        let handle = File::open(&file).map_err(Error::io("open", &file))?;
        // SAFETY: the map is read only. A process that changes the file meanwhile changes the values that are read, as it would with reads; the sizes were
        // checked against the mapping, which keeps its length.
        let map = unsafe { Mmap::map(&handle) }.map_err(Error::io("map", &file))?;
        let config_path = folder.join("config.json");
        let config = match std::fs::read(&config_path) {
            Ok(json) => Some(HfConfig::parse(&json, &config_path)?),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(Error::io("read", &config_path)(e)),
        };
        Self::new(file, Bytes::Mapped(map), config, options)
    }

    /// Bytes in memory and the text of a `config.json`; `name` stands for the path in messages.
    pub fn from_bytes(
        name: impl Into<PathBuf>,
        bytes: Vec<u8>,
        config_json: Option<&[u8]>,
        options: &ImportOptions,
    ) -> Result<Self> {
        let config = config_json.map(|json| HfConfig::parse(json, Path::new("config.json"))).transpose()?;
        Self::new(name.into(), Bytes::Memory(bytes), config, options)
    }

    fn new(path: PathBuf, bytes: Bytes, hf: Option<HfConfig>, options: &ImportOptions) -> Result<Self> {
        let bad = |offset: usize, what: String| Error::format(&path, offset as u64, what, HINT);
        let (header, meta) = SafeTensors::read_metadata(bytes.get())
            .map_err(|e| bad(0, format!("the safetensors header is not valid: {e}")))?;
        let data = 8 + header;
        let prefix = ["transformer.", ""].into_iter().find(|p| meta.info(&format!("{p}wte.weight")).is_some());
        let Some(prefix) = prefix else {
            return Err(bad(8, "there is no tensor `wte.weight` or `transformer.wte.weight`".into()));
        };
        let config = config_of(&meta, prefix, hf.as_ref(), options).map_err(|what| bad(8, what))?;

        let mut used = 0;
        let mut tensors = Vec::with_capacity(PARAMS.len());
        for index in 0..PARAMS.len() {
            let shape = hf_shape(&config, index);
            let mut layers = Vec::new();
            for name in names(prefix, &config, index) {
                let Some(info) = meta.info(&name) else {
                    return Err(bad(8, format!("there is no tensor `{name}`")));
                };
                let start = data + info.data_offsets.0;
                let dtype = match info.dtype {
                    Dtype::F32 => DType::F32,
                    Dtype::F16 => DType::F16,
                    Dtype::BF16 => DType::BF16,
                    other => return Err(bad(start, format!("`{name}` is {other:?}; F32, F16 and BF16 can be read"))),
                };
                if info.shape != shape {
                    return Err(bad(start, format!("`{name}` has shape {:?} instead of {shape:?}", info.shape)));
                }
                layers.push(Tensor { dtype, start, end: data + info.data_offsets.1 });
                used += 1;
            }
            tensors.push(layers);
        }
        used += check_rest(&meta, prefix, &config, data, bytes.get(), &tensors[0][0]).map_err(|(at, w)| bad(at, w))?;
        if used != meta.tensors().len() {
            let known = |name: &str| (0..16).any(|i| names(prefix, &config, i).any(|n| n == name));
            let extra =
                meta.offset_keys().into_iter().find(|n| !known(n) && !is_buffer(n, prefix) && n != "lm_head.weight");
            return Err(bad(8, format!("tensor `{}` is no part of a GPT-2", extra.unwrap_or_default())));
        }
        Ok(HfReader { bytes, config, tensors })
    }

    fn rows(&self, tensor: &Tensor, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let bytes = &self.bytes.get()[tensor.start..tensor.end];
        let mut values = vec![0.0; CHUNK.min(bytes.len() / tensor.dtype.size())];
        for chunk in bytes.chunks(CHUNK * tensor.dtype.size()) {
            let out = &mut values[..chunk.len() / tensor.dtype.size()];
            decode_f32(chunk, tensor.dtype, out);
            sink(out)?;
        }
        Ok(())
    }

    /// Hands on an `(in, out)` matrix as `(out, in)`, a few rows at a time.
    fn transposed(&self, tensor: &Tensor, out: usize, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let size = tensor.dtype.size();
        let bytes = &self.bytes.get()[tensor.start..tensor.end];
        let inner = bytes.len() / size / out;
        let mut tile = vec![0.0; TILE * inner];
        for first in (0..out).step_by(TILE) {
            let width = TILE.min(out - first);
            let mut values = [0.0; TILE];
            for i in 0..inner {
                let at = (i * out + first) * size;
                decode_f32(&bytes[at..at + width * size], tensor.dtype, &mut values[..width]);
                for (o, &value) in values[..width].iter().enumerate() {
                    tile[o * inner + i] = value;
                }
            }
            sink(&tile[..width * inner])?;
        }
        Ok(())
    }
}

impl ParamSource for HfReader {
    fn config(&self) -> &Gpt2Config {
        &self.config
    }

    fn dtype(&self) -> DType {
        self.tensors[0][0].dtype
    }

    fn read_f32(&self, index: usize, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        for tensor in &self.tensors[index] {
            if NAMES[index].1 {
                self.transposed(tensor, hf_shape(&self.config, index)[1], sink)?;
            } else {
                self.rows(tensor, sink)?;
            }
        }
        if index == 0 {
            let row = vec![0.0; self.config.channels];
            for _ in self.config.vocab_size..self.config.padded_vocab_size {
                sink(&row)?;
            }
        }
        Ok(())
    }
}

/// The causal masks that old versions saved.
fn is_buffer(name: &str, prefix: &str) -> bool {
    let layer = name.strip_prefix(prefix).and_then(|n| n.strip_prefix("h.")).and_then(|n| n.split_once('.'));
    layer.is_some_and(|(l, rest)| l.parse::<usize>().is_ok() && matches!(rest, "attn.bias" | "attn.masked_bias"))
}

/// Counts the tensors that are allowed beside the parameters: mask buffers, and an output head that is the token embedding.
fn check_rest(
    meta: &Metadata,
    prefix: &str,
    config: &Gpt2Config,
    data: usize,
    bytes: &[u8],
    wte: &Tensor,
) -> Result<usize, (usize, String)> {
    let mut count = meta.offset_keys().iter().filter(|name| is_buffer(name, prefix)).count();
    if let Some(head) = meta.info("lm_head.weight") {
        let (start, end) = (data + head.data_offsets.0, data + head.data_offsets.1);
        if head.shape != [config.vocab_size, config.channels] || bytes[start..end] != bytes[wte.start..wte.end] {
            return Err((
                start,
                "`lm_head.weight` differs from `wte.weight`; only tied weights can be imported".into(),
            ));
        }
        count += 1;
    }
    Ok(count)
}

fn config_of(
    meta: &Metadata,
    prefix: &str,
    hf: Option<&HfConfig>,
    options: &ImportOptions,
) -> Result<Gpt2Config, String> {
    let matrix = |name: &str| {
        let name = format!("{prefix}{name}");
        match meta.info(&name).map(|info| &info.shape[..]) {
            Some(&[rows, cols]) => Ok((rows, cols)),
            Some(other) => Err(format!("`{name}` has shape {other:?}, a matrix is expected")),
            None => Err(format!("there is no tensor `{name}`")),
        }
    };
    let (vocab_size, channels) = matrix("wte.weight")?;
    let (max_seq_len, _) = matrix("wpe.weight")?;
    let layers = (0..).take_while(|l| meta.info(&format!("{prefix}h.{l}.ln_1.weight")).is_some()).count();
    let heads = match (hf.map(|c| c.heads), options.heads) {
        (Some(a), Some(b)) if a != b => return Err(format!("config.json says {a} heads, {b} were asked for")),
        (Some(heads), _) | (None, Some(heads)) => heads,
        (None, None) => {
            return Err("the number of heads is unknown: put config.json beside the file, or give the number".into());
        }
    };
    let padded_vocab_size = vocab_size.checked_next_multiple_of(options.vocab_multiple).ok_or_else(|| {
        format!("a vocabulary of {vocab_size} cannot be padded to a multiple of {}", options.vocab_multiple)
    })?;
    let config = Gpt2Config { max_seq_len, vocab_size, padded_vocab_size, layers, heads, channels };
    config.validate().map_err(|e| e.to_string())?;
    // Sizes that the tensors do not have would overflow in `param_shape`; 31 bits are also what our files can say.
    let sizes = [max_seq_len, padded_vocab_size, layers, heads, channels];
    if sizes.iter().any(|&s| s > i32::MAX as usize) || param_counts(&config).is_none() {
        return Err(format!("{config:?} is larger than a file"));
    }
    if let Some(hf) = hf {
        for (name, said, is) in [
            ("vocab_size", hf.vocab_size, vocab_size),
            ("n_embd", hf.channels, channels),
            ("n_layer", hf.layers, layers),
            ("n_positions", hf.max_seq_len, max_seq_len),
        ] {
            if said.is_some_and(|said| said != is) {
                return Err(format!("config.json says {name} = {}, the tensors have {is}", said.unwrap_or_default()));
            }
        }
    }
    Ok(config)
}

/// The part of `config.json` that matters.
struct HfConfig {
    heads: usize,
    vocab_size: Option<usize>,
    channels: Option<usize>,
    layers: Option<usize>,
    max_seq_len: Option<usize>,
}

impl HfConfig {
    fn parse(json: &[u8], path: &Path) -> Result<Self> {
        let bad = |what: String| Error::format(path, 0, what, HINT);
        let value: Value = serde_json::from_slice(json).map_err(|e| bad(format!("not valid JSON: {e}")))?;
        let size = |name: &str| match value.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => match v.as_u64() {
                Some(n) => Ok(Some(n as usize)),
                None => Err(bad(format!("`{name}` is {v}, a count is expected"))),
            },
        };
        let channels = size("n_embd")?;
        let four_times = size("n_inner")?.is_none_or(|n| channels.and_then(|c| c.checked_mul(4)) == Some(n));
        // (field, is it what we compute, what we compute); an absent field has GPT-2's default.
        let text =
            |name: &str, known: &[&str]| value.get(name).is_none_or(|v| v.as_str().is_some_and(|s| known.contains(&s)));
        let flag = |name: &str, want: bool| value.get(name).is_none_or(|v| v.as_bool() == Some(want));
        let epsilon = value.get("layer_norm_epsilon").is_none_or(|v| v.as_f64() == Some(1e-5));
        for (name, fits, want) in [
            ("model_type", text("model_type", &["gpt2"]), "gpt2"),
            ("activation_function", text("activation_function", &["gelu_new", "gelu_pytorch_tanh"]), "gelu_new"),
            ("layer_norm_epsilon", epsilon, "1e-5"),
            ("n_inner", four_times, "null or 4 times n_embd"),
            ("scale_attn_weights", flag("scale_attn_weights", true), "true"),
            ("scale_attn_by_inverse_layer_idx", flag("scale_attn_by_inverse_layer_idx", false), "false"),
            ("add_cross_attention", flag("add_cross_attention", false), "false"),
        ] {
            if !fits {
                return Err(bad(format!("`{name}` is {}, only {want} is supported", value[name])));
            }
        }
        let heads = size("n_head")?.ok_or_else(|| bad("there is no `n_head`".into()))?;
        let max_seq_len = size("n_positions")?.or(size("n_ctx")?);
        Ok(HfConfig { heads, vocab_size: size("vocab_size")?, channels, layers: size("n_layer")?, max_seq_len })
    }
}
