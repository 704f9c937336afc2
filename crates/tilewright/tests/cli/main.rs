//! The program as a user meets it: what it prints, what it writes and how it ends.

mod bench_load;
mod bench_step;
mod convert;
mod data;
mod decide;
mod doctor;
mod plan;
mod usage;

use std::path::Path;
use std::process::Command;

/// What a run of the program left behind.
struct Run {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Run {
    /// Its standard output, of a run that must have gone well.
    fn ok(self) -> String {
        assert_eq!(self.code, Some(0), "{}", self.err);
        self.out
    }

    /// Its complaint, of a run that must have failed in its work: exit code 1, `error: ` first, nothing of a panic.
    fn failed(self) -> String {
        assert_eq!(self.code, Some(1), "{}{}", self.out, self.err);
        assert!(self.err.starts_with("error: ") && !self.err.contains("panicked"), "{}", self.err);
        self.err
    }

    /// Its complaint, of a run whose command line must have been refused: exit code 2.
    fn refused(self) -> String {
        assert_eq!(self.code, Some(2), "{}{}", self.out, self.err);
        self.err
    }
}

/// Runs the program in a folder, with nothing of the caller's settings.
fn tilewright_in(folder: &Path, args: &[&str], environment: &[(&str, &str)]) -> Run {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tilewright"));
    command.current_dir(folder).args(args).env_remove("TILEWRIGHT_THREADS").env_remove("TILEWRIGHT_ISA");
    command.envs(environment.iter().copied());
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Run { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

fn tilewright(args: &[&str]) -> Run {
    tilewright_in(Path::new("."), args, &[])
}
