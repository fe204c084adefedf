//! Sampling of tokens from logits, on the device.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::{Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::sample::{RESULT, Sample, SampleOperands, SampleProblem};
use tune::Kernel;

use crate::call::{Call, as_int32, empty_like, float_of, on_cubecl, same_shape, size_of};
use crate::{Ctx, OpError, OpMemory};

/// Samples a token from each row of `logits`, by the row's `choices` ([`kernels::sample::Choice::words`]) and
/// the rules of [`kernels::sample`]. Marks it as seen: `seen`, one bit per token, is written **in place** for
/// every clone of it.
///
/// # Shapes
/// logits `[rows, vocab]` in f32; choices `[rows, 6]`, I32 or U32. seen `[rows · ceil(vocab / 32)]`, I32 or
/// U32. It may have one more row, with a bit set for each token that must not be sampled. The result is
/// `[rows, 4]` in f32: the token, its log probability ln softmax(logits), its log probability in the distribution that it was drawn
/// from, and 1 if the row has no token because its logits contain NaN or have no finite maximum.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`] or [`OpError::Sample`] for invalid operands; [`OpError::Device`]
/// for a device without kernels; [`OpError::NoGradient`] for tracked logits.
pub fn sample(
    ctx: &Ctx,
    logits: Tensor<2>,
    choices: Tensor<2, Int>,
    seen: Tensor<1, Int>,
) -> Result<Tensor<2>, OpError> {
    on_cubecl(&logits.device())?;
    let [rows, vocab] = logits.dims();
    let (have, need) = (logits.dtype(), burn::tensor::DType::F32);
    if float_of(have)? != arch::DType::F32 {
        return Err(OpError::DType { what: "logits", have, need });
    }
    let mut problem = SampleProblem::new(size_of(rows)?, size_of(vocab)?)?;
    problem.masked = seen.dims() == [(rows + 1) * problem.seen_words()];
    same_shape("choices", &choices.dims(), &[rows, 6])?;
    same_shape("seen", &seen.dims(), &[problem.all_words()])?;
    let have = seen.dtype();
    if !matches!(have, burn::tensor::DType::I32 | burn::tensor::DType::U32) {
        return Err(OpError::DType { what: "seen", have, need: burn::tensor::DType::I32 });
    }
    let call = Call::new(ctx);
    let out = <Dispatch as SampleOps>::sample(
        logits.into_dispatch(),
        as_int32(choices).into_dispatch(),
        seen.into_dispatch(),
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(e) => Err(e),
    }
}

/// Returns the bytes of [`sample`] on logits `[rows, vocab]`: an f32 weight per logit, and a second `seen`.
pub fn sample_memory(rows: u128, vocab: u128) -> OpMemory {
    OpMemory { temporary: rows * (4 * vocab + seen_bytes(vocab)), ..OpMemory::default() }
}

/// Returns the bytes of one row of `seen`: one bit per token.
pub const fn seen_bytes(vocab: u128) -> u128 {
    4 * vocab.div_ceil(32)
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait SampleOps: Backend {
    /// Samples with a `problem` of these tensors.
    fn sample(
        logits: FloatTensor<Self>,
        choices: IntTensor<Self>,
        seen: IntTensor<Self>,
        problem: SampleProblem,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl SampleOps for CubeBackend {
    fn sample(
        logits: CubeTensor,
        choices: CubeTensor,
        seen: CubeTensor,
        problem: SampleProblem,
        call: Call,
    ) -> CubeTensor {
        let out = empty_like(&logits, [problem.rows as usize, RESULT], arch::DType::F32);
        let handle = |tensor| into_contiguous(tensor).handle;
        let operands = SampleOperands {
            logits: handle(logits),
            choices: handle(choices),
            seen: seen.handle,
            out: out.handle.clone(),
        };
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let config = call.ctx.config::<Sample>(&device, &problem)?;
            let scratch = Sample::scratch(&device, &problem, &config);
            call.ctx.launch::<Sample>(&device, &problem, &config, &operands, scratch.as_ref());
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }
}

impl<B: SampleOps, C: CheckpointStrategy> SampleOps for Autodiff<B, C> {
    fn sample(
        logits: FloatTensor<Self>,
        choices: IntTensor<Self>,
        seen: IntTensor<Self>,
        problem: SampleProblem,
        call: Call,
    ) -> FloatTensor<Self> {
        let tracked = logits.is_tracked();
        let logits = Self::inner(logits);
        if tracked {
            call.fail(OpError::NoGradient);
            return Self::from_inner(logits);
        }
        let [choices, seen] = [choices, seen].map(Self::int_inner);
        Self::from_inner(B::sample(logits, choices, seen, problem, call))
    }
}
