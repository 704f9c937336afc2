//! Whole sessions with arms that behave and misbehave.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tilewright_bench::record::{FaultKind, Kind, Measure, Phase, Record, Status};
use tilewright_bench::report;
use tilewright_bench::session::{self, Options};
use tilewright_bench::summary::{Comparison, Verdict, summarise};

mod support;
use support::conforms;

const FAKE: &str = env!("CARGO_BIN_EXE_fake-arm");

/// A plan of a good baseline and the given arms, each `(name, words)`.
fn plan(head: &str, arms: &[(&str, &str)]) -> String {
    let mut text = format!(
        "name = \"test\"\npairs = 12\n{head}\n[warm_up]\ncalls = 2\nseconds = 0\n[cool_down]\npause_ms = 0\n[limits]\ncall_s = 0.6\nstart_s = 3\n\
         [[cases]]\nname = \"one\"\nring = 4\n[[cases.tensors]]\nname = \"x\"\nshape = [64]\ndistribution = {{ kind = \"normal\", std = 1.0 }}\n"
    );
    for (name, words) in arms {
        let words: Vec<String> = std::iter::once(FAKE).chain(words.split(' ')).map(|w| format!("{w:?}")).collect();
        let mode = if words.get(1).is_some_and(|w| w == "\"plain\"") { "plain" } else { "protocol" };
        text += &format!("[[arms]]\nname = \"{name}\"\ncommand = [{}]\nmode = \"{mode}\"\n", words.join(", "));
    }
    text
}

