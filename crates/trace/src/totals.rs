//! Totals of a trace, per operator and per layer.

use std::collections::BTreeMap;

use tune::Cost;

use crate::Trace;

/// All calls of one operator.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Operator {
    /// Name of its span; for a launch outside of operators, the name of the kernel.
    pub name: String,
    pub calls: usize,
    /// Number of kernel launches in all calls.
    pub launches: usize,
    /// Run time of these launches in nanoseconds.
    pub total_ns: u64,
    /// Share of the run time of all launches.
    pub share: f64,
    /// Minimum work of all calls; `None` for kernels outside of operators.
    pub flops: Option<u64>,
    pub bytes: Option<u64>,
}

/// All launches of one part of a model.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Layer {
    pub name: String,
    /// Number of passes through the part.
    pub passes: usize,
    pub launches: usize,
    pub total_ns: u64,
    pub share: f64,
}

impl Operator {
    pub fn mean_ns(&self) -> f64 {
        self.total_ns as f64 / self.calls as f64
    }

    /// Returns operations per nanosecond.
    pub fn gflops(&self) -> Option<f64> {
        self.flops.map(|flops| flops as f64 / self.total_ns as f64)
    }

    /// Returns bytes per nanosecond.
    pub fn gbps(&self) -> Option<f64> {
        self.bytes.map(|bytes| bytes as f64 / self.total_ns as f64)
    }

    /// Returns the time of the minimum work at these rates (operations and bytes per nanosecond), divided by the
    /// measured time.
    pub fn share_of_ceiling(&self, gflops: Option<f64>, gbps: f64) -> Option<f64> {
        let compute = match (self.flops?, gflops) {
            (0, _) => 0.0,
            (flops, Some(ceiling)) => flops as f64 / ceiling,
            (_, None) => 0.0,
        };
        let floor = compute.max(self.bytes? as f64 / gbps);
        Some(floor / self.total_ns as f64)
    }
}

/// Name in [`Trace::layers`] for launches outside of all parts.
pub const ELSEWHERE: &str = "elsewhere";

#[derive(Default)]
struct Sum {
    spans: std::collections::BTreeSet<usize>,
    launches: usize,
    total_ns: u64,
}

impl Trace {
    /// Returns the total run time of all kernels in nanoseconds.
    pub fn busy_ns(&self) -> u64 {
        self.launches.iter().map(crate::Launch::ns).sum()
    }

    /// Sums the launches by operator, longest total first.
    pub fn operators(&self) -> Vec<Operator> {
        let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
        for launch in &self.launches {
            let own = self.outwards(launch.span).find(|at| self.spans[*at].cost.is_some());
            let name = own.map_or(launch.kernel.as_str(), |at| &self.spans[at].name);
            let sum = sums.entry(name).or_default();
            sum.spans.extend(own);
            sum.launches += 1;
            sum.total_ns += launch.ns();
        }
        let all = self.busy_ns().max(1) as f64;
        let mut operators: Vec<Operator> = sums
            .into_iter()
            .map(|(name, Sum { spans, launches, total_ns })| {
                let costs = || spans.iter().filter_map(|at| self.spans[*at].cost);
                let sum = |part: fn(Cost) -> u64| {
                    (!spans.is_empty()).then(|| costs().map(part).sum::<u64>())
                };
                Operator {
                    name: name.to_owned(),
                    calls: if spans.is_empty() { launches } else { spans.len() },
                    launches,
                    total_ns,
                    share: total_ns as f64 / all,
                    flops: sum(|cost| cost.flops),
                    bytes: sum(|cost| cost.bytes),
                }
            })
            .collect();
        operators.sort_by(|a, b| b.total_ns.cmp(&a.total_ns).then(a.name.cmp(&b.name)));
        operators
    }

