//! Frames of one shape: captured once, then replayed with new inputs.

use std::fmt;
use std::thread::{self, ThreadId};

use burn::tensor::{DType, Graph, Tensor};
use ops::{Ctx, Placed};

use super::config::Classes;
use super::forward::{Forward, Image, Inputs};
use super::{Unet, UnetPlan};
use crate::Error;

/// Shape of all frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnetShape {
    /// Samples of a frame.
    pub batch: usize,
    /// Height and width of a sample.
    pub size: [usize; 2],
    /// Tokens of the text; 0 without one.
    pub tokens: usize,
}

/// Inputs of a frame next to its samples.
#[derive(Debug, Clone, Copy, Default)]
pub struct Condition<'a> {
    /// Timestep of each sample; one for all.
    pub timesteps: &'a [f32],
    /// Features of the text, `[batch, tokens, width]`.
    pub text: Option<&'a [f32]>,
    /// Class of each sample, or one for all. If the classes are embedded like timesteps, any number.
    pub classes: Option<&'a [f32]>,
    /// Pooled features of the text, `[batch, width]`.
    pub pooled_text: Option<&'a [f32]>,
    /// Six sizes of each sample: original height and width, top and left of the crop, target height and width.
    pub sizes: Option<&'a [f32]>,
}

/// Device buffer of an input, and a host copy of its values.
#[derive(Debug)]
struct Input {
    tensor: Tensor<2>,
    values: Vec<f32>,
}

impl Input {
    fn new(tensor: Tensor<2>) -> Self {
        Self { tensor, values: Vec::new() }
    }

    /// Writes values, unless the input has them: most frames have the text of the one before.
    fn set(&mut self, values: &[f32]) -> Result<(), Error> {
        if !same_bits(&self.values, values) {
            self.values.clear();
            ops::update_floats(&self.tensor, values)?;
            self.values.extend_from_slice(values);
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.tensor.dims().iter().product()
    }
}

/// Returns true if two slices have the same bits. It branches once per 256 values, so that the compiler uses vector instructions.
fn same_bits(a: &[f32], b: &[f32]) -> bool {
    let differ = |(a, b): (&[f32], &[f32])| {
        a.iter().zip(b).fold(0, |bits, (a, b)| bits | (a.to_bits() ^ b.to_bits())) != 0
    };
    a.len() == b.len() && !a.chunks(256).zip(b.chunks(256)).any(differ)
}

type Run = Box<dyn FnMut() -> Result<Tensor<2>, Error> + Send>;

/// Frames of one shape. The second one is captured, if the device can; all later ones are replayed.
pub struct Frames {
    unet: Unet,
    shape: UnetShape,
    inputs: Inputs<Input>,
    plan: UnetPlan,
    /// Memory of the results, for the thread that computes the first frame.
    placed: Option<(ThreadId, Option<Placed>)>,
    by: By,
}

#[expect(clippy::large_enum_variant, reason = "a model has one")]
enum By {
    /// Launched kernel by kernel; counts the frames so far.
    Launches(usize),
    Graph {
        graph: Graph<Result<Tensor<2>, Error>, Run>,
        thread: ThreadId,
    },
}

/// Frames before a capture: the first one compiles kernels, and tunes them if the policy says so.
const EAGER: usize = 1;

impl Frames {
    /// Allocates the inputs of frames.
    ///
    /// # Errors
    /// The errors of [`UnetPlan::new`]; [`Error::NoInput`] and [`Error::Unread`] for a text of no tokens that the model reads, or of
    /// some that it does not.
    pub fn new(unet: &Unet, shape: UnetShape) -> Result<Self, Error> {
        let (config, UnetShape { batch, size, tokens }) = (unet.config(), shape);
        let plan = UnetPlan::new(config, batch, size, tokens)?;
        match config.cross {
            Some(_) if tokens == 0 => return Err(Error::NoInput("a text")),
            None if tokens > 0 => return Err(Error::Unread("a text")),
            _ => {}
        }
        let _stream_guard = ops::stream_guard();
        let made = |rows: usize, columns: usize, dtype: DType| {
            let device = &unet.device;
            device.memory_persistent_allocations((), move |()| {
                // One dimension, because Burn pads the rows of a 2-D tensor.
                Tensor::<1>::zeros([rows * columns], (device, dtype)).reshape([rows, columns])
            })
        };
        let made = |rows, columns, dtype| Input::new(made(rows, columns, dtype));
        let own = DType::from(unet.dtype);
        let inputs = Inputs {
            sample: Image {
                rows: made(batch * size[0] * size[1], config.in_channels, own),
                size,
                channels: config.in_channels,
            },
            time: made(batch, config.time.channels, own),
            classes: config.classes.map(|classes| match classes {
                Classes::Table(_) => made(batch, 1, DType::F32),
                Classes::Timestep => made(batch, config.time.channels, own),
            }),
            text_time: config.text_time.map(|text_time| made(batch, text_time.width, own)),
            text: config.cross.map(|width| made(batch * tokens, width, own)),
        };
        let (unet, by) = (unet.clone(), By::Launches(0));
        Ok(Self { unet, shape, inputs, plan, placed: None, by })
    }

