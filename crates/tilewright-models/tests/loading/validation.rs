//! Names, shapes, types and files, in the order in which they are checked.

use std::path::Path;

use serde_json::json;
use tilewright_core::Error;
use tilewright_models::laya::{self, Checkpoint, Digests, Laya, LoadOptions, OptionLayout, demo};
use tilewright_ops::Device;

use crate::{Folder, Weights, snapshot};

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/laya");

#[test]
fn the_recorded_checkpoints_are_whole() {
    for (name, parameters, layout) in [
        ("tiny-en", 1_330_694, OptionLayout::Sequential),
        ("tiny-multi", 390_790, OptionLayout::Sequential),
        ("tiny-parallel", 326_855, OptionLayout::Parallel),
    ] {
        let c = Checkpoint::open(&Path::new(FIXTURES).join(name), None).unwrap();
        assert_eq!((c.parameter_count(), c.agent().option_layout), (parameters, layout), "{name}");
    }
}

#[test]
fn nothing_in_the_folder_is_touched() {
    let folder = Folder::new();
    let before = snapshot(&folder.path);
    folder.open().unwrap().model_hash().unwrap();
    assert_eq!(snapshot(&folder.path), before);
}

#[test]
fn a_missing_folder_and_each_missing_file_are_not_found() {
    let missing = Checkpoint::open(Path::new("./no/such/model"), None).err().unwrap();
    assert!(missing.to_string().contains("no/such/model"), "{missing}");
    for name in ["rl_agent_config.json", "model.safetensors", "encoder/config.json"] {
        let folder = Folder::new();
        std::fs::remove_file(folder.file(name)).unwrap();
        let error = folder.open().err().unwrap();
        assert!(matches!(&error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound), "{error}");
        assert!(error.to_string().contains(name) && error.to_string().contains("fetch"), "{error}");
    }
}

#[test]
fn sums_are_checked_before_anything_is_parsed() {
    let folder = Folder::new();
    let hash = folder.open().unwrap().model_hash().unwrap();
    let sums = |sum: &str| Digests::from([("model.safetensors".to_owned(), sum.to_owned())]);
    Checkpoint::open(&folder.path, Some(&sums(&hash))).unwrap();
    std::fs::write(folder.file("rl_agent_config.json"), "not JSON").unwrap();
    let error = Checkpoint::open(&folder.path, Some(&sums(&hash.replace(&hash[..1], "x")))).err().unwrap();
    assert!(error.to_string().contains("SHA-256"), "{error}");
    std::fs::remove_file(folder.file("rl_agent_config.json")).unwrap();
    let error = Checkpoint::open(&folder.path, Some(&Digests::from([("../a".into(), hash)]))).err().unwrap();
    assert!(error.to_string().contains("not a path inside"), "{error}");
}

#[test]
fn a_file_of_another_model_lacks_the_prefixes() {
    for prefix in ["encoder.", "type_emb.", "scorer.", "act_head."] {
        let folder = Folder::new();
        folder.edit_weights(|w| w.0.retain(|t| !t.0.starts_with(prefix)));
        let message = folder.refused();
        assert!(message.contains(&format!("`{prefix}`")) && message.contains("model.safetensors"), "{message}");
    }
}

#[test]
fn wrong_shapes_are_listed_five_at_most_with_both_shapes() {
    let folder = Folder::new();
    folder.edit_json("encoder/config.json", |c| {
        c.insert("intermediate_size".into(), json!(25));
    });
    let message = folder.refused();
    assert!(message.contains("6 tensors are not of"), "{message}");
    assert!(message.contains("encoder.layers.0.mlp.Wi.weight: expected (50, 32), found (48, 32)"), "{message}");
    assert_eq!(message.matches("expected (").count(), 5, "{message}");
    assert!(message.contains("and 1 more"), "{message}");
}

