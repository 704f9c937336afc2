//! What can be said of the kernels without a GPU: NVRTC compiles every one of them, none spills, and their resources are those on record.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::SOURCES;
use super::nvrtc::Nvrtc;

/// The architectures that CI compiles for: the oldest supported one and the one with its own instructions.
const ARCHITECTURES: [&str; 2] = ["sm_80", "sm_90a"];

/// `file.cu [values] kernel arch: registers, shared bytes, spills`, one a line.
const SNAPSHOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/runtime/cuda/resources.txt");

/// Warnings that mean a Hopper kernel fell off its path: register reallocation ignored, matrix instructions serialised.
const REFUSED: [&str; 2] = ["C7508", "C7514"];

/// What ptxas says of one kernel.
fn resources(log: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let (mut entry, mut spills) = (String::new(), String::new());
    for line in log.lines() {
        if let Some(rest) = line.split_once("Compiling entry function '") {
            entry = rest.1.split('\'').next().unwrap_or_default().to_owned();
        } else if line.contains("spill stores") && !entry.is_empty() {
            let numbers: Vec<&str> = line.split(|c: char| !c.is_ascii_digit()).filter(|w| !w.is_empty()).collect();
            spills = format!("stack {} spills {}/{}", numbers[0], numbers[1], numbers[2]);
        } else if let Some((_, rest)) = line.split_once("Used ")
            && !entry.is_empty()
        {
            let registers = rest.split(' ').next().unwrap_or_default();
            let shared = rest.split(", ").find_map(|p| p.strip_suffix(" bytes smem")).unwrap_or("0");
            all.insert(std::mem::take(&mut entry), format!("registers {registers} shared {shared} {spills}"));
        }
    }
    all
}

/// Compiles everything and compares with the snapshot. Without NVRTC it says so, except where `TILEWRIGHT_CUDA_CHECK` demands it.
#[test]
fn every_kernel_compiles_without_a_gpu_and_its_resources_are_those_on_record() {
    let nvrtc = match Nvrtc::open() {
        Ok(nvrtc) => nvrtc,
        Err(missing) => {
            assert!(std::env::var_os("TILEWRIGHT_CUDA_CHECK").is_none(), "{}: {}", missing.what, missing.reason);
            println!("NOT TESTED: {} is not here ({}); {}", missing.what, missing.reason, missing.hint);
            return;
        }
    };
    let mut report =
        format!("# NVRTC {}.{}; `.ci/cuda-kernels --update` writes this file\n", nvrtc.version().0, nvrtc.version().1);
    let mut faults = String::new();
    for source in SOURCES {
        for values in source.variants {
            for architecture in ARCHITECTURES {
                let options = source.options(architecture, values);
                let compiled = match nvrtc.compile(source.name, &source.full_text(), &options) {
                    Ok(compiled) => compiled,
                    Err(log) => panic!("{} {values:?} for {architecture}: {log}", source.name),
                };
                for line in
                    compiled.log.lines().filter(|l| REFUSED.iter().any(|r| l.contains(r)) || l.contains(": warning"))
                {
                    writeln!(faults, "{} {values:?} {architecture}: {line}", source.name).unwrap();
                }
                for (kernel, words) in resources(&compiled.log) {
                    let line = format!("{} {values:?} {kernel} {architecture}: {words}", source.name);
                    if !words.ends_with("spills 0/0") {
                        writeln!(faults, "spills: {line}").unwrap();
                    }
                    writeln!(report, "{line}").unwrap();
                }
            }
        }
    }
    if std::env::var_os("TILEWRIGHT_CUDA_UPDATE").is_some() {
        std::fs::write(SNAPSHOT, &report).unwrap();
    }
    let recorded = std::fs::read_to_string(SNAPSHOT).unwrap_or_default();
    let allowed = |fault: &str| recorded.lines().any(|l| l.starts_with("# allowed ") && l.contains(fault));
    let unlisted: Vec<&str> = faults.lines().filter(|f| !allowed(f)).collect();
    assert!(unlisted.is_empty(), "{}", unlisted.join("\n"));
    // Another version of the compiler gives other numbers; the record is of one.
    if recorded.lines().next() == report.lines().next() {
        let changed: Vec<&str> = report.lines().filter(|l| !recorded.lines().any(|r| r == *l)).collect();
        assert!(
            changed.is_empty(),
            "resources changed; `.ci/cuda-kernels --update` records them:\n{}",
            changed.join("\n")
        );
    }
}

/// Texts that may take the place of built-in ones (`lab/device/candidates.py`), in a folder a candidate: each compiles without spills for the chip it is for.
#[test]
fn every_candidate_compiles_without_a_gpu_and_without_spills() {
    let Some(folder) = std::env::var_os("TILEWRIGHT_CUDA_CANDIDATES") else {
        println!("NOT TESTED: TILEWRIGHT_CUDA_CANDIDATES names no folder of candidates");
        return;
    };
    let nvrtc = Nvrtc::open().unwrap_or_else(|missing| panic!("{}: {}", missing.what, missing.reason));
    let mut candidates: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    candidates.sort();
    let (mut compiled, mut faults) = (0, String::new());
    for candidate in candidates.iter().filter(|path| path.is_dir()) {
        let before = compiled;
        for source in SOURCES {
            let Ok(text) = std::fs::read_to_string(candidate.join(source.name)) else { continue };
            // Of the storage types the first and the last.
            for values in [source.variants.first(), source.variants.last()].into_iter().flatten() {
                let name = format!("{} {} {values:?}", candidate.display(), source.name);
                let options = source.options("sm_90a", values);
                let log = match nvrtc.compile(source.name, &source.with_prelude(&text), &options) {
                    Ok(done) => done.log,
                    Err(log) => panic!("{name}: {log}"),
                };
                // One whose products are serialised is not worth the device's time.
                for line in
                    log.lines().filter(|l| REFUSED.iter().any(|r| l.contains(r)) || l.contains("are serialized"))
                {
                    writeln!(faults, "{name}: {line}").unwrap();
                }
                for (kernel, words) in resources(&log) {
                    println!("{name} {kernel}: {words}");
                    if !words.ends_with("spills 0/0") {
                        writeln!(faults, "spills: {name} {kernel}: {words}").unwrap();
                    }
                }
                compiled += 1;
            }
        }
        assert!(compiled > before, "{}: no file that a kernel is compiled from", candidate.display());
    }
    assert!(compiled > 0, "no candidate in {}", folder.display());
    assert!(faults.is_empty(), "{faults}");
}

#[test]
fn the_compilers_report_is_read() {
    let log = "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Function properties for k\n\
               ptxas         .     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n\
               ptxas info    : Used 13 registers, used 1 barriers, 1024 bytes smem\n";
    assert_eq!(resources(log)["k"], "registers 13 shared 1024 stack 8 spills 4/12");
}

#[test]
fn variants_are_whole_and_named_once() {
    for source in SOURCES {
        assert!(source.variants.iter().all(|v| v.len() == source.parameters.len()), "{}", source.name);
        assert_eq!(SOURCES.iter().filter(|s| s.name == source.name).count(), 1, "{}", source.name);
        assert!(!source.text.contains("#include"), "{}: no header of the toolkit", source.name);
    }
}
