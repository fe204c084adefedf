//! What can be wrong with an op on host tensors.

use ops::OpError;
use tune::CacheError;

use super::tensor::TensorError;

/// Why an op on host tensors has no result.
#[derive(Debug, thiserror::Error)]
pub enum HostOpError {
    /// There is no op of this name.
    #[error("unknown op `{0}`\nhint: one of matmul, attention")]
    UnknownOp(String),
    /// A setting that the op does not have.
    #[error("unknown setting `{key}={value}`\nhint: {op} takes {known}")]
    UnknownSetting {
        /// Name of the op.
        op: &'static str,
        /// Name of the setting.
        key: String,
        /// Its value.
        value: String,
        /// The settings and values that there are.
        known: &'static str,
    },
    /// A setting that is given more than once.
    #[error("setting `{0}` is given twice\nhint: each has one value")]
    SettingTwice(String),
    /// A setting with a value that it does not take.
    #[error("setting `{key}` does not take `{value}`\nhint: {takes}")]
    SettingValue {
        /// Name of the setting.
        key: String,
        /// Its value.
        value: String,
        /// What it takes.
        takes: &'static str,
    },
    /// An input that the op needs: its name, and which ones the op takes.
    #[error("input `{0}` is missing\nhint: the file must hold {1}")]
    MissingInput(&'static str, &'static str),
    /// An input that the op does not take: its name, and which ones it does.
    #[error("input `{0}` is not used\nhint: the file must hold {1}")]
    UnusedInput(String, &'static str),
    /// An operand with another number of axes than the op takes.
    #[error("{what} has {rank} axes\nhint: {takes}")]
    Rank {
        /// Which operand.
        what: &'static str,
        /// Axes that it has.
        rank: usize,
        /// What the op takes.
        takes: &'static str,
    },
    /// The device has no room for the operands and the result; nothing was allocated.
    #[error(
        "{what} would take {}, and the device gives {}{}\nhint: compute in smaller pieces, \
         fewer rows or batches at a time", gib(*need), gib((*have).into()), if *at_once { " at once" } else { "" }
    )]
    Memory {
        /// Which of them, or all.
        what: &'static str,
        /// Bytes that it takes.
        need: u128,
        /// Bytes that the device has for it.
        have: u64,
        /// Whether `have` is for one buffer, rather than all.
        at_once: bool,
    },
    /// The op refuses its operands, or has no config for them on this device.
    #[error(transparent)]
    Op(#[from] OpError),
    /// A host tensor that contradicts itself.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// The tune cache cannot be read.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The device failed; its own words.
    #[error(
        "the kernel failed: {0}\nhint: `flashover doctor` says what this machine has; another --backend \
         may run it"
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
        let key = tune::Key::of::<Matmul>(&arch.id, &problem);
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
