use std::borrow::Cow;

use quant::DType;

use crate::four_bit::magnitudes;
use crate::{Checkpoint, Error, FourBit, Plan, Reason, Tensor};

/// A weight, dense or quantised.
#[derive(Debug, Clone, PartialEq)]
pub enum Weight<'a> {
    /// An F16, BF16 or F32 tensor.
    Dense(Tensor<'a>),
    FourBit(FourBit<'a>),
    Int8(Int8<'a>),
}

/// An 8-bit weight: `value = codes[n, k]·scb[n]/127`.
#[derive(Debug, Clone, PartialEq)]
pub struct Int8<'a> {
    /// `[n, k]`
    pub shape: [usize; 2],
    /// `[n, k]`: the codes, as bytes of i8.
    pub codes: Cow<'a, [u8]>,
    /// `[n]`: the absmax of each row.
    pub scb: Cow<'a, [f32]>,
}

/// A weight `[n, k]` and an optional bias `[n]` in F16, BF16 or F32.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear<'a> {
    pub weight: Weight<'a>,
    pub bias: Option<Tensor<'a>>,
}

impl Checkpoint {
    /// Reads a weight by name, such as `lm_head.weight`. Tensors with related names determine its format.
    ///
    /// # Errors
    /// [`Error::Tensor`] for a missing, unexpected or inconsistent tensor.
    pub fn weight(&self, name: &str) -> Result<Weight<'_>, Error> {
        if let Some(weight) = FourBit::read(self, name)? {
            return Ok(Weight::FourBit(weight));
        }
        if let Some(weight) = Int8::read(self, name)? {
            return Ok(Weight::Int8(weight));
        }
        let dense = self.tensor(name)?;
        float(&dense).map_err(|reason| reason.in_tensor(name))?;
        Ok(Weight::Dense(dense))
    }

    /// Reads the 2-D weight `{name}.weight`, and `{name}.bias` if it exists.
    ///
    /// # Errors
    /// Errors of [`Checkpoint::weight`]; [`Error::Tensor`] for a wrong shape or dtype.
    pub fn linear(&self, name: &str) -> Result<Linear<'_>, Error> {
        let [weight_name, bias_name] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let weight = self.weight(&weight_name)?;
        let [n, _] = weight.shape() else {
            let have = weight.shape().to_vec();
            return Err(Reason::Axes { have, need: 2 }.in_tensor(weight_name));
        };
        let bias = if self.contains(&bias_name) {
            let bias = self.tensor(&bias_name)?;
            let plan = Plan::new(bias_name, bias.dtype, &[*n]);
            float(&bias)
                .and_then(|()| plan.check(&bias))
                .map_err(|reason| reason.in_tensor(&plan.name))?;
            Some(bias)
        } else {
            None
        };
        Ok(Linear { weight, bias })
    }
}

impl<'a> Weight<'a> {
    /// Returns the shape of the weight, not of its codes.
    pub fn shape(&self) -> &[usize] {
        match self {
            Self::Dense(tensor) => &tensor.shape,
            Self::FourBit(weight) => &weight.layout.shape,
            Self::Int8(weight) => &weight.shape,
        }
    }

    /// Returns the tensors to write for this weight under `name`.
    ///
    /// # Errors
    /// [`Error::Tensor`] for an inconsistent weight.
    pub fn tensors(&self, name: &str) -> Result<Vec<(String, Tensor<'_>)>, Error> {
        match self {
            Self::Dense(tensor) => {
                let Tensor { dtype, shape, bytes } = tensor;
                let tensor = Tensor::new(*dtype, shape, &**bytes);
                float(&tensor).map_err(|reason| reason.in_tensor(name))?;
                Ok(vec![(name.into(), tensor)])
            }
            Self::FourBit(weight) => weight.tensors(name),
            Self::Int8(weight) => weight.tensors(name),
        }
    }
}