#[test]
fn shapes_come_before_missing_tensors() {
    let folder = Folder::new();
    folder.edit_weights(|w| {
        w.remove("encoder.final_norm.weight");
        w.get("scorer.3.weight").2 = vec![32, 1];
    });
    let message = folder.refused();
    assert!(message.contains("scorer.3.weight: expected (1, 32), found (32, 1)"), "{message}");
    assert!(!message.contains("final_norm"), "{message}");
}

#[test]
fn missing_tensors_are_counted_and_three_are_named() {
    let folder = Folder::new();
    folder.edit_weights(|w| w.0.retain(|t| !t.0.contains("mlp_norm") && t.0 != "scorer.1.bias"));
    let message = folder.refused();
    assert!(message.contains("4 tensors are missing: encoder.layers.0.mlp_norm.weight"), "{message}");
    assert!(message.contains("and 1 more") && !message.contains("scorer.1"), "{message}");
}

#[test]
fn the_temperature_buffer_may_be_missing_but_not_misshapen() {
    let folder = Folder::new();
    folder.edit_weights(|w| w.remove("temperature"));
    folder.open().unwrap();
    folder.edit_weights(|w| w.add("temperature", "F32", &[4], 16));
    assert!(folder.refused().contains("temperature: expected (3), found (4)"));
}

#[test]
fn extra_tensors_are_refused_by_name() {
    let folder = Folder::new();
    folder.edit_weights(|w| w.add("encoder.head.dense.weight", "F16", &[2, 2], 8));
    let message = folder.refused();
    assert!(message.contains("1 tensor is no part of the model: encoder.head.dense.weight"), "{message}");
}

#[test]
fn layer_0_has_no_attention_norm() {
    let folder = Folder::new();
    folder.edit_weights(|w| w.add("encoder.layers.0.attn_norm.weight", "F16", &[32], 64));
    assert!(folder.refused().contains("encoder.layers.0.attn_norm.weight"));
}

#[test]
fn laya_mlx_names_load() {
    let folder = Folder::new();
    folder.edit_weights(|w| {
        for tensor in &mut w.0 {
            tensor.0 = tensor.0.replace("in_proj_", "in_proj.").replace("scorer.", "scorer.layers.");
            tensor.0 = tensor.0.replace("act_head.", "act_head.layers.");
        }
    });
    folder.open().unwrap();
}

#[test]
fn two_spellings_of_one_tensor_are_an_error() {
    let folder = Folder::new();
    folder.edit_weights(|w| w.add("scorer.layers.1.bias", "F16", &[32], 64));
    let message = folder.refused();
    assert!(message.contains("`scorer.1.bias` and `scorer.layers.1.bias`"), "{message}");
}

#[test]
fn f32_f16_and_bf16_may_be_mixed_and_nothing_else_is_read() {
    let folder = Folder::new();
    folder.edit_weights(|w| {
        w.get("scorer.1.bias").1 = "BF16".into();
        let tensor = w.get("scorer.3.weight");
        (tensor.1, tensor.3) = ("F32".into(), vec![0; 4 * 32]);
    });
    folder.open().unwrap();
    for dtype in ["I16", "U16"] {
        folder.edit_weights(|w| w.get("scorer.1.bias").1 = dtype.into());
        let message = folder.refused();
        assert!(
            message.contains(&format!("scorer.1.bias is {dtype}")) && message.contains("F32, F16 and BF16"),
            "{message}"
        );
    }
}

