//! Configurations of public models, from their `config.json`.

use serde_json::{Value, json};

use crate::{DecoderConfig, Error};

/// The fields of a model's `config.json` that change the logits.
struct Published {
    name: &'static str,
    json: &'static str,
}

const PUBLISHED: [Published; 19] = [
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
    Published {
        name: "llama-3-70b",
        json: r#"{"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
            "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": false}"#,
    },
    Published {
        name: "llama-3.2-3b",
        json: r#"{"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
            "num_hidden_layers": 28, "num_attention_heads": 24, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "hidden_act": "silu",
            "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "tie_word_embeddings": true}"#,
    },
    Published {
        name: "tinyllama-1.1b",
        json: r#"{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
            "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
            "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-05,
            "hidden_act": "silu", "tie_word_embeddings": false}"#,
    },
    Published {
        name: "mistral-7b",
        json: r#"{"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 32768, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "sliding_window": null, "hidden_act": "silu",
            "tie_word_embeddings": false}"#,
    },
    Published {
        name: "qwen2.5-0.5b",
        json: r#"{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
            "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": true,
            "use_sliding_window": false, "sliding_window": 32768, "max_window_layers": 24}"#,
    },
    Published {
        name: "qwen2.5-32b",
        json: r#"{"model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27648,
            "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
            "vocab_size": 152064, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0, "hidden_act": "silu", "tie_word_embeddings": false,
            "use_sliding_window": false, "sliding_window": 131072, "max_window_layers": 64}"#,
    },
    Published {
        name: "qwen3-0.6b",
        json: r#"{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000, "hidden_act": "silu",
            "attention_bias": false, "use_sliding_window": false, "tie_word_embeddings": true}"#,
    },
    Published {
        name: "qwen3-8b",
        json: r#"{"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
            "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000, "hidden_act": "silu",
            "attention_bias": false, "use_sliding_window": false, "tie_word_embeddings": false}"#,
    },
    Published {
        name: "gemma-2-2b",
        json: r#"{"model_type": "gemma2", "hidden_size": 2304, "intermediate_size": 9216,
            "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0}"#,
    },
    Published {
        name: "gemma-2-9b",
        json: r#"{"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
            "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0}"#,
    },
    Published {
        name: "gemma-3-1b",
        json: r#"{"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
            "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000, "rope_local_base_freq": 10000,
            "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
            "sliding_window": 512, "sliding_window_pattern": 6}"#,
    },
    Published {
        name: "phi-3-mini",
        json: r#"{"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "vocab_size": 32064, "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 2047, "hidden_act": "silu", "tie_word_embeddings": false}"#,
    },
    Published {
        name: "gpt2-xl",
        json: r#"{"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024,
            "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-05}"#,
    },
];

/// Returns the names that [`named`] accepts.
pub fn names() -> impl Iterator<Item = &'static str> {
    PUBLISHED.iter().map(|published| published.name)
}

/// Returns the configuration of a public model, if `name` is one of [`names`].
pub fn named(name: &str) -> Option<DecoderConfig> {
    Some(DecoderConfig::from_json(text(name)?).expect("every published text is tested to read"))
}

/// Returns the text of the `config.json` of a public model, without dtype and architecture.
pub fn text(name: &str) -> Option<&'static str> {
    Some(PUBLISHED.iter().find(|published| published.name == name)?.json)
}

/// Returns a `config.json` for weights of a dtype, such as `bfloat16`, given a text without it.
///
/// # Errors
/// Those of [`DecoderConfig::from_json`].
pub fn with_dtype(text: &str, dtype: &str) -> Result<String, Error> {
    let family = DecoderConfig::from_json(text)?.family;
    let read = serde_json::from_str::<Value>(text);
    let mut json = read.map_err(|why| Error::Json { file: "config.json", why })?;
    json["architectures"] = json!([family.architecture()]);
    json["dtype"] = dtype.into();
    if let Some(fields) = json.as_object_mut() {
        fields.remove("torch_dtype");
        // Of the weights that the shape was taken from.
        fields.remove("quantization_config");
    }
    Ok(format!("{json:#}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARAMETERS: [u64; 19] = [
        8_030_261_248,
        6_738_415_616,
        7_615_616_512,
        1_235_814_400,
        13_015_864_320,
        124_439_808,
        70_553_706_496,
        3_212_749_824,
        1_100_048_384,
        7_248_023_552,
        494_032_768,
        32_763_876_352,
        596_049_920,
        8_190_735_360,
        2_614_341_888,
        9_241_705_984,
        999_885_952,
        3_821_079_552,
        1_557_611_200,
    ];

    /// Parameter counts equal those of the published weight files.
    #[test]
    fn parameter_counts_are_those_of_the_published_weights() {
        for (name, parameters) in names().zip(PARAMETERS) {
            assert_eq!(named(name).map(|config| config.parameters()), Some(parameters), "{name}");
        }
        assert_eq!(named("gpt-2"), None);
    }
}
