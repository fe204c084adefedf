//! What the bench knows of each kernel family beside [`Kernel`].

use std::collections::BTreeMap;

use arch::{Backend, DType, Device};
use kernels::attention::backward::{AttentionBackward, BackwardOperands, BackwardProblem};
use kernels::attention::decode::{CacheLayout, Decode, DecodeOperands, DecodeProblem};
use kernels::attention::{Attention, AttentionOperands, AttentionProblem};
use kernels::embed::{Embed, EmbedOperands, EmbedProblem};
use kernels::int8::{
    self, Int8Dequantize, Int8Matmul, Int8MatmulOperands, Int8MatmulProblem, Int8Quantize,
};
use kernels::matmul::{Matmul, MatmulOperands, MatmulProblem, Precision};
use kernels::nf4::{
    DequantizeOperands, DequantizeProblem, Nf4Dequantize, Nf4Matmul, Nf4MatmulOperands,
    Nf4MatmulProblem, Nf4Quantize, QuantizeOperands, QuantizeProblem, Weight,
};
use kernels::norm::{Norm, NormOperands, NormProblem};
use kernels::rope::{Rope, RopeOperands, RopeProblem};
use kernels::sample::{Sample, SampleOperands, SampleProblem};
use oracle::{CheckError, Verdict};
use serde_json::{Value, json};
use tune::Kernel;
use tune::timing::{Timing, TimingError};

use crate::peers;

/// Names and outcomes of peers.
pub(crate) type Peers = Vec<(&'static str, Result<Timing, TimingError>)>;

/// A kernel family that is measured.
pub(crate) trait Family: Kernel {
    /// Parameters as records hold them.
    fn params(problem: &Self::Problem) -> BTreeMap<String, Value>;

    /// The precision whose ceiling of multiplying it has.
    fn unit(problem: &Self::Problem) -> &'static str;

    /// Compares the result in `operands` with the reference, at a seeded sample of positions.
    fn compare(
        device: &Device,
        problem: &Self::Problem,
        operands: &Self::Operands,
        seed: u64,
    ) -> Result<Verdict, CheckError>;

    /// Peers that run on our operands.
    fn peers_on(device: &Device, problem: &Self::Problem, sets: &[Self::Operands]) -> Peers;

    /// Peers that make `sets` sets of operands of their own.
    fn peers(device: &Device, problem: &Self::Problem, sets: usize) -> Peers;

    /// Whose figure torch.py gives.
    const TORCH: &'static str = "torch";

    /// The case as torch.py reads it; none where torch has nothing of the kind.
    fn torch(problem: &Self::Problem) -> Option<Value>;
}

impl Family for Matmul {
    fn params(p: &MatmulProblem) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::from([
            ("m".to_owned(), p.m.into()),
            ("n".to_owned(), p.n.into()),
            ("k".to_owned(), p.k.into()),
            ("dtype".to_owned(), p.precision.name().into()),
            ("lhs".to_owned(), p.lhs.layout.name().into()),
            ("rhs".to_owned(), p.rhs.layout.name().into()),
        ]);
        if p.grouped {
            params.insert("groups".to_owned(), p.batch().into());
        } else if p.batch() > 1 {
            params.insert("batch".to_owned(), p.batch().into());
        }
        if p.out != p.precision.storage() {
            params.insert("out".to_owned(), p.out.name().into());
        }
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        if let Some(norm) = p.norm {
            params.insert("norm".to_owned(), norm.name().into());
        }
        params
    }

    fn unit(p: &MatmulProblem) -> &'static str {
        p.precision.name()
    }

    fn compare(
        device: &Device,
        p: &MatmulProblem,
        operands: &MatmulOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::matmul::check_operands(device, p, operands, seed)
    }

    fn peers_on(device: &Device, p: &MatmulProblem, sets: &[MatmulOperands]) -> Peers {
        // On a CPU its strategy is no contender: Burn has another backend there.
        match device.backend() {
            Backend::Cuda | Backend::Vulkan => {
                vec![("cubek", peers::cubek_matmul(device, p, sets))]
            }
            Backend::Cpu | Backend::WebGpu => Vec::new(),
        }
    }

    fn peers(device: &Device, p: &MatmulProblem, sets: usize) -> Peers {
        vec![(peers::burn_name(device.backend()), peers::burn_matmul(device, p, sets))]
    }

    fn torch(p: &MatmulProblem) -> Option<Value> {
        p.norm.is_none().then(|| {
            json!({
                "op": Self::NAME,
                "m": p.m,
                "n": p.n,
                "k": p.k,
                "batch": p.batch(),
                "dtype": p.precision.name(),
                "lhs": p.lhs.layout.name(),
                "rhs": p.rhs.layout.name(),
                "rows": p.grouped.then(|| p.uneven_rows()),
            })
        })
    }
}

