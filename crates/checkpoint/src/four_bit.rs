use std::borrow::Cow;

use quant::{DType, WeightFormat};

use crate::state::State;
use crate::{Checkpoint, Error, Plan, Reason, Tensor};

/// Number of absmax per nested block.
const NESTED_BLOCK_SIZE: usize = 256;

/// Number of entries in the codebook of nested absmax.
const NESTED_MAP: usize = 256;

/// Format, sizes and types of a 4-bit weight.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// NF4 or FP4.
    pub quant_type: WeightFormat,
    /// Elements per block: a power of two from 32 to 4096. Blocks run over the flat index and may span rows.
    pub block_size: usize,
    /// True if the absmax are quantised to bytes.
    pub nested: bool,
    /// Type before quantisation: F16, BF16 or F32.
    pub dtype: DType,
    /// Shape of the weight; `[n, k]` for a linear layer.
    pub shape: Vec<usize>,
    /// Type under which the bytes of the codes are stored: U8, F16, BF16 or F32.
    pub storage: DType,
}

/// A 4-bit weight.
#[derive(Debug, Clone, PartialEq)]
pub struct FourBit<'a> {
    pub layout: Layout,
    /// `[ceil(elements/2)]`: element 2j is in the high half of byte j. With an odd number of elements the last
    /// low half is unused.
    pub codes: Cow<'a, [u8]>,
    /// `[16]`: the codebook.
    pub quant_map: Cow<'a, [f32]>,
    pub absmax: Absmax<'a>,
}

/// The absmax of each block: `[ceil(elements/block_size)]`.
#[derive(Debug, Clone, PartialEq)]
pub enum Absmax<'a> {
    Plain(Cow<'a, [f32]>),
    Nested(Nested<'a>),
}

/// Nested absmax: `absmax[b] = quant_map[codes[b]]·absmax[b/256] + offset`, in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Nested<'a> {
    /// One code per block.
    pub codes: Cow<'a, [u8]>,
    /// `[ceil(codes/256)]`
    pub absmax: Cow<'a, [f32]>,
    /// `[256]`
    pub quant_map: Cow<'a, [f32]>,
    pub offset: f32,
}

/// Returns the 4-bit format with this name in quantization states.
fn named(name: &str) -> Result<WeightFormat, Reason> {
    let known = WeightFormat::all().find(|format| format.bits() == 4 && format.name() == name);
    known.ok_or_else(|| Reason::QuantType(name.into()))
}

impl Layout {
    /// Returns the number of elements of the weight.
    ///
    /// # Errors
    /// [`Reason::Overflow`].
    pub fn elements(&self) -> Result<usize, Reason> {
        // Counted in bits of f32, so that the size of the dequantised weight does not overflow either.
        let bits = self.shape.iter().try_fold(32usize, |n, axis| n.checked_mul(*axis));
        bits.map(|bits| bits / 32).ok_or_else(|| Reason::Overflow(self.shape.clone()))
    }

    /// Returns the plan of tensors for a weight of this name, for [`crate::Writer::create`].
    ///
    /// # Errors
    /// [`Error::Tensor`] for a block size, dtype or storage that the format does not support.
    pub fn plan(&self, name: &str) -> Result<Vec<Plan>, Error> {
        let elements = self.check().map_err(|reason| reason.in_tensor(name))?;
        let below = |part: &str| format!("{name}.{part}");
        let f32s = |part: &str, len| Plan::new(below(part), DType::F32, &[len]);
        let blocks = elements.div_ceil(self.block_size);
        let codes = elements.div_ceil(2) / self.storage.size();
        let mut plan = vec![
            Plan::new(name, self.storage, &[codes, 1]),
            f32s("quant_map", 16),
            Plan::text(self.state_name(name)),
        ];
        if self.nested {
            plan.extend([
                Plan::new(below("absmax"), DType::U8, &[blocks]),
                f32s("nested_absmax", blocks.div_ceil(NESTED_BLOCK_SIZE)),
                f32s("nested_quant_map", NESTED_MAP),
            ]);
        } else {
            plan.push(f32s("absmax", blocks));
        }
        Ok(plan)
    }

