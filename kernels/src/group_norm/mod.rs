//! out[n, p, c] = act((1 + scale[n, c]) · ((x[n, p, c] - mean[n, g]) · factor[n, g] · w[c] + bias[c]) + shift[n, c])
//!
//! ```text
//!   g = c / (channels / groups)            mean[n, g], factor[n, g] = 1 / √(variance[n, g] + eps)   // over pixels and channels
//!   x: [batch, pixels, channels], of one or two inputs      out: [batch, pixels, channels]
//!   w, bias: [channels]                                     scale, then shift: [batch, 2 · channels], or neither
//! ```
//!
//! The variance is the mean of squared deviations, never E[x²] - E[x]², which loses all digits if the mean is large. Sums are f32,
//! in an order that the config alone determines. The result is rounded once.
//!
//! Cost: x is read once and out written once, if a cube keeps its part of x in registers.
//!
//! | config | launches | a cube |
//! |---|---|---|
//! | one chunk | 1 | sums some groups of an image, then normalises them |
//! | several chunks | 2 | sums some groups in a chunk of the pixels; in the second launch merges the chunks' sums and normalises |
//! | alone | 1 | has units that each sum and normalise a group: CPUs |
//!
//! Means and squared deviations of chunks merge exactly: `M2 = Σ M2ᵢ + nᵢ · (meanᵢ - mean)²` (Chan et al., "Updating Formulae and a
//! Pairwise Algorithm for Computing Sample Variances", 1979).
//!
//! Ladder, ms of a frame of unet-880m / sd15 / unet-38m, f16, batch 1, 64 x 64, on an H200 limited to the features of an RTX 4090
//! (one call; some 60 to 100 norms a frame, most in two launches):
//!
//! | version | frame |
//! |---|---|
//! | sums halved between barriers; a unit loads one chunk's sums after the other | 2.81 / 4.74 / 1.50 |
//! | 8 values added between two barriers; all loads of a merge in flight together | 2.68 / 4.69 / 1.44 |
//!
//! Records: `benches/baselines/cuda-sm90-132@rtx4090/unet.jsonl`.
//!
//! Source: Wu and He, "Group Normalization" (2018).

mod kernel;
mod sum;

use arch::{ArchProfile, DType};
use cubecl::server::Handle;
use serde::{Deserialize, Serialize};
use tune::{Cost, Infeasible, Kernel, Output, Queue};

use crate::elem::rounding;
use crate::fits::{iterations, limits, shape, stores};
use crate::launch::vector;
use crate::matmul::Activation;

/// The group norm kernel.
pub struct GroupNorm;

/// Images to normalise. End with [`GroupNormProblem::checked`].
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct GroupNormProblem {
    pub batch: u32,
    /// Pixels of an image.
    pub pixels: u32,
    /// Channels of x, and of a second input that follow them; 0 without one.
    pub channels: [u32; 2],
    pub groups: u32,
    /// Type of all tensors.
    pub dtype: DType,
    /// Constant added to the variance.
    pub eps: f32,
    pub activation: Option<Activation>,
    /// Elements from the scale and shift of one image to those of the next; 0 without them.
    pub modulation_pitch: u32,
}

/// An invalid group norm problem.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum InvalidGroupNorm {
    #[error("expected {axis} of at least 1, got 0\nhint: skip an empty norm")]
    Empty { axis: &'static str },
    #[error(
        "expected groups that divide the channels, got {groups} groups of {channels} channels\nhint: check norm_num_groups"
    )]
    Groups { groups: u32, channels: u64 },
    #[error("expected fewer than 2^31 {axis}, got {size}\nhint: normalise fewer images at once")]
    Large { axis: &'static str, size: u64 },
    #[error(
        "expected a finite eps of at least 0, got {0}\nhint: pass the eps of the model's config"
    )]
    Eps(f32),
    #[error(
        "expected a scale and a shift of {need} values per image, got {pitch}\nhint: pass the rows of a matrix [batch, 2 * channels]"
    )]
    Modulation { pitch: u64, need: u64 },
    #[error("expected f32, f16 or bf16 images, got {0}\nhint: cast the images")]
    DType(DType),
}

