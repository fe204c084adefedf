//! The sizes of a decoder-only transformer, and the matrix products that follow from them.
//!
//! What changes no shape (RoPE scaling, sliding windows, soft caps, activation) is not read.

use serde_json::{Map, Value};

/// Block structure, named by `model_type` in `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Gemma2,
}

/// Sizes of a decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DecoderConfig {
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside of the feed-forward block.
    pub ffn_hidden: usize,
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; `heads * head_dim` need not be `hidden`.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Positions the model was made for.
    pub max_seq: usize,
    pub norm_eps: f64,
    pub rope_theta: f64,
    /// The output projection is the embedding itself.
    pub tie_embeddings: bool,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub ffn_bias: bool,
}

/// One weight matrix: out [tokens, n] = in [tokens, k] · weight [n, k]ᵀ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// The checkpoint's name for it, such as `q_proj`; `qkv_proj` and `gate_up_proj` when fused.
    pub name: &'static str,
    /// Output features.
    pub n: usize,
    /// Input features.
    pub k: usize,
    pub bias: bool,
    /// Once in every layer, or once in the model.
    pub per_layer: bool,
}

/// Whether matrices that read the same input are one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fusion {
    /// As checkpoints store them.
    Separate,
    /// Query, key and value are one matrix, gate and up another.
    Fused,
}

/// Why a `config.json` is none of ours; names the field and the value.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("config.json is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    #[error("config.json is not an object")]
    NotAnObject,
    #[error("config.json has no `{field}`")]
    Missing { field: &'static str },
    #[error("`{field}` is {value}, which is not {expected}")]
    Malformed { field: &'static str, value: Value, expected: &'static str },
    #[error("`model_type` is \"{value}\", which is none of {}", Family::known())]
    UnknownModelType { value: String },
    #[error("`{field}` is {value}, which is not a multiple of `{divisor_field}`, {divisor}")]
    NotMultiple { field: &'static str, value: usize, divisor_field: &'static str, divisor: usize },
}

impl Family {
    /// Every family.
    pub const ALL: [Self; 5] = [Self::Llama, Self::Mistral, Self::Qwen2, Self::Qwen3, Self::Gemma2];

    /// Its name in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma2 => "gemma2",
        }
    }

    fn known() -> String {
        Self::ALL.map(Self::model_type).join(", ")
    }
}

