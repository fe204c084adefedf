//! Tensors whose rank is known at run time.

use std::sync::Arc;

use burn::backend::flex::FlexTensor;
use burn::backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn::backend::{
    BackendTensor, Dispatch, DispatchDevice, DispatchTensor, DispatchTensorKind, TensorMetadata,
};
use burn::tensor::{
    BoolDType, DType, FloatDType, IntDType, Scalar, Shape, Slice, Tensor, TensorData,
};

use ops::{Ctx, Program};

use crate::limits::must_fit;
use crate::memo::{MOST_KEPT, Memo, count_copy};
use crate::tensor;

/// A tensor of any dtype and rank.
///
/// Burn has no scalars: a tensor of rank 0 is stored with shape `[1]`.
#[derive(Debug, Clone)]
pub(crate) struct Array {
    tensor: DispatchTensor,
    is_scalar: bool,
    /// Elements of a small constant on a device.
    known: Option<Arc<TensorData>>,
}

pub(crate) fn is_host(device: &DispatchDevice) -> bool {
    matches!(device, DispatchDevice::Flex(_))
}

/// Kind of a dtype; each kind has its own operations in Burn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

/// Returns the kind of a dtype.
pub(crate) fn kind(dtype: DType) -> Kind {
    match dtype {
        DType::Bool(_) => Kind::Bool,
        _ if dtype.is_float() => Kind::Float,
        _ => Kind::Int,
    }
}

/// Calls the operation for the kind of a tensor; the result has the same kind.
macro_rules! same {
    ($of:expr, $float:ident, $int:ident, $bool:ident, |$tensor:ident| ($($arg:expr),*)) => {{
        let own = $of.kind();
        let Array { tensor, is_scalar, .. } = $of;
        let $tensor = tensor;
        let tensor = match own {
            Kind::Float => <Dispatch as FloatTensorOps<Dispatch>>::$float($($arg),*),
            Kind::Int => <Dispatch as IntTensorOps<Dispatch>>::$int($($arg),*),
            Kind::Bool => <Dispatch as BoolTensorOps<Dispatch>>::$bool($($arg),*),
        };
        Array::new(tensor, is_scalar)
    }};
}

impl Array {
    /// Wraps a tensor of Burn.
    pub(crate) const fn from_dispatch(tensor: DispatchTensor) -> Self {
        Self::new(tensor, false)
    }

    const fn new(tensor: DispatchTensor, is_scalar: bool) -> Self {
        Self { tensor, is_scalar, known: None }
    }

    /// Copies a constant to a device, and also keeps its elements on the host.
    pub(crate) fn from_constant(data: TensorData, device: &DispatchDevice) -> Self {
        let known = (!is_host(device)).then(|| Arc::new(data.clone()));
        Self { known, ..Self::from_data(data, device) }
    }

    /// Copies data to a device.
    pub(crate) fn from_data(data: TensorData, device: &DispatchDevice) -> Self {
        if is_host(device) || data.as_bytes().len() > MOST_KEPT {
            return Self::copied(data, device);
        }
        Memo::find(&data).unwrap_or_else(|| {
            let array = Self::copied(data.clone(), device);
            Memo::keep(data, &array);
            array
        })
    }

    fn copied(data: TensorData, device: &DispatchDevice) -> Self {
        count_copy(device);
        let shape = data.shape().to_vec();
        let dtype = data.dtype();
        // Burn pads the rows of matrices on CUDA, but not vectors.
        let count = data.num_elements();
        let data = reshaped(data, vec![count]);
        let tensor = match kind(dtype) {
            Kind::Float => Dispatch::float_from_data(data, device),
            Kind::Int => Dispatch::int_from_data(data, device),
            Kind::Bool => {
                let stored = DType::from(bool_dtype(device));
                Dispatch::bool_from_data(data.convert_dtype(stored), device)
            }
        };
        Self::from_dispatch(tensor).reshape(&shape)
    }

    /// Wraps a tensor of Burn.
    pub(crate) fn from_tensor<const D: usize>(tensor: Tensor<D>) -> Self {
        Self::from_dispatch(tensor.into_dispatch())
    }

    /// Returns a tensor of Burn with a fixed rank. Missing dimensions of length 1 come first.
    pub(crate) fn tensor<const D: usize>(self) -> Tensor<D> {
        let shape = self.shape();
        let ones = std::iter::repeat_n(1, D.saturating_sub(shape.len()));
        let shape: Vec<usize> = ones.chain(shape).collect();
        Tensor::from_dispatch(self.reshape(&shape).tensor)
    }

