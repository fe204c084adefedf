//! Weight matrices as matmuls with epilogues.

use std::ops::Range;

use burn::tensor::kind::Basic;
use burn::tensor::{FloatDType, Tensor};
use ops::{
    Activation, Ctx, Epilogue, NormKind, OpError, QuantizedWeight, RowNorm, activate, apart,
    linear, quantized_glu, quantized_linear, takes_norm,
};
use quant::WeightFormat;

use super::unmerged_lora::UnmergedLora;
use crate::Error;

/// Largest number of f32 rows that is as fast as tf32, because reading the weight dominates.
const MAX_EXACT_ROWS: usize = 8;

/// A weight `[n, k]`.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a layer has a handful")]
pub(super) enum Matrix {
    Dense(Tensor<2>),
    Quantized(QuantizedWeight),
}

/// `x · wᵀ + bias` for matrices with concatenated rows; several matrices if they cannot be joined.
#[derive(Debug, Clone)]
pub(super) struct Projection {
    pub(super) matrices: Vec<Matrix>,
    /// `[n]`, for all matrices.
    pub(super) bias: Option<Tensor<1>>,
    /// See [`LoadOptions::tf32`](super::LoadOptions::tf32).
    pub(super) tf32: bool,
    /// Unmerged LoRA.
    pub(super) unmerged: Option<UnmergedLora>,
}

/// The feed-forward block.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "a layer has one")]
pub(super) enum Ffn {
    Gated {
        gate: Projection,
        up: Projection,
        down: Projection,
    },
    /// Gate and up as one quantised weight.
    Joint {
        both: QuantizedWeight,
        bias: Option<Tensor<1>>,
        /// Unmerged LoRA of both.
        unmerged: Option<UnmergedLora>,
        down: Projection,
    },
    Plain {
        up: Projection,
        down: Projection,
    },
}

/// Reads the last row of a tensor, which waits for it.
pub(super) fn synchronize<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> Result<(), Error> {
    let rows = tensor.dims()[0];
    let last = tensor.clone().slice_dim(0, rows - 1..rows).try_into_data();
    last.map(drop).map_err(|why| Error::Failed(format!("{why:?}")))
}

impl Matrix {
    /// Returns the weight format; none if dense.
    pub(super) fn format(&self) -> Option<WeightFormat> {
        match self {
            Self::Dense(_) => None,
            Self::Quantized(weight) => Some(weight.scheme().format),
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Self::Dense(weight) => (weight.shape().num_elements() * weight.dtype().size()) as u64,
            Self::Quantized(weight) => weight.bytes(),
        }
    }

    /// See [`Decoder::check_allocation`](super::Decoder::check_allocation).
    fn check_allocation(&self) -> Result<(), Error> {
        match self {
            Self::Dense(weight) => synchronize(weight),
            Self::Quantized(weight) => synchronize(&weight.codes()),
        }
    }

    fn rows(&self) -> usize {
        match self {
            Self::Dense(weight) => weight.dims()[0],
            Self::Quantized(weight) => weight.shape()[0],
        }
    }

    fn takes_norm(&self, ctx: &Ctx, x: &Tensor<2>, kind: NormKind) -> Result<bool, OpError> {
        match self {
            Self::Dense(weight) => takes_norm(ctx, x, &weight.clone().transpose(), kind),
            Self::Quantized(weight) => weight.takes_norm(ctx, x, kind, false),
        }
    }

    fn apply(&self, ctx: &Ctx, x: Tensor<2>, epilogue: Epilogue<2>) -> Result<Tensor<2>, OpError> {
        match self {
            Self::Dense(weight) => linear(ctx, x, weight.clone().transpose(), epilogue),
            Self::Quantized(weight) => quantized_linear(ctx, x, weight, epilogue),
        }
    }
}

impl Projection {
    /// Returns the only matrix of a projection that is never quantised.
    pub(super) fn dense(&self) -> Result<Tensor<2>, Error> {
        match &self.matrices[..] {
            [Matrix::Dense(weight)] => Ok(weight.clone()),
            _ => Err(Error::QuantizedWeights),
        }
    }

    pub(super) fn format(&self) -> Option<WeightFormat> {
        self.matrices.iter().map(Matrix::format).max().flatten()
    }

    pub(super) fn bytes(&self) -> u64 {
        let own: u64 = self.matrices.iter().map(Matrix::bytes).sum();
        own + self.unmerged.as_ref().map_or(0, UnmergedLora::bytes)
    }

    /// Returns the columns of the unmerged LoRA.
    pub(super) fn columns(&self) -> usize {
        self.unmerged.as_ref().map_or(0, UnmergedLora::columns)
    }

    fn rows(&self) -> usize {
        self.matrices.iter().map(Matrix::rows).sum()
    }

    pub(super) fn check_allocation(&self) -> Result<(), Error> {
        self.matrices.iter().try_for_each(Matrix::check_allocation)
    }