impl GroupNormProblem {
    /// Returns the problem if it is valid.
    ///
    /// # Errors
    /// See [`InvalidGroupNorm`].
    pub fn checked(self) -> Result<Self, InvalidGroupNorm> {
        let Self { batch, pixels, channels, groups, dtype, eps, .. } = self;
        for (axis, size) in
            [("batch", batch), ("pixels", pixels), ("channels", channels[0]), ("groups", groups)]
        {
            if size == 0 {
                return Err(InvalidGroupNorm::Empty { axis });
            }
        }
        let channels = channels.map(u64::from).iter().sum::<u64>();
        if channels % u64::from(groups) != 0 {
            return Err(InvalidGroupNorm::Groups { groups, channels });
        }
        let pitch = u64::from(self.modulation_pitch);
        if pitch > 0 && pitch < 2 * channels {
            return Err(InvalidGroupNorm::Modulation { pitch, need: 2 * channels });
        }
        let sizes = [("channels", channels), ("pixels", u64::from(batch) * u64::from(pixels))];
        for (axis, size) in sizes {
            if size >= 1 << 31 {
                return Err(InvalidGroupNorm::Large { axis, size });
            }
        }
        if !eps.is_finite() || eps < 0.0 {
            return Err(InvalidGroupNorm::Eps(eps));
        }
        match dtype {
            DType::F32 | DType::F16 | DType::Bf16 => Ok(self),
            other => Err(InvalidGroupNorm::DType(other)),
        }
    }

    /// Channels of both inputs.
    pub const fn width(&self) -> u32 {
        self.channels[0] + self.channels[1]
    }

    /// Elements of one of the inputs.
    pub const fn len(&self, input: usize) -> usize {
        self.batch as usize * self.pixels as usize * self.channels[input] as usize
    }

    /// Elements of the result.
    pub const fn elements(&self) -> usize {
        self.len(0) + self.len(1)
    }

    /// Elements of the scales and shifts, up to the end of the last image's.
    pub const fn modulation_len(&self) -> usize {
        (self.batch as usize - 1) * self.modulation_pitch as usize + 2 * self.width() as usize
    }

    /// Vector width in elements: the widest load that divides a group, both inputs and the modulation.
    fn vector(&self, arch: &ArchProfile) -> u32 {
        let [first, second] = self.channels;
        let sizes = [self.width() / self.groups, first, second, self.modulation_pitch];
        vector(arch, self.dtype, |v| sizes.iter().all(|size| size % v == 0))
    }

    /// Vectors of a pixel in one group.
    fn per_group(&self, arch: &ArchProfile) -> u32 {
        self.width() / self.groups / self.vector(arch)
    }
}

/// Launch shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(untagged)]
pub enum GroupNormConfig {
    /// Units share groups: each has a vector of channels of every `rows`-th pixel.
    Shared {
        /// Pixels that a cube reads at once.
        rows: u32,
        /// Groups of a cube.
        groups: u32,
        /// Parts of the pixels.
        chunks: u32,
    },
    /// Each unit has a group of an image.
    Alone {
        /// Units of a cube.
        units: u32,
    },
}

use GroupNormConfig::{Alone, Shared};

/// Device buffers; second and modulation exist only if the problem has them.
#[derive(Debug, Clone)]
pub struct GroupNormOperands {
    pub x: Handle,
    pub second: Option<Handle>,
    pub weight: Handle,
    pub bias: Handle,
    pub modulation: Option<Handle>,
    pub out: Handle,
}

impl Kernel for GroupNorm {
    type Problem = GroupNormProblem;
    type Config = GroupNormConfig;
    type Operands = GroupNormOperands;

    const NAME: &'static str = "group_norm";
    const VERSION: u32 = 2;

    fn bucket(p: &GroupNormProblem) -> String {
        let batch = p.batch.next_power_of_two().min(64);
        let activation = p.activation.map_or(String::new(), |own| format!(" {}", own.name()));
        let joined = if p.channels[1] > 0 { " joined" } else { "" };
        let (dtype, width, groups) = (p.dtype, p.width(), p.groups);
        let pixels = p.pixels.next_power_of_two();
        format!("{dtype}{activation} {width}/{groups}{joined} pixels {pixels} batch {batch}")
    }

