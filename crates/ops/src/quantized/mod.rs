//! Frozen weights in a quantised format, used in matmuls without a dense copy where possible.
//!
//! ```text
//!   y = residual + gate · activation(x · wᵀ + bias)          dx = (dout) · w      w has no gradient
//! ```
//!
//! A backward pass dequantises one weight at a time and keeps none: it saves only the codes. On a device the
//! codes have the order that is fastest there; [`QuantizedWeight::to_host`] returns them in the order of
//! files.

mod backward;
mod dispatch;
mod linear;

use std::borrow::Cow;

use arch::DType;
use burn::backend::Dispatch;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use checkpoint::Encoded;
use kernels::norm::NormKind;
use kernels::quantized::{InvalidWeight, QuantizedMatmul, Weight};
use quant::Scheme;

pub use linear::{
    QuantizedLinear, quantized_glu, quantized_glu_memory, quantized_linear, quantized_linear_memory,
};

use self::dispatch::{Buffer, PackedWeight, QuantizedOps};
use crate::call::{Call, cube_of, float_of, on_cubecl, size_of};
use crate::int32_buffers::{download, upload};
use crate::upload::upload_int32;
use crate::{Ctx, OpError};

/// A quantised weight `[n, k]` on a device. It has no gradient; clones share its memory.
///
/// As a Burn module it has only integer parameters, which optimizers ignore.
#[derive(Module, Debug)]
pub struct QuantizedWeight {
    /// Codes, as words.
    codes: Param<Tensor<1, Int>>,
    /// Absmax per block or row, as words.
    absmax: Param<Tensor<1, Int>>,
    /// Codebook in f32, as words, if the format has one.
    book: Option<Param<Tensor<1, Int>>>,
    /// Codebook of nested absmax, 256 f32, and pairs of scale and offset, as words, if absmax is nested.
    nested_book: Option<Param<Tensor<1, Int>>>,
    scales: Option<Param<Tensor<1, Int>>>,
    #[module(skip)]
    weight: Weight,
    /// Dtype before quantisation.
    #[module(skip)]
    dtype: DType,
}

impl QuantizedWeight {
    /// Quantises `weight` on its device.
    ///
    /// # Shapes
    /// weight `[n, k]`, as in checkpoints: the transpose of Burn's `Linear`.
    ///
    /// # Errors
    /// [`OpError::Weight`] for a block size that the format lacks; [`OpError::Quantize`] for infinities or
    /// NaN; [`OpError::Device`] for a device without kernels.
    pub fn quantize(
        ctx: &Ctx,
        weight: Tensor<2>,
        scheme: impl Into<Scheme>,
    ) -> Result<Self, OpError> {
        let device = weight.device();
        on_cubecl(&device)?;
        let dtype = float_of(weight.dtype())?;
        let target = target(&weight.dims(), scheme.into())?;
        let call = Call::new(ctx);
        let packed = <Dispatch as QuantizedOps>::quantize_weight(
            weight.into_dispatch(),
            target,
            call.clone(),
        );
        match call.failed() {
            None => Self::from_packed(ctx, packed, target, dtype).in_best_order(ctx, &device),
            Some(e) => Err(e),
        }
    }

    /// Uploads a weight of a checkpoint.
    ///
    /// # Errors
    /// [`OpError::NoMatrix`]; [`OpError::Weight`]; [`OpError::Shape`] for buffers whose lengths do not fit
    /// the shape; [`OpError::Device`] for a device without kernels.
    pub fn from_host(ctx: &Ctx, host: &Encoded<'_>, device: &Device) -> Result<Self, OpError> {
        Self::from_files(ctx, host, device, |_| None::<Vec<u8>>)
    }

