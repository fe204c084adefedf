//! Rounding to bf16 on CPUs without an instruction for it.
//!
//! There LLVM calls `__truncsfbf2`, and CubeCL's compiler looks for it among the symbols of the process. libgcc
//! provides it since version 13. Debian 12 has an older one, where kernels that need the symbol fail to compile.
//! This module therefore loads a library of 2 KB with these functions (`rounding.rs`), which it contains.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod loaded {
    use std::fs::File;
    use std::io::{self, Write};
    use std::mem;
    use std::os::fd::AsRawFd;
    use std::sync::LazyLock;

    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
    use rustix::fs::{MemfdFlags, memfd_create};

    const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rounding.so"));

    pub(crate) fn rounds() -> bool {
        let natively = std::arch::is_x86_feature_detected!("avx512bf16")
            && std::arch::is_x86_feature_detected!("avx512vl");
        natively || is_found() || *LOADED
    }

    /// Returns true if the process has the function.
    pub(super) fn is_found() -> bool {
        // SAFETY: the address is looked up but not called.
        unsafe { Library::this().get::<*const ()>(b"__truncsfbf2\0") }.is_ok()
    }

    static LOADED: LazyLock<bool> = LazyLock::new(|| match load() {
        Ok(()) => is_found(),
        Err(why) => {
            log::warn!("the CPU backend has no bf16: {why}");
            false
        }
    });

    /// Makes the functions symbols of the process until it ends.
    pub(super) fn load() -> io::Result<()> {
        let mut file = File::from(memfd_create(c"flashover-rounding", MemfdFlags::CLOEXEC)?);
        file.write_all(LIBRARY)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        // SAFETY: the library has no initialisers.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) };
        mem::forget(library.map_err(io::Error::other)?);
        Ok(())
    }
}

/// Returns true if CPU kernels can round to bf16.
pub(crate) fn rounds() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return loaded::rounds();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    true
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use half::bf16;
    use libloading::os::unix::Library;

    use super::loaded::{is_found, load};

    #[test]
    fn the_library_rounds_to_nearest_even() {
        load().expect("it loads");
        assert!(is_found());
        // SAFETY: the types are those of `rounding.rs`.
        let (single, double) = unsafe {
            let this = Library::this();
            let single = *this.get::<extern "C" fn(f32) -> f32>(b"__truncsfbf2\0").expect("loaded");
            (single, *this.get::<extern "C" fn(f64) -> f32>(b"__truncdfbf2\0").expect("loaded"))
        };
        let mut bits = 1u64;
        for _ in 0..2_000_000 {
            // xorshift64
            bits ^= bits << 13;
            bits ^= bits >> 7;
            bits ^= bits << 17;
            let x = f32::from_bits(bits as u32);
            let same = |own: f32, want: bf16| {
                let own = bf16::from_bits(own.to_bits() as u16);
                assert!(own == want || (own.is_nan() && want.is_nan()), "{x}: {own} {want}");
            };
            same(single(x), bf16::from_f32(x));
            // Values near those of bf16, where a rounding by way of f32 would err.
            let near = f64::from(bf16::from_f32(x)) * (1.0 + 1.0 / 256.0)
                + f64::from_bits(bits) % 1e-9 * f64::from(x);
            for x in [near, f64::from_bits(bits), f64::from(x)] {
                // `half` drops the low bits of the mantissa, which may decide.
                let (own, want) = (bf16::from_bits(double(x).to_bits() as u16), bf16::from_f64(x));
                let far = |other: bf16| (other.to_f64() - x).abs();
                assert_eq!(own.is_nan(), want.is_nan(), "{x}");
                assert!(own == want || own.is_nan() || far(own) < far(want), "{x}: {own} {want}");
            }
        }
    }
}
