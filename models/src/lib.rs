//! Model families, read from the files of a Hugging Face folder.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | [`DecoderConfig`]: everything that a decoder computes, from `config.json` |
//! | `families` | [`Family`]: fields of each family's `config.json`, and names of its tensors |
//! | [`rope`] | [`Rope`]: rotary positions and their scaling |
//! | [`names`] | [`Param`]: every parameter of a decoder, and its tensor in a checkpoint |
//! | [`optimizer`] | [`Optimizer`]: AdamW and Muon over the flat weights of a model |
//! | [`parameters`] | [`Parameters`]: all parameters in one flat buffer, for training |
//! | [`weights`] | [`Weights`]: a checkpoint that holds exactly these parameters |
//! | [`generation`] | [`GenerationConfig`]: sampling and stop tokens, from `generation_config.json` |
//! | [`decoder`] | [`Decoder`]: the weights on a device, with prefill, decode and training |
//! | [`lora`] | [`Adapter`]: LoRA factors of the matrices of a decoder, in PEFT's files |
//! | [`matrices`] | [`Linear`]: the weight matrices of a decoder |
//! | [`footprint`] | [`Footprint`]: the memory of a [`Workload`] on a device, part by part |
//! | [`shapes`] | configurations of some public models |
//! | [`unet`] | U-Nets of diffusers, frame by frame |
//!
//! This crate does not use CubeCL. The bench takes its matmul cases from here, so that they have the shapes
//! of real models.
//!
//! ```
//! use models::{DecoderConfig, Fusion, shapes};
//!
//! let llama = shapes::named("llama-3.2-1b").expect("one of those published");
//! assert_eq!(llama.parameters(), 1_235_814_400);
//! assert_eq!(llama.linears(Fusion::Fused)[0].name, "qkv_proj");
//!
//! let error = DecoderConfig::from_json(r#"{"model_type": "rwkv"}"#).expect_err("no decoder of ours");
//! assert!(error.to_string().starts_with("config.json: `model_type` is \"rwkv\", expected one of llama"));
//! ```

#![warn(missing_docs)]

pub mod config;
pub mod decoder;
mod error;
pub mod export;
mod families;
mod fields;
pub mod footprint;
pub mod generation;
pub mod lora;
pub mod matrices;
pub mod names;
pub mod optimizer;
pub mod parameters;
pub mod policy;
pub mod rope;
pub mod shapes;
mod targets;
pub mod unet;
pub mod weights;
mod workload;

pub use config::{Activation, DecoderConfig, Family, Ffn, Layer, Norm, NormKind, Placement};
pub use decoder::{
    Activations, Adapted, Batch, Decoder, Example, FlatAdapter, FlatWeights, Gradients, KvCache,
    LoadOptions, Loading, Loss, MOST_PACKED, MicroBatch, OnDevice, PagedCache, Parking, Recompute,
    TokenStats, Trained, file_dtype, on_device,
};
pub use error::{Error, Fault};
pub use footprint::{Footprint, KvFormat, ModelPrecision};
pub use generation::GenerationConfig;
pub use lora::{Adapter, Factor, LoraOptions};
pub use matrices::{Fusion, Linear};
pub use names::{Param, Part, Side, Slot};
pub use optimizer::{AdamWOptions, Buffer, HostWeights, LossScale, Master, MuonOptions, Optimizer};
pub use parameters::{FlatTensor, Group, Parameters, Piece};
pub use policy::{Bound, KlFactor, Level, LossKind, Policy, PolicyRule, PolicySequence};
pub use rope::{Rope, Scaling};
pub use weights::{Stored, Weights};
pub use workload::{Offload, Training, Trains, Workload};
