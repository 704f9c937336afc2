//! Kernels as text: what is compiled, in which variants, and the compiled images on disk.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use sha2::{Digest, Sha256};
use tilewright_core::DType;

use super::nvrtc::Nvrtc;

/// What every kernel may use: element types, packs of 16 bytes, reductions in a fixed order. No toolkit header is included anywhere.
const PRELUDE: &str = include_str!("prelude.cuh");

/// A file of kernels.
pub struct Source {
    /// `<op>/<file>.cu`, for messages and the resource report.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// The macros that a variant gives values to.
    pub parameters: &'static [&'static str],
    /// Every combination of values that a program may ask for: what the offline check compiles.
    pub variants: &'static [&'static [i64]],
    /// Compile without joining products and sums, where the bits must be those of the CPU.
    pub exact: bool,
}

/// The values of [`Source::parameters`]; unused places are 0.
pub(crate) type Values = [i64; 4];

/// The code by which kernels know a storage type.
pub(crate) fn code(dtype: DType) -> i64 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        other => unreachable!("{other} is not a float type; the op's check let it through"),
    }
}

/// The three storage types, as variants of a source with the one parameter `TW_DTYPE`.
pub(crate) const FLOATS: &[&[i64]] = &[&[0], &[1], &[2]];

impl Source {
    /// The whole text handed to the compiler. Line numbers in messages are those of the file.
    ///
    /// `TILEWRIGHT_CUDA_SOURCES` names a folder whose `<op>/<file>.cu`, where it exists, is taken instead: to try a kernel without building.
    pub fn full_text(&self) -> String {
        self.with_prelude(self.changed().as_deref().unwrap_or(self.text))
    }

    /// A text as it is handed to the compiler.
    pub(super) fn with_prelude(&self, text: &str) -> String {
        format!("{PRELUDE}\n#line 1 \"{}\"\n{text}", self.name)
    }

    /// The text that takes the place of the built-in one.
    fn changed(&self) -> Option<String> {
        static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
        let folder = FOLDER.get_or_init(|| std::env::var_os("TILEWRIGHT_CUDA_SOURCES").map(PathBuf::from));
        std::fs::read_to_string(folder.as_ref()?.join(self.name)).ok()
    }

    /// A number of the host's side of a launch (queries of a block, threads, bytes), which a changed text may say otherwise by a line `//@ NAME NUMBER`.
    pub(crate) fn number(&self, name: &str, built_in: usize) -> usize {
        self.changed().and_then(|text| said(&text, name)).unwrap_or(built_in)
    }

    /// The options of one variant for an architecture such as `sm_90a`.
    pub fn options(&self, architecture: &str, values: &[i64]) -> Vec<String> {
        let mut options = vec![
            format!("--gpu-architecture={architecture}"),
            "--std=c++17".to_owned(),
            "--device-as-default-execution-space".to_owned(),
            "--ptxas-options=-v".to_owned(),
            format!("--fmad={}", !self.exact),
        ];
        options
            .extend(self.parameters.iter().zip(values).map(|(name, value)| format!("--define-macro={name}={value}")));
        options
    }
}

/// The architecture to compile for: Hopper and later have instructions only under their own name with an `a`.
pub fn architecture((major, minor): (i32, i32)) -> String {
    let suffix = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{suffix}")
}

/// Where compiled images are kept; `None` keeps none.
pub fn cache_folder() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("TILEWRIGHT_CACHE").or_else(|| set("XDG_CACHE_HOME").map(|p| p.join("tilewright")));
    base.or_else(|| set("HOME").map(|p| p.join(".cache").join("tilewright"))).map(|p| p.join("cuda"))
}

/// The number that a text says by `//@ NAME NUMBER`.
fn said(text: &str, name: &str) -> Option<usize> {
    let words = text.lines().filter_map(|line| line.strip_prefix("//@ ")?.split_once(' '));
    words.filter(|(word, _)| *word == name).find_map(|(_, number)| number.trim().parse().ok())
}

const MAGIC: &[u8; 8] = b"twcubin1";

/// The image of one variant: from the folder, or compiled and put there. The error is the compiler's log.
pub(super) fn image(
    nvrtc: &Nvrtc,
    source: &Source,
    architecture: &str,
    values: &[i64],
    folder: Option<&Path>,
) -> Result<Vec<u8>, String> {
    let (text, options) = (source.full_text(), source.options(architecture, values));
    let mut hash = Sha256::new();
    for part in [text.as_str(), &options.join(" "), &format!("{:?}", nvrtc.version())] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    let key: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    let path = folder.map(|f| f.join(format!("{key}.cubin")));
    if let Some(image) = path.as_deref().and_then(read) {
        return Ok(image);
    }
    let compiled = nvrtc.compile(source.name, &text, &options)?;
    if let Some(path) = path {
        // A cache that cannot be written costs time at the next start and nothing else.
        let _ = write(&path, &compiled.image);
    }
    Ok(compiled.image)
}

/// A cached image: magic, the hash of what follows, the image. Anything else is treated as absent.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (magic, rest) = bytes.split_at_checked(MAGIC.len())?;
    let (sum, image) = rest.split_at_checked(32)?;
    (magic == MAGIC && Sha256::digest(image)[..] == *sum && !image.is_empty()).then(|| image.to_vec())
}

fn write(path: &Path, image: &[u8]) -> tilewright_core::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(tilewright_core::Error::io("create", folder))?;
    }
    let mut file = tilewright_core::fs::AtomicFile::create(path)?;
    file.write(MAGIC)?;
    file.write(&Sha256::digest(image))?;
    file.write(image)?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_image_is_read_back_and_a_damaged_one_is_not() {
        let folder = std::env::temp_dir().join(format!("tilewright-cubin-{}", std::process::id()));
        let path = folder.join("x.cubin");
        write(&path, b"machine code").unwrap();
        assert_eq!(read(&path).unwrap(), b"machine code");
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        assert!(read(&path).is_none(), "a flipped bit");
        std::fs::write(&path, &bytes[..20]).unwrap();
        assert!(read(&path).is_none(), "cut short");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_text_says_numbers_of_the_launch_by_name() {
        let text = "//@ threads 416\n//@ threads_more 1\n// @ shared 7\n//@ queries many\nint x;\n";
        assert_eq!(said(text, "threads"), Some(416));
        assert_eq!((said(text, "shared"), said(text, "queries"), said(text, "thread")), (None, None, None));
        assert_eq!(crate::gelu::cuda::SOURCE.number("threads", 256), 256, "a built-in text keeps the built-in number");
    }

    #[test]
    fn hopper_and_later_are_compiled_for_under_their_own_name() {
        assert_eq!(architecture((8, 0)), "sm_80");
        assert_eq!(architecture((9, 0)), "sm_90a");
        assert_eq!(architecture((12, 0)), "sm_120a");
    }
}
