//! Optimizer steps over flat buffers.

use burn::tensor::{DType, Tensor};
use cubecl::server::Handle;
use kernels::optimizer::{
    AdamW, AdamWOperands, AdamWProblem, BLOCK, BlockBuffers, CONTROL, Moments, Rule, Scalars,
    Squares, SquaresOperands, SquaresProblem,
};

use crate::call::{float_of, same_shape};
use crate::cube::{cube, written};
use crate::{Ctx, OpError};

/// Rules of the step that a gradient is for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepRules {
    /// Largest norm of the gradient; a larger one is scaled down to it. None for no limit.
    pub max_norm: Option<f32>,
    /// Decay rate of the first moments.
    pub beta1: f64,
    /// Decay rate of the second moments.
    pub beta2: f64,
    /// Finite steps after which the loss scale doubles; none for a fixed scale. A gradient that is not finite halves an
    /// adaptive one.
    pub growth_interval: Option<u32>,
}

/// Updates the state of an optimizer by a gradient: its norm, whether it is finite, and the factor of the next step. Nothing
/// waits for the host.
///
/// # Shapes
/// gradient `[len]` in f32, dense, with a multiple of 4 elements; control `[CONTROL]` in f32, **written in place**: the fields
/// of [`Control`](super::Control).
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`] for invalid operands; [`OpError::Device`],
/// [`OpError::NoGradient`], [`OpError::Tune`].
pub fn control(
    ctx: &Ctx,
    gradient: &Tensor<1>,
    control: &Tensor<1>,
    rules: StepRules,
) -> Result<(), OpError> {
    let [len] = gradient.dims();
    let StepRules { max_norm, beta1, beta2, growth_interval } = rules;
    same_shape("the gradient", &[len], &[len.next_multiple_of(4)])?;
    let problem = SquaresProblem {
        len: len as u64,
        max_norm: max_norm.unwrap_or(f32::INFINITY),
        beta1,
        beta2,
        growth_interval,
    };
    let gradient = written("the gradient", gradient, &[len], DType::F32)?;
    let control = written("the control", control, &[CONTROL], DType::F32)?;
    let operands = SquaresOperands { gradient: gradient.handle.clone(), control: control.handle };
    ctx.run::<Squares>(&gradient, &problem, &operands)
}

/// Largest magnitudes and maps of moments in 8 bits.
#[derive(Debug, Clone)]
pub struct BlockScales {
    /// f32 `[2, len / BLOCK]`: of m, then of v.
    pub absmax: Tensor<2>,
    /// f32 `[512]`: [`signed_map`](super::signed_map), then [`unsigned_map`](super::unsigned_map).
    pub maps: Tensor<1>,
}

/// Flat parameters of one group and their moments, **written in place** by a step.
///
/// # Shapes
/// All `[len]`, dense, with a multiple of [`BLOCK`](super::BLOCK) elements: weights in the compute dtype, master in f32. Moments
/// in f32 or bf16, or in f32 words of four codes `[len / 4]` with `scales`.
#[derive(Debug, Clone)]
pub struct AdamWState {
    /// Weights.
    pub weights: Tensor<1>,
    /// Exact weights; none if the weights themselves are updated.
    pub master: Option<Tensor<1>>,
    /// First moments.
    pub m: Tensor<1>,
    /// Second moments.
    pub v: Tensor<1>,
    /// Scales of moments in 8 bits.
    pub scales: Option<BlockScales>,
}

/// Takes a step of AdamW by the state that [`control`] left. A gradient that is not finite changes nothing.
///
/// # Shapes
/// gradient `[len]` in f32; control `[CONTROL]`.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`], [`OpError::Apart`], [`OpError::AdamW`] for invalid operands; [`OpError::Device`],
/// [`OpError::NoGradient`], [`OpError::Tune`].
pub fn adamw(
    ctx: &Ctx,
    gradient: &Tensor<1>,
    state: &AdamWState,
    control: &Tensor<1>,
    scalars: Scalars,
) -> Result<(), OpError> {
    let AdamWState { weights, master, m, v, scales } = state;
    let len = weights.dims()[0];
    let (moments, moment, words) = match (scales, m.dtype()) {
        (Some(_), _) => (Moments::Int8, DType::F32, len / 4),
        (None, DType::BF16) => (Moments::Bf16, DType::BF16, len),
        (None, _) => (Moments::F32, DType::F32, len),
    };
    let blocks = |scales: &BlockScales| {
        let shape = [2, len / BLOCK as usize];
        let absmax = written("the scales", &scales.absmax, &shape, DType::F32)?;
        let maps = written("the maps", &scales.maps, &[512], DType::F32)?;
        Ok::<_, OpError>(BlockBuffers { absmax: absmax.handle, maps: maps.handle })
    };
    let buffers = Buffers {
        m: Some(written("m", m, &[words], moment)?.handle),
        v: Some(written("v", v, &[words], moment)?.handle),
        blocks: scales.as_ref().map(blocks).transpose()?,
    };
    let values = (gradient, weights, master.as_ref());
    step(ctx, values, (Rule::AdamW, moments, scalars), buffers, control)
}

