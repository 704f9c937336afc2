//! Claims held to records, and records held against each other.

use std::path::Path;

use tilewright_bench::claims::{self, Claim, Standing};
use tilewright_bench::compare::compare;
use tilewright_bench::record::{Kind, Measure, Phase, Record, Status};

/// A record of the repository, turned into a confirmation whose arm is `factor` times as fast as measured.
fn record(factor: f64) -> Record {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/records");
    let mut record = Record::read(&root.join("20261130T091558Z-isa-levels-screen.json")).unwrap();
    record.kind = Kind::Confirm;
    let arm = record.arms.iter().position(|a| a.name == "avx512").unwrap();
    record.samples.iter_mut().filter(|s| s.arm == arm).for_each(|s| s.wall_ns /= factor);
    record
}

fn claim(at_least: f64) -> Claim {
    Claim {
        id: "isa".into(),
        says: "AVX-512 is faster".into(),
        record: Some("r.json".into()),
        plan: "isa-levels".into(),
        case: "d6-b1-t64".into(),
        arm: "avx512".into(),
        baseline: "avx2".into(),
        measure: Measure::Wall,
        at_least: Some(at_least),
        at_most: None,
    }
}

fn standing(record: &Record, claim: &Claim) -> Standing {
    let folder = tempfile::tempdir().unwrap();
    record.write(&folder.path().join("r.json")).unwrap();
    claims::check(claim, folder.path())
}

fn fails_with(standing: Standing, what: &str) {
    let Standing::Fails(why) = standing else { panic!("{standing:?}") };
    assert!(why.contains(what), "{why}");
}

#[test]
fn a_claim_holds_while_the_low_end_of_the_interval_is_above_its_bound() {
    assert!(matches!(standing(&record(1.0), &claim(1.5)), Standing::Holds(_)));
    // The median is 1.765, but the interval reaches down to 1.67.
    fails_with(standing(&record(1.0), &claim(1.7)), "reaches below 1.7");
    fails_with(standing(&record(0.5), &claim(1.5)), "reaches below 1.5");
}

#[test]
fn an_upper_bound_is_held_to_the_high_end() {
    let most = |bound| Claim { at_least: None, at_most: Some(bound), ..claim(0.0) };
    assert!(matches!(standing(&record(1.0), &most(1.9)), Standing::Holds(_)));
    fails_with(standing(&record(1.0), &most(1.8)), "reaches above 1.8");
}

#[test]
fn the_statistics_are_made_anew_so_that_a_touched_summary_helps_nobody() {
    let mut touched = record(0.5);
    touched.summary = record(1.0).summary;
    fails_with(standing(&touched, &claim(1.5)), "reaches below");
}

#[test]
fn screens_partial_and_forced_records_carry_no_claim() {
    fails_with(standing(&Record { kind: Kind::Screen, ..record(1.0) }, &claim(1.5)), "screen");
    fails_with(standing(&Record { status: Status::Partial, ..record(1.0) }, &claim(1.5)), "not complete");
    fails_with(standing(&Record { forced: vec!["the load is 9".into()], ..record(1.0) }, &claim(1.5)), "load is 9");
    fails_with(standing(&Record { plan: "other".into(), ..record(1.0) }, &claim(1.5)), "of plan `other`");
}

#[test]
fn too_few_pairs_a_missing_arm_and_a_missing_record_fail() {
    let mut few = record(1.0);
    few.samples.retain(|s| s.phase != Phase::Pair || s.pair < 5);
    fails_with(standing(&few, &claim(1.5)), "only 5 pairs");
    fails_with(standing(&record(1.0), &Claim { arm: "neon".into(), ..claim(1.5) }), "compares no `neon`");
    fails_with(claims::check(&claim(1.5), Path::new("no/such/folder")), "no/such/folder");
}

#[test]
fn a_control_that_excludes_1_refuses_a_strict_session() {
    let mut strict = record(1.0);
    strict.settings.strict_control = true;
    let control = strict.arms.iter().position(|a| a.control).unwrap();
    strict.samples.iter_mut().filter(|s| s.arm == control).for_each(|s| s.wall_ns *= 1.2);
    fails_with(standing(&strict, &claim(1.5)), "A/A control found");
    // A loose one believes nothing below what the control found.
    strict.settings.strict_control = false;
    assert!(matches!(standing(&strict, &claim(1.5)), Standing::Holds(_)));
}

#[test]
fn an_open_claim_is_neither_held_nor_failed() {
    assert_eq!(claims::check(&Claim { record: None, ..claim(1.5) }, Path::new(".")), Standing::Open);
}

#[test]
fn the_projects_own_claims_hold() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/claims.toml");
    for claim in claims::read(&path).unwrap().claims {
        let standing = claims::check(&claim, path.parent().unwrap());
        assert!(!matches!(standing, Standing::Fails(_)), "{}: {standing:?}", claim.id);
    }
}

#[test]
fn claims_without_bounds_or_with_one_name_twice_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("claims.toml");
    let one = "[[claims]]\nid = \"a\"\nsays = \"x\"\nplan = \"p\"\ncase = \"c\"\narm = \"a\"\nbaseline = \"b\"\n";
    for (text, what) in [
        (one.to_owned(), "no bound"),
        (format!("{one}at_least = 1.0\n{one}at_least = 1.0\n"), "twice"),
        (format!("{one}at_leats = 1.0\n"), "at_leats"),
    ] {
        std::fs::write(&file, text).unwrap();
        let error = claims::read(&file).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn a_comparison_tells_better_worse_and_the_same() {
    let line = |old: f64, new: f64| {
        let text = compare(&record(old), &record(new));
        text.lines().find(|l| l.starts_with("d6-b1-t64 avx512 wall")).unwrap().to_owned()
    };
    assert!(line(1.0, 1.0).contains("no change detected"), "{}", line(1.0, 1.0));
    assert!(line(1.0, 1.5).contains("better: ratio 1.765 -> 2.64"), "{}", line(1.0, 1.5));
    assert!(line(1.5, 1.0).contains("WORSE"), "{}", line(1.5, 1.0));
}

#[test]
fn a_comparison_tells_what_else_differs() {
    let mut new = record(1.0);
    new.fingerprint.cpu = Some("Other".into());
    new.arms[0].program_sha256 = Some("0123456789abcdef".into());
    let text = compare(&record(1.0), &new);
    assert!(text.contains("differs  processor:") && text.contains("-> Other"), "{text}");
    assert!(text.contains("program of avx2") && text.contains("0123456789ab\n"), "{text}");
}
