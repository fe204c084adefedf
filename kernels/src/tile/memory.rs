//! Addresses, and loads and stores with immediate offsets.

use cubecl::prelude::*;

/// Returns the address of a shared buffer.
#[cube]
pub(crate) fn shared_address(buffer: &mut [Vector<u32, Const<4>>]) -> u32 {
    let address: u32;
    gpu_asm!(
        "{{ .reg .u64 t; cvta.to.shared.u64 t, {p}; cvt.u32.u64 {a}, t; }}",
        a = out(_) address,
        p = mem_inout(_) buffer.as_mut_ptr(),
        options(explicit_mem)
    );
    address
}

/// Returns the address of a global buffer.
#[cube]
pub(crate) fn global_address<T: CubePrimitive>(buffer: &[T]) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {a}, {p};",
        a = out(_) address,
        p = mem_in(_) buffer.as_ptr(),
        options(explicit_mem)
    );
    address
}

/// Returns the address of a mutable global buffer.
#[cube]
pub(crate) fn global_address_mut<E: Numeric, N: Size>(buffer: &mut [Vector<E, N>]) -> u64 {
    let address: u64;
    gpu_asm!(
        "cvta.to.global.u64 {a}, {p};",
        a = out(_) address,
        p = mem_inout(_) buffer.as_mut_ptr(),
        options(explicit_mem)
    );
    address
}

/// Loads the 16 bytes at shared address `at + far`.
#[cube]
pub(crate) fn load_chunk(at: u32, #[comptime] far: u32) -> Vector<f32, Const<4>> {
    let chunk: Vector<f32, Const<4>>;
    gpu_asm!(
        "ld.shared.v4.f32 {chunk}, [{at}+{far}];",
        chunk = out(_) chunk,
        at = in(_) at,
        options(explicit_mem, reads_address_space shared)
    );
    chunk
}

/// Loads the four words at shared address `at + far`.
#[cube]
pub(crate) fn load_words(at: u32, #[comptime] far: u32) -> Vector<u32, Const<4>> {
    let words: Vector<u32, Const<4>>;
    gpu_asm!(
        "ld.shared.v4.b32 {words}, [{at}+{far}];",
        words = out(_) words,
        at = in(_) at,
        options(explicit_mem, reads_address_space shared)
    );
    words
}

/// Loads the word at global address `from + far`.
#[cube]
pub(crate) fn load_word(from: u64, #[comptime] far: u32) -> u32 {
    let word: u32;
    gpu_asm!(
        "ld.global.b32 {word}, [{from}+{far}];",
        word = out(_) word,
        from = in(_) u64::cast_from(from),
        options(explicit_mem, reads_address_space global)
    );
    word
}

/// Loads the two numbers at global address `from`.
#[cube]
pub(crate) fn load_pair(from: u64) -> Vector<f32, Const<2>> {
    let pair: Vector<f32, Const<2>>;
    gpu_asm!(
        "ld.global.v2.f32 {pair}, [{from}];",
        pair = out(_) pair,
        from = in(_) u64::cast_from(from),
        options(explicit_mem, reads_address_space global)
    );
    pair
}

/// Stores two numbers at global address `to`.
#[cube]
pub(crate) fn store_pair(to: u64, first: f32, second: f32) {
    gpu_asm!(
        "st.global.v2.f32 [{to}], {{{first}, {second}}};",
        to = in(_) u64::cast_from(to),
        first = in(_) f32::cast_from(first),
        second = in(_) f32::cast_from(second),
        options(explicit_mem, writes_address_space global)
    );
}

/// Loads the number at shared address `at + far`.
#[cube]
pub(crate) fn load_shared(at: u32, #[comptime] far: u32) -> f32 {
    let value: f32;
    gpu_asm!(
        "ld.shared.f32 {value}, [{at}+{far}];",
        value = out(_) value,
        at = in(_) u32::cast_from(at),
        options(explicit_mem, reads_address_space shared)
    );
    value
}

/// Stores a number at shared address `at + far`.
#[cube]
pub(crate) fn store_shared(at: u32, value: f32, #[comptime] far: u32) {
    gpu_asm!(
        "st.shared.f32 [{at}+{far}], {value};",
        at = in(_) u32::cast_from(at),
        value = in(_) f32::cast_from(value),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Stores a word at shared address `at`.
#[cube]
pub(crate) fn store_word(at: u32, word: u32) {
    gpu_asm!(
        "st.shared.b32 [{at}], {word};",
        at = in(_) u32::cast_from(at),
        word = in(_) u32::cast_from(word),
        options(explicit_mem, writes_address_space shared)
    );
}

/// Stores four words at shared address `at`, a multiple of 16.
#[cube]
pub(crate) fn store_words(at: u32, words: Vector<u32, Const<4>>) {
    gpu_asm!(
        "st.shared.v4.b32 [{at}], {{{a}, {b}, {c}, {d}}};",
        at = in(_) u32::cast_from(at),
        a = in(_) u32::cast_from(words.extract(0usize)),
        b = in(_) u32::cast_from(words.extract(1usize)),
        c = in(_) u32::cast_from(words.extract(2usize)),
        d = in(_) u32::cast_from(words.extract(3usize)),
        options(explicit_mem, writes_address_space shared)
    );
}
