//! Model families, from the files of a Hugging Face folder.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | [`DecoderConfig`]: what a decoder computes, from `config.json` |
//! | `families` | [`Family`]: how each family's file reads, and what its tensors are called |
//! | [`rope`] | [`Rope`]: rotary positions and how they are stretched |
//! | [`names`] | [`Param`]: every parameter of a decoder, and where a checkpoint has it |
//! | [`weights`] | [`Weights`]: a checkpoint that holds exactly these |
//! | [`generation`] | [`GenerationConfig`]: sampling and ends, from `generation_config.json` |
//! | [`decoder`] | [`Decoder`]: the weights on a device, and what it computes with them |
//! | [`lora`] | [`Adapter`]: what training adds to the matrices of a decoder, and PEFT's files of it |
//! | [`matrices`] | [`Linear`]: the matrix products of a decoder |
//! | [`footprint`] | [`Footprint`]: the memory of a [`Workload`] on a device, part by part |
//! | [`shapes`] | the configurations of a few public models |
//!
//! This crate never sees CubeCL. The bench takes its matmul cases from here, so that they are those of real
//! models.
//!
//! ```
//! use models::{DecoderConfig, Fusion, shapes};
//!
//! let llama = shapes::named("llama-3.2-1b").expect("one of those published");
//! assert_eq!(llama.parameters(), 1_235_814_400);
//! assert_eq!(llama.linears(Fusion::Fused)[0].name, "qkv_proj");
//!
//! let error = DecoderConfig::from_json(r#"{"model_type": "rwkv"}"#).expect_err("no decoder of ours");
//! assert!(error.to_string().starts_with("config.json: `model_type` is \"rwkv\", which is none of llama"));
//! ```

#![warn(missing_docs)]

pub mod config;
pub mod decoder;
mod error;
mod families;
mod fields;
pub mod footprint;
pub mod generation;
pub mod lora;
pub mod matrices;
pub mod names;
pub mod rope;
pub mod shapes;
pub mod weights;
mod workload;

pub use config::{Activation, DecoderConfig, Family, Ffn, Layer, Norm, NormKind, Placement};
pub use decoder::{
    Adaptation, Decoder, Example, KvCache, Learned, LoadOptions, Loading, OnDevice, Recompute,
    file_dtype, on_device,
};
pub use error::{Error, Fault};
pub use footprint::{Footprint, KvFormat, ModelPrecision};
pub use generation::GenerationConfig;
pub use lora::{Adapter, Factor, LoraOptions};
pub use matrices::{Fusion, Linear};
pub use names::{Param, Part, Side, Slot};
pub use rope::{Rope, Scaling};
pub use weights::{Stored, Weights};
pub use workload::{Training, Workload};
