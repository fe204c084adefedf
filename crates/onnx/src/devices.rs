//! Devices of a model, and the constants that lie on them.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn::backend::{Backend, Dispatch, DispatchDevice, FlexDevice};
use burn::tensor::{DType, TensorData};
use burn_cubecl::CubeDevice;
use ops::Ctx;

use crate::array::{Array, scalar_of};
use crate::ops::Packed;
use crate::ops::fused::PADDED_CHANNELS;
use crate::tensor::Constant;

/// Most elements of a constant that is no weight, but a factor, a mask or a limit.
const SMALL: usize = 4096;

/// Device of a model, and what all of its runs share.
pub(crate) struct Devices {
    /// Device of results.
    pub(crate) device: DispatchDevice,
    /// Host memory, for shapes.
    pub(crate) host: DispatchDevice,
    /// Context of our kernels.
    pub(crate) ctx: Ctx,
    /// True to keep constants, for other graphs of the model.
    keeps: bool,
    /// Constants on the device. All graphs of a model share them.
    constants: Mutex<HashMap<Key, (Constant, Array)>>,
    /// Matrices of few bits, by their numbers, their part and the type of the products.
    packed: Mutex<HashMap<(i64, usize, DType), Packed>>,
}

/// A constant as it lies on the device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    /// Address of its bytes, which the map keeps alive.
    address: usize,
    shape: Vec<usize>,
    dtype: DType,
    layout: Layout,
}

/// Order of the elements of a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    Dense,
    /// The second dimension is the last one in memory, as convolutions read their filters.
    ChannelsLast,
    /// As [`Layout::ChannelsLast`], with zeros as further channels.
    PaddedChannels,
}

/// Returns the device of host memory: Burn's own CPU backend.
pub(crate) const fn host() -> DispatchDevice {
    DispatchDevice::Flex(FlexDevice)
}

/// Returns true if our kernels run on a device.
pub(crate) const fn has_kernels(device: &DispatchDevice) -> bool {
    matches!(device, DispatchDevice::Cube(_))
}

/// Returns filters `[filters, channels, …]` with zeros as further channels, [`PADDED_CHANNELS`] in all.
fn pad_channels(filters: Array) -> Array {
    let (mut shape, dtype) = (filters.shape(), filters.dtype());
    shape[1] = PADDED_CHANNELS - shape[1];
    let zeros = Array::full(&shape, scalar_of(0.0, dtype), dtype, &filters.device());
    Array::concat(vec![filters, zeros], 1)
}

impl Devices {
    pub(crate) fn new(device: DispatchDevice, ctx: Ctx) -> Self {
        let (constants, packed) = (Mutex::default(), Mutex::default());
        Self { device, host: host(), ctx, keeps: true, constants, packed }
    }

    /// Returns host memory only. All models share it.
    pub(crate) fn host() -> Arc<Self> {
        static HOST: LazyLock<Arc<Devices>> = LazyLock::new(|| {
            Arc::new(Devices { keeps: false, ..Devices::new(host(), Ctx::default()) })
        });
        HOST.clone()
    }

    /// Returns true if our kernels run on the device.
    pub(crate) const fn has_kernels(&self) -> bool {
        has_kernels(&self.device)
    }

    /// Returns true if the device computes with a type. SPIR-V has no exponential and no sine of f64, and a shader with one ends the
    /// device.
    pub(crate) fn has(&self, dtype: DType) -> bool {
        let spirv = matches!(self.device, DispatchDevice::Cube(CubeDevice::Wgpu(_)));
        !(spirv && dtype == DType::F64) && Dispatch::supports_dtype(&self.device, dtype)
    }

    /// Returns a matrix of few bits, which is made once.
    ///
    /// # Errors
    /// Those of `make`.
    pub(crate) fn packed(
        &self,
        key: (i64, usize, DType),
        make: impl FnOnce() -> Result<Packed, String>,
    ) -> Result<Packed, String> {
        let mut packed = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = packed.get(&key) {
            return Ok(own.clone());
        }
        let own = make()?;
        if self.keeps {
            packed.insert(key, own.clone());
        }
        Ok(own)
    }

    /// Returns a constant as elements of a type, on the device.
    ///
    /// # Errors
    /// The device failed.
    pub(crate) fn constant(
        &self,
        constant: &Constant,
        dtype: DType,
        layout: Layout,
    ) -> Result<Array, String> {
        let shape = constant.shape.clone();
        let key = Key { address: constant.bytes().as_ptr().addr(), shape, dtype, layout };
        let mut constants = self.constants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, array)) = constants.get(&key) {
            return Ok(array.clone());
        }
        let mut data = constant.data();
        if dtype == DType::F16 && data.dtype() == DType::F32 && constant.count() <= SMALL {
            // Large numbers that stand for infinity stay numbers: 0 · ∞ would be none.
            let most = f32::from(half::f16::MAX);
            let near = |own: f32| if own.is_finite() { own.clamp(-most, most) } else { own };
            data = TensorData::new(data.iter::<f32>().map(near).collect(), constant.shape.clone());
        }
        // Places and lengths are read on the host.
        let known = constant.count() <= SMALL || !dtype.is_float();
        let array = match known && data.dtype() == dtype {
            true => Array::from_constant(data, &self.device),
            false => Array::from_data(data, &self.device).cast(dtype),
        };
        let array = match layout {
            Layout::Dense => array,
            Layout::ChannelsLast => array.channels_last()?,
            Layout::PaddedChannels => pad_channels(array).channels_last()?,
        };
        if self.keeps {
            constants.insert(key, (constant.clone(), array.clone()));
        }
        Ok(array)
    }
}

impl fmt::Debug for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.device)
    }
}
