//! The host's side of `tiles.cuh`: descriptors of matrices for Hopper's copy engine, made by the driver, and the launch of a kernel over tiles.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use tilewright_core::{DType, Error, Result};

use super::driver::Address;
use super::{Arg, Cuda, Kernel, library};

/// The text that a kernel over tiles starts with.
macro_rules! tiles {
    ($file:literal) => {
        concat!(
            include_str!("../../runtime/cuda/barriers.cuh"),
            include_str!("../../runtime/cuda/tiles.cuh"),
            include_str!($file)
        )
    };
}
pub(crate) use tiles;

/// Rows of a tile pair and columns of a tile: what two blocks of a cluster make at once.
pub(crate) const PAIR: usize = 256;
/// See [`PAIR`].
pub(crate) const COLUMNS: usize = 256;
const THREADS: usize = 384;
/// Four steps of 64 terms of 128 + 256 rows in 16 bits, and room to align them.
const SHARED: usize = 4 * (128 + 256) * 64 * 2 + 1024;

/// `cuTensorMapEncodeTiled`.
type Encode = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    u32,
    *mut c_void,
    *const u64,
    *const u64,
    *const u32,
    *const u32,
    c_int,
    c_int,
    c_int,
    c_int,
) -> c_int;

/// `CUtensorMap`: 128 bytes that only the driver and the chip look into.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct TensorMap([u64; 16]);

/// The driver's function; drivers before 525.60 have none. Looked for where the driver itself is.
fn encode() -> Option<Encode> {
    static FOUND: OnceLock<Option<Encode>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let driver = library::open(&library::DRIVER).ok()?.library;
        // SAFETY: the symbol has the documented signature; the driver is loaded already, this counts one more user. Never closed.
        unsafe {
            let encode = *driver.get::<Encode>(b"cuTensorMapEncodeTiled\0").ok()?;
            std::mem::forget(driver);
            Some(encode)
        }
    })
}

impl TensorMap {
    /// Whether descriptors can be made at all.
    pub(crate) fn available() -> bool {
        encode().is_some()
    }

    /// Boxes of 64 columns (128 bytes, swizzled) and `box_rows` rows of a matrix of 16-bit floats whose rows lie `ld` elements apart. What a box
    /// has beyond the matrix reads as zero.
    ///
    /// # Errors
    /// The driver refuses these sizes.
    pub(crate) fn new(
        cuda: &Cuda,
        op: &'static str,
        (address, dtype): (Address, DType),
        (rows, columns, ld): (usize, usize, usize),
        box_rows: u32,
    ) -> Result<Self> {
        Self::encode(address, dtype, (rows, columns, ld), box_rows).ok_or_else(|| Error::Driver {
            op,
            device: cuda.name(),
            what: format!("cuTensorMapEncodeTiled refuses {rows} rows of {columns} columns, {ld} apart"),
            hint: "report it with this text".into(),
        })
    }

    fn encode(address: Address, dtype: DType, sizes: (usize, usize, usize), box_rows: u32) -> Option<Self> {
        const FLOAT16: c_int = 6;
        const BFLOAT16: c_int = 9;
        const SWIZZLE_128B: c_int = 3;
        const PROMOTE_128B: c_int = 2;
        let kind = if dtype == DType::BF16 { BFLOAT16 } else { FLOAT16 };
        let mut map = TensorMap([0; 16]);
        let (rows, columns, ld) = sizes;
        let (sizes, strides, boxes, steps) =
            ([columns as u64, rows as u64], [2 * ld as u64], [64, box_rows], [1u32; 2]);
        // SAFETY: arrays of the lengths that rank 2 asks for; the address is not read here.
        let status = unsafe {
            encode()?(
                std::ptr::from_mut(&mut map).cast(),
                kind,
                2,
                address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                0,
                SWIZZLE_128B,
                PROMOTE_128B,
                0,
            )
        };
        (status == 0).then_some(map)
    }
}

/// The one parameter of a kernel over tiles.
pub(crate) struct Job {
    pub(crate) a: TensorMap,
    pub(crate) b: TensorMap,
    pub(crate) pointers: [u64; 4],
    pub(crate) numbers: [usize; 8],
}

/// Pairs of blocks that run at once.
pub(crate) fn clusters(cuda: &Cuda) -> usize {
    (cuda.info().multiprocessors as usize / 2).max(1)
}

impl Job {
    /// Runs over `tiles` pairs of tiles, `early` as [`Cuda::launch_early`]. The struct is passed as its words: a parameter's bytes are read from the place of its first word on.
    pub(crate) fn launch(
        &self,
        cuda: &Cuda,
        op: &'static str,
        kernel: &Kernel,
        tiles: usize,
        early: bool,
    ) -> Result<()> {
        let int = |i: usize| u64::from(self.numbers[i] as u32);
        let numbers = [0, 2, 4, 6].map(|i| int(i) | int(i + 1) << 32);
        let words = self.a.0.iter().chain(&self.b.0).chain(&self.pointers).chain(&numbers);
        let args: Vec<Arg<'_>> = words.map(|&word| Arg::Long(word as i64)).collect();
        let grid = [2 * clusters(cuda).min(tiles), 1, 1];
        if early {
            return cuda.launch_early(op, kernel, grid, THREADS, SHARED, &args);
        }
        cuda.launch(op, kernel, grid, THREADS, SHARED, &args)
    }
}
