//! Options with a fixed set of values, shared by all programs.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// GPUs with a profile recorded in `arch`; a device can be restricted to one of them.
pub const PROFILES: [&str; 4] = ["h200", "rtx4080", "rtx4090", "rtx5090"];

/// Dtypes that a model can compute in, widest first; tf32 multiplies f32 values in reduced precision.
pub const DTYPES: [&str; 4] = ["f32", "tf32", "f16", "bf16"];

/// A word that is not a value of the option.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {kind} `{word}`\nhint: use one of {known}")]
pub struct UnknownChoice {
    /// Name of the option, such as `backend`.
    pub kind: &'static str,
    pub word: String,
    /// All words of the option, separated by commas.
    pub known: String,
}

/// Declares an option: its values, their words, and their help texts (the doc comments).
macro_rules! choice {
    (
        $(#[$attribute:meta])* $name:ident is a $kind:literal
        $(#[doc = $help:literal] $value:ident = $word:literal,)+
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $(#[doc = $help] $value,)+
        }

        impl $name {
            /// All values.
            pub const ALL: [Self; [$($word),+].len()] = [$(Self::$value),+];

            /// Returns the word used in flags, records and caches.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)+
                }
            }

            /// Returns the meaning of the value, for a help text.
            pub const fn help(self) -> &'static str {
                match self {
                    $(Self::$value => $help.trim_ascii(),)+
                }
            }

            /// Returns all words, separated by commas.
            pub fn words() -> String {
                Self::ALL.map(Self::name).join(", ")
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $name {
            type Err = UnknownChoice;

            fn from_str(word: &str) -> Result<Self, UnknownChoice> {
                Self::ALL.into_iter().find(|value| value.name() == word).ok_or_else(|| {
                    UnknownChoice { kind: $kind, word: word.to_owned(), known: Self::words() }
                })
            }
        }
    };
}

choice! {
    /// A runtime and its kernel language, fastest first; `auto` chooses in this order.
    #[derive(Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Backend is a "backend"
    /// CUDA C++ through NVRTC.
    Cuda = "cuda",
    /// SPIR-V through wgpu.
    Vulkan = "vulkan",
    /// WGSL through wgpu on a native device, the same code as for a browser's WebGPU.
    WebGpu = "webgpu",
    /// LLVM JIT on the host's cores.
    Cpu = "cpu",
}

choice! {
    /// Set of cases that `bench` measures.
    Suite is a "suite"
    /// A few cases of matmul, attention and quantised weights, and the demo model, in under two minutes
    Quick = "quick",
    /// Every kernel in every precision and layout
    Kernels = "kernels",
    /// Also whole models, and the matmuls in them
    All = "all",
    /// Matmuls in every precision, and requests to models in each, with latency and memory
    Documents = "documents",
    /// Convolutions and group norms of U-Nets, beside matmuls of equal size
    Conv = "conv",
}

choice! {
    /// Behaviour for a problem without a tuned config.
    Policy is a "policy"
    /// An error: nothing runs that was not measured
    Frozen = "frozen",
    /// The config of a card of the same family, or else the first candidate, unmeasured
    Default = "default",
    /// The fastest candidate, measured now and kept
    Measure = "measure",
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_by_its_word_alone() {
        for backend in Backend::ALL {
            assert_eq!(backend.name().parse(), Ok(backend));
            let json = format!("\"{backend}\"");
            assert_eq!(serde_json::to_string(&backend).expect("a word"), json);
        }
        let error = "all".parse::<Policy>().expect_err("of a suite").to_string();
        assert_eq!(error, "unknown policy `all`\nhint: use one of frozen, default, measure");
        assert_eq!(Policy::Frozen.help(), "An error: nothing runs that was not measured");
    }
}