    /// Stores an image of rank 3 or 4 channels-last, on a device with our kernels.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn channels_last(self) -> Result<Self, String> {
        let shape = self.shape();
        let order: Vec<usize> = [0].into_iter().chain(2..shape.len()).chain([1]).collect();
        let back: Vec<usize> = [0, shape.len() - 1].into_iter().chain(1..shape.len() - 1).collect();
        let permuted = self.permute(&order);
        let own = permuted.shape();
        let dense = ops::contiguous(permuted.tensor::<4>()).map_err(|why| why.to_string())?;
        Ok(Self::from_tensor(dense).reshape(&own).permute(&back))
    }

    pub(crate) fn is_on_host(&self) -> bool {
        is_host(&self.device())
    }

    /// Returns true if the elements can be read without a copy from the device.
    pub(crate) fn is_known(&self) -> bool {
        self.known.is_some() || self.is_on_host()
    }

    /// Replaces the elements in place.
    ///
    /// # Errors
    /// The device failed, or our kernels do not run on it.
    pub(crate) fn overwrite(&self, data: TensorData) -> Result<(), String> {
        ops::overwrite(&self.tensor, data.convert_dtype(self.tensor.dtype()))
            .map_err(|why| why.to_string())
    }

    /// Copies the elements to other memory of the device.
    ///
    /// # Errors
    /// The device failed, or our kernels do not read this dtype.
    pub(crate) fn duplicate(&self, ctx: &Ctx) -> Result<Self, String> {
        let copy = Program { inputs: 1, steps: Vec::new() };
        let tensor =
            ops::pointwise(ctx, &copy, std::slice::from_ref(&self.tensor), self.tensor.dtype());
        Ok(Self::new(tensor.map_err(|why| why.to_string())?, self.is_scalar))
    }

    /// Replaces the elements in place by those of another array on the device.
    ///
    /// # Errors
    /// The device failed, or our kernels do not read this dtype.
    pub(crate) fn assign(&self, from: &Self, ctx: &Ctx) -> Result<(), String> {
        let copy = Program { inputs: 1, steps: Vec::new() };
        let made =
            ops::pointwise_into(ctx, &copy, std::slice::from_ref(&from.tensor), &self.tensor);
        made.map_err(|why| why.to_string())
    }

    /// Copies the elements to the host.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn to_data(&self) -> Result<TensorData, String> {
        if let Some(known) = &self.known {
            return Ok((**known).clone());
        }
        count_copy(&self.device());
        let tensor = self.tensor.clone();
        let read = match self.kind() {
            Kind::Float => burn::backend::read_sync(Dispatch::float_into_data(tensor)),
            Kind::Int => burn::backend::read_sync(Dispatch::int_into_data(tensor)),
            Kind::Bool => burn::backend::read_sync(Dispatch::bool_into_data(tensor)),
        };
        let mut data = read.map_err(|why| format!("{why:?}"))?;
        if self.kind() == Kind::Bool {
            data = data.convert_dtype(tensor::BOOL);
        }
        Ok(if self.is_scalar { reshaped(data, Vec::new()) } else { data })
    }

    /// Returns a tensor filled with a value.
    pub(crate) fn full(
        shape: &[usize],
        value: Scalar,
        dtype: DType,
        device: &DispatchDevice,
    ) -> Self {
        let lies = if shape.is_empty() { &[1][..] } else { shape };
        must_fit(lies, dtype, device);
        let lies = Shape::from(lies.to_vec());
        let tensor = match kind(dtype) {
            Kind::Float => Dispatch::float_full(lies, value, device, float_dtype(dtype)),
            Kind::Int => Dispatch::int_full(lies, value, device, int_dtype(dtype)),
            Kind::Bool => {
                let zeros = Dispatch::bool_zeros(lies, device, bool_dtype(device));
                let yes = matches!(value, Scalar::Bool(true));
                if yes { Dispatch::bool_not(zeros) } else { zeros }
            }
        };
        Self::new(tensor, shape.is_empty())
    }

    /// Returns 0, 1, … as i64.
    pub(crate) fn arange(to: usize, device: &DispatchDevice) -> Self {
        must_fit(&[to], DType::I64, device);
        Self::from_dispatch(Dispatch::int_arange(0..to as i64, device, IntDType::I64))
    }

    pub(crate) fn dtype(&self) -> DType {
        match self.tensor.dtype() {
            // Some operations of Burn return bools with the dtype of bytes.
            own if self.kind() == Kind::Bool && kind(own) != Kind::Bool => tensor::BOOL,
            own => own,
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match &self.tensor.kind {
            DispatchTensorKind::Flex(BackendTensor::Bool(_))
            | DispatchTensorKind::Cube(BackendTensor::Bool(_)) => Kind::Bool,
            _ => kind(self.tensor.dtype()),
        }
    }

    pub(crate) fn device(&self) -> DispatchDevice {
        self.tensor.device()
    }

    pub(crate) fn shape(&self) -> Vec<usize> {
        if self.is_scalar { Vec::new() } else { self.tensor.shape().to_vec() }
    }

    pub(crate) fn rank(&self) -> usize {
        if self.is_scalar { 0 } else { self.tensor.shape().rank() }
    }

    pub(crate) fn count(&self) -> usize {
        self.tensor.shape().num_elements()
    }

    /// Returns an f32 tensor of the host.
    pub(crate) fn host_floats(&self) -> Option<&FlexTensor> {
        match &self.tensor.kind {
            DispatchTensorKind::Flex(BackendTensor::Float(own)) if own.dtype() == DType::F32 => {
                Some(own)
            }
            _ => None,
        }
    }

    /// Returns Burn's tensor.
    pub(crate) fn into_inner(self) -> DispatchTensor {
        self.tensor
    }

    /// Returns the same elements in another shape.
    pub(crate) fn reshape(self, shape: &[usize]) -> Self {
        if self.shape() == shape {
            return self;
        }
        let lies = if shape.is_empty() { vec![1] } else { shape.to_vec() };
        if let Some(tensor) = ops::reshaped(&self.tensor, &lies) {
            return Self::new(tensor, shape.is_empty());
        }
        let lies = Shape::from(lies);
        let own = same!(self, float_reshape, int_reshape, bool_reshape, |tensor| (tensor, lies));
        Self::new(own.tensor, shape.is_empty())
    }

    /// Permutes the dimensions: dimension `at` of the result is `axes[at]`.
    pub(crate) fn permute(self, axes: &[usize]) -> Self {
        match self.is_scalar || axes.iter().copied().eq(0..axes.len()) {
            true => self,
            false => same!(self, float_permute, int_permute, bool_permute, |tensor| (tensor, axes)),
        }
    }

    /// Returns the dimensions in memory order, outermost first.
    pub(crate) fn order(&self) -> Vec<usize> {
        ops::order(&self.tensor).unwrap_or_else(|| (0..self.rank()).collect())
    }

    /// Broadcasts to a shape like NumPy.
    pub(crate) fn expand(self, shape: &[usize]) -> Self {
        if self.shape() == shape {
            return self;
        }
        let own = self.shape();
        let mut padded = vec![1; shape.len() - own.len()];
        padded.extend(own);
        let lies = Shape::from(shape.to_vec());
        let own = self.reshape(&padded);
        same!(own, float_expand, int_expand, bool_expand, |tensor| (tensor, lies))
    }

    /// Takes a range of each dimension.
    pub(crate) fn slice(self, ranges: &[Slice]) -> Self {
        if let Some(own) = self.part(ranges) {
            return own;
        }
        same!(self, float_slice, int_slice, bool_slice, |tensor| (tensor, ranges))
    }

    /// Takes a range of each dimension without a copy, if possible.
    fn part(&self, ranges: &[Slice]) -> Option<Self> {
        let mut tensor = self.tensor.clone();
        for (axis, (range, len)) in ranges.iter().zip(self.shape()).enumerate() {
            let own = (range.step == 1).then(|| range.to_range(len))?;
            if own != (0..len) {
                tensor = ops::narrowed(&tensor, axis, own.start, own.end)?;
            }
        }
        Some(Self::new(tensor, self.is_scalar))
    }

    /// Takes `from..to` of a dimension.
    pub(crate) fn narrow(self, axis: usize, from: usize, to: usize) -> Self {
        if let Some(tensor) = ops::narrowed(&self.tensor, axis, from, to) {
            return Self::from_dispatch(tensor);
        }
        let ranges: Vec<Slice> = self
            .shape()
            .iter()
            .enumerate()
            .map(|(at, len)| if at == axis { (from, to) } else { (0, *len) })
            .map(|(from, to)| Slice::new(from as isize, Some(to as isize), 1))
            .collect();
        self.slice(&ranges)
    }

    /// Concatenates tensors along a dimension.
    pub(crate) fn concat(all: Vec<Self>, axis: usize) -> Self {
        let all = Self::together(all);
        let own = all[0].kind();
        let all: Vec<_> = all.into_iter().map(Self::into_inner).collect();
        Self::from_dispatch(match own {
            Kind::Float => Dispatch::float_cat(all, axis),
            Kind::Int => Dispatch::int_cat(all, axis),
            Kind::Bool => Dispatch::bool_cat(all, axis),
        })
    }

    /// Reverses dimensions.
    pub(crate) fn flip(self, axes: &[usize]) -> Self {
        same!(self, float_flip, int_flip, bool_flip, |tensor| (tensor, axes))
    }

    /// Takes entries of a dimension, by indices of rank 1.
    pub(crate) fn select(self, axis: usize, indices: Self) -> Self {
        let [own, indices] = Self::together([self, indices]);
        own.select_here(axis, indices)
    }

    fn select_here(self, axis: usize, indices: Self) -> Self {
        let indices = indices.into_inner();
        same!(self, float_select, int_select, bool_select, |tensor| (tensor, axis, indices))
    }

    /// Takes an element for each index: `out[i][j][k] = self[index[i][j][k]][j][k]` for `axis` 0.
    pub(crate) fn gather(self, axis: usize, indices: Self) -> Self {
        let [own, indices] = Self::together([self, indices]);
        own.gather_here(axis, indices)
    }

    fn gather_here(self, axis: usize, indices: Self) -> Self {
        let indices = indices.into_inner();
        same!(self, float_gather, int_gather, bool_gather, |tensor| (axis, tensor, indices))
    }

    /// Replaces elements by those of `other` where the mask is true.
    pub(crate) fn replaced(self, mask: Self, other: Self) -> Self {
        let [own, mask, other] = Self::together([self, mask, other]);
        own.replaced_here(mask, other)
    }

    fn replaced_here(self, mask: Self, other: Self) -> Self {
        let (mask, other) = (mask.into_inner(), other.into_inner());
        same!(self, float_mask_where, int_mask_where, bool_mask_where, |tensor| (
            tensor, mask, other
        ))
    }

    /// Converts to another dtype: truncates to integers; 0 becomes false.
    pub(crate) fn cast(self, dtype: DType) -> Self {
        let (have, is_scalar, device) = (self.dtype(), self.is_scalar, self.device());
        if have == dtype || (kind(have), kind(dtype)) == (Kind::Bool, Kind::Bool) {
            return self;
        }
        let tensor = self.tensor;
        let stored = bool_dtype(&device);
        let tensor = match (kind(have), kind(dtype)) {
            (Kind::Float, Kind::Float) => Dispatch::float_cast(tensor, float_dtype(dtype)),
            (Kind::Float, Kind::Int) => Dispatch::float_into_int(tensor, int_dtype(dtype)),
            (Kind::Float, Kind::Bool) => {
                Dispatch::float_not_equal_elem(tensor, Scalar::Float(0.0), stored)
            }
            (Kind::Int, Kind::Float) => Dispatch::int_into_float(tensor, float_dtype(dtype)),
            (Kind::Int, Kind::Int) => Dispatch::int_cast(tensor, int_dtype(dtype)),
            (Kind::Int, Kind::Bool) => Dispatch::int_not_equal_elem(tensor, Scalar::Int(0), stored),
            (Kind::Bool, Kind::Float) => Dispatch::bool_into_float(tensor, float_dtype(dtype)),
            (Kind::Bool, Kind::Int) => Dispatch::bool_into_int(tensor, int_dtype(dtype)),
            (Kind::Bool, Kind::Bool) => tensor,
        };
        Self::new(tensor, is_scalar)
    }

    /// Returns the elements as i64.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn ints(&self) -> Result<Vec<i64>, String> {
        Ok(self.to_data()?.iter::<i64>().collect())
    }

    /// Returns the elements as lengths or counts.
    ///
    /// # Errors
    /// An element is negative.
    pub(crate) fn lengths(&self) -> Result<Vec<usize>, String> {
        let negative = |own: i64| format!("expected a length of 0 or more, got {own}");
        let each = |own: i64| usize::try_from(own).map_err(|_| negative(own));
        self.ints()?.into_iter().map(each).collect()
    }

    /// Returns the elements as f64.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn floats(&self) -> Result<Vec<f64>, String> {
        Ok(self.to_data()?.iter::<f64>().collect())
    }

    /// Moves tensors to one device: the host if it knows all of them.
    pub(crate) fn together<T: AsMut<[Self]>>(mut all: T) -> T {
        let each = all.as_mut();
        let away = |own: &Self| !is_host(&own.device());
        let (host, device) =
            (each.iter().find(|own| !away(own)), each.iter().find(|own| away(own)));
        if let (Some(host), Some(device)) = (host, device) {
            let known = each.iter().all(|own| !away(own) || own.known.is_some());
            let to = if known { host.device() } else { device.device() };
            each.iter_mut().for_each(|own| *own = own.clone().on(&to));
        }
        all
    }

    /// Moves to another device.
    pub(crate) fn on(self, device: &DispatchDevice) -> Self {
        if self.device() == *device {
            return self;
        }
        if let Some(known) = self.known.as_ref().filter(|_| is_host(device)) {
            return Self::from_data((**known).clone(), device);
        }
        // What was computed on the host is often the same in the next run.
        if self.is_on_host()
            && let Ok(data) = self.to_data()
        {
            return Self::from_data(data, device);
        }
        count_copy(&self.device());
        same!(self, float_to_device, int_to_device, bool_to_device, |tensor| (tensor, device))
    }
}

