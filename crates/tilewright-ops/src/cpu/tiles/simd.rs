//! One vector type an instruction set, so that each kernel of this op is written once. Only what attention needs.

use tilewright_core::f16;

use crate::cpu::Element;

/// A register of f32 lanes.
///
/// # Safety
/// All methods: the machine has the instruction set, and pointers are valid for `LANES` elements. No alignment is asked for.
pub(crate) trait Simd: Copy {
    /// Lanes of one register.
    const LANES: usize;
    /// Columns of the product's register tile, in registers.
    const TILE_COLUMNS: usize;
    /// Rows of the product's register tile.
    const TILE_ROWS: usize;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn store(self, p: *mut f32);
    unsafe fn add(self, o: Self) -> Self;
    unsafe fn sub(self, o: Self) -> Self;
    unsafe fn mul(self, o: Self) -> Self;
    /// `self * m + a`, fused where the hardware has it.
    unsafe fn fma(self, m: Self, a: Self) -> Self;
    /// The larger of the two; `self` where either is NaN.
    unsafe fn max_or_self(self, o: Self) -> Self;
    unsafe fn reduce_add(self) -> f32;
    unsafe fn reduce_max(self) -> f32;
    /// `self` in lanes below `n`, `o` in the others.
    unsafe fn below(self, n: usize, o: Self) -> Self;
    /// Quads of consecutive elements, each four rows of `stride` elements below the one before: rows 0, 4, 8, ... of a column of quads.
    unsafe fn load_quads(p: *const f32, stride: usize) -> Self;
    /// Four registers of quads from rows `i`, `i + 4`, ...: out come four columns, each with its rows in order.
    unsafe fn transpose_quads(rows: [Self; 4]) -> [Self; 4];
    /// Widens IEEE half floats.
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        unsafe {
            let mut lanes = [0.0; WIDTH];
            for (i, x) in lanes[..Self::LANES].iter_mut().enumerate() {
                *x = Element::to_f32(p.add(i).read());
            }
            Self::load(lanes.as_ptr())
        }
    }
    /// Rounds to IEEE half floats, ties to even.
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        unsafe {
            let mut lanes = [0.0; WIDTH];
            self.store(lanes.as_mut_ptr());
            for (i, &x) in lanes[..Self::LANES].iter().enumerate() {
                p.add(i).write(Element::from_f32(x));
            }
        }
    }
    /// `2^x` within 2 units in the last place for `x` in -126..127; 0 below, +inf or huge above, NaN for NaN.
    unsafe fn exp2(self) -> Self;
}

/// `2^f` for `|f| <= 1/2`: interpolation at Chebyshev nodes, relative error 2.6e-9 before rounding.
const EXP2: [f32; 7] =
    [1.0, std::f32::consts::LN_2, 0.240_226_5, 0.055_503_27, 0.009_618_057, 0.001_340_042_8, 0.000_154_614_45];

#[inline(always)]
unsafe fn exp2_fraction<S: Simd>(f: S) -> S {
    unsafe {
        let mut p = S::splat(EXP2[6]);
        for &c in EXP2[..6].iter().rev() {
            p = p.fma(f, S::splat(c));
        }
        p
    }
}

/// Plain Rust: four lanes, which the compiler maps to whatever vectors the target always has.
#[derive(Clone, Copy)]
pub(crate) struct Portable([f32; 4]);

impl Portable {
    #[inline(always)]
    fn zip(self, o: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Portable(std::array::from_fn(|i| f(self.0[i], o.0[i])))
    }
}

