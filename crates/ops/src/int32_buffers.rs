//! Buffers of quantised weights as integer tensors of 32-bit words, whatever their contents.

use burn::module::Param;
use burn::tensor::{Device, Int, Shape, Tensor, TensorData};
use burn_cubecl::tensor::CubeTensor;
use cubecl::server::Handle;

use crate::OpError;

/// Uploads bytes as whole words; the last word is padded with zeros.
pub(crate) fn upload(bytes: &[u8], device: &Device) -> Tensor<1, Int> {
    let mut words = bytes.to_vec();
    words.resize(bytes.len().next_multiple_of(4), 0);
    let (len, word) = (words.len() / 4, burn::tensor::DType::I32);
    Tensor::from_data(TensorData::from_bytes_vec(words, [len], word), (device, word))
}

/// Reads the words of a tensor.
pub(crate) fn int32_values(tensor: Tensor<1, Int>) -> Result<Vec<i32>, OpError> {
    let data = tensor.into_data();
    data.try_to_vec::<i32>().map_err(|e| OpError::Device(format!("{e:?}")))
}

/// Reads the bytes of a parameter's words.
pub(crate) fn download(param: &Param<Tensor<1, Int>>) -> Result<Vec<u8>, OpError> {
    Ok(int32_values(param.val())?.into_iter().flat_map(i32::to_le_bytes).collect())
}

/// Wraps a buffer of `words` words as a tensor on the device of `like`.
pub(crate) fn int32_tensor(handle: Handle, words: u64, like: &CubeTensor) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    let shape = Shape::new([words as usize]);
    CubeTensor::new_contiguous(client, device, shape, handle, burn::tensor::DType::I32)
}
