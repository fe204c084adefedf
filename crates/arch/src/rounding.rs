//! Rounding to bf16 for code that LLVM generates on a CPU without an instruction for it. `build.rs` compiles this file
//! to a shared library, which `bf16.rs` loads.
//!
//! Both functions round to nearest, ties to even, and keep NaN quiet. They return the bits in the low half of a float
//! register (psABI for x86-64, 3.2.3).

#![no_std]

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Rounds a float.
#[unsafe(no_mangle)]
pub extern "C" fn __truncsfbf2(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = match x.is_nan() {
        true => (bits >> 16) | 0x40,
        false => (bits + 0x7fff + ((bits >> 16) & 1)) >> 16,
    };
    f32::from_bits(rounded)
}

/// Rounds a double directly: first to odd, which keeps the information for the second rounding.
#[unsafe(no_mangle)]
pub extern "C" fn __truncdfbf2(x: f64) -> f32 {
    let near = x as f32;
    if x.is_nan() || f64::from(near) == x || near.is_infinite() {
        return __truncsfbf2(near);
    }
    // Towards zero, with the last bit set.
    let magnitude = near.to_bits() - u32::from(f64::from(near.abs()) > x.abs());
    __truncsfbf2(f32::from_bits(magnitude | 1))
}
