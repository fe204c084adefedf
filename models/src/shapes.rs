//! Configurations of public models, from their `config.json`.

use crate::DecoderConfig;

/// The fields of a model's `config.json` that change the logits.
struct Published {
    name: &'static str,
    json: &'static str,
}

const PUBLISHED: [Published; 6] = [
    Published {
        name: "llama-3-8b",
        json: r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": false}"#,
    },
    Published {
        name: "llama-2-7b",
        json: r#"{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
            "hidden_act": "silu", "tie_word_embeddings": false}"#,
    },
    Published {
        name: "qwen2-7b",
        json: r#"{"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": false,
            "use_sliding_window": false, "sliding_window": 131072, "max_window_layers": 28}"#,
    },
    Published {
        name: "llama-3.2-1b",
        json: r#"{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "tie_word_embeddings": true}"#,
    },
    Published {
        name: "llama-2-13b",
        json: r#"{"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824,
            "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
            "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
            "hidden_act": "silu", "tie_word_embeddings": false}"#,
    },
    Published {
        name: "gpt2",
        json: r#"{"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024,
            "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05}"#,
    },
];

/// Returns the names that [`named`] accepts.
pub fn names() -> impl Iterator<Item = &'static str> {
    PUBLISHED.iter().map(|published| published.name)
}

/// Returns the configuration of a public model, if `name` is one of [`names`].
pub fn named(name: &str) -> Option<DecoderConfig> {
    let published = PUBLISHED.iter().find(|published| published.name == name)?;
    Some(DecoderConfig::from_json(published.json).expect("every published text is tested to read"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMETERS: [u64; 6] =
        [8_030_261_248, 6_738_415_616, 7_615_616_512, 1_235_814_400, 13_015_864_320, 124_439_808];

    /// Parameter counts equal those of the published weight files.
    #[test]
    fn parameter_counts_are_those_of_the_published_weights() {
        for (name, parameters) in names().zip(PARAMETERS) {
            assert_eq!(named(name).map(|config| config.parameters()), Some(parameters), "{name}");
        }
        assert_eq!(named("gpt-2"), None);
    }
}
