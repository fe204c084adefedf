//! The forward pass without a device: what it computes and what memory it needs, layer by layer.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use ops::{Activation, Lifetime};

use super::config::UnetConfig;
use super::forward::{
    Columns, ConvWith, Forward, GroupNormWith, Image, Inputs, LinearWith, Machine,
};
use super::modules::{Conv, Linear, Modules, Norm, Part};
use crate::Error;

/// Work and memory of a layer, or of a whole forward pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerPlan {
    /// Name of the layer in the checkpoint.
    pub name: String,
    /// Values of its weights.
    pub parameters: u128,
    /// Floating-point operations; a multiply-add counts as two.
    pub flops: u128,
    /// Values of the largest set of activations that live at once.
    pub peak: u128,
    /// Kernel launches, without split-k reductions.
    pub launches: usize,
}

/// A forward pass.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnetPlan {
    /// Layers in the order of the forward pass.
    pub layers: Vec<LayerPlan>,
    /// Values of the inputs.
    pub inputs: u128,
    /// Results of ops in values, in the order of the forward pass.
    pub(super) results: Vec<Lifetime>,
}

impl UnetPlan {
    /// Counts a forward pass of `batch` samples of `size`, with a text of `tokens`.
    ///
    /// # Errors
    /// [`Error::SampleSize`] for a size that the levels do not divide; [`Error::FrameSize`] for a frame without samples, or with more
    /// pixels or tokens than 32 bits count.
    pub fn new(
        config: &UnetConfig,
        batch: usize,
        size: [usize; 2],
        tokens: usize,
    ) -> Result<Self, Error> {
        config.check_size(size)?;
        let each = |sizes: &[usize]| {
            sizes.iter().fold(batch as u64, |all, size| all.saturating_mul(*size as u64))
        };
        for (what, have) in
            [("samples", each(&[])), ("pixels", each(&size)), ("tokens", each(&[tokens.max(1)]))]
        {
            if !(1..=u64::from(u32::MAX)).contains(&have) {
                return Err(Error::FrameSize { what, have });
            }
        }
        let modules = Modules::build(config, &mut |part: &Part| Ok(part.parameters() as u128))?;
        let machine = Counter { batch, state: Rc::default() };
        let width = |columns: usize, rows: usize| machine.input(rows, columns);
        let inputs = Inputs {
            sample: Image {
                rows: width(config.in_channels, batch * size[0] * size[1]),
                size,
                channels: config.in_channels,
            },
            time: width(config.time.channels, batch),
            classes: config.classes.map(|_| width(config.time.channels, batch)),
            text_time: config.text_time.map(|own| width(own.width, batch)),
            text: config.cross.map(|own| width(own, batch * tokens)),
        };
        let forward = Forward { machine: &machine, modules: &modules, config };
        drop(forward.run(inputs)?);
        Ok(machine.state.take().plan)
    }

    /// Values of all weights.
    pub fn parameters(&self) -> u128 {
        self.layers.iter().map(|layer| layer.parameters).sum()
    }

    /// Floating-point operations.
    pub fn flops(&self) -> u128 {
        self.layers.iter().map(|layer| layer.flops).sum()
    }

    /// Values of the largest set of activations that live at once.
    pub fn peak(&self) -> u128 {
        self.layers.iter().map(|layer| layer.peak).max().unwrap_or(0)
    }

    /// Returns the bytes of the memory that all results of ops share, for values of `size` bytes.
    pub fn activation_bytes(&self, size: usize) -> u128 {
        ops::places(&self.results(size)).1
    }

    /// Returns the results of ops in bytes.
    pub(super) fn results(&self, size: usize) -> Vec<Lifetime> {
        let bytes = |own: &Lifetime| Lifetime { size: own.size * size as u128, ..*own };
        self.results.iter().map(bytes).collect()
    }

    /// Kernel launches, without split-k reductions.
    pub fn launches(&self) -> usize {
        self.layers.iter().map(|layer| layer.launches).sum()
    }
}

impl UnetConfig {
    /// Checks that the levels divide a sample.
    pub(crate) fn check_size(&self, size: [usize; 2]) -> Result<(), Error> {
        let multiple = self.multiple();
        match size.iter().all(|size| *size > 0 && size % multiple == 0) {
            true => Ok(()),
            false => Err(Error::SampleSize { size, multiple }),
        }
    }
}

/// A machine that counts.
struct Counter {
    batch: usize,
    state: Rc<RefCell<State>>,
}

#[derive(Default)]
struct State {
    plan: UnetPlan,
    live: u128,
}

/// A matrix without values.
#[derive(Clone)]
struct Counted(Rc<Matrix>);

struct Matrix {
    rows: usize,
    columns: usize,
    memory: Memory,
    state: Rc<RefCell<State>>,
}

enum Memory {
    Input,
    /// A result of this index.
    Result(usize),
    /// Memory of another matrix.
    Shared {
        #[expect(dead_code, reason = "keeps it alive")]
        of: Counted,
    },
}

impl Matrix {
    fn values(&self) -> u128 {
        self.rows as u128 * self.columns as u128
    }
}

impl Drop for Matrix {
    fn drop(&mut self) {
        let mut state = self.state.borrow_mut();
        match self.memory {
            Memory::Shared { .. } => return,
            Memory::Input => {}
            Memory::Result(at) => state.plan.results[at].to = state.plan.results.len(),
        }
        state.live -= self.values();
    }
}

impl Counter {
    fn input(&self, rows: usize, columns: usize) -> Counted {
        let values = rows as u128 * columns as u128;
        self.state.borrow_mut().plan.inputs += values;
        self.matrix(rows, columns, Memory::Input)
    }

