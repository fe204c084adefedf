//! The forward pass of a U-Net, for any machine.
//!
//! ```text
//! t = act(embedding(waves(timestep)) + embedding(class) + embedding(text, sizes))        [batch, hidden]
//! x = conv_in(sample)                                    skips: x, and the result of each layer and resampling on the way down
//! residual block:   h = conv1(act(norm1(x))) + bias + times(t)
//!                   x = (shortcut(x) + conv2(act(norm2(h)))) / divisor
//! pixels:           x = (x + out(attention(qkv(norm(x))))) / divisor
//! transformer:      x = x + after(blocks(before(norm(x))))
//!   block:          y = y + out1(attention(qkv(norm1(y))))
//!                   y = y + out2(attention(q(norm2(y)), texts(text)))
//!                   n = norm3(y);  y = y + down(up(n) · gelu(gate(n)))
//! up:               each residual block reads x and a skip, the last one first
//! result = conv_out(act(norm_out(x)))
//! ```
//!
//! Sums, biases, activations and gates are in the epilogues of matmuls and convolutions. A skip is the second input of norms and
//! convolutions: nothing is joined. `times` and `texts` are one matmul each, for all blocks.

use std::ops::Range;

use ops::Activation;

use super::config::UnetConfig;
use super::modules::{
    Attends, ClassEmbedding, Conv, Embedding, Linear, Modules, Norm, PixelAttention, Resampler,
    Residual, Stage, Transformer, TransformerBlock,
};
use crate::Error;

/// Images, with their channels last.
#[derive(Debug, Clone)]
pub(crate) struct Image<V> {
    /// `[batch · height · width, channels]`
    pub(crate) rows: V,
    pub(crate) size: [usize; 2],
    pub(crate) channels: usize,
}

/// Parts of a convolution, apart from its weights and inputs.
#[derive(Debug)]
pub(crate) struct ConvWith<V> {
    pub(crate) stride: usize,
    /// Zeros before and after the image, on both axes.
    pub(crate) padding: [i32; 2],
    /// True to read each pixel as a square of four.
    pub(crate) doubled: bool,
    /// Bias of each image, next to that of the weights.
    pub(crate) image_bias: Option<V>,
    pub(crate) residual: Option<V>,
    pub(crate) divisor: f32,
}

impl<V> ConvWith<V> {
    /// Returns height and width of the result.
    pub(crate) fn size(&self, image: [usize; 2], taps: [usize; 2]) -> [usize; 2] {
        let more = self.padding.iter().sum::<i32>() as usize;
        [0, 1].map(|axis| {
            let size = if self.doubled { 2 * image[axis] } else { image[axis] };
            (size + more - taps[axis]) / self.stride + 1
        })
    }

    /// A convolution that keeps the size of an image, for an odd number of taps.
    pub(crate) fn same(taps: usize) -> Self {
        let side = (taps / 2) as i32;
        Self {
            stride: 1,
            padding: [side; 2],
            doubled: false,
            image_bias: None,
            residual: None,
            divisor: 1.0,
        }
    }
}

/// Parts of a group norm, apart from its weights and inputs.
#[derive(Debug)]
pub(crate) struct GroupNormWith<V> {
    pub(crate) groups: usize,
    pub(crate) eps: f32,
    pub(crate) activation: Option<Activation>,
    /// Scale, then shift: `[batch, 2 · channels]`.
    pub(crate) modulation: Option<V>,
}

/// Parts of a linear layer, apart from its weights and input.
#[derive(Debug)]
pub(crate) struct LinearWith<V> {
    pub(crate) activation: Option<Activation>,
    pub(crate) gate: Option<V>,
    pub(crate) residual: Option<V>,
    pub(crate) divisor: f32,
}

impl<V> Default for LinearWith<V> {
    fn default() -> Self {
        Self { activation: None, gate: None, residual: None, divisor: 1.0 }
    }
}

/// Some columns of a matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Columns<'a, V> {
    pub(crate) of: &'a V,
    pub(crate) first: usize,
    pub(crate) count: usize,
}