    fn state_name(&self, name: &str) -> String {
        format!("{name}.quant_state.bitsandbytes__{}", self.quant_type)
    }

    /// Checks the layout and returns the number of elements.
    fn check(&self) -> Result<usize, Reason> {
        let (dtype, storage) = (self.dtype, self.storage);
        if !self.block_size.is_power_of_two() || !(32..=4096).contains(&self.block_size) {
            return Err(Reason::BlockSize(self.block_size));
        }
        if !DType::FLOATS.contains(&dtype) {
            return Err(Reason::DType { have: dtype, need: DType::FLOATS.to_vec() });
        }
        stores(storage)?;
        let len = self.elements()?;
        if len.div_ceil(2) % storage.size() != 0 {
            return Err(Reason::Packing { have: self.shape.clone(), len, storage });
        }
        Ok(len)
    }

    /// Parses the quantization state of this name; returns the layout, and the offset if nested.
    fn read(name: &str, state: &Tensor<'_>, storage: DType) -> Result<(Self, Option<f32>), Reason> {
        let (_, suffix) = name.rsplit_once('.').unwrap_or(("", name));
        let Some(quant_type) = suffix.strip_prefix("bitsandbytes__") else {
            return Err(Reason::QuantType(suffix.into()));
        };
        let quant_type = named(quant_type)?;
        if state.dtype != DType::U8 {
            return Err(Reason::DType { have: state.dtype, need: vec![DType::U8] });
        }
        let state = State::parse(&state.bytes)?;
        let of_state = named(&state.quant_type)?;
        if of_state != quant_type {
            return Err(Reason::QuantTypes { state: of_state, name: quant_type });
        }
        let dtype = match state.dtype.as_str() {
            "float16" => DType::F16,
            "bfloat16" => DType::Bf16,
            "float32" => DType::F32,
            other => return Err(Reason::State(format!("unsupported dtype {other:?}"))),
        };
        if let Some(other) = state.nested_dtype.filter(|dtype| dtype != "float32") {
            return Err(Reason::State(format!("unsupported nested dtype {other:?}")));
        }
        if let Some(other) = state.nested_blocksize.filter(|size| *size != NESTED_BLOCK_SIZE) {
            return Err(Reason::NestedBlockSize(other));
        }
        let offset = state.nested_offset.map(|offset| offset as f32);
        finite(offset.as_slice())?;
        let layout = Self {
            quant_type,
            block_size: state.blocksize,
            nested: offset.is_some(),
            dtype,
            shape: state.shape,
            storage,
        };
        layout.check()?;
        Ok((layout, offset))
    }

    fn state(&self, offset: Option<f32>) -> State {
        let dtype = match self.dtype {
            DType::F16 => "float16",
            DType::Bf16 => "bfloat16",
            _ => "float32",
        };
        State {
            quant_type: self.quant_type.to_string(),
            blocksize: self.block_size,
            dtype: dtype.into(),
            shape: self.shape.clone(),
            nested_blocksize: offset.map(|_| NESTED_BLOCK_SIZE),
            nested_dtype: offset.map(|_| "float32".into()),
            nested_offset: offset.map(f64::from),
        }
    }

    /// Checks that a tensor matches its plan.
    fn compare(&self, name: &str, plan: &Plan, tensor: &Tensor<'_>) -> Result<(), Error> {
        plan.check(tensor)
            .map_err(|reason| match reason {
                Reason::Shape { have, .. } if plan.name == name => {
                    let len = self.elements().unwrap_or(usize::MAX);
                    Reason::Packing { have, len, storage: self.storage }
                }
                Reason::Shape { have, need } if plan.name.ends_with(".absmax") => {
                    Reason::Blocks { have, need, block_size: self.block_size }
                }
                other => other,
            })
            .map_err(|reason| reason.in_tensor(&plan.name))
    }
}

