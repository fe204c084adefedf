//! Fuses chains of elementwise nodes into one program, which runs as one kernel.

use burn::tensor::DType;
use ops::{Activation, Constant, Function, MAX_INPUTS, MAX_STEPS, Operation, Program, Step};

use crate::graph::{Attribute, Node, ValueId};

use super::epilogues::activation;
use super::view::{View, in_place_of};

/// A program under construction. The registers of inputs come first, once all inputs are known.
#[derive(Default)]
struct Chain {
    inputs: Vec<ValueId>,
    steps: Vec<Made>,
}

/// A step that reads inputs and steps by index.
#[derive(Clone, Copy)]
enum Made {
    Constant(Constant),
    Unary(Function, Source),
    Binary(Operation, Source, Source),
    Select(Source, Source, Source),
}

#[derive(Clone, Copy)]
enum Source {
    Input(usize),
    Step(usize),
}

/// Converts an elementwise node to a program, fused with the programs before it that only this node
/// reads.
pub(super) fn rewrite(view: &mut View<'_>, at: usize) -> Option<()> {
    let node = view.node(at)?.clone();
    let y = node.y()?;
    let chooses_bools = node.op == "Where" && matches!(view.dtype(y), Some(DType::Bool(_)));
    if chooses_bools || !is_fused(view, y) || node.outputs.iter().flatten().count() != 1 {
        return None;
    }
    let mut chain = Chain::default();
    let mut places = Vec::new();
    let operands = operands(&node)?;
    let mut sources = Vec::new();
    for id in operands {
        sources.push(chain.read(view, id, y, &mut places)?);
    }
    let steps = chain.steps.len();
    chain.apply(view, &node, &sources)?;
    if chain.inputs.is_empty() || chain.inputs.len() > MAX_INPUTS || chain.steps.len() > MAX_STEPS {
        // Start a new chain.
        (chain, places) = (Chain::default(), Vec::new());
        let mut sources = Vec::new();
        for id in operands_of(&node) {
            sources.push(chain.alone(view, id, y)?);
        }
        chain.apply(view, &node, &sources)?;
        if chain.inputs.is_empty() || chain.inputs.len() > MAX_INPUTS {
            return None;
        }
    }
    let joined = steps > 0 && !places.is_empty();
    let inputs = chain.inputs.iter().map(|id| Some(*id)).collect();
    let own = in_place_of(&node, "flashover::Pointwise", inputs)
        .with("program", Attribute::Program(chain.program()));
    places.into_iter().for_each(|place| view.remove(place));
    view.replace(at, own);
    joined.then_some(())
}

/// Returns true for a value that a program can compute: floats of up to 32 bits or bools, of known
/// shape.
fn is_fused(view: &View<'_>, id: ValueId) -> bool {
    let dtype = view
        .dtype(id)
        .is_some_and(|own| matches!(own, DType::F32 | DType::F16 | DType::BF16 | DType::Bool(_)));
    dtype && view.shape(id).is_some_and(|shape| !shape.contains(&0))
}

fn operands_of(node: &Node) -> Vec<ValueId> {
    // The limits of a `Clip` are parameters of its activation.
    let count = if node.op == "Clip" { 1 } else { node.given };
    node.inputs.iter().take(count).flatten().copied().collect()
}

fn operands(node: &Node) -> Option<Vec<ValueId>> {
    const FUSED: [&str; 39] = [
        "Abs",
        "Add",
        "And",
        "Cast",
        "Ceil",
        "Clip",
        "Cos",
        "Div",
        "Equal",
        "Erf",
        "Exp",
        "Floor",
        "Gelu",
        "Greater",
        "GreaterOrEqual",
        "HardSigmoid",
        "HardSwish",
        "LeakyRelu",
        "Less",
        "LessOrEqual",
        "Log",
        "Max",
        "Min",
        "Mul",
        "Neg",
        "Not",
        "Or",
        "Pow",
        "Reciprocal",
        "Relu",
        "Round",
        "Sigmoid",
        "Sign",
        "Sin",
        "Sqrt",
        "Sub",
        "Swish",
        "Tanh",
        "Where",
    ];
    FUSED.contains(&node.op.as_str()).then(|| operands_of(node))
}