/// Ops that a forward pass consists of. A device runs them, a plan counts them.
pub(crate) trait Machine {
    type Weight;
    /// A matrix. Clones share its memory.
    type Value: Clone;

    /// Marks the ops of `run` as those of a layer.
    fn layer<T>(&self, name: &str, run: impl FnOnce() -> T) -> T;

    /// `(residual + x ∗ weight + bias) / divisor`; channels of `second` follow those of `x`.
    fn conv(
        &self,
        x: &Image<Self::Value>,
        second: Option<&Image<Self::Value>>,
        conv: &Conv<Self::Weight>,
        with: ConvWith<Self::Value>,
    ) -> Result<Image<Self::Value>, Error>;

    fn group_norm(
        &self,
        x: &Image<Self::Value>,
        second: Option<&Image<Self::Value>>,
        norm: &Norm<Self::Weight>,
        with: GroupNormWith<Self::Value>,
    ) -> Result<Image<Self::Value>, Error>;

    /// A norm of each row.
    fn layer_norm(
        &self,
        rows: &Self::Value,
        norm: &Norm<Self::Weight>,
    ) -> Result<Self::Value, Error>;

    /// `(residual + gate · activation(rows · weightᵀ + bias)) / divisor`.
    fn linear(
        &self,
        rows: &Self::Value,
        linear: &Linear<Self::Weight>,
        with: LinearWith<Self::Value>,
    ) -> Result<Self::Value, Error>;

    /// Attention of `heads` heads, of the images or texts of a batch. Their queries, keys and values are rows.
    fn attend(
        &self,
        qkv: [Columns<'_, Self::Value>; 3],
        heads: usize,
    ) -> Result<Self::Value, Error>;

    /// Returns columns of a matrix as a matrix.
    fn columns(&self, rows: &Self::Value, columns: Range<usize>) -> Result<Self::Value, Error>;

    fn activate(&self, rows: Self::Value, activation: Activation) -> Result<Self::Value, Error>;

    fn add(&self, a: Self::Value, b: Self::Value) -> Result<Self::Value, Error>;

    /// Returns rows of a table `[_, width]`; the indices are the first column of `rows`.
    fn lookup(
        &self,
        table: &Self::Weight,
        width: usize,
        rows: &Self::Value,
    ) -> Result<Self::Value, Error>;

    /// `2 · x - 1`.
    fn centered(&self, x: Image<Self::Value>) -> Result<Image<Self::Value>, Error>;

    /// Doubles an image by repeating its pixels.
    fn doubled(&self, x: &Image<Self::Value>) -> Result<Image<Self::Value>, Error>;

    /// Halves an image by the means of squares of four pixels.
    fn halved(&self, x: &Image<Self::Value>) -> Result<Image<Self::Value>, Error>;
}

/// Inputs of a forward pass.
#[derive(Debug, Clone)]
pub(crate) struct Inputs<V> {
    pub(crate) sample: Image<V>,
    /// Waves of the timesteps, `[batch, channels]`.
    pub(crate) time: V,
    /// Classes `[batch, 1]`, or the waves of numbers `[batch, channels]`.
    pub(crate) classes: Option<V>,
    /// Pooled text features, then the waves of six sizes: `[batch, width]`.
    pub(crate) text_time: Option<V>,
    /// Features of the text, `[batch · tokens, width]`.
    pub(crate) text: Option<V>,
}

impl<V> Inputs<V> {
    /// Maps each value with a function.
    pub(crate) fn map<T>(&self, of: impl Fn(&V) -> T) -> Inputs<T> {
        let Image { rows, size, channels } = &self.sample;
        Inputs {
            sample: Image { rows: of(rows), size: *size, channels: *channels },
            time: of(&self.time),
            classes: self.classes.as_ref().map(&of),
            text_time: self.text_time.as_ref().map(&of),
            text: self.text.as_ref().map(&of),
        }
    }
}

/// A forward pass.
pub(crate) struct Forward<'a, M: Machine> {
    pub(crate) machine: &'a M,
    pub(crate) modules: &'a Modules<M::Weight>,
    pub(crate) config: &'a UnetConfig,
}

