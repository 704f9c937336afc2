//! `tilewright doctor`: what this machine offers, what would run on it, and what to do about that which is missing.

use std::io::Write;
use std::path::Path;

use tilewright_ops::cpu::{Cpu, Isa, default_threads, memory};

use crate::units::bytes;

/// Command line of `doctor`.
#[derive(clap::Args)]
pub struct Args {
    /// Print one JSON object instead of a table
    #[arg(long)]
    json: bool,
}

/// Runs the subcommand.
pub fn run(args: Args) -> anyhow::Result<()> {
    let report = Report::of_this_machine();
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{:#}", report.json())?;
    } else {
        write!(out, "{}", report.text())?;
    }
    Ok(())
}

struct Report {
    sections: Vec<(&'static str, Vec<(&'static str, String)>)>,
    advice: Vec<String>,
}

impl Report {
    fn of_this_machine() -> Self {
        let mut advice = Vec::new();
        let sections = vec![
            ("program", program()),
            ("processor", processor(&mut advice)),
            ("memory", memory_rows(&mut advice)),
            ("disk", disk(&mut advice)),
            ("devices", devices(&mut advice)),
        ];
        Report { sections, advice }
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for (title, rows) in &self.sections {
            text += &format!("{title}\n");
            for (name, value) in rows {
                text += &format!("  {name:<18}{value}\n");
            }
        }
        if self.advice.is_empty() {
            text += "nothing is missing\n";
        } else {
            text += "advice\n";
            self.advice.iter().for_each(|line| text += &format!("  - {line}\n"));
        }
        text
    }

    fn json(&self) -> serde_json::Value {
        let mut object = serde_json::Map::new();
        for (title, rows) in &self.sections {
            let rows = rows.iter().map(|(name, value)| (name.to_string(), value.as_str().into())).collect();
            object.insert(title.to_string(), serde_json::Value::Object(rows));
        }
        object.insert("advice".to_owned(), self.advice.clone().into());
        object.into()
    }
}

