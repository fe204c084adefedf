//! Sampling: steps from noise to a sample, each with one frame of a U-Net.
//!
//! ```text
//! a = Π (1 - beta), cumulative                 sigma = √((1 - a) / a)
//! x0: the sample without noise                 e: its noise, both from the model's result r
//!   epsilon: e = r    sample: x0 = r    v: x0 = √a · x - √(1 - a) · r
//!
//! DDIM    x' = √a' · x0 + √(1 - a') · e        a' of the next timestep; x0 may be clipped
//! Euler   x' = x + (sigma' - sigma) · (x - x0) / sigma            the model reads x / √(sigma² + 1)
//! ```
//!
//! Sources: Song et al., "Denoising Diffusion Implicit Models" (2020); Karras et al., "Elucidating the Design Space of
//! Diffusion-Based Generative Models" (2022). Fields and defaults are those of diffusers 0.42.1, `schedulers/scheduling_ddim.py` and
//! `scheduling_euler_discrete.py`. A `DDPMScheduler` or `PNDMScheduler` has the noise of its class, and the steps of DDIM.

use std::path::{Path, PathBuf};

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use serde_json::{Value, json};

use crate::Error;
use crate::decoder::normals;
use crate::fields::{self, Fields};

const FILE: &str = "scheduler_config.json";

/// Method of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// DDIM without noise between steps.
    Ddim,
    /// Euler's method over sigmas.
    Euler,
}

/// Meaning of a model's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Prediction {
    Epsilon,
    Sample,
    Velocity,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spacing {
    Linspace,
    Leading,
    Trailing,
}

/// Noise schedule of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    method: Method,
    /// Products of `1 - beta` up to each timestep of the training.
    products: Vec<f64>,
    prediction: Prediction,
    spacing: Spacing,
    offset: usize,
    /// Bound of the sample without noise in DDIM.
    clip: Option<f64>,
    /// Product after the last step of DDIM.
    last: f64,
}

/// Steps of one sampling.
#[derive(Debug, Clone, PartialEq)]
pub struct Steps {
    schedule: Schedule,
    timesteps: Vec<f64>,
}

impl Schedule {
    /// Reads the scheduler of a pipeline's folder, or that next to the folder of its U-Net; none if there is no such file.
    ///
    /// # Errors
    /// The errors of [`Schedule::from_json`]; [`Error::Read`].
    pub fn open(folder: &Path) -> Result<Option<Self>, Error> {
        let file = Self::file(folder);
        file.map(|file| Self::from_json(&fields::read(&file)?)).transpose()
    }

    /// Returns the file that [`Schedule::open`] reads.
    pub fn file(folder: &Path) -> Option<PathBuf> {
        // `.` has no parent.
        let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let inside = folder.join("scheduler").join(FILE);
        let beside = folder.parent().map(|parent| parent.join("scheduler").join(FILE));
        let files = [Some(inside), Some(folder.join(FILE)), beside];
        files.into_iter().flatten().find(|file| file.exists())
    }