struct Bench {
    folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        Bench { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn options(&self) -> Options {
        Options { out: self.path("records"), command: "test".into(), ..Options::default() }
    }

    fn run_with(&self, text: &str, options: &Options, stop: &AtomicBool) -> (Record, PathBuf) {
        std::fs::write(self.path("plan.toml"), text).unwrap();
        session::run(&self.path("plan.toml"), options, stop, &mut |_| {}).unwrap()
    }

    fn run(&self, text: &str) -> Record {
        let (record, file) = self.run_with(text, &self.options(), &AtomicBool::new(false));
        assert!(Record::read(&file).unwrap() == record, "what is on disk is what was returned");
        record
    }
}

fn find(record: &Record, arm: &str, measure: Measure) -> Comparison {
    let all = summarise(record).comparisons;
    all.iter().find(|c| c.arm == arm && c.measure == measure).unwrap_or_else(|| panic!("{arm}: {all:#?}")).clone()
}

/// The bad arm has one error row of this kind, and the good arms were measured to the end.
fn goes_on_after(words: &str, kind: FaultKind, message: &str) {
    let record = Bench::new().run(&plan("", &[("good", "good"), ("bad", words), ("other", "good")]));
    assert_eq!(record.status, Status::Error);
    let [error] = &record.errors[..] else { panic!("{:?}", record.errors) };
    assert_eq!((error.arm.as_str(), error.kind), ("bad", kind), "{error:?}");
    assert!(error.message.contains(message), "{}", error.message);
    assert_eq!(find(&record, "other", Measure::Wall).paired.unwrap().n, 12);
    let bad = find(&record, "bad", Measure::Wall);
    assert_eq!(bad.verdict, Verdict::NotComparable);
    assert!(bad.reason.unwrap().contains(&error.message));
    assert!(report::text(&record).contains(&error.message));
}

#[test]
fn an_arm_that_crashes_is_a_row() {
    goes_on_after("crash", FaultKind::Crash, "exit code 3");
}

#[test]
fn an_arm_that_aborts_is_a_row_with_its_signal() {
    goes_on_after("abort", FaultKind::Crash, "signal 6");
}

#[test]
fn an_arm_that_hangs_is_ended_and_is_a_row() {
    goes_on_after("hang", FaultKind::Timeout, "no answer to `run`");
}

#[test]
fn an_arm_that_never_speaks_is_a_row() {
    goes_on_after("deaf", FaultKind::Timeout, "no answer to `hello`");
}

#[test]
fn an_arm_that_prints_garbage_is_a_row() {
    goes_on_after("garbage", FaultKind::Garbage, "Segmentation fault");
}

#[test]
fn an_arm_that_prints_without_end_is_a_row_and_does_not_fill_the_memory() {
    goes_on_after("endless", FaultKind::Garbage, "a line without end");
}

#[test]
fn an_arm_that_speaks_before_it_is_asked_is_a_row() {
    goes_on_after("early", FaultKind::Garbage, "loading");
}

#[test]
fn an_arm_that_answers_twice_is_a_row() {
    goes_on_after("chatty", FaultKind::Garbage, "before it was asked");
}

#[test]
fn an_arm_that_changes_its_output_is_a_row() {
    goes_on_after("fickle", FaultKind::ChangedOutput, "another output for input");
}

#[test]
fn an_arm_that_reports_a_negative_time_is_a_row() {
    goes_on_after("negative", FaultKind::ImpossibleTime, "above 0");
}

#[test]
fn an_arm_that_reports_more_time_than_passed_is_a_row() {
    goes_on_after("boaster", FaultKind::ImpossibleTime, "passed");
}

#[test]
fn an_arm_that_refuses_is_a_row_with_its_words() {
    goes_on_after("refuse", FaultKind::Refused, "no such device here");
}

#[test]
fn an_arm_that_read_other_inputs_is_a_row() {
    goes_on_after("other-input", FaultKind::WrongInput, "SHA-256");
}

#[test]
fn a_program_that_does_not_exist_is_a_row() {
    let text = plan("", &[("good", "good"), ("other", "good")])
        + "[[arms]]\nname = \"bad\"\ncommand = [\"no-such-program-here\"]\n";
    let record = Bench::new().run(&text);
    assert_eq!(record.errors[0].kind, FaultKind::Start);
    assert_eq!(find(&record, "other", Measure::Wall).paired.unwrap().n, 12);
}

#[test]
fn an_arm_that_talks_on_standard_error_does_not_block() {
    let record = Bench::new().run(&plan("", &[("good", "good"), ("loud", "talkative")]));
    assert_eq!(record.status, Status::Ok, "{:?}", record.errors);
}

#[test]
fn an_arm_that_fails_parity_keeps_no_time() {
    let head = "[[checks]]\nmetric = \"loss\"\nabsolute = 0.01\n[[checks]]\nmetric = \"logits\"\nrelative = 0.01";
    // Tables follow the plain keys, so the checks go last.
    let text = plan("", &[("good", "good"), ("bad", "wrong"), ("other", "good")]) + head;
    let record = Bench::new().run(&text);
    assert_eq!(record.errors[0].kind, FaultKind::Parity);
    let bad = record.arms.iter().position(|a| a.name == "bad").unwrap();
    assert!(record.samples.iter().all(|s| s.arm != bad), "no time of an arm that gives another result");
    assert!(
        record.checks.iter().any(|c| c.arm == "bad" && !c.pass)
            && record.checks.iter().any(|c| c.arm == "other" && c.pass)
    );
}

#[test]
fn a_baseline_that_dies_ends_its_case_and_not_the_plan() {
    let text = plan("", &[("good", "crash"), ("other", "good")])
        + "[[cases]]\nname = \"two\"\n[[cases.tensors]]\nname = \"x\"\nshape = [8]\ndistribution = { kind = \"bytes\" }\n";
    let record = Bench::new().run(&text);
    assert!(
        record.errors.iter().any(|e| e.case == "one") && record.errors.iter().any(|e| e.case == "two"),
        "{:?}",
        record.errors
    );
    assert_eq!(find(&record, "other", Measure::Wall).verdict, Verdict::NotComparable);
}

#[test]
fn a_twofold_difference_is_found_and_the_same_program_is_not() {
    let record = Bench::new().run(&plan("", &[("slow", "good 2000"), ("fast", "good 1000")]));
    let fast = find(&record, "fast", Measure::Wall);
    assert_eq!(fast.verdict, Verdict::Faster, "{fast:?}");
    assert!((1.6..2.4).contains(&fast.paired.unwrap().ratio), "{fast:?}");
    let control = find(&record, "slow#2", Measure::Wall);
    assert!((0.9..1.1).contains(&control.paired.unwrap().ratio), "{control:?}");
}

#[test]
fn a_warm_up_buffer_kept_alive_is_refused_a_ratio() {
    let record = Bench::new()
        .run(&plan("memory = { mode = \"live\" }", &[("good", "good"), ("bad", "keeps 8000000"), ("other", "good")]));
    let bad = find(&record, "bad", Measure::PeakMemory);
    assert_eq!((bad.verdict, bad.paired), (Verdict::NotComparable, None));
    assert!(bad.reason.as_ref().unwrap().contains("unequal baselines") && bad.reason.unwrap().contains("9048576"));
    let other = find(&record, "other", Measure::PeakMemory);
    assert_eq!((other.verdict, other.paired.unwrap().ratio), (Verdict::NoDifferenceDetected, 1.0));
    // The raw bytes stay.
    assert!(record.samples.iter().any(|s| s.live_bytes == Some(9_048_576)));
}

#[test]
fn memory_that_grows_from_call_to_call_is_refused_a_ratio() {
    let record = Bench::new().run(&plan("memory = { mode = \"live\" }", &[("good", "good"), ("bad", "leaks 2000000")]));
    let bad = find(&record, "bad", Measure::PeakMemory);
    assert!(bad.paired.is_none() && bad.reason.unwrap().contains("warm-up alive"));
}

#[cfg(target_os = "linux")]
#[test]
fn a_hidden_warm_up_buffer_is_seen_in_the_resident_memory() {
    let record =
        Bench::new().run(&plan("memory = { mode = \"live\" }", &[("good", "good"), ("bad", "hides 100000000")]));
    let told = find(&record, "bad", Measure::PeakMemory);
    assert!(told.paired.is_none() && told.reason.unwrap().contains("does not tell"));
    if record.samples.iter().any(|s| s.rss_peak > s.rss_before) {
        let resident =
            summarise(&record).comparisons.into_iter().find(|c| c.arm == "bad" && c.measure == Measure::PeakRss);
        assert!(resident.is_none_or(|c| c.verdict == Verdict::NotComparable));
    }
}

#[test]
fn fresh_processes_are_measured_beside_the_timed_ones() {
    let record =
        Bench::new().run(&plan("memory = { mode = \"fresh\", runs = 2 }", &[("good", "good"), ("same", "good")]));
    assert_eq!(record.samples.iter().filter(|s| s.phase == Phase::Memory).count(), 6);
    assert_eq!(find(&record, "same", Measure::PeakMemory).paired.unwrap().ratio, 1.0);
}

#[test]
fn plain_programs_are_timed_as_a_whole() {
    let record = Bench::new().run(&plan(
        "",
        &[
            ("small", "plain good"),
            ("large", "plain large"),
            ("bad", "plain crash"),
            ("late", "plain hang"),
            ("odd", "plain fickle"),
        ],
    ));
    let kind = |arm: &str| record.errors.iter().find(|e| e.arm == arm).map(|e| e.kind);
    assert_eq!((kind("bad"), kind("late")), (Some(FaultKind::Crash), Some(FaultKind::Timeout)));
    assert_eq!(kind("odd"), Some(FaultKind::ChangedOutput));
    let large = record.arms.iter().position(|a| a.name == "large").unwrap();
    let sample = record.samples.iter().find(|s| s.arm == large && s.phase == Phase::Pair).unwrap();
    assert!(sample.rss_peak.unwrap() > 64 << 20 && sample.cpu_ns.unwrap() > 0);
    assert!(sample.wall_ns > 1e5, "a process takes longer than that to start");
}

#[test]
fn an_interrupted_run_is_partial_and_goes_on() {
    let bench = Bench::new();
    let text = plan("", &[("good", "good"), ("same", "good")]);
    std::fs::write(bench.path("plan.toml"), &text).unwrap();
    let stop = AtomicBool::new(false);
    let watch = &mut |p: &session::Progress| {
        if p.what == "pair" && p.done >= 15 {
            stop.store(true, Ordering::Relaxed);
        }
    };
    let asked = Options { pairs: Some(14), seed: Some(5), ..bench.options() };
    let (partial, file) = session::run(&bench.path("plan.toml"), &asked, &stop, watch).unwrap();
    assert_eq!(partial.status, Status::Partial);
    let pairs = |r: &Record| r.samples.iter().filter(|s| s.phase == Phase::Pair).count();
    assert!((15..42).contains(&pairs(&partial)), "{}", pairs(&partial));
    // What was asked for need not be said again.
    let options = Options { resume: Some(file.clone()), ..bench.options() };
    let (whole, same_file) = bench.run_with(&text, &options, &AtomicBool::new(false));
    assert_eq!((whole.status, &same_file), (Status::Ok, &file));
    assert_eq!((pairs(&whole), whole.segments.len(), whole.settings.seed), (42, 2, 5));
    assert_eq!(whole.session_id, partial.session_id);
    assert_eq!(whole.order, partial.order);
    // Another plan is not the same session, and a finished one is not partial.
    for (other, what) in [(text.replace("pairs = 12", "pairs = 14"), "not partial"), (text.clone(), "not partial")] {
        std::fs::write(bench.path("plan.toml"), &other).unwrap();
        let error = session::run(&bench.path("plan.toml"), &options, &AtomicBool::new(false), &mut |_| {}).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
}

#[test]
fn a_hanging_arm_does_not_hold_up_an_interrupt() {
    let bench = Bench::new();
    let text = plan("", &[("good", "good"), ("bad", "hang")]).replace("call_s = 0.6", "call_s = 60");
    std::fs::write(bench.path("plan.toml"), &text).unwrap();
    let stop = AtomicBool::new(false);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(1500));
            stop.store(true, Ordering::Relaxed);
        });
        let (record, _) = session::run(&bench.path("plan.toml"), &bench.options(), &stop, &mut |_| {}).unwrap();
        assert_eq!(record.status, Status::Partial);
    });
    assert!(begin.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_loaded_machine_confirms_nothing_unless_forced_and_then_it_is_labelled() {
    let bench = Bench::new();
    let text = plan("kind = \"confirm\"", &[("good", "good 50"), ("same", "good 50")])
        .replace("pairs = 12", "pairs = 60")
        .replace("start_s = 3", "start_s = 3\nload = 1e-9");
    let (refused, _) = bench.run_with(&text, &bench.options(), &AtomicBool::new(false));
    if refused.status == Status::Ok {
        // The load average of an idle machine can be exactly 0, and then it is quiet.
        return;
    }
    assert_eq!((refused.status, refused.samples.len()), (Status::RefusedEnvironment, 0));
    let options = Options { force: true, out: bench.path("forced"), ..bench.options() };
    let (forced, _) = bench.run_with(&text, &options, &AtomicBool::new(false));
    assert!(forced.status == Status::Ok && forced.kind == Kind::Confirm, "{:?}", forced.errors);
    assert!(forced.forced[0].contains("load") && report::text(&forced).contains("FORCED"));
}

#[test]
fn the_page_is_whole_and_needs_nothing_from_elsewhere() {
    let record = Bench::new()
        .run(&plan("memory = { mode = \"live\" }", &[("good", "good"), ("other", "good"), ("bad", "crash")]));
    let page = report::html(&[("<record>.json".to_owned(), record)]);
    assert!(page.contains("<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>"));
    for foreign in ["http:", "https:", "src=", "href=", "url(", "@import", "<script", "<link"] {
        assert!(!page.contains(foreign), "{foreign}");
    }
    assert!(
        page.contains("prefers-color-scheme: dark")
            && page.contains("@media print")
            && page.contains("&lt;record&gt;.json")
    );
    assert!(page.matches("<svg").count() >= 3 && page.contains("exit code 3"));
    well_formed(&page);
}

/// Every element that is opened is closed, in order.
fn well_formed(page: &str) {
    let body = page.strip_prefix("<!DOCTYPE html>\n").unwrap();
    let style = body.find("<style>").unwrap()..body.find("</style>").unwrap();
    let body = format!("{}<style>{}", &body[..style.start], &body[style.end..]);
    let mut open: Vec<&str> = Vec::new();
    for part in body.split('<').skip(1) {
        let (tag, _) = part.split_once('>').unwrap_or_else(|| panic!("`<{part}` is not closed"));
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "after {open:?}");
        } else if !tag.ends_with('/') {
            open.push(tag.split([' ', '\n']).next().unwrap());
        }
    }
    assert_eq!(open, Vec::<&str>::new());
}