impl DecoderConfig {
    /// Reads a Hugging Face `config.json`.
    ///
    /// A field that is absent or null takes the value that the family's published configs leave
    /// out: `head_dim` is `hidden_size / num_attention_heads` (128 for qwen3, 256 for gemma2),
    /// `num_key_value_heads` of llama is `num_attention_heads`, `rope_theta` is 10000, biases are
    /// off, and only gemma2 ties its embeddings.
    ///
    /// # Errors
    /// Text that is not a JSON object; an unknown `model_type`; a field that is missing, of the
    /// wrong type, zero or out of range; heads that kv_heads do not divide.
    ///
    /// Source: the configuration classes of Hugging Face transformers.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        let Value::Object(map) = serde_json::from_str(text)? else {
            return Err(ConfigError::NotAnObject);
        };
        let fields = Fields(&map);
        let family = fields.family()?;
        let hidden = fields.size("hidden_size")?;
        let heads = fields.size("num_attention_heads")?;
        let kv_heads = match family {
            Family::Llama => fields.optional_size("num_key_value_heads")?.unwrap_or(heads),
            _ => fields.size("num_key_value_heads")?,
        };
        divides(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))?;
        let head_dim = match (fields.optional_size("head_dim")?, family) {
            (Some(head_dim), _) => head_dim,
            (None, Family::Qwen3) => 128,
            (None, Family::Gemma2) => 256,
            (None, Family::Llama | Family::Mistral | Family::Qwen2) => {
                divides(("hidden_size", hidden), ("num_attention_heads", heads))?;
                hidden / heads
            }
        };
        let attention_bias = fields.flag("attention_bias")?.unwrap_or(false);
        Ok(Self {
            family,
            hidden,
            ffn_hidden: fields.size("intermediate_size")?,
            layers: fields.size("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            vocab: fields.size("vocab_size")?,
            max_seq: fields.size("max_position_embeddings")?,
            norm_eps: fields
                .optional_real("rms_norm_eps")?
                .ok_or(ConfigError::Missing { field: "rms_norm_eps" })?,
            rope_theta: fields.rope_theta()?.unwrap_or(10_000.0),
            tie_embeddings: fields.flag("tie_word_embeddings")?.unwrap_or(family == Family::Gemma2),
            qkv_bias: attention_bias || family == Family::Qwen2,
            out_bias: attention_bias,
            ffn_bias: fields.flag("mlp_bias")?.unwrap_or(false),
        })
    }

    /// Every weight matrix that a token passes, in the order it does; the output projection is
    /// last, tied or not.
    pub fn linears(&self, fusion: Fusion) -> Vec<Linear> {
        let Self { hidden, ffn_hidden, qkv_bias, ffn_bias, .. } = *self;
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let layer = |name, n, k, bias| Linear { name, n, k, bias, per_layer: true };
        let out = layer("o_proj", hidden, q, self.out_bias);
        let down = layer("down_proj", hidden, ffn_hidden, ffn_bias);
        let head =
            Linear { name: "lm_head", n: self.vocab, k: hidden, bias: false, per_layer: false };
        match fusion {
            Fusion::Separate => vec![
                layer("q_proj", q, hidden, qkv_bias),
                layer("k_proj", kv, hidden, qkv_bias),
                layer("v_proj", kv, hidden, qkv_bias),
                out,
                layer("gate_proj", ffn_hidden, hidden, ffn_bias),
                layer("up_proj", ffn_hidden, hidden, ffn_bias),
                down,
                head,
            ],
            Fusion::Fused => vec![
                layer("qkv_proj", q + 2 * kv, hidden, qkv_bias),
                out,
                layer("gate_up_proj", 2 * ffn_hidden, hidden, ffn_bias),
                down,
                head,
            ],
        }
    }

    /// Trained values, tied embeddings counted once: matrices, biases, embedding and norms.
    pub fn parameters(&self) -> u64 {
        let wide = |size: usize| size as u128; // Absurd sizes overflow 64 bits.
        let norms = wide(self.layers) * wide(self.norms_of_layer()) + wide(self.hidden);
        let mut total = wide(self.vocab) * wide(self.hidden) + norms;
        for linear in self.linears(Fusion::Separate) {
            if linear.name == "lm_head" && self.tie_embeddings {
                continue;
            }
            let repeats = if linear.per_layer { self.layers } else { 1 };
            let inputs = wide(linear.k) + u128::from(linear.bias);
            total += wide(repeats) * wide(linear.n) * inputs;
        }
        u64::try_from(total).unwrap_or(u64::MAX)
    }

    /// Bytes of all parameters.
    ///
    /// # Units
    /// `bits` per parameter, which may be a fraction: 4 bits with one `f32` for every 64 are 4.5.
    pub fn weight_bytes(&self, bits: f64) -> u64 {
        (self.parameters() as f64 * bits / 8.0).ceil() as u64
    }

    fn norms_of_layer(&self) -> usize {
        match self.family {
            Family::Llama | Family::Mistral | Family::Qwen2 => 2 * self.hidden,
            Family::Qwen3 => 2 * self.hidden + 2 * self.head_dim, // Of queries and of keys.
            Family::Gemma2 => 4 * self.hidden,                    // Before and after each block.
        }
    }
}

