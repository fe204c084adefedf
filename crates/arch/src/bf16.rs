//! Rounding to bf16 on CPUs without an instruction for it.
//!
//! There LLVM calls `__truncsfbf2`, and CubeCL's compiler looks for it among the symbols of the process. libgcc
//! provides it since version 13. Debian 12 has an older one, where kernels that need the symbol fail to compile.
//! This module therefore defines it, and programs and tests of this workspace export it (`export.rs`). In a program
//! that does not export it, the CPU's profile does not list bf16.

#[cfg(all(target_arch = "x86_64", unix))]
mod found {
    use half::bf16;
    use libloading::os::unix::Library;

    /// Rounds `x` to nearest, ties to even. Returns the bits in the low half of a float register (psABI for x86-64,
    /// 3.2.3).
    #[unsafe(no_mangle)]
    extern "C" fn __truncsfbf2(x: f32) -> f32 {
        f32::from_bits(u32::from(bf16::from_f32(x).to_bits()))
    }

    /// Rounds like `__truncsfbf2`, directly from f64.
    #[unsafe(no_mangle)]
    extern "C" fn __truncdfbf2(x: f64) -> f32 {
        f32::from_bits(u32::from(bf16::from_f64(x).to_bits()))
    }

    pub(crate) fn rounds() -> bool {
        // Referenced, so that the linker keeps them.
        std::hint::black_box((
            __truncsfbf2 as extern "C" fn(f32) -> f32,
            __truncdfbf2 as extern "C" fn(f64) -> f32,
        ));
        let natively = std::arch::is_x86_feature_detected!("avx512bf16")
            && std::arch::is_x86_feature_detected!("avx512vl");
        // SAFETY: the address is looked up but not called.
        let is_there = |name: &[u8]| unsafe { Library::this().get::<*const ()>(name).is_ok() };
        natively || is_there(b"__truncsfbf2\0")
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn halves_are_in_the_low_bits() {
            for x in [0.0, 1.0, -2.5, 1.003_906_3, 3.4e38, 1e-40, f32::NEG_INFINITY] {
                assert_eq!(
                    __truncsfbf2(x).to_bits(),
                    u32::from(bf16::from_f32(x).to_bits()),
                    "{x}"
                );
                let twice = __truncdfbf2(f64::from(x)).to_bits();
                assert_eq!(twice, u32::from(bf16::from_f32(x).to_bits()), "{x}");
            }
            // Halfway between 1 and the next value: rounds to even.
            assert_eq!(__truncsfbf2(1.0 + 1.0 / 256.0).to_bits(), 0x3f80);
            assert_eq!(__truncsfbf2(1.0 + 3.0 / 256.0).to_bits(), 0x3f82);
            assert!(bf16::from_bits(__truncsfbf2(f32::NAN).to_bits() as u16).is_nan());
        }

        #[test]
        fn this_program_exports_them() {
            // SAFETY: the address is looked up but not called.
            let found = unsafe { Library::this().get::<*const ()>(b"__truncdfbf2\0") };
            assert!(found.is_ok() && rounds(), "{found:?}");
        }
    }
}

/// Returns true if CPU kernels can round to bf16.
pub(crate) fn rounds() -> bool {
    #[cfg(all(target_arch = "x86_64", unix))]
    return found::rounds();
    #[cfg(not(all(target_arch = "x86_64", unix)))]
    true
}
