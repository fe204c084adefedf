//! Sines and cosines of numbers: the input of the time embedding.
//!
//! ```text
//! w(t) = [sin(t · f_0), .., sin(t · f_(n-1)), cos(t · f_0), .., cos(t · f_(n-1))]       f_i = 10000^(-i / (n - shift))
//! ```
//!
//! Frequencies and arguments are rounded to f32, as in diffusers 0.42.1 (`get_timestep_embedding`), so that large timesteps give
//! its values.

use super::config::Waves;

impl Waves {
    /// Returns the waves of a number, `channels` values.
    pub(crate) fn of(self, number: f32, channels: usize) -> Vec<f32> {
        let half = channels / 2;
        let scale = -(10_000f64.ln()) as f32;
        let arguments = (0..half).map(|i| {
            let exponent = scale * i as f32 / (half as f64 - self.shift) as f32;
            let frequency = f64::from(exponent).exp() as f32;
            f64::from(number * frequency)
        });
        let (sines, cosines): (Vec<f32>, Vec<f32>) =
            arguments.map(|argument| (argument.sin() as f32, argument.cos() as f32)).unzip();
        match self.cosines_first {
            true => [cosines, sines].concat(),
            false => [sines, cosines].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waves_have_the_order_and_spacing_of_diffusers() {
        let waves = |cosines_first, shift| Waves { cosines_first, shift }.of(2.0, 4);
        let [slow, fast] = [2.0f32 / 100.0, 2.0];
        let near = |have: Vec<f32>, want: [f32; 4]| {
            assert!(have.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{have:?} {want:?}");
        };
        near(waves(false, 0.0), [fast.sin(), slow.sin(), fast.cos(), slow.cos()]);
        near(waves(true, 0.0), [fast.cos(), slow.cos(), fast.sin(), slow.sin()]);
        let slow = 2.0f32 / 10_000.0;
        near(waves(false, 1.0), [fast.sin(), slow.sin(), fast.cos(), slow.cos()]);
    }
}
