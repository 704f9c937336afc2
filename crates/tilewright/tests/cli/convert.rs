use std::path::Path;

use super::{Run, tilewright_in};
use tilewright_core::DType;
use tilewright_core::format::model::ModelWriter;
use tilewright_core::gpt2::{Gpt2Config, PARAMS};

pub const TINY: Gpt2Config =
    Gpt2Config { max_seq_len: 9, vocab_size: 29, padded_vocab_size: 128, layers: 2, heads: 3, channels: 12 };

/// A model whose every value is exact in bf16 and f16, with zeros in the padded rows as there must be.
pub fn write_tiny(path: &Path, dtype: DType) {
    let mut writer = ModelWriter::create(path, &TINY, dtype).unwrap();
    for index in 0..PARAMS.len() {
        let real = if index == 0 { TINY.vocab_size * TINY.channels } else { usize::MAX };
        let value = |i: usize| if i < real { ((i * 7 + index * 31) % 251) as f32 / 64.0 - 2.0 } else { 0.0 };
        writer.write_f32(index, &(0..TINY.param_numel(index)).map(value).collect::<Vec<_>>()).unwrap();
    }
    writer.finish().unwrap();
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        write_tiny(&dir.path().join("f32.bin"), DType::F32);
        Folder(dir)
    }

    fn convert(&self, args: &[&str]) -> Run {
        tilewright_in(self.0.path(), &[&["convert"], args].concat(), &[])
    }

    fn read(&self, name: &str) -> Vec<u8> {
        std::fs::read(self.0.path().join(name)).unwrap()
    }
}

#[test]
fn f32_to_bf16_and_back_is_byte_identical() {
    let folder = Folder::new();
    let said = folder.convert(&["f32.bin", "bf16.bin", "--dtype", "bf16"]).ok();
    assert!(said.contains("2 layers") && said.contains("f32 -> bf16"), "{said}");
    write_tiny(&folder.0.path().join("want.bin"), DType::BF16);
    assert_eq!(folder.read("bf16.bin"), folder.read("want.bin"));
    folder.convert(&["bf16.bin", "back.bin", "--dtype", "f32"]).ok();
    assert_eq!(folder.read("back.bin"), folder.read("f32.bin"));
}

#[test]
fn through_a_hugging_face_folder_and_back_is_byte_identical() {
    for dtype in ["f32", "bf16", "f16"] {
        let folder = Folder::new();
        folder.convert(&["f32.bin", "hf", "--dtype", dtype]).ok();
        assert!(folder.read("hf/config.json").starts_with(b"{"));
        folder.convert(&["hf", "back.bin", "--dtype", "f32"]).ok();
        assert_eq!(folder.read("back.bin"), folder.read("f32.bin"), "{dtype}");
        folder.convert(&["hf/model.safetensors", "again", "--format", "hf"]).ok();
        assert_eq!(folder.read("again/model.safetensors"), folder.read("hf/model.safetensors"), "{dtype}");
    }
}

#[test]
fn an_existing_result_is_replaced_only_by_force() {
    let folder = Folder::new();
    std::fs::write(folder.0.path().join("mine.bin"), "precious").unwrap();
    assert!(folder.convert(&["f32.bin", "mine.bin"]).failed().contains("--force"));
    assert_eq!(folder.read("mine.bin"), b"precious");
    folder.convert(&["f32.bin", "mine.bin", "--force"]).ok();
    assert_eq!(folder.read("mine.bin"), folder.read("f32.bin"));
    folder.convert(&["f32.bin", "hf"]).ok();
    assert!(folder.convert(&["f32.bin", "hf"]).failed().contains("model.safetensors exists"));
}

#[test]
fn bad_inputs_are_named_with_path_and_offset_and_leave_nothing() {
    let folder = Folder::new();
    let mut wrong_magic = folder.read("f32.bin");
    wrong_magic[0] ^= 1;
    let mut cut_off = folder.read("f32.bin");
    cut_off.truncate(5000);
    for (name, bytes) in [("magic.bin", wrong_magic), ("cut.bin", cut_off), ("empty.bin", vec![])] {
        std::fs::write(folder.0.path().join(name), bytes).unwrap();
        let error = folder.convert(&[name, "out.bin"]).failed();
        assert!(error.contains(name) && error.contains("byte"), "{error}");
        assert!(!folder.0.path().join("out.bin").exists());
    }
    assert!(folder.convert(&["none.bin", "out.bin"]).failed().contains("none.bin"));
    assert!(folder.convert(&["f32.bin", "out.bin", "--dtype", "f16"]).failed().contains("f16"));
    assert!(folder.convert(&["f32.bin", "out.safetensors"]).failed().contains("folder"));
    assert!(folder.convert(&["f32.bin"]).refused().contains("<TO>"));
    let leftovers = std::fs::read_dir(folder.0.path()).unwrap().count();
    assert_eq!(leftovers, 4, "the four inputs");
}