/// Returns the same elements in another shape.
fn reshaped(data: TensorData, shape: Vec<usize>) -> TensorData {
    let dtype = data.dtype();
    TensorData::from_bytes(data.into_bytes(), shape, dtype)
}

/// Returns the shape that shapes broadcast to, as in NumPy; None if they do not.
pub(crate) fn broadcast(shapes: &[Vec<usize>]) -> Option<Vec<usize>> {
    let rank = shapes.iter().map(Vec::len).max().unwrap_or(0);
    (0..rank)
        .map(|at| {
            let own = |own: &Vec<usize>| (at + own.len()).checked_sub(rank).map(|at| own[at]);
            shapes.iter().filter_map(own).try_fold(1, |have, own| match have {
                1 => Some(own),
                have if own == 1 || own == have => Some(have),
                _ => None,
            })
        })
        .collect()
}

/// Converts a dtype to Burn's float dtype.
pub(crate) fn float_dtype(dtype: DType) -> FloatDType {
    dtype.into()
}

/// Converts a dtype to Burn's integer dtype.
pub(crate) fn int_dtype(dtype: DType) -> IntDType {
    dtype.into()
}

/// Returns the dtype of bools on a device.
pub(crate) fn bool_dtype(device: &DispatchDevice) -> BoolDType {
    burn::backend::get_or_init_device_settings::<Dispatch>(device).bool_dtype
}

