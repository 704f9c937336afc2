//! Import and export of Hugging Face's GPT-2 files.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView, serialize};
use tilewright_core::format::hf::{HfReader, ImportOptions, export_folder, export_safetensors};
use tilewright_core::format::model::{ModelReader, ModelWriter, write_model};
use tilewright_core::format::{ParamSource, Sink, Source};
use tilewright_core::gpt2::{Gpt2Config, PARAMS};
use tilewright_core::{DType, Result, bf16, f16};

const TINY: Gpt2Config =
    Gpt2Config { max_seq_len: 7, vocab_size: 29, padded_vocab_size: 32, layers: 2, heads: 3, channels: 18 };
const OPTIONS: ImportOptions = ImportOptions { heads: Some(3), vocab_multiple: 8 };

/// A tensor of a file under construction.
struct T {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

fn value(name: &str, at: &[usize]) -> f32 {
    let seed = name.bytes().fold(7u32, |h, b| h.wrapping_mul(31).wrapping_add(b.into()));
    at.iter().fold(seed % 97, |h, &i| (h * 13 + i as u32) % 997) as f32 / 64.0
}

/// Every tensor of a GPT-2 as Hugging Face names and shapes it, written out independently of the code under test.
fn hf_tensors(prefix: &str) -> Vec<T> {
    let c = TINY.channels;
    let mut list = vec![("wte.weight".to_owned(), vec![29, c]), ("wpe.weight".to_owned(), vec![7, c])];
    for l in 0..TINY.layers {
        for (name, shape) in [
            ("ln_1.weight", vec![c]),
            ("ln_1.bias", vec![c]),
            ("attn.c_attn.weight", vec![c, 3 * c]),
            ("attn.c_attn.bias", vec![3 * c]),
            ("attn.c_proj.weight", vec![c, c]),
            ("attn.c_proj.bias", vec![c]),
            ("ln_2.weight", vec![c]),
            ("ln_2.bias", vec![c]),
            ("mlp.c_fc.weight", vec![c, 4 * c]),
            ("mlp.c_fc.bias", vec![4 * c]),
            ("mlp.c_proj.weight", vec![4 * c, c]),
            ("mlp.c_proj.bias", vec![c]),
        ] {
            list.push((format!("h.{l}.{name}"), shape));
        }
    }
    list.push(("ln_f.weight".into(), vec![c]));
    list.push(("ln_f.bias".into(), vec![c]));
    let tensor = |(name, shape): (String, Vec<usize>)| {
        let columns = if shape.len() == 2 { shape[1] } else { 1 };
        let n: usize = shape.iter().product();
        let values = (0..n).map(|i| value(&name, &[i / columns, i % columns])).collect();
        T { name: format!("{prefix}{name}"), shape, values }
    };
    list.into_iter().map(tensor).collect()
}

fn file(tensors: &[T], dtype: DType) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .map(|t| match dtype {
            DType::F16 => t.values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
            DType::BF16 => t.values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
            _ => t.values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        })
        .collect();
    let stored = match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I32 => Dtype::I32,
        _ => Dtype::F32,
    };
    let views = tensors.iter().zip(&data).map(|(t, d)| (&t.name, TensorView::new(stored, t.shape.clone(), d).unwrap()));
    serialize(views, None).unwrap()
}

fn open(bytes: Vec<u8>) -> Result<HfReader> {
    HfReader::from_bytes("model.safetensors", bytes, None, &OPTIONS)
}

fn read(source: &dyn ParamSource, index: usize) -> Vec<f32> {
    let mut out = Vec::new();
    source
        .read_f32(index, &mut |chunk| {
            out.extend_from_slice(chunk);
            Ok(())
        })
        .unwrap();
    assert_eq!(out.len(), source.config().param_numel(index), "{}", PARAMS[index].name);
    out
}

fn refusal(bytes: Vec<u8>, words: &str) {
    let message = open(bytes).unwrap_err().to_string();
    assert!(message.contains("model.safetensors") && message.contains(words), "{message}");
}

#[test]
fn sizes_are_found_from_the_tensors() {
    let reader = open(file(&hf_tensors(""), DType::F32)).unwrap();
    assert_eq!((*reader.config(), reader.dtype()), (TINY, DType::F32));
}

#[test]
fn the_four_conv1d_matrices_are_transposed_and_nothing_else() {
    for prefix in ["", "transformer."] {
        let reader = open(file(&hf_tensors(prefix), DType::F32)).unwrap();
        for (index, name, out, inner) in [
            (4, "attn.c_attn.weight", 54, 18),
            (6, "attn.c_proj.weight", 18, 18),
            (10, "mlp.c_fc.weight", 72, 18),
            (12, "mlp.c_proj.weight", 18, 72),
        ] {
            let values = read(&reader, index);
            for l in 0..2 {
                for o in 0..out {
                    for i in 0..inner {
                        let want = value(&format!("h.{l}.{name}"), &[i, o]);
                        assert_eq!(values[(l * out + o) * inner + i], want, "{name} layer {l} ({o}, {i})");
                    }
                }
            }
        }
        let wpe = read(&reader, 1);
        assert_eq!(wpe[2 * 18 + 5], value("wpe.weight", &[2, 5]));
        assert_eq!(read(&reader, 5)[54 + 7], value("h.1.attn.c_attn.bias", &[7, 0]));
        assert_eq!(read(&reader, 15)[3], value("ln_f.bias", &[3, 0]));
    }
}

