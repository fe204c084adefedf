//! Frozen weights in 4 bits: `w = book[code] · absmax[block]`, multiplied with as they are.
//!
//! ```text
//!   y = residual + gate · activation(x · wᵀ + bias)          dx = (dout) · w      w has no gradient
//! ```
//!
//! A backward pass makes one dense weight at a time and keeps none: what is saved for it are the codes.
//! The format is bitsandbytes' (QLoRA, Dettmers et al. 2023); on CUDA codes lie in the order of matrix
//! instructions where they divide so, and [`Nf4Weight::to_host`] gives them back as files have them.

mod linear;
mod product;

use arch::{Backend, DType};
use burn::backend::{Dispatch, DispatchDevice};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, FloatDType, Int, Tensor};
use checkpoint::{Absmax, Dtype, FourBit, Layout, Nested, QuantType};
use cubecl::prelude::CubeElement;
use kernels::nf4::{CodeBook, Nf4Matmul, Nf4MatmulProblem, Order, Weight};
use kernels::norm::NormKind;

pub use linear::{Nf4Linear, nf4_glu, nf4_linear};

use crate::call::{Call, cube_of, float_of, on_cubecl, size_of};
use crate::words::{download, floats, upload};
use crate::{Ctx, OpError};
use product::{Nf4Ops, Part, Words};

/// How a weight is quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nf4Options {
    /// Elements that share an absmax: a power of two from 32 to 4096.
    pub block_size: u32,
    /// Whether absmax itself takes 8 bits.
    pub nested: bool,
    /// What the codes mean.
    pub book: CodeBook,
}

impl Default for Nf4Options {
    /// NF4 in nested blocks of 64: 4.13 bits an element.
    fn default() -> Self {
        Self { block_size: 64, nested: true, book: CodeBook::Nf4 }
    }
}

/// A weight `[n, k]` in 4 bits on a device. It has no gradient; clones share its memory.
///
/// As a Burn module it has integer parameters alone, which optimisers pass by.
#[derive(Module, Debug)]
pub struct Nf4Weight {
    /// Words of eight codes.
    codes: Param<Tensor<1, Int>>,
    /// Words: f32 each, or four bytes.
    absmax: Param<Tensor<1, Int>>,
    /// Words of 16 f32: what the codes mean.
    book: Param<Tensor<1, Int>>,
    /// Words of 256 f32, and of pairs of scale and offset, where absmax is nested.
    nested_book: Option<Param<Tensor<1, Int>>>,
    scales: Option<Param<Tensor<1, Int>>>,
    #[module(skip)]
    weight: Weight,
    #[module(skip)]
    origin: Origin,
}

/// What a file says of a weight beside its numbers.
#[derive(Debug, Clone, Copy)]
struct Origin {
    book: CodeBook,
    /// Type of the values before.
    dtype: Dtype,
}

