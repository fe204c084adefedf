use std::borrow::Cow;

use quant::{Block, DType, Scales, Scheme, WeightFormat};

use crate::{Absmax, Error, FourBit, Int8, Layout, Nested, Plan, Weight};

/// A quantised weight of any format as buffers.
///
/// The buffers are codes, scales, and the codebook if the format has one. Nested scales add their codebook and
/// `[groups, 2]` f32: scale and offset per group of 256 blocks. All are little-endian.
#[derive(Debug, Clone, PartialEq)]
pub struct Encoded<'a> {
    pub scheme: Scheme,
    /// Type of the values before quantisation.
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub buffers: Vec<Cow<'a, [u8]>>,
}

/// The reason that a quantised weight cannot be written to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    /// The weight was joined from several, and their nested absmax have different offsets.
    #[error(
        "joined weights with different nested absmax offsets cannot be stored\nhint: store the \
         weights before you join them"
    )]
    Offsets,
    #[error("files cannot store weights in {0}\nhint: quantise to nf4, fp4 or int8")]
    Format(WeightFormat),
}

impl<'a> Weight<'a> {
    /// Returns the format of a quantised weight; `None` if dense.
    pub fn format(&self) -> Option<WeightFormat> {
        match self {
            Self::Dense(_) => None,
            Self::FourBit(weight) => Some(weight.layout.quant_type),
            Self::Int8(_) => Some(WeightFormat::Int8),
        }
    }

    /// Returns the plan of tensors for a weight of this name, for [`crate::Writer::create`]. The format must be one of
    /// files; `dtype` is the type before quantisation.
    ///
    /// # Errors
    /// Errors of [`Layout::plan`] and [`Int8::plan`].
    pub fn plan(
        name: &str,
        shape: [usize; 2],
        scheme: Scheme,
        dtype: DType,
    ) -> Result<Vec<Plan>, Error> {
        match layout(scheme, dtype, &shape) {
            Some(layout) => layout.plan(name),
            None => Int8::plan(name, shape),
        }
    }

    /// Returns the buffers of a quantised weight; `None` if dense.
    pub fn encoded(&self) -> Option<Encoded<'_>> {
        match self {
            Self::Dense(_) => None,
            Self::FourBit(FourBit { layout, codes, quant_map, absmax }) => {
                let mut buffers = vec![Cow::Borrowed(&codes[..])];
                let mut scales = Scales::F32;
                match absmax {
                    Absmax::Plain(absmax) => buffers.extend([bytes(absmax), bytes(quant_map)]),
                    Absmax::Nested(Nested { codes, absmax, quant_map: nested, offset }) => {
                        scales = Scales::Nested;
                        let pairs = absmax.iter().flat_map(|scale| [*scale, *offset]);
                        let pairs: Vec<u8> = pairs.flat_map(f32::to_le_bytes).collect();
                        let codes = Cow::Borrowed(&codes[..]);
                        buffers.extend([codes, bytes(quant_map), bytes(nested), pairs.into()]);
                    }
                }
                let block = Block::Elements(u32::try_from(layout.block_size).unwrap_or(u32::MAX));
                let scheme = Scheme { format: layout.quant_type, block, scales };
                let (dtype, shape) = (layout.dtype, layout.shape.clone());
                Some(Encoded { scheme, dtype, shape, buffers })
            }
            Self::Int8(Int8 { shape, codes, scb }) => Some(Encoded {
                scheme: WeightFormat::Int8.scheme(),
                // The format does not store another type.
                dtype: DType::F16,
                shape: shape.to_vec(),
                buffers: vec![Cow::Borrowed(&codes[..]), bytes(scb)],
            }),
        }
    }

    /// Returns some rows of a weight if its blocks end with rows (int8), else the whole weight.
    #[must_use]
    pub fn rows(self, rows: std::ops::Range<usize>) -> Self {
        match self {
            Self::Int8(Int8 { shape: [_, k], codes, scb }) => Self::Int8(Int8 {
                shape: [rows.len(), k],
                codes: slice(codes, rows.start * k..rows.end * k),
                scb: slice(scb, rows),
            }),
            whole => whole,
        }
    }

    /// Returns a function from flat index to dequantised f32 value; `None` for a dense weight.
    pub fn decoder(&self) -> Option<Box<dyn Fn(usize) -> f32 + Sync + '_>> {
        match self {
            Self::Dense(_) => None,
            Self::FourBit(weight) => {
                let (absmax, block_size) = (weight.absmax.values(), weight.layout.block_size);
                Some(Box::new(move |at| {
                    let byte = weight.codes[at / 2];
                    let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
                    weight.quant_map[usize::from(code)] * absmax[at / block_size]
                }))
            }
            Self::Int8(Int8 { shape: [_, k], codes, scb }) => Some(Box::new(move |at| {
                f32::from(codes[at].cast_signed()) * scb[at / k] * (1.0 / 127.0)
            })),
        }
    }
}

