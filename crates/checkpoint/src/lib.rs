//! Weights in files: safetensors, whole and in shards, and what bitsandbytes makes of them.
//!
//! | module | what it holds |
//! |---|---|
//! | `file` | [`Checkpoint`]: a file or a folder of shards, mapped, not read |
//! | `encoded` | [`Encoded`]: a quantised weight as buffers, whatever its format |
//! | `four_bit` | [`FourBit`]: NF4 and FP4, with plain and nested absmax |
//! | `staged` | [`Staged`]: a folder that is written next to the one that it replaces |
//! | `weight` | [`Weight`], [`Linear`], [`Int8`]: what lies under a name |
//! | `write` | [`Writer`]: tensors one at a time, so that no whole checkpoint is ever in memory |
//!
//! Whether a weight is quantized, and how, is told by the tensors that are there, never by a
//! `config.json`. What a [`FourBit`] or [`Int8`] of a file is written as has the names, dtypes, shapes and
//! bytes that it was read from.
//!
//! ```
//! use checkpoint::{Checkpoint, DType, Error, Plan, Tensor, Weight, Writer};
//!
//! let path = std::env::temp_dir().join(format!("checkpoint-{}.safetensors", std::process::id()));
//! let plan = [Plan::new("mlp.up_proj.weight", DType::F32, &[1, 2])];
//! let mut writer = Writer::create(&path, plan)?;
//! writer.write("mlp.up_proj.weight", &Tensor::new(DType::F32, &[1, 2], vec![0; 8]))?;
//! writer.finish()?;
//!
//! let checkpoint = Checkpoint::open(&path)?;
//! let linear = checkpoint.linear("mlp.up_proj")?;
//! assert!(matches!(linear.weight, Weight::Dense(_)) && linear.bias.is_none());
//! # std::fs::remove_file(path).expect("written above");
//! # Ok::<(), Error>(())
//! ```
//!
//! Source: the safetensors format, <https://github.com/huggingface/safetensors>; bitsandbytes 95f9af3,
//! `functional.py::QuantState`, `utils.py::pack_dict_to_tensor`, `nn/modules.py`.

mod dtype;
mod encoded;
mod error;
mod file;
mod four_bit;
mod staged;
mod state;
mod weight;
mod write;

pub use encoded::{Encoded, NotStored};
pub use error::{Error, Found, Reason, list, short};
pub use file::{Checkpoint, Mapped, Tensor, ends};
pub use four_bit::{Absmax, FourBit, Layout, Nested};
pub use quant::{DType, WeightFormat};
pub use staged::Staged;
pub use weight::{Int8, Linear, Weight};
pub use write::{Plan, Writer};
