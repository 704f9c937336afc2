//! Descriptors of matrices for Hopper's copy engine, made by the driver on the host.

use std::ffi::{c_int, c_void};
use std::sync::OnceLock;

use tilewright_core::DType;

use crate::Tensor;

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
pub(super) struct TensorMap(pub(super) [u64; 16]);

/// The driver's function; drivers before 525.60 have none.
fn encode() -> Option<Encode> {
    static FOUND: OnceLock<Option<Encode>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        let names = if cfg!(windows) { ["nvcuda.dll"; 2] } else { ["libcuda.so.1", "libcuda.so"] };
        names.into_iter().find_map(|name| {
            // SAFETY: the driver is loaded already, this counts one more user; the symbol has the documented signature. Never closed.
            unsafe {
                let library = libloading::Library::new(name).ok()?;
                let encode = *library.get::<Encode>(b"cuTensorMapEncodeTiled\0").ok()?;
                std::mem::forget(library);
                Some(encode)
            }
        })
    })
}

impl TensorMap {
    /// Whether descriptors can be made at all.
    pub(super) fn available() -> bool {
        encode().is_some()
    }

    /// Boxes of 64 columns (128 bytes, swizzled) and `box_rows` rows of a matrix of 16-bit floats whose rows lie `ld` elements apart. What a box
    /// has beyond the matrix reads as zero. `None`: the driver refuses these sizes.
    pub(super) fn new(matrix: &Tensor, rows: usize, columns: usize, ld: usize, box_rows: u32) -> Option<Self> {
        const FLOAT16: c_int = 6;
        const BFLOAT16: c_int = 9;
        const SWIZZLE_128B: c_int = 3;
        const PROMOTE_128B: c_int = 2;
        let kind = if matrix.dtype() == DType::BF16 { BFLOAT16 } else { FLOAT16 };
        let mut map = TensorMap([0; 16]);
        let (sizes, strides, boxes, steps) =
            ([columns as u64, rows as u64], [2 * ld as u64], [64, box_rows], [1u32; 2]);
        // SAFETY: arrays of the lengths that rank 2 asks for; the address is not read here.
        let status = unsafe {
            encode()?(
                std::ptr::from_mut(&mut map).cast(),
                kind,
                2,
                matrix.cuda_address() as *mut c_void,
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