fn program() -> Vec<(&'static str, String)> {
    let profile = if cfg!(debug_assertions) { "debug (slow; build with --release)" } else { "release" };
    vec![
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("revision", env!("TILEWRIGHT_REVISION").to_owned()),
        ("build", profile.to_owned()),
        ("system", format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
        ("kernel", read("/proc/sys/kernel/osrelease").unwrap_or_else(|| "not told by this system".to_owned())),
    ]
}

fn processor(advice: &mut Vec<String>) -> Vec<(&'static str, String)> {
    let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|l| l.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field("model name").or_else(|| field("Model")).unwrap_or_else(|| "not told by this system".to_owned());
    // Beyond the levels that kernels exist for: what a later bf16 or int8 path could use.
    let interesting =
        ["avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "avx_vnni"];
    let interesting =
        interesting.iter().chain(&["amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"]);
    let flags = field("flags").or_else(|| field("Features")).unwrap_or_default();
    let flags: Vec<&str> = flags.split(' ').collect();
    let present: Vec<&str> = interesting.copied().filter(|f| flags.contains(f)).collect();

    let available = Isa::available();
    let names: Vec<_> = available.iter().map(|i| i.name()).collect();
    let chosen = Isa::from_env();
    let wanted = std::env::var("TILEWRIGHT_ISA").ok().filter(|wanted| wanted != chosen.name());
    if let Some(wanted) = wanted {
        advice.push(format!(
            "TILEWRIGHT_ISA={wanted} is none of this machine's levels ({}), so it has no effect; unset it",
            names.join(", ")
        ));
    }
    if available == [Isa::Portable] {
        advice.push("no AVX2, AVX-512 or NEON here: kernels run as plain Rust, several times slower".to_owned());
    }

    let granted = std::thread::available_parallelism().map_or(1, |n| n.get());
    let logical = cpuinfo.lines().filter(|l| l.starts_with("processor")).count().max(granted);
    let threads = default_threads();
    if threads > granted {
        advice.push(format!(
            "{threads} threads were asked for, but this process may use {granted} logical cores; try --threads {granted}"
        ));
    }
    let quota = match read("/sys/fs/cgroup/cpu.max").as_deref().map(parse_cpu_max) {
        Some(Some(cores)) => format!("{cores:.2} cores"),
        _ => "none".to_owned(),
    };
    vec![
        ("model", model),
        ("features", if present.is_empty() { "not told by this system".to_owned() } else { present.join(" ") }),
        ("kernel levels", names.join(", ")),
        ("kernels will run", chosen.name().to_owned()),
        ("bf16 products", bf16_products(chosen)),
        ("logical cores", format!("{logical}, {granted} of them granted to this process")),
        ("cpu quota", quota),
        ("threads", threads.to_string()),
    ]
}

/// Whether `decide --precision bf16` gains speed here, or memory only.
fn bf16_products(isa: Isa) -> String {
    if Cpu::new(1, isa).has_bf16_dot() {
        "AVX512-BF16, in hardware: `decide --precision bf16` is the fastest".to_owned()
    } else {
        "no AVX512-BF16: `decide --precision bf16` saves memory only".to_owned()
    }
}

fn memory_rows(advice: &mut Vec<String>) -> Vec<(&'static str, String)> {
    let meminfo = read("/proc/meminfo").unwrap_or_default();
    let kib = |name: &str| {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(name))?;
        line.split_whitespace().next()?.parse::<u64>().ok().map(|n| n * 1024)
    };
    let unknown = || "not told by this system".to_owned();
    let available = memory::available();
    // A training step of the default model fits in this with room to spare; d12 at B=4, T=64 needs about 3 GiB.
    if available < 1 << 30 {
        advice.push(format!(
            "only {} of memory are free; close other programs or use a smaller --model, --batch or --seq-len (`tilewright plan`)",
            bytes(available)
        ));
    }
    let limit = read("/sys/fs/cgroup/memory.max").and_then(|s| s.parse::<u64>().ok());
    let thp = read("/sys/kernel/mm/transparent_hugepage/enabled");
    let thp = thp.as_deref().and_then(chosen_word).map(str::to_owned);
    if thp.as_deref() == Some("never") {
        advice.push(
            "transparent huge pages are off, which costs some speed; \
             as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
                .to_owned(),
        );
    }
    vec![
        ("total", kib("MemTotal:").map_or_else(unknown, bytes)),
        ("available", if available == u64::MAX { unknown() } else { bytes(available) }),
        ("cgroup limit", limit.map_or_else(|| "none".to_owned(), bytes)),
        ("swap free", kib("SwapFree:").map_or_else(unknown, bytes)),
        ("huge pages", thp.unwrap_or_else(unknown)),
    ]
}

fn disk(advice: &mut Vec<String>) -> Vec<(&'static str, String)> {
    let folder = std::env::current_dir().unwrap_or_else(|_| ".".into());
    let free = free_disk(&folder);
    // A d12 checkpoint is 0.5 GB of parameters and 1 GB of optimiser state.
    if free.is_some_and(|f| f < 2_000_000_000) {
        advice.push(format!(
            "{} of disk are free here; a d12 checkpoint takes 1.5 GB: give `train` an --output on a larger disk",
            bytes(free.unwrap_or(0))
        ));
    }
    vec![("free here", free.map_or_else(|| "not told by this system".to_owned(), bytes))]
}

fn devices(advice: &mut Vec<String>) -> Vec<(&'static str, String)> {
    let mut rows = vec![("cpu", format!("{}, {} threads", Isa::from_env().name(), default_threads()))];
    rows.extend(gpu(advice));
    rows
}

fn gpu(advice: &mut Vec<String>) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    #[cfg(feature = "cuda")]
    {
        let report = tilewright_ops::runtime::cuda::doctor::report();
        advice.extend(report.advice);
        rows.extend(report.rows);
    }
    #[cfg(any(feature = "vulkan", feature = "metal"))]
    {
        let report = tilewright_ops::runtime::gpu::doctor::report();
        advice.extend(report.advice);
        rows.extend(report.rows);
    }
    if rows.is_empty() {
        let _ = advice;
        let text = "this build computes on the CPU only; `--features cuda` adds NVIDIA GPUs, `--features vulkan` or `metal` those of any vendor";
        rows.push(("gpu", text.to_owned()));
    }
    rows
}

#[cfg(unix)]
fn free_disk(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

#[cfg(not(unix))]
fn free_disk(_: &Path) -> Option<u64> {
    None
}

fn read(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

/// `quota period` of a control group as a number of cores; `None` for `max`.
fn parse_cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    Some(quota.parse::<f64>().ok()? / period.parse::<f64>().ok()?)
}

/// The word in brackets of the kernel's `always [madvise] never`.
fn chosen_word(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_quota_is_told_in_cores() {
        assert_eq!(parse_cpu_max("150000 100000"), Some(1.5));
        assert_eq!(parse_cpu_max("max 100000"), None);
        assert_eq!(parse_cpu_max(""), None);
    }

    #[test]
    fn the_chosen_huge_page_mode_is_the_one_in_brackets() {
        assert_eq!(chosen_word("always [madvise] never"), Some("madvise"));
        assert_eq!(chosen_word("always"), None);
    }

    #[test]
    fn advice_replaces_the_all_clear() {
        let mut report = Report { sections: vec![("disk", vec![("free here", "1 GiB".to_owned())])], advice: vec![] };
        assert!(report.text().contains("nothing is missing"));
        report.advice.push("buy a disk".to_owned());
        assert!(report.text().contains("- buy a disk") && !report.text().contains("nothing is missing"));
        assert_eq!(report.json()["advice"][0], "buy a disk");
        assert_eq!(report.json()["disk"]["free here"], "1 GiB");
    }
}
