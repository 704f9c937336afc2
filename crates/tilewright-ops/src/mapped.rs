//! Files in memory: weights that are used where they lie on disk.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use memmap2::Mmap;
use tilewright_core::{DType, Error, Result};

/// A whole file, mapped read-only. [`crate::Tensor::mapped`] makes tensors of parts of it, which keep it mapped.
///
/// The file must not be changed while it is mapped: the system shows the change to the reader, and a file that was cut ends the program.
/// Writers that make a new file and rename it do no harm, since the mapping keeps the old one. Who cannot rely on that copies by [`MappedFile::read`], which
/// survives a cut.
pub struct MappedFile {
    map: Mmap,
    file: File,
    path: PathBuf,
}

impl MappedFile {
    /// Maps a file; an empty one too.
    pub fn open(path: &Path) -> Result<Rc<Self>> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        // SAFETY: the type's words pass on to the caller that nobody changes the file meanwhile.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        Ok(Rc::new(MappedFile { map, file, path: path.to_owned() }))
    }

    /// Reads the bytes from `offset` on into `out`, by the system's call and not through the mapping.
    ///
    /// # Errors
    /// A file that has been cut since it was opened, or that cannot be read.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        let mut file = &self.file;
        let result = file.seek(SeekFrom::Start(offset as u64)).and_then(|_| file.read_exact(out));
        result.map_err(|e| match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                let what = format!("the file ends before byte {}", offset + out.len());
                Error::format(
                    &self.path,
                    offset as u64,
                    what,
                    "the file was cut while it was read; load it when it is complete",
                )
            }
            _ => Error::io("read", &self.path)(e),
        })
    }

    /// Bytes of the file when it was opened.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether it was empty then.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The bytes of the file. Those never looked at are never read from disk.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Gives the memory of the pages read so far back to the system. They are read again, from the system's cache or from disk, when they are
    /// looked at again; tensors of the file stay valid.
    pub fn forget_pages(&self) {
        #[cfg(unix)]
        // SAFETY: the mapping is read-only and of a file, so a page that was dropped comes back with the file's bytes: nothing is lost.
        let _ = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
    }

    /// Where the file lay when it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether elements of `dtype` can be used where they lie from byte `offset` on.
    pub fn is_aligned(&self, offset: usize, dtype: DType) -> bool {
        // A mapping starts at a page, which every element size divides.
        offset.is_multiple_of(dtype.size())
    }

    /// `elements` (`None`: more than can be counted) of `dtype` lie inside the file, at multiples of their size.
    pub(crate) fn check_range(&self, offset: usize, elements: Option<usize>, dtype: DType) -> Result<()> {
        let end = elements.and_then(|n| n.checked_mul(dtype.size())).and_then(|n| n.checked_add(offset));
        if end.is_none_or(|end| end > self.map.len()) {
            let count = elements.map_or("countless".into(), |n| n.to_string());
            let what = format!("{count} elements of {dtype} do not fit the file's {} bytes", self.map.len());
            return Err(Error::format(&self.path, offset as u64, what, "the file was cut short; fetch it again"));
        }
        if !self.is_aligned(offset, dtype) {
            let what = format!("elements of {dtype} do not start at a multiple of {} bytes", dtype.size());
            let hint = "such a tensor cannot be used in place: copy it, or write the file again with aligned tensors";
            return Err(Error::format(&self.path, offset as u64, what, hint));
        }
        Ok(())
    }
}