#[test]
fn no_mutation_of_a_record_breaks_its_reader_or_the_report() {
    let bench = Bench::new();
    let (record, file) =
        bench.run_with(&plan("", &[("good", "good"), ("bad", "crash")]), &bench.options(), &AtomicBool::new(false));
    let bytes = std::fs::read(&file).unwrap();
    assert!(Record::parse(&bytes).unwrap() == record);
    let mut rng = tilewright_bench::rng::SplitMix::new(5);
    let mut read = 0;
    for _ in 0..600 {
        let mut changed = bytes.clone();
        for _ in 0..=rng.below(3) {
            let at = rng.below(changed.len());
            match rng.below(4) {
                0 => changed[at] = b"0123456789-.eE\"{}[],:n"[rng.below(22)],
                1 => drop(changed.remove(at)),
                2 => changed.insert(at, b'0' + rng.below(10) as u8),
                _ => changed.truncate(at.max(1)),
            }
        }
        if let Ok(record) = Record::parse(&changed) {
            read += 1;
            report::text(&record);
            report::html(&[("x".to_owned(), record)]);
        }
    }
    assert!(read > 20, "the mutations must reach the report: {read}");
}

#[test]
fn records_follow_the_published_schema() {
    let record = Bench::new().run(&plan("memory = { mode = \"live\" }", &[("good", "good"), ("bad", "crash")]));
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let schema: serde_json::Value =
        serde_json::from_slice(&std::fs::read(root.join("docs/bench-record.schema.json")).unwrap()).unwrap();
    let mut problems = Vec::new();
    conforms(&schema, &schema, &serde_json::to_value(&record).unwrap(), "record", &mut problems);
    for entry in std::fs::read_dir(root.join("bench/records"))
        .into_iter()
        .flatten()
        .flatten()
        .filter(|e| e.path().extension().is_some_and(|x| x == "json"))
    {
        let value: serde_json::Value = serde_json::from_slice(&std::fs::read(entry.path()).unwrap()).unwrap();
        // Probes of the laboratory keep records of another kind in the same folder.
        if value.get("session_id").is_none() {
            continue;
        }
        conforms(&schema, &schema, &value, &entry.file_name().to_string_lossy(), &mut problems);
        Record::read(&entry.path()).unwrap();
    }
    assert_eq!(problems, Vec::<String>::new());
    // The check itself sees what is wrong.
    let mut broken = serde_json::to_value(&record).unwrap();
    broken["samples"][0]["wall_ns"] = "fast".into();
    broken["colour"] = 1.into();
    let mut problems = Vec::new();
    conforms(&schema, &schema, &broken, "record", &mut problems);
    assert_eq!(problems.len(), 2, "{problems:?}");
}
