//! The machine: its fingerprint, its sensors, and whether it is quiet enough. What a system does not tell is `None`, never a guess.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::record::Fingerprint;
use crate::sys;

/// Variables that change speed or results.
const ENV: [&str; 12] = [
    "TILEWRIGHT_",
    "OMP_",
    "MKL_",
    "KMP_",
    "OPENBLAS_",
    "GOMP_",
    "CUDA_",
    "NVIDIA_TF32",
    "TORCH_",
    "RAYON_",
    "MALLOC_",
    "RUSTFLAGS",
];

/// Everything that a reader needs to know whether two records may be set side by side.
pub fn fingerprint() -> Fingerprint {
    let cpuinfo = read("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|l| l.split(':').next().is_some_and(|key| key.trim() == name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let kernel = read("/proc/sys/kernel/osrelease").or_else(|| output("uname", &["-r"])).unwrap_or_default();
    let profile = if cfg!(debug_assertions) { "debug" } else { "release" };
    let smi = "--query-gpu=name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,power.limit,clocks_throttle_reasons.active";
    Fingerprint {
        cpu: field("model name")
            .or_else(|| field("Model"))
            .or_else(|| output("sysctl", &["-n", "machdep.cpu.brand_string"])),
        cores: cores(),
        system: format!("{} {kernel} {}", std::env::consts::OS, std::env::consts::ARCH),
        memory_bytes: read("/proc/meminfo").and_then(|m| {
            let line = m.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
            Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
        }),
        governor: read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
        gpus: output("nvidia-smi", &[smi, "--format=csv,noheader"])
            .map(|t| t.lines().map(str::to_owned).collect())
            .unwrap_or_default(),
        compiler: output("rustc", &["--version"]),
        flags: format!("harness {profile}; RUSTFLAGS `{}`", std::env::var("RUSTFLAGS").unwrap_or_default()),
        commit: output("git", &["rev-parse", "HEAD"]),
        dirty: output("git", &["status", "--porcelain", "--untracked-files=no"]).map(|t| !t.is_empty()),
        harness: format!("tilewright-bench {}", env!("CARGO_PKG_VERSION")),
        env: std::env::vars()
            .filter(|(k, _)| ENV.iter().any(|p| k.starts_with(p)))
            .map(|(k, v)| (k, redact(&v)))
            .collect(),
    }
}

/// Logical cores granted to this process.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Why this machine cannot confirm anything now; empty when it can.
pub fn unquiet(load_per_core: f64) -> Vec<String> {
    let mut reasons = Vec::new();
    if let Some([load, ..]) = sys::load() {
        let limit = load_per_core * cores() as f64;
        if load > limit {
            reasons.push(format!("the load is {load:.2}, above {limit:.2} for {} logical cores", cores()));
        }
    }
    let query = output("nvidia-smi", &["--query-gpu=index,utilization.gpu", "--format=csv,noheader,nounits"]);
    for line in query.iter().flat_map(|t| t.lines()) {
        if let Some((index, busy)) = line.split_once(',')
            && busy.trim().parse::<f64>().is_ok_and(|b| b > 5.0)
        {
            reasons.push(format!("GPU {} is {} % busy with other work", index.trim(), busy.trim()));
        }
    }
    reasons
}

/// Mean clock of the cores in MHz.
pub fn clock_mhz() -> Option<f64> {
    let khz: Vec<f64> = (0..cores())
        .filter_map(|c| read(&format!("/sys/devices/system/cpu/cpu{c}/cpufreq/scaling_cur_freq"))?.parse().ok())
        .collect();
    if !khz.is_empty() {
        return Some(khz.iter().sum::<f64>() / khz.len() as f64 / 1000.0);
    }
    let cpuinfo = read("/proc/cpuinfo")?;
    let mhz: Vec<f64> = cpuinfo
        .lines()
        .filter(|l| l.starts_with("cpu MHz"))
        .filter_map(|l| l.split_once(':')?.1.trim().parse().ok())
        .collect();
    (!mhz.is_empty()).then(|| mhz.iter().sum::<f64>() / mhz.len() as f64)
}

/// The hottest sensor in degrees Celsius.
pub fn temperature() -> Option<f64> {
    let zones = std::fs::read_dir("/sys/class/thermal").ok()?;
    let degrees = zones.flatten().filter_map(|z| read(z.path().join("temp").to_str()?)?.parse::<f64>().ok());
    degrees.map(|t| t / 1000.0).filter(|t| (1.0..150.0).contains(t)).reduce(f64::max)
}

/// Seconds that all cores together were busy, and the seconds taken by the hypervisor, since the start of the system.
pub fn busy_seconds() -> Option<f64> {
    let text = read("/proc/stat")?;
    let ticks: Vec<f64> = text.lines().next()?.split_whitespace().skip(1).filter_map(|w| w.parse().ok()).collect();
    // user nice system idle iowait irq softirq steal
    let busy = ticks.first()? + ticks.get(1)? + ticks.get(2)? + ticks.get(5)? + ticks.get(6)? + ticks.get(7)?;
    Some(busy / 100.0)
}

/// `2026-11-30T08:15:00Z`.
pub fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    utc(seconds)
}