#[test]
fn the_token_embedding_is_padded_with_zero_rows() {
    let wte = read(&open(file(&hf_tensors(""), DType::F32)).unwrap(), 0);
    assert_eq!(wte[28 * 18 + 17], value("wte.weight", &[28, 17]));
    assert!(wte[29 * 18..].iter().all(|&x| x == 0.0) && wte.len() == 32 * 18);
}

#[test]
fn half_precision_files_are_widened() {
    for dtype in [DType::F16, DType::BF16] {
        let reader = open(file(&hf_tensors(""), dtype)).unwrap();
        let round = |x: f32| if dtype == DType::F16 { f16::from_f32(x).to_f32() } else { bf16::from_f32(x).to_f32() };
        assert_eq!(reader.dtype(), dtype);
        assert_eq!(read(&reader, 4)[1], round(value("h.0.attn.c_attn.weight", &[1, 0])), "{dtype}");
        assert_eq!(read(&reader, 1)[19], round(value("wpe.weight", &[1, 1])), "{dtype}");
    }
}

#[test]
fn mask_buffers_and_a_tied_head_are_ignored() {
    let mut tensors = hf_tensors("");
    tensors.push(T { name: "h.0.attn.bias".into(), shape: vec![1, 1, 7, 7], values: vec![1.0; 49] });
    tensors.push(T { name: "h.1.attn.masked_bias".into(), shape: vec![], values: vec![-1e4] });
    let wte = tensors[0].values.clone();
    tensors.push(T { name: "lm_head.weight".into(), shape: vec![29, 18], values: wte });
    assert_eq!(*open(file(&tensors, DType::F32)).unwrap().config(), TINY);
}

#[test]
fn an_untied_head_is_refused() {
    let mut tensors = hf_tensors("");
    let mut wte = tensors[0].values.clone();
    wte[5] += 1.0;
    tensors.push(T { name: "lm_head.weight".into(), shape: vec![29, 18], values: wte });
    refusal(file(&tensors, DType::F32), "tied");
}

#[test]
fn unknown_missing_and_misshapen_tensors_are_refused_by_name() {
    let mut tensors = hf_tensors("");
    tensors.push(T { name: "h.0.lora.weight".into(), shape: vec![1], values: vec![0.0] });
    refusal(file(&tensors, DType::F32), "h.0.lora.weight");
    for name in ["h.1.mlp.c_fc.bias", "wpe.weight", "ln_f.weight", "wte.weight"] {
        let mut tensors = hf_tensors("");
        tensors.retain(|t| t.name != name);
        refusal(file(&tensors, DType::F32), name);
    }
    let mut tensors = hf_tensors("");
    let matrix = tensors.iter_mut().find(|t| t.name == "h.0.attn.c_attn.weight").unwrap();
    matrix.shape.reverse();
    refusal(file(&tensors, DType::F32), "h.0.attn.c_attn.weight");
}

#[test]
fn integer_weights_are_refused() {
    refusal(file(&hf_tensors(""), DType::I32), "I32");
}

#[test]
fn damaged_headers_are_refused() {
    let good = file(&hf_tensors(""), DType::F32);
    for len in [0, 7, 8, 100, good.len() - 1] {
        refusal(good[..len].to_vec(), "byte 0");
    }
    let mut long = good.clone();
    long.push(0);
    refusal(long, "byte 0");
    let mut huge = good.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    refusal(huge, "byte 0");
    refusal(b"PK\x03\x04 this is a zip file of a pickle".to_vec(), "not valid");
}

