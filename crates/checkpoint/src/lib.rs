//! Reads and writes weights in safetensors files, single or sharded, with bitsandbytes' quantised formats.
//!
//! | module | contents |
//! |---|---|
//! | `file` | [`Checkpoint`]: a memory-mapped file or folder of shards |
//! | `encoded` | [`Encoded`]: a quantised weight of any format as buffers |
//! | `four_bit` | [`FourBit`]: NF4 and FP4, with plain and nested absmax |
//! | `staged` | [`Staged`]: files of a folder that are replaced together |
//! | `weight` | [`Weight`], [`Linear`], [`Int8`]: weights by name |
//! | `write` | [`Writer`]: writes one tensor at a time, so that a checkpoint need not fit in memory |
//!
//! The tensors present determine the format of a weight; `config.json` is not used. A [`FourBit`] or
//! [`Int8`] read from a file is written back with the same names, dtypes, shapes and bytes.
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
pub use error::{Error, Found, Reason, list, short, writable};
pub use file::{Checkpoint, Mapped, Tensor, ends};
pub use four_bit::{Absmax, FourBit, Layout, Nested};
pub use quant::{DType, WeightFormat};
pub use staged::{Staged, is_staging, recover};
pub use weight::{Int8, Linear, Weight};
pub use write::{Plan, Writer};