    /// Reads a `scheduler_config.json` of `DDIMScheduler`, `DDPMScheduler`, `PNDMScheduler` or `EulerDiscreteScheduler`. The first
    /// three become DDIM; a warning says so.
    ///
    /// # Errors
    /// [`Error::Json`], [`Error::NotAnObject`] or [`Error::Field`], with the field that is invalid or has no support.
    pub fn from_json(text: &str) -> Result<Self, Error> {
        let value = fields::json(FILE, text)?;
        let fields = Fields::new(FILE, &value)?;
        let class = fields.text("_class_name")?;
        let method = match class {
            Some("DDIMScheduler") => Method::Ddim,
            Some(own @ ("DDPMScheduler" | "PNDMScheduler")) => {
                log::warn!(
                    "{FILE} has a {own}, which has no steps here: DDIM is the default method"
                );
                Method::Ddim
            }
            Some("EulerDiscreteScheduler") => Method::Euler,
            Some(_) => {
                let known = "DDIMScheduler, DDPMScheduler, PNDMScheduler, EulerDiscreteScheduler";
                return Err(fields.unsupported("_class_name", known));
            }
            None => return Err(fields.missing("_class_name")),
        };
        for (field, neutral) in [
            ("thresholding", json!(false)),
            ("trained_betas", Value::Null),
            ("rescale_betas_zero_snr", json!(false)),
            ("use_karras_sigmas", json!(false)),
            ("use_exponential_sigmas", json!(false)),
            ("use_beta_sigmas", json!(false)),
            ("interpolation_type", json!("linear")),
            ("timestep_type", json!("discrete")),
            ("final_sigmas_type", json!("zero")),
        ] {
            fields.only(field, &[neutral])?;
        }
        let count = fields.optional_count("num_train_timesteps", 100_000)?.unwrap_or(1000);
        let beta = |field: &str, usual: f64| -> Result<f64, Error> {
            let own = fields.optional(field, "a number between 0 and 1", |value| {
                value.as_f64().filter(|beta| *beta > 0.0 && *beta < 1.0)
            })?;
            Ok(own.unwrap_or(usual))
        };
        let (from, to) = (beta("beta_start", 1e-4)?, beta("beta_end", 0.02)?);
        let line = |from: f64, to: f64| {
            let last = (count.max(2) - 1) as f64;
            (0..count).map(move |i| from + (to - from) * i as f64 / last)
        };
        let betas: Vec<f64> = match fields.text("beta_schedule")?.unwrap_or("linear") {
            "linear" => line(from, to).collect(),
            "scaled_linear" => line(from.sqrt(), to.sqrt()).map(|root| root * root).collect(),
            "squaredcos_cap_v2" => {
                let left = |i: usize| {
                    let share = (i as f64 / count as f64 + 0.008) / 1.008;
                    (share * std::f64::consts::FRAC_PI_2).cos().powi(2)
                };
                (0..count).map(|i| (1.0 - left(i + 1) / left(i)).min(0.999)).collect()
            }
            _ => {
                let known = "\"linear\", \"scaled_linear\", \"squaredcos_cap_v2\"";
                return Err(fields.unsupported("beta_schedule", known));
            }
        };
        let products: Vec<f64> = betas
            .iter()
            .scan(1.0, |product, beta| {
                *product *= 1.0 - beta;
                Some(*product)
            })
            .collect();
        // Some betas leave less signal than f64 can divide by.
        if products.last().is_none_or(|last| *last < 1e-100) {
            return Err(
                fields.malformed("beta_end", "betas that leave a signal after all timesteps")
            );
        }
        let prediction = match fields.text("prediction_type")?.unwrap_or("epsilon") {
            "epsilon" => Prediction::Epsilon,
            "sample" => Prediction::Sample,
            "v_prediction" => Prediction::Velocity,
            _ => {
                let known = "\"epsilon\", \"sample\", \"v_prediction\"";
                return Err(fields.unsupported("prediction_type", known));
            }
        };
        let usual = if method == Method::Euler { "linspace" } else { "leading" };
        let spacing = match fields.text("timestep_spacing")?.unwrap_or(usual) {
            "linspace" => Spacing::Linspace,
            "leading" => Spacing::Leading,
            "trailing" => Spacing::Trailing,
            _ => {
                let known = "\"linspace\", \"leading\", \"trailing\"";
                return Err(fields.unsupported("timestep_spacing", known));
            }
        };
        // A PNDMScheduler never clips, and a DDPMScheduler ends at 1.
        let clips = fields.flag("clip_sample")?.unwrap_or(true) && class != Some("PNDMScheduler");
        let range = fields.optional_positive("clip_sample_range")?.unwrap_or(1.0);
        let clip = clips.then_some(range);
        let usual = class != Some("PNDMScheduler");
        let to_one =
            fields.flag("set_alpha_to_one")?.unwrap_or(usual) || class == Some("DDPMScheduler");
        let offset = fields.optional("steps_offset", "an integer from 0 to 100000", |value| {
            usize::try_from(value.as_u64()?).ok().filter(|offset| *offset <= 100_000)
        })?;
        let last = if to_one { 1.0 } else { products[0] };
        let offset = offset.unwrap_or(0);
        Ok(Self { method, products, prediction, spacing, offset, clip, last })
    }

    /// Returns the same noise with another method.
    #[must_use]
    pub fn with_method(self, method: Method) -> Self {
        Self { method, ..self }
    }

    /// Returns the method.
    pub const fn method(&self) -> Method {
        self.method
    }