fn divides(
    (field, value): (&'static str, usize),
    (divisor_field, divisor): (&'static str, usize),
) -> Result<(), ConfigError> {
    if value.is_multiple_of(divisor) {
        Ok(())
    } else {
        Err(ConfigError::NotMultiple { field, value, divisor_field, divisor })
    }
}

struct Fields<'a>(&'a Map<String, Value>);

impl Fields<'_> {
    /// The field, unless it is absent or null; `read` says no to what is not `expected`.
    fn optional<T>(
        &self,
        field: &'static str,
        expected: &'static str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ConfigError> {
        match self.0.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match read(value) {
                Some(read) => Ok(Some(read)),
                None => Err(ConfigError::Malformed { field, value: value.clone(), expected }),
            },
        }
    }

    fn optional_size(&self, field: &'static str) -> Result<Option<usize>, ConfigError> {
        self.optional(field, "an integer from 1 to 2147483647", |value| {
            let size = i32::try_from(value.as_u64()?).ok()?;
            usize::try_from(size).ok().filter(|&size| size > 0)
        })
    }

    fn size(&self, field: &'static str) -> Result<usize, ConfigError> {
        self.optional_size(field)?.ok_or(ConfigError::Missing { field })
    }

    fn optional_real(&self, field: &'static str) -> Result<Option<f64>, ConfigError> {
        self.optional(field, "a number above zero", |value| value.as_f64().filter(|&x| x > 0.0))
    }

    fn flag(&self, field: &'static str) -> Result<Option<bool>, ConfigError> {
        self.optional(field, "true or false", Value::as_bool)
    }

    /// At the top, or within `rope_parameters` where newer files put it.
    fn rope_theta(&self) -> Result<Option<f64>, ConfigError> {
        match (self.optional_real("rope_theta")?, self.0.get("rope_parameters")) {
            (None, Some(Value::Object(map))) => Fields(map).optional_real("rope_theta"),
            (theta, _) => Ok(theta),
        }
    }

    fn family(&self) -> Result<Family, ConfigError> {
        let name = self
            .optional("model_type", "a string", |value| value.as_str().map(str::to_owned))?
            .ok_or(ConfigError::Missing { field: "model_type" })?;
        Family::ALL
            .into_iter()
            .find(|family| family.model_type() == name)
            .ok_or(ConfigError::UnknownModelType { value: name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shapes;

    /// The sizes of a published `config.json`: hidden_size, intermediate_size, num_hidden_layers,
    /// num_attention_heads, num_key_value_heads, vocab_size, max_position_embeddings.
    fn json(model_type: &str, sizes: [usize; 7], rest: &str) -> String {
        let [hidden, ffn, layers, heads, kv_heads, vocab, max_seq] = sizes;
        format!(
            r#"{{"architectures": ["Any"], "hidden_act": "silu", "model_type": "{model_type}",
            "hidden_size": {hidden}, "intermediate_size": {ffn}, "num_hidden_layers": {layers},
            "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads},
            "vocab_size": {vocab}, "max_position_embeddings": {max_seq}{rest}}}"#
        )
    }

    fn tiny(rest: &str) -> String {
        json("llama", [64, 128, 2, 4, 2, 100, 32], &format!(r#", "rms_norm_eps": 1e-6{rest}"#))
    }

    fn fails(text: &str, message: &str) {
        match DecoderConfig::from_json(text) {
            Ok(config) => panic!("read {config:?} where this was due: {message}"),
            Err(error) => assert_eq!(error.to_string(), message),
        }
    }

    #[test]
    fn published_configs_give_the_named_shapes() -> Result<(), ConfigError> {
        for (text, expected) in [
            (
                json(
                    "llama",
                    [4096, 14336, 32, 32, 8, 128_256, 8192],
                    r#", "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "rope_scaling": null,
                    "attention_bias": false, "tie_word_embeddings": false"#,
                ),
                shapes::LLAMA_3_8B,
            ),
            (
                json(
                    "llama",
                    [4096, 11008, 32, 32, 32, 32000, 4096],
                    r#", "rms_norm_eps": 1e-05, "tie_word_embeddings": false"#,
                ),
                shapes::LLAMA_2_7B,
            ),
            (
                json(
                    "qwen2",
                    [3584, 18944, 28, 28, 4, 152_064, 131_072],
                    r#", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
                    "tie_word_embeddings": false"#,
                ),
                shapes::QWEN2_7B,
            ),
            (
                json(
                    "llama",
                    [2048, 8192, 16, 32, 8, 128_256, 131_072],
                    r#", "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "head_dim": 64,
                    "mlp_bias": false, "tie_word_embeddings": true"#,
                ),
                shapes::LLAMA_3_2_1B,
            ),
        ] {
            assert_eq!(DecoderConfig::from_json(&text)?, expected);
        }
        Ok(())
    }

    /// Parameter counts that the published weight files add up to, for the families without a
    /// named shape.
    #[test]
    fn every_family_counts_its_parameters() -> Result<(), ConfigError> {
        for (model_type, sizes, rest, parameters) in [
            // Mistral-7B-v0.1, Qwen3-8B, Qwen3-0.6B, gemma-2-9b, gemma-2-2b.
            ("mistral", [4096, 14336, 32, 32, 8, 32000, 32768], "", 7_241_732_096),
            ("qwen3", [4096, 12288, 36, 32, 8, 151_936, 40960], "", 8_190_735_360),
            (
                "qwen3",
                [1024, 3072, 28, 16, 8, 151_936, 40960],
                r#", "tie_word_embeddings": true, "head_dim": 128"#,
                596_049_920,
            ),
            ("gemma2", [3584, 14336, 42, 16, 8, 256_000, 8192], "", 9_241_705_984),
            ("gemma2", [2304, 9216, 26, 8, 4, 256_000, 8192], "", 2_614_341_888),
        ] {
            let text = json(model_type, sizes, &format!(r#", "rms_norm_eps": 1e-6{rest}"#));
            let config = DecoderConfig::from_json(&text)?;
            assert_eq!(config.parameters(), parameters, "{model_type} {sizes:?}");
        }
        Ok(())
    }

    #[test]
    fn linears_of_llama_3_8b() {
        let sizes = |fusion| {
            let linears = shapes::LLAMA_3_8B.linears(fusion);
            linears.iter().map(|l| (l.name, l.n, l.k, l.per_layer)).collect::<Vec<_>>()
        };
        assert_eq!(
            sizes(Fusion::Separate),
            [
                ("q_proj", 4096, 4096, true),
                ("k_proj", 1024, 4096, true),
                ("v_proj", 1024, 4096, true),
                ("o_proj", 4096, 4096, true),
                ("gate_proj", 14336, 4096, true),
                ("up_proj", 14336, 4096, true),
                ("down_proj", 4096, 14336, true),
                ("lm_head", 128_256, 4096, false),
            ]
        );
        assert_eq!(
            sizes(Fusion::Fused),
            [
                ("qkv_proj", 6144, 4096, true),
                ("o_proj", 4096, 4096, true),
                ("gate_up_proj", 28672, 4096, true),
                ("down_proj", 4096, 14336, true),
                ("lm_head", 128_256, 4096, false),
            ]
        );
    }

    #[test]
    fn biases_are_where_the_family_has_them() -> Result<(), ConfigError> {
        let biased = |config: DecoderConfig| {
            let linears = config.linears(Fusion::Fused);
            linears.iter().filter(|l| l.bias).map(|l| l.name).collect::<Vec<_>>()
        };
        assert_eq!(biased(shapes::QWEN2_7B), ["qkv_proj"]);
        assert_eq!(biased(shapes::LLAMA_3_8B), [""; 0]);
        let all = DecoderConfig::from_json(&tiny(r#", "attention_bias": true, "mlp_bias": true"#))?;
        assert_eq!(biased(all), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]);
        let plain = DecoderConfig::from_json(&tiny(""))?;
        // q, k, v, o and gate, up, down of two layers.
        assert_eq!(all.parameters() - plain.parameters(), 2 * (64 + 32 + 32 + 64 + 128 + 128 + 64));
        Ok(())
    }

    #[test]
    fn weight_bytes_take_fractions_of_a_bit() {
        assert_eq!(shapes::LLAMA_3_8B.weight_bytes(16.0), 2 * 8_030_261_248);
        assert_eq!(shapes::LLAMA_3_8B.weight_bytes(4.5), 4_517_021_952);
        let odd = DecoderConfig { vocab: 1, hidden: 1, layers: 0, ..shapes::LLAMA_3_2_1B };
        assert_eq!([odd.parameters(), odd.weight_bytes(4.0), odd.weight_bytes(4.1)], [2, 1, 2]);
    }

    #[test]
    fn absent_fields() -> Result<(), ConfigError> {
        let config = DecoderConfig::from_json(&tiny(""))?;
        assert_eq!(config.head_dim, 16);
        assert_eq!(config.rope_theta, 10_000.0);
        assert!(!config.tie_embeddings);
        let nested = tiny(r#", "rope_parameters": {"rope_theta": 5e5}, "head_dim": null"#);
        let nested = DecoderConfig::from_json(&nested)?;
        assert_eq!((nested.rope_theta, nested.head_dim), (5e5, 16));
        let old = tiny("").replace(r#""num_key_value_heads": 2,"#, "");
        assert_eq!(DecoderConfig::from_json(&old)?.kv_heads, 4);
        let gemma = tiny("").replace("llama", "gemma2");
        let gemma = DecoderConfig::from_json(&gemma)?;
        assert_eq!((gemma.head_dim, gemma.tie_embeddings), (256, true));
        Ok(())
    }

    #[test]
    fn errors_name_the_field_and_the_value() {
        fails("[1]", "config.json is not an object");
        fails("{}", "config.json has no `model_type`");
        fails(
            &tiny("").replace("llama", "mamba"),
            "`model_type` is \"mamba\", which is none of llama, mistral, qwen2, qwen3, gemma2",
        );
        fails(&tiny("").replace("\"llama\"", "7"), "`model_type` is 7, which is not a string");
        fails(&tiny("").replace(r#""vocab_size": 100,"#, ""), "config.json has no `vocab_size`");
        for (value, shown) in
            [("0", "0"), ("-4", "-4"), ("2.5", "2.5"), ("3e9", "3000000000.0"), ("\"4\"", "\"4\"")]
        {
            fails(
                &tiny("").replace(r#""vocab_size": 100"#, &format!("\"vocab_size\": {value}")),
                &format!("`vocab_size` is {shown}, which is not an integer from 1 to 2147483647"),
            );
        }
        fails(
            &tiny("").replace(r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 3"#),
            "`num_attention_heads` is 4, which is not a multiple of `num_key_value_heads`, 3",
        );
        fails(
            &tiny("").replace(r#""hidden_size": 64"#, r#""hidden_size": 66"#),
            "`hidden_size` is 66, which is not a multiple of `num_attention_heads`, 4",
        );
        fails(
            &tiny("").replace("1e-6", "0"),
            "`rms_norm_eps` is 0, which is not a number above zero",
        );
        fails(&tiny("").replace("1e-6", "null"), "config.json has no `rms_norm_eps`");
        fails(
            &tiny(r#", "tie_word_embeddings": "no""#),
            "`tie_word_embeddings` is \"no\", which is not true or false",
        );
        assert!(matches!(DecoderConfig::from_json("{"), Err(ConfigError::Json(_))));
    }

    #[test]
    fn absurd_sizes_do_not_overflow() -> Result<(), ConfigError> {
        let text =
            json("llama", [2_147_483_647; 7], r#", "rms_norm_eps": 1, "head_dim": 2147483647"#);
        assert_eq!(DecoderConfig::from_json(&text)?.parameters(), u64::MAX);
        Ok(())
    }
}