impl<'a> FourBit<'a> {
    /// Reads the weight of this name; `None` if no part of a 4-bit weight exists.
    pub(crate) fn read(file: &'a Checkpoint, name: &str) -> Result<Option<Self>, Error> {
        const PARTS: [&str; 4] = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
        let below = |part: &str| format!("{name}.{part}");
        let states = file.below(name).filter(|part| part.starts_with("quant_state."));
        let states: Vec<_> = states.map(below).collect();
        let state_name = match &states[..] {
            [] if file.below(name).any(|part| PARTS.contains(&part)) => {
                return Err(Reason::Missing.in_tensor(below("quant_state.bitsandbytes__nf4")));
            }
            [] => return Ok(None),
            [state] => state,
            _ => return Err(Reason::States(states).in_tensor(name)),
        };
        let codes = file.tensor(name)?;
        stores(codes.dtype).map_err(|reason| reason.in_tensor(name))?;
        let (layout, offset) = Layout::read(state_name, &file.tensor(state_name)?, codes.dtype)
            .map_err(|reason| reason.in_tensor(state_name))?;
        let plan = layout.plan(name)?;
        let planned = |part: &str| plan.iter().any(|plan| plan.name == below(part));
        if let Some(part) = file.below(name).find(|part| !planned(part)) {
            return Err(
                Reason::Unexpected("the quantization state of its weight").in_tensor(below(part))
            );
        }
        for plan in &plan {
            layout.compare(name, plan, &file.tensor(&plan.name)?)?;
        }
        let f32s = |part: &str| {
            let values = file.tensor(&below(part))?.f32s();
            values.map_err(|reason| reason.in_tensor(below(part)))
        };
        let absmax = match offset {
            None => Absmax::Plain(f32s("absmax")?),
            Some(offset) => Absmax::Nested(Nested {
                codes: file.tensor(&below("absmax"))?.bytes,
                absmax: f32s("nested_absmax")?,
                quant_map: f32s("nested_quant_map")?,
                offset,
            }),
        };
        let weight = Self { layout, codes: codes.bytes, quant_map: f32s("quant_map")?, absmax };
        weight.check(name)?;
        Ok(Some(weight))
    }

    /// Returns the tensors that bitsandbytes saves for a weight of this name.
    ///
    /// # Errors
    /// Errors of [`Layout::plan`]; [`Error::Tensor`] for lengths that do not match the layout, and for invalid
    /// scales or codebooks.
    pub fn tensors(&self, name: &str) -> Result<Vec<(String, Tensor<'_>)>, Error> {
        let layout = &self.layout;
        let plan = layout.plan(name)?;
        self.check(name)?;
        let below = |part: &str| format!("{name}.{part}");
        let codes = [self.codes.len() / layout.storage.size(), 1];
        let offset = match &self.absmax {
            Absmax::Plain(_) => None,
            Absmax::Nested(nested) => Some(nested.offset),
        };
        let state = layout.state(offset).to_string().into_bytes();
        let mut tensors = vec![
            (name.to_owned(), Tensor::new(layout.storage, &codes, &*self.codes)),
            (below("quant_map"), Tensor::of_f32s(&self.quant_map)),
            (layout.state_name(name), Tensor::new(DType::U8, &[state.len()], state)),
        ];
        match &self.absmax {
            Absmax::Plain(absmax) => tensors.push((below("absmax"), Tensor::of_f32s(absmax))),
            Absmax::Nested(Nested { codes, absmax, quant_map, .. }) => tensors.extend([
                (below("absmax"), Tensor::new(DType::U8, &[codes.len()], &**codes)),
                (below("nested_absmax"), Tensor::of_f32s(absmax)),
                (below("nested_quant_map"), Tensor::of_f32s(quant_map)),
            ]),
        }
        for (plan, (_, tensor)) in plan.iter().zip(&tensors) {
            layout.compare(name, plan, tensor)?;
        }
        Ok(tensors)
    }