impl<'a> TryFrom<Encoded<'a>> for Weight<'a> {
    type Error = NotStored;

    fn try_from(encoded: Encoded<'a>) -> Result<Self, NotStored> {
        let Encoded { scheme, dtype, shape, buffers } = encoded;
        let stored = layout(scheme, dtype, &shape);
        match (stored, <[_; 2]>::try_from(shape), buffers.as_slice()) {
            (Some(layout), _, [codes, absmax, quant_map, nested @ ..]) => {
                let absmax = match nested {
                    [map, pairs] => {
                        let pairs = floats(pairs);
                        let offset = pairs[1];
                        let same = |pair: &[f32]| pair[1].to_bits() == offset.to_bits();
                        if !pairs.chunks_exact(2).all(same) {
                            return Err(NotStored::Offsets);
                        }
                        Absmax::Nested(Nested {
                            codes: absmax.clone(),
                            absmax: pairs.into_iter().step_by(2).collect(),
                            quant_map: floats(map).into(),
                            offset,
                        })
                    }
                    _ => Absmax::Plain(floats(absmax).into()),
                };
                let (codes, quant_map) = (codes.clone(), floats(quant_map).into());
                Ok(Self::FourBit(FourBit { layout, codes, quant_map, absmax }))
            }
            (None, Ok(shape), [codes, scb]) if scheme.format == WeightFormat::Int8 => {
                Ok(Self::Int8(Int8 { shape, codes: codes.clone(), scb: floats(scb).into() }))
            }
            _ => Err(NotStored::Format(scheme.format)),
        }
    }
}

impl Absmax<'_> {
    /// Returns the dequantised absmax, one per block.
    fn values(&self) -> Cow<'_, [f32]> {
        match self {
            Self::Plain(absmax) => Cow::Borrowed(absmax),
            Self::Nested(nested) => {
                let value = |(block, code): (usize, &u8)| {
                    nested.quant_map[usize::from(*code)] * nested.absmax[block / 256]
                        + nested.offset
                };
                nested.codes.iter().enumerate().map(value).collect()
            }
        }
    }
}

/// Returns the layout of a 4-bit weight in a file; `None` for other formats.
fn layout(scheme: Scheme, dtype: DType, shape: &[usize]) -> Option<Layout> {
    let Block::Elements(block_size) = scheme.block else { return None };
    scheme.format.info().codebook.map(|_| Layout {
        quant_type: scheme.format,
        block_size: block_size as usize,
        nested: scheme.nested(),
        dtype,
        shape: shape.to_vec(),
        storage: DType::U8,
    })
}

fn bytes(values: &[f32]) -> Cow<'_, [u8]> {
    match cfg!(target_endian = "little") {
        true => Cow::Borrowed(bytemuck::cast_slice(values)),
        false => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn slice<T: Clone>(values: Cow<'_, [T]>, range: std::ops::Range<usize>) -> Cow<'_, [T]> {
    match values {
        Cow::Borrowed(values) => values[range].into(),
        Cow::Owned(values) => values[range].to_vec().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_become_the_weight_again() {
        let nested = |offset: f32| Encoded {
            scheme: WeightFormat::Fp4.scheme(),
            dtype: DType::Bf16,
            shape: vec![2, 64],
            buffers: vec![
                vec![0x5a; 64].into(),
                vec![3, 9].into(),
                bytes(&[0.5; 16]).into_owned().into(),
                bytes(&[0.25; 256]).into_owned().into(),
                bytes(&[2.0, 1.0, 2.0, offset]).into_owned().into(),
            ],
        };
        let weight = Weight::try_from(nested(1.0)).expect("one offset");
        let value = weight.decoder().expect("codes")(64);
        assert_eq!((weight.format(), value), (Some(WeightFormat::Fp4), 0.5 * (0.25 * 2.0 + 1.0)));
        assert_eq!(weight.encoded().expect("codes"), nested(1.0));
        assert_eq!(Weight::try_from(nested(0.0)), Err(NotStored::Offsets));
        let int8 = Encoded {
            scheme: WeightFormat::Int8.scheme(),
            dtype: DType::F16,
            shape: vec![2, 3],
            buffers: vec![vec![1, 2, 3, 4, 5, 255].into(), bytes(&[127.0, 254.0])],
        };
        let weight = Weight::try_from(int8.clone()).expect("rows");
        assert_eq!(weight.encoded().expect("codes"), int8);
        let last = weight.clone().rows(1..2);
        assert_eq!((last.shape(), last.decoder().expect("codes")(2)), (&[1, 3][..], -2.0));
    }
}