impl Simd for Portable {
    const LANES: usize = 4;
    const TILE_COLUMNS: usize = 2;
    const TILE_ROWS: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 4])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        Portable(unsafe { p.cast::<[f32; 4]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { p.cast::<[f32; 4]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        self.zip(o, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        self.zip(o, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        self.zip(o, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn fma(self, m: Self, a: Self) -> Self {
        Portable(std::array::from_fn(|i| self.0[i] * m.0[i] + a.0[i]))
    }
    #[inline(always)]
    unsafe fn max_or_self(self, o: Self) -> Self {
        self.zip(o, |a, b| if b > a { b } else { a })
    }
    #[inline(always)]
    unsafe fn reduce_add(self) -> f32 {
        (self.0[0] + self.0[2]) + (self.0[1] + self.0[3])
    }
    #[inline(always)]
    unsafe fn reduce_max(self) -> f32 {
        self.0.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    unsafe fn below(self, n: usize, o: Self) -> Self {
        Portable(std::array::from_fn(|i| if i < n { self.0[i] } else { o.0[i] }))
    }
    #[inline(always)]
    unsafe fn load_quads(p: *const f32, _stride: usize) -> Self {
        unsafe { Self::load(p) }
    }
    #[inline(always)]
    unsafe fn transpose_quads(rows: [Self; 4]) -> [Self; 4] {
        std::array::from_fn(|i| Portable(std::array::from_fn(|j| rows[j].0[i])))
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding and subtracting it rounds to an integer
        let clamped = Portable(self.0.map(|x| x.clamp(-126.0, 127.0)));
        let n = clamped.0.map(|x| (x + ROUND) - ROUND);
        let f = Portable(std::array::from_fn(|i| clamped.0[i] - n[i]));
        let p = unsafe { exp2_fraction(f) };
        Portable(std::array::from_fn(|i| {
            let power = f32::from_bits(((n[i] as i32 + 127) as u32) << 23);
            if self.0[i] < -126.0 { 0.0 } else { p.0[i] * power }
        }))
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Simd, exp2_fraction};
    use std::arch::x86_64::*;
    use tilewright_core::f16;

    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(__m512);

    impl Simd for Avx512 {
        const LANES: usize = 16;
        const TILE_COLUMNS: usize = 4;
        const TILE_ROWS: usize = 6;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Avx512(unsafe { _mm512_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Avx512(unsafe { _mm512_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm512_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, o: Self) -> Self {
            Avx512(unsafe { _mm512_add_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, o: Self) -> Self {
            Avx512(unsafe { _mm512_sub_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, o: Self) -> Self {
            Avx512(unsafe { _mm512_mul_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, m: Self, a: Self) -> Self {
            Avx512(unsafe { _mm512_fmadd_ps(self.0, m.0, a.0) })
        }
        #[inline(always)]
        unsafe fn max_or_self(self, o: Self) -> Self {
            // The instruction returns its second operand when either is NaN.
            Avx512(unsafe { _mm512_max_ps(o.0, self.0) })
        }
        #[inline(always)]
        unsafe fn reduce_add(self) -> f32 {
            unsafe { _mm512_reduce_add_ps(self.0) }
        }
        #[inline(always)]
        unsafe fn reduce_max(self) -> f32 {
            unsafe { _mm512_reduce_max_ps(self.0) }
        }
        #[inline(always)]
        unsafe fn below(self, n: usize, o: Self) -> Self {
            let mask = ((1u32 << n.min(16)) - 1) as __mmask16;
            Avx512(unsafe { _mm512_mask_mov_ps(o.0, mask, self.0) })
        }
        #[inline(always)]
        unsafe fn load_quads(p: *const f32, stride: usize) -> Self {
            unsafe {
                let quad = |i: usize| _mm_loadu_ps(p.add(4 * i * stride));
                let x = _mm512_castps128_ps512(quad(0));
                let x = _mm512_insertf32x4::<1>(x, quad(1));
                let x = _mm512_insertf32x4::<2>(x, quad(2));
                Avx512(_mm512_insertf32x4::<3>(x, quad(3)))
            }
        }
        #[inline(always)]
        unsafe fn transpose_quads([a, b, c, d]: [Self; 4]) -> [Self; 4] {
            unsafe {
                let pd = |x: __m512| _mm512_castps_pd(x);
                let (ab_low, ab_high) = (pd(_mm512_unpacklo_ps(a.0, b.0)), pd(_mm512_unpackhi_ps(a.0, b.0)));
                let (cd_low, cd_high) = (pd(_mm512_unpacklo_ps(c.0, d.0)), pd(_mm512_unpackhi_ps(c.0, d.0)));
                [
                    Avx512(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_low, cd_low))),
                    Avx512(_mm512_castpd_ps(_mm512_unpackhi_pd(ab_low, cd_low))),
                    Avx512(_mm512_castpd_ps(_mm512_unpacklo_pd(ab_high, cd_high))),
                    Avx512(_mm512_castpd_ps(_mm512_unpackhi_pd(ab_high, cd_high))),
                ]
            }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            Avx512(unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) })
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut f16) {
            unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
        }
        #[inline(always)]
        unsafe fn exp2(self) -> Self {
            unsafe {
                let n = _mm512_roundscale_ps::<0>(self.0);
                let f = Avx512(_mm512_sub_ps(self.0, n));
                let p = exp2_fraction(f);
                // Below the range f could be NaN (-inf minus -inf) or the result subnormal: both become 0.
                let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(self.0, _mm512_set1_ps(-126.0));
                Avx512(_mm512_maskz_scalef_ps(keep, p.0, n))
            }
        }
    }

    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(__m256);

    impl Simd for Avx2 {
        const LANES: usize = 8;
        const TILE_COLUMNS: usize = 2;
        const TILE_ROWS: usize = 6;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Avx2(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Avx2(unsafe { _mm256_loadu_ps(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { _mm256_storeu_ps(p, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, o: Self) -> Self {
            Avx2(unsafe { _mm256_add_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, o: Self) -> Self {
            Avx2(unsafe { _mm256_sub_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, o: Self) -> Self {
            Avx2(unsafe { _mm256_mul_ps(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, m: Self, a: Self) -> Self {
            Avx2(unsafe { _mm256_fmadd_ps(self.0, m.0, a.0) })
        }
        #[inline(always)]
        unsafe fn max_or_self(self, o: Self) -> Self {
            Avx2(unsafe { _mm256_max_ps(o.0, self.0) })
        }
        #[inline(always)]
        unsafe fn reduce_add(self) -> f32 {
            unsafe {
                let s = _mm_add_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let s = _mm_add_ps(s, _mm_movehl_ps(s, s));
                _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)))
            }
        }
        #[inline(always)]
        unsafe fn reduce_max(self) -> f32 {
            unsafe {
                let s = _mm_max_ps(_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0));
                let s = _mm_max_ps(s, _mm_movehl_ps(s, s));
                _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)))
            }
        }
        #[inline(always)]
        unsafe fn below(self, n: usize, o: Self) -> Self {
            unsafe {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n.min(8) as i32), lanes);
                Avx2(_mm256_blendv_ps(o.0, self.0, _mm256_castsi256_ps(mask)))
            }
        }
        #[inline(always)]
        unsafe fn load_quads(p: *const f32, stride: usize) -> Self {
            unsafe {
                let low = _mm256_castps128_ps256(_mm_loadu_ps(p));
                Avx2(_mm256_insertf128_ps::<1>(low, _mm_loadu_ps(p.add(4 * stride))))
            }
        }
        #[inline(always)]
        unsafe fn transpose_quads([a, b, c, d]: [Self; 4]) -> [Self; 4] {
            unsafe {
                let pd = |x: __m256| _mm256_castps_pd(x);
                let (ab_low, ab_high) = (pd(_mm256_unpacklo_ps(a.0, b.0)), pd(_mm256_unpackhi_ps(a.0, b.0)));
                let (cd_low, cd_high) = (pd(_mm256_unpacklo_ps(c.0, d.0)), pd(_mm256_unpackhi_ps(c.0, d.0)));
                [
                    Avx2(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_low, cd_low))),
                    Avx2(_mm256_castpd_ps(_mm256_unpackhi_pd(ab_low, cd_low))),
                    Avx2(_mm256_castpd_ps(_mm256_unpacklo_pd(ab_high, cd_high))),
                    Avx2(_mm256_castpd_ps(_mm256_unpackhi_pd(ab_high, cd_high))),
                ]
            }
        }
        #[inline(always)]
        unsafe fn load_f16(p: *const f16) -> Self {
            Avx2(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) })
        }
        #[inline(always)]
        unsafe fn store_f16(self, p: *mut f16) {
            unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
        }
        #[inline(always)]
        unsafe fn exp2(self) -> Self {
            unsafe {
                let low = _mm256_set1_ps(-126.0);
                // NaN stays: max and min return their second operand then.
                let x = _mm256_min_ps(_mm256_set1_ps(127.0), _mm256_max_ps(low, self.0));
                let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
                let p = exp2_fraction(Avx2(_mm256_sub_ps(x, n)));
                let exponent = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)));
                let y = _mm256_mul_ps(p.0, _mm256_castsi256_ps(exponent));
                Avx2(_mm256_and_ps(y, _mm256_cmp_ps::<_CMP_NLT_UQ>(self.0, low)))
            }
        }
    }
}
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::{Simd, exp2_fraction};
    use std::arch::aarch64::*;

    #[derive(Clone, Copy)]
    pub(crate) struct Neon(float32x4_t);

    impl Simd for Neon {
        const LANES: usize = 4;
        const TILE_COLUMNS: usize = 4;
        const TILE_ROWS: usize = 6;

        #[inline(always)]
        unsafe fn splat(x: f32) -> Self {
            Neon(unsafe { vdupq_n_f32(x) })
        }
        #[inline(always)]
        unsafe fn load(p: *const f32) -> Self {
            Neon(unsafe { vld1q_f32(p) })
        }
        #[inline(always)]
        unsafe fn store(self, p: *mut f32) {
            unsafe { vst1q_f32(p, self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, o: Self) -> Self {
            Neon(unsafe { vaddq_f32(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn sub(self, o: Self) -> Self {
            Neon(unsafe { vsubq_f32(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn mul(self, o: Self) -> Self {
            Neon(unsafe { vmulq_f32(self.0, o.0) })
        }
        #[inline(always)]
        unsafe fn fma(self, m: Self, a: Self) -> Self {
            Neon(unsafe { vfmaq_f32(a.0, self.0, m.0) })
        }
        #[inline(always)]
        unsafe fn max_or_self(self, o: Self) -> Self {
            Neon(unsafe { vbslq_f32(vcgtq_f32(o.0, self.0), o.0, self.0) })
        }
        #[inline(always)]
        unsafe fn reduce_add(self) -> f32 {
            unsafe { vaddvq_f32(self.0) }
        }
        #[inline(always)]
        unsafe fn reduce_max(self) -> f32 {
            unsafe { vmaxnmvq_f32(self.0) }
        }
        #[inline(always)]
        unsafe fn below(self, n: usize, o: Self) -> Self {
            unsafe {
                let lanes = vld1q_u32([0u32, 1, 2, 3].as_ptr());
                Neon(vbslq_f32(vcltq_u32(lanes, vdupq_n_u32(n.min(4) as u32)), self.0, o.0))
            }
        }
        #[inline(always)]
        unsafe fn load_quads(p: *const f32, _stride: usize) -> Self {
            unsafe { Self::load(p) }
        }
        #[inline(always)]
        unsafe fn transpose_quads([a, b, c, d]: [Self; 4]) -> [Self; 4] {
            unsafe {
                let f64s = |x: float32x4_t| vreinterpretq_f64_f32(x);
                let (ab_low, ab_high) = (f64s(vzip1q_f32(a.0, b.0)), f64s(vzip2q_f32(a.0, b.0)));
                let (cd_low, cd_high) = (f64s(vzip1q_f32(c.0, d.0)), f64s(vzip2q_f32(c.0, d.0)));
                [
                    Neon(vreinterpretq_f32_f64(vzip1q_f64(ab_low, cd_low))),
                    Neon(vreinterpretq_f32_f64(vzip2q_f64(ab_low, cd_low))),
                    Neon(vreinterpretq_f32_f64(vzip1q_f64(ab_high, cd_high))),
                    Neon(vreinterpretq_f32_f64(vzip2q_f64(ab_high, cd_high))),
                ]
            }
        }
        #[inline(always)]
        unsafe fn exp2(self) -> Self {
            unsafe {
                let low = vdupq_n_f32(-126.0);
                let x = vminq_f32(vmaxq_f32(self.0, low), vdupq_n_f32(127.0));
                let n = vrndnq_f32(x);
                let p = exp2_fraction(Neon(vsubq_f32(x, n)));
                let exponent = vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)));
                let y = vmulq_f32(p.0, vreinterpretq_f32_s32(exponent));
                Neon(vbslq_f32(vcltq_f32(self.0, low), vdupq_n_f32(0.0), y))
            }
        }
    }
}
#[cfg(target_arch = "aarch64")]
pub(crate) use arm::Neon;

/// Compiles a body that is generic over [`Simd`] once an instruction set and calls the one that fits.
macro_rules! simd_kernel {
    ($(#[$doc:meta])* $vis:vis unsafe fn $name:ident [$($gen:ident : $bound:path),*] ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        $vis unsafe fn $name<$($gen: $bound),*>(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            use $crate::cpu::tiles::simd;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512<$($gen: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                unsafe { $body::<simd::Avx512, $($gen),*>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2<$($gen: $bound),*>($($arg: $ty),*) $(-> $ret)? {
                unsafe { $body::<simd::Avx2, $($gen),*>($($arg),*) }
            }
            // SAFETY: `Cpu::new` refuses an instruction set that the machine lacks; the rest is the caller's promise.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx512 => avx512::<$($gen),*>($($arg),*),
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx2 => avx2::<$($gen),*>($($arg),*),
                    #[cfg(target_arch = "aarch64")]
                    $crate::cpu::Isa::Neon => $body::<simd::Neon, $($gen),*>($($arg),*),
                    _ => $body::<simd::Portable, $($gen),*>($($arg),*),
                }
            }
        }
    };
}
pub(crate) use simd_kernel;

/// Lanes that every packed width is a multiple of: the widest register.
pub(crate) const WIDTH: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;

    #[inline(always)]
    unsafe fn exp2_all_body<S: Simd>(x: &mut [f32]) {
        for chunk in x.chunks_exact_mut(S::LANES) {
            unsafe { S::load(chunk.as_ptr()).exp2().store(chunk.as_mut_ptr()) }
        }
    }

    simd_kernel! {
        unsafe fn exp2_all [] (x: &mut [f32]) = exp2_all_body
    }

    fn exp2(isa: Isa, x: f32) -> f32 {
        let mut all = [x; WIDTH];
        // SAFETY: the tests ask only for instruction sets that this machine has.
        unsafe { exp2_all(isa, &mut all) };
        assert!(all.iter().all(|y| y.to_bits() == all[0].to_bits()), "{} differs between lanes", isa.name());
        all[0]
    }

    #[test]
    fn exp2_is_within_two_ulps_on_every_instruction_set() {
        for isa in Isa::available() {
            let mut x = -125.9f32;
            while x < 126.9 {
                let (got, want) = (exp2(isa, x), f64::from(x).exp2() as f32);
                let ulps = (i64::from(got.to_bits()) - i64::from(want.to_bits())).abs();
                assert!(ulps <= 2, "{}: 2^{x} = {got}, want {want}, {ulps} ulps", isa.name());
                x += 0.003_7;
            }
        }
    }

    #[test]
    fn exp2_at_the_edges_on_every_instruction_set() {
        for isa in Isa::available() {
            assert_eq!(exp2(isa, 0.0), 1.0);
            assert_eq!(exp2(isa, f32::NEG_INFINITY), 0.0);
            assert_eq!(exp2(isa, -2e4), 0.0);
            assert!(exp2(isa, f32::NAN).is_nan(), "{}", isa.name());
            assert!(exp2(isa, 1e4) > 1e38);
        }
    }
}