impl Family for Attention {
    fn params(p: &AttentionProblem) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::from([
            ("batch".to_owned(), p.batch.into()),
            ("heads".to_owned(), p.heads.into()),
            ("kv_heads".to_owned(), p.kv_heads.into()),
            ("seq_q".to_owned(), p.seq_q.into()),
            ("seq_kv".to_owned(), p.seq_kv.into()),
            ("head_dim".to_owned(), p.head_dim.into()),
            ("dtype".to_owned(), p.dtype.name().into()),
        ]);
        for rule in p.rules() {
            params.insert(rule.to_owned(), true.into());
        }
        params
    }

    fn unit(p: &AttentionProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &AttentionProblem,
        operands: &AttentionOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::attention::check_operands(device, p, operands, seed)
    }

    fn peers_on(_device: &Device, _p: &AttentionProblem, _sets: &[AttentionOperands]) -> Peers {
        Vec::new()
    }

    fn peers(device: &Device, p: &AttentionProblem, sets: usize) -> Peers {
        vec![(peers::burn_name(device.backend()), peers::burn_attention(device, p, sets))]
    }

    fn torch(p: &AttentionProblem) -> Option<Value> {
        Some(json!({
            "op": Self::NAME,
            "batch": p.batch,
            "heads": p.heads,
            "kv_heads": p.kv_heads,
            "seq_q": p.seq_q,
            "seq_kv": p.seq_kv,
            "head_dim": p.head_dim,
            "dtype": p.dtype.name(),
            "causal": p.causal,
        }))
    }
}

impl Family for Decode {
    fn params(p: &DecodeProblem) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::from([
            ("batch".to_owned(), p.batch.into()),
            ("heads".to_owned(), p.heads.into()),
            ("kv_heads".to_owned(), p.kv_heads.into()),
            ("seq_q".to_owned(), p.seq_q.into()),
            ("seq_kv".to_owned(), p.longest.into()),
            ("head_dim".to_owned(), p.head_dim.into()),
            ("dtype".to_owned(), p.dtype.name().into()),
        ]);
        if p.cache != p.dtype {
            params.insert("cache".to_owned(), p.cache.name().into());
        }
        if let CacheLayout::Paged { block_size, .. } = p.layout {
            params.insert("block_size".to_owned(), block_size.into());
        }
        for rule in p.rules() {
            params.insert(rule.to_owned(), true.into());
        }
        params
    }

    fn unit(p: &DecodeProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &DecodeProblem,
        operands: &DecodeOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::decode::check_operands(device, p, operands, seed)
    }

    fn peers_on(_device: &Device, _p: &DecodeProblem, _sets: &[DecodeOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_device: &Device, _p: &DecodeProblem, _sets: usize) -> Peers {
        // Burn's attention does not share heads, and has no cache of its own.
        Vec::new()
    }

    fn torch(p: &DecodeProblem) -> Option<Value> {
        // Of one dtype, in one run: torch itself has no pages and no bytes.
        let plain = p.cache == p.dtype && matches!(p.layout, CacheLayout::Contiguous { .. });
        plain.then(|| {
            json!({
                "op": Attention::NAME,
                "batch": p.batch,
                "heads": p.heads,
                "kv_heads": p.kv_heads,
                "seq_q": p.seq_q,
                "seq_kv": p.longest,
                "head_dim": p.head_dim,
                "dtype": p.dtype.name(),
                // It aligns causal order with the first key. Without order its few queries see a few
                // keys more than ours, and read the same cache.
                "causal": false,
            })
        })
    }
}

