//! Devices of a model, and the constants on them.

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

/// Maximum elements of a constant that is a factor, mask or limit, not a weight.
const SMALL: usize = 4096;

/// Devices of a model, and the state that its runs share.
pub(crate) struct Devices {
    /// Device of the results.
    pub(crate) device: DispatchDevice,
    /// Host device, for shapes.
    pub(crate) host: DispatchDevice,
    /// Context of our kernels.
    pub(crate) ctx: Ctx,
    /// True to cache constants for other graphs of the model.
    keeps: bool,
    /// Constants on the device, shared by all graphs of the model.
    constants: Mutex<HashMap<Key, (Constant, Array)>>,
    /// Quantised weights, by number, part and dtype of the matmul.
    packed: Mutex<HashMap<(i64, usize, DType), Packed>>,
}

/// Key of a constant on the device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    /// Address of its bytes, which the map keeps alive.
    address: usize,
    shape: Vec<usize>,
    dtype: DType,
    layout: Layout,
}

/// Memory layout of a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Layout {
    Dense,
    /// The second dimension is innermost, as convolutions read filters.
    ChannelsLast,
    /// [`Layout::ChannelsLast`], with channels padded by zeros.
    PaddedChannels,
}

/// Returns the host device: Burn's own CPU backend.
pub(crate) const fn host() -> DispatchDevice {
    DispatchDevice::Flex(FlexDevice)
}

/// Returns true if our kernels run on a device.
pub(crate) const fn has_kernels(device: &DispatchDevice) -> bool {
    matches!(device, DispatchDevice::Cube(_))
}

/// Pads filters `[filters, channels, …]` with zeros to [`PADDED_CHANNELS`] channels.
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

    /// Returns the host device only, shared by all models.
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

    /// Returns true if the device supports a dtype. SPIR-V has no exp and sin in f64, and a shader
    /// that uses them loses the device.
    pub(crate) fn has(&self, dtype: DType) -> bool {
        let spirv = matches!(self.device, DispatchDevice::Cube(CubeDevice::Wgpu(_)));
        !(spirv && dtype == DType::F64) && Dispatch::supports_dtype(&self.device, dtype)
    }

    /// Returns a quantised weight, which is created once.
    ///
    /// # Errors
    /// The errors of `make`.
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

    /// Returns a constant on the device, with a dtype and layout.
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
            // Large finite numbers stay finite: 0 · ∞ would be NaN.
            let most = f32::from(half::f16::MAX);
            let near = |own: f32| if own.is_finite() { own.clamp(-most, most) } else { own };
            data = TensorData::new(data.iter::<f32>().map(near).collect(), constant.shape.clone());
        }
        // Indices and lengths are read on the host.
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