    fn made(&self, rows: usize, columns: usize) -> Counted {
        let size = rows as u128 * columns as u128;
        let mut state = self.state.borrow_mut();
        let at = state.plan.results.len();
        state.plan.results.push(Lifetime { size, from: at, to: usize::MAX });
        drop(state);
        self.matrix(rows, columns, Memory::Result(at))
    }

    fn matrix(&self, rows: usize, columns: usize, memory: Memory) -> Counted {
        let matrix = Matrix { rows, columns, memory, state: self.state.clone() };
        let mut state = self.state.borrow_mut();
        state.live += matrix.values();
        let live = state.live;
        if let Some(layer) = state.plan.layers.last_mut() {
            layer.peak = layer.peak.max(live);
        }
        drop(state);
        Counted(Rc::new(matrix))
    }

    /// Counts launches with these weights and flops.
    fn count(&self, launches: usize, parameters: u128, flops: u128) {
        if let Some(layer) = self.state.borrow_mut().plan.layers.last_mut() {
            layer.launches += launches;
            layer.parameters += parameters;
            layer.flops += flops;
        }
    }

    /// Counts a matmul `[m, k] · [k, n]` and returns its result.
    fn product(&self, m: usize, n: usize, k: usize, parameters: u128) -> Counted {
        self.count(1, parameters, 2 * m as u128 * n as u128 * k as u128);
        self.made(m, n)
    }

    fn image(&self, size: [usize; 2], channels: usize) -> Image<Counted> {
        let [height, width] = size;
        Image { rows: self.made(self.batch * height * width, channels), size, channels }
    }
}

impl Machine for Counter {
    type Weight = u128;
    type Value = Counted;

    fn layer<T>(&self, name: &str, run: impl FnOnce() -> T) -> T {
        let mut state = self.state.borrow_mut();
        let peak = state.live;
        state.plan.layers.push(LayerPlan { name: name.to_owned(), peak, ..LayerPlan::default() });
        drop(state);
        run()
    }

    fn conv(
        &self,
        x: &Image<Counted>,
        _second: Option<&Image<Counted>>,
        conv: &Conv<u128>,
        with: ConvWith<Counted>,
    ) -> Result<Image<Counted>, Error> {
        let [filters, channels, rows, cols] = conv.shape;
        let size = with.size(x.size, [rows, cols]);
        let m = self.batch * size[0] * size[1];
        let parameters = conv.weight + conv.bias.unwrap_or(0);
        let rows = self.product(m, filters, channels * rows * cols, parameters);
        Ok(Image { rows, size, channels: filters })
    }

    fn group_norm(
        &self,
        x: &Image<Counted>,
        second: Option<&Image<Counted>>,
        norm: &Norm<u128>,
        _with: GroupNormWith<Counted>,
    ) -> Result<Image<Counted>, Error> {
        let channels = x.channels + second.map_or(0, |second| second.channels);
        let values = self.batch as u128 * x.size[0] as u128 * x.size[1] as u128 * channels as u128;
        self.count(1, norm.weight + norm.bias, 8 * values);
        Ok(self.image(x.size, channels))
    }

    fn layer_norm(&self, rows: &Counted, norm: &Norm<u128>) -> Result<Counted, Error> {
        self.count(1, norm.weight + norm.bias, 6 * rows.0.values());
        Ok(self.made(rows.0.rows, rows.0.columns))
    }

    fn linear(
        &self,
        rows: &Counted,
        linear: &Linear<u128>,
        _with: LinearWith<Counted>,
    ) -> Result<Counted, Error> {
        let [n, k] = linear.shape;
        let parameters = linear.weight + linear.bias.unwrap_or(0);
        Ok(self.product(rows.0.rows, n, k, parameters))
    }

    fn attend(&self, qkv: [Columns<'_, Counted>; 3], _heads: usize) -> Result<Counted, Error> {
        let [q, k, _] = qkv;
        let keys = k.of.0.rows / self.batch;
        self.count(1, 0, 4 * q.of.0.rows as u128 * keys as u128 * q.count as u128);
        Ok(self.made(q.of.0.rows, q.count))
    }

    fn columns(&self, rows: &Counted, columns: Range<usize>) -> Result<Counted, Error> {
        let (memory, state) = (Memory::Shared { of: rows.clone() }, self.state.clone());
        let matrix = Matrix { rows: rows.0.rows, columns: columns.len(), memory, state };
        Ok(Counted(Rc::new(matrix)))
    }

    fn activate(&self, rows: Counted, _activation: Activation) -> Result<Counted, Error> {
        self.count(1, 0, 4 * rows.0.values());
        Ok(self.made(rows.0.rows, rows.0.columns))
    }

    fn add(&self, a: Counted, _b: Counted) -> Result<Counted, Error> {
        self.count(1, 0, a.0.values());
        Ok(self.made(a.0.rows, a.0.columns))
    }

    fn lookup(&self, table: &u128, width: usize, _rows: &Counted) -> Result<Counted, Error> {
        self.count(1, *table, 0);
        Ok(self.made(self.batch, width))
    }

    fn centered(&self, x: Image<Counted>) -> Result<Image<Counted>, Error> {
        self.count(2, 0, 2 * x.rows.0.values());
        Ok(self.image(x.size, x.channels))
    }

    fn doubled(&self, x: &Image<Counted>) -> Result<Image<Counted>, Error> {
        self.count(1, 0, 0);
        Ok(self.image(x.size.map(|size| 2 * size), x.channels))
    }

    fn halved(&self, x: &Image<Counted>) -> Result<Image<Counted>, Error> {
        self.count(1, 0, x.rows.0.values());
        Ok(self.image(x.size.map(|size| size / 2), x.channels))
    }
}
