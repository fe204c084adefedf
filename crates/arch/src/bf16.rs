//! How a processor rounds to bf16 that has no instruction for it.
//!
//! LLVM then calls `__truncsfbf2`, which CubeCL's compiler looks for among the symbols of the process. libgcc has it from
//! version 13 on; Debian 12's has not, and a kernel that needs it does not compile. So it is here, and programs and tests of
//! this workspace export it (`export.rs`); in a program that does not, bf16 is no type of such a processor.

#[cfg(all(target_arch = "x86_64", unix))]
mod found {
    use half::bf16;
    use libloading::os::unix::Library;

    /// `x` to the nearest, ties to even. What is returned is the low half of a register of floats (psABI for x86-64, 3.2.3).
    #[unsafe(no_mangle)]
    extern "C" fn __truncsfbf2(x: f32) -> f32 {
        f32::from_bits(u32::from(bf16::from_f32(x).to_bits()))
    }

    /// As `__truncsfbf2`, rounded once.
    #[unsafe(no_mangle)]
    extern "C" fn __truncdfbf2(x: f64) -> f32 {
        f32::from_bits(u32::from(bf16::from_f64(x).to_bits()))
    }

    pub(crate) fn rounds() -> bool {
        // Named, so that the linker takes them.
        std::hint::black_box((
            __truncsfbf2 as extern "C" fn(f32) -> f32,
            __truncdfbf2 as extern "C" fn(f64) -> f32,
        ));
        let natively = std::arch::is_x86_feature_detected!("avx512bf16")
            && std::arch::is_x86_feature_detected!("avx512vl");
        // SAFETY: an address that is looked up and not called.
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
            // Halfway between 1 and the next: to even.
            assert_eq!(__truncsfbf2(1.0 + 1.0 / 256.0).to_bits(), 0x3f80);
            assert_eq!(__truncsfbf2(1.0 + 3.0 / 256.0).to_bits(), 0x3f82);
            assert!(bf16::from_bits(__truncsfbf2(f32::NAN).to_bits() as u16).is_nan());
        }

        #[test]
        fn this_program_exports_them() {
            // SAFETY: looked up and not called.
            let found = unsafe { Library::this().get::<*const ()>(b"__truncdfbf2\0") };
            assert!(found.is_ok() && rounds(), "{found:?}");
        }
    }
}

/// Whether kernels on the CPU can round to bf16.
pub(crate) fn rounds() -> bool {
    #[cfg(all(target_arch = "x86_64", unix))]
    return found::rounds();
    #[cfg(not(all(target_arch = "x86_64", unix)))]
    true
}
