//! GPT-2 in Hugging Face's form: `model.safetensors` with one tensor a layer, next to `config.json`.
//!
//! Its four Conv1D matrices are stored `(in, out)`, ours `(out, in)`; its token embedding has no padded rows.

mod export;
mod import;

pub use export::{export_folder, export_safetensors};
pub use import::{HfReader, ImportOptions};

use crate::gpt2::{Gpt2Config, PARAMS};

/// What the rows of a token embedding are padded to a multiple of, as llm.c does.
pub const VOCAB_MULTIPLE: usize = 128;

/// Hugging Face's name of each parameter, after the prefix or the layer, and whether it is a Conv1D matrix.
const NAMES: [(&str, bool); 16] = [
    ("wte.weight", false),
    ("wpe.weight", false),
    ("ln_1.weight", false),
    ("ln_1.bias", false),
    ("attn.c_attn.weight", true),
    ("attn.c_attn.bias", false),
    ("attn.c_proj.weight", true),
    ("attn.c_proj.bias", false),
    ("ln_2.weight", false),
    ("ln_2.bias", false),
    ("mlp.c_fc.weight", true),
    ("mlp.c_fc.bias", false),
    ("mlp.c_proj.weight", true),
    ("mlp.c_proj.bias", false),
    ("ln_f.weight", false),
    ("ln_f.bias", false),
];

/// The tensors that make up parameter `index`: one, or one for each layer.
fn names<'a>(prefix: &'a str, config: &Gpt2Config, index: usize) -> impl Iterator<Item = String> + use<'a> {
    let stacked = PARAMS[index].stacked;
    (0..if stacked { config.layers } else { 1 }).map(move |layer| {
        let name = NAMES[index].0;
        if stacked { format!("{prefix}h.{layer}.{name}") } else { format!("{prefix}{name}") }
    })
}

/// The shape in which Hugging Face stores one tensor of parameter `index`.
fn hf_shape(config: &Gpt2Config, index: usize) -> Vec<usize> {
    let mut shape = config.param_shape(index);
    if PARAMS[index].stacked {
        shape.remove(0);
    }
    if index == 0 {
        shape[0] = config.vocab_size;
    }
    if NAMES[index].1 {
        shape.reverse();
    }
    shape
}
