//! Checks of the source tree: `cargo xtask tidy`, `cargo xtask downloads`; and what is made from it: `cargo xtask support`.

mod downloads;
mod tidy;

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let (name, checked) = match words[..] {
        ["tidy"] => ("tidy", tidy::check(&here)),
        ["tidy", root] => ("tidy", tidy::check(Path::new(root))),
        ["downloads"] => ("downloads", downloads::check(&here)),
        ["support"] => ("support", tidy::write_support(&here).map(|()| Vec::new())),
        _ => {
            eprintln!("usage: cargo xtask tidy [ROOT]   checks the rules of CONTRIBUTING.md");
            eprintln!("       cargo xtask downloads     checks that no feature's build fetches anything");
            eprintln!("       cargo xtask support       writes the README's table of ops");
            return ExitCode::from(2);
        }
    };
    match checked {
        Ok(problems) if problems.is_empty() => {
            println!("{name}: nothing to complain about");
            ExitCode::SUCCESS
        }
        Ok(problems) => {
            problems.iter().for_each(|p| eprintln!("{p}"));
            eprintln!("{name}: {} to put right", problems.len());
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