impl std::fmt::Debug for MappedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({} bytes, mapped)", self.path.display(), self.map.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::FLOATS;
    use crate::{Device, Tensor, gelu, global_norm, layernorm, matmul, sampling};

    /// A file of these bytes, gone from its folder at once: the mapping keeps it.
    fn file(name: &str, bytes: &[u8]) -> Rc<MappedFile> {
        let path = std::env::temp_dir().join(format!("tilewright-mapped-{}-{name}", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        let file = MappedFile::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn device() -> Device {
        Device::cpu_with_threads(2)
    }

    /// A tensor of the given values in a file, behind `lead` other bytes.
    fn mapped(device: &Device, name: &str, dtype: DType, shape: &[usize], values: &[f32], lead: usize) -> Tensor {
        let plain = Tensor::from_f32(device, dtype, shape, values).unwrap();
        let mut bytes = vec![0xAB; lead + plain.bytes()];
        plain.read_bytes(0, &mut bytes[lead..]).unwrap();
        Tensor::mapped(device, &file(name, &bytes), lead, dtype, shape).unwrap()
    }

    #[test]
    fn values_of_every_float_type_are_read_where_they_lie() {
        let values = [1.0, -2.5, 0.0, 1024.0, 0.125, -7.0];
        for dtype in FLOATS {
            let t = mapped(&device(), &format!("values-{dtype}"), dtype, &[2, 3], &values, 8);
            assert_eq!(t.read_f32().unwrap(), values);
            assert_eq!(t.index(1).unwrap().read_f32().unwrap(), values[3..]);
            assert!(t.is_read_only() && t.slice(2, &[2]).unwrap().is_read_only());
        }
    }

    #[test]
    fn the_tensor_outlives_the_handle_of_the_file() {
        let t = mapped(&device(), "outlives", DType::F32, &[1024], &[3.0; 1024], 0);
        let part = t.slice(1000, &[24]).unwrap();
        drop(t);
        assert_eq!(part.read_f32().unwrap(), [3.0; 24]);
    }

    #[test]
    fn forgotten_pages_come_back_with_the_same_bytes() {
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i * 7) as u8).collect();
        let file = file("forget", &bytes);
        let t = Tensor::mapped(&device(), &file, 4096, DType::F16, &[1000]).unwrap();
        let before = t.read_f32().unwrap();
        file.forget_pages();
        assert!(
            file.bytes() == bytes && t.read_f32().unwrap().iter().zip(&before).all(|(a, b)| a.to_bits() == b.to_bits())
        );
    }

    #[test]
    fn a_file_that_was_cut_is_an_error_when_it_is_read_and_not_the_end_of_the_program() {
        let path = std::env::temp_dir().join(format!("tilewright-mapped-{}-cut", std::process::id()));
        std::fs::write(&path, [7; 10_000]).unwrap();
        let file = MappedFile::open(&path).unwrap();
        let mut out = [0; 5_000];
        file.read(4_000, &mut out).unwrap();
        assert_eq!(out, [7; 5_000]);
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(4_500).unwrap();
        let error = file.read(4_000, &mut out).unwrap_err().to_string();
        assert!(error.contains("ends before byte 9000") && error.contains("cut"), "{error}");
        assert_eq!(file.len(), 10_000, "what it was");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_mapped_file_counts_as_no_arena() {
        let device = device();
        let file = file("live", &[0; 4096]);
        let t = Tensor::mapped(&device, &file, 0, DType::F32, &[1024]).unwrap();
        assert_eq!((device.live_bytes(), t.bytes()), (0, 4096));
    }

    #[test]
    fn the_null_device_maps_and_counts_nothing() {
        let device = Device::null(1);
        let t = Tensor::mapped(&device, &file("null", &[7; 64]), 16, DType::F16, &[3, 8]).unwrap();
        assert_eq!((device.live_bytes(), t.read_f32().unwrap()), (0, vec![0.0; 24]));
    }

    #[test]
    fn elements_off_their_alignment_are_refused_with_file_and_byte() {
        let (device, file) = (device(), file("misaligned", &[0; 64]));
        for (dtype, offset) in [(DType::F32, 2), (DType::F32, 5), (DType::F16, 1), (DType::BF16, 7), (DType::F32, 63)] {
            let error = Tensor::mapped(&device, &file, offset, dtype, &[0]).unwrap_err();
            assert!(matches!(error, Error::Format { .. }));
            let message = error.to_string();
            let words = ["misaligned", &format!("byte {offset}"), &format!("multiple of {} bytes", dtype.size())];
            assert!(words.iter().all(|w| message.contains(w)), "{message}");
            assert!(!file.is_aligned(offset, dtype));
        }
        for (dtype, offset) in [(DType::F16, 2), (DType::BF16, 6), (DType::F32, 4), (DType::F32, 64)] {
            assert!(file.is_aligned(offset, dtype));
            Tensor::mapped(&device, &file, offset, dtype, &[0]).unwrap();
        }
    }

    #[test]
    fn elements_beyond_the_end_are_refused_even_where_sizes_overflow() {
        let (device, file) = (device(), file("short", &[0; 64]));
        Tensor::mapped(&device, &file, 0, DType::F32, &[16]).unwrap();
        for (offset, shape) in [
            (0, &[17][..]),
            (4, &[16]),
            (usize::MAX - 3, &[1]),
            (0, &[usize::MAX / 2]),
            (0, &[usize::MAX, usize::MAX]),
            (68, &[0]),
        ] {
            let error = Tensor::mapped(&device, &file, offset, DType::F32, shape).unwrap_err();
            assert!(error.to_string().contains("do not fit the file's 64 bytes"), "{error}");
        }
    }

    #[test]
    fn an_empty_file_holds_empty_tensors() {
        let file = file("empty", &[]);
        let t = Tensor::mapped(&device(), &file, 0, DType::F32, &[0, 5]).unwrap();
        assert!(t.read_f32().unwrap().is_empty() && file.bytes().is_empty());
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = MappedFile::open(Path::new("no/such/weights")).unwrap_err();
        assert!(matches!(error, Error::Io { .. }) && error.to_string().contains("no/such/weights"), "{error}");
    }

    #[test]
    fn every_way_to_write_refuses_a_mapped_tensor() {
        let device = device();
        let t = mapped(&device, "writes", DType::F32, &[4], &[1.0; 4], 0);
        let other = Tensor::zeros(&device, DType::F32, &[4]).unwrap();
        let integers = t.reinterpret(0, DType::I32, &[4]).unwrap();
        for (result, op) in [
            (t.write_f32(&[0.0; 4]), "tensor.write_f32"),
            (integers.write_i32(&[0; 4]), "tensor.write_i32"),
            (t.write_bytes(0, &[0]), "tensor.write_bytes"),
            (t.copy_from(&other), "tensor.copy_from"),
        ] {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::ReadOnly { .. }) && error.to_string().contains(op), "{error}");
        }
        assert_eq!(t.read_f32().unwrap(), [1.0; 4]);
        other.copy_from(&t).unwrap();
        assert_eq!(other.read_f32().unwrap(), [1.0; 4]);
    }

    #[test]
    fn ops_refuse_a_mapped_output_and_take_mapped_inputs() {
        let device = device();
        let m = |shape: &[usize]| {
            let n: usize = shape.iter().product();
            mapped(&device, &format!("ops-{n}"), DType::F32, shape, &vec![0.5; n], 0)
        };
        let z = |shape: &[usize]| Tensor::zeros(&device, DType::F32, shape).unwrap();
        let refused = |result: Result<()>, op: &str| {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::ReadOnly { .. }) && error.to_string().contains(op), "{op}: {error}");
        };
        let kind = gelu::Gelu::Erf;
        let run = |x: &Tensor, out: &Tensor| gelu::forward(&device, &gelu::Forward { kind, x, out });
        refused(run(&z(&[8]), &m(&[8])), "gelu.forward");
        run(&m(&[8]), &z(&[8])).unwrap();
        let (x, dx) = (z(&[8]), m(&[8]));
        let in_place = gelu::Backward { kind, x: &x, dout: &dx, dx: &dx };
        refused(gelu::backward(&device, &in_place), "gelu.backward");
        refused(global_norm::forward(&device, &global_norm::Forward { tensors: &[], out: &m(&[1]) }), "write_f32");
        let (x, weight, row, column) = (z(&[2, 4]), m(&[3, 4]), z(&[2]), m(&[2]));
        let linear = |out: &Tensor| {
            let args = matmul::Forward { x: &x, weight: &weight, bias: None, gelu: None, pre_gelu: None, out };
            matmul::forward(&device, &args)
        };
        linear(&z(&[2, 3])).unwrap();
        refused(linear(&m(&[2, 3])), "`out`");
        let norm = |out: &Tensor, rstd: &Tensor| {
            let weight = m(&[4]);
            let args = layernorm::Forward {
                x: &x,
                residual: None,
                weight: &weight,
                bias: None,
                eps: 1e-5,
                out,
                mean: &row,
                rstd,
            };
            layernorm::forward(&device, &args)
        };
        refused(norm(&m(&[2, 4]), &z(&[2])), "`out`");
        refused(norm(&z(&[2, 4]), &column), "`rstd`");
        norm(&z(&[2, 4]), &z(&[2])).unwrap();
        let draw = sampling::Forward {
            logits: &z(&[1, 4]),
            vocab: 4,
            temperature: 0.0,
            top_k: 0,
            coins: &[0.5],
            out: &m(&[1]).reinterpret(0, DType::I32, &[1]).unwrap(),
        };
        refused(sampling::forward(&device, &draw), "sampling.forward");
    }
}
