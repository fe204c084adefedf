//! Embeddings of tokens on the device.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::{Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::embed::{Embed, EmbedOperands, EmbedProblem, Learned};

use crate::call::{
    Call, Optional, as_int32, float_of, on_cubecl, result_like, same_dtype, same_shape, size_of,
};
use crate::layout::rows_of;
use crate::{Ctx, OpError};

/// Computes `table[token] · scale`, rounded. With learned positions, adds `positions[start[b] + s]` and
/// rounds again. A token past the vocabulary, or a position past the learned ones, gives a row of NaN.
///
/// # Shapes
/// tokens `[batch, seq]` and start `[batch]`, I32 or U32 without a copy; table `[vocab, hidden]`, positions
/// `[max_seq, hidden]`; the result `[batch · seq, hidden]`, with token `b · seq + s` in each row. start is
/// only read with learned positions.
///
/// # Errors
/// [`OpError::Shape`], [`OpError::DType`] or [`OpError::Embed`] for invalid operands or a scale that is not
/// finite; [`OpError::Device`] for a device without kernels; [`OpError::NoGradient`] for tracked tensors.
pub fn embed(
    ctx: &Ctx,
    tokens: Tensor<2, Int>,
    table: Tensor<2>,
    start: Tensor<1, Int>,
    positions: Option<Tensor<2>>,
    scale: f32,
) -> Result<Tensor<2>, OpError> {
    on_cubecl(&table.device())?;
    let ([batch, seq], [vocab, hidden]) = (tokens.dims(), table.dims());
    let dtype = float_of(table.dtype())?;
    same_shape("start", &start.dims(), &[batch])?;
    let mut learned = None;
    if let Some(positions) = &positions {
        let [max_seq, width] = positions.dims();
        same_shape("positions", &[max_seq, width], &[max_seq, hidden])?;
        same_dtype("positions", positions.dtype(), table.dtype())?;
        learned = Some(size_of(max_seq)?);
    }
    let problem = EmbedProblem {
        batch: size_of(batch)?,
        seq: size_of(seq)?,
        hidden: size_of(hidden)?,
        vocab: size_of(vocab)?,
        dtype,
        table_stride: size_of(hidden)?,
        positions: learned,
        positions_stride: size_of(hidden)?,
        scale,
    }
    .checked()?;
    let call = Call::new(ctx);
    let out = <Dispatch as EmbedOps>::embed(
        as_int32(tokens).into_dispatch(),
        table.into_dispatch(),
        as_int32(start).into_dispatch(),
        Optional::from_tensor(positions.map(Tensor::into_dispatch)),
        problem,
        call.clone(),
    );
    match call.failed() {
        None => Ok(Tensor::from_dispatch(out)),
        Some(e) => Err(e),
    }
}

#[backend_extension(Cube, Autodiff)]
pub(crate) trait EmbedOps: Backend {
    /// Embeds with a `problem` of these tensors, except for their strides.
    fn embed(
        tokens: IntTensor<Self>,
        table: FloatTensor<Self>,
        start: IntTensor<Self>,
        #[extension_type] positions: Optional<Self>,
        problem: EmbedProblem,
        call: Call,
    ) -> FloatTensor<Self>;
}

impl EmbedOps for CubeBackend {
    fn embed(
        tokens: CubeTensor,
        table: CubeTensor,
        start: CubeTensor,
        positions: Optional<Self>,
        problem: EmbedProblem,
        call: Call,
    ) -> CubeTensor {
        let shape = [problem.tokens() as usize, problem.hidden as usize];
        let out = result_like(&table, shape, problem.dtype);
        let handle = |tensor| into_contiguous(tensor).handle;
        let (table, table_stride) = rows_of(table);
        let (positions, positions_stride) = positions.into_option().map(rows_of).unzip();
        let operands = EmbedOperands {
            tokens: handle(tokens),
            table: table.handle,
            learned: positions
                .map(|positions| Learned { table: positions.handle, start: handle(start) }),
            out: out.handle.clone(),
        };
        let launched = call.ctx.device(&out.device).and_then(|device| {
            let problem = EmbedProblem {
                table_stride: size_of(table_stride)?,
                positions_stride: positions_stride.map_or(Ok(problem.hidden), size_of)?,
                ..problem
            }
            .checked()?;
            let config = call.ctx.config::<Embed>(&device, &problem)?;
            call.ctx.launch::<Embed>(&device, &problem, &config, &operands, None);
            Ok(())
        });
        if let Err(e) = launched {
            call.fail(e);
        }
        out
    }
}

impl<B: EmbedOps, C: CheckpointStrategy> EmbedOps for Autodiff<B, C> {
    fn embed(
        tokens: IntTensor<Self>,
        table: FloatTensor<Self>,
        start: IntTensor<Self>,
        positions: Optional<Self>,
        problem: EmbedProblem,
        call: Call,
    ) -> FloatTensor<Self> {
        let positions = positions.into_option();
        let all = [Some(&table), positions.as_ref()];
        let gradient = all.into_iter().flatten().any(|tensor| tensor.is_tracked());
        let table = Self::inner(table);
        if gradient {
            call.fail(OpError::NoGradient);
            return Self::from_inner(table);
        }
        let [tokens, start] = [tokens, start].map(Self::int_inner);
        let positions = Optional::from_tensor(positions.map(Self::inner));
        Self::from_inner(B::embed(tokens, table, start, positions, problem, call))
    }
}
