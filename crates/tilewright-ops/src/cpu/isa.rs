//! Instruction sets, detected at run time. One binary holds all paths of its architecture.

/// The SIMD level of the CPU kernels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Isa {
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// AArch64 with NEON (every AArch64 machine).
    Neon,
    /// Plain Rust, whatever the compiler makes of it.
    Portable,
}

impl Isa {
    /// All levels, best first.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Portable];

    /// The name used in messages and in `TILEWRIGHT_ISA`.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Neon => "neon",
            Isa::Portable => "portable",
        }
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                    && Isa::Avx2.is_available()
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => true,
            Isa::Portable => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    /// The levels that this machine can run, best first.
    pub fn available() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|i| i.is_available()).collect()
    }

    /// The best level of this machine.
    pub fn detect() -> Isa {
        Isa::available()[0]
    }

    /// `TILEWRIGHT_ISA` when it names a level that this machine has, else [`Isa::detect`].
    pub fn from_env() -> Isa {
        let name = std::env::var("TILEWRIGHT_ISA").unwrap_or_default();
        Isa::available().into_iter().find(|i| i.name() == name).unwrap_or_else(Isa::detect)
    }
}

/// Whether this machine has AVX512-BF16, beside AVX-512.
pub(crate) fn detect_bf16_dot() -> bool {
    #[cfg(target_arch = "x86_64")]
    let has = is_x86_feature_detected!("avx512bf16");
    #[cfg(not(target_arch = "x86_64"))]
    let has = false;
    has
}

/// Compiles one inlined body once an instruction set and calls the one that fits. The body is plain Rust over slices, written so that the
/// compiler vectorises it; only the target features differ, so all paths round alike unless the body asks for a fused multiply-add.
///
/// ```ignore
/// per_isa! {
///     /// y[i] += a * x[i]
///     fn axpy[T: Element](a: f32, x: &[T], y: &mut [f32]) { body }
/// }
/// axpy(isa, a, x, y);
/// ```
#[allow(unused_macros)]
macro_rules! per_isa {
    ($(#[$doc:meta])* $vis:vis fn $name:ident [$($gen:ident : $bound:path),*] ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$doc])*
        $vis fn $name<$($gen: $bound),*>(isa: $crate::cpu::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$($gen: $bound),*>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            fn avx512<$($gen: $bound),*>($($arg: $ty),*) $(-> $ret)? { body::<$($gen),*>($($arg),*) }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2<$($gen: $bound),*>($($arg: $ty),*) $(-> $ret)? { body::<$($gen),*>($($arg),*) }
            match isa {
                // SAFETY: `Cpu::new` refuses an instruction set that the machine lacks.
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx512 => unsafe { avx512::<$($gen),*>($($arg),*) },
                #[cfg(target_arch = "x86_64")]
                $crate::cpu::Isa::Avx2 => unsafe { avx2::<$($gen),*>($($arg),*) },
                _ => body::<$($gen),*>($($arg),*),
            }
        }
    };
}
#[allow(unused_imports)]
pub(crate) use per_isa;
