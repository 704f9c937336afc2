//! Checks of the source tree: `cargo xtask tidy`.

mod tidy;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let root = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["tidy"] => Path::new(env!("CARGO_MANIFEST_DIR")).join(".."),
        ["tidy", root] => root.into(),
        _ => {
            eprintln!("usage: cargo xtask tidy [ROOT]   checks the rules of CONTRIBUTING.md");
            return ExitCode::from(2);
        }
    };
    match tidy::check(&root) {
        Ok(problems) if problems.is_empty() => {
            println!("tidy: nothing to complain about");
            ExitCode::SUCCESS
        }
        Ok(problems) => {
            problems.iter().for_each(|p| eprintln!("{p}"));
            eprintln!("tidy: {} to put right", problems.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