    /// Returns `count` steps.
    ///
    /// # Errors
    /// [`Error::Steps`] for no steps, or more than the training had; [`Error::Timestep`].
    pub fn steps(&self, count: usize) -> Result<Steps, Error> {
        let all = self.products.len();
        if count == 0 || count > all {
            return Err(Error::Steps { have: count, most: all });
        }
        let rounds = |timestep: f64| match self.method {
            Method::Ddim => timestep.round_ties_even(),
            Method::Euler => timestep,
        };
        let last = (all - 1) as f64;
        let mut timesteps: Vec<f64> = match self.spacing {
            Spacing::Linspace if count == 1 => vec![0.0],
            Spacing::Linspace => {
                (0..count).map(|i| rounds(last * i as f64 / (count - 1) as f64)).collect()
            }
            Spacing::Leading => {
                (0..count).map(|i| (i * (all / count) + self.offset) as f64).collect()
            }
            Spacing::Trailing => {
                let ratio = all as f64 / count as f64;
                let at = |i: usize| (all as f64 - i as f64 * ratio).round_ties_even() - 1.0;
                (0..count).rev().map(at).collect()
            }
        };
        timesteps.reverse();
        if let Some(far) = timesteps.iter().find(|timestep| **timestep > last) {
            return Err(Error::Timestep { have: *far as usize, last: all - 1 });
        }
        Ok(Steps { schedule: self.clone(), timesteps })
    }

    /// Returns sigma at a timestep, interpolated between those of the training.
    fn sigma(&self, timestep: f64) -> f64 {
        let sigma = |at: usize| ((1.0 - self.products[at]) / self.products[at]).sqrt();
        let low = (timestep.floor() as usize).min(self.products.len() - 1);
        let high = (low + 1).min(self.products.len() - 1);
        let share = timestep - low as f64;
        sigma(low) * (1.0 - share) + sigma(high) * share
    }
}

impl Steps {
    /// Returns the timesteps, the noisiest first.
    pub fn timesteps(&self) -> &[f64] {
        &self.timesteps
    }

    /// Returns the noise to begin with, the same for one seed everywhere.
    pub fn noise(&self, len: usize, seed: u64) -> Vec<f32> {
        let mut values = vec![0.0; len];
        normals(&mut values, self.initial_deviation(), &mut ChaCha8Rng::seed_from_u64(seed));
        values
    }

    /// Returns the deviation of the noise to begin with.
    pub fn initial_deviation(&self) -> f64 {
        if self.schedule.method == Method::Ddim {
            return 1.0;
        }
        let most = self.sigma(0);
        match self.schedule.spacing {
            Spacing::Linspace | Spacing::Trailing => most,
            Spacing::Leading => (most * most + 1.0).sqrt(),
        }
    }

    /// Returns the factor of the sample that the model reads at step `at`.
    pub fn input_factor(&self, at: usize) -> f64 {
        match self.schedule.method {
            Method::Ddim => 1.0,
            Method::Euler => 1.0 / (self.sigma(at).powi(2) + 1.0).sqrt(),
        }
    }

    /// Replaces the sample by that of the next step. `result` is that of the model at step `at`.
    ///
    /// # Panics
    /// Panics for slices of different lengths, or a step past the last.
    pub fn step(&self, at: usize, result: &[f32], sample: &mut [f32]) {
        assert_eq!(result.len(), sample.len(), "a result has the shape of the sample");
        for (sample, result) in sample.iter_mut().zip(result) {
            *sample = self.stepped(at, f64::from(*result), f64::from(*sample)) as f32;
        }
    }

    fn sigma(&self, at: usize) -> f64 {
        self.timesteps.get(at).map_or(0.0, |timestep| self.schedule.sigma(*timestep))
    }

    fn stepped(&self, at: usize, result: f64, x: f64) -> f64 {
        let Schedule { method, products, prediction, clip, last, .. } = &self.schedule;
        match method {
            Method::Ddim => {
                let timestep = self.timesteps[at] as usize;
                let ratio = products.len() / self.timesteps.len();
                let a = products[timestep];
                let next = timestep.checked_sub(ratio).map_or(*last, |timestep| products[timestep]);
                let (signal, noise) = (a.sqrt(), (1.0 - a).sqrt());
                let (clean, e) = match prediction {
                    Prediction::Epsilon => ((x - noise * result) / signal, result),
                    Prediction::Sample => (result, (x - signal * result) / noise),
                    Prediction::Velocity => {
                        (signal * x - noise * result, signal * result + noise * x)
                    }
                };
                let clean = clip.map_or(clean, |bound| clean.clamp(-bound, bound));
                next.sqrt() * clean + (1.0 - next).sqrt() * e
            }
            Method::Euler => {
                let (sigma, next) = (self.sigma(at), self.sigma(at + 1));
                let square = sigma * sigma + 1.0;
                let clean = match prediction {
                    Prediction::Epsilon => x - sigma * result,
                    Prediction::Sample => result,
                    Prediction::Velocity => x / square - result * sigma / square.sqrt(),
                };
                x + (next - sigma) * (x - clean) / sigma
            }
        }
    }
}
