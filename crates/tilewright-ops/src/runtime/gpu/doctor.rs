//! What GPUs there are, in lines for people.

use std::rc::Rc;

use super::adapters::{Api, adapters};
use super::{Capabilities, Gpu};
use crate::Device;

/// Facts, and advice where something is missing.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Name and value.
    pub rows: Vec<(&'static str, String)>,
    /// What to do.
    pub advice: Vec<String>,
}

/// Lists the adapters, opens each to see what it supports, and measures it for some milliseconds.
pub fn report() -> Report {
    let mut report = Report::default();
    let api = Api::here();
    let found = adapters(api);
    for adapter in &found {
        let head =
            format!("{}:{} {}, {}, {}", api.name(), adapter.number, adapter.name, adapter.kind.name(), adapter.driver);
        match Gpu::open(api, adapter.number) {
            Ok(gpu) => {
                report.rows.push((api.name(), format!("{head}; {}", describe(gpu.capabilities()))));
                let pace = Device::Gpu(Rc::new(gpu)).calibrate().unwrap_or_else(|e| Some(e.to_string()));
                report.rows.extend(pace.map(|pace| (api.name(), format!("{}:{} {pace}", api.name(), adapter.number))));
            }
            Err(error) => {
                report.rows.push((api.name(), format!("{head}; cannot be used: {error}")));
            }
        }
    }
    if found.is_empty() {
        report.rows.push((api.name(), "no adapter was found".to_owned()));
        let why = Gpu::open(api, 0).err().map(|e| e.to_string()).unwrap_or_default();
        report.advice.push(format!("for --device {}: {why}", api.name()));
    } else if found.iter().all(|a| a.is_software()) {
        report.advice.push(format!(
            "--device {} would compute on the processor through a software driver, much slower than --device cpu; it serves tests",
            api.name()
        ));
    }
    report
}

/// One line of what a device supports.
pub fn describe(c: &Capabilities) -> String {
    let yes = |have: bool, name: &str| format!("{}{name}", if have { "" } else { "no " });
    let [least, most] = c.subgroup;
    let subgroup = if least == most { least.to_string() } else { format!("{least} to {most}") };
    let bf16 = match (c.bf16, c.bf16_native) {
        (true, true) => "bf16",
        (true, false) => "bf16 stored only",
        _ => "no bf16",
    };
    let tiles: Vec<_> = c.tiles.iter().map(|t| format!("{} {}x{}x{}", t.factors, t.m, t.n, t.k)).collect();
    let memory = c.memory_bytes.map_or_else(String::new, |b| format!("{:.1} GiB, ", b as f64 / f64::from(1 << 30)));
    format!(
        "{memory}buffers up to {:.1} GiB, {}, {bf16}, subgroups of {subgroup}, {} KiB shared, groups of {}, {}",
        c.buffer_bytes as f64 / f64::from(1 << 30),
        yes(c.f16, "f16"),
        c.shared_bytes >> 10,
        c.group,
        if tiles.is_empty() { "no matrix tiles".to_owned() } else { format!("matrix tiles {}", tiles.join(", ")) }
    )
}
