//! Fixtures, devices and rows.

use std::path::{Path, PathBuf};
use std::rc::Rc;

use serde_json::Value;
use tilewright_core::DType;
use tilewright_core::rng::XorShift;
use tilewright_models::laya::{AgentConfig, Laya, LoadOptions, OptionLayout, OptionPositions, QuestionType, Row, demo};
use tilewright_models::modernbert::EncoderConfig;
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

fn on(threads: usize, isa: Isa) -> Device {
    Device::Cpu(Rc::new(Cpu::new(threads, isa)))
}

/// Every instruction set of this machine.
pub(crate) fn instruction_sets() -> Vec<Device> {
    Isa::available().into_iter().map(|isa| on(2, isa)).collect()
}

/// Every instruction set of this machine, and other numbers of threads.
pub(crate) fn devices() -> Vec<Device> {
    let mut all = instruction_sets();
    all.extend([1, 3].map(|threads| on(threads, Isa::detect())));
    all
}

pub(crate) fn open(dir: &Path, device: &Device, precision: DType) -> Laya {
    Laya::open(dir, &LoadOptions { device: device.clone(), precision, ..LoadOptions::default() }).unwrap()
}

/// A checkpoint of random weights, stored exactly, in a folder that goes away with the first value.
pub(crate) fn random_checkpoint(
    encoder: &EncoderConfig,
    agent: &AgentConfig,
    seed: u32,
) -> (tempfile::TempDir, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("checkpoint");
    demo::write_checkpoint(&path, encoder, agent, DType::F32, seed).unwrap();
    (temp, path)
}

/// A random row of `length` tokens; every third token or so is a marker, one at least. In the parallel layout the markers' spans are options of
/// lengths that differ, and what follows the last span is the state.
pub(crate) fn random_row(rng: &mut XorShift, vocab: usize, length: usize, layout: OptionLayout) -> Row {
    let mut below = |n: usize| rng.random_u32() as usize % n;
    let ids = (0..length).map(|_| below(vocab) as u32).collect();
    let mut markers: Vec<u32> = (0..length as u32).filter(|_| below(3) == 0).collect();
    if markers.is_empty() {
        markers.push(below(length) as u32);
    }
    let head = (markers[markers.len() - 1] as usize + 1 + below(4)).min(length);
    let positions = (layout == OptionLayout::Parallel).then(|| parallel(&markers, head, length));
    Row { ids, question: QuestionType::ALL[below(3)], markers, positions }
}

/// Positions and options of the parallel layout: spans from marker to marker, the last one up to `end`.
pub(crate) fn parallel(markers: &[u32], end: usize, length: usize) -> OptionPositions {
    let start = markers[0];
    let ends = markers[1..].iter().copied().chain([end as u32]);
    let spans: Vec<_> = markers.iter().copied().zip(ends).collect();
    let after = start + spans.iter().map(|(a, b)| b - a).max().unwrap();
    let mut p = OptionPositions { position_ids: (0..start).collect(), option_ids: vec![0; start as usize] };
    for (s, (a, b)) in spans.into_iter().enumerate() {
        p.position_ids.extend(start..start + b - a);
        p.option_ids.extend(std::iter::repeat_n(s as u32 + 1, (b - a) as usize));
    }
    p.position_ids.extend((0..(length - end) as u32).map(|i| after + i));
    p.option_ids.resize(length, 0);
    p
}
