//! Matrices that wait for their use, on the device or in host memory.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use ops::OpError;
use ops::training::{HostBuffer, Link, Transfer, load, save};

use crate::Error;

/// Host memory for matrices that wait for their use; without a link they stay on the device. It keeps the memory for later steps.
pub struct Parking {
    link: Option<Arc<Link>>,
    device: Device,
    free: RefCell<Vec<HostBuffer>>,
    /// The last copy to the host, and the number of its matrix.
    saving: RefCell<Option<(usize, Transfer)>>,
    count: Cell<usize>,
}

/// A matrix that waits.
pub(super) struct Parked {
    tensor: Option<Tensor<2>>,
    host: Option<Copied>,
    loading: Option<(Tensor<2>, Transfer)>,
}

/// A matrix in host memory.
struct Copied {
    number: usize,
    buffer: HostBuffer,
    shape: [usize; 2],
    dtype: DType,
}

impl Parking {
    /// Creates a parking without memory.
    pub fn new(link: Option<Arc<Link>>, device: &Device) -> Self {
        Self {
            link,
            device: device.clone(),
            free: RefCell::default(),
            saving: RefCell::default(),
            count: Cell::default(),
        }
    }

    /// Begins to copy a matrix to the host, after all earlier launches. With `soon` the device's copy serves the next use.
    pub(super) fn park(&self, tensor: Tensor<2>, soon: bool) -> Result<Parked, Error> {
        let Some(link) = &self.link else {
            return Ok(Parked { tensor: Some(tensor), host: None, loading: None });
        };
        let (shape, dtype) = (tensor.dims(), tensor.dtype());
        let bytes = shape[0] * shape[1] * dtype.size();
        let mut free = self.free.borrow_mut();
        let mut buffer = match free.iter().position(|own| own.len() >= bytes) {
            Some(at) => free.swap_remove(at),
            None => {
                // Those that are too small would never be used again.
                free.clear();
                HostBuffer::zeros(link, bytes).map_err(OpError::from)?
            }
        };
        // One copy at a time, so that matrices that are copied hold little of the device.
        self.wait(None)?;
        let number = self.count.get();
        self.count.set(number + 1);
        let saving = save(link, &tensor, &mut buffer, 0)?;
        self.saving.replace(Some((number, saving)));
        let host = Some(Copied { number, buffer, shape, dtype });
        Ok(Parked { tensor: soon.then_some(tensor), host, loading: None })
    }

    /// Waits until a matrix is on the host, or all are.
    fn wait(&self, number: Option<usize>) -> Result<(), Error> {
        let mut saving = self.saving.borrow_mut();
        if number.is_none_or(|own| saving.as_ref().is_some_and(|(last, _)| *last == own))
            && let Some((_, saving)) = saving.take()
        {
            saving.wait().map_err(OpError::from)?;
        }
        Ok(())
    }

    /// Begins to copy a matrix back, if the device does not have it.
    pub(super) fn fetch(&self, parked: &mut Parked) -> Result<(), Error> {
        let (Some(link), Some(host)) = (&self.link, &mut parked.host) else { return Ok(()) };
        if parked.tensor.is_some() || parked.loading.is_some() {
            return Ok(());
        }
        self.wait(Some(host.number))?;
        let tensor = Tensor::<2>::empty(host.shape, (&self.device, host.dtype));
        let loading = load(link, &mut host.buffer, 0, &tensor)?;
        parked.loading = Some((tensor, loading));
        Ok(())
    }

    /// Returns a matrix, and waits for it if it is copied back. The host's copy stays.
    pub(super) fn tensor(&self, parked: &mut Parked) -> Result<Tensor<2>, Error> {
        self.fetch(parked)?;
        if let Some((tensor, loading)) = parked.loading.take() {
            loading.wait().map_err(OpError::from)?;
            return Ok(tensor);
        }
        let kept = match &parked.host {
            Some(_) => parked.tensor.take(),
            None => parked.tensor.clone(),
        };
        Ok(kept.expect("it is on the device, or on the host"))
    }

    /// Returns a matrix for the last time, and keeps its host memory for others.
    pub(super) fn take(&self, mut parked: Parked) -> Result<Tensor<2>, Error> {
        let tensor = self.tensor(&mut parked)?;
        self.release(parked)?;
        Ok(tensor)
    }

    /// Keeps the host memory of a matrix for others.
    pub(super) fn release(&self, parked: Parked) -> Result<(), Error> {
        if let Some((_, loading)) = parked.loading {
            loading.wait().map_err(OpError::from)?;
        }
        if let Some(host) = parked.host {
            self.wait(Some(host.number))?;
            self.free.borrow_mut().push(host.buffer);
        }
        Ok(())
    }
}