impl Nf4Weight {
    /// Quantises `weight` where it lies.
    ///
    /// # Shapes
    /// weight `[n, k]`: transposed from Burn's `Linear`, as checkpoints have it.
    ///
    /// # Errors
    /// A block size that there is not, infinities or NaN, a device without our kernels.
    pub fn quantize(ctx: &Ctx, weight: Tensor<2>, options: Nf4Options) -> Result<Self, OpError> {
        let device = weight.device();
        on_cubecl(&device)?;
        let dtype = match float_of(weight.dtype())? {
            DType::F16 => Dtype::F16,
            DType::Bf16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        let target = target(weight.dims(), options.block_size, options.nested)?;
        let call = Call::of(ctx);
        let Nf4Options { book, .. } = options;
        let words =
            <Dispatch as Nf4Ops>::nf4_quantize(weight.into_dispatch(), target, book, call.clone());
        let origin = Origin { book, dtype };
        match call.failed() {
            None => Self::of_words(ctx, words, target, origin).in_best_order(ctx, &device),
            Some(e) => Err(e),
        }
    }

    /// A weight of a checkpoint.
    ///
    /// # Errors
    /// One that is no matrix, lengths that are not those of its shape, a device without our kernels.
    pub fn from_host(ctx: &Ctx, host: &FourBit<'_>, device: &Device) -> Result<Self, OpError> {
        on_cubecl(device)?;
        let Layout { quant_type, block_size, dtype, shape, .. } = &host.layout;
        let &[n, k] = &shape[..] else { return Err(OpError::NoMatrix(shape.clone())) };
        let nested = matches!(host.absmax, Absmax::Nested(_));
        let block_size = u32::try_from(*block_size).unwrap_or(u32::MAX);
        let weight = target([n, k], block_size, nested)?;
        let length = |what, have: usize, need: u64| match have as u64 == need {
            true => Ok(()),
            false => Err(OpError::Shape { what, have: vec![have], need: vec![need as usize] }),
        };
        length("codes", host.codes.len(), weight.len().div_ceil(2))?;
        length("quant_map", host.quant_map.len(), 16)?;
        let words = |bytes: &[u8]| upload(bytes, device);
        let floats = |values: &[f32]| upload(f32::as_bytes(values), device);
        let (absmax, nested) = match &host.absmax {
            Absmax::Plain(values) => {
                length("absmax", values.len(), weight.blocks())?;
                (floats(values), None)
            }
            Absmax::Nested(Nested { codes, absmax, quant_map, offset }) => {
                length("absmax", codes.len(), weight.blocks())?;
                length("nested_absmax", absmax.len(), weight.groups())?;
                length("nested_quant_map", quant_map.len(), 256)?;
                let pairs: Vec<f32> = absmax.iter().flat_map(|scale| [*scale, *offset]).collect();
                (words(codes), Some((floats(quant_map), floats(&pairs))))
            }
        };
        let book = match quant_type {
            QuantType::Nf4 => CodeBook::Nf4,
            QuantType::Fp4 => CodeBook::Fp4,
        };
        let (origin, book) = (Origin { book, dtype: *dtype }, floats(&host.quant_map));
        let tensors = [words(&host.codes), absmax, book];
        Self::of_tensors(ctx, tensors, nested, weight, origin).in_best_order(ctx, device)
    }

    /// The weight as files have it, whatever its order on the device.
    ///
    /// # Errors
    /// [`OpError::Joined`] for several weights whose nested absmax have offsets of their own.
    pub fn to_host(&self, ctx: &Ctx) -> Result<FourBit<'static>, OpError> {
        let rows = self.reordered(ctx, Order::Rows)?;
        let (weight, origin) = (rows.weight, rows.origin);
        let blocks = weight.blocks() as usize;
        let mut codes = download(&rows.codes)?;
        codes.truncate(weight.len().div_ceil(2) as usize);
        let absmax = match (&rows.nested_book, &rows.scales) {
            (Some(nested), Some(scales)) => {
                let mut codes = download(&rows.absmax)?;
                codes.truncate(blocks);
                let pairs = floats(scales)?;
                let offset = pairs[1];
                if pairs.chunks_exact(2).any(|pair| pair[1].to_bits() != offset.to_bits()) {
                    return Err(OpError::Joined);
                }
                Absmax::Nested(Nested {
                    codes: codes.into(),
                    absmax: pairs.into_iter().step_by(2).collect(),
                    quant_map: floats(nested)?.into(),
                    offset,
                })
            }
            _ => {
                let mut absmax = floats(&rows.absmax)?;
                absmax.truncate(blocks);
                Absmax::Plain(absmax.into())
            }
        };
        let layout = Layout {
            quant_type: match origin.book {
                CodeBook::Nf4 => QuantType::Nf4,
                CodeBook::Fp4 => QuantType::Fp4,
            },
            block_size: weight.block_size as usize,
            nested: weight.nested,
            dtype: origin.dtype,
            shape: self.shape().to_vec(),
            storage: Dtype::U8,
        };
        Ok(FourBit { layout, codes: codes.into(), quant_map: floats(&rows.book)?.into(), absmax })
    }

    /// The dense weight `[n, k]`.
    ///
    /// # Errors
    /// A dtype that no weight is made of.
    pub fn dequantize(&self, ctx: &Ctx, dtype: FloatDType) -> Result<Tensor<2>, OpError> {
        let call = Call::of(ctx);
        let out = float_of(dtype.into())?;
        let dense =
            <Dispatch as Nf4Ops>::nf4_dequantize(self.words(), self.weight, out, call.clone());
        match call.failed() {
            None => Ok(Tensor::from_dispatch(dense)),
            Some(e) => Err(e),
        }
    }

