//! Score rules between the two matmuls, with their parameters.

use cubecl::prelude::*;

use crate::softcap::capped;

/// Comptime flags of the rules that apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rules {
    pub(crate) window: bool,
    pub(crate) softcap: bool,
    /// True if the log-sum-exp is stored.
    pub(crate) lse: bool,
}

/// Rules with their parameters.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scores {
    pub(super) scale: f32,
    pub(super) softcap: f32,
    pub(super) window: u32,
    /// -inf, the score of a hidden position; WGSL has no literal for it.
    pub(crate) hidden: f32,
    #[cube(comptime)]
    pub(crate) rules: Rules,
}

#[cube]
impl Scores {
    /// Factor that turns a score into a base-2 exponent: log₂e, times the scale if no soft cap
    /// applies.
    pub(crate) fn unit(&self) -> f32 {
        if comptime!(self.rules.softcap) {
            std::f32::consts::LOG2_E.runtime()
        } else {
            self.scale * std::f32::consts::LOG2_E
        }
    }

    /// Score for the dot product `dot`, in units of 1 / [`Scores::unit`].
    pub(crate) fn score(&self, dot: f32) -> f32 {
        if comptime!(self.rules.softcap) { capped(dot * self.scale, self.softcap) } else { dot }
    }

    /// First key that the query at position `position` sees; the last is its own.
    pub(crate) fn first(&self, position: i32) -> i32 {
        if comptime!(self.rules.window) {
            max(position - self.window as i32 + 1, 0i32.runtime())
        } else {
            0i32.runtime()
        }
    }
}
