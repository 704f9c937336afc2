//! The ring of distinct inputs: drawn once, written as raw little-endian files, named by their SHA-256.

use std::path::Path;

use sha2::{Digest, Sha256};
use tilewright_core::{Error, Result};

use crate::plan::{Case, Distribution, TensorSpec};
use crate::protocol::InputFile;
use crate::rng::SplitMix;

/// Draws and writes all inputs of a case into `folder`.
pub fn write_ring(case: &Case, seed: u64, folder: &Path) -> Result<Vec<InputFile>> {
    let mut files = Vec::new();
    for index in 0..case.ring {
        for tensor in &case.tensors {
            let bytes = draw(tensor, SplitMix::for_purpose(seed, &format!("{}/{}/{index}", case.name, tensor.name)));
            let path = folder.join(format!("{}-{index}.bin", tensor.name));
            std::fs::write(&path, &bytes).map_err(Error::io("write", &path))?;
            files.push(InputFile {
                index,
                name: tensor.name.clone(),
                path: path.to_string_lossy().into_owned(),
                shape: tensor.shape.clone(),
                dtype: dtype(tensor).to_owned(),
                sha256: sha256(&bytes),
            });
        }
    }
    Ok(files)
}

fn dtype(tensor: &TensorSpec) -> &'static str {
    match tensor.distribution {
        Distribution::Normal { .. } => "f32",
        Distribution::Uniform { .. } | Distribution::Zipf { .. } => "i32",
        Distribution::Bytes => "u8",
    }
}

fn draw(tensor: &TensorSpec, mut rng: SplitMix) -> Vec<u8> {
    let n: usize = tensor.shape.iter().product();
    let mut bytes = Vec::with_capacity(n * 4);
    match tensor.distribution {
        Distribution::Normal { std } => (0..n).for_each(|_| bytes.extend(((rng.normal() * std) as f32).to_le_bytes())),
        Distribution::Uniform { high } => {
            (0..n).for_each(|_| bytes.extend((rng.below(high as usize) as i32).to_le_bytes()))
        }
        Distribution::Zipf { high, ignored } => {
            for _ in 0..n {
                // The integral of 1 / x, inverted: e^(u ln(high + 1)) has the density 1 / x on 1..=high.
                let value = ((high as f64 + 1.0).ln() * rng.uniform()).exp() as u32 - 1;
                let value = if rng.uniform() < ignored { -100 } else { value.min(high - 1) as i32 };
                bytes.extend(value.to_le_bytes());
            }
        }
        Distribution::Bytes => (0..n).for_each(|_| bytes.push(rng.next_u64() as u8)),
    }
    bytes
}

/// In hexadecimal.
pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// Of a file that may be large.
pub fn sha256_of_file(path: &Path) -> Option<String> {
    let mut hasher = Sha256::new();
    std::io::copy(&mut std::fs::File::open(path).ok()?, &mut hasher).ok()?;
    Some(hex(&hasher.finalize()))
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(distribution: Distribution) -> TensorSpec {
        TensorSpec { name: "x".into(), shape: vec![100, 100], distribution }
    }

    fn ints(bytes: &[u8]) -> Vec<i32> {
        bytes.chunks(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    }

    #[test]
    fn zipf_has_a_heavy_tail_and_ignored_rows() {
        let values = ints(&draw(&spec(Distribution::Zipf { high: 50257, ignored: 0.1 }), SplitMix::new(1)));
        let ignored = values.iter().filter(|v| **v == -100).count();
        assert!((800..1200).contains(&ignored), "{ignored}");
        assert!(values.iter().all(|v| *v == -100 || (0..50257).contains(v)));
        let (first, rare) =
            (values.iter().filter(|v| **v == 0).count(), values.iter().filter(|v| **v > 10_000).count());
        assert!(first > 400 && rare > 1000, "{first} {rare}");
    }

    #[test]
    fn uniform_values_stay_below_the_end() {
        let values = ints(&draw(&spec(Distribution::Uniform { high: 7 }), SplitMix::new(1)));
        assert!((0..7).all(|v| values.contains(&v)) && values.iter().all(|v| (0..7).contains(v)));
    }

    #[test]
    fn a_ring_is_distinct_and_the_same_again_for_the_same_seed() {
        let folder = tempfile::tempdir().unwrap();
        let tensors = vec![spec(Distribution::Normal { std: 1.0 })];
        let case = Case { name: "c".into(), params: Default::default(), ring: 4, tensors };
        let digests =
            |seed| write_ring(&case, seed, folder.path()).unwrap().into_iter().map(|f| f.sha256).collect::<Vec<_>>();
        let first = digests(1);
        assert_eq!(first, digests(1));
        assert_ne!(first, digests(2));
        assert!(first.iter().enumerate().all(|(i, d)| !first[..i].contains(d)));
        let file = folder.path().join("x-0.bin");
        assert_eq!(sha256_of_file(&file).unwrap(), digests(2)[0]);
        assert_eq!(std::fs::metadata(&file).unwrap().len(), 40_000);
    }
}
