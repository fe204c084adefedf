//! Model families.
//!
//! | module | what it holds |
//! |---|---|
//! | [`config`] | a decoder's sizes, from a Hugging Face `config.json`; its matrices |
//! | [`shapes`] | the configurations of a few public models |
//!
//! This crate never sees CubeCL. For now it holds no layers: the bench takes its matmul cases from
//! here, so that they are those of real models.

pub mod config;
pub mod shapes;

pub use config::{ConfigError, DecoderConfig, Family, Fusion, Linear};