    /// Returns the shape of all frames.
    pub const fn shape(&self) -> UnetShape {
        self.shape
    }

    /// Returns the model.
    pub const fn unet(&self) -> &Unet {
        &self.unet
    }

    /// Returns true if frames are replayed from a graph.
    pub fn captured(&self) -> bool {
        matches!(&self.by, By::Graph { graph, .. } if graph.is_hardware())
    }

    /// Writes the samples of the next frame, `[batch, channels, height, width]`, and its condition. Work that this thread enqueued
    /// before does not see them.
    ///
    /// # Errors
    /// [`Error::UnetInput`] for the wrong number of values; [`Error::NoInput`] and [`Error::Unread`] for an input that the model reads
    /// and is missing, or does not read; [`Error::Class`].
    pub fn refresh(&mut self, samples: &[f32], condition: &Condition<'_>) -> Result<(), Error> {
        let (config, batch) = (&self.unet.config, self.shape.batch);
        let (inputs, channels) = (&mut self.inputs, config.in_channels);
        let pixels = self.shape.size[0] * self.shape.size[1];
        expect("sample values", samples.len(), batch * channels * pixels)?;
        // Samples differ from frame to frame.
        ops::update_floats(&inputs.sample.rows.tensor, &channels_last(samples, channels, pixels))?;
        let each = |what, values: &[f32]| match values {
            [one] => Ok(vec![*one; batch]),
            _ => expect(what, values.len(), batch).map(|()| values.to_vec()),
        };
        let waves = |numbers: &[f32]| {
            let own = |number: &f32| config.time.waves.of(*number, config.time.channels);
            numbers.iter().flat_map(own).collect::<Vec<_>>()
        };
        let timesteps = each("timesteps", condition.timesteps)?;
        inputs.time.set(&waves(&timesteps))?;
        match (&mut inputs.classes, condition.classes) {
            (None, None) => {}
            (Some(buffer), Some(classes)) => {
                let classes = each("classes", classes)?;
                let values = match config.classes {
                    Some(Classes::Table(count)) => {
                        let known = |class: &&f32| {
                            class.fract() == 0.0 && (0.0..count as f32).contains(*class)
                        };
                        if let Some(class) = classes.iter().find(|class| !known(class)) {
                            return Err(Error::Class { class: *class, count });
                        }
                        classes
                    }
                    _ => waves(&classes),
                };
                buffer.set(&values)?;
            }
            (buffer, _) => return Err(unread("classes", buffer.is_some())),
        }
        match (&mut inputs.text, condition.text) {
            (None, None) => {}
            (Some(buffer), Some(text)) => {
                expect("text features", text.len(), buffer.len())?;
                buffer.set(text)?;
            }
            (buffer, _) => return Err(unread("text features", buffer.is_some())),
        }
        match (&mut inputs.text_time, condition.pooled_text, condition.sizes) {
            (None, None, None) => Ok(()),
            (Some(buffer), Some(pooled), Some(sizes)) => {
                let own = config.text_time.expect("its buffer is there");
                let width = own.width - 6 * own.channels;
                expect("pooled text features", pooled.len(), batch * width)?;
                expect("sizes", sizes.len(), 6 * batch)?;
                let rows = pooled.chunks(width).zip(sizes.chunks(6)).flat_map(|(pooled, sizes)| {
                    let sizes =
                        sizes.iter().flat_map(|size| config.time.waves.of(*size, own.channels));
                    pooled.iter().copied().chain(sizes)
                });
                buffer.set(&rows.collect::<Vec<_>>())
            }
            (buffer, _, _) => Err(unread("pooled text features and sizes", buffer.is_some())),
        }
    }