#[test]
fn heads_come_from_config_json_or_the_caller_and_are_never_guessed() {
    let bytes = file(&hf_tensors(""), DType::F32);
    let open = |config: Option<&str>, heads| {
        let options = ImportOptions { heads, vocab_multiple: 8 };
        HfReader::from_bytes("m", bytes.clone(), config.map(str::as_bytes), &options).map(|r| r.config().heads)
    };
    assert_eq!(open(Some(r#"{"n_head": 6}"#), None).unwrap(), 6);
    assert_eq!(open(None, Some(9)).unwrap(), 9);
    assert!(open(None, None).unwrap_err().to_string().contains("config.json"));
    assert!(open(Some(r#"{"n_head": 6}"#), Some(9)).unwrap_err().to_string().contains("6 heads"));
    assert!(open(None, Some(5)).unwrap_err().to_string().contains("5 heads"));
}

#[test]
fn a_config_that_contradicts_the_tensors_or_needs_another_model_is_refused() {
    let bytes = file(&hf_tensors(""), DType::F32);
    for (field, message) in [
        (r#""n_layer": 3"#, "n_layer"),
        (r#""vocab_size": 30"#, "vocab_size"),
        (r#""n_embd": 20"#, "n_embd"),
        (r#""n_ctx": 8"#, "n_positions"),
        (r#""activation_function": "gelu""#, "activation_function"),
        (r#""layer_norm_epsilon": 1e-6"#, "layer_norm_epsilon"),
        (r#""n_inner": 5"#, "n_inner"),
        (r#""model_type": "llama""#, "model_type"),
        (r#""scale_attn_weights": false"#, "scale_attn_weights"),
        (r#""scale_attn_by_inverse_layer_idx": true"#, "inverse_layer"),
        (r#""n_layer": "two""#, "n_layer"),
    ] {
        let json = format!(r#"{{"n_head": 3, {field}}}"#);
        let error = HfReader::from_bytes("m", bytes.clone(), Some(json.as_bytes()), &OPTIONS).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    assert!(HfReader::from_bytes("m", bytes.clone(), Some(b"{}"), &OPTIONS).is_err());
    assert!(HfReader::from_bytes("m", bytes, Some(b"not json"), &OPTIONS).is_err());
}

fn model_bytes(dtype: DType) -> Vec<u8> {
    let mut writer = ModelWriter::new(Sink::memory(), &TINY, dtype).unwrap();
    for index in 0..PARAMS.len() {
        let mut values: Vec<f32> =
            (0..TINY.param_numel(index)).map(|i| ((i * 7 + index) as f32 * 0.11).sin()).collect();
        if index == 0 {
            values[29 * 18..].fill(0.0);
        }
        writer.write_f32(index, &values).unwrap();
    }
    writer.finish().unwrap().memory
}

#[test]
fn a_model_survives_export_and_import_byte_for_byte() {
    for dtype in [DType::F32, DType::BF16] {
        let bytes = model_bytes(dtype);
        let model = ModelReader::new(Source::from_bytes("m", bytes.clone())).unwrap();
        let exported = export_safetensors(&model, Sink::memory(), dtype).unwrap().memory;
        let imported = open(exported.clone()).unwrap();
        assert!(write_model(&imported, Sink::memory(), dtype).unwrap().memory == bytes, "{dtype}");
        assert!(export_safetensors(&imported, Sink::memory(), dtype).unwrap().memory == exported, "{dtype}");
    }
}

#[test]
fn an_export_is_read_by_the_safetensors_crate() {
    let model = ModelReader::new(Source::from_bytes("m", model_bytes(DType::F32))).unwrap();
    let exported = export_safetensors(&model, Sink::memory(), DType::F16).unwrap().memory;
    let parsed = SafeTensors::deserialize(&exported).unwrap();
    assert_eq!(parsed.len(), 2 + 2 * 12 + 2);
    let matrix = parsed.tensor("transformer.h.1.mlp.c_fc.weight").unwrap();
    assert_eq!((matrix.dtype(), matrix.shape()), (Dtype::F16, &[18, 72][..]));
    let ours = read(&model, 10);
    // (in 3, out 70) of layer 1.
    let at = 2 * (3 * 72 + 70);
    let stored = f16::from_le_bytes(matrix.data()[at..at + 2].try_into().unwrap());
    assert_eq!(stored, f16::from_f32(ours[(72 + 70) * 18 + 3]));
    assert_eq!(parsed.tensor("transformer.wte.weight").unwrap().shape(), [29, 18]);
    assert_eq!(u64::from_le_bytes(exported[..8].try_into().unwrap()) % 8, 0);
}

#[test]
fn an_exported_folder_is_imported_without_further_hints() {
    let dir = tempfile::tempdir().unwrap();
    let model = ModelReader::new(Source::from_bytes("m", model_bytes(DType::F32))).unwrap();
    export_folder(&model, dir.path(), DType::F32).unwrap();
    let options = ImportOptions { heads: None, vocab_multiple: 8 };
    for path in [dir.path().to_owned(), dir.path().join("model.safetensors")] {
        let reader = HfReader::open(&path, &options).unwrap();
        assert_eq!(*reader.config(), TINY);
        assert!(write_model(&reader, Sink::memory(), DType::F32).unwrap().memory == model_bytes(DType::F32));
    }
    assert_eq!(HfReader::open(dir.path(), &ImportOptions::default()).unwrap().config().padded_vocab_size, 128);
}

#[test]
fn split_and_missing_files_are_errors_that_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let message = HfReader::open(dir.path(), &OPTIONS).unwrap_err().to_string();
    assert!(message.contains("open") && message.contains("model.safetensors"), "{message}");
    fs::write(dir.path().join("model.safetensors.index.json"), "{}").unwrap();
    assert!(HfReader::open(dir.path(), &OPTIONS).unwrap_err().to_string().contains("several files"));
    fs::write(dir.path().join("model.safetensors"), "").unwrap();
    assert!(HfReader::open(dir.path(), &OPTIONS).is_err());
}

#[test]
fn integers_cannot_be_exported() {
    let model = ModelReader::new(Source::from_bytes("m", model_bytes(DType::F32))).unwrap();
    assert!(export_folder(&model, Path::new("."), DType::I8).is_err());
    assert!(!Path::new("model.safetensors").exists());
}
