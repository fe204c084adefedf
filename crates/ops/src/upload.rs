//! Upload of a file's tensors to a device, without a copy of the file in memory.

use burn::backend::autodiff::checkpoint::strategy::CheckpointStrategy;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, AutodiffBackend, Backend, Dispatch, backend_extension};
use burn::tensor::{AllocationProperty, Bytes, DType, Device, Int, Tensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use crate::OpError;
use crate::call::on_cubecl;

/// Bytes of one copy. Each copy passes through page-locked memory, which this size keeps small.
const PIECE: usize = 32 << 20;

/// Uploads the bytes of a mapped file as a tensor. Bytes are read as they are sent: at most two pieces of 32
/// MiB of the file are in memory at once. The tensor may be used immediately.
///
/// # Shapes
/// `file` holds little-endian values of `dtype`, row-major, one per element of `shape`.
///
/// # Errors
/// [`OpError::Shape`] for another number of bytes; [`OpError::Device`] for a device without kernels.
pub fn upload<const D: usize>(
    file: impl AsRef<[u8]> + Send + 'static,
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Result<Tensor<D>, OpError> {
    on_cubecl(device)?;
    let (have, need) = (file.as_ref().len(), shape.iter().product::<usize>() * dtype.size());
    if have != need {
        return Err(OpError::Shape { what: "bytes", have: vec![have], need: vec![need] });
    }
    let bytes = bytes::Bytes::from_owner(file);
    let out = device.memory_persistent_allocations(shape, |shape| {
        Tensor::<D>::empty(shape, (device, dtype)).into_dispatch()
    });
    let shared = Shared(bytes);
    Ok(Tensor::from_dispatch(<Dispatch as UploadOps>::upload(out, shared)))
}

/// Uploads the bytes of a mapped file as words, like [`upload`]. Their number must be a multiple of four.
pub(crate) fn upload_int32(
    file: impl AsRef<[u8]> + Send + 'static,
    device: &Device,
) -> Tensor<1, Int> {
    let bytes = bytes::Bytes::from_owner(file);
    let words = Tensor::<1, Int>::empty([bytes.len() / 4], (device, DType::I32)).into_dispatch();
    Tensor::from_dispatch(<Dispatch as UploadOps>::upload_int32(words, Shared(bytes)))
}

/// Shared bytes of a file.
#[derive(Clone)]
pub(crate) struct Shared(bytes::Bytes);

#[backend_extension(Cube, Autodiff)]
pub(crate) trait UploadOps: Backend {
    /// Writes `file` to a tensor of the same number of bytes.
    fn upload(tensor: FloatTensor<Self>, file: Shared) -> FloatTensor<Self>;

    /// Does the same for integers.
    fn upload_int32(tensor: IntTensor<Self>, file: Shared) -> IntTensor<Self>;
}

impl UploadOps for CubeBackend {
    fn upload(tensor: CubeTensor, file: Shared) -> CubeTensor {
        let Shared(bytes) = file;
        let piece = |range| Bytes::from_shared(bytes.slice(range), AllocationProperty::File);
        if !tensor.is_contiguous() {
            // The device pads rows: a single copy handles the padding.
            let (shape, size) = (tensor.meta.shape().clone(), tensor.dtype.size());
            let made = tensor.client.create_tensor(piece(0..bytes.len()), shape, size);
            return CubeTensor { handle: made.memory, ..tensor };
        }
        for from in (0..bytes.len()).step_by(PIECE) {
            let to = (from + PIECE).min(bytes.len());
            let after = (tensor.handle.size_in_used() as usize).saturating_sub(to);
            let part = tensor.handle.clone().offset_start(from as u64).offset_end(after as u64);
            tensor.client.write(&part, piece(from..to));
        }
        tensor
    }

    fn upload_int32(tensor: CubeTensor, file: Shared) -> CubeTensor {
        Self::upload(tensor, file)
    }
}

impl<B: UploadOps, C: CheckpointStrategy> UploadOps for Autodiff<B, C> {
    fn upload(tensor: FloatTensor<Self>, file: Shared) -> FloatTensor<Self> {
        Self::from_inner(B::upload(Self::inner(tensor), file))
    }

    fn upload_int32(tensor: IntTensor<Self>, file: Shared) -> IntTensor<Self> {
        B::upload_int32(tensor, file)
    }
}
