//! Finds the shared libraries of CUDA at run time: nothing is linked, so one binary starts on any machine.

use std::path::{Path, PathBuf};

use libloading::Library;

/// Folders to look in before all others, separated as in `PATH`.
pub const FOLDERS_VARIABLE: &str = "TILEWRIGHT_CUDA_LIBS";

/// An opened library and where it came from.
pub(super) struct Loaded {
    pub(super) library: Library,
    pub(super) path: String,
}

/// What was looked for and not found, with every attempt.
#[derive(Clone, Debug)]
pub struct Missing {
    /// The library, in words.
    pub what: &'static str,
    /// How to get it.
    pub hint: &'static str,
    /// The loader's last words.
    pub reason: String,
}

/// A library under its names on Linux and Windows, newest first, and the folders of a Python wheel that ship it.
pub(super) struct Wanted {
    pub(super) what: &'static str,
    pub(super) names: &'static [&'static str],
    pub(super) hint: &'static str,
}

pub(super) const DRIVER: Wanted = Wanted {
    what: "the NVIDIA driver (libcuda)",
    names: if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] },
    hint: "install NVIDIA's driver, version 525 or newer; in a container start it with the GPU passed through",
};

pub(super) const NVRTC: Wanted = Wanted {
    what: "NVRTC, the run-time compiler",
    names: if cfg!(windows) {
        &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
    } else {
        &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    },
    hint: "install the CUDA toolkit 12 or 13, or `pip install nvidia-cuda-nvrtc`, and name its lib folder in TILEWRIGHT_CUDA_LIBS",
};

pub(super) const CUBLASLT: Wanted = Wanted {
    what: "cuBLASLt, the matrix library",
    names: if cfg!(windows) {
        &["cublasLt64_13.dll", "cublasLt64_12.dll"]
    } else {
        &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"]
    },
    hint: "install the CUDA toolkit 12 or 13, or `pip install nvidia-cublas`, and name its lib folder in TILEWRIGHT_CUDA_LIBS",
};

/// Opens the first of a library's names that any folder holds.
pub(super) fn open(wanted: &Wanted) -> Result<Loaded, Missing> {
    let mut reason = String::new();
    let folders = folders();
    // The variable's folders first, then the system's own search, then the places where toolkits and wheels install.
    let (first, rest) = (named_folders(), folders);
    let in_folder = |folder: &PathBuf| wanted.names.iter().map(|n| folder.join(n)).collect::<Vec<_>>();
    let mut tries: Vec<PathBuf> = first.iter().flat_map(in_folder).filter(|p| p.is_file()).collect();
    tries.extend(wanted.names.iter().map(PathBuf::from));
    tries.extend(rest.iter().flat_map(in_folder).filter(|p| p.is_file()));
    for path in tries {
        preload_siblings(&path);
        // SAFETY: these are the vendor's libraries; their initialisers do nothing but register themselves.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok(Loaded { library, path: path.display().to_string() }),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                reason = cause.unwrap_or_else(|| error.to_string());
            }
        }
    }
    Err(Missing { what: wanted.what, hint: wanted.hint, reason })
}

/// NVRTC opens its built-in headers' library by bare name. Where the folder is not on the loader's path, having it open already makes that work.
fn preload_siblings(path: &Path) {
    let nvrtc = path.file_name().is_some_and(|n| n.to_string_lossy().contains("nvrtc"));
    let Some(folder) = path.parent().filter(|p| nvrtc && p.is_dir()) else { return };
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.contains("nvrtc-builtins") && !name.contains(".alt.") {
            // SAFETY: as in `open`. Kept open for the life of the process: NVRTC may ask for it at any time.
            if let Ok(library) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

fn named_folders() -> Vec<PathBuf> {
    std::env::var_os(FOLDERS_VARIABLE).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
}

fn folders() -> Vec<PathBuf> {
    let mut all = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(root) = std::env::var_os(variable).map(PathBuf::from) {
            all.extend(["lib64", "lib", "bin"].map(|sub| root.join(sub)));
        }
    }
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let Some(root) = std::env::var_os(variable).map(PathBuf::from) else { continue };
        all.push(root.join("lib"));
        for python in list(&root.join("lib")).into_iter().filter(|p| p.to_string_lossy().contains("python3")) {
            // Wheels for CUDA 13 share one folder; each wheel for CUDA 12 has its own.
            all.extend(list(&python.join("site-packages").join("nvidia")).into_iter().map(|p| p.join("lib")));
        }
    }
    all.push(PathBuf::from("/usr/local/cuda/lib64"));
    all.push(PathBuf::from("/usr/lib/wsl/lib"));
    all
}

fn list(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
    all.sort();
    all
}

/// Declares a table of a library's functions, filled by name.
macro_rules! functions {
    ($(#[$doc:meta])* struct $Table:ident returns $Status:ty { $($field:ident = $symbol:literal ($($t:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        pub(super) struct $Table {
            pub(super) path: String,
            $(pub(super) $field: unsafe extern "C" fn($($t),*) -> $Status,)*
        }

        impl $Table {
            pub(super) fn load(wanted: &$crate::runtime::cuda::library::Wanted) -> Result<Self, $crate::runtime::cuda::library::Missing> {
                let loaded = $crate::runtime::cuda::library::open(wanted)?;
                $(
                    // SAFETY: the vendor's documented signature of this symbol.
                    let $field = unsafe {
                        let symbol = loaded.library.get::<unsafe extern "C" fn($($t),*) -> $Status>(concat!($symbol, "\0").as_bytes());
                        *symbol.map_err(|error| $crate::runtime::cuda::library::Missing {
                            what: wanted.what,
                            hint: "it is too old; update it",
                            reason: format!("{}: {error}", loaded.path),
                        })?
                    };
                )*
                // Never closed: the pointers are copied about, and these libraries take long to open again.
                std::mem::forget(loaded.library);
                Ok($Table { path: loaded.path, $($field,)* })
            }
        }
    };
}
pub(super) use functions;