    /// Returns true if every matmul fuses the norm of x, and nothing else reads x.
    pub(super) fn takes_norm(
        &self,
        ctx: &Ctx,
        x: &Tensor<2>,
        kind: NormKind,
    ) -> Result<bool, OpError> {
        if self.unmerged.is_some() {
            return Ok(false);
        }
        for matrix in &self.matrices {
            if !matrix.takes_norm(ctx, x, kind)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Computes `[rows, n]` from x `[rows, k]`. The epilogue's bias is the projection's own. A norm in the
    /// epilogue requires [`Projection::takes_norm`].
    pub(super) fn apply(
        &self,
        ctx: &Ctx,
        x: Tensor<2>,
        epilogue: Epilogue<2>,
    ) -> Result<Tensor<2>, OpError> {
        let Some(unmerged) = &self.unmerged else { return self.matrices_of(ctx, x, epilogue) };
        let Some(activation) = epilogue.activation else {
            let residual = apart(|| unmerged.apply(ctx, x.clone(), epilogue.residual))?;
            return self.matrices_of(ctx, x, Epilogue { residual: Some(residual), ..epilogue });
        };
        // The activation applies to the sum with the LoRA.
        let residual = Some(unmerged.apply(ctx, x.clone(), None)?);
        let plain = Epilogue { residual, activation: None, gate: None, ..epilogue };
        let y = activate(self.matrices_of(ctx, x, plain)?, activation, epilogue.gate)?;
        Ok(match epilogue.residual {
            Some(residual) => y + residual,
            None => y,
        })
    }

    fn matrices_of(
        &self,
        ctx: &Ctx,
        x: Tensor<2>,
        epilogue: Epilogue<2>,
    ) -> Result<Tensor<2>, OpError> {
        if let [matrix] = &self.matrices[..] {
            return self.one(ctx, x, matrix, Epilogue { bias: self.bias.clone(), ..epilogue });
        }
        let mut from = 0;
        let mut parts = Vec::with_capacity(self.matrices.len());
        for matrix in &self.matrices {
            let to = from + matrix.rows();
            let columns = |t: &Tensor<2>| t.clone().slice_dim(1, from..to);
            let own = Epilogue {
                bias: self.bias.as_ref().map(|bias| bias.clone().slice_dim(0, from..to)),
                gate: epilogue.gate.as_ref().map(columns),
                residual: epilogue.residual.as_ref().map(columns),
                ..epilogue.clone()
            };
            parts.push(apart(|| self.one(ctx, x.clone(), matrix, own))?);
            from = to;
        }
        Ok(Tensor::cat(parts, 1))
    }

    fn one(
        &self,
        ctx: &Ctx,
        x: Tensor<2>,
        matrix: &Matrix,
        epilogue: Epilogue<2>,
    ) -> Result<Tensor<2>, OpError> {
        let dense = matches!(matrix, Matrix::Dense(_));
        let tf32 = self.tf32 && dense && x.dims()[0] > MAX_EXACT_ROWS;
        matrix.apply(ctx, x, Epilogue { tf32, ..epilogue })
    }

    /// Computes the projection in f32 for any dtype of x, with the norm fused if given.
    pub(super) fn in_f32(
        &self,
        ctx: &Ctx,
        x: Tensor<2>,
        norm: Option<RowNorm>,
    ) -> Result<Tensor<2>, OpError> {
        let wide = Some(FloatDType::F32);
        if self.matrices.iter().all(|matrix| matches!(matrix, Matrix::Dense(_))) {
            return self.apply(ctx, x, Epilogue { out: wide, norm, ..Epilogue::default() });
        }
        // Matmuls with quantised weights return the dtype of x.
        let epilogue = Epilogue { norm, ..Epilogue::default() };
        Ok(self.apply(ctx, x, epilogue)?.cast(FloatDType::F32))
    }
}

impl Ffn {
    /// Returns the projections of the block's input: gate and up, both as one, or up alone.
    pub(super) fn inner_projections(&self) -> Vec<Projection> {
        match self {
            Self::Gated { gate, up, .. } => vec![gate.clone(), up.clone()],
            Self::Joint { both, bias, unmerged, .. } => vec![Projection {
                matrices: vec![Matrix::Quantized(both.clone())],
                bias: bias.clone(),
                tf32: false,
                unmerged: unmerged.clone(),
            }],
            Self::Plain { up, .. } => vec![up.clone()],
        }
    }

    /// Returns the last projection of the block.
    pub(super) const fn down(&self) -> &Projection {
        match self {
            Self::Gated { down, .. } | Self::Joint { down, .. } | Self::Plain { down, .. } => down,
        }
    }

    pub(super) fn format(&self) -> Option<WeightFormat> {
        match self {
            Self::Gated { gate, up, down } => gate.format().max(up.format()).max(down.format()),
            Self::Joint { both, down, .. } => Some(both.scheme().format).max(down.format()),
            Self::Plain { up, down } => up.format().max(down.format()),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Gated { gate, up, down } => gate.bytes() + up.bytes() + down.bytes(),
            Self::Joint { both, unmerged, down, .. } => {
                both.bytes() + unmerged.as_ref().map_or(0, UnmergedLora::bytes) + down.bytes()
            }
            Self::Plain { up, down } => up.bytes() + down.bytes(),
        }
    }

    /// Returns the most columns of the unmerged LoRA of one matmul.
    pub(super) fn columns(&self) -> usize {
        match self {
            Self::Gated { gate, up, down } => gate.columns().max(up.columns()).max(down.columns()),
            Self::Joint { unmerged, down, .. } => {
                unmerged.as_ref().map_or(0, UnmergedLora::columns).max(down.columns())
            }
            Self::Plain { up, down } => up.columns().max(down.columns()),
        }
    }

    pub(super) fn check_allocation(&self) -> Result<(), Error> {
        let all = |parts: &[&Projection]| parts.iter().try_for_each(|part| part.check_allocation());
        match self {
            Self::Gated { gate, up, down } => all(&[gate, up, down]),
            Self::Joint { both, down, .. } => {
                synchronize(&both.codes()).and_then(|()| down.check_allocation())
            }
            Self::Plain { up, down } => all(&[up, down]),
        }
    }

    /// Returns true if the first matmuls of the block fuse the norm of x.
    pub(super) fn takes_norm(
        &self,
        ctx: &Ctx,
        x: &Tensor<2>,
        kind: NormKind,
    ) -> Result<bool, OpError> {
        match self {
            Self::Gated { gate, up, .. } => {
                Ok(gate.takes_norm(ctx, x, kind)? && up.takes_norm(ctx, x, kind)?)
            }
            Self::Joint { unmerged: Some(_), .. } => Ok(false),
            Self::Joint { both, .. } => both.takes_norm(ctx, x, kind, true),
            Self::Plain { up, .. } => up.takes_norm(ctx, x, kind),
        }
    }

    /// Returns the input of the block's last matmul, `[rows, ffn_hidden]`, and that projection. The norm is
    /// fused if given.
    pub(super) fn inner(
        &self,
        ctx: &Ctx,
        y: Tensor<2>,
        norm: Option<RowNorm>,
        activation: Activation,
    ) -> Result<(Tensor<2>, &Projection), OpError> {
        if let Self::Joint { unmerged: Some(_), .. } = self {
            return self.inner_with(ctx, y, activation, |_| Ok(None));
        }
        let activation = Some(activation);
        Ok(match self {
            Self::Gated { gate, up, down } => {
                let own = Epilogue { norm: norm.clone(), ..Epilogue::default() };
                let up = up.apply(ctx, y.clone(), own)?;
                let gated = Epilogue { activation, gate: Some(up), norm, ..Epilogue::default() };
                (gate.apply(ctx, y, gated)?, down)
            }
            Self::Joint { both, bias, down, .. } => {
                let bias = bias.clone();
                let epilogue = Epilogue { bias, activation, norm, ..Epilogue::default() };
                (quantized_glu(ctx, y, both, epilogue)?, down)
            }
            Self::Plain { up, down } => {
                (up.apply(ctx, y, Epilogue { activation, norm, ..Epilogue::default() })?, down)
            }
        })
    }

    /// Computes [`Ffn::inner`] without a norm; `more` returns an addend for rows of gate and up, before the
    /// activation.
    pub(super) fn inner_with(
        &self,
        ctx: &Ctx,
        y: Tensor<2>,
        activation: Activation,
        more: impl Fn(Range<usize>) -> Result<Option<Tensor<2>>, OpError>,
    ) -> Result<(Tensor<2>, &Projection), OpError> {
        let of = |projection: &Projection, from: usize| {
            let residual = more(from..from + projection.rows())?;
            projection.apply(ctx, y.clone(), Epilogue { residual, ..Epilogue::default() })
        };
        Ok(match self {
            Self::Plain { up, down } => (activate(of(up, 0)?, activation, None)?, down),
            Self::Gated { gate, up, down } => {
                let up = of(up, gate.rows())?;
                (activate(of(gate, 0)?, activation, Some(up))?, down)
            }
            Self::Joint { both, bias, unmerged, down } => {
                let rows = both.shape()[0];
                let mut residual = more(0..rows)?;
                if let Some(unmerged) = unmerged {
                    residual = Some(unmerged.apply(ctx, y.clone(), residual)?);
                }
                let epilogue = Epilogue { bias: bias.clone(), residual, ..Epilogue::default() };
                let both = quantized_linear(ctx, y, both, epilogue)?;
                let half = |from: usize| both.clone().slice_dim(1, from..from + rows / 2);
                (activate(half(0), activation, Some(half(rows / 2)))?, down)
            }
        })
    }
}