    fn candidates(arch: &ArchProfile, p: &GroupNormProblem) -> Vec<GroupNormConfig> {
        if arch.cores().is_some() {
            return Self::baseline(arch, p).into_iter().collect();
        }
        let per_group = p.per_group(arch);
        let shared = |units: u32, groups: u32, chunks: u32| {
            let span = p.pixels.div_ceil(chunks);
            let rows = (units / (groups * per_group)).clamp(1, span);
            Shared { rows, groups, chunks: p.pixels.div_ceil(span) }
        };
        let divides = |groups: &u32| p.groups.is_multiple_of(*groups);
        // Neighbouring units read neighbouring channels: all groups if they fit.
        let wide = (1..=p.groups).rev().filter(divides).find(|own| own * per_group <= 512);
        let whole = [(512, 1), (1024, 1), (256, 1), (512, 2), (1024, 2), (1024, 4)]
            .map(|(units, groups)| (units, groups, 1));
        let cut = wide.into_iter().flat_map(|wide| {
            [(512, 64), (512, 32), (512, 128), (512, 16), (256, 128), (1024, 64)]
                .map(|(units, chunks)| (units, wide, chunks.min(p.pixels)))
        });
        // One cube per group pays off up to some tens of KB of a group.
        let group = p.pixels as usize * (p.width() / p.groups) as usize * p.dtype.size();
        let (whole, cut) = (whole.into_iter().filter(|c| divides(&c.1)), cut);
        let all: Vec<_> = match group <= 48 << 10 {
            true => whole.chain(cut).collect(),
            false => cut.chain(whole).collect(),
        };
        let mut configs = Vec::new();
        for (units, groups, chunks) in all {
            let config = shared(units, groups, chunks);
            if !configs.contains(&config) && Self::check(arch, p, &config).is_ok() {
                configs.push(config);
            }
        }
        if configs.is_empty() {
            configs.extend(Self::baseline(arch, p));
        }
        configs
    }

    fn check(
        arch: &ArchProfile,
        p: &GroupNormProblem,
        c: &GroupNormConfig,
    ) -> Result<(), Infeasible> {
        stores(arch, [p.dtype])?;
        let per_group = u64::from(p.per_group(arch));
        match *c {
            Alone { units } => {
                iterations(arch, 3 * u64::from(p.pixels) * (per_group + 1) + 4)?;
                limits(arch, units, 0)
            }
            Shared { rows, groups, chunks } => {
                if groups == 0 || !p.groups.is_multiple_of(groups) {
                    return Err(shape("groups", groups, "expected a divisor of the norm's groups"));
                }
                if chunks == 0 || p.pixels.div_ceil(p.pixels.div_ceil(chunks)) != chunks {
                    return Err(shape("chunks", chunks, "expected equal parts of the pixels"));
                }
                let span = p.pixels.div_ceil(chunks);
                if rows == 0 || rows > span {
                    return Err(shape("rows", rows, "expected no more rows than pixels of a part"));
                }
                let cubes = u64::from(p.batch) * u64::from(p.groups / groups);
                let [across, down] = arch.max_cubes();
                if cubes > across.into() || chunks > down {
                    return Err(shape("groups", groups, "expected fewer cubes"));
                }
                let units = u64::from(rows) * u64::from(groups) * per_group;
                let units = u32::try_from(units).unwrap_or(u32::MAX);
                iterations(arch, 3 * u64::from(span.div_ceil(rows) + 1) + u64::from(chunks) + 8)?;
                limits(arch, units, units.saturating_mul(8))
            }
        }
    }

    fn cost(p: &GroupNormProblem) -> Cost {
        let (all, width) = (p.elements() as u64, u64::from(p.width()));
        let rows = 2 + if p.modulation_pitch > 0 { 2 * u64::from(p.batch) } else { 0 };
        Cost { flops: 8 * all, bytes: (2 * all + rows * width) * p.dtype.size() as u64 }
    }

    fn baseline(arch: &ArchProfile, p: &GroupNormProblem) -> Result<GroupNormConfig, Infeasible> {
        let rows = (64 / p.per_group(arch)).clamp(1, p.pixels);
        let shared = Shared { rows, groups: 1, chunks: 1 };
        match arch.cores() {
            None if Self::check(arch, p, &shared).is_ok() => Ok(shared),
            cores => {
                let alone = Alone { units: cores.unwrap_or(64) };
                Self::check(arch, p, &alone).map(|()| alone)
            }
        }
    }

