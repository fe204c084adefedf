//! The forward pass on a device.

use std::ops::Range;

use burn::tensor::Tensor;
use ops::{
    Activation, AttentionOptions, ConvOptions, Ctx, Epilogue, GroupNormOptions, NormKind,
    NormWeights, Pass, Pool, PoolOptions,
};

use super::forward::{Columns, ConvWith, GroupNormWith, Image, LinearWith, Machine};
use super::modules::{Conv, Linear, Norm};
use crate::Error;

/// Epsilon of the layer norms of diffusers' `BasicTransformerBlock`.
const LAYER_NORM_EPS: f32 = 1e-5;

/// A device that computes images of a batch. Weights are flat; those of convolutions have their channels last.
#[derive(Debug, Clone)]
pub(super) struct OnDevice {
    pub(super) ctx: Ctx,
    /// Memory of the results, in the order of the plan; none to allocate each.
    pub(super) places: Option<Pass>,
    pub(super) batch: usize,
    pub(super) f16_accumulation: bool,
    pub(super) tf32: bool,
}

impl OnDevice {
    /// Runs an op and writes its result to the next planned place.
    fn place<T>(&self, run: impl FnOnce() -> T) -> T {
        match &self.places {
            Some(places) => places.place(run),
            None => run(),
        }
    }

    /// Counts the result of an op that allocates it.
    fn skip(&self) {
        if let Some(places) = &self.places {
            places.skip();
        }
    }

    /// Returns images with torch's axes, in the memory of their rows.
    fn image(&self, image: &Image<Tensor<2>>) -> Tensor<4> {
        let ([height, width], channels) = (image.size, image.channels);
        let rows = image.rows.clone().reshape([self.batch, height, width, channels]);
        rows.permute([0, 3, 1, 2])
    }

    fn rows(&self, image: Tensor<4>) -> Image<Tensor<2>> {
        let [batch, channels, height, width] = image.dims();
        let rows = image.permute([0, 2, 3, 1]).reshape([batch * height * width, channels]);
        Image { rows, size: [height, width], channels }
    }

    fn epilogue(&self, with: LinearWith<Tensor<2>>, bias: Option<Tensor<1>>) -> Epilogue<2> {
        let LinearWith { activation, gate, residual, .. } = with;
        let (tf32, f16_accumulation) = (self.tf32, self.f16_accumulation);
        let none = Epilogue::default();
        Epilogue { bias, activation, gate, residual, tf32, f16_accumulation, ..none }
    }
}

impl Machine for OnDevice {
    type Weight = Tensor<1>;
    type Value = Tensor<2>;

    fn layer<T>(&self, name: &str, run: impl FnOnce() -> T) -> T {
        let _layer = trace::span(|| name);
        run()
    }

    fn conv(
        &self,
        x: &Image<Tensor<2>>,
        second: Option<&Image<Tensor<2>>>,
        conv: &Conv<Tensor<1>>,
        with: ConvWith<Tensor<2>>,
    ) -> Result<Image<Tensor<2>>, Error> {
        let [filters, channels, rows, cols] = conv.shape;
        let size = with.size(x.size, [rows, cols]);
        let ConvWith { stride, padding, doubled, image_bias, residual, divisor } = with;
        let weight = conv.weight.clone().reshape([filters, rows, cols, channels]);
        let options = ConvOptions {
            stride: [stride; 2],
            padding: [padding; 2],
            doubled,
            second: second.map(|second| self.image(second)),
            bias: conv.bias.clone(),
            image_bias,
            residual: residual.map(|rows| self.image(&Image { rows, size, channels: filters })),
            factor: (divisor != 1.0).then_some(1.0 / divisor),
            tf32: self.tf32,
            f16_accumulation: self.f16_accumulation,
            ..ConvOptions::default()
        };
        let weight = weight.permute([0, 3, 1, 2]);
        let out = self.place(|| ops::conv2d(&self.ctx, self.image(x), weight, options))?;
        Ok(self.rows(out))
    }

