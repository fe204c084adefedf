//! Attention with ordinary differentiable ops, which store the scores: the only way to the gradient of a
//! bias.

use burn::backend::tensor::{BoolTensor, FloatTensor};
use burn::backend::{Backend, TensorMetadata};
use burn::tensor::{FloatDType, Shape, TensorData};
use kernels::attention::{AttentionOptions, AttentionProblem};

use crate::OpError;
use crate::call::float_of;

/// Returns the errors that the kernels would return, and an error for a requested implementation, because
/// ordinary ops are none.
pub(super) fn check<B: Backend>(
    q: &FloatTensor<B>,
    k: &FloatTensor<B>,
    options: &AttentionOptions,
) -> Result<(), OpError> {
    let ([batch, heads, seq_q, head_dim], [_, kv_heads, seq_kv, _]) =
        (q.shape().dims(), k.shape().dims());
    let [batch, heads, seq_q, head_dim, kv_heads, seq_kv] =
        [batch, heads, seq_q, head_dim, kv_heads, seq_kv].map(|size| size as u32);
    let dtype = float_of(q.dtype())?;
    let dense =
        AttentionProblem::dense(batch, [heads, kv_heads], [seq_q, seq_kv], head_dim, dtype)?;
    options.on(dense).checked()?;
    match options.implementation {
        None => Ok(()),
        Some(implementation) => {
            let why = "a bias gradient needs stored scores".to_owned();
            Err(OpError::Forced { implementation, why })
        }
    }
}

/// Computes result and log-sum-exp with ordinary ops in f32, which store the scores.
pub(super) fn attend<B: Backend>(
    operands: [FloatTensor<B>; 3],
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<B>>,
    options: &AttentionOptions,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let given = operands[0].dtype();
    let [q, k, v] = operands.map(|t| B::float_cast(t, FloatDType::F32));
    let bias = bias.map(|bias| B::float_cast(bias, FloatDType::F32));
    let [batch, heads, seq_q, head_dim] = q.shape().dims();
    let [_, kv_heads, seq_kv, _] = k.shape().dims();
    let group = heads / kv_heads;
    // Repeats each head of k and v for every query head that shares it.
    let spread = |t: FloatTensor<B>| {
        let apart = B::float_reshape(t, Shape::new([batch, kv_heads, 1, seq_kv, head_dim]));
        let shape = Shape::new([batch, kv_heads, group, seq_kv, head_dim]);
        B::float_reshape(
            B::float_expand(apart, shape),
            Shape::new([batch, heads, seq_kv, head_dim]),
        )
    };
    let (k, v) = (spread(k), spread(v));
    let device = q.device();
    let scale = options.scale.unwrap_or(1.0 / (head_dim as f32).sqrt());
    let mut scores =
        B::float_mul_scalar(B::float_matmul(q, B::float_transpose(k)), f64::from(scale).into());
    if let Some(cap) = options.softcap.map(f64::from) {
        let bent = B::float_tanh(B::float_div_scalar(scores, cap.into()));
        scores = B::float_mul_scalar(bent, cap.into());
    }
    if let Some(bias) = bias {
        scores = B::float_add(scores, bias);
    }
    // Masked scores are -inf for any value and bias.
    if options.causal || options.window.is_some() {
        let data = TensorData::new(hidden_by_order(seq_q, seq_kv, options), [1, 1, seq_q, seq_kv]);
        let bools = burn::backend::get_device_settings::<B>(&device).bool_dtype;
        let hidden = B::float_greater_elem(B::float_from_data(data, &device), 0.5.into(), bools);
        let hidden = B::bool_expand(hidden, Shape::new([batch, heads, seq_q, seq_kv]));
        scores = B::float_mask_fill(scores, hidden, f32::NEG_INFINITY.into());
    }
    if let Some(mask) = mask {
        let shape = Shape::new([batch, heads, seq_q, seq_kv]);
        let mask = B::bool_expand(mask, shape);
        scores = B::float_mask_fill(scores, mask, f32::NEG_INFINITY.into());
    }
    // In a row without keys the maximum is -inf and the sum 0.
    let least = f64::from(f32::MIN_POSITIVE);
    let row_max = B::float_clamp_min(B::float_max_dim(scores.clone(), 3), (-1e30f64).into());
    let weights = B::float_exp(B::float_sub(scores, row_max.clone()));
    let sums = B::float_sum_dim(weights.clone(), 3);
    let lse = B::float_add(row_max, B::float_log(sums.clone()));
    let sums = B::float_clamp_min(sums, least.into());
    let out = B::float_cast(B::float_matmul(B::float_div(weights, sums), v), given.into());
    (out, B::float_reshape(lse, Shape::new([batch, heads, seq_q])))
}

/// Returns the scores that causal order and window hide, `[seq_q, seq_kv]`: 1 for a hidden one.
fn hidden_by_order(seq_q: usize, seq_kv: usize, options: &AttentionOptions) -> Vec<f32> {
    let (seq_q, seq_kv) = (seq_q as i64, seq_kv as i64);
    let hides = |i: i64, j: i64| {
        let distance = i + seq_kv - seq_q - j;
        let far = |window: u32| distance.unsigned_abs() >= u64::from(window);
        let hidden = (options.causal && distance < 0) || options.window.is_some_and(far);
        f32::from(u8::from(hidden))
    };
    (0..seq_q).flat_map(|i| (0..seq_kv).map(move |j| hides(i, j))).collect()
}