impl Family for AttentionBackward {
    fn params(problem: &BackwardProblem) -> BTreeMap<String, Value> {
        let mut params = <Attention as Family>::params(&problem.forward);
        params.remove("lse");
        params
    }

    fn unit(problem: &BackwardProblem) -> &'static str {
        <Attention as Family>::unit(&problem.forward)
    }

    fn compare(
        device: &Device,
        problem: &BackwardProblem,
        operands: &BackwardOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::attention_backward::check_operands(device, problem, operands, seed)
    }

    fn peers_on(_: &Device, _: &BackwardProblem, _: &[BackwardOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &BackwardProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(problem: &BackwardProblem) -> Option<Value> {
        let mut case = <Attention as Family>::torch(&problem.forward)?;
        case["op"] = Self::NAME.into();
        Some(case)
    }
}

impl Family for Nf4Dequantize {
    const TORCH: &'static str = "bitsandbytes";

    fn params(p: &DequantizeProblem) -> BTreeMap<String, Value> {
        let mut params = weight_params(&p.weight);
        params.insert("dtype".to_owned(), p.out.name().into());
        params
    }

    fn unit(p: &DequantizeProblem) -> &'static str {
        precision(p.out).name()
    }

    fn compare(
        device: &Device,
        p: &DequantizeProblem,
        operands: &DequantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::nf4::check_dequantized(device, p, operands)
    }

    fn peers_on(_: &Device, _: &DequantizeProblem, _: &[DequantizeOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &DequantizeProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(p: &DequantizeProblem) -> Option<Value> {
        Some(bitsandbytes(Self::NAME, 1, &p.weight, p.out))
    }
}

impl Family for Nf4Matmul {
    const TORCH: &'static str = "bitsandbytes";

    fn params(p: &Nf4MatmulProblem) -> BTreeMap<String, Value> {
        let mut params = weight_params(&p.weight);
        params.insert("m".to_owned(), p.m.into());
        params.insert("dtype".to_owned(), p.dtype.name().into());
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        if p.glu {
            params.insert("glu".to_owned(), true.into());
        }
        if let Some(norm) = p.norm {
            params.insert("norm".to_owned(), norm.name().into());
        }
        params
    }

    fn unit(p: &Nf4MatmulProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &Nf4MatmulProblem,
        operands: &Nf4MatmulOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::nf4::check_operands(device, p, operands, seed)
    }

    fn peers_on(_: &Device, _: &Nf4MatmulProblem, _: &[Nf4MatmulOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &Nf4MatmulProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(p: &Nf4MatmulProblem) -> Option<Value> {
        if p.norm.is_some() {
            return None;
        }
        let mut case = bitsandbytes(Self::NAME, p.m, &p.weight, p.dtype);
        case["glu"] = p.glu.into();
        Some(case)
    }
}

impl Family for Nf4Quantize {
    const TORCH: &'static str = "bitsandbytes";

    fn params(p: &QuantizeProblem) -> BTreeMap<String, Value> {
        let mut params = weight_params(&p.weight);
        params.remove("order");
        params.insert("dtype".to_owned(), p.dtype.name().into());
        params.insert("book".to_owned(), p.book.name().into());
        params
    }

    fn unit(p: &QuantizeProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &QuantizeProblem,
        operands: &QuantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::nf4::check_quantized(device, p, operands)
    }

    fn peers_on(_: &Device, _: &QuantizeProblem, _: &[QuantizeOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &QuantizeProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(p: &QuantizeProblem) -> Option<Value> {
        Some(bitsandbytes(Self::NAME, 1, &p.weight, p.dtype))
    }
}

impl Family for Int8Dequantize {
    const TORCH: &'static str = "bitsandbytes";

    fn params(p: &int8::DequantizeProblem) -> BTreeMap<String, Value> {
        rows_params(p.weight, p.out)
    }

    fn unit(p: &int8::DequantizeProblem) -> &'static str {
        precision(p.out).name()
    }

    fn compare(
        device: &Device,
        p: &int8::DequantizeProblem,
        operands: &int8::DequantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::int8::check_dequantized(device, p, operands)
    }

    fn peers_on(_: &Device, _: &int8::DequantizeProblem, _: &[int8::DequantizeOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &int8::DequantizeProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(p: &int8::DequantizeProblem) -> Option<Value> {
        Some(eight_bits(Self::NAME, 1, p.weight, p.out))
    }
}

impl Family for Int8Matmul {
    const TORCH: &'static str = "bitsandbytes";

    fn params(p: &Int8MatmulProblem) -> BTreeMap<String, Value> {
        let mut params = rows_params(p.weight, p.dtype);
        params.insert("m".to_owned(), p.m.into());
        let epilogue = p.epilogue.names();
        if !epilogue.is_empty() {
            params.insert("epilogue".to_owned(), epilogue.join("+").into());
        }
        if let Some(int8::Activations { threshold }) = p.activations {
            params.insert("x".to_owned(), "i8".into());
            params.insert("threshold".to_owned(), threshold.into());
        }
        params
    }

    fn unit(p: &Int8MatmulProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &Int8MatmulProblem,
        operands: &Int8MatmulOperands,
        seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::int8::check_operands(device, p, operands, seed)
    }

    fn peers_on(_: &Device, _: &Int8MatmulProblem, _: &[Int8MatmulOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &Int8MatmulProblem, _: usize) -> Peers {
        Vec::new()
    }

    /// Its product rounds x always.
    fn torch(p: &Int8MatmulProblem) -> Option<Value> {
        let mut case = eight_bits(Self::NAME, p.m, p.weight, p.dtype);
        case["threshold"] = p.activations.map_or(0.0, |x| x.threshold).into();
        Some(case)
    }
}

impl Family for Int8Quantize {
    const TORCH: &'static str = "bitsandbytes";

    fn params(p: &int8::QuantizeProblem) -> BTreeMap<String, Value> {
        rows_params(p.weight, p.dtype)
    }

    fn unit(p: &int8::QuantizeProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &int8::QuantizeProblem,
        operands: &int8::QuantizeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::int8::check_quantized(device, p, operands)
    }

    fn peers_on(_: &Device, _: &int8::QuantizeProblem, _: &[int8::QuantizeOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &int8::QuantizeProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(p: &int8::QuantizeProblem) -> Option<Value> {
        Some(eight_bits(Self::NAME, 1, p.weight, p.dtype))
    }
}

fn rows_params(weight: int8::Weight, dtype: DType) -> BTreeMap<String, Value> {
    BTreeMap::from([
        ("n".to_owned(), weight.n.into()),
        ("k".to_owned(), weight.k.into()),
        ("dtype".to_owned(), dtype.name().into()),
    ])
}

impl Family for Norm {
    fn params(p: &NormProblem) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::from([
            ("rows".to_owned(), p.rows.into()),
            ("width".to_owned(), p.width.into()),
            ("kind".to_owned(), p.kind.name().into()),
            ("dtype".to_owned(), p.dtype.name().into()),
        ]);
        for (name, there) in [("bias", p.bias), ("residual", p.residual)] {
            if there {
                params.insert(name.to_owned(), true.into());
            }
        }
        params
    }

    fn unit(p: &NormProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &NormProblem,
        operands: &NormOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::norm::check_operands(device, p, operands)
    }

    fn peers_on(_: &Device, _: &NormProblem, _: &[NormOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &NormProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(_: &NormProblem) -> Option<Value> {
        None
    }
}

impl Family for Rope {
    fn params(p: &RopeProblem) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::from([
            ("batch".to_owned(), p.batch.into()),
            ("seq".to_owned(), p.seq.into()),
            ("heads".to_owned(), p.heads.into()),
            ("kv_heads".to_owned(), p.kv_heads.into()),
            ("head_dim".to_owned(), p.head_dim.into()),
            ("dtype".to_owned(), p.dtype.name().into()),
        ]);
        if p.dim != p.head_dim {
            params.insert("dim".to_owned(), p.dim.into());
        }
        if let Some(norm) = p.qk_norm {
            params.insert("qk_norm".to_owned(), norm.kind.name().into());
        }
        if let CacheLayout::Paged { block_size, .. } = p.cache.layout {
            params.insert("pages".to_owned(), block_size.into());
        }
        if p.cache.quantized() {
            params.insert("cache".to_owned(), p.cache.dtype.name().into());
        }
        params
    }

    fn unit(p: &RopeProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &RopeProblem,
        operands: &RopeOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::rope::check_operands(device, p, operands)
    }

    fn peers_on(_: &Device, _: &RopeProblem, _: &[RopeOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &RopeProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(_: &RopeProblem) -> Option<Value> {
        None
    }
}

impl Family for Embed {
    fn params(p: &EmbedProblem) -> BTreeMap<String, Value> {
        let mut params = BTreeMap::from([
            ("batch".to_owned(), p.batch.into()),
            ("seq".to_owned(), p.seq.into()),
            ("hidden".to_owned(), p.hidden.into()),
            ("vocab".to_owned(), p.vocab.into()),
            ("dtype".to_owned(), p.dtype.name().into()),
        ]);
        if let Some(positions) = p.positions {
            params.insert("positions".to_owned(), positions.into());
        }
        params
    }

    fn unit(p: &EmbedProblem) -> &'static str {
        precision(p.dtype).name()
    }

    fn compare(
        device: &Device,
        p: &EmbedProblem,
        operands: &EmbedOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::embed::check_operands(device, p, operands)
    }

    fn peers_on(_: &Device, _: &EmbedProblem, _: &[EmbedOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &EmbedProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(_: &EmbedProblem) -> Option<Value> {
        None
    }
}

impl Family for Sample {
    fn params(p: &SampleProblem) -> BTreeMap<String, Value> {
        BTreeMap::from([
            ("rows".to_owned(), p.rows.into()),
            ("vocab".to_owned(), p.vocab.into()),
            ("dtype".to_owned(), DType::F32.name().into()),
        ])
    }

    fn unit(_: &SampleProblem) -> &'static str {
        precision(DType::F32).name()
    }

    fn compare(
        device: &Device,
        p: &SampleProblem,
        operands: &SampleOperands,
        _seed: u64,
    ) -> Result<Verdict, CheckError> {
        oracle::sample::check_operands(device, p, operands)
    }

    fn peers_on(_: &Device, _: &SampleProblem, _: &[SampleOperands]) -> Peers {
        Vec::new()
    }

    fn peers(_: &Device, _: &SampleProblem, _: usize) -> Peers {
        Vec::new()
    }

    fn torch(_: &SampleProblem) -> Option<Value> {
        None
    }
}

fn weight_params(w: &Weight) -> BTreeMap<String, Value> {
    let mut params = BTreeMap::from([
        ("n".to_owned(), w.n.into()),
        ("k".to_owned(), w.k.into()),
        ("block_size".to_owned(), w.block_size.into()),
        ("order".to_owned(), w.order.name().into()),
    ]);
    if w.nested {
        params.insert("nested".to_owned(), true.into());
    }
    params
}

/// A case of bitsandbytes, which torch.py runs where it is installed.
fn bitsandbytes(op: &str, m: u32, w: &Weight, dtype: DType) -> Value {
    json!({
        "op": op,
        "m": m,
        "n": w.n,
        "k": w.k,
        "block_size": w.block_size,
        "nested": w.nested,
        "dtype": dtype.name(),
    })
}

/// The same in 8 bits.
fn eight_bits(op: &str, m: u32, w: int8::Weight, dtype: DType) -> Value {
    json!({ "op": op, "m": m, "n": w.n, "k": w.k, "dtype": dtype.name() })
}

const fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F16 => Precision::F16,
        DType::Bf16 => Precision::Bf16,
        _ => Precision::F32,
    }
}
