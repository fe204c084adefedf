//! What verification knows of each kernel family: its cases, and how one runs.

use std::collections::BTreeMap;

use arch::{Backend, DType, Device};
use kernels::attention::backward::{AttentionBackward, BackwardProblem};
use kernels::attention::decode::{Decode, DecodeProblem};
use kernels::attention::{Attention, AttentionProblem};
use kernels::embed::{Embed, EmbedProblem};
use kernels::int8::{Int8Dequantize, Int8Matmul, Int8MatmulProblem, Int8Quantize};
use kernels::matmul::{Matmul, MatmulProblem, Precision};
use kernels::nf4::{
    DequantizeProblem, Nf4Dequantize, Nf4Matmul, Nf4MatmulProblem, Nf4Quantize, QuantizeProblem,
};
use kernels::norm::{Norm, NormProblem};
use kernels::rope::{Rope, RopeProblem};
use kernels::sample::{Sample, SampleProblem};
use oracle::attention_backward::BackwardCase;
use oracle::nf4::{DequantizeCase, ProductCase, QuantizeCase};
use oracle::{
    CheckError, Verdict, attention, attention_backward, decode, embed, int8, matmul, nf4, norm,
    rope, sample,
};
use serde_json::Value;

use super::Verified;
use crate::family::Family;

impl Verified for Matmul {
    type Case = matmul::EdgeCase;
    type Kind = Precision;

    fn kinds() -> Vec<Precision> {
        Precision::ALL.to_vec()
    }

    fn kind(problem: &MatmulProblem) -> Precision {
        problem.precision
    }

    fn edge_cases(kind: Precision, backend: Backend) -> Vec<matmul::EdgeCase> {
        matmul::edge_cases(kind, backend)
    }

    fn config_cases(kind: Precision) -> Vec<matmul::EdgeCase> {
        matmul::config_cases(kind)
    }

    fn problem(case: &matmul::EdgeCase) -> &MatmulProblem {
        &case.problem
    }