/// Arithmetic. Operands have one dtype, and broadcast.
impl Array {
    /// Pads two tensors to the same rank.
    fn aligned(self, other: Self) -> (DispatchTensor, DispatchTensor, bool) {
        let [one, other] = Self::together([self, other]);
        one.aligned_here(other)
    }

    fn aligned_here(self, other: Self) -> (DispatchTensor, DispatchTensor, bool) {
        let is_scalar = self.is_scalar && other.is_scalar;
        let rank = self.rank().max(other.rank()).max(1);
        let padded = |own: Self| {
            let shape = own.shape();
            match shape.len() == rank {
                true => own.tensor,
                false => {
                    let ones = std::iter::repeat_n(1, rank - shape.len());
                    own.reshape(&ones.chain(shape).collect::<Vec<_>>()).tensor
                }
            }
        };
        (padded(self), padded(other), is_scalar)
    }

    /// Applies a binary operation on numbers.
    pub(crate) fn numbers(
        self,
        other: Self,
        float: fn(DispatchTensor, DispatchTensor) -> DispatchTensor,
        int: fn(DispatchTensor, DispatchTensor) -> DispatchTensor,
    ) -> Self {
        let own = self.kind();
        let (lhs, rhs, is_scalar) = self.aligned(other);
        let tensor = if own == Kind::Float { float(lhs, rhs) } else { int(lhs, rhs) };
        Self::new(tensor, is_scalar)
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        self.numbers(other, Dispatch::float_add, Dispatch::int_add)
    }