#[test]
fn tensors_off_their_alignment_are_read_all_the_same() {
    let folder = Folder::new();
    let device = Device::cpu_with_threads(1);
    let name = "encoder.embeddings.tok_embeddings.weight";
    let values = |folder: &Folder| folder.open().unwrap().tensor(&device, name).unwrap().read_f32().unwrap();
    let before = values(&folder);
    let path = folder.file("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    bytes.insert(8 + length as usize, b' ');
    bytes[..8].copy_from_slice(&(length + 1).to_le_bytes());
    std::fs::write(&path, bytes).unwrap();
    assert!(values(&folder) == before);
    Laya::open(&folder.path, &LoadOptions { device: device.clone(), ..LoadOptions::default() }).unwrap();
}

#[test]
fn the_length_of_the_list_of_temperatures_is_checked_after_the_tensors() {
    let folder = Folder::new();
    folder.edit_json("rl_agent_config.json", |c| {
        c.insert("temperature".into(), json!([1.0]));
    });
    assert!(folder.refused().contains("a list of 3 numbers"));
    folder.edit_weights(|w| w.remove("scorer.1.bias"));
    assert!(folder.refused().contains("scorer.1.bias"));
}

#[test]
fn an_unknown_layout_is_refused_before_the_weights_are_opened() {
    let folder = Folder::new();
    folder.edit_json("rl_agent_config.json", |c| {
        c.insert("option_layout".into(), json!("ring"));
    });
    std::fs::write(folder.file("model.safetensors"), "junk").unwrap();
    assert!(folder.refused().contains("option_layout"));
}

#[test]
fn rows_may_not_be_longer_than_the_encoder_s_positions() {
    let folder = Folder::of(|encoder, agent| (encoder.max_positions, agent.max_len) = (600, 600));
    folder.open().unwrap();
    let folder = Folder::of(|encoder, agent| (encoder.max_positions, agent.max_len) = (600, 601));
    assert!(folder.refused().contains("max_len <= 600"));
}

#[test]
fn all_biases_are_wanted_when_the_configuration_says_so() {
    let folder = Folder::of(|e, _| (e.norm_bias, e.attention_bias, e.mlp_bias) = (true, true, true));
    folder.open().unwrap();
    folder.edit_weights(|w| w.remove("encoder.layers.1.attn.Wqkv.bias"));
    assert!(folder.refused().contains("encoder.layers.1.attn.Wqkv.bias"));
}

#[test]
fn the_number_of_action_classes_follows_the_costs() {
    let folder = Folder::of(|_, agent| agent.act_classes = 4);
    assert_eq!(folder.open().unwrap().agent().act_classes, 4);
    folder.edit_json("rl_agent_config.json", |c| {
        c.insert("act_costs".into(), json!({}));
    });
    let message = folder.refused();
    assert!(message.contains("act_head.2.weight: expected (1, 256), found (4, 256)"), "{message}");
}

#[test]
fn no_head_layers_are_a_model_too() {
    let folder = Folder::of(|_, agent| agent.head_layers = 0);
    assert_eq!(folder.open().unwrap().agent().head_layers, 0);
}

#[test]
fn a_demo_names_its_special_tokens_within_its_vocabulary() {
    let folder = Folder::new();
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.file("encoder/config.json")).unwrap()).unwrap();
    for role in ["cls", "bos", "sep", "eos", "pad"] {
        let id = config[format!("{role}_token_id")].as_u64().unwrap();
        assert!(id < config["vocab_size"].as_u64().unwrap(), "{role}: {id}");
    }
    let tokens = laya::inspect(&folder.path, None).unwrap().special_tokens;
    let pad = tokens.iter().find(|t| t.role == "pad_token").unwrap();
    assert_eq!(config["pad_token_id"], json!(pad.id));
}

#[test]
fn a_demo_is_never_written_over_anything() {
    let folder = Folder::new();
    let before = snapshot(&folder.path);
    let error = demo::write(&folder.path, demo::DemoShape::Tiny, 1).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    assert_eq!(snapshot(&folder.path), before);
}

#[test]
fn a_demo_depends_on_its_seed_alone_and_leaves_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, seed| {
        let path = dir.path().join(name);
        demo::write(&path, demo::DemoShape::Tiny, seed).unwrap();
        Weights::read(&path.join("model.safetensors")).0
    };
    let (a, b, c) = (write("a", 1), write("b", 1), write("c", 2));
    assert!(a == b && a != c);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
    Checkpoint::open(&dir.path().join("c"), None).unwrap();
}
