use super::*;
use clap::Parser;

#[derive(Parser)]
struct Harness {
    #[command(flatten)]
    args: Args,
}

fn parse(line: &str) -> Result<Args, clap::Error> {
    Harness::try_parse_from(std::iter::once("train").chain(line.split_whitespace())).map(|h| h.args)
}

fn config(line: &str) -> TrainConfig {
    settings(&parse(line).unwrap()).unwrap()
}

#[test]
fn without_flags_the_bundled_text_is_learned() {
    assert_eq!(config(""), TrainConfig::for_text(None));
}

#[test]
fn with_shards_the_defaults_are_llmcs() {
    assert_eq!(
        config("--data a*.bin --val-data b.bin"),
        TrainConfig::for_shards("a*.bin".into(), Some("b.bin".into()))
    );
}

#[test]
fn every_llmc_flag_reaches_its_setting() {
    let line = "tilewright train -i tr -j va -e d6 -n 50 -nk 3 -nm 100 -b 8 -t 64 -d 1024 -x 77 -k wsd -l 0.5 -u 5 -q 0.25 \
                -c 0.125 -sl 4 -sg 5 -v 6 -m 7 -s 8 -g 9 -h 1 -w 0 -r 2";
    let translated = llmc::translate(line.split_whitespace().map(Into::into)).unwrap();
    let args = Harness::try_parse_from(&translated.args[1..]).unwrap().args;
    let got = settings(&args).unwrap();
    let want = TrainConfig {
        model: Model::Named("d6".into()),
        checkpoint_every: Some(50),
        checkpoint_keep: 3,
        checkpoint_major: 100,
        batch: 8,
        seq_len: 64,
        total_batch: Some(1024),
        steps: Some(77),
        schedule: tilewright_train::schedule::Curve::Wsd,
        lr: 0.5,
        warmup: 5,
        final_lr_fraction: 0.25,
        weight_decay: 0.125,
        skip_loss_z: 4.0,
        skip_grad_z: 5.0,
        val_every: 6,
        val_batches: Some(7),
        sample_every: 8,
        sample_tokens: 9,
        eval_file: Some("dev/data/hellaswag/hellaswag_val.bin".into()),
        masters: false,
        recompute: 2,
        ..TrainConfig::for_shards("tr".into(), Some("va".into()))
    };
    assert_eq!(got, want);
}

#[test]
fn minus_one_is_an_epoch_and_the_whole_split() {
    let got = config("--data x --steps=-1 --val-batches=-1");
    assert_eq!((got.steps, got.val_batches), (None, None));
    assert!(settings(&parse("--steps=-2").unwrap()).unwrap_err().to_string().contains("--steps -2"));
}

#[test]
fn a_short_run_has_a_short_warmup_unless_it_is_given() {
    assert_eq!(config("--steps 60").warmup, 6);
    assert_eq!(config("--steps 60 --warmup 30").warmup, 30);
}

#[test]
fn a_checkpoint_file_is_told_from_a_name() {
    assert_eq!(config("--model gpt2_124M.bin").model, Model::File("gpt2_124M.bin".into()));
    assert_eq!(config("--model d12").model, Model::Named("d12".into()));
    assert_eq!(config("--layers 2 --heads 3 --channels 48").model, Model::Sized { layers: 2, heads: 3, channels: 48 });
}

#[test]
fn contradicting_flags_are_refused() {
    for line in [
        "--text a --data b",
        "--val-data b",
        "--model d12 --layers 3",
        "--resume",
        "--no-output --output x",
        "--resume --output x --overwrite",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn a_resume_takes_the_runs_settings_and_flags_on_top() {
    let dir = tempfile::tempdir().unwrap();
    let saved = TrainConfig { batch: 3, lr: 0.5, ..TrainConfig::for_text(None) };
    std::fs::write(dir.path().join("config.json"), saved.to_json()).unwrap();
    let line = format!("--output {} --steps 900", dir.path().display());
    assert_eq!(config(&format!("{line} --resume")), TrainConfig { steps: Some(900), ..saved });
    assert_eq!(config(&line).batch, TrainConfig::for_text(None).batch, "a fresh start does not look at it");
}

#[test]
fn bad_settings_name_the_flag() {
    for (line, flag) in [
        ("--batch 4 --seq-len 64 --total-batch 1000", "--total-batch 1000"),
        ("--lr=-1", "--lr"),
        ("--schedule step", "--schedule"),
        ("--dtype fp8", "--dtype"),
        ("--batch 2 --hellaswag h.bin", "--batch"),
    ] {
        let message = settings(&parse(line).unwrap()).unwrap_err().to_string();
        assert!(message.contains(flag), "{line}: {message}");
    }
}