impl Chain {
    /// Reads a value: appends its program if only this chain reads it, or adds the value as an
    /// input.
    fn read(
        &mut self,
        view: &View<'_>,
        id: ValueId,
        y: ValueId,
        places: &mut Vec<usize>,
    ) -> Option<Source> {
        let whole = view.shape(id).is_some() && view.shape(id) == view.shape(y);
        let place = view
            .producer_index(id, "flashover::Pointwise")
            .filter(|_| whole && view.is_read_once(id));
        let Some(place) = place else { return self.alone(view, id, y) };
        let before = view.node(place)?;
        let Some(Attribute::Program(program)) = before.attributes.get("program") else {
            return None;
        };
        let mut registers = Vec::new();
        for id in before.inputs.iter().flatten() {
            registers.push(self.input(*id));
        }
        for step in &program.steps {
            let source = |own: u8| registers[usize::from(own)];
            let made = match *step {
                Step::Constant(own) => Made::Constant(own),
                Step::Unary(function, a) => Made::Unary(function, source(a)),
                Step::Binary(operation, a, b) => Made::Binary(operation, source(a), source(b)),
                Step::Select(a, b, c) => Made::Select(source(a), source(b), source(c)),
            };
            registers.push(self.push(made));
        }
        places.push(place);
        registers.last().copied()
    }

    /// Reads a value without fusion: a number as a constant, others as an input.
    fn alone(&mut self, view: &View<'_>, id: ValueId, y: ValueId) -> Option<Source> {
        let rank = view.dims(id)?.len();
        if rank > view.dims(y)?.len() || !is_fused(view, id) {
            return None;
        }
        Some(match view.number(id) {
            Some(number) => self.push(Made::Constant(Constant::new(number as f32))),
            None => self.input(id),
        })
    }

    fn input(&mut self, id: ValueId) -> Source {
        let at = self.inputs.iter().position(|own| *own == id).unwrap_or_else(|| {
            self.inputs.push(id);
            self.inputs.len() - 1
        });
        Source::Input(at)
    }

    fn push(&mut self, made: Made) -> Source {
        self.steps.push(made);
        Source::Step(self.steps.len() - 1)
    }

    /// Adds the steps of a node.
    fn apply(&mut self, view: &View<'_>, node: &Node, sources: &[Source]) -> Option<()> {
        let first = *sources.first()?;
        let pair = |operation| Some(Made::Binary(operation, first, *sources.get(1)?));
        let swapped = |operation| Some(Made::Binary(operation, *sources.get(1)?, first));
        let one = |function| Some(Made::Unary(function, first));
        let two = sources.len() == 2;
        let made = match node.op.as_str() {
            "Swish" if activation(view, node).is_none() => {
                let alpha = Constant::new(node.float("alpha").unwrap_or(1.0) as f32);
                let alpha = self.push(Made::Constant(alpha));
                let scaled = self.push(Made::Binary(Operation::Multiply, first, alpha));
                let gate = Function::Activation(Activation::Sigmoid);
                let gate = self.push(Made::Unary(gate, scaled));
                Some(Made::Binary(Operation::Multiply, first, gate))
            }
            "Cast" => {
                // Cast to bool: x is not 0.
                let to = view.dtype(node.y()?)?;
                if matches!(to, DType::Bool(_)) {
                    let not = self.push(Made::Unary(Function::Not, first));
                    Some(Made::Unary(Function::Not, not))
                } else {
                    None
                }
            }
            "Add" => pair(Operation::Add),
            "Sub" => pair(Operation::Subtract),
            "Mul" => pair(Operation::Multiply),
            "Div" => pair(Operation::Divide),
            "Pow" => self.power(view, node, sources),
            "Max" if two => pair(Operation::Max),
            "Min" if two => pair(Operation::Min),
            "Equal" => pair(Operation::Equal),
            "Greater" => pair(Operation::Greater),
            "GreaterOrEqual" => pair(Operation::GreaterOrEqual),
            "Less" => swapped(Operation::Greater),
            "LessOrEqual" => swapped(Operation::GreaterOrEqual),
            "And" => pair(Operation::And),
            "Or" => pair(Operation::Or),
            "Where" => Some(Made::Select(first, *sources.get(1)?, *sources.get(2)?)),
            "Abs" => one(Function::Abs),
            "Ceil" => one(Function::Ceil),
            "Cos" => one(Function::Cos),
            "Erf" => one(Function::Erf),
            "Exp" => one(Function::Exp),
            "Floor" => one(Function::Floor),
            "Log" => one(Function::Log),
            "Neg" => one(Function::Negate),
            "Not" => one(Function::Not),
            "Reciprocal" => one(Function::Reciprocal),
            "Round" => one(Function::Round),
            "Sign" => one(Function::Sign),
            "Sin" => one(Function::Sin),
            "Sqrt" => one(Function::Sqrt),
            _ => one(Function::Activation(activation(view, node)?)),
        };
        match made {
            Some(made) => {
                self.push(made);
            }
            // A cast between floats only rounds the result; a longer chain omits it.
            None if node.op == "Cast" => {
                if let Source::Input(_) = first {
                    let one = self.push(Made::Constant(Constant::new(1.0)));
                    self.push(Made::Binary(Operation::Multiply, first, one));
                }
            }
            None => return None,
        }
        Some(())
    }

