//! Steps over state in host memory.
//!
//! ```text
//! for each chunk of a group:  gradient, moments, master weights to the device     while the chunk before is updated
//!                             adamw                                              the same kernel, the same bits
//!                             moments, master weights back                        while the next chunk is updated
//! ```
//!
//! The floor of a step is its bytes over the bus, in the direction with more of them. There are two sets of buffers on the device.

use std::sync::Arc;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use ops::Ctx;
use ops::training::{
    AdamWState, BLOCK, BlockScales, HostBuffer, Link, Moments, Scalars, Transfer, adamw, load,
    save, signed_map, unsigned_map,
};

use super::{OwnGroup, upload};
use crate::decoder::{Gradients, zeros};
use crate::{Error, Parameters};

/// Most elements of a chunk: 32 MiB of values in f32.
const CHUNK: usize = 1 << 23;

/// Returns the elements of a chunk of a group: copies overlap only if it has several.
fn chunk_of(len: usize) -> usize {
    CHUNK.min(len.div_ceil(4).next_multiple_of(BLOCK as usize))
}

/// State of a group in host memory, laid out as on the device.
pub(super) struct HostState {
    len: usize,
    moments: Moments,
    m: HostBuffer,
    v: HostBuffer,
    /// Largest magnitudes of blocks of m, then of v.
    absmax: Option<HostBuffer>,
    /// Exact weights in f32.
    master: Option<HostBuffer>,
}

/// Returns the bytes of `len` moments, and the dtype of their words.
const fn words(moments: Moments, len: usize) -> (usize, FloatDType) {
    match moments {
        Moments::F32 => (4 * len, FloatDType::F32),
        Moments::Bf16 => (2 * len, FloatDType::BF16),
        Moments::Int8 => (len, FloatDType::F32),
    }
}

impl HostState {
    /// Creates moments of 0 for `len` values.
    pub(super) fn zeros(
        link: &Link,
        moments: Moments,
        len: usize,
        master: Option<HostBuffer>,
    ) -> Result<Self, Error> {
        let zeros = |bytes| HostBuffer::zeros(link, bytes).map_err(ops::OpError::from);
        let (bytes, _) = words(moments, len);
        let absmax = (moments == Moments::Int8).then(|| zeros(8 * len / BLOCK as usize));
        let absmax = absmax.transpose()?;
        Ok(Self { len, moments, m: zeros(bytes)?, v: zeros(bytes)?, absmax, master })
    }

    /// Returns all buffers with their names.
    pub(super) fn buffers(
        &mut self,
    ) -> impl Iterator<Item = (&'static str, &mut HostBuffer, DType)> {
        let dtype = words(self.moments, 1).1.into();
        let f32 = |name| move |buffer| (name, buffer, DType::F32);
        [("m", &mut self.m, dtype), ("v", &mut self.v, dtype)]
            .into_iter()
            .chain(self.absmax.as_mut().map(f32("absmax")))
            .chain(self.master.as_mut().map(f32("master")))
    }
}

/// Returns the bytes of buffers on the device for chunks of the largest group. `offloaded` says that gradients are on the host too.
pub(crate) fn staging_bytes(
    parameters: &Parameters,
    moments: Moments,
    master: bool,
    offloaded: bool,
) -> u128 {
    let moved = parameters.groups().iter().filter(|(group, _)| group.on_host());
    let largest = moved.map(|(_, range)| range.len()).max().unwrap_or(0);
    // Embeddings have moments in f32 next to those in 8 bits.
    let moment = if moments == Moments::Bf16 { 4 } else { 8 };
    let others = u128::from(master) + u128::from(offloaded);
    let value = moment + 4 * others;
    2 * (chunk_of(largest) as u128) * value
}

/// Buffers on the device for two chunks.
pub(super) struct Staging {
    link: Arc<Link>,
    sets: [Set; 2],
    /// Copies to the host of the last chunk of each set.
    saving: [Vec<Transfer>; 2],
    maps: Tensor<1>,
}

/// Buffers of a chunk.
struct Set {
    m: Tensor<1>,
    v: Tensor<1>,
    absmax: Tensor<1>,
    master: Option<Tensor<1>>,
    gradient: Option<Tensor<1>>,
}

/// A range of a group's values.
#[derive(Clone, Copy)]
struct Chunk {
    from: usize,
    len: usize,
}

impl Staging {
    /// Allocates buffers for the largest group, with places for gradients if those are `offloaded` too.
    pub(super) fn new(
        link: &Arc<Link>,
        groups: &[OwnGroup],
        offloaded: bool,
        device: &Device,
    ) -> Self {
        let states = || groups.iter().filter_map(OwnGroup::host);
        let chunk = states().map(|own| chunk_of(own.len)).max().unwrap_or(0);
        let narrow = states().any(|own| own.moments == Moments::Bf16);
        let moment = if narrow { FloatDType::BF16 } else { FloatDType::F32 };
        let f32 = |len| zeros(len, FloatDType::F32, device);
        let set = || Set {
            m: zeros(chunk, moment, device),
            v: zeros(chunk, moment, device),
            absmax: f32(2 * chunk / BLOCK as usize),
            master: states().any(|own| own.master.is_some()).then(|| f32(chunk)),
            gradient: offloaded.then(|| f32(chunk)),
        };
        let maps = upload([signed_map(), unsigned_map()].concat(), device);
        Self { link: link.clone(), sets: [set(), set()], saving: [Vec::new(), Vec::new()], maps }
    }