    /// Weights of one k as one, their rows one after the other: a launch for the projections of queries,
    /// keys and values, or for [`nf4_glu`].
    ///
    /// # Errors
    /// Block sizes or k that differ, a block or a nested group that would hold elements of two.
    pub fn join(ctx: &Ctx, parts: &[&Self]) -> Result<Self, OpError> {
        let Some((first, rest)) = parts.split_first() else { return Err(OpError::Empty) };
        let mut joined = (*first).clone();
        for part in rest {
            let weights = [joined.weight, part.weight];
            let weight = Weight::joined(&weights)?;
            let call = Call::of(ctx);
            let both =
                <Dispatch as Nf4Ops>::nf4_join(joined.words(), part.words(), weights, call.clone());
            if let Some(e) = call.failed() {
                return Err(e);
            }
            joined = Self::of_words(ctx, both, weight, first.origin);
        }
        Ok(joined)
    }

    /// `[n, k]`.
    pub const fn shape(&self) -> [usize; 2] {
        [self.weight.n as usize, self.weight.k as usize]
    }

    /// Whether [`nf4_linear`], or with `glu` [`nf4_glu`], normalises rows `x` in the launch that multiplies them. Where
    /// it does not, several products of the same rows share one [`norm`](crate::norm()).
    ///
    /// # Errors
    /// Dtypes that are not multiplied, a device without our kernels.
    pub fn takes_norm(
        &self,
        ctx: &Ctx,
        x: &Tensor<2>,
        kind: NormKind,
        glu: bool,
    ) -> Result<bool, OpError> {
        let device = ctx.device(&cube_of(&x.device())?)?;
        let m = size_of(x.dims()[0])?;
        let plain = Nf4MatmulProblem::new(m, self.weight, float_of(x.dtype())?)?;
        let problem = Nf4MatmulProblem { glu, norm: Some(kind), ..plain };
        Ok(Nf4Matmul::takes_norm(device.profile(), &problem))
    }

    /// Bytes on the device.
    pub const fn bytes(&self) -> u64 {
        self.weight.bytes()
    }

    /// Its codes, in words, as they lie on the device.
    pub fn codes(&self) -> Tensor<1, Int> {
        self.codes.val()
    }

    /// Of codes, absmax and book. In a record the first two lie as files have them, so that a module whose
    /// weights lie otherwise can load it.
    fn of_tensors(
        ctx: &Ctx,
        [codes, absmax, book]: [Tensor<1, Int>; 3],
        nested: Option<(Tensor<1, Int>, Tensor<1, Int>)>,
        weight: Weight,
        origin: Origin,
    ) -> Self {
        let frozen = |tensor: Tensor<1, Int>| Param::initialized(ParamId::new(), tensor);
        let ordered = |tensor, which| {
            let (param, rows) = (frozen(tensor), Weight { order: Order::Rows, ..weight });
            let (save, load) = (ctx.clone(), ctx.clone());
            let turned = |made: Result<_, OpError>| {
                made.unwrap_or_else(|e| panic!("a record has no place for an error: {e}"))
            };
            param
                .save_mapper(move |t| {
                    let rows = turned(turn(&save, t, which, weight, Order::Rows));
                    if matches!(which, Part::Absmax) { padded(rows, weight) } else { rows }
                })
                .load_mapper(move |t| turned(turn(&load, t, which, rows, weight.order)))
        };
        let (nested_book, scales) = nested.unzip();
        Self {
            codes: ordered(codes, Part::Codes),
            absmax: ordered(padded(absmax, weight), Part::Absmax),
            book: frozen(book),
            nested_book: nested_book.map(frozen),
            scales: scales.map(frozen),
            weight,
            origin,
        }
    }

    fn of_words(ctx: &Ctx, words: Words<Dispatch>, weight: Weight, origin: Origin) -> Self {
        let Words { codes, absmax, book, nested_book, scales } = words;
        let [codes, absmax, book, nested_book, scales] =
            [codes, absmax, book, nested_book, scales].map(Tensor::<1, Int>::from_dispatch);
        let nested = weight.nested.then_some((nested_book, scales));
        Self::of_tensors(ctx, [codes, absmax, book], nested, weight, origin)
    }

    fn words(&self) -> Words<Dispatch> {
        let word = |param: &Param<Tensor<1, Int>>| param.val().into_dispatch();
        let or_book =
            |param: &Option<Param<Tensor<1, Int>>>| param.as_ref().unwrap_or(&self.book).clone();
        Words {
            codes: word(&self.codes),
            absmax: word(&self.absmax),
            book: word(&self.book),
            nested_book: word(&or_book(&self.nested_book)),
            scales: word(&or_book(&self.scales)),
        }
    }