    fn params(case: &matmul::EdgeCase) -> BTreeMap<String, Value> {
        let p = &case.problem;
        let mut params = <Self as Family>::params(p);
        if matches!(case.inputs, matmul::Inputs::Special(_)) {
            params.insert("inputs".to_owned(), "inf+nan".into());
        }
        let dense =
            MatmulProblem::dense(1, [p.m, p.n, p.k], [p.lhs.layout, p.rhs.layout], p.precision);
        if p.batch() == 1 && dense.is_ok_and(|d| d.lhs != p.lhs || d.rhs != p.rhs) {
            params.insert("view".to_owned(), format!("{}+{}", p.lhs.stride, p.lhs.start).into());
        }
        if let Some(shares) = case.shares() {
            params.insert("shares".to_owned(), shares.name().into());
        } else if matches!(case.inputs, matmul::Inputs::Far(_)) {
            let [lhs, rhs, out] = p.extents();
            let far =
                [("lhs", lhs), ("rhs", rhs), ("out", out)].into_iter().max_by_key(|(_, len)| *len);
            params.insert("far".to_owned(), far.map_or("", |(name, _)| name).into());
            params.insert("extent".to_owned(), lhs.max(rhs).max(out).into());
        } else if p.batch() > 1 && (p.batches.lhs.1 == 0 || p.batches.rhs.1 == 0) {
            params.insert("repeat".to_owned(), true.into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &matmul::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        matmul::check(device, case, config)
    }
}

impl Verified for Attention {
    type Case = attention::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &AttentionProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, backend: Backend) -> Vec<attention::EdgeCase> {
        attention::edge_cases(kind, backend)
    }

    fn config_cases(kind: DType) -> Vec<attention::EdgeCase> {
        attention::config_cases(kind)
    }

    fn problem(case: &attention::EdgeCase) -> &AttentionProblem {
        &case.problem
    }

    fn params(case: &attention::EdgeCase) -> BTreeMap<String, Value> {
        let p = &case.problem;
        let mut params = <Self as Family>::params(p);
        // Cases that differ in more than sizes and rules are told apart by their seed.
        params.insert("seed".to_owned(), case.seed.into());
        if case.inputs != attention::Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        if case.inputs == attention::Inputs::Far {
            params.insert("extent".to_owned(), p.extents()[0].into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &attention::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        attention::check(device, case, config)
    }
}

impl Verified for AttentionBackward {
    type Case = BackwardCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        <Attention as Verified>::kinds()
    }

    fn kind(problem: &BackwardProblem) -> DType {
        problem.forward.dtype
    }

    fn edge_cases(kind: DType, backend: Backend) -> Vec<BackwardCase> {
        attention_backward::edge_cases(kind, backend)
    }

    fn config_cases(kind: DType) -> Vec<BackwardCase> {
        attention_backward::config_cases(kind)
    }

    fn problem(case: &BackwardCase) -> &BackwardProblem {
        &case.problem
    }

    fn params(case: &BackwardCase) -> BTreeMap<String, Value> {
        <Attention as Verified>::params(&case.forward)
    }

    fn run(
        device: &Device,
        case: &BackwardCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        attention_backward::check(device, case, config)
    }
}

impl Verified for Decode {
    type Case = decode::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &DecodeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, backend: Backend) -> Vec<decode::EdgeCase> {
        decode::edge_cases(kind, backend)
    }

    fn config_cases(kind: DType) -> Vec<decode::EdgeCase> {
        decode::config_cases(kind)
    }

    fn problem(case: &decode::EdgeCase) -> &DecodeProblem {
        &case.problem
    }

    fn params(case: &decode::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        // Cases that differ in more than sizes and rules are told apart by their seed.
        params.insert("seed".to_owned(), case.seed.into());
        if case.inputs != decode::Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        if case.inputs == decode::Inputs::Far {
            params.insert("extent".to_owned(), case.problem.extents()[1].into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &decode::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        decode::check(device, case, config)
    }
}

impl Verified for Nf4Dequantize {
    type Case = DequantizeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &DequantizeProblem) -> DType {
        problem.out
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<DequantizeCase> {
        nf4::dequantize_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<DequantizeCase> {
        nf4::dequantize_cases(kind).into_iter().skip(1).step_by(11).collect()
    }

    fn problem(case: &DequantizeCase) -> &DequantizeProblem {
        &case.problem
    }

    fn params(case: &DequantizeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        params.insert("code".to_owned(), case.code_name().into());
        params
    }

    fn run(
        device: &Device,
        case: &DequantizeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        nf4::check_dequantize(device, case, config)
    }
}

impl Verified for Nf4Matmul {
    type Case = ProductCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &Nf4MatmulProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<ProductCase> {
        nf4::product_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<ProductCase> {
        nf4::product_config_cases(kind)
    }

    fn problem(case: &ProductCase) -> &Nf4MatmulProblem {
        &case.problem
    }

    fn params(case: &ProductCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        params.insert("code".to_owned(), case.code_name().into());
        params
    }

    fn run(
        device: &Device,
        case: &ProductCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        nf4::check(device, case, config)
    }
}

impl Verified for Nf4Quantize {
    type Case = QuantizeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &QuantizeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<QuantizeCase> {
        nf4::quantize_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<QuantizeCase> {
        nf4::quantize_cases(kind).into_iter().skip(3).step_by(9).collect()
    }

    fn problem(case: &QuantizeCase) -> &QuantizeProblem {
        &case.problem
    }

    fn params(case: &QuantizeCase) -> BTreeMap<String, Value> {
        <Self as Family>::params(&case.problem)
    }

    fn run(
        device: &Device,
        case: &QuantizeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        nf4::check_quantize(device, case, config)
    }
}

impl Verified for Int8Dequantize {
    type Case = int8::Case<kernels::int8::DequantizeProblem>;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &kernels::int8::DequantizeProblem) -> DType {
        problem.out
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<Self::Case> {
        int8::dequantize_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<Self::Case> {
        int8::dequantize_cases(kind).into_iter().skip(3).step_by(4).collect()
    }

    fn problem(case: &Self::Case) -> &kernels::int8::DequantizeProblem {
        &case.problem
    }

    fn params(case: &Self::Case) -> BTreeMap<String, Value> {
        <Self as Family>::params(&case.problem)
    }

    fn run(
        device: &Device,
        case: &Self::Case,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        int8::check_dequantize(device, case, config)
    }
}

impl Verified for Int8Matmul {
    type Case = int8::Case<Int8MatmulProblem>;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &Int8MatmulProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<Self::Case> {
        int8::product_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<Self::Case> {
        int8::product_config_cases(kind)
    }

    fn problem(case: &Self::Case) -> &Int8MatmulProblem {
        &case.problem
    }

    fn params(case: &Self::Case) -> BTreeMap<String, Value> {
        <Self as Family>::params(&case.problem)
    }

    fn run(
        device: &Device,
        case: &Self::Case,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        int8::check(device, case, config)
    }
}

impl Verified for Int8Quantize {
    type Case = int8::Case<kernels::int8::QuantizeProblem>;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &kernels::int8::QuantizeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<Self::Case> {
        int8::quantize_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<Self::Case> {
        int8::quantize_cases(kind).into_iter().skip(3).step_by(4).collect()
    }

    fn problem(case: &Self::Case) -> &kernels::int8::QuantizeProblem {
        &case.problem
    }

    fn params(case: &Self::Case) -> BTreeMap<String, Value> {
        <Self as Family>::params(&case.problem)
    }

    fn run(
        device: &Device,
        case: &Self::Case,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        int8::check_quantize(device, case, config)
    }
}

impl Verified for Norm {
    type Case = norm::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &NormProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<norm::EdgeCase> {
        norm::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<norm::EdgeCase> {
        norm::config_cases(kind)
    }

    fn problem(case: &norm::EdgeCase) -> &NormProblem {
        &case.problem
    }

    fn params(case: &norm::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        if case.inputs != norm::Inputs::Normal {
            let inputs = format!("{:?}", case.inputs).to_lowercase();
            params.insert("inputs".to_owned(), inputs.into());
        }
        params
    }

    fn run(
        device: &Device,
        case: &norm::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        norm::check(device, case, config)
    }
}

impl Verified for Rope {
    type Case = rope::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &RopeProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<rope::EdgeCase> {
        rope::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<rope::EdgeCase> {
        rope::config_cases(kind)
    }

    fn problem(case: &rope::EdgeCase) -> &RopeProblem {
        &case.problem
    }

    fn params(case: &rope::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        // Cases that differ in where sequences are, and in their caches, are told apart by their seed.
        params.insert("seed".to_owned(), case.seed.into());
        params
    }

    fn run(
        device: &Device,
        case: &rope::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        rope::check(device, case, config)
    }
}

impl Verified for Embed {
    type Case = embed::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32, DType::F16, DType::Bf16]
    }

    fn kind(problem: &EmbedProblem) -> DType {
        problem.dtype
    }

    fn edge_cases(kind: DType, _backend: Backend) -> Vec<embed::EdgeCase> {
        embed::edge_cases(kind)
    }

    fn config_cases(kind: DType) -> Vec<embed::EdgeCase> {
        embed::config_cases(kind)
    }

    fn problem(case: &embed::EdgeCase) -> &EmbedProblem {
        &case.problem
    }

    fn params(case: &embed::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        params.insert("past".to_owned(), case.past.into());
        params
    }

    fn run(
        device: &Device,
        case: &embed::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        embed::check(device, case, config)
    }
}

impl Verified for Sample {
    type Case = sample::EdgeCase;
    type Kind = DType;

    fn kinds() -> Vec<DType> {
        vec![DType::F32]
    }

    fn kind(_: &SampleProblem) -> DType {
        DType::F32
    }

    fn edge_cases(_: DType, backend: Backend) -> Vec<sample::EdgeCase> {
        sample::edge_cases(backend)
    }

    fn config_cases(_: DType) -> Vec<sample::EdgeCase> {
        sample::config_cases()
    }

    fn problem(case: &sample::EdgeCase) -> &SampleProblem {
        &case.problem
    }

    fn params(case: &sample::EdgeCase) -> BTreeMap<String, Value> {
        let mut params = <Self as Family>::params(&case.problem);
        let c = case.choice;
        for (name, value) in [
            ("temperature", c.temperature),
            ("top_p", c.top_p),
            ("min_p", c.min_p),
            ("penalty", c.penalty),
        ] {
            params.insert(name.to_owned(), f64::from(value).into());
        }
        params.insert("top_k".to_owned(), c.top_k.into());
        params.insert("odd".to_owned(), case.odd.into());
        params
    }

    fn run(
        device: &Device,
        case: &sample::EdgeCase,
        config: &Self::Config,
    ) -> Result<Verdict, CheckError> {
        sample::check(device, case, config)
    }
}
