//! llm.c's short spellings of `train`: `-sl 3` becomes `--skip-loss-z=3` before clap sees the command line, whose own short flags have one letter.

use std::ffi::{OsStr, OsString};

use anyhow::{Result, bail};

/// Where llm.c looks for HellaSwag.
const HELLASWAG: &str = "dev/data/hellaswag/hellaswag_val.bin";

/// What a spelling becomes.
enum Meaning {
    /// `--flag=value`.
    Value(&'static str),
    /// `--flag` for 1, nothing for 0.
    Switch(&'static str),
    /// Accepted, with the reason why it changes nothing here.
    Ignored(&'static str),
    /// Accepted with this value only.
    Only(&'static str, &'static str),
}

fn meaning(flag: &str) -> Option<Meaning> {
    use Meaning::{Ignored, Only, Switch, Value};
    Some(match flag {
        "-i" => Value("--data"),
        "-j" => Value("--val-data"),
        "-e" => Value("--model"),
        "-o" => Value("--output"),
        "-lg" => Ignored("there is no GPU telemetry on a CPU"),
        "-n" => Value("--checkpoint-every"),
        "-nk" => Value("--checkpoint-keep"),
        "-nm" => Value("--checkpoint-major"),
        "-y" => Switch("--resume"),
        "-b" => Value("--batch"),
        "-t" => Value("--seq-len"),
        "-d" => Value("--total-batch"),
        "-x" => Value("--steps"),
        "-k" => Value("--schedule"),
        "-l" => Value("--lr"),
        "-u" => Value("--warmup"),
        "-q" => Value("--final-lr-fraction"),
        "-c" => Value("--weight-decay"),
        "-sl" => Value("--skip-loss-z"),
        "-sg" => Value("--skip-grad-z"),
        "-v" => Value("--val-every"),
        "-m" => Value("--val-batches"),
        "-s" => Value("--sample-every"),
        "-g" => Value("--sample-tokens"),
        "-h" => Switch("--hellaswag=dev/data/hellaswag/hellaswag_val.bin"),
        "-a" => Switch("--overfit"),
        "-f" => Ignored("a CPU has no TF32; products are f32"),
        "-w" => Value("--masters"),
        "-ge" => Ignored("GELU is fused wherever it can be, with the same results"),
        "-z" => Ignored("one process holds the whole optimiser, so there is nothing to shard"),
        "-r" => Value("--recompute"),
        "-pn" => Only("1", "this build trains in one process, and more would change the batch"),
        "-pr" => Only("0", "this build trains in one process, which is rank 0"),
        "-pg" => Ignored("there are no GPUs to share out"),
        "-pi" | "-pm" | "-ps" | "-pf" | "-pp" => Ignored("one process has no peers to meet"),
        _ => return None,
    })
}

/// A command line for clap, and what to tell the user about flags that mean nothing here.
#[derive(Debug, PartialEq)]
pub struct Translated {
    pub args: Vec<OsString>,
    pub notices: Vec<String>,
}

/// Translates the arguments behind `train`; every other command line is left alone.
pub fn translate(args: impl IntoIterator<Item = OsString>) -> Result<Translated> {
    let mut args = args.into_iter();
    let mut out = Translated { args: args.next().into_iter().collect(), notices: Vec::new() };
    // Only global flags can stand before the subcommand; those that take a separate value are listed.
    while let Some(arg) = args.next() {
        let is_train = arg == "train";
        let takes_value = arg == "--threads";
        let is_flag = arg.to_str().is_some_and(|a| a.starts_with('-'));
        out.args.push(arg);
        if takes_value {
            out.args.extend(args.next());
        }
        if is_train {
            break;
        }
        if !is_flag {
            out.args.extend(args);
            return Ok(out);
        }
    }
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        let Some(meaning) = arg.to_str().and_then(meaning) else {
            out.args.push(arg);
            continue;
        };
        let flag = arg.to_str().expect("matched above").to_owned();
        let digit = args.peek().and_then(|v| v.to_str()).filter(|v| matches!(*v, "0" | "1"));
        if flag == "-h" && digit.is_none() {
            out.args.push("--help".into());
            continue;
        }
        let Some(value) = args.next() else {
            bail!(
                "llm.c's flag {flag} takes a value, as in `{flag} 1`; `tilewright train --help` lists the long flags"
            );
        };
        match meaning {
            Meaning::Value(long) => out.args.push(join(long, &value)),
            Meaning::Switch(long) => match value.to_str() {
                Some("1") => {
                    debug_assert!(flag != "-h" || long.ends_with(HELLASWAG));
                    out.args.push(long.into());
                }
                Some("0") => {}
                _ => bail!("llm.c's flag {flag} takes 0 or 1, not `{}`", value.display()),
            },
            Meaning::Ignored(reason) => {
                out.notices.push(format!("{flag} {} changes nothing: {reason}", value.display()));
            }
            Meaning::Only(only, reason) => {
                if value != only {
                    bail!("{flag} {} is refused: {reason}; use {flag} {only} or leave it out", value.display());
                }
            }
        }
    }
    Ok(out)
}

fn join(long: &str, value: &OsStr) -> OsString {
    let mut joined = OsString::from(long);
    joined.push("=");
    joined.push(value);
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(line: &str) -> Translated {
        translate(line.split(' ').map(OsString::from)).unwrap()
    }

    fn check(short: &str, long: &str) {
        let got = run(&format!("tilewright train {short}"));
        let want: Vec<_> = format!("tilewright train {long}").split_whitespace().map(OsString::from).collect();
        assert_eq!(got.args, want, "{short}");
        assert_eq!(got.notices, Vec::<String>::new(), "{short}");
    }

    macro_rules! spellings {
        ($($name:ident: $short:literal => $long:literal;)*) => {$(
            #[test]
            fn $name() {
                check($short, $long);
            }
        )*};
    }

    spellings! {
        flag_i: "-i data/*.bin" => "--data=data/*.bin";
        flag_j: "-j val.bin" => "--val-data=val.bin";
        flag_e: "-e d12" => "--model=d12";
        flag_o: "-o log124M" => "--output=log124M";
        flag_n: "-n 5000" => "--checkpoint-every=5000";
        flag_nk: "-nk 3" => "--checkpoint-keep=3";
        flag_nm: "-nm 10000" => "--checkpoint-major=10000";
        flag_y: "-y 1" => "--resume";
        flag_y_0: "-y 0" => "";
        flag_b: "-b 64" => "--batch=64";
        flag_t: "-t 1024" => "--seq-len=1024";
        flag_d: "-d 524288" => "--total-batch=524288";
        flag_x: "-x -1" => "--steps=-1";
        flag_k: "-k wsd" => "--schedule=wsd";
        flag_l: "-l 0.0006" => "--lr=0.0006";
        flag_u: "-u 700" => "--warmup=700";
        flag_q: "-q 0.0" => "--final-lr-fraction=0.0";
        flag_c: "-c 0.1" => "--weight-decay=0.1";
        flag_sl: "-sl 5.0" => "--skip-loss-z=5.0";
        flag_sg: "-sg 5.0" => "--skip-grad-z=5.0";
        flag_v: "-v 250" => "--val-every=250";
        flag_m: "-m -1" => "--val-batches=-1";
        flag_s: "-s 20000" => "--sample-every=20000";
        flag_g: "-g 144" => "--sample-tokens=144";
        flag_h: "-h 1" => "--hellaswag=dev/data/hellaswag/hellaswag_val.bin";
        flag_h_0: "-h 0" => "";
        flag_h_alone_is_help: "-h" => "--help";
        flag_h_before_a_flag_is_help: "-h --steps=3" => "--help --steps=3";
        flag_a: "-a 1" => "--overfit";
        flag_w: "-w 0" => "--masters=0";
        flag_r: "-r 2" => "--recompute=2";
        flag_pn: "-pn 1" => "";
        flag_pr: "-pr 0" => "";
        long_flags_pass: "--steps 3 --lr=1" => "--steps 3 --lr=1";
    }

    #[test]
    fn flags_that_mean_nothing_here_are_taken_with_a_notice() {
        for flag in ["-lg 5", "-f 0", "-ge 1", "-z 1", "-pg 8", "-pi tcp", "-pm fs", "-ps 10.0.0.1", "-pf /x", "-pp /x"]
        {
            let got = run(&format!("tilewright train {flag} -b 4"));
            assert_eq!(got.args[2..], [OsString::from("--batch=4")], "{flag}");
            assert!(got.notices.len() == 1 && got.notices[0].starts_with(flag), "{:?}", got.notices);
        }
    }

    #[test]
    fn several_processes_are_refused_with_the_reason() {
        for flag in ["-pn 8", "-pr 1"] {
            let line = format!("tilewright train {flag}");
            let message = translate(line.split(' ').map(OsString::from)).unwrap_err().to_string();
            assert!(message.contains(flag) && message.contains("one process"), "{message}");
        }
    }

    #[test]
    fn a_missing_or_wrong_value_is_an_error() {
        for (line, word) in [("tilewright train -sl", "-sl"), ("tilewright train -y 2", "0 or 1")] {
            let message = translate(line.split(' ').map(OsString::from)).unwrap_err().to_string();
            assert!(message.contains(word), "{message}");
        }
    }

    #[test]
    fn other_subcommands_and_values_are_left_alone() {
        for line in ["tilewright", "tilewright -h", "tilewright sample -t 3", "tilewright --threads 2 eval -b 1"] {
            assert_eq!(run(line).args, line.split(' ').map(OsString::from).collect::<Vec<_>>());
        }
        let global = run("tilewright --threads 2 train -b 1").args;
        assert_eq!(global.last().unwrap(), "--batch=1");
        // The value of a flag is not taken for a flag.
        assert_eq!(run("tilewright train -o -b").args.last().unwrap(), "--output=-b");
    }
}
