//! Fixtures, devices and rows.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::Value;
use tilewright_core::DType;
use tilewright_models::laya::{Laya, LoadOptions, OptionPositions, QuestionType, Row};
use tilewright_ops::Device;
use tilewright_ops::cpu::{Cpu, Isa};

pub(crate) fn fixtures() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/laya"))
}

/// A question of a recorded case.
pub(crate) struct Recorded {
    pub(crate) name: String,
    pub(crate) checkpoint: String,
    pub(crate) row: Row,
    pub(crate) logits: Vec<f64>,
    pub(crate) act_logits: Vec<f64>,
    pub(crate) trace: Value,
}

/// Every recorded question with its logits.
pub(crate) fn recorded() -> Vec<Recorded> {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(fixtures().join("cases")).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let mut all = Vec::new();
    for file in files {
        let case: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let Some(details) = case["expected"].get("questions_detail").and_then(Value::as_object) else { continue };
        for (id, detail) in details {
            let kind = case["case"]["questions"][id]["type"].as_str().unwrap();
            let layout = &detail["layout"];
            all.push(Recorded {
                name: format!("{} {id}", file.file_stem().unwrap().display()),
                checkpoint: case["case"]["checkpoint"].as_str().unwrap().to_owned(),
                row: Row {
                    ids: integers(&detail["token_ids"]),
                    question: QuestionType::ALL.into_iter().find(|q| q.name() == kind).unwrap(),
                    markers: integers(&detail["markers"]),
                    positions: layout.is_object().then(|| OptionPositions {
                        position_ids: integers(&layout["position_ids"]),
                        option_ids: integers(&layout["option_ids"]),
                    }),
                },
                logits: floats(&detail["logits_slot_order"]),
                act_logits: floats(&detail["act_logits"]),
                trace: detail["trace"].clone(),
            });
        }
    }
    all
}

fn integers(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

pub(crate) fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// Every instruction set of this machine, and other numbers of threads.
pub(crate) fn devices() -> Vec<Device> {
    let on = |threads, isa| Device::Cpu(Rc::new(Cpu::new(threads, isa)));
    let mut all: Vec<_> = Isa::available().into_iter().map(|isa| on(2, isa)).collect();
    all.extend([1, 3].map(|threads| on(threads, Isa::detect())));
    all
}

pub(crate) fn open(dir: &Path, device: &Device, precision: DType) -> Laya {
    Laya::open(dir, &LoadOptions { device: device.clone(), precision, ..LoadOptions::default() }).unwrap()
}
