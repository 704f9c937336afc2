//! Headers that lie. No damage may do worse than an error that names the file.

use serde_json::json;

use crate::{Folder, write_raw};

/// The header of a file that claims one tensor.
fn header(dtype: &str, shape: serde_json::Value, offsets: serde_json::Value) -> String {
    json!({"encoder.x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).to_string()
}

#[track_caller]
fn refused(header: &str, data: &[u8]) -> String {
    let folder = Folder::new();
    write_raw(&folder.file("model.safetensors"), header, data);
    let message = folder.refused();
    assert!(message.contains("model.safetensors") && message.contains("header is not valid"), "{message}");
    message
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let folder = Folder::new();
    let path = folder.file("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let cuts = (0..12).chain((12..header).step_by(97)).chain([header, header + 1, whole.len() / 2, whole.len() - 1]);
    for cut in cuts {
        std::fs::write(&path, &whole[..cut]).unwrap();
        let message = folder.refused();
        assert!(message.contains("model.safetensors"), "{cut}: {message}");
    }
    std::fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
    folder.refused();
}

#[test]
fn a_header_longer_than_the_file_or_than_any_header_is_refused() {
    for length in [1 << 20, 100_000_001, 1 << 40, u64::MAX, u64::MAX - 7] {
        let folder = Folder::new();
        let path = folder.file("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        std::fs::write(&path, bytes).unwrap();
        assert!(folder.refused().contains("header is not valid"), "{length}");
    }
}

#[test]
fn overlapping_tensors_and_gaps_are_refused() {
    let two = |a: [usize; 2], b: [usize; 2]| {
        json!({"encoder.a": {"dtype": "F16", "shape": [2], "data_offsets": a},
            "encoder.b": {"dtype": "F16", "shape": [2], "data_offsets": b}})
        .to_string()
    };
    refused(&two([0, 4], [2, 6]), &[0; 6]);
    refused(&two([0, 4], [0, 4]), &[0; 4]);
    refused(&two([0, 4], [6, 10]), &[0; 10]);
    refused(&two([4, 0], [4, 8]), &[0; 8]);
    refused(&two([0, 4], [4, 8]), &[0; 9]);
}

#[test]
fn shapes_that_do_not_fit_their_bytes_or_overflow_are_refused() {
    refused(&header("F16", json!([3]), json!([0, 4])), &[0; 4]);
    refused(&header("F32", json!([2]), json!([0, 4])), &[0; 4]);
    refused(&header("F16", json!([1u64 << 63, 4]), json!([0, 0])), &[]);
    refused(&header("F16", json!([1u64 << 63]), json!([0, 0])), &[]);
    refused(&header("F16", json!([-1]), json!([0, 2])), &[0; 2]);
    refused(&header("F16", json!([1.5]), json!([0, 3])), &[0; 3]);
    refused(&header("F16", json!([1]), json!([0, 18_446_744_073_709_551_615u64])), &[0; 2]);
}

#[test]
fn unknown_types_and_headers_that_are_no_headers_are_refused() {
    refused(&header("F17", json!([1]), json!([0, 2])), &[0; 2]);
    for text in ["", "{", "[]", "null", "{\"a\": 1}", "{\"a\": {}}", "{\"__metadata__\": 3}", "\u{FFFD}"] {
        refused(text, &[]);
    }
    let folder = Folder::new();
    let mut bytes = 2u64.to_le_bytes().to_vec();
    bytes.extend([0xFF, 0xFE]);
    std::fs::write(folder.file("model.safetensors"), bytes).unwrap();
    folder.refused();
}

#[test]
fn an_empty_list_of_tensors_is_no_checkpoint() {
    let folder = Folder::new();
    write_raw(&folder.file("model.safetensors"), "{}", &[]);
    assert!(folder.refused().contains("`encoder.`"));
}

#[test]
fn a_folder_in_the_place_of_a_file_is_refused() {
    let folder = Folder::new();
    let path = folder.file("model.safetensors");
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(folder.refused().contains("model.safetensors"));
}

#[test]
fn no_flipped_byte_of_a_header_panics() {
    let folder = Folder::new();
    let path = folder.file("model.safetensors");
    let whole = std::fs::read(&path).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let mut state = 12345u64;
    let mut accepted = 0;
    for _ in 0..300 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut bytes = whole.clone();
        bytes[(state >> 33) as usize % header] ^= 1 << (state >> 20 & 7);
        std::fs::write(&path, bytes).unwrap();
        match folder.open() {
            // A flip in the metadata or in the padding may be harmless.
            Ok(_) => accepted += 1,
            Err(error) => assert!(error.to_string().contains("model.safetensors"), "{error}"),
        }
    }
    assert!(accepted < 50, "{accepted} of 300 damaged headers were accepted");
}

#[test]
fn no_damaged_configuration_panics() {
    for name in ["rl_agent_config.json", "encoder/config.json"] {
        let folder = Folder::new();
        let path = folder.file(name);
        let whole = std::fs::read(&path).unwrap();
        for cut in (0..whole.len() - 1).step_by(7) {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(folder.refused().contains(name.rsplit('/').next().unwrap()), "{name} cut at {cut}");
        }
        for text in ["[]", "null", "{}", "\"x\"", "\u{0}"] {
            std::fs::write(&path, text).unwrap();
            folder.refused();
        }
    }
}

#[test]
fn huge_sizes_in_the_configuration_are_refused_and_not_allocated() {
    for key in ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"] {
        for value in [1u64 << 24, 1 << 40, u64::MAX] {
            let folder = Folder::new();
            folder.edit_json("encoder/config.json", |c| {
                c.insert(key.into(), json!(value));
                c.remove("layer_types");
            });
            folder.refused();
        }
    }
}