    /// In tiles where there are instructions that take them and the shape divides so.
    fn in_best_order(self, ctx: &Ctx, device: &Device) -> Result<Self, OpError> {
        let device = match device.clone().inner().as_dispatch() {
            DispatchDevice::Cube(raw) => ctx.device(raw)?,
            other => return Err(OpError::Device(format!("{other:?}"))),
        };
        match self.weight.ordered(Order::Tiles) {
            Ok(_) if device.backend() == Backend::Cuda => self.reordered(ctx, Order::Tiles),
            _ => Ok(self),
        }
    }

    fn reordered(&self, ctx: &Ctx, order: Order) -> Result<Self, OpError> {
        if self.weight.order == order {
            return Ok(self.clone());
        }
        let part = |param: &Param<Tensor<1, Int>>, which| {
            turn(ctx, param.val(), which, self.weight, order)
        };
        let codes = part(&self.codes, Part::Codes)?;
        let absmax = part(&self.absmax, Part::Absmax)?;
        let value = |param: &Option<Param<Tensor<1, Int>>>| param.as_ref().map(Param::val);
        let nested = value(&self.nested_book).zip(value(&self.scales));
        let weight = Weight { order, ..self.weight };
        let tensors = [codes, absmax, self.book.val()];
        Ok(Self::of_tensors(ctx, tensors, nested, weight, self.origin))
    }
}

/// Absmax with as many words as the weight has of it in either order, so that a record fits a module of
/// both: in tiles a block of more than 64 elements has several.
fn padded(absmax: Tensor<1, Int>, weight: Weight) -> Tensor<1, Int> {
    let tiles = weight.ordered(Order::Tiles).unwrap_or(weight);
    let missing = (tiles.absmax_bytes() / 4) as usize - absmax.dims()[0];
    if missing == 0 {
        return absmax;
    }
    let zeros = Tensor::zeros([missing], (&absmax.device(), burn::tensor::DType::I32));
    Tensor::cat(vec![absmax, zeros], 0)
}

/// Codes or absmax of a weight in another order.
fn turn(
    ctx: &Ctx,
    part: Tensor<1, Int>,
    which: Part,
    weight: Weight,
    order: Order,
) -> Result<Tensor<1, Int>, OpError> {
    if weight.order == order {
        return Ok(part);
    }
    let (call, part) = (Call::of(ctx), part.into_dispatch());
    let made = <Dispatch as Nf4Ops>::nf4_reorder(part, which, weight, order, call.clone());
    match call.failed() {
        None => Ok(Tensor::from_dispatch(made)),
        Some(e) => Err(e),
    }
}

/// The weight of a shape, row by row.
fn target(shape: [usize; 2], block_size: u32, nested: bool) -> Result<Weight, OpError> {
    let [n, k] = shape.map(|size| u32::try_from(size).map_err(|_| OpError::TooLarge(size)));
    Ok(Weight::new(n?, k?, block_size, nested)?)
}

#[cfg(test)]
mod tests {
    use burn::tensor::Distribution;

    use super::*;
    use crate::words::words_of;

    #[test]
    fn a_record_does_not_depend_on_the_order_of_its_weight() {
        let (device, ctx) = (Device::cpu(), Ctx::default());
        let options = Nf4Options { block_size: 128, ..Nf4Options::default() };
        let make = || {
            let dense = Tensor::<2>::random([32, 512], Distribution::Default, &device);
            Nf4Weight::quantize(&ctx, dense, options).expect("finite")
        };
        let rows = make();
        assert_eq!(rows.weight.order, Order::Rows);
        let host = rows.to_host(&ctx).expect("one weight");
        let tiles = rows.reordered(&ctx, Order::Tiles).expect("whole tiles");
        assert!(words_of(tiles.codes.val()).ok() != words_of(rows.codes.val()).ok());
        assert!(tiles.to_host(&ctx).expect("one weight") == host);
        let other = || make().reordered(&ctx, Order::Tiles).expect("whole tiles");
        let loaded = make().load_record(tiles.clone().into_record());
        assert!(loaded.to_host(&ctx).expect("one weight") == host);
        let loaded = other().load_record(rows.into_record());
        assert!(loaded.to_host(&ctx).expect("one weight") == host);
        let loaded = other().load_record(tiles.into_record());
        assert!(loaded.to_host(&ctx).expect("one weight") == host);
    }
}