    fn operands(queue: &Queue, p: &GroupNormProblem, seed: u64) -> GroupNormOperands {
        let noise = |len: usize, salt| crate::noise(queue, len, p.dtype, 8 * seed + salt);
        let width = p.width() as usize;
        GroupNormOperands {
            x: noise(p.len(0), 0),
            second: (p.channels[1] > 0).then(|| noise(p.len(1), 1)),
            weight: noise(width, 2),
            bias: noise(width, 3),
            modulation: (p.modulation_pitch > 0).then(|| noise(p.modulation_len(), 4)),
            out: queue.empty((p.elements() * p.dtype.size()).next_multiple_of(4)),
        }
    }

    fn outputs(p: &GroupNormProblem, operands: &GroupNormOperands) -> Vec<Output> {
        // Configs sum in different orders, then round to the dtype.
        let tolerance = rounding(p.dtype).max(1e-5);
        let handle = operands.out.clone();
        vec![Output { handle, dtype: p.dtype, len: p.elements(), tolerance }]
    }

    fn scratch_bytes(p: &GroupNormProblem, c: &GroupNormConfig) -> u64 {
        match *c {
            Shared { chunks, .. } if chunks > 1 => {
                8 * u64::from(chunks) * u64::from(p.groups) * u64::from(p.batch)
            }
            _ => 0,
        }
    }

    fn launch(
        queue: &Queue,
        p: &GroupNormProblem,
        c: &GroupNormConfig,
        operands: &GroupNormOperands,
        scratch: Option<&Handle>,
    ) {
        kernel::launch(queue, p, c, operands, scratch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(pixels: u32, channels: [u32; 2], groups: u32) -> GroupNormProblem {
        let (dtype, eps, activation) = (DType::F16, 1e-5, Some(Activation::Silu));
        let (batch, modulation_pitch) = (2, 0);
        GroupNormProblem {
            batch,
            pixels,
            channels,
            groups,
            dtype,
            eps,
            activation,
            modulation_pitch,
        }
    }

    #[test]
    fn every_profile_has_candidates_that_fit() {
        for name in arch::recorded() {
            let arch = ArchProfile::recorded(name).expect("recorded");
            for (pixels, channels, groups) in [
                (4096, [320, 0], 32),
                (4096, [640, 320], 32),
                (64, [1280, 1280], 32),
                (1, [3, 0], 3),
                (7, [40_000, 0], 1),
                (1 << 20, [8, 0], 1),
            ] {
                let p = problem(pixels, channels, groups).checked().expect("valid");
                let all = GroupNorm::candidates(&arch, &p);
                assert!(!all.is_empty(), "{name} {p:?}");
                let baseline = GroupNorm::baseline(&arch, &p).expect("there is one");
                for config in all.into_iter().chain([baseline]) {
                    GroupNorm::check(&arch, &p, &config).expect("it is feasible");
                }
            }
        }
    }

    #[test]
    fn invalid_problems_are_refused() {
        let refused = |p: GroupNormProblem| p.checked().expect_err("refused");
        let valid = problem(64, [32, 0], 8);
        assert_eq!(
            refused(GroupNormProblem { groups: 7, ..valid }),
            InvalidGroupNorm::Groups { groups: 7, channels: 32 }
        );
        for (axis, empty) in [
            ("batch", GroupNormProblem { batch: 0, ..valid }),
            ("pixels", GroupNormProblem { pixels: 0, ..valid }),
            ("channels", GroupNormProblem { channels: [0, 8], ..valid }),
            ("groups", GroupNormProblem { groups: 0, ..valid }),
        ] {
            assert_eq!(refused(empty), InvalidGroupNorm::Empty { axis });
        }
        assert_eq!(refused(GroupNormProblem { eps: -1.0, ..valid }), InvalidGroupNorm::Eps(-1.0));
        assert_eq!(
            refused(GroupNormProblem { modulation_pitch: 63, ..valid }),
            InvalidGroupNorm::Modulation { pitch: 63, need: 64 }
        );
        let bytes = GroupNormProblem { dtype: DType::I8, ..valid };
        assert_eq!(refused(bytes), InvalidGroupNorm::DType(DType::I8));
        let large = GroupNormProblem { batch: 1 << 16, pixels: 1 << 16, ..valid };
        assert_eq!(refused(large), InvalidGroupNorm::Large { axis: "pixels", size: 1 << 32 });
    }
}
