//! Frozen weights in 8 bits: `w = code · scb[row] / 127`, multiplied with as they are.
//!
//! ```text
//!   y = residual + gate · activation(x · wᵀ + bias)          dx = (dout) · w      w has no gradient
//! ```
//!
//! A backward pass makes one dense weight at a time and keeps none. The format is bitsandbytes' (LLM.int8(), Dettmers et
//! al. 2022). x is
//! rounded to 8 bits where a weight asks for it: [`Int8Weight::rounding`].

mod linear;
mod product;

use burn::backend::Dispatch;
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use checkpoint::Int8;
use cubecl::prelude::CubeElement;
use kernels::int8::{Activations, Weight};

pub use linear::{Int8Linear, int8_linear};

use crate::call::{Call, float_of, on_cubecl};
use crate::words::{download, floats, upload};
use crate::{Ctx, OpError};
use product::{Int8Ops, Words};

/// A weight `[n, k]` in 8 bits on a device. It has no gradient; clones share its memory.
///
/// As a Burn module it has integer parameters alone, which optimisers pass by.
#[derive(Module, Debug)]
pub struct Int8Weight {
    /// Words of four codes.
    codes: Param<Tensor<1, Int>>,
    /// Words: the absmax of each row in f32.
    scb: Param<Tensor<1, Int>>,
    #[module(skip)]
    weight: Weight,
    #[module(skip)]
    activations: Option<Activations>,
}

impl Int8Weight {
    /// Quantises `weight` where it lies.
    ///
    /// # Shapes
    /// weight `[n, k]`: transposed from Burn's `Linear`, as checkpoints have it.
    ///
    /// # Errors
    /// Infinities or NaN, a device without our kernels.
    pub fn quantize(ctx: &Ctx, weight: Tensor<2>) -> Result<Self, OpError> {
        on_cubecl(&weight.device())?;
        float_of(weight.dtype())?;
        let (target, call) = (target(weight.dims())?, Call::of(ctx));
        let words =
            <Dispatch as Int8Ops>::int8_quantize(weight.into_dispatch(), target, call.clone());
        call.failed().map_or_else(|| Ok(Self::of_words(words, target)), Err)
    }

    /// A weight of a checkpoint.
    ///
    /// # Errors
    /// Lengths that are not those of its shape, a device without our kernels.
    pub fn from_host(host: &Int8<'_>, device: &Device) -> Result<Self, OpError> {
        on_cubecl(device)?;
        let weight = target(host.shape)?;
        for (what, have, need) in [
            ("codes", host.codes.len(), weight.len() as usize),
            ("SCB", host.scb.len(), weight.n as usize),
        ] {
            if have != need {
                return Err(OpError::Shape { what, have: vec![have], need: vec![need] });
            }
        }
        let [codes, scb] = [&host.codes[..], f32::as_bytes(&host.scb)];
        Ok(Self::of_tensors([upload(codes, device), upload(scb, device)], weight))
    }

    /// The weight as files have it.
    ///
    /// # Errors
    /// [`OpError::Device`].
    pub fn to_host(&self) -> Result<Int8<'static>, OpError> {
        let mut codes = download(&self.codes)?;
        codes.truncate(self.weight.len() as usize);
        let (codes, scb) = (codes.into(), floats(&self.scb)?.into());
        Ok(Int8 { shape: self.shape(), codes, scb })
    }

    /// The weight whose products round x to a byte an element and a scale a row, but for columns with a value of
    /// `threshold` and above, or none of them where it is not above 0, wherever bytes multiply faster: CUDA, k a multiple of 16,
    /// 128 rows and more. Others multiply x as it is.
    #[must_use]
    pub fn rounding(self, threshold: f32) -> Self {
        Self { activations: Some(Activations { threshold }), ..self }
    }

    /// The dense weight `[n, k]`.
    ///
    /// # Errors
    /// A dtype that no weight is made of.
    pub fn dequantize(&self, ctx: &Ctx, dtype: FloatDType) -> Result<Tensor<2>, OpError> {
        let (call, out) = (Call::of(ctx), float_of(dtype.into())?);
        let dense =
            <Dispatch as Int8Ops>::int8_dequantize(self.words(), self.weight, out, call.clone());
        call.failed().map_or_else(|| Ok(Tensor::from_dispatch(dense)), Err)
    }

    /// Weights of one k as one, their rows one after the other; none where a word would hold elements of two, or where
    /// they do not round x alike.
    ///
    /// # Errors
    /// [`OpError::Empty`] of nothing; k that differ, more rows than are counted.
    pub fn join(parts: &[&Self]) -> Result<Option<Self>, OpError> {
        let Some(first) = parts.first() else { return Err(OpError::Empty) };
        let k = first.weight.k;
        let mut rows = 0;
        for part in parts {
            if part.weight.k != k {
                let (have, need) = (part.shape().to_vec(), first.shape().to_vec());
                return Err(OpError::Shape { what: "a weight to be joined", have, need });
            }
            rows += part.weight.n as usize;
        }
        let weight = target([rows, k as usize])?;
        let apart =
            |part: &&Self| part.weight.len() % 4 != 0 || part.activations != first.activations;
        if parts.iter().any(apart) {
            return Ok(None);
        }
        let all = |of: fn(&Self) -> &Param<Tensor<1, Int>>| {
            Tensor::cat(parts.iter().map(|part| of(part).val()).collect(), 0)
        };
        let joined = Self::of_tensors([all(|part| &part.codes), all(|part| &part.scb)], weight);
        Ok(Some(Self { activations: first.activations, ..joined }))
    }

    /// `[n, k]`.
    pub const fn shape(&self) -> [usize; 2] {
        [self.weight.n as usize, self.weight.k as usize]
    }

    /// Bytes on the device.
    pub const fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    /// Its codes, in words, as they lie on the device.
    pub fn codes(&self) -> Tensor<1, Int> {
        self.codes.val()
    }

    fn of_tensors(tensors: [Tensor<1, Int>; 2], weight: Weight) -> Self {
        let [codes, scb] = tensors.map(|tensor| Param::initialized(ParamId::new(), tensor));
        Self { codes, scb, weight, activations: None }
    }

    fn of_words(words: Words<Dispatch>, weight: Weight) -> Self {
        let tensors = [words.codes, words.scb].map(Tensor::<1, Int>::from_dispatch);
        Self::of_tensors(tensors, weight)
    }

    fn words(&self) -> Words<Dispatch> {
        let word = |param: &Param<Tensor<1, Int>>| param.val().into_dispatch();
        Words { codes: word(&self.codes), scb: word(&self.scb) }
    }
}

fn target(shape: [usize; 2]) -> Result<Weight, OpError> {
    let [n, k] = shape.map(|size| u32::try_from(size).map_err(|_| OpError::TooLarge(size)));
    Ok(Weight::new(n?, k?)?)
}