    /// Uploads a weight of a checkpoint. Buffers that `mapped` finds in a mapped file are read as they are
    /// sent, like [`upload`](crate::upload()).
    ///
    /// # Errors
    /// The errors of [`QuantizedWeight::from_host`].
    pub fn from_files<M: AsRef<[u8]> + Send + 'static>(
        ctx: &Ctx,
        host: &Encoded<'_>,
        device: &Device,
        mapped: impl Fn(&[u8]) -> Option<M>,
    ) -> Result<Self, OpError> {
        on_cubecl(device)?;
        let weight = target(&host.shape, host.scheme)?;
        let lengths = weight.buffer_bytes();
        if host.buffers.len() != lengths.len() {
            let (have, need) = (vec![host.buffers.len()], vec![lengths.len()]);
            return Err(OpError::Shape { what: "buffers", have, need });
        }
        for ((what, buffer), need) in NAMES.into_iter().zip(&host.buffers).zip(lengths) {
            if buffer.len() as u64 != need {
                let (have, need) = (vec![buffer.len()], vec![need as usize]);
                return Err(OpError::Shape { what, have, need });
            }
        }
        let uploaded = |buffer: &Cow<'_, [u8]>| match mapped(buffer) {
            Some(file) if buffer.len().is_multiple_of(4) => upload_int32(file, device),
            _ => upload(buffer, device),
        };
        let buffers = host.buffers.iter().map(uploaded).collect();
        Self::from_tensors(ctx, buffers, weight, host.dtype).in_best_order(ctx, device)
    }

    /// Creates a weight without values. Its matmuls launch the same kernels as those of any weight of this
    /// shape and scheme. `dtype` is the dtype before quantisation.
    ///
    /// # Shapes
    /// `[n, k]`.
    ///
    /// # Errors
    /// [`OpError::NoMatrix`]; [`OpError::Weight`] for a block size that the format lacks; [`OpError::Device`]
    /// for a device without kernels.
    pub fn outline(
        ctx: &Ctx,
        shape: &[usize],
        scheme: Scheme,
        dtype: FloatDType,
        device: &Device,
    ) -> Result<Self, OpError> {
        on_cubecl(device)?;
        let (weight, word) = (target(shape, scheme)?, burn::tensor::DType::I32);
        let empty = |bytes: u64| Tensor::empty([bytes.div_ceil(4) as usize], (device, word));
        let buffers = weight.buffer_bytes().into_iter().map(empty).collect();
        let dtype = float_of(dtype.into())?;
        Self::from_tensors(ctx, buffers, weight, dtype).in_best_order(ctx, device)
    }

    /// Downloads the weight in the order of files, whatever its order on the device.
    ///
    /// # Errors
    /// [`OpError::Device`].
    pub fn to_host(&self, ctx: &Ctx) -> Result<Encoded<'static>, OpError> {
        let rows = self.reordered(ctx, self.weight.in_rows())?;
        let mut buffers = Vec::new();
        for (param, bytes) in rows.params().into_iter().zip(rows.weight.buffer_bytes()) {
            let mut buffer = download(param)?;
            buffer.truncate(bytes as usize);
            buffers.push(buffer.into());
        }
        let (scheme, shape) = (self.weight.scheme(), self.shape().to_vec());
        Ok(Encoded { scheme, dtype: self.dtype, shape, buffers })
    }

    /// Dequantises the weight to a dense `[n, k]`.
    ///
    /// # Errors
    /// [`OpError::NotFloat`] for a dtype other than f32, f16 or bf16.
    pub fn dequantize(&self, ctx: &Ctx, dtype: FloatDType) -> Result<Tensor<2>, OpError> {
        let (call, out) = (Call::new(ctx), float_of(dtype.into())?);
        let dense = <Dispatch as QuantizedOps>::dequantize_weight(
            self.packed(),
            self.weight,
            out,
            call.clone(),
        );
        call.failed().map_or_else(|| Ok(Tensor::from_dispatch(dense)), Err)
    }

    /// Joins weights of the same k into one, with their rows concatenated: one launch for fused QKV, or a
    /// weight for [`quantized_glu`]. Returns none if they cannot be joined: formats, block sizes or
    /// activation rounding differ, or a word, a block or a nested group would hold elements of two weights.
    ///
    /// # Errors
    /// [`OpError::Empty`] for no weights; [`OpError::Shape`] for different k; [`OpError::Device`].
    pub fn join(ctx: &Ctx, parts: &[&Self]) -> Result<Option<Self>, OpError> {
        let Some((first, rest)) = parts.split_first() else { return Err(OpError::Empty) };
        let mut joined = (*first).clone();
        for part in rest {
            let [have, need] = [part.shape(), first.shape()];
            if have[1] != need[1] {
                let (have, need) = (have.to_vec(), need.to_vec());
                return Err(OpError::Shape { what: "a weight to join", have, need });
            }
            let Ok(weight) = Weight::joined([&joined.weight, &part.weight]) else {
                return Ok(None);
            };
            let weights = [joined.weight, part.weight];
            let call = Call::new(ctx);
            let (one, two) = (joined.packed(), part.packed());
            let both = <Dispatch as QuantizedOps>::join_weights(one, two, weights, call.clone());
            match call.failed() {
                None => joined = Self::from_packed(ctx, both, weight, first.dtype),
                Some(OpError::Weight(InvalidWeight::Join { .. })) => return Ok(None),
                Some(e) => return Err(e),
            }
        }
        Ok(Some(joined))
    }

    /// Returns the weight with int8 activations: its matmuls round x to 8 bits, with a scale per row. Outlier
    /// columns, with a magnitude of `threshold` or above, are not rounded; a threshold of 0 means no
    /// outliers. This applies if int8 is faster: int8 weights on CUDA, k a multiple of 16, and at least 128
    /// rows. Other matmuls and formats use x unrounded.
    #[must_use]
    pub fn rounding(self, threshold: f32) -> Self {
        Self { weight: self.weight.rounding(threshold), ..self }
    }

    /// Returns `[n, k]`.
    pub const fn shape(&self) -> [usize; 2] {
        let [n, k] = self.weight.shape();
        [n as usize, k as usize]
    }

    /// Returns the scheme: format, block and scales.
    pub fn scheme(&self) -> Scheme {
        self.weight.scheme()
    }

    /// Returns true if [`quantized_linear`], or with `glu` [`quantized_glu`], fuses the norm of rows `x`. If
    /// not, several matmuls of the same rows can share one [`norm`](crate::norm()).
    ///
    /// # Errors
    /// [`OpError::NotFloat`]; [`OpError::Device`] for a device without kernels.
    pub fn takes_norm(
        &self,
        ctx: &Ctx,
        x: &Tensor<2>,
        kind: NormKind,
        glu: bool,
    ) -> Result<bool, OpError> {
        let device = ctx.device(&cube_of(&x.device())?)?;
        let (m, dtype) = (size_of(x.dims()[0])?, float_of(x.dtype())?);
        let product =
            QuantizedMatmul { m, dtype, epilogue: Default::default(), glu, norm: Some(kind) };
        Ok(self.weight.takes_norm(device.profile(), &product)?)
    }

    /// Returns the bytes on the device.
    pub const fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    /// Returns the codes as words, in the order of the device.
    pub fn codes(&self) -> Tensor<1, Int> {
        self.codes.val()
    }

    /// Creates a weight from its buffers. A record stores codes and scales in the order of files, so that
    /// modules with any order can load it.
    fn from_tensors(ctx: &Ctx, buffers: Vec<Tensor<1, Int>>, weight: Weight, dtype: DType) -> Self {
        let frozen = |tensor: Tensor<1, Int>| Param::initialized(ParamId::new(), tensor);
        let ordered = |tensor, buffer: Buffer| {
            let (save, load) = (ctx.clone(), ctx.clone());
            let expected = |made: Result<_, OpError>| {
                made.unwrap_or_else(|e| panic!("cannot convert the weight of a record: {e}"))
            };
            let rows = weight.in_rows();
            frozen(tensor)
                .save_mapper(move |t| {
                    let rows = expected(reorder(&save, t, buffer, weight, rows));
                    if buffer == Buffer::Scales { padded(rows, &weight) } else { rows }
                })
                .load_mapper(move |t| expected(reorder(&load, t, buffer, rows, weight)))
        };
        let mut buffers = buffers.into_iter();
        let mut next = || buffers.next();
        let first = "every weight has codes and scales";
        Self {
            codes: ordered(next().expect(first), Buffer::Codes),
            absmax: ordered(padded(next().expect(first), &weight), Buffer::Scales),
            book: next().map(frozen),
            nested_book: next().map(frozen),
            scales: next().map(frozen),
            weight,
            dtype,
        }
    }

    fn from_packed(
        ctx: &Ctx,
        packed: PackedWeight<Dispatch>,
        weight: Weight,
        dtype: DType,
    ) -> Self {
        let tensors = packed.buffers(&weight).into_iter().map(Tensor::from_dispatch);
        Self::from_tensors(ctx, tensors.collect(), weight, dtype)
    }

    /// Returns the buffers, in order.
    fn params(&self) -> Vec<&Param<Tensor<1, Int>>> {
        let rest = [&self.book, &self.nested_book, &self.scales];
        let rest = rest.into_iter().flat_map(Option::as_ref);
        [&self.codes, &self.absmax].into_iter().chain(rest).collect()
    }

    fn packed(&self) -> PackedWeight<Dispatch> {
        let tensors = self.params().into_iter().map(|param| param.val().into_dispatch());
        PackedWeight::new(tensors.collect())
    }

    fn in_best_order(self, ctx: &Ctx, device: &Device) -> Result<Self, OpError> {
        let device = ctx.device(&cube_of(device)?)?;
        self.reordered(ctx, self.weight.in_best_order(device.profile()))
    }

    fn reordered(&self, ctx: &Ctx, to: Weight) -> Result<Self, OpError> {
        if self.weight == to {
            return Ok(self.clone());
        }
        let mut buffers: Vec<_> = self.params().into_iter().map(Param::val).collect();
        for (buffer, tensor) in [Buffer::Codes, Buffer::Scales].into_iter().zip(&mut buffers) {
            *tensor = reorder(ctx, tensor.clone(), buffer, self.weight, to)?;
        }
        Ok(Self::from_tensors(ctx, buffers, to, self.dtype))
    }
}