    /// Sums the launches by the outermost span for which `part` returns true, in order of first appearance. Launches
    /// outside of all parts come last as [`ELSEWHERE`], with zero passes.
    pub fn layers(&self, part: impl Fn(&str) -> bool) -> Vec<Layer> {
        let mut order = Vec::new();
        let mut sums: BTreeMap<&str, Sum> = BTreeMap::new();
        for (at, span) in self.spans.iter().enumerate().filter(|(_, span)| part(&span.name)) {
            let sum = sums.entry(&span.name).or_insert_with(|| {
                order.push(span.name.as_str());
                Sum::default()
            });
            sum.spans.insert(at);
        }
        for launch in &self.launches {
            let own = self.outwards(launch.span).filter(|at| part(&self.spans[*at].name)).last();
            let name = own.map_or(ELSEWHERE, |at| self.spans[at].name.as_str());
            let sum = sums.entry(name).or_insert_with(|| {
                order.push(ELSEWHERE);
                Sum::default()
            });
            sum.launches += 1;
            sum.total_ns += launch.ns();
        }
        let all = self.busy_ns().max(1) as f64;
        let layer = |name: &str| {
            let Sum { spans, launches, total_ns } = &sums[name];
            Layer {
                name: name.to_owned(),
                passes: spans.len(),
                launches: *launches,
                total_ns: *total_ns,
                share: *total_ns as f64 / all,
            }
        };
        order.into_iter().map(layer).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Launch, Span};

    fn span(name: &str, parent: Option<usize>, cost: Option<[u64; 2]>) -> Span {
        let cost = cost.map(|[flops, bytes]| Cost { flops, bytes });
        Span { name: name.to_owned(), parent, thread: 0, begin_ns: 0, end_ns: 1, cost }
    }

    fn launch(kernel: &str, span: Option<usize>, ns: u64) -> Launch {
        let kernel = kernel.to_owned();
        Launch { kernel, span, begin_ns: 10, end_ns: 10 + ns, clock: Clock::Device }
    }

    /// Two layers with matmuls, the first with two passes, and launches of a library in between.
    fn trace() -> Trace {
        Trace {
            spans: vec![
                span("layer 0", None, None),
                span("matmul", Some(0), Some([100, 10])),
                span("layer 1", None, None),
                span("matmul", Some(2), Some([300, 30])),
                span("layer 0", None, None),
                span("norm", Some(4), Some([0, 60])),
            ],
            launches: vec![
                launch("product", Some(1), 10),
                launch("add_parts", Some(1), 5),
                launch("product", Some(3), 25),
                launch("copy", Some(2), 4),
                launch("norm_rows", Some(5), 6),
                launch("copy", None, 10),
            ],
            ..Trace::default()
        }
    }

    #[test]
    fn operators_have_the_launches_of_their_spans() {
        let operators = trace().operators();
        let seen: Vec<_> = operators
            .iter()
            .map(|o| (o.name.as_str(), o.calls, o.launches, o.total_ns, o.flops, o.bytes))
            .collect();
        assert_eq!(
            seen,
            [
                ("matmul", 2, 3, 40, Some(400), Some(40)),
                ("copy", 2, 2, 14, None, None),
                ("norm", 1, 1, 6, Some(0), Some(60)),
            ]
        );
        assert!((operators.iter().map(|o| o.share).sum::<f64>() - 1.0).abs() < 1e-12);
        let [product, copy, norm] = &operators[..] else { panic!("three") };
        assert_eq!(
            (product.gflops(), product.gbps(), product.mean_ns()),
            (Some(10.0), Some(1.0), 20.0)
        );
        // 400 operations at 20 per ns take 20 of 40 ns; 60 bytes at 20 per ns take 3 of 6 ns.
        assert_eq!(product.share_of_ceiling(Some(20.0), 20.0), Some(0.5));
        assert_eq!(norm.share_of_ceiling(Some(20.0), 20.0), Some(0.5));
        assert_eq!(copy.share_of_ceiling(Some(20.0), 20.0), None);
    }

    #[test]
    fn layers_have_what_ran_within_them() {
        let layers = trace().layers(|name| name.starts_with("layer"));
        let seen: Vec<_> =
            layers.iter().map(|l| (l.name.as_str(), l.passes, l.launches, l.total_ns)).collect();
        assert_eq!(seen, [("layer 0", 2, 3, 21), ("layer 1", 1, 2, 29), ("elsewhere", 0, 1, 10)]);
        let total: u64 = layers.iter().map(|layer| layer.total_ns).sum();
        assert_eq!(total, trace().busy_ns());
    }
}
