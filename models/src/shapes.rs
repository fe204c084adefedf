//! Configurations of public models, as their `config.json` gives them.

use crate::config::{DecoderConfig, Family};

/// meta-llama/Meta-Llama-3-8B: 8.03 billion parameters.
pub const LLAMA_3_8B: DecoderConfig = DecoderConfig {
    family: Family::Llama,
    hidden: 4096,
    ffn_hidden: 14336,
    layers: 32,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    vocab: 128_256,
    max_seq: 8192,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    tie_embeddings: false,
    qkv_bias: false,
    out_bias: false,
    ffn_bias: false,
};

/// meta-llama/Llama-2-7b-hf: 6.74 billion parameters.
pub const LLAMA_2_7B: DecoderConfig = DecoderConfig {
    family: Family::Llama,
    hidden: 4096,
    ffn_hidden: 11008,
    layers: 32,
    heads: 32,
    kv_heads: 32,
    head_dim: 128,
    vocab: 32_000,
    max_seq: 4096,
    norm_eps: 1e-5,
    rope_theta: 10_000.0,
    tie_embeddings: false,
    qkv_bias: false,
    out_bias: false,
    ffn_bias: false,
};

/// Qwen/Qwen2-7B: 7.62 billion parameters.
pub const QWEN2_7B: DecoderConfig = DecoderConfig {
    family: Family::Qwen2,
    hidden: 3584,
    ffn_hidden: 18944,
    layers: 28,
    heads: 28,
    kv_heads: 4,
    head_dim: 128,
    vocab: 152_064,
    max_seq: 131_072,
    norm_eps: 1e-6,
    rope_theta: 1_000_000.0,
    tie_embeddings: false,
    qkv_bias: true,
    out_bias: false,
    ffn_bias: false,
};

/// meta-llama/Llama-3.2-1B: 1.24 billion parameters.
pub const LLAMA_3_2_1B: DecoderConfig = DecoderConfig {
    family: Family::Llama,
    hidden: 2048,
    ffn_hidden: 8192,
    layers: 16,
    heads: 32,
    kv_heads: 8,
    head_dim: 64,
    vocab: 128_256,
    max_seq: 131_072,
    norm_eps: 1e-5,
    rope_theta: 500_000.0,
    tie_embeddings: true,
    qkv_bias: false,
    out_bias: false,
    ffn_bias: false,
};

/// All of the above, by the name that benches print.
pub const NAMED: [(&str, DecoderConfig); 4] = [
    ("llama-3-8b", LLAMA_3_8B),
    ("llama-2-7b", LLAMA_2_7B),
    ("qwen2-7b", QWEN2_7B),
    ("llama-3.2-1b", LLAMA_3_2_1B),
];

/// The configuration of that name, if it is one of [`NAMED`].
pub fn named(name: &str) -> Option<DecoderConfig> {
    NAMED.iter().find(|(known, _)| *known == name).map(|&(_, config)| config)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parameter counts that the published weight files add up to.
    #[test]
    fn parameter_counts_are_those_of_the_published_weights() {
        for (name, parameters) in [
            ("llama-3-8b", 8_030_261_248),
            ("llama-2-7b", 6_738_415_616),
            ("qwen2-7b", 7_615_616_512),
            ("llama-3.2-1b", 1_235_814_400),
        ] {
            assert_eq!(named(name).map(|config| config.parameters()), Some(parameters), "{name}");
        }
        assert_eq!(named("gpt-2"), None);
    }
}
