//! C++ compiled by the system's compiler, kept by its content.

use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use libloading::Library;

use super::machine::{API, Api, Entry};

const HEADER: &str = include_str!("metal_stdlib");

/// No function of the text throws or is inlined from elsewhere; what it does to floats is what it says; types are looked at as others.
const FLAGS: &[&str] = &[
    "-std=c++20",
    "-O1",
    "-fPIC",
    "-shared",
    "-w",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-fno-rtti",
];

/// The system's C++ compiler.
pub(super) struct Compiler {
    program: String,
    /// What it says that it is.
    version: String,
    flags: Vec<String>,
    folder: PathBuf,
}

/// A compiled text; loaded for the life of the process.
#[derive(Clone, Copy)]
pub(super) struct Object {
    pub(super) entry: Entry,
}

impl Compiler {
    /// The one of this system: `CXX`, or the first of the usual names. The error says what was tried. `TILEWRIGHT_EMULATOR_FLAGS` adds flags.
    pub(super) fn here() -> Result<&'static Compiler, String> {
        static HERE: OnceLock<Result<Compiler, String>> = OnceLock::new();
        HERE.get_or_init(Compiler::look).as_ref().map_err(Clone::clone)
    }

    fn look() -> Result<Compiler, String> {
        if !super::fibre::SUPPORTED {
            return Err("the emulator knows x86-64 and AArch64 under Unix".into());
        }
        let names: Vec<String> = match std::env::var("CXX") {
            Ok(name) if !name.trim().is_empty() => vec![name],
            _ => ["c++", "g++", "clang++"].map(str::to_owned).to_vec(),
        };
        let mut said = Vec::new();
        for program in names {
            let version = match Command::new(&program).arg("--version").output() {
                Ok(out) if out.status.success() => String::from_utf8_lossy(&out.stdout).into_owned(),
                Ok(out) => {
                    said.push(format!("{program}: {}", out.status));
                    continue;
                }
                Err(error) => {
                    said.push(format!("{program}: {error}"));
                    continue;
                }
            };
            let more = std::env::var("TILEWRIGHT_EMULATOR_FLAGS").unwrap_or_default();
            let flags =
                FLAGS.iter().map(|f| (*f).to_owned()).chain(more.split_whitespace().map(str::to_owned)).collect();
            let compiler = Compiler { program, version, flags, folder: folder()? };
            // An old one does not know the language or f16.
            match compiler.object("#include <metal_stdlib>\n") {
                Ok(_) => return Ok(compiler),
                Err(error) => said.push(format!("{}: {error}", compiler.program)),
            }
        }
        Err(format!("no C++20 compiler with _Float16: {}", said.join("; ")))
    }

    /// Compiles a text, unless that was done before, and loads it.
    pub(super) fn build(&self, source: &str) -> Result<(Object, PathBuf), String> {
        let path = self.object(source)?;
        // SAFETY: the object was made from a translated text, which runs nothing when it is loaded.
        let library = unsafe { Library::new(&path) }.map_err(|e| format!("{}: {e}", path.display()))?;
        // Unloading one that a thread may still run is not worth the memory.
        let library: &'static Library = Box::leak(Box::new(library));
        let missing = |e: libloading::Error| format!("{}: {e}", path.display());
        // SAFETY: `translate` defines both with these types.
        unsafe {
            let bind = library.get::<unsafe extern "C" fn(*const Api)>(b"emulator_bind\0").map_err(missing)?;
            bind(&API);
            let entry = *library.get::<Entry>(b"emulator_thread\0").map_err(missing)?;
            Ok((Object { entry }, path.with_extension("cpp")))
        }
    }

    /// The path of the compiled text.
    fn object(&self, source: &str) -> Result<PathBuf, String> {
        let mut hasher = DefaultHasher::new();
        (HEADER, source, &self.program, &self.version, &self.flags).hash(&mut hasher);
        let path = self.folder.join(format!("{:016x}.so", hasher.finish()));
        if path.exists() {
            return Ok(path);
        }
        let text = path.with_extension("cpp");
        let failed = |what: &Path, error: std::io::Error| format!("{}: {error}", what.display());
        std::fs::create_dir_all(&self.folder).map_err(|e| failed(&self.folder, e))?;
        let header = self.folder.join("metal_stdlib");
        whole(&header, HEADER.as_bytes()).map_err(|e| failed(&header, e))?;
        whole(&text, source.as_bytes()).map_err(|e| failed(&text, e))?;
        let made = unique(&path);
        let out = Command::new(&self.program)
            .args(&self.flags)
            .arg("-I")
            .arg(&self.folder)
            .args([OsStr::new("-x"), OsStr::new("c++"), text.as_os_str(), OsStr::new("-o"), made.as_os_str()])
            .arg("-lm")
            .output()
            .map_err(|e| failed(Path::new(&self.program), e))?;
        if !out.status.success() {
            let said = String::from_utf8_lossy(&out.stderr);
            let said: Vec<_> = said.lines().take(12).collect();
            return Err(format!("{} refuses {}: {}", self.program, text.display(), said.join("\n")));
        }
        std::fs::rename(&made, &path).map_err(|e| failed(&path, e))?;
        Ok(path)
    }
}

/// A name beside `path` that no other thread or process takes.
fn unique(path: &Path) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    path.with_extension(format!("{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)))
}

/// Writes a file that others may read meanwhile.
fn whole(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if std::fs::read(path).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    let made = unique(path);
    std::fs::File::create(&made)?.write_all(bytes)?;
    std::fs::rename(made, path)
}

/// Beside what cargo has built: it goes when that goes.
fn folder() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|e| e.to_string())?;
    let target = program.ancestors().nth(3).ok_or("the program lies in no folder")?;
    Ok(target.join("metal-emulator"))
}