/// Values that blocks share: projections of the time and of the text.
struct Shared<V> {
    times: V,
    texts: Option<V>,
}

type Out<M> = Result<Image<<M as Machine>::Value>, Error>;

impl<M: Machine> Forward<'_, M> {
    pub(crate) fn run(&self, inputs: Inputs<M::Value>) -> Out<M> {
        let (m, modules, config) = (self.machine, self.modules, self.config);
        let Inputs { sample, time, classes, text_time, text } = inputs;
        let shared = Shared {
            times: m.layer("time", || self.times(time, classes, text_time))?,
            texts: match (&modules.texts, text) {
                (Some(texts), Some(text)) => {
                    Some(m.layer("text", || m.linear(&text, texts, LinearWith::default()))?)
                }
                _ => None,
            },
        };
        let sample = if config.center_input { m.centered(sample)? } else { sample };
        let mut x = m.layer("conv_in", || {
            m.conv(&sample, None, &modules.conv_in, ConvWith::same(config.taps[0]))
        })?;
        drop(sample);
        let mut skips = vec![x.clone()];
        for stage in &modules.down {
            for (residual, attends) in &stage.layers {
                x = self.residual(residual, x, None, &shared, 1.0)?;
                x = self.attends(attends.as_ref(), x, &shared, 1.0)?;
                skips.push(x.clone());
            }
            if let Some(resampler) = &stage.resample {
                x = self.resampled(resampler, x, &shared, Change::Halve)?;
                skips.push(x.clone());
            }
        }
        if let (Some(stage), Some(middle)) = (&modules.middle, &config.middle) {
            for (residual, attends) in &stage.layers {
                x = self.residual(residual, x, None, &shared, middle.divisor)?;
                x = self.attends(attends.as_ref(), x, &shared, middle.divisor)?;
            }
        }
        for stage in &modules.up {
            x = self.stage_up(stage, x, &mut skips, &shared)?;
        }
        m.layer("conv_out", || {
            let activation = Some(config.outer_activation);
            let with = GroupNormWith { activation, ..self.norm(config.eps) };
            let x = m.group_norm(&x, None, &modules.norm_out, with)?;
            m.conv(&x, None, &modules.conv_out, ConvWith::same(config.taps[1]))
        })
    }

    fn stage_up(
        &self,
        stage: &Stage<M::Weight>,
        mut x: Image<M::Value>,
        skips: &mut Vec<Image<M::Value>>,
        shared: &Shared<M::Value>,
    ) -> Out<M> {
        for (residual, attends) in &stage.layers {
            let skip = skips.pop();
            x = self.residual(residual, x, skip, shared, 1.0)?;
            x = self.attends(attends.as_ref(), x, shared, 1.0)?;
        }
        match &stage.resample {
            None => Ok(x),
            Some(resampler) => self.resampled(resampler, x, shared, Change::Double),
        }
    }

    /// Returns the projections of the time embedding for all residual blocks.
    fn times(
        &self,
        time: M::Value,
        classes: Option<M::Value>,
        text_time: Option<M::Value>,
    ) -> Result<M::Value, Error> {
        let (m, modules, activation) = (self.machine, self.modules, self.config.activation);
        let more = [classes.is_some(), text_time.is_some()].contains(&true);
        let mut t = self.embedding(&modules.time, &time, (!more).then_some(activation))?;
        if let (Some(own), Some(classes)) = (&modules.classes, classes) {
            let own = match own {
                ClassEmbedding::Table(table) => {
                    m.lookup(table, self.config.time.hidden, &classes)?
                }
                ClassEmbedding::Timestep(layers) => self.embedding(layers, &classes, None)?,
            };
            t = m.add(t, own)?;
        }
        if let (Some(own), Some(text_time)) = (&modules.text_time, text_time) {
            // diffusers gives this embedding no activation of the config.
            t = m.add(t, self.embedding_with(own, &text_time, Activation::Silu, None)?)?;
        }
        if more {
            t = m.activate(t, activation)?;
        }
        m.linear(&t, &modules.times, LinearWith::default())
    }

    fn embedding(
        &self,
        layers: &Embedding<M::Weight>,
        x: &M::Value,
        after: Option<Activation>,
    ) -> Result<M::Value, Error> {
        self.embedding_with(layers, x, self.config.outer_activation, after)
    }

    fn embedding_with(
        &self,
        layers: &Embedding<M::Weight>,
        x: &M::Value,
        between: Activation,
        after: Option<Activation>,
    ) -> Result<M::Value, Error> {
        let first = LinearWith { activation: Some(between), ..LinearWith::default() };
        let h = self.machine.linear(x, &layers.first, first)?;
        let second = LinearWith { activation: after, ..LinearWith::default() };
        self.machine.linear(&h, &layers.second, second)
    }

    /// Parts of a norm before a convolution.
    fn norm(&self, eps: f32) -> GroupNormWith<M::Value> {
        let (groups, activation) = (self.config.groups, Some(self.config.activation));
        GroupNormWith { groups, eps, activation, modulation: None }
    }

    fn residual(
        &self,
        block: &Residual<M::Weight>,
        x: Image<M::Value>,
        skip: Option<Image<M::Value>>,
        shared: &Shared<M::Value>,
        divisor: f32,
    ) -> Out<M> {
        let run = || self.residual_with(block, x, skip, shared, divisor, None);
        self.machine.layer(&block.name, run)
    }

    fn residual_with(
        &self,
        block: &Residual<M::Weight>,
        mut x: Image<M::Value>,
        skip: Option<Image<M::Value>>,
        shared: &Shared<M::Value>,
        divisor: f32,
        change: Option<Change>,
    ) -> Out<M> {
        let (m, config, skip) = (self.machine, self.config, skip.as_ref());
        let mut h = m.group_norm(&x, skip, &block.norm1, self.norm(config.eps))?;
        match change {
            None => {}
            Some(Change::Double) => x = m.doubled(&x)?,
            Some(Change::Halve) => {
                h = m.halved(&h)?;
                x = m.halved(&x)?;
            }
        }
        let time = m.columns(&shared.times, block.time.clone())?;
        let (image_bias, modulation) =
            if config.scale_shift { (None, Some(time)) } else { (Some(time), None) };
        let doubled = change == Some(Change::Double);
        let with = ConvWith { image_bias, doubled, ..ConvWith::same(3) };
        h = m.conv(&h, None, &block.conv1, with)?;
        let with = GroupNormWith { modulation, ..self.norm(config.eps) };
        h = m.group_norm(&h, None, &block.norm2, with)?;
        let shortcut = match &block.shortcut {
            None => x,
            Some(conv) => m.conv(&x, skip, conv, ConvWith::same(1))?,
        };
        let with = ConvWith { residual: Some(shortcut.rows), divisor, ..ConvWith::same(3) };
        m.conv(&h, None, &block.conv2, with)
    }

    fn resampled(
        &self,
        resampler: &Resampler<M::Weight>,
        x: Image<M::Value>,
        shared: &Shared<M::Value>,
        change: Change,
    ) -> Out<M> {
        match resampler {
            Resampler::Residual(block) => self.machine.layer(&block.name, || {
                self.residual_with(block, x, None, shared, 1.0, Some(change))
            }),
            Resampler::Conv { name, conv, padding } => self.machine.layer(name, || {
                let (stride, doubled) = match change {
                    Change::Halve => (2, false),
                    Change::Double => (1, true),
                };
                let with = ConvWith { stride, doubled, padding: *padding, ..ConvWith::same(3) };
                self.machine.conv(&x, None, conv, with)
            }),
        }
    }

    fn attends(
        &self,
        attends: Option<&Attends<M::Weight>>,
        x: Image<M::Value>,
        shared: &Shared<M::Value>,
        divisor: f32,
    ) -> Out<M> {
        match attends {
            None => Ok(x),
            Some(Attends::Pixels(own)) => {
                self.machine.layer(&own.name, || self.pixels(own, x, divisor))
            }
            Some(Attends::Text(own)) => {
                self.machine.layer(&own.name, || self.transformer(own, x, shared))
            }
        }
    }

    fn pixels(&self, own: &PixelAttention<M::Weight>, x: Image<M::Value>, divisor: f32) -> Out<M> {
        let (m, c) = (self.machine, x.channels);
        let h = match &own.norm {
            None => x.clone(),
            Some((norm, groups)) => {
                let (groups, eps) = (*groups, self.config.eps);
                let with = GroupNormWith { groups, eps, activation: None, modulation: None };
                m.group_norm(&x, None, norm, with)?
            }
        };
        let qkv = m.linear(&h.rows, &own.qkv, LinearWith::default())?;
        drop(h);
        let a = m.attend(thirds(&qkv, c), own.heads)?;
        drop(qkv);
        let with = LinearWith { residual: Some(x.rows), divisor, ..LinearWith::default() };
        Ok(Image { rows: m.linear(&a, &own.out, with)?, ..x })
    }

    fn transformer(
        &self,
        own: &Transformer<M::Weight>,
        x: Image<M::Value>,
        shared: &Shared<M::Value>,
    ) -> Out<M> {
        /// Epsilon of the norm of diffusers' `Transformer2DModel`.
        const EPS: f32 = 1e-6;
        let m = self.machine;
        let groups = self.config.groups;
        let with = GroupNormWith { groups, eps: EPS, activation: None, modulation: None };
        let h = m.group_norm(&x, None, &own.norm, with)?;
        let mut y = m.linear(&h.rows, &own.before, LinearWith::default())?;
        drop(h);
        for block in &own.blocks {
            y = self.block(block, y, own.heads, x.channels, shared)?;
        }
        let with = LinearWith { residual: Some(x.rows), ..LinearWith::default() };
        Ok(Image { rows: m.linear(&y, &own.after, with)?, ..x })
    }

    fn block(
        &self,
        block: &TransformerBlock<M::Weight>,
        mut y: M::Value,
        heads: usize,
        c: usize,
        shared: &Shared<M::Value>,
    ) -> Result<M::Value, Error> {
        let m = self.machine;
        let plus = |y: M::Value| LinearWith { residual: Some(y), ..LinearWith::default() };
        let n = m.layer_norm(&y, &block.norm1)?;
        let qkv = m.linear(&n, &block.qkv, LinearWith::default())?;
        drop(n);
        let a = m.attend(thirds(&qkv, c), heads)?;
        drop(qkv);
        y = m.linear(&a, &block.out1, plus(y))?;
        drop(a);
        let n = m.layer_norm(&y, &block.norm2)?;
        let q = m.linear(&n, &block.q, LinearWith::default())?;
        drop(n);
        let texts = shared.texts.as_ref().expect("a model with transformers has a text");
        let text = |first| Columns { of: texts, first, count: c };
        let queries = Columns { of: &q, first: 0, count: c };
        let a = m.attend([queries, text(block.text), text(block.text + c)], heads)?;
        drop(q);
        y = m.linear(&a, &block.out2, plus(y))?;
        drop(a);
        let n = m.layer_norm(&y, &block.norm3)?;
        let up = m.linear(&n, &block.up, LinearWith::default())?;
        let activation = Some(Activation::Gelu);
        let gated = LinearWith { activation, gate: Some(up), ..LinearWith::default() };
        let inner = m.linear(&n, &block.gate, gated)?;
        drop(n);
        m.linear(&inner, &block.down, plus(y))
    }
}

/// Change of the resolution by two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Change {
    Halve,
    Double,
}

/// Returns queries, keys and values of a joint matrix.
fn thirds<V>(qkv: &V, c: usize) -> [Columns<'_, V>; 3] {
    [0, c, 2 * c].map(|first| Columns { of: qkv, first, count: c })
}