impl<'a> Int8<'a> {
    /// Returns the plan of tensors for a weight of this name, for [`crate::Writer::create`].
    ///
    /// # Errors
    /// [`Reason::Name`] if the name does not end in `weight`; the names of the scales depend on it.
    pub fn plan(name: &str, shape: [usize; 2]) -> Result<Vec<Plan>, Error> {
        let [scb, format] = beside(name).ok_or_else(|| Reason::Name.in_tensor(name))?;
        Ok(vec![
            Plan::new(name, DType::I8, &shape),
            Plan::new(scb, DType::F32, &shape[..1]),
            Plan::new(format, DType::U8, &[]),
        ])
    }

    fn read(file: &'a Checkpoint, name: &str) -> Result<Option<Self>, Error> {
        let Some([scb_name, format_name]) = beside(name) else { return Ok(None) };
        if !file.contains(&scb_name) && !file.contains(&format_name) {
            return Ok(None);
        }
        let codes = file.tensor(name)?;
        let [n, k] = codes.shape[..] else {
            return Err(Reason::Axes { have: codes.shape, need: 2 }.in_tensor(name));
        };
        for plan in Self::plan(name, [n, k])? {
            // Old files have no format tensor; the format was rows.
            if plan.name == format_name && !file.contains(&format_name) {
                continue;
            }
            let tensor = file.tensor(&plan.name)?;
            plan.check(&tensor).map_err(|reason| reason.in_tensor(&plan.name))?;
            if plan.name == format_name && tensor.bytes[0] != 0 {
                return Err(Reason::WeightFormat(tensor.bytes[0]).in_tensor(format_name));
            }
        }
        let scb = file.tensor(&scb_name)?.f32s().map_err(|reason| reason.in_tensor(&scb_name))?;
        magnitudes(&scb).map_err(|reason| reason.in_tensor(scb_name))?;
        Ok(Some(Self { shape: [n, k], codes: codes.bytes, scb }))
    }

    /// Returns the tensors that bitsandbytes saves for a weight of this name.
    ///
    /// # Errors
    /// Errors of [`Int8::plan`]; [`Error::Tensor`] for lengths that do not match the shape, and for scales
    /// that are negative or not finite.
    pub fn tensors(&self, name: &str) -> Result<Vec<(String, Tensor<'_>)>, Error> {
        let plan = Self::plan(name, self.shape)?;
        let tensors = [
            Tensor::new(DType::I8, &self.shape, &*self.codes),
            Tensor::of_f32s(&self.scb),
            Tensor::new(DType::U8, &[], vec![0]),
        ];
        let check = |plan: &Plan, tensor: &Tensor<'_>| {
            plan.check(tensor).map_err(|reason| reason.in_tensor(&plan.name))
        };
        magnitudes(&self.scb).map_err(|reason| reason.in_tensor(&plan[1].name))?;
        plan.iter().zip(&tensors).try_for_each(|(plan, tensor)| check(plan, tensor))?;
        Ok(plan.into_iter().map(|plan| plan.name).zip(tensors).collect())
    }
}

impl Checkpoint {
    /// Returns the tensors that belong to the quantised weight of this name.
    pub fn beside(&self, name: &str) -> impl Iterator<Item = &str> {
        let below = format!("{name}.");
        let parts = beside(name);
        self.names().filter(move |own| {
            own.starts_with(&below)
                || parts.as_ref().is_some_and(|parts| parts.iter().any(|part| part == own))
        })
    }
}

/// Returns the names of the tensors with a weight's scales and their format; `None` if `name` is not a weight's.
fn beside(name: &str) -> Option<[String; 2]> {
    let module = name.strip_suffix("weight").filter(|m| m.is_empty() || m.ends_with('.'))?;
    Some(["SCB", "weight_format"].map(|part| format!("{module}{part}")))
}

fn float(tensor: &Tensor<'_>) -> Result<(), Reason> {
    let need = DType::FLOATS.to_vec();
    if need.contains(&tensor.dtype) {
        Ok(())
    } else {
        Err(Reason::DType { have: tensor.dtype, need })
    }
}