    pub(crate) fn minus(self, other: Self) -> Self {
        self.numbers(other, Dispatch::float_sub, Dispatch::int_sub)
    }

    pub(crate) fn times(self, other: Self) -> Self {
        self.numbers(other, Dispatch::float_mul, Dispatch::int_mul)
    }

    /// Divides; integer division truncates.
    pub(crate) fn over(self, other: Self) -> Self {
        self.numbers(other, Dispatch::float_div, Dispatch::int_div)
    }

    /// Applies a binary operation with a scalar.
    fn with(
        self,
        value: f64,
        float: fn(DispatchTensor, Scalar) -> DispatchTensor,
        int: fn(DispatchTensor, Scalar) -> DispatchTensor,
    ) -> Self {
        let is_scalar = self.is_scalar;
        let tensor = match self.kind() {
            Kind::Float => float(self.tensor, Scalar::Float(value)),
            _ => int(self.tensor, Scalar::Int(value as i64)),
        };
        Self::new(tensor, is_scalar)
    }

    pub(crate) fn plus_number(self, value: f64) -> Self {
        self.with(value, Dispatch::float_add_scalar, Dispatch::int_add_scalar)
    }

    pub(crate) fn times_number(self, value: f64) -> Self {
        self.with(value, Dispatch::float_mul_scalar, Dispatch::int_mul_scalar)
    }

