//! Pooling by its definition, and resizing as torch has it.

use burn::tensor::{Device, FloatDType, Tensor, TensorData};
use ops::{OpError, Pool, PoolOptions, Resize, pool, resize};

use crate::{close, tensor, values};

/// Returns the pooled images `[batch · channels, height, width]` by the definition of a pooling.
fn pooled(x: &[f32], [height, width]: [usize; 2], kind: Pool, o: PoolOptions) -> Vec<f64> {
    let image = [height, width];
    let out = [0, 1].map(|axis| {
        let room = image[axis] + o.padding[axis][0] + o.padding[axis][1]
            - o.dilation[axis] * (o.size[axis] - 1)
            - 1;
        let steps = if o.ceil { room.div_ceil(o.stride[axis]) } else { room / o.stride[axis] };
        // A window does not begin in the padding after the image.
        let late = o.ceil && steps * o.stride[axis] >= image[axis] + o.padding[axis][0];
        steps + usize::from(!late)
    });
    let mut all = Vec::new();
    for image in x.chunks(height * width) {
        for y in 0..out[0] {
            for x in 0..out[1] {
                let (mut max, mut sum, mut count, mut padded) = (f64::NEG_INFINITY, 0.0, 0, 0);
                for r in 0..o.size[0] {
                    for s in 0..o.size[1] {
                        let row = y * o.stride[0] + r * o.dilation[0];
                        let col = x * o.stride[1] + s * o.dilation[1];
                        let far = |axis: usize, size: usize| {
                            size + o.padding[axis][0] + o.padding[axis][1]
                        };
                        padded += usize::from(row < far(0, height) && col < far(1, width));
                        let (row, col) =
                            (row.wrapping_sub(o.padding[0][0]), col.wrapping_sub(o.padding[1][0]));
                        if row < height && col < width {
                            let value = f64::from(image[row * width + col]);
                            (max, sum, count) = (max.max(value), sum + value, count + 1);
                        }
                    }
                }
                all.push(match kind {
                    Pool::Max => max,
                    Pool::Mean { counts_padding: true } => sum / padded as f64,
                    Pool::Mean { counts_padding: false } => sum / f64::from(count),
                });
            }
        }
    }
    all
}

#[test]
fn pooling_is_its_definition() {
    let device = Device::cpu();
    let x: Tensor<4> = tensor([2, 3, 7, 6], 1, &device);
    let own = PoolOptions::new;
    for options in [
        own([2, 2]),
        own([7, 6]),
        PoolOptions { stride: [1, 2], padding: [[1, 1], [1, 1]], ..own([3, 3]) },
        PoolOptions { padding: [[0, 1], [1, 0]], ..own([2, 3]) },
        PoolOptions { ceil: true, ..own([3, 4]) },
        PoolOptions { stride: [2, 2], padding: [[1, 1], [1, 1]], ceil: true, ..own([3, 3]) },
    ] {
        for kind in
            [Pool::Max, Pool::Mean { counts_padding: true }, Pool::Mean { counts_padding: false }]
        {
            let out = pool(x.clone(), kind, options).expect("valid");
            let want = pooled(&values(x.clone()), [7, 6], kind, options);
            close(&values(out), &want, &format!("{kind:?} {options:?}"));
        }
    }
    let apart = PoolOptions { dilation: [2, 2], stride: [1, 1], ..own([3, 2]) };
    let out = pool(x.clone(), Pool::Max, apart).expect("valid");
    close(&values(out), &pooled(&values(x), [7, 6], Pool::Max, apart), "dilated");
}

#[test]
fn means_of_halves_are_rounded_once() {
    // In f16, 2048 + 1 is 2048 again.
    let (device, mut x) = (Device::cpu(), vec![1.0f32; 1024]);
    x[0] = 2048.0;
    let x = Tensor::<4>::from_data(TensorData::new(x, [1, 1, 32, 32]), &device);
    let mean = Pool::Mean { counts_padding: false };
    let out = pool(x.cast(FloatDType::F16), mean, PoolOptions::new([32, 32])).expect("valid");
    assert_eq!(values(out), [3.0]); // (2048 + 1023) / 1024 = 2.999 is nearest to 3 in f16.
}