/// Updates the momentum of a gradient, m = β₁ m + (1 - β₁) g, and writes Nesterov's direction, β₁ m + (1 - β₁) g, for [`descend`].
/// A gradient that is not finite changes nothing.
///
/// # Shapes
/// gradient and m `[len]` in f32; direction `[len]` in f32 or bf16; control `[CONTROL]`. m and direction are **written in place**.
///
/// # Errors
/// The errors of [`adamw`].
pub fn momentum(
    ctx: &Ctx,
    gradient: &Tensor<1>,
    m: &Tensor<1>,
    direction: &Tensor<1>,
    control: &Tensor<1>,
    scalars: Scalars,
) -> Result<(), OpError> {
    let m = written("m", m, &direction.dims(), DType::F32)?;
    let buffers = Buffers { m: Some(m.handle), v: None, blocks: None };
    let values = (gradient, direction, None);
    step(ctx, values, (Rule::Momentum, Moments::F32, scalars), buffers, control)
}

/// Subtracts a direction from weights: p = (1 - rate · decay) p - rate · direction. Nothing changes if the last gradient was not
/// finite.
///
/// # Shapes
/// direction `[len]` in f32; weights and master as in [`AdamWState`], **written in place**; control `[CONTROL]`.
///
/// # Errors
/// The errors of [`adamw`].
pub fn descend(
    ctx: &Ctx,
    direction: &Tensor<1>,
    weights: &Tensor<1>,
    master: Option<&Tensor<1>>,
    control: &Tensor<1>,
    scalars: Scalars,
) -> Result<(), OpError> {
    let buffers = Buffers { m: None, v: None, blocks: None };
    let values = (direction, weights, master);
    step(ctx, values, (Rule::Descent, Moments::F32, scalars), buffers, control)
}

/// Buffers of moments; those that a rule leaves alone may be absent.
struct Buffers {
    m: Option<Handle>,
    v: Option<Handle>,
    blocks: Option<BlockBuffers>,
}

fn step(
    ctx: &Ctx,
    (gradient, weights, master): (&Tensor<1>, &Tensor<1>, Option<&Tensor<1>>),
    (rule, moments, scalars): (Rule, Moments, Scalars),
    Buffers { m, v, blocks }: Buffers,
    control: &Tensor<1>,
) -> Result<(), OpError> {
    let [len] = weights.dims();
    let dtype = weights.dtype();
    let problem = AdamWProblem {
        len: len as u64,
        weights: float_of(dtype)?,
        master: master.is_some(),
        moments,
        scalars,
        rule,
    }
    .checked()?;
    let weights = written("the weights", weights, &[len], dtype)?;
    let f32 = |what, tensor: &Tensor<1>| written(what, tensor, &[len], DType::F32);
    let control = cube(control.clone())?.handle;
    let operands = AdamWOperands {
        gradient: f32("the gradient", gradient)?.handle,
        weights: weights.handle.clone(),
        master: master.map(|own| f32("the master", own)).transpose()?.map(|t| t.handle),
        m,
        v,
        blocks,
        control,
    };
    ctx.run::<AdamW>(&weights, &problem, &operands)
}
