//! What is done to a score between the two products: the one place that knows scale, soft cap, masks
//! and bias.

use cubecl::prelude::*;

use super::flash::FlashConfig;
use super::{Dims, Span};

/// Which rules there are: comptime, and part of the kernel's hash, in which CubeCL 0.11 does not tell an
/// optional buffer's presence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Rules {
    pub(crate) causal: bool,
    pub(crate) window: bool,
    pub(crate) softcap: bool,
    pub(crate) bias: bool,
    pub(crate) mask: bool,
    /// Whether the log-sum-exp is stored.
    pub(crate) lse: bool,
    pub(crate) varlen: bool,
}

impl Rules {
    /// Whether a score becomes more than a multiple of the product.
    const fn bend(self) -> bool {
        self.softcap || self.bias
    }
}

/// The rules with their numbers and buffers.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Scores<F: Float, M: Int> {
    pub(super) bias: ComptimeOption<Box<[F]>>,
    pub(super) mask: ComptimeOption<Box<[M]>>,
    pub(super) scale: f32,
    pub(super) softcap: f32,
    pub(super) window: u32,
    /// -inf, the score of a hidden key: WGSL has no literal for it.
    pub(crate) hidden: f32,
    #[cube(comptime)]
    pub(crate) rules: Rules,
}

/// A score: which query of which head, which key.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) batch: u32,
    pub(crate) head: u32,
    pub(crate) row: u32,
    pub(crate) col: u32,
}

#[cube]
impl<F: Float, M: Int> Scores<F, M> {
    /// What a stored score is multiplied by to be a power of two: log₂e, with the scale where no other
    /// rule comes between.
    pub(crate) fn unit(&self) -> f32 {
        if comptime!(self.rules.bend()) {
            std::f32::consts::LOG2_E.runtime()
        } else {
            self.scale * std::f32::consts::LOG2_E
        }
    }

    /// Keys that `rows` queries from `row` on may see, by order and window: first, and one past the
    /// last; never empty in the wrong direction.
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

    /// Whether order and window let query `row` see key `col`, which exists.
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

    /// The score of product `dot` in multiples of 1 / [`Scores::unit`], -inf where it is hidden.
    pub(crate) fn of(&self, dot: f32, place: &Place, span: &Span, dims: &Dims) -> f32 {
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
            score = self.softcap * (score / self.softcap).tanh();
        }
        #[comptime]
        match &self.mask {
            ComptimeOption::Some(mask) => {
                // What is not seen has no mask: nothing is read past the end.
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
                    score += f32::cast_from(bias[dims.bias.at(place)]);
                }
            }
            ComptimeOption::None => {}
        }
        select(seen, score, self.hidden)
    }

    /// Applies the rules to a plane's scores, fragments of 16 queries by 8 keys from `place` on; `row`
    /// is the plane's first query.
    #[expect(clippy::too_many_arguments, reason = "scores, where they are, what is there")]
    pub(crate) fn finish<NC: Size>(
        &self,
        s: &mut Sequence<Array<Vector<f32, NC>>>,
        place: &Place,
        span: &Span,
        dims: &Dims,
        row: u32,
        #[comptime] config: FlashConfig,
        #[comptime] exact: bool,
    ) {
        let (rows, keys) = comptime!((config.rows, config.tile_kv));
        if comptime!(self.rules.bend() || self.rules.mask) {
            self.each::<NC>(s, place, span, dims, config);
        } else {
            // Only tiles that a rule cuts.
            let first = place.col / keys * keys;
            let mut cut = false.runtime();
            if comptime!(!exact) {
                cut = first + keys > span.seq_kv;
            }
            let nearest = row as i32 + span.offset - (first + keys - 1) as i32;
            let furthest = (row + rows - 1) as i32 + span.offset - first as i32;
            if comptime!(self.rules.causal) {
                cut = cut || nearest < 0;
            }
            if comptime!(self.rules.window) {
                cut = cut || furthest >= self.window as i32 || -nearest >= self.window as i32;
            }
            if cut {
                self.each::<NC>(s, place, span, dims, config);
            }
        }
    }

    fn each<NC: Size>(
        &self,
        s: &mut Sequence<Array<Vector<f32, NC>>>,
        place: &Place,
        span: &Span,
        dims: &Dims,
        #[comptime] config: FlashConfig,
    ) {
        let fragments = comptime!(config.tile_kv as usize / 8);
        #[unroll]
        for i in 0..comptime!(config.rows as usize / 16) {
            #[unroll]
            for j in 0..fragments {
                let fragment = s.index_mut(comptime!(i * fragments + j));
                #[unroll]
                for half in 0..2usize {
                    let mut pair = fragment[half];
                    #[unroll]
                    for e in 0..2usize {
                        let here = Place {
                            batch: place.batch,
                            head: place.head,
                            row: place.row + comptime!((16 * i + 8 * half) as u32),
                            col: place.col + comptime!((8 * j + e) as u32),
                        };
                        // Rows past the end are never stored.
                        let last = Place {
                            batch: place.batch,
                            head: place.head,
                            row: min(here.row, span.seq_q - 1),
                            col: here.col,
                        };
                        let seen = self.sees(span, here.row, here.col);
                        pair.insert(e, self.bent(pair.extract(e), seen, &last, dims));
                    }
                    fragment[half] = pair;
                }
            }
        }
    }
}
