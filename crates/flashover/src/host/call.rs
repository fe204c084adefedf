//! Copies host tensors to a device and back.

use arch::{Backend, DType};
use burn::tensor::{DType as BurnDType, Tensor, TensorData};
use ops::{Ctx, OpError};
use tune::Policy;

use super::error::HostOpError;
use super::tensor::HostTensor;
use crate::context::{context, log_warnings, on_burn};
use crate::device::Device;

/// One call of an op whose operands share a dtype. Dropping it logs the warnings of the tune cache.
pub(super) struct Call {
    pub(super) ctx: Ctx,
    device: burn::tensor::Device,
    dtype: DType,
}

impl Call {
    /// Returns a call with operands of `dtype`. `needs` holds the name and the bytes of each tensor that the call
    /// allocates.
    ///
    /// # Errors
    /// [`HostOpError::Memory`] before anything is allocated; [`HostOpError::Cache`] if the tune cache cannot be read.
    pub(super) fn new(
        device: &Device,
        policy: Policy,
        dtype: DType,
        needs: &[(&'static str, u128)],
    ) -> Result<Self, HostOpError> {
        check_memory(device, needs)?;
        Ok(Self { ctx: context(device, policy)?, device: on_burn(device), dtype })
    }

    /// Uploads `bytes` as a dense tensor.
    pub(super) fn upload<const D: usize>(&self, bytes: Vec<u8>, shape: [usize; D]) -> Tensor<D> {
        let (len, dtype) = (bytes.len() / self.dtype.size(), on_burn_dtype(self.dtype));
        // Burn's `reshape` reads a 0 as "keep this axis".
        if len == 0 {
            return Tensor::zeros(shape, (&self.device, dtype));
        }
        // CUDA pads the rows of a tensor that is created with several axes.
        let data = TensorData::from_bytes_vec(bytes, [len], dtype);
        Tensor::<1>::from_data(data, (&self.device, dtype)).reshape(shape)
    }

    /// Downloads the values of a result as a tensor of `shape`.
    pub(super) fn download<const D: usize>(
        &self,
        result: Tensor<D>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<HostTensor, HostOpError> {
        let data = result.try_into_data().map_err(|e| HostOpError::Failed(format!("{e:?}")))?;
        Ok(HostTensor::new(dtype, shape, data.as_bytes().to_vec())?)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        log_warnings(&self.ctx);
    }
}

/// Returns an error unless all tensors have the same float dtype.
pub(super) fn check_dtypes(
    first: &HostTensor,
    others: &[(&'static str, Option<&HostTensor>)],
) -> Result<(), OpError> {
    let need = on_burn_dtype(first.dtype());
    for (what, tensor) in others {
        let have = tensor.map_or(need, |tensor| on_burn_dtype(tensor.dtype()));
        if have != need {
            return Err(OpError::DType { what, have, need });
        }
    }
    match need.is_float() {
        true => Ok(()),
        false => Err(OpError::NotFloat(need)),
    }
}

const fn on_burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F32 | DType::Tf32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::Bf16 => BurnDType::BF16,
        DType::I8 => BurnDType::I8,
        DType::U8 => BurnDType::U8,
        DType::I32 => BurnDType::I32,
        DType::F64 => BurnDType::F64,
        DType::I64 => BurnDType::I64,
        DType::U64 => BurnDType::U64,
        DType::U32 => BurnDType::U32,
        DType::I16 => BurnDType::I16,
        DType::U16 => BurnDType::U16,
        // Burn lacks these types and does not read the bytes as floats.
        DType::Bool | DType::F8E4m3 | DType::F8E5m2 | DType::F8E8m0 => BurnDType::U8,
    }
}

/// Refuses tensors that exceed the device's memory, before any copy or allocation.
fn check_memory(device: &Device, needs: &[(&'static str, u128)]) -> Result<(), HostOpError> {
    let have = device.client().properties().memory.max_page_size;
    if let Some(&(what, need)) = needs.iter().find(|(_, need)| *need > have.into()) {
        return Err(HostOpError::Memory { what, need, have, at_once: true });
    }
    // On a CPU, the host's two copies (one to read, one to hand over) take memory of the same device.
    let times = if device.backend() == Backend::Cpu { 3 } else { 1 };
    let need = times * needs.iter().map(|(_, need)| need).sum::<u128>();
    match device.profile().memory_bytes.filter(|have| need > (*have).into()) {
        Some(have) => {
            Err(HostOpError::Memory { what: "the whole operation", need, have, at_once: false })
        }
        None => Ok(()),
    }
}
