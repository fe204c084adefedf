//! Score rules between the two matmuls. Scale, soft cap, masks and bias are implemented only here.

use cubecl::prelude::*;

use super::{Dims, Span};
use crate::softcap::{capped, capped_slope};

/// Comptime flags of the rules that apply. They are part of the kernel's hash: CubeCL 0.11 does not
/// hash the presence of an optional buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rules {
    pub(crate) causal: bool,
    pub(crate) window: bool,
    pub(crate) softcap: bool,
    pub(crate) bias: bool,
    pub(crate) mask: bool,
    /// True if the log-sum-exp is stored.
    pub(crate) lse: bool,
    pub(crate) varlen: bool,
}

impl Rules {
    /// Returns true if scores need more than a factor on q·kᵀ.
    const fn bend(self) -> bool {
        self.softcap || self.bias
    }

    /// Returns true if every score needs processing, not only those of cut tiles.
    pub(super) const fn every(self) -> bool {
        self.bend() || self.mask
    }
}

/// Least score with a bias: a mask of -3.4e38 stays finite in units of log₂, so that a row of them
/// has equal weights.
const LEAST: f32 = -1e38;

/// Rules with their parameters and buffers.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scores<F: Float, M: Int> {
    pub(super) bias: ComptimeOption<Box<[F]>>,
    pub(super) mask: ComptimeOption<Box<[M]>>,
    pub(super) scale: f32,
    pub(super) softcap: f32,
    pub(super) window: u32,
    /// -inf, the score of a hidden key; WGSL has no literal for it.
    pub(crate) hidden: f32,
    #[cube(comptime)]
    pub(crate) rules: Rules,
}

/// Coordinates of one score: batch, head, query (`row`) and key (`col`).
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) row: u32,
    pub(crate) col: u32,
}

#[cube]
impl<F: Float, M: Int> Scores<F, M> {
    /// Factor that turns a stored score into a base-2 exponent: log₂e, times the scale if neither
    /// soft cap nor bias applies.
    pub(crate) fn unit(&self) -> f32 {
        if comptime!(self.rules.bend()) {
            std::f32::consts::LOG2_E.runtime()
        } else {
            self.scale * std::f32::consts::LOG2_E
        }
    }

    /// Range of keys that `rows` queries from `row` on may see, by causal mask and window: first,
    /// and one past the last. The first never exceeds the second.
    pub(crate) fn range(&self, span: &Span, row: u32, rows: u32) -> (u32, u32) {
        let (keys, zero) = (span.seq_kv as i32, 0i32.runtime());
        let first_position = row as i32 + span.offset;
        let last_position = min(row + rows, span.seq_q) as i32 - 1 + span.offset;
        let mut from = zero;
        let mut end = keys;
        if comptime!(self.rules.window) {
            from = clamp(first_position - self.window as i32 + 1, zero, keys);
            end = clamp(last_position + self.window as i32, zero, keys);
        }
        if comptime!(self.rules.causal) {
            end = clamp(last_position + 1, zero, keys);
        }
        (min(from, end) as u32, end as u32)
    }

    /// Range of queries that may see some of `keys` keys from `col` on, by causal mask and window:
    /// first, and one past the last. The first never exceeds the second.
    pub(crate) fn seers(&self, span: &Span, col: u32, keys: u32) -> (u32, u32) {
        let (queries, zero) = (span.seq_q as i32, 0i32.runtime());
        let first = col as i32 - span.offset;
        let last = min(col + keys, span.seq_kv) as i32 - 1 - span.offset;
        let mut from = zero;
        let mut end = queries;
        if comptime!(self.rules.window) {
            from = clamp(first - self.window as i32 + 1, zero, queries);
            end = clamp(last + self.window as i32, zero, queries);
        }
        if comptime!(self.rules.causal) {
            from = max(from, clamp(first, zero, queries));
        }
        (min(from, end) as u32, end as u32)
    }

    /// Returns true if key `col` exists and causal mask and window let query `row` see it.
    fn sees(&self, span: &Span, row: u32, col: u32) -> bool {
        let distance = row as i32 + span.offset - col as i32;
        let mut seen = col < span.seq_kv;
        if comptime!(self.rules.causal) {
            seen = seen && distance >= 0;
        }
        if comptime!(self.rules.window) {
            seen = seen && distance < self.window as i32 && -distance < self.window as i32;
        }
        seen
    }

    /// Score for the dot product `dot`, in units of 1 / [`Scores::unit`]; -inf if hidden.
    pub(crate) fn score(&self, dot: f32, place: &Place, span: &Span, dims: &Dims) -> f32 {
        let seen = self.sees(span, place.row, place.col);
        self.bent(dot, seen, place, dims)
    }