    /// Updates the values of a group, whose weights begin at `start` of all.
    pub(super) fn step(
        &mut self,
        ctx: &Ctx,
        gradients: &Gradients,
        (weights, start): (&Tensor<1>, usize),
        state: &mut HostState,
        control: &Tensor<1>,
        scalars: Scalars,
    ) -> Result<(), Error> {
        let most = chunk_of(state.len);
        let starts = (0..state.len).step_by(most);
        let chunks: Vec<_> =
            starts.map(|from| Chunk { from, len: most.min(state.len - from) }).collect();
        let mut loading = self.load(0, chunks[0], state, gradients, start)?;
        for (index, chunk) in chunks.iter().enumerate() {
            wait(loading)?;
            loading = match chunks.get(index + 1) {
                Some(next) => self.load((index + 1) % 2, *next, state, gradients, start)?,
                None => Vec::new(),
            };
            let set = &self.sets[index % 2];
            let place = start + chunk.from..start + chunk.from + chunk.len;
            let gradient = match &set.gradient {
                Some(gradient) => ops::view(gradient, 0, [chunk.len])?,
                None => gradients.on_device(&place)?.expect("they are not offloaded"),
            };
            let weights = ops::view(weights, chunk.from, [chunk.len])?;
            let own = set.state(weights, state, *chunk, &self.maps)?;
            adamw(ctx, &gradient, &own, control, Scalars { first: chunk.from as u32, ..scalars })?;
            let mut saving = Vec::new();
            set.copies(state, *chunk, |host, at, tensor| {
                saving.push(save(&self.link, tensor, host, at)?);
                Ok(())
            })?;
            self.saving[index % 2] = saving;
        }
        // The next group takes the sets from the start.
        self.saving.iter_mut().try_for_each(|saving| wait(std::mem::take(saving)))
    }

    /// Begins to copy a chunk into a set, once its last one is on the host.
    fn load(
        &mut self,
        at: usize,
        chunk: Chunk,
        state: &mut HostState,
        gradients: &Gradients,
        start: usize,
    ) -> Result<Vec<Transfer>, Error> {
        wait(std::mem::take(&mut self.saving[at]))?;
        let set = &self.sets[at];
        let mut loading = Vec::new();
        set.copies(state, chunk, |host, at, tensor| {
            loading.push(load(&self.link, host, at, tensor)?);
            Ok(())
        })?;
        if let Some(gradient) = &set.gradient {
            let gradient = ops::view(gradient, 0, [chunk.len])?;
            loading.push(gradients.load(start + chunk.from, &gradient)?);
        }
        Ok(loading)
    }
}

fn wait(transfers: Vec<Transfer>) -> Result<(), Error> {
    transfers.into_iter().try_for_each(|own| Ok(own.wait().map_err(ops::OpError::from)?))
}

impl Set {
    /// Calls `copy` with the place on the host and the tensor on the device of each part of a chunk.
    fn copies(
        &self,
        state: &mut HostState,
        Chunk { from, len }: Chunk,
        mut copy: impl FnMut(&mut HostBuffer, usize, &Tensor<1>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (before, dtype) = words(state.moments, from);
        let (bytes, _) = words(state.moments, len);
        let count = bytes / DType::from(dtype).size();
        copy(&mut state.m, before, &ops::view(&self.m, 0, [count])?)?;
        copy(&mut state.v, before, &ops::view(&self.v, 0, [count])?)?;
        if let Some(absmax) = &mut state.absmax {
            let block = BLOCK as usize;
            for row in 0..2 {
                let own = ops::view(&self.absmax, row * len / block, [len / block])?;
                copy(absmax, 4 * (row * state.len + from) / block, &own)?;
            }
        }
        if let (Some(host), Some(master)) = (&mut state.master, &self.master) {
            copy(host, 4 * from, &ops::view(master, 0, [len])?)?;
        }
        Ok(())
    }

    /// Returns the state of a chunk for the kernel.
    fn state(
        &self,
        weights: Tensor<1>,
        state: &HostState,
        Chunk { len, .. }: Chunk,
        maps: &Tensor<1>,
    ) -> Result<AdamWState, Error> {
        let (bytes, dtype) = words(state.moments, len);
        let count = bytes / DType::from(dtype).size();
        let scales = || {
            let absmax = ops::view(&self.absmax, 0, [2, len / BLOCK as usize])?;
            Ok::<_, Error>(BlockScales { absmax, maps: maps.clone() })
        };
        let master = self.master.as_ref().filter(|_| state.master.is_some());
        Ok(AdamWState {
            weights,
            master: master.map(|own| ops::view(own, 0, [len])).transpose()?,
            m: ops::view(&self.m, 0, [count])?,
            v: ops::view(&self.v, 0, [count])?,
            scales: state.absmax.is_some().then(scales).transpose()?,
        })
    }
}
