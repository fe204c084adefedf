//! One kernel on the caller's own tensors.

use std::collections::BTreeMap;

use arch::{Backend, DType, Device};
use cubecl::server::Handle;
use kernels::attention::{AttentionOptions, Implementation, InvalidAttention};
use kernels::matmul::{
    Batches, Epilogue, EpilogueBuffers, InvalidMatmul, Layout, Matmul, MatmulOperands,
    MatmulProblem, Precision,
};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tune::{CacheError, Infeasible, Kernel, Policy, TuneCache, TuneError, Tuner};

use crate::attention::{Attended, AttentionGradients, attention, attention_backward};
use crate::{HostTensor, TensorError};

/// How the operands of [`matmul`] lie and how they are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulOptions {
    /// `Col` takes lhs as `[.., k, m]`.
    pub lhs: Layout,
    /// `Col` takes rhs as `[.., n, k]`, as a linear layer stores its weight.
    pub rhs: Layout,
    /// Round f32 operands to tf32 on the tensor cores.
    pub tf32: bool,
}

impl Default for MatmulOptions {
    fn default() -> Self {
        Self { lhs: Layout::Row, rhs: Layout::Row, tf32: false }
    }
}

/// Why an op did not run.
#[derive(Debug, thiserror::Error)]
pub enum OpError {
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
    /// An operand of matmul with fewer than two axes.
    #[error("{what} has {rank} axes\nhint: matmul takes two or more, batches first")]
    Rank {
        /// Which operand.
        what: &'static str,
        /// Axes that it has.
        rank: usize,
    },
    /// Operands whose summed axes differ in length.
    #[error(
        "k differs: lhs {lhs:?} has {lhs_k}, rhs {rhs:?} has {rhs_k}\nhint: lhs is [.., m, k], rhs [.., k, n]; \
         lhs=col or rhs=col takes the last two axes swapped"
    )]
    Depth {
        /// Shape of lhs.
        lhs: Vec<usize>,
        /// Length of its summed axis.
        lhs_k: usize,
        /// Shape of rhs.
        rhs: Vec<usize>,
        /// Length of its summed axis.
        rhs_k: usize,
    },
    /// Batch axes that differ and are not 1.
    #[error(
        "batches of lhs {lhs:?} and rhs {rhs:?} do not broadcast\nhint: as in NumPy, aligned at the end, \
         sizes are equal or 1"
    )]
    Broadcast {
        /// Batch axes of lhs.
        lhs: Vec<usize>,
        /// Batch axes of rhs.
        rhs: Vec<usize>,
    },
    /// A bias that is not one vector of the product's columns.
    #[error("bias has shape {bias:?}, the product has {n} columns\nhint: bias is [n]")]
    Bias {
        /// Its shape.
        bias: Vec<usize>,
        /// Columns of the product.
        n: usize,
    },
    /// Operands of several dtypes.
    #[error("{what} is {have}, {first} is {need}\nhint: operands share one dtype")]
    DType {
        /// Which one differs.
        what: &'static str,
        /// Its dtype.
        have: DType,
        /// Which one the others follow.
        first: &'static str,
        /// The dtype of that one.
        need: DType,
    },
    /// An operand of attention without exactly four axes.
    #[error(
        "{what} has {rank} axes\nhint: attention takes [batch, heads, positions, head_dim], and bias as \
         [batch, heads, seq_q, seq_kv]"
    )]
    FourAxes {
        /// Which operand.
        what: &'static str,
        /// Axes that it has.
        rank: usize,
    },
    /// Keys or values that do not fit the queries or each other, or a gradient that does not fit the result.
    #[error(
        "{what} has shape {have:?}, where {need:?} fits\nhint: k and v share batch and head_dim with q; \
         dout is as q"
    )]
    Shape {
        /// Which of the three.
        what: &'static str,
        /// Its shape.
        have: Vec<u32>,
        /// `[batch, kv_heads, seq_kv, head_dim]`, of a gradient the shape of q.
        need: Vec<u32>,
    },
    /// A bias that does not broadcast to the scores.
    #[error(
        "bias has shape {have:?}, the scores {scores:?}\nhint: bias is [batch, heads, seq_q, seq_kv], and \
         each axis may be 1"
    )]
    ScoreBias {
        /// Its shape.
        have: Vec<u32>,
        /// `[batch, heads, seq_q, seq_kv]`
        scores: Vec<u32>,
    },
    /// The implementation that was asked for cannot serve the call.
    #[error(
        "{implementation:?} attention cannot serve this: {why}\nhint: leave `implementation` out"
    )]
    Forced {
        /// The one that was asked for.
        implementation: Implementation,
        /// What stands against it.
        why: Infeasible,
    },
    /// Operands of a dtype that is not multiplied.
    #[error("matmul does not take {0}\nhint: f32, f16 or bf16")]
    NotFloat(DType),
    /// tf32 was asked for with operands that are not f32.
    #[error("tf32 was asked for {0} operands\nhint: it is a way to multiply f32")]
    Tf32(DType),
    /// A size of 2^32 or more.
    #[error("a size of {0} is too large\nhint: sizes stay below 2^32; split the tensor along it")]
    TooLarge(usize),
    /// The device has no room for the operands and the result; nothing was allocated.
    #[error(
        "{what} would take {}, and the device gives {}{}\nhint: multiply in smaller pieces, \
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
    /// A product that means nothing.
    #[error(transparent)]
    Invalid(#[from] InvalidMatmul),
    /// An attention that means nothing.
    #[error(transparent)]
    InvalidAttention(#[from] InvalidAttention),
    /// A host tensor that contradicts itself.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// There is no config for the shape on this device.
    #[error(transparent)]
    Tune(#[from] TuneError),
    /// The tune cache cannot be read or written.
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

/// Runs the op called `name` on named inputs; settings are `key=value` pairs.
///
/// `matmul` takes `lhs`, `rhs` and optionally `bias`, with settings `lhs=row|col`, `rhs=row|col`,
/// `tf32=true|false`, and gives `out`. `attention` takes `q`, `k`, `v` and optionally `bias`, with settings
/// `causal=true|false`, `window`, `scale`, `softcap`, `implementation=flash|plain`, and gives `out` and
/// `lse`; with `dout`, the gradient of the result, `dq`, `dk` and `dv` as well.
///
/// # Errors
/// See [`OpError`].
pub fn run_op(
    name: &str,
    device: &Device,
    inputs: &BTreeMap<String, HostTensor>,
    settings: &[(String, String)],
    policy: Policy,
) -> Result<BTreeMap<String, HostTensor>, OpError> {
    let (known, text): (&[&str], _) = match name {
        "matmul" => (&["lhs", "rhs", "bias"], "lhs, rhs and optionally bias"),
        "attention" => (&["q", "k", "v", "bias", "dout"], "q, k, v and optionally bias and dout"),
        _ => return Err(OpError::UnknownOp(name.to_owned())),
    };
    if let Some(extra) = inputs.keys().find(|k| !known.contains(&k.as_str())) {
        return Err(OpError::UnusedInput(extra.clone(), text));
    }
    for (i, (key, _)) in settings.iter().enumerate() {
        if settings[..i].iter().any(|(before, _)| before == key) {
            return Err(OpError::SettingTwice(key.clone()));
        }
    }
    let get = |name: &'static str| inputs.get(name).ok_or(OpError::MissingInput(name, text));
    let bias = inputs.get("bias");
    if name == "matmul" {
        let options = matmul_options(settings)?;
        let out = matmul(device, get("lhs")?, get("rhs")?, bias, &options, policy)?;
        return Ok(BTreeMap::from([("out".to_owned(), out)]));
    }
    let options = attention_options(settings)?;
    let operands = [get("q")?, get("k")?, get("v")?];
    let named = |all: Vec<(&str, HostTensor)>| {
        all.into_iter().map(|(name, tensor)| (name.to_owned(), tensor)).collect()
    };
    let Some(dout) = inputs.get("dout") else {
        let Attended { out, lse } = attention(device, operands, bias, &options, policy)?;
        return Ok(named(vec![("out", out), ("lse", lse)]));
    };
    let (Attended { out, lse }, AttentionGradients { dq, dk, dv }) =
        attention_backward(device, operands, bias, dout, &options, policy)?;
    Ok(named(vec![("out", out), ("lse", lse), ("dq", dq), ("dk", dk), ("dv", dv)]))
}

fn attention_options(settings: &[(String, String)]) -> Result<AttentionOptions, OpError> {
    let mut options = AttentionOptions::default();
    for (key, value) in settings {
        let unknown = || OpError::UnknownSetting {
            op: "attention",
            key: key.clone(),
            value: value.clone(),
            known: "causal=true|false, window=KEYS, scale=NUMBER, softcap=NUMBER, \
                    implementation=flash|plain",
        };
        let number = || match value.parse() {
            Ok(number) if f32::is_finite(number) => Ok(number),
            _ => Err(bad_value(key, value, "a finite number, such as 0.125")),
        };
        match key.as_str() {
            "causal" => options.causal = truth(key, value)?,
            "window" => {
                let keys = value.parse().ok().filter(|keys| *keys > 0);
                let takes = "a number of keys, whole, from 1 to 4294967295";
                options.window = Some(keys.ok_or_else(|| bad_value(key, value, takes))?);
            }
            "scale" => options.scale = Some(number()?),
            "softcap" => options.softcap = Some(number()?),
            "implementation" => {
                options.implementation = Some(match value.as_str() {
                    "flash" => Implementation::Flash,
                    "plain" => Implementation::Plain,
                    _ => return Err(bad_value(key, value, "flash or plain")),
                });
            }
            _ => return Err(unknown()),
        }
    }
    Ok(options)
}

fn matmul_options(settings: &[(String, String)]) -> Result<MatmulOptions, OpError> {
    let mut options = MatmulOptions::default();
    for (key, value) in settings {
        let unknown = || OpError::UnknownSetting {
            op: "matmul",
            key: key.clone(),
            value: value.clone(),
            known: "lhs=row|col, rhs=row|col, tf32=true|false",
        };
        let layout = || match value.as_str() {
            "row" => Ok(Layout::Row),
            "col" => Ok(Layout::Col),
            _ => Err(bad_value(key, value, "row or col")),
        };
        match key.as_str() {
            "lhs" => options.lhs = layout()?,
            "rhs" => options.rhs = layout()?,
            "tf32" => options.tf32 = truth(key, value)?,
            _ => return Err(unknown()),
        }
    }
    Ok(options)
}

fn truth(key: &str, value: &str) -> Result<bool, OpError> {
    value.parse().map_err(|_| bad_value(key, value, "true or false"))
}

fn bad_value(key: &str, value: &str, takes: &'static str) -> OpError {
    OpError::SettingValue { key: key.to_owned(), value: value.to_owned(), takes }
}

/// `lhs · rhs + bias`, batches broadcast.
///
/// # Shapes
/// lhs `[.., m, k]`, rhs `[.., k, n]` (the last two axes swapped where `options` says `Col`), bias
/// `[n]`, result `[.., m, n]` in the operands' dtype.
///
/// # Errors
/// See [`OpError`].
pub fn matmul(
    device: &Device,
    lhs: &HostTensor,
    rhs: &HostTensor,
    bias: Option<&HostTensor>,
    options: &MatmulOptions,
    policy: Policy,
) -> Result<HostTensor, OpError> {
    let precision = precision_of(lhs, rhs, bias, options)?;
    let (batch_l, m, k) = split("lhs", lhs, options.lhs == Layout::Col)?;
    let (batch_r, n, depth) = split("rhs", rhs, options.rhs == Layout::Row)?;
    if k != depth {
        let (lhs, rhs) = (lhs.shape().to_vec(), rhs.shape().to_vec());
        return Err(OpError::Depth { lhs, lhs_k: k, rhs, rhs_k: depth });
    }
    if let Some(bias) = bias
        && bias.shape() != [n]
    {
        return Err(OpError::Bias { bias: bias.shape().to_vec(), n });
    }
    let batch = broadcast(batch_l, batch_r)?;
    let size = |n: usize| u32::try_from(n).map_err(|_| OpError::TooLarge(n));
    let count = batch.iter().fold(1, |n: usize, s| n.saturating_mul(*s));
    let shape: Vec<_> = batch.iter().copied().chain([m, n]).collect();
    if k == 0 || shape.contains(&0) {
        return nothing_summed(device, lhs.dtype(), &shape, bias);
    }
    let layouts = [options.lhs, options.rhs];
    let dense =
        MatmulProblem::dense(size(count)?, [size(m)?, size(n)?, size(k)?], layouts, precision)?;
    let elem = precision.storage().size();
    // An operand without batches repeats by stride; one that repeats along some axes is spread out.
    let copies = |own: &[usize]| if own.iter().all(|s| *s == 1) { 1 } else { count };
    let bytes = |[a, b, c]: [usize; 3]| a as u128 * b as u128 * c as u128 * elem as u128;
    let needs = [
        ("lhs", bytes([copies(batch_l), m, k])),
        ("rhs", bytes([copies(batch_r), k, n])),
        ("the result", bytes([count, m, n])),
    ];
    check_memory(device, &needs)?;
    let (lhs_bytes, lhs_step) = spread(lhs, batch_l, &batch, m * k, elem);
    let (rhs_bytes, rhs_step) = spread(rhs, batch_r, &batch, k * n, elem);
    let problem = MatmulProblem {
        batches: Batches { lhs: (0, lhs_step as u64), rhs: (0, rhs_step as u64), ..dense.batches },
        epilogue: Epilogue { bias: bias.is_some(), ..Epilogue::default() },
        ..dense
    };
    let config = choose::<Matmul>(device, &problem, policy)?;
    let bytes = problem.extents()[2] * elem;
    let operands = MatmulOperands {
        lhs: upload(device, &lhs_bytes),
        rhs: upload(device, &rhs_bytes),
        out: device.client().empty(bytes.next_multiple_of(4)),
        epilogue: EpilogueBuffers {
            bias: bias.map(|b| upload(device, b.bytes())),
            ..EpilogueBuffers::default()
        },
        rows: None,
        norm: None,
    };
    let scratch = Matmul::scratch(device, &problem, &config);
    Matmul::launch(device, &problem, &config, &operands, scratch.as_ref());
    let out = read(device, operands.out, bytes)?;
    Ok(HostTensor::new(lhs.dtype(), &shape, out)?)
}

/// A product without an element, or of no summands: every row is the bias, or 0.
fn nothing_summed(
    device: &Device,
    dtype: DType,
    shape: &[usize],
    bias: Option<&HostTensor>,
) -> Result<HostTensor, OpError> {
    if shape.contains(&0) {
        return Ok(HostTensor::new(dtype, shape, Vec::new())?);
    }
    let [rows @ .., n] = shape else { unreachable!("a product has two axes at least") };
    let rows = rows.iter().fold(1, |rows: usize, s| rows.saturating_mul(*s));
    let bytes = (*n as u128 * dtype.size() as u128).saturating_mul(rows as u128);
    check_memory(device, &[("the result", bytes)])?;
    let row = bias.map_or_else(|| vec![0; n * dtype.size()], |bias| bias.bytes().to_vec());
    Ok(HostTensor::new(dtype, shape, row.repeat(rows))?)
}

/// The config of `problem`: what this machine measured before counts, and what is measured now is kept.
/// Warnings of the cache are logged.
pub(crate) fn choose<K: Kernel>(
    device: &Device,
    problem: &K::Problem,
    policy: Policy,
) -> Result<K::Config, OpError> {
    let cache = match tune::default_cache_path() {
        Some(path) => TuneCache::open(&path)?,
        None => TuneCache::shipped(),
    };
    let now = OffsetDateTime::now_utc();
    let date = now.replace_nanosecond(0).unwrap_or(now).format(&Rfc3339);
    let mut tuner = Tuner {
        device,
        cache,
        policy,
        commit: concat!("v", env!("CARGO_PKG_VERSION")).to_owned(),
        date: date.expect("a year has four digits"),
    };
    let choice = tuner.choose::<K>(problem)?;
    tuner.cache.warnings().iter().for_each(|w| log::warn!("{w}"));
    Ok(choice.config)
}

/// A device buffer of `bytes`, whole words.
pub(crate) fn upload(device: &Device, bytes: &[u8]) -> Handle {
    if bytes.len() % 4 == 0 {
        return device.client().create_from_slice(bytes);
    }
    let mut words = bytes.to_vec();
    words.resize(bytes.len().next_multiple_of(4), 0);
    device.client().create_from_slice(&words)
}

/// The first `len` bytes of a device buffer.
pub(crate) fn read(device: &Device, handle: Handle, len: usize) -> Result<Vec<u8>, OpError> {
    let read = device.client().read_one(handle).map_err(|e| OpError::Failed(format!("{e:?}")))?;
    Ok(read[..len].to_vec())
}

/// Refuses what the device cannot hold, before anything is spread out here or allocated there.
pub(crate) fn check_memory(device: &Device, needs: &[(&'static str, u128)]) -> Result<(), OpError> {
    let have = device.client().properties().memory.max_page_size;
    if let Some(&(what, need)) = needs.iter().find(|(_, need)| *need > have.into()) {
        return Err(OpError::Memory { what, need, have, at_once: true });
    }
    // The host's copies, one read and one handed over, come out of a CPU's own memory.
    let times = if device.backend() == Backend::Cpu { 3 } else { 1 };
    let need = times * needs.iter().map(|(_, need)| need).sum::<u128>();
    match device.profile().memory_bytes.filter(|have| need > (*have).into()) {
        Some(have) => {
            Err(OpError::Memory { what: "all of it together", need, have, at_once: false })
        }
        None => Ok(()),
    }
}

fn precision_of(
    lhs: &HostTensor,
    rhs: &HostTensor,
    bias: Option<&HostTensor>,
    options: &MatmulOptions,
) -> Result<Precision, OpError> {
    let need = lhs.dtype();
    for (what, tensor) in [("rhs", Some(rhs)), ("bias", bias)] {
        if let Some(have) = tensor.map(HostTensor::dtype).filter(|d| *d != need) {
            return Err(OpError::DType { what, have, first: "lhs", need });
        }
    }
    match (need, options.tf32) {
        (DType::F32, true) => Ok(Precision::Tf32),
        (DType::F32, false) => Ok(Precision::F32),
        (DType::F16, false) => Ok(Precision::F16),
        (DType::Bf16, false) => Ok(Precision::Bf16),
        (DType::F16 | DType::Bf16, true) => Err(OpError::Tf32(need)),
        (other, _) => Err(OpError::NotFloat(other)),
    }
}

/// Batch axes, then the outer and the summed size; `swapped` when the summed axis comes first.
fn split<'a>(
    what: &'static str,
    tensor: &'a HostTensor,
    swapped: bool,
) -> Result<(&'a [usize], usize, usize), OpError> {
    match tensor.shape() {
        [batch @ .., outer, k] if !swapped => Ok((batch, *outer, *k)),
        [batch @ .., k, outer] => Ok((batch, *outer, *k)),
        short => Err(OpError::Rank { what, rank: short.len() }),
    }
}

/// NumPy's rule: align at the end, equal or 1.
fn broadcast(lhs: &[usize], rhs: &[usize]) -> Result<Vec<usize>, OpError> {
    let rank = lhs.len().max(rhs.len());
    let at =
        |shape: &[usize], i: usize| (i + shape.len()).checked_sub(rank).map_or(1, |i| shape[i]);
    (0..rank)
        .map(|i| match (at(lhs, i), at(rhs, i)) {
            (a, b) if a == b || b == 1 => Ok(a),
            (1, b) => Ok(b),
            _ => Err(OpError::Broadcast { lhs: lhs.to_vec(), rhs: rhs.to_vec() }),
        })
        .collect()
}

/// The bytes of `tensor` for every batch of `batch` in order, and the elements between batches.
fn spread(
    tensor: &HostTensor,
    own: &[usize],
    batch: &[usize],
    matrix: usize,
    elem: usize,
) -> (Vec<u8>, usize) {
    if own.iter().product::<usize>() == 1 {
        return (tensor.bytes().to_vec(), 0);
    }
    let missing = batch.len() - own.len();
    if own == &batch[missing..] && batch[..missing].iter().all(|s| *s == 1) {
        return (tensor.bytes().to_vec(), matrix);
    }
    let mut bytes = Vec::new();
    for flat in 0..batch.iter().product() {
        let (mut rest, mut at, mut step) = (flat, 0, 1);
        for (i, size) in batch.iter().enumerate().rev() {
            let index = rest % size;
            rest /= size;
            if let Some(own_size) = i.checked_sub(missing).map(|i| own[i]) {
                at += if own_size == 1 { 0 } else { index * step };
                step *= own_size;
            }
        }
        let size = matrix * elem;
        bytes.extend_from_slice(&tensor.bytes()[at * size..(at + 1) * size]);
    }
    (bytes, matrix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_end_with_a_hint() {
        let dense = |sizes| {
            MatmulProblem::dense(1, sizes, [Layout::Row; 2], Precision::F32).map(|p| (p, p.lhs))
        };
        let (problem, lhs) = dense([2, 3, 4]).expect("valid sizes");
        let lhs = kernels::matmul::Operand { stride: 3, ..lhs };
        let narrow = MatmulProblem { lhs, ..problem }.checked().expect_err("rows overlap");
        let arch = arch::ArchProfile::recorded("rtx4090").expect("recorded");
        let key = tune::Key::of::<Matmul>(&arch.id, &problem);
        let errors: [OpError; 6] = [
            narrow.into(),
            dense([0, 1, 1]).expect_err("nothing to do").into(),
            HostTensor::new(DType::F32, &[2], vec![0; 3]).expect_err("half a value").into(),
            TensorError::NotFloat(DType::I8).into(),
            TuneError::AllFailed { key, first: "out of memory".to_owned() }.into(),
            OpError::Failed("lost".to_owned()),
        ];
        for error in errors {
            let text = error.to_string();
            assert!(text.lines().last().is_some_and(|l| l.starts_with("hint: ")), "{text}");
        }
    }
}
