//! What kernels share: storage types widened and rounded, activations, sums over the units of a group.
//!
//! Arithmetic is f32 everywhere. Sums over a group go through shared memory in a fixed tree, so that they have the same bits whatever the
//! size of a subgroup, and are there on devices without subgroup arithmetic.

use cubecl::ir::FloatKind;
use cubecl::prelude::*;

use crate::gelu::Gelu;

/// A stored element as f32.
#[cube]
pub(crate) fn widen<E: Numeric>(x: E, #[comptime] bf16: bool) -> f32 {
    if comptime![bf16] { f32::reinterpret(u32::cast_from(x) << 16u32) } else { f32::cast_from(x) }
}

/// What f16 keeps of an f32, as f32: rounded to nearest, ties to even, by its bits. Drivers may cut digits off where they convert, or leave a conversion
/// there and back out; what is exact already they cannot change.
#[cube]
pub(crate) fn kept_f16(x: f32) -> f32 {
    let bits = u32::reinterpret(x);
    let sign = bits & 0x8000_0000u32;
    let size = bits & 0x7FFF_FFFFu32;
    // Normal numbers lose 13 bits.
    let normal = (size + 0xFFFu32 + ((size >> 13u32) & 1u32)) & 0xFFFF_E000u32;
    // Below 2^-14 numbers are multiples of 2^-24.
    let units = f32::reinterpret(size) * 16_777_216.0f32;
    let whole = u32::cast_from(min(units, 2048.0f32));
    let rest = min(units, 2048.0f32) - f32::cast_from(whole);
    let up = rest > 0.5f32 || (rest == 0.5f32 && (whole & 1u32) == 1u32);
    let small = u32::reinterpret(f32::cast_from(whole + select(up, 1u32, 0u32)) * 0.000_000_059_604_645f32);
    let rounded = select(size < 0x3880_0000u32, small, normal);
    // From 65,520 on there is infinity; what is no number stays none.
    let finite = select(rounded >= 0x4780_0000u32, 0x7F80_0000u32, rounded);
    f32::reinterpret(sign | select(size > 0x7F80_0000u32, size, finite))
}

/// What bf16 keeps of an f32, in its upper half.
#[cube]
pub(crate) fn kept_bf16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    select((bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32, (bits >> 16u32) | 0x40u32, rounded)
}

/// An f32 rounded to a storage type, to nearest, ties to even.
#[cube]
pub(crate) fn narrow<E: Numeric>(x: f32, #[comptime] bf16: bool) -> E {
    let elem = elem_type_of::<E>();
    if comptime![bf16] {
        E::cast_from(kept_bf16(x))
    } else if comptime![elem == ElemType::Float(FloatKind::F16)] {
        E::cast_from(kept_f16(x))
    } else {
        E::cast_from(x)
    }
}

/// What a storage type keeps of an f32, as f32.
#[cube]
pub(crate) fn kept<E: Numeric>(x: f32, #[comptime] bf16: bool) -> f32 {
    let elem = elem_type_of::<E>();
    if comptime![bf16] {
        f32::reinterpret(kept_bf16(x) << 16u32)
    } else if comptime![elem == ElemType::Float(FloatKind::F16)] {
        kept_f16(x)
    } else {
        x
    }
}

/// Whether `x` is a number; told by its bits, which no driver's liberties with floats touch.
#[cube]
pub(crate) fn is_number(x: f32) -> bool {
    (u32::reinterpret(x) & 0x7FFF_FFFFu32) <= 0x7F80_0000u32
}

/// `1 / (1 + e^-x)`. Beyond 80 on either side it is 1 and next to nothing; within, no number leaves the range where a division takes one instruction.
#[cube]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0f32 / (1.0f32 + (-clamp(x, -80.0f32, 80.0f32)).exp())
}

/// `erfc(x)`, relative error about 1e-6: the Chebyshev fit that the CPU uses.
#[cube]
pub(crate) fn erfc(x: f32) -> f32 {
    let z = x.abs();
    let t = 1.0f32 / (1.0f32 + 0.5f32 * z);
    let mut p = t * 0.170_872_77f32 - 0.822_152_23f32;
    p = p * t + 1.488_515_9f32;
    p = p * t - 1.135_204f32;
    p = p * t + 0.278_868_07f32;
    p = p * t - 0.186_288_06f32;
    p = p * t + 0.096_784_18f32;
    p = p * t + 0.374_091_96f32;
    p = p * t + 1.000_023_7f32;
    let tail = t * (p * t - 1.265_512_2f32 - z * z).exp();
    select(x < 0.0f32, 2.0f32 - tail, tail)
}

/// GELU. Far out it is 0 or `x` to the last bit, and nothing in between may overflow.
#[cube]
pub(crate) fn gelu_value(x: f32, #[comptime] erf: bool) -> f32 {
    let near = clamp(x, -12.0f32, 12.0f32);
    let y = if comptime![erf] {
        0.5f32 * near * erfc(-near * 0.707_106_77f32)
    } else {
        near * sigmoid(1.595_769_1f32 * (near + 0.044_715f32 * near * near * near))
    };
    let far = select(x > 0.0f32, x, 0.0f32);
    select(is_number(x), select(x.abs() > 12.0f32, far, y), x)
}

/// The derivative of [`gelu_value`].
#[cube]
pub(crate) fn gelu_slope(x: f32, #[comptime] erf: bool) -> f32 {
    let near = clamp(x, -12.0f32, 12.0f32);
    let y = if comptime![erf] {
        0.5f32 * erfc(-near * 0.707_106_77f32) + near * (-0.5f32 * near * near).exp() * 0.398_942_3f32
    } else {
        let s = sigmoid(1.595_769_1f32 * (near + 0.044_715f32 * near * near * near));
        s + near * s * (1.0f32 - s) * 1.595_769_1f32 * (1.0f32 + 0.134_145f32 * near * near)
    };
    let far = select(x > 0.0f32, 1.0f32, 0.0f32);
    select(is_number(x), select(x.abs() > 12.0f32, far, y), x)
}

/// How kernels know the kind.
pub(crate) fn is_erf(kind: Gelu) -> bool {
    kind == Gelu::Erf
}

/// The sum of `value` over the units of a group, the same for all of them. `shared` has as many elements as the group has units, a power of two.
#[cube]
pub(crate) fn group_sum(value: f32, shared: &mut Shared<[f32]>) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        if unit < half {
            shared[unit] = shared[unit] + shared[unit + half];
        }
        sync_cube();
        half /= 2;
    }
    let total = shared[0];
    sync_cube();
    total
}

/// The largest `value` of a group.
#[cube]
pub(crate) fn group_max(value: f32, shared: &mut Shared<[f32]>) -> f32 {
    let unit = UNIT_POS as usize;
    shared[unit] = value;
    sync_cube();
    let mut half = CUBE_DIM as usize / 2;
    while half > 0 {
        if unit < half {
            shared[unit] = max(shared[unit], shared[unit + half]);
        }
        sync_cube();
        half /= 2;
    }
    let total = shared[0];
    sync_cube();
    total
}
