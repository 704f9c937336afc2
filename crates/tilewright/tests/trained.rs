//! `train --text`, then `sample` and `eval` on what it wrote.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn tilewright(dir: &Path, line: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tilewright")).current_dir(dir).args(line.split(' ')).output().unwrap()
}

fn succeeds(dir: &Path, line: &str) -> String {
    let output = tilewright(dir, line);
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

fn fails(dir: &Path, line: &str, words: &[&str]) {
    let output = tilewright(dir, line);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && words.iter().all(|w| message.contains(w)), "{line}: {message}");
}

const MODEL: &str = "runs/book/model_00000060.bin";

fn trained() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("book.txt"), "The cat sat on the mat, and the rat sat on the hat.\n".repeat(300))
        .unwrap();
    let line =
        "train --text book.txt --vocab-size 280 --layers 2 --heads 2 --channels 32 --batch 4 --seq-len 16 --steps 60";
    let text = succeeds(dir.path(), &format!("{line} --val-every 30 --sample-every 30 --sample-tokens 30 --lr 0.01"));
    for want in ["step   60/60 | loss", "val loss", "--- sample after 60 steps ---", "next:", MODEL] {
        assert!(text.contains(want), "{want} is missing in {text}");
    }
    dir
}

#[test]
fn a_text_is_learned_sampled_and_measured() {
    let dir = trained();
    let dir = dir.path();
    let sample = |flags: &str| succeeds(dir, &format!("sample --model {MODEL} --prompt The --tokens 40 {flags}"));
    // More tokens than the model's window of 16: the cache is refilled on the way.
    let likely = sample("--temperature 0");
    assert!(likely.starts_with("The") && likely.contains(" sat on the "), "{likely}");
    assert_eq!(likely, sample("--top-k 1"), "the likeliest token, in both spellings");
    let warm = sample("--temperature 3 --top-k 0 --seed 1");
    assert_eq!(warm, sample("--temperature 3 --top-k 0 --seed 1"), "one seed, one text");
    assert_ne!(warm, sample("--temperature 3 --top-k 0 --seed 2"));
    let measured = succeeds(dir, &format!("eval --model {MODEL} --data runs/book/val.bin --per-token losses.txt"));
    let loss: f64 = measured.split(' ').nth(1).unwrap().parse().unwrap();
    let lines = fs::read_to_string(dir.join("losses.txt")).unwrap();
    let losses: Vec<f64> = lines.lines().map(|l| l.rsplit(' ').next().unwrap().parse().unwrap()).collect();
    assert!(loss < 2.0 && losses.len().is_multiple_of(64), "{measured}");
    assert!((losses.iter().sum::<f64>() / losses.len() as f64 - loss).abs() < 1e-4, "{measured}");
    fails(dir, "sample --model no.bin", &["no.bin"]);
    fails(dir, "sample --model book.txt", &["book.txt"]);
    fails(dir, &format!("eval --model {MODEL}"), &["--data"]);
    fails(dir, &format!("eval --model {MODEL} --data runs/book/val.bin --batch 4000"), &["val.bin", "--batch"]);
    fails(dir, &format!("sample --model {MODEL} --temperature=-1"), &["--temperature"]);
    fails(dir, "train --data no_*.bin --steps 1 --output x", &["--data", "no_*.bin"]);
    fails(dir, "train -pn 2", &["-pn 2", "one process"]);
}