    /// Computes the frame of the inputs. The result is `[batch · height · width, channels]`, in memory that the next frame
    /// overwrites.
    ///
    /// # Errors
    /// [`Error::Op`] for an op that the device cannot run; [`Error::Failed`].
    pub fn run(&mut self) -> Result<Tensor<2>, Error> {
        if self.placed.is_none() {
            self.placed = Some((thread::current().id(), self.placed()?));
        }
        // Another thread allocates its results: its kernels could overwrite memory that the first thread still reads.
        let own = self.placed.as_ref().filter(|(thread, _)| *thread == thread::current().id());
        let places = own.and_then(|(_, placed)| placed.clone());
        // A trace cannot see the kernels of a replay.
        let seen = trace::timed();
        let inputs = || self.inputs.map(|input| input.tensor.clone());
        let launches = match &mut self.by {
            By::Launches(launches) => launches,
            By::Graph { thread, .. } if seen || *thread != thread::current().id() => {
                return self.unet.forward(
                    &self.unet.ctx,
                    inputs(),
                    self.shape.batch,
                    places.as_ref(),
                );
            }
            By::Graph { graph, .. } => {
                // SAFETY: the graph's closure holds clones of everything that it reads and writes. Weights are never written; the
                // inputs belong to these frames, which `&mut` lets one thread use at a time. The graph was captured on the stream
                // of this thread, and its result is read on it before the next frame, as this function says.
                return read(unsafe { graph.replay() });
            }
        };
        if seen || !ops::captures(&self.unet.device) || *launches < EAGER {
            *launches += 1;
            return self.unet.forward(&self.unet.ctx, inputs(), self.shape.batch, places.as_ref());
        }
        let (unet, inputs, batch) = (self.unet.clone(), inputs(), self.shape.batch);
        let run: Run =
            Box::new(move || unet.forward(&unet.ctx, inputs.clone(), batch, places.as_ref()));
        let mut graph = ops::capture_alone(&self.unet.device, run);
        if !graph.is_hardware() {
            log::warn!("a frame could not be captured; its kernels are launched one by one");
        }
        // SAFETY: as above. Capturing records the kernels and does not run them.
        let result = read(unsafe { graph.replay() })?;
        self.by = By::Graph { graph, thread: thread::current().id() };
        Ok(result)
    }

    /// Allocates the memory of the results, and compiles the kernels of a frame.
    fn placed(&self) -> Result<Option<Placed>, Error> {
        let (unet, size) = (&self.unet, DType::from(self.unet.dtype).size());
        let results = self.plan.results(size);
        let each: Vec<usize> = (0..results.len()).collect();
        let mut placed = Placed::new(&results, &each, &unet.device)?;
        // Collects the kernels of a frame without running them.
        let (ctx, inputs) = (unet.ctx.rehearsal(), self.inputs.map(|input| input.tensor.clone()));
        unet.forward(&ctx, inputs, self.shape.batch, placed.as_ref())?;
        let rehearsed = ctx.rehearsed();
        if let Some(placed) = &mut placed {
            placed.set_workspace(rehearsed.workspace(), &unet.device);
        }
        if Ctx::precompiles(&unet.device) {
            rehearsed.compile(); // On many cores.
        }
        Ok(placed)
    }

