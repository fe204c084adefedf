//! Errors of ops on host tensors.

use ops::OpError;
use tune::CacheError;

use super::tensor::TensorError;

/// Error of an op on host tensors.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HostOpError {
    /// No op has this name.
    #[error("unknown op `{0}`\nhint: use matmul, conv or attention")]
    UnknownOp(String),
    /// The op has no setting of this name.
    #[error("unknown setting `{key}={value}`\nhint: {op} takes {known}")]
    UnknownSetting {
        /// Name of the op.
        op: &'static str,
        /// Name of the setting.
        key: String,
        /// Its value.
        value: String,
        /// Settings and values that the op takes.
        known: &'static str,
    },
    /// A setting is given more than once.
    #[error("setting `{0}` is given twice\nhint: give each setting once")]
    SettingTwice(String),
    /// The setting does not take this value.
    #[error("setting `{key}` does not take `{value}`\nhint: use {takes}")]
    SettingValue {
        /// Name of the setting.
        key: String,
        /// Its value.
        value: String,
        /// Values that the setting takes.
        takes: &'static str,
    },
    /// An input of the op is missing: its name, and the inputs that the op takes.
    #[error("input `{0}` is missing\nhint: the op takes {1}")]
    MissingInput(&'static str, &'static str),
    /// The op does not take this input: its name, and the inputs that the op takes.
    #[error("unknown input `{0}`\nhint: the op takes {1}")]
    UnusedInput(String, &'static str),
    /// The operand has a wrong number of axes for the op.
    #[error("{what} has {rank} axes\nhint: {takes}")]
    Rank {
        /// Name of the operand.
        what: &'static str,
        /// Number of its axes.
        rank: usize,
        /// Shapes that the op takes.
        takes: &'static str,
    },
    /// The device lacks memory for the operands and the result. Nothing was allocated.
    #[error(
        "{what} needs {}, but the device has {}{}\nhint: split the call into fewer rows or \
         batches", gib(*need), gib((*have).into()), if *at_once { " for one buffer" } else { "" }
    )]
    Memory {
        /// Name of the tensor, or all tensors together.
        what: &'static str,
        /// Bytes required.
        need: u128,
        /// Bytes available.
        have: u64,
        /// True if `have` limits one buffer, false if it limits all together.
        at_once: bool,
    },
    /// The op refuses its operands, or has no config for them on this device.
    #[error(transparent)]
    Op(#[from] OpError),
    /// The bytes of a host tensor do not match its shape.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The tune cache cannot be read.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The device failed; its error message.
    #[error(
        "the kernel failed: {0}\nhint: check the device with `flashover doctor`, or use another `Backend` \
         (--backend)"
    )]
    Failed(String),
}

fn gib(bytes: u128) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use arch::DType;
    use kernels::matmul::{Layout, Matmul, MatmulProblem, Operand, Precision};
    use tune::TuneError;

    use super::super::tensor::HostTensor;
    use super::*;

    #[test]
    fn errors_end_with_a_hint() {
        let dense = |sizes| {
            MatmulProblem::dense(1, sizes, [Layout::Row; 2], Precision::F32).map(|p| (p, p.lhs))
        };
        let (problem, lhs) = dense([2, 3, 4]).expect("valid sizes");
        let lhs = Operand { stride: 3, ..lhs };
        let narrow = MatmulProblem { lhs, ..problem }.checked().expect_err("rows overlap");
        let arch = arch::ArchProfile::recorded("rtx4090").expect("recorded");
        let key = tune::Key::new::<Matmul>(&arch.id, &problem);
        let tuning = TuneError::AllFailed { key, first: "out of memory".to_owned() };
        let errors: [HostOpError; 6] = [
            OpError::from(narrow).into(),
            OpError::from(dense([0, 1, 1]).expect_err("nothing to do")).into(),
            OpError::from(tuning).into(),
            HostTensor::new(DType::F32, &[2], vec![0; 3]).expect_err("half a value").into(),
            TensorError::NotFloat(DType::I8).into(),
            HostOpError::Failed("lost".to_owned()),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(text.lines().last().is_some_and(|l| l.starts_with("hint: ")), "{text}");
        }
    }
}