fn utc(seconds: u64) -> String {
    // Civil date from days, after Howard Hinnant: years begin in March, so that the leap day is the last of its year.
    let (days, rest) = (seconds / 86400 + 719_468, seconds % 86400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Takes the paths of this machine out of a text: the working folder becomes `.`, the home folder `~`, the temporary folder `$TMP`, and of any
/// other absolute path into a home folder or the like only the last part stays.
pub fn redact(text: &str) -> String {
    let mut out = text.to_owned();
    let mut known: Vec<(String, &str)> = Vec::new();
    if let Ok(folder) = std::env::current_dir() {
        known.push((folder.to_string_lossy().into_owned(), "."));
    }
    known.push((std::env::temp_dir().to_string_lossy().trim_end_matches('/').to_owned(), "$TMP"));
    if let Ok(home) = std::env::var("HOME") {
        known.push((home, "~"));
    }
    for (path, short) in known {
        if path.len() > 1 {
            out = out.replace(&path, short);
        }
    }
    // What is left of absolute paths tells of this machine only; system folders are the same everywhere.
    let is_path = |c: char| c.is_alphanumeric() || "/._-+@".contains(c);
    let mut clean = String::new();
    let mut rest = out.as_str();
    while let Some(start) = rest.find('/') {
        let before = rest[..start].chars().next_back();
        let len = rest[start..].find(|c| !is_path(c)).unwrap_or(rest.len() - start);
        let path = &rest[start..start + len];
        clean += &rest[..start];
        let system =
            ["/usr/", "/bin/", "/lib", "/proc/", "/sys/", "/dev/", "/etc/"].iter().any(|p| path.starts_with(p));
        let relative = before.is_some_and(|c| c.is_alphanumeric() || "./~}:)".contains(c));
        if system || relative || path.matches('/').count() < 2 {
            clean += path;
        } else {
            clean += &format!("(...)/{}", Path::new(path).file_name().map_or("".into(), |n| n.to_string_lossy()));
        }
        rest = &rest[start + len..];
    }
    clean + rest
}

/// Where a command's program lies.
pub fn find_program(name: &str) -> Option<std::path::PathBuf> {
    if name.contains('/') {
        return Some(name.into());
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|p| p.is_file())
}

/// Digests of arguments that are files, by their last part.
pub fn digests_of_files(arguments: &[String]) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for argument in arguments {
        let path = Path::new(argument);
        if path.is_file()
            && path.metadata().is_ok_and(|m| m.len() < 1 << 30)
            && let (Some(name), Some(sha)) = (path.file_name(), crate::inputs::sha256_of_file(path))
        {
            found.insert(name.to_string_lossy().into_owned(), sha);
        }
    }
    found
}

fn read(path: &str) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim().to_owned())
}

fn output(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stderr(std::process::Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_civil() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_795_997_700), "2026-11-30T00:15:00Z");
    }

    #[test]
    fn paths_of_the_machine_are_taken_out_and_others_stay() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(redact(&format!("{}/target/x", here.display())), "./target/x");
        let foreign = format!("cannot open {}/{}/venv/bin/python: no", "/srv", "someone");
        assert_eq!(redact(&foreign), "cannot open (...)/python: no");
        for same in ["see /usr/bin/env", "1/2 done", "a/b/c.rs:3", "https://example.org/a/b", "./x/y/z"] {
            assert_eq!(redact(same), same);
        }
    }

    #[test]
    fn a_fingerprint_knows_at_least_the_system() {
        let print = fingerprint();
        assert!(print.cores >= 1 && print.system.contains(std::env::consts::ARCH));
    }

    #[test]
    fn a_limit_of_nothing_finds_every_machine_loaded() {
        // A load of exactly zero is possible on a machine that just woke up.
        let reasons = unquiet(-1.0);
        assert!(sys::load().is_none() || reasons[0].contains("load"), "{reasons:?}");
    }
}