    pub(crate) fn at_least(self, value: f64) -> Self {
        self.with(value, Dispatch::float_clamp_min, Dispatch::int_clamp_min)
    }

    pub(crate) fn at_most(self, value: f64) -> Self {
        self.with(value, Dispatch::float_clamp_max, Dispatch::int_clamp_max)
    }

    /// Applies a function of floats.
    pub(crate) fn float(self, run: fn(DispatchTensor) -> DispatchTensor) -> Self {
        Self::new(run(self.tensor), self.is_scalar)
    }

    /// Compares two tensors elementwise.
    pub(crate) fn compared(self, other: Self, by: Order) -> Self {
        let (own, stored) = (self.kind(), bool_dtype(&self.device()));
        let (lhs, rhs, is_scalar) = self.aligned(other);
        let tensor = match (own, by) {
            (Kind::Bool, Order::Equal) => Dispatch::bool_equal(lhs, rhs),
            // false is less than true.
            (Kind::Bool, Order::Greater) => Dispatch::bool_and(lhs, Dispatch::bool_not(rhs)),
            (Kind::Bool, Order::GreaterOrEqual) => Dispatch::bool_or(lhs, Dispatch::bool_not(rhs)),
            (Kind::Float, Order::Equal) => Dispatch::float_equal(lhs, rhs, stored),
            (Kind::Float, Order::Greater) => Dispatch::float_greater(lhs, rhs, stored),
            (Kind::Float, Order::GreaterOrEqual) => Dispatch::float_greater_equal(lhs, rhs, stored),
            (Kind::Int, Order::Equal) => Dispatch::int_equal(lhs, rhs, stored),
            (Kind::Int, Order::Greater) => Dispatch::int_greater(lhs, rhs, stored),
            (Kind::Int, Order::GreaterOrEqual) => Dispatch::int_greater_equal(lhs, rhs, stored),
        };
        Self::new(tensor, is_scalar)
    }

    /// Returns true for elements greater than a number.
    pub(crate) fn above(self, value: f64) -> Self {
        let other = Self::full(&[], scalar_of(value, self.dtype()), self.dtype(), &self.device());
        self.compared(other, Order::Greater)
    }

    /// Applies a binary operation on bools.
    pub(crate) fn bools(
        self,
        other: Self,
        run: fn(DispatchTensor, DispatchTensor) -> DispatchTensor,
    ) -> Self {
        let (lhs, rhs, is_scalar) = self.aligned(other);
        Self::new(run(lhs, rhs), is_scalar)
    }

    pub(crate) fn not(self) -> Self {
        Self::new(Dispatch::bool_not(self.tensor), self.is_scalar)
    }

    /// Selects `yes` where this is true, and `no` otherwise; all broadcast.
    ///
    /// # Errors
    /// The shapes do not broadcast.
    pub(crate) fn choose(self, yes: Self, no: Self) -> Result<Self, String> {
        let shapes = [self.shape(), yes.shape(), no.shape()];
        let shape = broadcast(&shapes).ok_or_else(|| format!("{shapes:?} do not broadcast"))?;
        let [mask, yes, no] = [self, yes, no].map(|own| own.expand(&shape));
        Ok(no.replaced(mask, yes))
    }
}

/// Comparison of two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Equal,
    Greater,
    GreaterOrEqual,
}

/// Returns a number as a scalar of a dtype.
pub(crate) fn scalar_of(value: f64, dtype: DType) -> Scalar {
    match kind(dtype) {
        Kind::Float => Scalar::Float(value),
        Kind::Int => Scalar::Int(value as i64),
        Kind::Bool => Scalar::Bool(value != 0.0),
    }
}
