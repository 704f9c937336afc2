use super::{tilewright, tilewright_in};
use std::path::Path;

fn report(environment: &[(&str, &str)]) -> serde_json::Value {
    serde_json::from_str(&tilewright_in(Path::new("."), &["doctor", "--json"], environment).ok()).unwrap()
}

#[test]
fn doctor_names_the_instruction_set_that_will_run() {
    let report = report(&[]);
    let chosen = report["processor"]["kernels will run"].as_str().unwrap();
    let levels = report["processor"]["kernel levels"].as_str().unwrap();
    assert!(levels.starts_with(chosen), "the best of {levels} runs, not {chosen}");
    assert!(levels.ends_with("portable"), "every machine has the portable level: {levels}");
    assert!(tilewright(&["doctor"]).ok().contains(levels), "the table says the same");
}

#[test]
fn doctor_follows_a_forced_instruction_set_and_warns_of_a_wrong_one() {
    let forced = report(&[("TILEWRIGHT_ISA", "portable")]);
    assert_eq!(forced["processor"]["kernels will run"], "portable");
    let wrong = report(&[("TILEWRIGHT_ISA", "avx1024")]);
    assert!(wrong["advice"].to_string().contains("avx1024"), "{wrong}");
}

#[test]
fn doctor_tells_version_threads_memory_and_disk() {
    let report = report(&[("TILEWRIGHT_THREADS", "1")]);
    assert_eq!(report["program"]["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(report["processor"]["threads"], "1");
    for (section, row) in [("program", "revision"), ("memory", "available"), ("disk", "free here"), ("devices", "cpu")]
    {
        assert!(report[section][row].as_str().is_some_and(|s| !s.is_empty()), "{section}.{row}");
    }
}

#[test]
fn doctor_advises_against_more_threads_than_cores() {
    let report = report(&[("TILEWRIGHT_THREADS", "4096")]);
    assert!(report["advice"].to_string().contains("4096 threads"), "{report}");
}

#[test]
fn doctor_says_what_bf16_gains_here() {
    let report = report(&[]);
    let told = report["processor"]["bf16 products"].as_str().unwrap();
    assert!(told.contains("AVX512-BF16") && told.contains("--precision bf16"), "{told}");
    let portable = self::report(&[("TILEWRIGHT_ISA", "portable")]);
    assert!(portable["processor"]["bf16 products"].as_str().unwrap().contains("saves memory only"));
}

/// A build with NVIDIA's GPUs on a machine without one: what there is, is hidden.
#[cfg(feature = "cuda")]
mod without_a_gpu {
    use super::{Path, report, tilewright_in};

    const HIDDEN: (&str, &str) = ("CUDA_VISIBLE_DEVICES", "");
    const TRAIN: [&str; 10] =
        ["train", "--layers", "1", "--steps", "2", "--batch", "2", "--seq-len", "32", "--no-output"];

    #[test]
    fn doctor_says_why_cuda_cannot_be_used() {
        let report = report(&[HIDDEN]);
        let rows = &report["devices"];
        let told = |row: &str| rows[row].as_str().is_some_and(|words| !words.is_empty());
        assert!(told("cuda driver") && told("cuda nvrtc") && told("cuda cublaslt"), "{rows}");
        let missing = |row: &str| rows[row].as_str().is_some_and(|words| words.starts_with("not found ("));
        assert!(missing("cuda driver") || told("cuda devices"), "either no driver or what it says: {rows}");
        assert!(report["advice"].to_string().contains("for --device cuda: "), "{}", report["advice"]);
    }

    #[test]
    fn training_runs_on_the_processor() {
        tilewright_in(Path::new("."), &TRAIN, &[HIDDEN]).ok();
    }

    #[test]
    fn asking_for_cuda_is_refused_with_what_is_missing_and_never_falls_back() {
        let checkpoint = concat!(env!("CARGO_MANIFEST_DIR"), "/../tilewright-models/tests/fixtures/laya/tiny-en");
        let decide = ["decide", "--model", checkpoint, "--preset", "triage", "--state", "x"];
        for words in [&TRAIN[..], &decide] {
            let message = tilewright_in(Path::new("."), &[words, &["--device", "cuda"]].concat(), &[HIDDEN]).failed();
            // Without a driver what is missing; with one its own word that there is no device.
            assert!(message.contains("CUDA cannot be used: ") || message.contains("cuInit failed"), "{message}");
            assert!(message.contains("install") || message.contains("device"), "what to do: {message}");
        }
    }
}
