use serde_json::{Map, Value, json};

use super::*;
use crate::{Fusion, Scaling, shapes};

/// Returns a small config of a family, overridden by `more`.
fn tiny(model_type: &str, more: Value) -> String {
    let mut fields = json!({
        "model_type": model_type, "architectures": ["Any"], "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100,
        "max_position_embeddings": 32, "rms_norm_eps": 1e-6,
    });
    if model_type.starts_with("gemma") {
        put(&mut fields, json!({ "query_pre_attn_scalar": 16, "sliding_window": 8 }));
    }
    if model_type == "gpt2" {
        fields = json!({ "model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32,
            "vocab_size": 100 });
    }
    put(&mut fields, more);
    fields.to_string()
}

fn put(fields: &mut Value, more: Value) {
    let more: Map<String, Value> = serde_json::from_value(more).expect("an object");
    fields.as_object_mut().expect("an object").extend(more);
}

fn read_tiny(model_type: &str, more: Value) -> DecoderConfig {
    let text = tiny(model_type, more);
    DecoderConfig::from_json(&text).unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn fails(model_type: &str, more: Value, message: &str) {
    let text = tiny(model_type, more);
    let error = DecoderConfig::from_json(&text).expect_err(message);
    assert_eq!(error.to_string(), format!("config.json: {message}"));
}

fn windows(config: &DecoderConfig) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.window).collect()
}