    /// Returns what a frame computes.
    pub const fn plan(&self) -> &UnetPlan {
        &self.plan
    }

    /// Computes a frame and returns its result, `[batch, channels, height, width]`.
    ///
    /// # Errors
    /// The errors of [`Frames::refresh`] and [`Frames::run`]; [`Error::NotFiniteResult`].
    pub fn frame(&mut self, samples: &[f32], condition: &Condition<'_>) -> Result<Vec<f32>, Error> {
        let _stream_guard = ops::stream_guard();
        self.refresh(samples, condition)?;
        let rows = self.run()?;
        let values = self.values(rows)?;
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => Err(Error::NotFiniteResult),
        }
    }

    /// Reads the result of a frame, `[batch, channels, height, width]`.
    ///
    /// # Errors
    /// [`Error::Failed`].
    pub fn values(&self, rows: Tensor<2>) -> Result<Vec<f32>, Error> {
        let failed = |why: String| Error::Failed(why);
        let data = rows.try_into_data().map_err(|why| failed(format!("{why:?}")))?;
        let values = data.convert::<f32>().try_to_vec::<f32>();
        let values = values.map_err(|why| failed(format!("{why:?}")))?;
        let pixels = self.shape.size[0] * self.shape.size[1];
        Ok(channels_first(&values, self.unet.config.out_channels, pixels))
    }
}

/// Ending a graph waits for its stream.
impl Drop for Frames {
    fn drop(&mut self) {
        let _stream_guard = ops::stream_guard();
        self.by = By::Launches(0);
    }
}

impl fmt::Debug for Frames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frames").field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl Unet {
    /// Computes a frame, launched kernel by kernel.
    fn forward(
        &self,
        ctx: &Ctx,
        inputs: Inputs<Tensor<2>>,
        batch: usize,
        placed: Option<&Placed>,
    ) -> Result<Tensor<2>, Error> {
        let machine = self.machine(ctx, batch, placed.map(Placed::pass).transpose()?);
        let (modules, config) = (&*self.modules, &self.config);
        Ok(Forward { machine: &machine, modules, config }.run(inputs)?.rows)
    }
}

fn read(result: &Result<Tensor<2>, Error>) -> Result<Tensor<2>, Error> {
    match result {
        Ok(result) => Ok(result.clone()),
        Err(why) => Err(Error::Failed(why.to_string())),
    }
}

fn expect(what: &'static str, have: usize, need: usize) -> Result<(), Error> {
    if have == need { Ok(()) } else { Err(Error::UnetInput { what, have, need }) }
}

/// Returns the error for an input that is missing, or that the model does not read.
const fn unread(what: &'static str, read: bool) -> Error {
    if read { Error::NoInput(what) } else { Error::Unread(what) }
}

/// Reorders `[batch, channels, pixels]` to `[batch, pixels, channels]`.
fn channels_last(values: &[f32], channels: usize, pixels: usize) -> Vec<f32> {
    let mut out = vec![0.0; values.len()];
    let samples = values.chunks(channels * pixels).zip(out.chunks_mut(channels * pixels));
    for (from, to) in samples {
        for (c, plane) in from.chunks(pixels).enumerate() {
            for (value, own) in to[c..].iter_mut().step_by(channels).zip(plane) {
                *value = *own;
            }
        }
    }
    out
}

/// Reorders `[batch, pixels, channels]` to `[batch, channels, pixels]`.
fn channels_first(values: &[f32], channels: usize, pixels: usize) -> Vec<f32> {
    channels_last(values, pixels, channels)
}
