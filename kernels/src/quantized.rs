//! Weights of any format, for callers that do not read their bits. No other module tells the formats apart.
//!
//! A [`Weight`] has a shape and a scheme. Its buffers are in the order of `checkpoint::Encoded`: codes,
//! scales, the codebook if the format has one, and for nested scales their codebook and `[groups, 2]` f32.

use arch::{ArchProfile, DType, Device};
use cubecl::server::Handle;
use quant::{Block, Scales, Scheme, WeightFormat};
use tune::Kernel;

use crate::int8::{self, Activations, Int8Dequantize, Int8Matmul};
use crate::matmul::{Epilogue, EpilogueBuffers, InvalidMatmul, NormBuffers};
use crate::nf4::{self, Codebook, Nf4Dequantize, Nf4Matmul, Order};
use crate::norm::NormKind;
use crate::q8_0::{self, Q8_0Dequantize, Q8_0Matmul};
use crate::weight::copy_words;
pub use crate::weight::{InvalidWeight, QuantizeError};

/// Launches kernels with configs that it chooses itself.
pub trait Launcher {
    type Error: From<InvalidMatmul>;

    /// Launches `problem` with the config that the launcher selects.
    ///
    /// # Errors
    /// Fails if no config suits the problem.
    fn launch<K: Kernel>(
        &self,
        device: &Device,
        problem: &K::Problem,
        operands: &K::Operands,
    ) -> Result<(), Self::Error>;
}

/// A quantised weight `[n, k]` without its buffers. Build it with [`Weight::new`], which checks it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Weight(Kind);

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    FourBit { weight: nf4::Weight, codebook: Codebook },
    Int8 { weight: int8::Weight, activations: Option<Activations> },
    Q8_0(q8_0::Weight),
}

/// A matmul with a quantised weight: `y = epilogue(x · wᵀ)`, x `[m, k]`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QuantizedMatmul {
    pub m: u32,
    /// Type of x, bias and y: f32, f16 or bf16.
    pub dtype: DType,
    pub epilogue: Epilogue,
    /// True if the first half of the weight's rows gates the second half.
    pub glu: bool,
    /// Norm of the rows of x, if [`Weight::takes_norm`].
    pub norm: Option<NormKind>,
}

/// Device buffers of one matmul.
#[derive(Debug, Clone)]
pub struct QuantizedMatmulOperands {
    pub x: Handle,
    pub weight: Vec<Handle>,
    pub out: Handle,
    pub epilogue: EpilogueBuffers,
    /// Buffers of the norm.
    pub norm: Option<NormBuffers>,
}

impl Weight {
    /// Creates a weight whose codes lie row after row, as in files.
    ///
    /// # Errors
    /// A size of 0, a block that the format does not have, or more elements than the kernels can address.
    pub fn new([n, k]: [u32; 2], scheme: Scheme) -> Result<Self, InvalidWeight> {
        let Scheme { format, block, scales } = scheme;
        if !format.info().has_options && scheme != format.scheme() {
            return Err(InvalidWeight::Scheme(format));
        }
        Ok(Self(match (Codebook::from_format(format), block) {
            (Some(codebook), Block::Elements(block_size)) => {
                let nested = scales == Scales::Nested;
                Kind::FourBit { weight: nf4::Weight::new(n, k, block_size, nested)?, codebook }
            }
            (Some(_), Block::Row) => return Err(InvalidWeight::Scheme(format)),
            (None, _) if format == WeightFormat::Q8_0 => Kind::Q8_0(q8_0::Weight::new(n, k)?),
            (None, _) => Kind::Int8 { weight: int8::Weight::new(n, k)?, activations: None },
        }))
    }

    /// `[n, k]`.
    pub const fn shape(&self) -> [u32; 2] {
        match self.0 {
            Kind::FourBit { weight, .. } => [weight.n, weight.k],
            Kind::Int8 { weight, .. } => [weight.n, weight.k],
            Kind::Q8_0(weight) => [weight.n, weight.k],
        }
    }

    pub fn scheme(&self) -> Scheme {
        match self.0 {
            Kind::FourBit { weight, codebook } => Scheme {
                format: codebook.format(),
                block: Block::Elements(weight.block_size),
                scales: if weight.nested { Scales::Nested } else { Scales::F32 },
            },
            Kind::Int8 { .. } => WeightFormat::Int8.scheme(),
            Kind::Q8_0(_) => WeightFormat::Q8_0.scheme(),
        }
    }