    fn bent(&self, dot: f32, seen: bool, place: &Place, dims: &Dims) -> f32 {
        let mut seen = seen;
        let mut score = dot;
        if comptime!(self.rules.bend()) {
            score *= self.scale;
        }
        if comptime!(self.rules.softcap) {
            score = capped(score, self.softcap);
        }
        #[comptime]
        match &self.mask {
            ComptimeOption::Some(mask) => {
                // Hidden positions may lie past the end of the mask; do not read them.
                if seen {
                    let hidden = mask[dims.mask.at(place)];
                    seen = hidden == M::new(0);
                }
            }
            ComptimeOption::None => {}
        }
        #[comptime]
        match &self.bias {
            ComptimeOption::Some(bias) => {
                if seen {
                    let own = f32::cast_from(bias[dims.bias.at(place)]);
                    let hidden = own == self.hidden;
                    let sum = score + own;
                    score = select(sum < LEAST, LEAST.runtime(), sum);
                    seen = !hidden;
                }
            }
            ComptimeOption::None => {}
        }
        select(seen, score, self.hidden)
    }

    /// Applies the rules to a plane's scores: the fragments of the region that starts at query and
    /// key `corner`.
    pub(crate) fn finish<NC: Size>(
        &self,
        s: &mut Sequence<Array<Vector<f32, NC>>>,
        corner: &Place,
        span: &Span,
        dims: &Dims,
        #[comptime] region: Region,
    ) {
        if comptime!(self.rules.every()) {
            self.each::<NC>(s, corner, span, dims, region);
        } else {
            let cut = self.cuts(corner, span, region);
            if cut {
                self.each::<NC>(s, corner, span, dims, region);
            }
        }
    }

    /// Returns true if causal mask, window or an end hides some score of the region.
    pub(super) fn cuts(&self, corner: &Place, span: &Span, #[comptime] region: Region) -> bool {
        let (queries, keys) = comptime!((region.queries, region.keys));
        let mut cut = false.runtime();
        if comptime!(!region.exact) {
            if comptime!(region.transposed) {
                cut = corner.row + queries > span.seq_q;
            } else {
                cut = corner.col + keys > span.seq_kv;
            }
        }
        let nearest = corner.row as i32 + span.offset - (corner.col + keys - 1) as i32;
        let furthest = (corner.row + queries - 1) as i32 + span.offset - corner.col as i32;
        if comptime!(self.rules.causal) {
            cut = cut || nearest < 0;
        }
        if comptime!(self.rules.window) {
            cut = cut || furthest >= self.window as i32 || -nearest >= self.window as i32;
        }
        cut
    }

    fn each<NC: Size>(
        &self,
        s: &mut Sequence<Array<Vector<f32, NC>>>,
        corner: &Place,
        span: &Span,
        dims: &Dims,
        #[comptime] region: Region,
    ) {
        let (frags, cols) = comptime!(region.fragments());
        let (down, across) = (UNIT_POS_X / 4, UNIT_POS_X % 4 * 2);
        #[unroll]
        for i in 0..frags {
            #[unroll]
            for j in 0..cols {
                let fragment = s.index_mut(comptime!(i * cols + j));
                #[unroll]
                for half in 0..2usize {
                    let mut pair = fragment[half];
                    #[unroll]
                    for e in 0..2usize {
                        let down = down + comptime!((16 * i + 8 * half) as u32);
                        let across = across + comptime!((8 * j + e) as u32);
                        let (row, col) = if comptime!(region.transposed) {
                            (across, down)
                        } else {
                            (down, across)
                        };
                        let place = Place {
                            batch: corner.batch,
                            head: corner.head,
                            row: corner.row + row,
                            col: corner.col + col,
                        };
                        let seen = place.row < span.seq_q && self.sees(span, place.row, place.col);
                        pair.insert(e, self.bent(pair.extract(e), seen, &place, dims));
                    }
                    fragment[half] = pair;
                }
            }
        }
    }

    /// Multiplies `gradients` of scores by the slope of the soft cap at the dot products `s`.
    pub(crate) fn slope<NC: Size>(
        &self,
        s: &Sequence<Array<Vector<f32, NC>>>,
        gradients: &mut Sequence<Array<Vector<f32, NC>>>,
        #[comptime] fragments: usize,
    ) {
        if comptime!(self.rules.softcap) {
            #[unroll]
            for at in 0..fragments {
                #[unroll]
                for half in 0..2usize {
                    let dots = s.index(at)[half];
                    let mut pair = gradients.index(at)[half];
                    #[unroll]
                    for e in 0..2usize {
                        pair.insert(e, pair.extract(e) * self.slope_at(dots.extract(e)));
                    }
                    gradients.index_mut(at)[half] = pair;
                }
            }
        }
    }

    /// Slope of the soft cap at dot product `dot`; 1 without a soft cap.
    pub(crate) fn slope_at(&self, dot: f32) -> f32 {
        if comptime!(self.rules.softcap) {
            capped_slope(dot * self.scale, self.softcap)
        } else {
            1.0f32.runtime()
        }
    }
}

/// Comptime geometry of a plane's scores, in fragments of 16 rows by 8 columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Region {
    pub(crate) queries: u32,
    pub(crate) keys: u32,
    /// True if rows are keys and columns are queries.
    pub(crate) transposed: bool,
    /// True if no column lies past the end.
    pub(crate) exact: bool,
}

impl Region {
    /// Number of fragments down and across.
    const fn fragments(self) -> (usize, usize) {
        let (rows, cols) =
            if self.transposed { (self.keys, self.queries) } else { (self.queries, self.keys) };
        (rows as usize / 16, cols as usize / 8)
    }
}