    /// Checks that numbers are finite, scales not negative, and scales nested as in the layout. Codebooks must have
    /// the order of their type and a largest magnitude of 1.
    fn check(&self, name: &str) -> Result<(), Error> {
        let check = |part: &str, values: &[f32]| {
            finite(values).map_err(|reason| reason.in_tensor(format!("{name}.{part}")))
        };
        check("quant_map", &self.quant_map)?;
        // Otherwise bitsandbytes, which dequantises by type, and we, who use the codebook, would differ.
        let quant_type = self.layout.quant_type;
        if self.quant_map.is_sorted() != (quant_type == WeightFormat::Nf4) {
            return Err(Reason::QuantMap(quant_type).in_tensor(format!("{name}.quant_map")));
        }
        let max = self.quant_map.iter().fold(0.0f32, |max, v| max.max(v.abs()));
        if max != 1.0 {
            return Err(Reason::QuantMapEnd(max).in_tensor(format!("{name}.quant_map")));
        }
        let scales = |part: &str, values: &[f32]| {
            magnitudes(values).map_err(|reason| reason.in_tensor(format!("{name}.{part}")))
        };
        match &self.absmax {
            Absmax::Plain(absmax) if !self.layout.nested => scales("absmax", absmax),
            Absmax::Nested(nested) if self.layout.nested => {
                scales("nested_absmax", &nested.absmax)?;
                check("nested_quant_map", &nested.quant_map)?;
                check("nested_offset", &[nested.offset])?;
                nested.check(name)
            }
            _ => Err(Reason::Unexpected("its layout").in_tensor(format!("{name}.absmax"))),
        }
    }
}

impl Nested<'_> {
    /// Checks that the codebook ascends to 1, and that each absmax is finite and not further below 0 than rounding to
    /// the codebook explains.
    fn check(&self, name: &str) -> Result<(), Error> {
        let below = |part: &str| format!("{name}.{part}");
        let have = self.quant_map.len();
        if have != NESTED_MAP {
            let reason = Reason::Shape { have: vec![have], need: vec![NESTED_MAP] };
            return Err(reason.in_tensor(below("nested_quant_map")));
        }
        if !self.quant_map.is_sorted_by(|a, b| a < b) || self.quant_map.last() != Some(&1.0) {
            return Err(Reason::NestedQuantMap.in_tensor(below("nested_quant_map")));
        }
        let gaps = self.quant_map.windows(2).map(|pair| pair[1] - pair[0]);
        let rounding = gaps.fold(0.0, f32::max) / 2.0;
        let blocks = self.codes.chunks(NESTED_BLOCK_SIZE).zip(&*self.absmax);
        for (index, (codes, absmax)) in blocks.enumerate() {
            // 1e-5 covers f32 rounding, in the offset (a mean) and in the subtraction from it.
            let least = -(rounding * absmax + 1e-5 * (absmax + self.offset.abs()));
            let decoded =
                codes.iter().map(|c| self.quant_map[usize::from(*c)] * absmax + self.offset);
            for (at, decoded) in decoded.enumerate() {
                let index = index * NESTED_BLOCK_SIZE + at;
                if !decoded.is_finite() {
                    return Err(Reason::NotFinite { index }.in_tensor(below("absmax")));
                }
                if decoded < least {
                    return Err(Reason::Negative { index }.in_tensor(below("absmax")));
                }
            }
        }
        Ok(())
    }
}

/// Checks that the format can store codes as this type.
fn stores(storage: DType) -> Result<(), Reason> {
    let need = [&[DType::U8], &DType::FLOATS[..]].concat();
    match need.contains(&storage) {
        true => Ok(()),
        false => Err(Reason::DType { have: storage, need }),
    }
}

/// Checks that absmax values are finite and not negative.
pub(crate) fn magnitudes(values: &[f32]) -> Result<(), Reason> {
    finite(values)?;
    match values.iter().position(|v| *v < 0.0) {
        Some(index) => Err(Reason::Negative { index }),
        None => Ok(()),
    }
}

fn finite(values: &[f32]) -> Result<(), Reason> {
    match values.iter().position(|v| !v.is_finite()) {
        Some(index) => Err(Reason::NotFinite { index }),
        None => Ok(()),
    }
}