/// Values of torch 2.9's `interpolate`, of the second channel.
#[test]
fn resizing_is_that_of_torch() {
    let device = Device::cpu();
    let x = (0..24).map(|i| ((i * 7) % 11) as f32 / 4.0 - 1.0).collect::<Vec<_>>();
    let x = Tensor::<4>::from_data(TensorData::new(x, [1, 2, 3, 4]), &device);
    let [centres, corners] = [false, true];
    for (mode, want) in [
        (
            Resize::Nearest,
            [
                0.75, -0.25, 1.5, 0.75, -0.25, 1.5, -0.5, 1.25, 0.25, -0.5, 1.25, 0.25, 1.0, 0.0,
                -1.0,
            ],
        ),
        (
            Resize::NearestExact,
            [0.75, 1.5, 0.5, 0.75, 1.5, 0.5, -0.5, 0.25, -0.75, 1.0, -1.0, 0.75, 1.0, -1.0, 0.75],
        ),
        (
            Resize::Linear { align_corners: centres },
            [
                0.583333, 0.625, 0.666667, 0.266667, 0.675, 0.166667, -0.208333, 0.75, -0.583333,
                0.416667, 0.0, 0.041667, 0.833333, -0.5, 0.458333,
            ],
        ),
        (
            Resize::Linear { align_corners: corners },
            [
                0.75, 0.625, 0.5, 0.125, 0.6875, -0.125, -0.5, 0.75, -0.75, 0.25, 0.125, 0.0, 1.0,
                -0.5, 0.75,
            ],
        ),
        (
            Resize::Cubic { align_corners: centres },
            [
                0.653627, 0.58825, 0.798484, 0.183175, 0.900656, 0.090793, -0.231481, 1.007812,
                -0.623843, 0.386831, -0.045187, -0.040822, 0.979954, -0.927313, 0.587593,
            ],
        ),
        (
            Resize::Cubic { align_corners: corners },
            [
                0.75, 0.625, 0.5, -0.015625, 0.981934, -0.265625, -0.5, 1.007812, -0.75, 0.132812,
                0.160889, -0.117188, 1.0, -0.757812, 0.75,
            ],
        ),
    ] {
        let out = resize(x.clone(), [5, 3], mode).expect("valid");
        assert_eq!(out.dims(), [1, 2, 5, 3]);
        close(&values(out)[15..], &want, &format!("{mode:?}"));
    }
}

#[test]
fn gradients_reach_the_images() {
    let device = Device::cpu().autodiff();
    let x = tensor::<4>([1, 2, 4, 4], 1, &device).require_grad();
    let mean = Pool::Mean { counts_padding: false };
    let out = pool(x.clone(), mean, PoolOptions::new([2, 2])).expect("valid");
    let gradient = x.grad(&out.sum().backward()).expect("tracked");
    close(&values(gradient), &[0.25; 32], "means");
    let out = resize(x.clone(), [8, 8], Resize::Nearest).expect("valid");
    let gradient = x.grad(&out.sum().backward()).expect("tracked");
    close(&values(gradient), &[4.0; 32], "nearest");
    let error = resize(x, [8, 8], Resize::Linear { align_corners: false }).expect_err("refused");
    assert!(matches!(error, OpError::NoGradient));
}

#[test]
fn windows_that_do_not_fit_are_refused() {
    let device = Device::cpu();
    let x: Tensor<4> = tensor([1, 1, 4, 4], 1, &device);
    let own = PoolOptions::new;
    let mean = Pool::Mean { counts_padding: false };
    for (kind, options) in [
        (Pool::Max, own([5, 2])),
        (Pool::Max, own([2, 0])),
        (Pool::Max, PoolOptions { stride: [0, 1], ..own([2, 2]) }),
        (Pool::Max, PoolOptions { padding: [[2, 0], [0, 0]], ..own([3, 3]) }),
        (mean, PoolOptions { dilation: [2, 2], ..own([2, 2]) }),
    ] {
        let error = pool(x.clone(), kind, options).expect_err("refused");
        assert!(matches!(error, OpError::Window { .. }), "{options:?}: {error}");
    }
    let error = resize(x, [0, 4], Resize::Nearest).expect_err("refused");
    assert!(matches!(error, OpError::Resize { from: [4, 4], to: [0, 4] }));
}