/// Parameter counts equal those of the published weight files, for families without a named shape.
#[test]
fn every_family_counts_its_parameters() {
    let sizes = |model_type: &str, sizes: [usize; 7], more: Value| {
        let [hidden, ffn, layers, heads, kv_heads, vocab, max_seq] = sizes;
        let mut all = json!({
            "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocab,
            "max_position_embeddings": max_seq,
        });
        put(&mut all, more);
        read_tiny(model_type, all).parameters()
    };
    // Mistral-7B-v0.1, Qwen3-8B, Qwen3-0.6B, gemma-2-9b, gemma-2-2b, gemma-3-1b, Phi-3-mini, GPT-2.
    for (model_type, shape, more, parameters) in [
        ("mistral", [4096, 14336, 32, 32, 8, 32000, 32768], json!({}), 7_241_732_096),
        ("qwen3", [4096, 12288, 36, 32, 8, 151_936, 40960], json!({}), 8_190_735_360),
        (
            "qwen3",
            [1024, 3072, 28, 16, 8, 151_936, 40960],
            json!({ "tie_word_embeddings": true, "head_dim": 128 }),
            596_049_920,
        ),
        ("gemma2", [3584, 14336, 42, 16, 8, 256_000, 8192], json!({}), 9_241_705_984),
        ("gemma2", [2304, 9216, 26, 8, 4, 256_000, 8192], json!({}), 2_614_341_888),
        ("gemma3_text", [1152, 6912, 26, 4, 1, 262_144, 32768], json!({}), 999_885_952),
        ("phi3", [3072, 8192, 32, 32, 32, 32064, 4096], json!({}), 3_821_079_552),
    ] {
        assert_eq!(sizes(model_type, shape, more), parameters, "{model_type} {shape:?}");
    }
    let gpt2 = json!({ "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257 });
    assert_eq!(read_tiny("gpt2", gpt2).parameters(), 124_439_808);
}

#[test]
fn linears_of_llama_3_8b() {
    let llama = shapes::named("llama-3-8b").expect("published");
    let sizes = |fusion| {
        let linears = llama.linears(fusion);
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
fn biases_are_where_the_family_has_them() {
    let biased = |config: &DecoderConfig| {
        let linears = config.linears(Fusion::Fused);
        linears.iter().filter(|l| l.bias).map(|l| l.name).collect::<Vec<_>>()
    };
    assert_eq!(biased(&read_tiny("qwen2", json!({}))), ["qkv_proj"]);
    let plain = read_tiny("llama", json!({}));
    assert_eq!(biased(&plain), [""; 0]);
    let all = read_tiny("llama", json!({ "attention_bias": true, "mlp_bias": true }));
    assert_eq!(biased(&all), ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]);
    // q, k, v, o and gate, up, down of three layers.
    assert_eq!(all.parameters() - plain.parameters(), 3 * (64 + 32 + 32 + 64 + 128 + 128 + 64));
}

#[test]
fn files_in_8_bits_say_from_where_on_columns_stay_as_they_are() {
    let threshold = |of| read_tiny("llama", json!({ "quantization_config": of })).int8_threshold;
    assert_eq!(threshold(json!(null)), None);
    assert_eq!(threshold(json!({ "load_in_4bit": true, "llm_int8_threshold": 6.0 })), None);
    assert_eq!(threshold(json!({ "load_in_8bit": true })), Some(6.0));
    let own = |number: f64| json!({ "load_in_8bit": true, "llm_int8_threshold": number });
    assert_eq!([0.0, 4.5].map(|number| threshold(own(number))), [Some(0.0), Some(4.5)]);
}

#[test]
fn weight_bytes_take_fractions_of_a_bit() {
    let llama = shapes::named("llama-3-8b").expect("published");
    assert_eq!(llama.weight_bytes(16.0), 2 * 8_030_261_248);
    assert_eq!(llama.weight_bytes(4.5), 4_517_021_952);
    let tied = shapes::named("llama-3.2-1b").expect("published");
    let odd = DecoderConfig { vocab: 1, hidden: 1, layers: Vec::new(), ..tied };
    assert_eq!([odd.parameters(), odd.weight_bytes(4.0), odd.weight_bytes(4.1)], [2, 1, 2]);
}

#[test]
fn absent_fields() {
    let config = read_tiny("llama", json!({}));
    assert_eq!(
        (config.head_dim, config.ropes[0].theta, config.tie_embeddings),
        (16, 10_000.0, false)
    );
    let nulls = json!({ "head_dim": null, "rope_scaling": null, "num_key_value_heads": null });
    let nulls = read_tiny("llama", nulls);
    assert_eq!(nulls, DecoderConfig { kv_heads: 4, ..config });
    let gemma = read_tiny("gemma2", json!({}));
    assert_eq!((gemma.head_dim, gemma.tie_embeddings), (256, true));
    assert_eq!(gemma.activation, Activation::GeluTanh);
    assert_eq!(windows(&gemma), [Some(8), None, Some(8)]);
    assert_eq!((gemma.softcap, gemma.logit_softcap), (Some(50.0), Some(30.0)));
    let nulls = json!({ "attn_logit_softcapping": null, "final_logit_softcapping": null });
    let nulls = read_tiny("gemma2", nulls);
    assert_eq!(nulls, DecoderConfig { softcap: None, logit_softcap: None, ..gemma });
    let gemma = read_tiny("gemma3_text", json!({}));
    assert_eq!((gemma.softcap, gemma.logit_softcap), (None, None));
    assert_eq!([gemma.ropes[0].theta, gemma.ropes[1].theta], [1e6, 1e4]);
    let gpt2 = read_tiny("gpt2", json!({}));
    assert_eq!((gpt2.ffn_hidden, gpt2.norm.eps, gpt2.tie_embeddings), (256, 1e-5, true));
}

/// Both formats, of transformers 4 and of 5, give the same configuration.
#[test]
fn old_and_new_files_read_alike() {
    let llama3 = json!({ "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16 });
    let with = |section: &Value, more: Value| {
        let mut section = section.clone();
        put(&mut section, more);
        section
    };
    let old = with(&llama3, json!({ "rope_type": "llama3" }));
    let new = with(&llama3, json!({ "rope_type": "llama3", "rope_theta": 5e5 }));
    assert_eq!(
        read_tiny("llama", json!({ "rope_theta": 5e5, "rope_scaling": old })),
        read_tiny("llama", json!({ "rope_parameters": new })),
    );
    let gemma = |fields| read_tiny("gemma3_text", fields);
    assert_eq!(
        gemma(
            json!({ "rope_theta": 1e3, "rope_local_base_freq": 10.0, "sliding_window_pattern": 2,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" } })
        ),
        gemma(json!({
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": { "rope_type": "linear", "factor": 8.0, "rope_theta": 1e3 },
                "sliding_attention": { "rope_type": "default", "rope_theta": 10.0 },
            }
        })),
    );
    let long = json!({ "short_factor": [1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [2, 2, 2, 2, 2, 2, 2, 2] });
    let phi = |kind: &str| {
        let scaling = with(&long, json!({ "type": kind }));
        read_tiny(
            "phi3",
            json!({ "rope_scaling": scaling, "original_max_position_embeddings": 16 }),
        )
    };
    assert_eq!(phi("su"), phi("longrope"));
    let factor = (1.0 + 2f64.ln() / 16f64.ln()).sqrt();
    assert_eq!(phi("su").ropes[0].attention_factor, factor);
}

/// Published files with fields that are read, or are known to have no effect.
#[test]
fn published_files_read() {
    let gemma = json!({
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "cache_implementation": "hybrid",
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 16,
        "query_pre_attn_scalar": 144, "sliding_window": 4096, "torch_dtype": "bfloat16", "pad_token_id": 0,
    });
    let gemma = read_tiny("gemma2", gemma);
    assert_eq!((gemma.layers[1].scale, gemma.embedding_scale), (1.0 / 12.0, Some(8.0)));
    let phi = json!({
        "auto_map": { "AutoConfig": "configuration_phi3.Phi3Config" }, "attention_bias": false, "mlp_bias": false,
        "embd_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false, "head_dim": 16,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "rope_scaling": null,
        "sliding_window": 262_144, "tie_word_embeddings": true,
    });
    let phi = read_tiny("phi3", phi);
    assert_eq!(
        (phi.ropes[0].dim, phi.layers[2].window, phi.tie_embeddings),
        (12, Some(262_144), true)
    );
    let gpt2 = json!({
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "layer_norm_epsilon": 1e-5,
        "n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": { "text-generation": { "do_sample": true } },
    });
    assert_eq!(read_tiny("gpt2", gpt2), read_tiny("gpt2", json!({})));
    let unscaled = read_tiny("gpt2", json!({ "scale_attn_weights": false }));
    assert!(unscaled.layers.iter().all(|layer| layer.scale == 1.0));
}

#[test]
fn windows_are_where_the_family_has_them() {
    let given = json!({ "sliding_window": 8 });
    assert_eq!(windows(&read_tiny("mistral", given.clone())), [Some(8); 3]);
    assert_eq!(windows(&read_tiny("mistral", json!({}))), [Some(4096); 3]);
    assert_eq!(windows(&read_tiny("mistral", json!({ "sliding_window": null }))), [None; 3]);
    assert_eq!(windows(&read_tiny("phi3", json!({}))), [None; 3]);
    assert_eq!(windows(&read_tiny("phi3", given.clone())), [Some(8); 3]);
    assert_eq!(windows(&read_tiny("qwen2", given)), [None; 3]);
    let used = json!({ "sliding_window": 8, "use_sliding_window": true, "max_window_layers": 2 });
    assert_eq!(windows(&read_tiny("qwen2", used.clone())), [None, None, Some(8)]);
    assert_eq!(windows(&read_tiny("qwen3", used)), [None, None, Some(8)]);
    let gemma = read_tiny("gemma3_text", json!({ "num_hidden_layers": 12 }));
    let full: Vec<_> = (0..12).filter(|layer| gemma.layers[*layer].window.is_none()).collect();
    assert_eq!(full, [5, 11]);
    assert!(
        gemma.layers.iter().all(|layer| layer.rope == Some(usize::from(layer.window.is_some())))
    );
}

#[test]
fn refusals_name_the_field_and_the_value() {
    let size = "expected an integer from 1 to 2147483647";
    for (value, shown) in [
        (json!(0), "0"),
        (json!(-4), "-4"),
        (json!(2.5), "2.5"),
        (json!(3e9), "3000000000.0"),
        (json!("4"), "\"4\""),
    ] {
        fails("llama", json!({ "vocab_size": value }), &format!("`vocab_size` is {shown}, {size}"));
    }
    for (more, message) in [
        (json!({ "vocab_size": null }), "`vocab_size` is missing"),
        (json!({ "model_type": 7 }), "`model_type` is 7, expected a string"),
        (
            json!({ "num_key_value_heads": 3 }),
            "`num_attention_heads` is 4, expected a multiple of `num_key_value_heads`, 3",
        ),
        (
            json!({ "hidden_size": 66 }),
            "`hidden_size` is 66, expected a multiple of `num_attention_heads`, 4",
        ),
        (
            json!({ "rms_norm_eps": 0 }),
            "`rms_norm_eps` is 0, expected a number above 0 in the range of f32",
        ),
        (
            json!({ "rms_norm_eps": -1e-6 }),
            "`rms_norm_eps` is -1e-6, expected a number above 0 in the range of f32",
        ),
        (
            json!({ "rms_norm_eps": 1e300 }),
            "`rms_norm_eps` is 1e+300, expected a number above 0 in the range of f32",
        ),
        (
            json!({ "num_hidden_layers": 2_000_000_000 }),
            "`num_hidden_layers` is 2000000000, expected an integer from 1 to 10000",
        ),
        (
            json!({ "tie_word_embeddings": "no" }),
            "`tie_word_embeddings` is \"no\", expected true or false",
        ),
        (
            json!({ "hidden_act": "relu2" }),
            "`hidden_act` is \"relu2\", which is not supported; expected silu, swish, gelu, gelu_new, \
             gelu_pytorch_tanh, gelu_fast",
        ),
        (
            json!({ "quantization_config": { "quant_method": "gptq" } }),
            "`quantization_config.quant_method` is \"gptq\", which is not supported; expected \"bitsandbytes\"",
        ),
        (
            json!({ "quantization_config": { "load_in_8bit": true, "llm_int8_threshold": -1.0 } }),
            "`quantization_config.llm_int8_threshold` is -1.0, expected a number of 0 or above",
        ),
        (json!({ "head_dim": 15 }), "`head_dim` is 15, expected an even number"),
        (
            json!({ "hidden_size": 62, "num_attention_heads": 2, "num_key_value_heads": 2 }),
            "`hidden_size` is 62, expected an even multiple of `num_attention_heads`",
        ),
    ] {
        fails("llama", more, message);
    }
}

#[test]
fn contradictions_are_refused() {
    for (model_type, more, message) in [
        (
            "qwen2",
            json!({ "layer_types": ["full_attention"] }),
            "`layer_types` is [\"full_attention\"], but `num_hidden_layers` is 3",
        ),
        (
            "qwen3",
            json!({ "layer_types": ["sliding_attention", "full_attention", "full_attention"] }),
            "`layer_types` is [\"sliding_attention\",\"full_attention\",\"full_attention\"], but \
             `use_sliding_window` is null",
        ),
        (
            "mistral",
            json!({ "sliding_window": 4, "layer_types": ["full_attention", "full_attention", "full_attention"] }),
            "`layer_types` is [\"full_attention\",\"full_attention\",\"full_attention\"], but \
             `sliding_window` is 4",
        ),
        (
            "gemma2",
            json!({ "layer_types": ["chunked_attention", "full_attention", "full_attention"] }),
            "`layer_types` is [\"chunked_attention\",\"full_attention\",\"full_attention\"], which is not \
             supported; expected full_attention, sliding_attention",
        ),
        (
            "gemma2",
            json!({ "hidden_act": "silu" }),
            "`hidden_act` is \"silu\", but `hidden_activation` is null",
        ),
        ("gemma2", json!({ "sliding_window": null }), "`sliding_window` is missing"),
        (
            "gemma3_text",
            json!({ "attn_logit_softcapping": 50.0 }),
            "`attn_logit_softcapping` is 50.0, which is not supported; expected ",
        ),
        (
            "gemma3_text",
            json!({ "use_bidirectional_attention": true }),
            "`use_bidirectional_attention` is true, which is not supported; expected false",
        ),
        (
            "llama",
            json!({ "is_causal": false }),
            "`is_causal` is false, which is not supported; expected true",
        ),
        (
            "gpt2",
            json!({ "add_cross_attention": true }),
            "`add_cross_attention` is true, which is not supported; expected false",
        ),
    ] {
        fails(model_type, more, message);
    }
}

#[test]
fn ropes_that_are_not_computed_are_refused() {
    let scaling = |section: Value| json!({ "rope_scaling": section });
    for (section, message) in [
        (
            json!({ "type": "mrope", "mrope_section": [16, 24, 24] }),
            "`rope_scaling.type` is \"mrope\", which is not supported; expected default, linear, dynamic, \
             llama3, yarn, longrope",
        ),
        (json!({ "factor": 4.0 }), "`rope_scaling.rope_type` is missing"),
        (json!({ "type": "linear" }), "`rope_scaling.factor` is missing"),
        (
            json!({ "type": "linear", "factor": -1.0 }),
            "`rope_scaling.factor` is -1.0, expected a number above 0",
        ),
        (
            json!({ "type": "linear", "rope_type": "yarn", "factor": 2.0 }),
            "`rope_scaling.rope_type` is \"yarn\", but `rope_scaling.type` is \"linear\"",
        ),
        (
            json!({ "type": "linear", "factor": 2.0, "beta_fast": 32 }),
            "`rope_scaling.beta_fast` is 32, which is not supported; expected factor, \
             original_max_position_embeddings",
        ),
        (
            json!({ "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0 }),
            "`rope_scaling.low_freq_factor` is 4.0, but `rope_scaling.high_freq_factor` is 4.0",
        ),
        (
            json!({ "type": "longrope", "short_factor": [1.0], "long_factor": [1.0] }),
            "`original_max_position_embeddings` is missing",
        ),
        (
            json!({ "type": "longrope", "short_factor": [1.0], "long_factor": [1.0],
                "original_max_position_embeddings": 16 }),
            "`rope_scaling.short_factor` is [1.0], expected a list of 8 numbers above 0",
        ),
    ] {
        fails("llama", scaling(section), message);
    }
    fails(
        "llama",
        json!({ "rope_theta": 1e4, "rope_parameters": { "rope_theta": 2e4 } }),
        "`rope_theta` is 10000.0, but `rope_parameters.rope_theta` is 20000.0",
    );
    fails(
        "llama",
        json!({ "rope_scaling": { "type": "linear", "factor": 2.0 }, "rope_parameters": { "rope_theta": 2e4 } }),
        "`rope_scaling` is {\"type\":\"linear\",\"factor\":2.0}, but `rope_parameters` is \
         {\"rope_theta\":20000.0}",
    );
    fails(
        "phi3",
        json!({ "partial_rotary_factor": 0.2 }),
        "`partial_rotary_factor` is 0.2, expected a share that rotates an even number above 0 of the 16 \
         dimensions of a head",
    );
}

#[test]
fn a_part_of_a_head_is_named_where_it_stands() {
    fails(
        "phi3",
        json!({ "rope_parameters": { "rope_theta": 1e4, "partial_rotary_factor": 0.2 } }),
        "`rope_parameters.partial_rotary_factor` is 0.2, expected a share that rotates an even number above 0 \
         of the 16 dimensions of a head",
    );
}

#[test]
fn yarn_takes_what_its_files_say() {
    let yarn = |more: Value| {
        let mut section =
            json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8 });
        put(&mut section, more);
        read_tiny("qwen2", json!({ "rope_scaling": section })).ropes[0].clone()
    };
    let plain = yarn(json!({}));
    assert_eq!(plain.attention_factor, 0.1 * 4f64.ln() + 1.0);
    assert_eq!(plain.context, Some(32));
    let scaling = |beta_fast, beta_slow, truncate| Scaling::Yarn {
        factor: 4.0,
        beta_fast,
        beta_slow,
        original_max_seq: 8,
        truncate,
    };
    assert_eq!(plain.scaling, scaling(32.0, 1.0, true));
    let given =
        json!({ "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "truncate": false });
    assert_eq!(yarn(given.clone()).scaling, scaling(16.0, 2.0, false));
    assert_eq!(yarn(given).attention_factor, 1.5);
    let both = yarn(json!({ "mscale": 2.0, "mscale_all_dim": 1.0 })).attention_factor;
    assert_eq!(both, (0.2 * 4f64.ln() + 1.0) / (0.1 * 4f64.ln() + 1.0));
    assert_eq!(yarn(json!({ "mscale": 2.0, "mscale_all_dim": 0 })), plain);
}

#[test]
fn what_is_no_config_is_refused() {
    let error = |text: &str| DecoderConfig::from_json(text).expect_err(text).to_string();
    assert_eq!(error("[1]"), "config.json is not a JSON object");
    assert_eq!(error("{}"), "config.json: `model_type` is missing");
    assert_eq!(
        error(r#"{"model_type": "mamba"}"#),
        "config.json: `model_type` is \"mamba\", expected one of llama, mistral, qwen2, qwen3, gemma2, \
         gemma3_text, phi3, gpt2"
    );
    assert!(error("{").starts_with("config.json is not JSON: "));
}

#[test]
fn what_a_config_claims_of_its_weights_is_read() {
    let claimed = |quantization: Value| {
        claimed_bits(&json!({ "quantization_config": quantization }).to_string())
    };
    assert_eq!(claimed(json!({ "load_in_4bit": true })), Some(4));
    let eight = json!({ "load_in_4bit": false, "load_in_8bit": true });
    assert_eq!(claimed(eight), Some(8));
    assert_eq!(claimed(json!({ "load_in_4bit": "yes" })), None);
    assert_eq!(claimed(Value::Null), None);
}

#[test]
fn absurd_sizes_do_not_overflow() {
    let max = 2_147_483_647;
    let config = json!({
        "hidden_size": max, "intermediate_size": max, "num_hidden_layers": 10_000,
        "num_attention_heads": max, "num_key_value_heads": max, "vocab_size": max, "head_dim": 2_147_483_646,
    });
    assert_eq!(read_tiny("phi3", config).parameters(), u64::MAX);
}
