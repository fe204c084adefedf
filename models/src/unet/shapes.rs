//! Configurations of public U-Nets and of benchmarks.

use serde_json::json;

use super::UnetConfig;

/// Base channels of the benchmarks' U-Nets: factors 1, 2, 4, 8, four residual blocks a level, attention in levels 2 to 4 on the
/// way down and 3 to 2 on the way up.
const BENCHMARKS: [(&str, usize); 5] =
    [("unet-38m", 40), ("unet-97m", 64), ("unet-390m", 128), ("unet-880m", 192), ("unet-1b", 208)];

/// Stable Diffusion 1.5.
const SD15: &str = r#"{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "attention_head_dim": 8,
    "block_out_channels": [320, 640, 1280, 1280], "center_input_sample": false, "cross_attention_dim": 768,
    "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
    "downsample_padding": 1, "flip_sin_to_cos": true, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2,
    "mid_block_scale_factor": 1, "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4, "sample_size": 64,
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"]}"#;

/// Stable Diffusion XL, the base model.
const SDXL: &str = r#"{"_class_name": "UNet2DConditionModel", "act_fn": "silu", "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256, "attention_head_dim": [5, 10, 20], "block_out_channels": [320, 640, 1280],
    "center_input_sample": false, "cross_attention_dim": 2048,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"], "downsample_padding": 1,
    "flip_sin_to_cos": true, "freq_shift": 0, "in_channels": 4, "layers_per_block": 2, "mid_block_scale_factor": 1,
    "norm_eps": 1e-05, "norm_num_groups": 32, "out_channels": 4, "projection_class_embeddings_input_dim": 2816,
    "sample_size": 128, "transformer_layers_per_block": [1, 2, 10],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"], "use_linear_projection": true}"#;

/// Returns the names of all shapes.
pub fn names() -> impl Iterator<Item = &'static str> {
    BENCHMARKS.iter().map(|(name, _)| *name).chain(["sd15", "sdxl"])
}

/// Returns the `config.json` of a shape.
pub fn text(name: &str) -> Option<String> {
    match name {
        "sd15" => return Some(SD15.to_owned()),
        "sdxl" => return Some(SDXL.to_owned()),
        _ => {}
    }
    let (_, base) = BENCHMARKS.iter().find(|(own, _)| *own == name)?;
    let config = json!({
        "_class_name": "UNet2DModel",
        "sample_size": 64,
        "in_channels": 3,
        "out_channels": 3,
        "block_out_channels": [base, 2 * base, 4 * base, 8 * base],
        "layers_per_block": 4,
        "down_block_types": ["DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"],
        "up_block_types": ["UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"],
        "norm_num_groups": 8,
        "attention_head_dim": 8,
    });
    Some(config.to_string())
}

/// Returns the configuration of a shape.
pub fn named(name: &str) -> Option<UnetConfig> {
    Some(UnetConfig::from_json(&text(name)?).expect("shapes are tested"))
}
