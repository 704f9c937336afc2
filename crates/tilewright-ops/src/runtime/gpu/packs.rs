//! Eight elements of a row at a time, by 16 bytes of memory: a unit's reads and writes where rows are whole packs.

use cubecl::prelude::*;
use tilewright_core::Result;

use super::Core;
use super::math::{kept_bf16, kept_f16};
use crate::Tensor;

/// Eight elements of 16 bits.
pub(crate) type Pack = Vector<u32, Const<4>>;

/// Four sums: fragments are stored by 16 bytes.
pub(crate) type Quad = Vector<f32, Const<4>>;

/// What a factor keeps of an f32, in 16 bits.
#[cube]
pub(crate) fn short(x: f32, #[comptime] bf16: bool) -> u32 {
    if comptime![bf16] { kept_bf16(x) } else { u32::cast_from(u16::reinterpret(half::f16::cast_from(kept_f16(x)))) }
}

/// `pack`, or zeros.
#[cube]
pub(crate) fn only_if(alive: bool, pack: Pack) -> Pack {
    let mut kept = Pack::new(0u32);
    #[unroll]
    for i in 0..4usize {
        kept.insert(i, select(alive, pack.extract(i), 0u32));
    }
    kept
}

/// Eight numbers in the factors' type.
#[cube]
pub(crate) fn packed(values: &Array<f32>, #[comptime] bf16: bool) -> Pack {
    let mut pack = Pack::new(0u32);
    #[unroll]
    for i in 0..4usize {
        pack.insert(i, short(values[i * 2], bf16) | (short(values[i * 2 + 1], bf16) << 16u32));
    }
    pack
}

/// Writes eight numbers from element `at` on, a multiple of eight.
#[cube]
pub(crate) fn put_eight(
    packs: &mut [Pack],
    at: usize,
    values: &Array<f32>,
    #[comptime] wide: bool,
    #[comptime] bf16: bool,
) {
    if comptime![wide] {
        let mut low = Pack::new(0u32);
        let mut high = Pack::new(0u32);
        #[unroll]
        for i in 0..4usize {
            low.insert(i, u32::reinterpret(values[i]));
            high.insert(i, u32::reinterpret(values[i + 4]));
        }
        packs[at / 4] = low;
        packs[at / 4 + 1] = high;
    } else {
        packs[at / 8] = packed(values, bf16);
    }
}

/// Eight numbers of one pack, or of two where they are f32.
#[cube]
pub(crate) fn unpack(pack: Pack, next: Pack, values: &mut Array<f32>, #[comptime] wide: bool, #[comptime] bf16: bool) {
    #[unroll]
    for i in 0..4usize {
        if comptime![wide] {
            values[i] = f32::reinterpret(pack.extract(i));
            values[i + 4] = f32::reinterpret(next.extract(i));
        } else {
            let word = pack.extract(i);
            values[i * 2] = long(word & 0xFFFFu32, bf16);
            values[i * 2 + 1] = long(word >> 16u32, bf16);
        }
    }
}

/// Packs that hold eight numbers, and the second of them behind the first.
#[cube]
pub(crate) fn pack_at(at: usize, #[comptime] wide: bool) -> (usize, usize) {
    if comptime![wide] { (at / 4, at / 4 + 1) } else { (at / 8, at / 8) }
}

/// A 16-bit number as f32.
#[cube]
pub(crate) fn long(bits: u32, #[comptime] bf16: bool) -> f32 {
    if comptime![bf16] {
        f32::reinterpret(bits << 16u32)
    } else {
        f32::cast_from(half::f16::reinterpret(u16::cast_from(bits)))
    }
}

/// A tensor as packs of 16 bytes.
pub(crate) fn as_packs(gpu: &Core, op: &'static str, t: &Tensor) -> Result<BufferArg> {
    let packs = t.bytes() / 16;
    Ok(match gpu.arg(op, t)? {
        // SAFETY: no longer than the tensor.
        BufferArg::Handle { handle } => unsafe { BufferArg::from_raw_parts_binding(handle.handle, packs) },
        alias => alias,
    })
}