    /// Computes powers by multiplications and roots where they are exact; these accept a negative
    /// base.
    fn power(&mut self, view: &View<'_>, node: &Node, sources: &[Source]) -> Option<Made> {
        let (first, second) = (*sources.first()?, *sources.get(1)?);
        let product = |a, b| Made::Binary(Operation::Multiply, a, b);
        let exponent = view.number(node.input(1)?);
        match exponent {
            Some(2.0) => Some(product(first, first)),
            Some(3.0) => {
                let square = self.push(product(first, first));
                Some(product(square, first))
            }
            Some(0.5) => Some(Made::Unary(Function::Sqrt, first)),
            Some(-1.0) => Some(Made::Unary(Function::Reciprocal, first)),
            _ => Some(Made::Binary(Operation::Power, first, second)),
        }
    }

    /// Returns the program without unused steps.
    fn program(&self) -> Program {
        let mut read = vec![false; self.steps.len()];
        if let Some(last) = read.last_mut() {
            *last = true;
        }
        for at in (0..self.steps.len()).rev() {
            if read[at] {
                self.steps[at].sources().into_iter().flatten().for_each(|own| {
                    if let Source::Step(step) = own {
                        read[step] = true;
                    }
                });
            }
        }
        let inputs = self.inputs.len();
        let mut places = vec![0; self.steps.len()];
        let mut steps = Vec::new();
        for at in (0..self.steps.len()).filter(|at| read[*at]) {
            places[at] = (inputs + steps.len()) as u8;
            let register = |own: Source| match own {
                Source::Input(input) => input as u8,
                Source::Step(step) => places[step],
            };
            steps.push(match self.steps[at] {
                Made::Constant(own) => Step::Constant(own),
                Made::Unary(function, a) => Step::Unary(function, register(a)),
                Made::Binary(operation, a, b) => Step::Binary(operation, register(a), register(b)),
                Made::Select(a, b, c) => Step::Select(register(a), register(b), register(c)),
            });
        }
        Program { inputs: inputs as u8, steps }
    }
}

impl Made {
    const fn sources(self) -> [Option<Source>; 3] {
        match self {
            Self::Constant(_) => [None; 3],
            Self::Unary(_, a) => [Some(a), None, None],
            Self::Binary(_, a, b) => [Some(a), Some(b), None],
            Self::Select(a, b, c) => [Some(a), Some(b), Some(c)],
        }
    }
}