    /// Total bytes of all buffers.
    pub const fn bytes(&self) -> u64 {
        match self.0 {
            Kind::FourBit { weight, .. } => weight.bytes(),
            Kind::Int8 { weight, .. } => weight.bytes(),
            Kind::Q8_0(weight) => weight.bytes(),
        }
    }

    /// Bytes that each buffer uses. Buffers are padded to whole words.
    pub fn buffer_bytes(&self) -> Vec<u64> {
        match self.0 {
            Kind::FourBit { weight, .. } => {
                let absmax = weight.absmax_len() * if weight.nested { 1 } else { 4 };
                let nested = [256 * 4, weight.groups() * 8].into_iter().filter(|_| weight.nested);
                [weight.len().div_ceil(2), absmax, 16 * 4].into_iter().chain(nested).collect()
            }
            Kind::Int8 { weight, .. } => vec![weight.len(), u64::from(weight.n) * 4],
            Kind::Q8_0(weight) => vec![weight.len(), weight.blocks() * 2],
        }
    }

    /// Returns the weight in the order that the device multiplies fastest.
    #[must_use]
    pub fn in_best_order(self, arch: &ArchProfile) -> Self {
        match self.0 {
            Kind::FourBit { weight, codebook } if arch.inline_ptx() => {
                let weight = weight.ordered(Order::Tiles).unwrap_or(weight);
                Self(Kind::FourBit { weight, codebook })
            }
            _ => self,
        }
    }

    /// Returns the weight in the order of files.
    #[must_use]
    pub const fn in_rows(self) -> Self {
        match self.0 {
            Kind::FourBit { weight, codebook } => {
                let weight = nf4::Weight { order: Order::Rows, ..weight };
                Self(Kind::FourBit { weight, codebook })
            }
            _ => self,
        }
    }

    /// Words of the scales that suffice for both orders, so that a record of one order can be loaded in the
    /// other.
    pub fn scale_words(&self) -> u64 {
        let words = |weight: nf4::Weight| weight.absmax_bytes() / 4;
        match self.0 {
            Kind::FourBit { weight, .. } => {
                words(weight).max(words(weight.ordered(Order::Tiles).unwrap_or(weight)))
            }
            _ => self.buffer_words()[1] as u64,
        }
    }

    /// Reorders buffer `index` (codes or scales) of this weight as in `to`, the same weight in another order.
    pub fn reorder(&self, device: &Device, to: &Self, index: usize, from: &Handle) -> Handle {
        match (self.0, to.0) {
            (Kind::FourBit { weight, .. }, Kind::FourBit { weight: to, .. }) => match index {
                0 => nf4::reorder_codes(device, weight, from, to.order),
                1 => nf4::reorder_absmax(device, weight, from, to.order),
                _ => from.clone(),
            },
            _ => from.clone(),
        }
    }

    /// Quantises `values`, `[n, k]` of `dtype`.
    ///
    /// # Errors
    /// Infinities or NaN; an unsupported device.
    pub fn quantize(
        &self,
        device: &Device,
        values: &Handle,
        dtype: DType,
    ) -> Result<Vec<Handle>, QuantizeError> {
        Ok(match self.0 {
            Kind::FourBit { weight, codebook } => {
                nf4::quantize(device, values, weight, dtype, codebook)?.into_handles()
            }
            Kind::Int8 { weight, .. } => {
                let int8::WeightBuffers { codes, scb } =
                    int8::quantize(device, values, weight, dtype)?;
                vec![codes, scb]
            }
            Kind::Q8_0(weight) => {
                let q8_0::WeightBuffers { codes, scales } =
                    q8_0::quantize(device, values, weight, dtype)?;
                vec![codes, scales]
            }
        })
    }

