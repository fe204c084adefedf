//! Soft cap of scores and logits, which limits them to `softcap`.

use cubecl::prelude::*;

/// Returns softcap · tanh(x / softcap), to a relative error of 4e-7. A small argument takes the series.
/// Others take one exponential, whose difference to 1 loses little. A driver's own tanh doubled the error of
/// decoding with scores past the cap (llvmpipe: 2.8e-6 instead of 1.4e-6).
#[cube]
pub(crate) fn capped(x: f32, softcap: f32) -> f32 {
    let bent = x / softcap;
    let square = bent * bent;
    let series = 1.0f32
        + square * (-1.0f32 / 3.0f32 + square * (2.0f32 / 15.0f32 - square * (17.0f32 / 315.0f32)));
    let tail = (-2.0f32 * f32::abs(bent)).exp();
    let size = softcap - softcap * (2.0f32 * tail / (1.0f32 + tail));
    select(square < 0.04f32, x * series, select(bent < 0.0f32, -size, size))
}

/// Returns the derivative of [`capped`] at x. The formula avoids 1 - tanh², which loses small values.
#[cube]
pub(crate) fn capped_slope(x: f32, softcap: f32) -> f32 {
    let tail = (-2.0f32 * f32::abs(x / softcap)).exp();
    4.0f32 * tail / ((1.0f32 + tail) * (1.0f32 + tail))
}