/// Names of the buffers in errors, in the order of [`Encoded`].
const NAMES: [&str; 5] = ["codes", "absmax", "quant_map", "nested_quant_map", "nested_absmax"];

/// Pads scales to the largest number of words in any order, so that a record fits modules of every order.
fn padded(scales: Tensor<1, Int>, weight: &Weight) -> Tensor<1, Int> {
    let missing = weight.scale_words() as usize - scales.dims()[0];
    if missing == 0 {
        return scales;
    }
    let zeros = Tensor::zeros([missing], (&scales.device(), burn::tensor::DType::I32));
    Tensor::cat(vec![scales, zeros], 0)
}

/// Reorders codes or scales of a weight.
fn reorder(
    ctx: &Ctx,
    tensor: Tensor<1, Int>,
    buffer: Buffer,
    from: Weight,
    to: Weight,
) -> Result<Tensor<1, Int>, OpError> {
    if from == to {
        return Ok(tensor);
    }
    let (call, tensor) = (Call::new(ctx), tensor.into_dispatch());
    let made = <Dispatch as QuantizedOps>::reorder_weight(tensor, buffer, [from, to], call.clone());
    call.failed().map_or_else(|| Ok(Tensor::from_dispatch(made)), Err)
}

/// Returns a weight of a shape, with its codes in row order.
fn target(shape: &[usize], scheme: Scheme) -> Result<Weight, OpError> {
    let &[n, k] = shape else { return Err(OpError::NoMatrix(shape.to_vec())) };
    Ok(Weight::new([size_of(n)?, size_of(k)?], scheme)?)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Distribution;
    use quant::{Block, WeightFormat};

    use super::*;
    use crate::int32_buffers::int32_values;

    #[test]
    fn a_record_does_not_depend_on_the_order_of_its_weight() {
        let (device, ctx) = (Device::cpu(), Ctx::default());
        let scheme = Scheme { block: Block::Elements(128), ..WeightFormat::Nf4.scheme() };
        let make = || {
            let dense = Tensor::<2>::random([32, 512], Distribution::Default, &device);
            QuantizedWeight::quantize(&ctx, dense, scheme).expect("finite")
        };
        let card = arch::ArchProfile::recorded("rtx4090").expect("recorded");
        let ordered = |weight: QuantizedWeight| {
            weight.reordered(&ctx, weight.weight.in_best_order(&card)).expect("whole tiles")
        };
        let rows = make();
        assert_eq!(rows.weight, rows.weight.in_rows());
        let host = rows.to_host(&ctx).expect("on the device");
        let tiles = ordered(rows.clone());
        assert!(int32_values(tiles.codes.val()).ok() != int32_values(rows.codes.val()).ok());
        assert!(tiles.to_host(&ctx).expect("on the device") == host);
        let loaded = make().load_record(tiles.clone().into_record());
        assert!(loaded.to_host(&ctx).expect("on the device") == host);
        let loaded = ordered(make()).load_record(rows.into_record());
        assert!(loaded.to_host(&ctx).expect("on the device") == host);
        let loaded = ordered(make()).load_record(tiles.into_record());
        assert!(loaded.to_host(&ctx).expect("on the device") == host);
    }
}