    /// Writes the dense weight to `out`, `[n, k]` of `dtype`.
    ///
    /// # Errors
    /// As [`Launcher::launch`].
    pub fn dequantize<L: Launcher>(
        &self,
        launcher: &L,
        device: &Device,
        buffers: &[Handle],
        out: &Handle,
        dtype: DType,
    ) -> Result<(), L::Error> {
        let out_handle = out.clone();
        match self.0 {
            Kind::FourBit { weight, .. } => launcher.launch::<Nf4Dequantize>(
                device,
                &nf4::DequantizeProblem { weight, out: dtype },
                &nf4::DequantizeOperands {
                    weight: nf4::WeightBuffers::from_handles(buffers),
                    out: out_handle,
                },
            ),
            Kind::Int8 { weight, .. } => launcher.launch::<Int8Dequantize>(
                device,
                &int8::DequantizeProblem { weight, out: dtype },
                &int8::DequantizeOperands {
                    weight: int8::WeightBuffers::from_handles(buffers),
                    out: out_handle,
                },
            ),
            Kind::Q8_0(weight) => launcher.launch::<Q8_0Dequantize>(
                device,
                &q8_0::DequantizeProblem { weight, out: dtype },
                &q8_0::DequantizeOperands {
                    weight: q8_0::WeightBuffers::from_handles(buffers),
                    out: out_handle,
                },
            ),
        }
    }

    /// Launches the matmul.
    ///
    /// # Errors
    /// As [`Launcher::launch`]; a gated matmul with a weight that has no halves.
    pub fn multiply<L: Launcher>(
        &self,
        launcher: &L,
        device: &Device,
        product: &QuantizedMatmul,
        operands: QuantizedMatmulOperands,
    ) -> Result<(), L::Error> {
        let QuantizedMatmulOperands { x, weight: buffers, out, epilogue, norm } = operands;
        match self.0 {
            Kind::FourBit { weight, .. } => launcher.launch::<Nf4Matmul>(
                device,
                &four_bit_problem(weight, product)?,
                &nf4::Nf4MatmulOperands {
                    x,
                    weight: nf4::WeightBuffers::from_handles(&buffers),
                    out,
                    epilogue,
                    norm,
                },
            ),
            Kind::Int8 { weight, activations } => {
                self.check_gated(product.glu)?;
                let plain = int8::Int8MatmulProblem::new(product.m, weight, product.dtype)?;
                let plain = int8::Int8MatmulProblem { epilogue: product.epilogue, ..plain };
                let problem = match activations {
                    Some(activations) => plain.rounded_where_faster(device.profile(), activations),
                    None => plain,
                };
                let weight = int8::WeightBuffers::from_handles(&buffers);
                let operands = int8::Int8MatmulOperands { x, weight, out, epilogue };
                launcher.launch::<Int8Matmul>(device, &problem, &operands)
            }
            Kind::Q8_0(weight) => {
                self.check_gated(product.glu)?;
                let plain = q8_0::Q8_0MatmulProblem::new(product.m, weight, product.dtype)?;
                let problem = q8_0::Q8_0MatmulProblem { epilogue: product.epilogue, ..plain };
                let weight = q8_0::WeightBuffers::from_handles(&buffers);
                let operands = q8_0::Q8_0MatmulOperands { x, weight, out, epilogue };
                launcher.launch::<Q8_0Matmul>(device, &problem, &operands)
            }
        }
    }

    /// Checks that the weight can be split into two matrices of equal height, if `glu`.
    ///
    /// # Errors
    /// [`InvalidMatmul::Halves`].
    pub fn check_gated(&self, glu: bool) -> Result<(), InvalidMatmul> {
        match self.0 {
            _ if !glu => Ok(()),
            Kind::FourBit { weight, .. } => {
                nf4::Nf4MatmulProblem::new(1, weight, DType::F32)?.gated_by_half().map(drop)
            }
            _ => Err(InvalidMatmul::Halves { n: self.shape()[0] }),
        }
    }

    /// Returns whether the kernel of this matmul applies its norm.
    ///
    /// # Errors
    /// A size of 0; a gated matmul with a weight that has no halves.
    pub fn takes_norm(
        &self,
        arch: &ArchProfile,
        product: &QuantizedMatmul,
    ) -> Result<bool, InvalidMatmul> {
        Ok(match self.0 {
            Kind::FourBit { weight, .. } => {
                Nf4Matmul::takes_norm(arch, &four_bit_problem(weight, product)?)
            }
            _ => false,
        })
    }

    /// Returns the weight with activation rounding: where int8 matmul is faster, matmuls round x to i8 with
    /// one scale a row. Columns with a value of at least `threshold` are outliers and stay exact; 0 disables
    /// outliers. Formats without int8 matmul are returned unchanged.
    #[must_use]
    pub const fn rounding(self, threshold: f32) -> Self {
        match self.0 {
            Kind::Int8 { weight, .. } => {
                Self(Kind::Int8 { weight, activations: Some(Activations { threshold }) })
            }
            _ => self,
        }
    }