    fn group_norm(
        &self,
        x: &Image<Tensor<2>>,
        second: Option<&Image<Tensor<2>>>,
        norm: &Norm<Tensor<1>>,
        with: GroupNormWith<Tensor<2>>,
    ) -> Result<Image<Tensor<2>>, Error> {
        let GroupNormWith { groups, eps, activation, modulation } = with;
        let options = GroupNormOptions {
            groups,
            eps,
            weight: norm.weight.clone(),
            bias: norm.bias.clone(),
            second: second.map(|second| self.image(second)),
            modulation,
            activation,
        };
        let out = self.place(|| ops::group_norm(&self.ctx, self.image(x), options))?;
        Ok(self.rows(out))
    }

    fn layer_norm(&self, rows: &Tensor<2>, norm: &Norm<Tensor<1>>) -> Result<Tensor<2>, Error> {
        let (weight, bias) = (norm.weight.clone(), Some(norm.bias.clone()));
        let weights = NormWeights { weight, bias };
        let (kind, eps) = (NormKind::Layer, LAYER_NORM_EPS);
        Ok(self.place(|| ops::norm(&self.ctx, rows.clone(), weights, None, kind, eps))?)
    }

    fn linear(
        &self,
        rows: &Tensor<2>,
        linear: &Linear<Tensor<1>>,
        with: LinearWith<Tensor<2>>,
    ) -> Result<Tensor<2>, Error> {
        let weight = linear.weight.clone().reshape(linear.shape).transpose();
        let divisor = with.divisor;
        let epilogue = self.epilogue(with, linear.bias.clone());
        let out = self.place(|| ops::linear(&self.ctx, rows.clone(), weight, epilogue))?;
        Ok(if divisor == 1.0 { out } else { out / divisor })
    }

    fn attend(&self, qkv: [Columns<'_, Tensor<2>>; 3], heads: usize) -> Result<Tensor<2>, Error> {
        let [q, k, v] = qkv.map(|Columns { of, first, count }| {
            let own = ops::columns(of.clone(), first..first + count)?;
            let rows = own.dims()[0];
            ops::split_heads(own, [self.batch, rows / self.batch, heads])
        });
        let (q, k, v) = (q?, k?, v?);
        let [batch, heads, seq, head_dim] = q.dims();
        let options = AttentionOptions { causal: false, ..AttentionOptions::default() };
        let a = self.place(|| ops::attention(&self.ctx, q, k, v, None, None, options))?;
        Ok(a.swap_dims(1, 2).reshape([batch * seq, heads * head_dim]))
    }

    fn columns(&self, rows: &Tensor<2>, columns: Range<usize>) -> Result<Tensor<2>, Error> {
        Ok(ops::columns(rows.clone(), columns)?)
    }

    fn activate(&self, rows: Tensor<2>, activation: Activation) -> Result<Tensor<2>, Error> {
        self.skip();
        Ok(ops::activate(rows, activation, None)?)
    }

    fn add(&self, a: Tensor<2>, b: Tensor<2>) -> Result<Tensor<2>, Error> {
        self.skip();
        Ok(a + b)
    }

    fn lookup(
        &self,
        table: &Tensor<1>,
        width: usize,
        rows: &Tensor<2>,
    ) -> Result<Tensor<2>, Error> {
        self.skip();
        let classes = table.dims()[0] / width;
        let indices = rows.clone().slice_dim(1, 0..1).reshape([self.batch]);
        Ok(table.clone().reshape([classes, width]).select(0, indices.int()))
    }

    fn centered(&self, x: Image<Tensor<2>>) -> Result<Image<Tensor<2>>, Error> {
        self.skip();
        Ok(Image { rows: x.rows * 2.0 - 1.0, ..x })
    }

    fn doubled(&self, x: &Image<Tensor<2>>) -> Result<Image<Tensor<2>>, Error> {
        self.skip();
        let ([height, width], channels, batch) = (x.size, x.channels, self.batch);
        let rows = x.rows.clone().reshape([batch, height, 1, width, 1, channels]);
        let rows = rows.expand([batch, height, 2, width, 2, channels]);
        let rows = rows.reshape([batch * 4 * height * width, channels]);
        Ok(Image { rows, size: [2 * height, 2 * width], channels })
    }

    fn halved(&self, x: &Image<Tensor<2>>) -> Result<Image<Tensor<2>>, Error> {
        self.skip();
        let mean = Pool::Mean { counts_padding: false };
        Ok(self.rows(ops::pool(self.image(x), mean, PoolOptions::new([2, 2]))?))
    }
}
