//! Muon: matrices of layers move along their orthogonalised momentum.
//!
//! ```text
//! m = β m + (1 - β) g,  u = β m + (1 - β) g                              for all values of a matrix
//! x = u / ‖u‖
//! repeat: a = x xᵀ or xᵀ x, the smaller;  x = (α + β' a + γ a²) x         α, β', γ = 3.4445, -4.7750, 2.0315
//! w = (1 - rate · decay) w - rate · 0.2 · √max(rows, columns) · x
//! ```
//!
//! The iteration, Newton's and Schulz's of degree 5, moves all singular values of x to between 0.7 and 1.2. Queries, keys and values
//! are matrices of their own. With the factor of the last line an update has the size of AdamW's, so that rate and decay serve both.
//!
//! Cost of an iteration for r rows and c ≥ r columns: 4 r² c + 2 r³ operations.
//!
//! Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024); Liu et al., "Muon is Scalable for LLM
//! Training" (2025, arXiv:2502.16982), for the factor.

use burn::tensor::{DType, FloatDType, Tensor};
use ops::training::{Scalars, descend, momentum};
use ops::{Ctx, Epilogue, matmul};

use crate::decoder::zeros;
use crate::{Error, FlatTensor};

/// Options of Muon.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonOptions {
    /// Decay rate of the momentum, from 0 to below 1.
    pub momentum: f64,
    /// Number of iterations.
    pub iterations: u32,
}

impl Default for MuonOptions {
    fn default() -> Self {
        Self { momentum: 0.95, iterations: 5 }
    }
}

/// Momentum of a group of matrices.
pub(super) struct MuonState {
    /// The matrices, with their offsets in all values.
    pub(super) tensors: Vec<FlatTensor>,
    pub(super) m: Tensor<1>,
    pub(super) master: Option<Tensor<1>>,
}

impl MuonState {
    pub(super) fn zeros(
        tensors: Vec<FlatTensor>,
        len: usize,
        master: Option<Tensor<1>>,
        weights: &Tensor<1>,
    ) -> Self {
        Self { tensors, m: zeros(len, FloatDType::F32, &weights.device()), master }
    }

    /// Updates the weights of the group, whose values begin at `start` of all.
    pub(super) fn step(
        &self,
        ctx: &Ctx,
        gradient: &Tensor<1>,
        (weights, start): (&Tensor<1>, usize),
        control: &Tensor<1>,
        (options, scalars): (MuonOptions, Scalars),
    ) -> Result<(), Error> {
        // Gradients in f16 would vanish in it.
        let dtype = match weights.dtype() {
            DType::BF16 => DType::BF16,
            _ => DType::F32,
        };
        for tensor in &self.tensors {
            let (at, len) = (tensor.at - start, tensor.space());
            let of = |values: &Tensor<1>| ops::view::<1>(values, at, [len]);
            let direction = Tensor::<1>::empty([len], (&weights.device(), dtype));
            let by = Scalars { beta1: options.momentum, ..scalars };
            momentum(ctx, &of(gradient)?, &of(&self.m)?, &direction, control, by)?;
            let mut updates = Vec::new();
            for (param, range) in tensor.parts() {
                let shape = [param.shape[0], param.shape[1]];
                let own = ops::view(&direction, range.start - tensor.at, shape)?;
                let scale = 0.2 * (shape[0].max(shape[1]) as f64).sqrt();
                let update = orthogonalised(ctx, own, options.iterations)?.mul_scalar(scale);
                updates.push(update.reshape([range.len()]));
            }
            let padding = len - tensor.len();
            if padding > 0 {
                updates.push(Tensor::zeros([padding], (&weights.device(), DType::F32)));
            }
            let update = match updates.len() {
                1 => updates.remove(0),
                _ => Tensor::cat(updates, 0),
            };
            let master = self.master.as_ref().map(of).transpose()?;
            let by = Scalars { first: at as u32, ..scalars };
            descend(ctx, &update, &of(weights)?, master.as_ref(), control, by)?;
        }
        Ok(())
    }
}

/// Returns u with all singular values near 1, in f32.
fn orthogonalised(ctx: &Ctx, u: Tensor<2>, iterations: u32) -> Result<Tensor<2>, Error> {
    const FACTORS: [f64; 3] = [3.4445, -4.7750, 2.0315];
    let [alpha, beta, gamma] = FACTORS;
    let ([rows, columns], dtype) = (u.dims(), FloatDType::from(u.dtype()));
    let wide = u.clone().cast(FloatDType::F32);
    let norm = wide.clone().powi_scalar(2).sum().sqrt().clamp_min(1e-7).reshape([1, 1]);
    let mut x = (wide / norm).cast(dtype);
    let side = rows.min(columns);
    let identity = Tensor::<2>::eye(side, &u.device()).cast(dtype).mul_scalar(alpha);
    for iteration in 1..=iterations {
        let transposed = x.clone().transpose();
        let tall = rows > columns;
        let (left, right) = if tall { (transposed, x.clone()) } else { (x.clone(), transposed) };
        let a = matmul(ctx, left, right, Epilogue::default())?;
        let lower = a.clone().mul_scalar(beta) + identity.clone();
        let epilogue = Epilogue { residual: Some(lower), ..Epilogue::default() };
        let b = matmul(ctx, a.clone().mul_scalar(gamma), a, epilogue)?;
        let out = (iteration == iterations).then_some(FloatDType::F32);
        let epilogue = Epilogue { out, ..Epilogue::default() };
        x = match tall {
            true => matmul(ctx, x, b, epilogue)?,
            false => matmul(ctx, b, x, epilogue)?,
        };
    }
    Ok(x.cast(FloatDType::F32))
}