    /// Joins two weights of one k into one, with the rows of the second after those of the first.
    ///
    /// # Errors
    /// [`InvalidWeight::Join`] if formats, k, blocks or orders differ, or if a word, a block or a nested
    /// group would span both weights.
    pub fn joined(parts: [&Self; 2]) -> Result<Self, InvalidWeight> {
        let [first, second] = parts;
        Ok(Self(match (first.0, second.0) {
            (
                Kind::FourBit { weight, codebook },
                Kind::FourBit { weight: other, codebook: own },
            ) if own == codebook => {
                Kind::FourBit { weight: nf4::Weight::joined(&[weight, other])?, codebook }
            }
            (
                Kind::Int8 { weight, activations },
                Kind::Int8 { weight: other, activations: own },
            ) if own == activations => {
                Kind::Int8 { weight: int8::Weight::joined(&[weight, other])?, activations }
            }
            (Kind::Q8_0(weight), Kind::Q8_0(other)) => {
                Kind::Q8_0(q8_0::Weight::joined(&[weight, other])?)
            }
            _ => return Err(InvalidWeight::Join { why: "their formats differ" }),
        }))
    }

    /// Joins the buffers of two weights that can be [joined](Self::joined). It reads and writes every byte
    /// once.
    ///
    /// # Errors
    /// [`InvalidWeight::Join`] if codebooks differ; [`InvalidWeight::Device`] if they cannot be read.
    pub fn join(
        device: &Device,
        parts: [(&Self, &[Handle]); 2],
    ) -> Result<Vec<Handle>, InvalidWeight> {
        let [(first, first_buffers), (second, second_buffers)] = parts;
        let buffers = [first_buffers, second_buffers];
        match (first.0, second.0) {
            (Kind::FourBit { weight, .. }, Kind::FourBit { weight: other, .. }) => {
                let [one, two] = buffers.map(nf4::WeightBuffers::from_handles);
                let (_, made) = nf4::join(device, &[(weight, &one), (other, &two)])?;
                Ok(made.into_handles())
            }
            _ => {
                let words = [first, second].map(Self::buffer_words);
                Ok(concatenated(device, buffers, words))
            }
        }
    }

    fn buffer_words(&self) -> Vec<usize> {
        self.buffer_bytes().into_iter().map(|bytes| bytes.div_ceil(4) as usize).collect()
    }
}

/// Maximum rows of x (of `dtype`) for which codes are multiplied directly. For more rows the weight may be
/// dequantised first.
pub fn max_fused_rows(arch: &ArchProfile, format: WeightFormat, dtype: DType) -> u32 {
    match format {
        // int8 may be dequantised from 3 rows on; no shipped config does so for this few rows.
        WeightFormat::Nf4 | WeightFormat::Fp4 | WeightFormat::Int8 => {
            Nf4Matmul::max_fused_rows(arch, dtype)
        }
        WeightFormat::Q8_0 => q8_0::MAX_FUSED_ROWS,
    }
}

/// Returns whether matmuls of a format support rounding of x to i8: see [`Weight::rounding`].
pub fn rounds_activations(arch: &ArchProfile, format: WeightFormat) -> bool {
    format == WeightFormat::Int8 && arch.inline_ptx()
}

/// Concatenates the buffers of two weights, whose lengths are in words.
fn concatenated(
    device: &Device,
    buffers: [&[Handle]; 2],
    [first, second]: [Vec<usize>; 2],
) -> Vec<Handle> {
    let mut all = Vec::new();
    for (i, (one, two)) in first.into_iter().zip(second).enumerate() {
        let made = device.client().empty((one + two) * 4);
        let to = (&made, one + two);
        copy_words(device, (&buffers[0][i], one), 0, to, 0, one);
        copy_words(device, (&buffers[1][i], two), 0, to, one, two);
        all.push(made);
    }
    all
}

fn four_bit_problem(
    weight: nf4::Weight,
    product: &QuantizedMatmul,
) -> Result<nf4::Nf4MatmulProblem, InvalidMatmul> {
    let QuantizedMatmul { m, dtype, epilogue, glu, norm } = *product;
    let plain = nf4::Nf4MatmulProblem::new(m, weight, dtype)?;
    let problem = if glu { plain.gated_by_half()? } else { plain };
    Ok(nf4::Nf4MatmulProblem { epilogue, norm, ..problem })
}
