//! Recurrent layers: RNN, GRU and LSTM, step by step.

use burn::backend::Dispatch;
use burn::backend::ops::{ActivationOps, FloatTensorOps};

use ops::Ctx;

use super::linear::matmul;
use super::{Call, Inputs, Read, Run};
use crate::array::{Array, scalar_of};

pub(super) fn read(call: &Call<'_>) -> Read {
    let cell = match call.op() {
        "RNN" => Cell::Rnn,
        "GRU" => Cell::Gru,
        "LSTM" => Cell::Lstm,
        _ => return None,
    };
    Some(layer(call, cell))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cell {
    Rnn,
    Gru,
    Lstm,
}

impl Cell {
    /// Returns the number of gates, and ONNX's default activations.
    fn usual(self) -> (usize, &'static [&'static str]) {
        match self {
            Self::Rnn => (1, &["Tanh"]),
            Self::Gru => (3, &["Sigmoid", "Tanh"]),
            Self::Lstm => (4, &["Sigmoid", "Tanh", "Tanh"]),
        }
    }
}

/// An activation with its parameters.
#[derive(Debug, Clone)]
struct Activation {
    name: String,
    alpha: f64,
    beta: f64,
}

impl Activation {
    fn from_name(name: &str, alpha: Option<f64>, beta: Option<f64>) -> Result<Self, String> {
        let name = name.to_ascii_lowercase();
        let (usual_alpha, usual_beta) = match name.as_str() {
            "leakyrelu" => (0.01, 0.0),
            "hardsigmoid" => (0.2, 0.5),
            "elu" | "thresholdedrelu" | "affine" | "scaledtanh" => {
                (1.0, if name == "scaledtanh" { 1.0 } else { 0.0 })
            }
            "relu" | "tanh" | "sigmoid" | "softsign" | "softplus" => (0.0, 0.0),
            other => return Err(format!("activation `{other}` is not supported")),
        };
        Ok(Self { name, alpha: alpha.unwrap_or(usual_alpha), beta: beta.unwrap_or(usual_beta) })
    }

    fn run(&self, x: Array) -> Array {
        let Self { alpha, beta, .. } = *self;
        match self.name.as_str() {
            "relu" => x.at_least(0.0),
            "tanh" => x.float(Dispatch::float_tanh),
            "sigmoid" => x.float(Dispatch::sigmoid),
            "softsign" => {
                let scale = x.clone().float(Dispatch::float_abs).plus_number(1.0);
                x.over(scale)
            }
            "softplus" => x.float(Dispatch::float_exp).float(Dispatch::float_log1p),
            "affine" => x.times_number(alpha).plus_number(beta),
            "scaledtanh" => x.times_number(beta).float(Dispatch::float_tanh).times_number(alpha),
            "hardsigmoid" => x.times_number(alpha).plus_number(beta).at_least(0.0).at_most(1.0),
            "thresholdedrelu" => {
                let zero =
                    Array::full(&x.shape(), scalar_of(0.0, x.dtype()), x.dtype(), &x.device());
                zero.replaced(x.clone().above(alpha), x)
            }
            "leakyrelu" => x.clone().at_least(0.0).plus(x.at_most(0.0).times_number(alpha)),
            _ => {
                let below = x.clone().at_most(0.0).float(Dispatch::float_exp).plus_number(-1.0);
                x.at_least(0.0).plus(below.times_number(alpha))
            }
        }
    }
}

struct Layer {
    cell: Cell,
    size: usize,
    directions: Vec<bool>,
    /// Activations per direction.
    activations: Vec<Vec<Activation>>,
    clip: Option<f64>,
    batch_first: bool,
    before_reset: bool,
    coupled: bool,
}

fn layer(call: &Call<'_>, cell: Cell) -> Result<Run, String> {
    let size = call.int("hidden_size").and_then(|own| usize::try_from(own).ok());
    let directions = match call.text("direction").unwrap_or("forward") {
        "forward" => vec![false],
        "reverse" => vec![true],
        "bidirectional" => vec![false, true],
        other => return Err(format!("direction `{other}` is not supported")),
    };
    let (_, usual) = cell.usual();
    let names: Vec<String> = match call.texts("activations") {
        Some(names) => names.to_vec(),
        None => usual
            .iter()
            .cycle()
            .take(usual.len() * directions.len())
            .map(|own| (*own).to_owned())
            .collect(),
    };
    if names.len() != usual.len() * directions.len() {
        let want = usual.len() * directions.len();
        return Err(format!("expected {want} activations, got {}", names.len()));
    }
    let number = |list: &str, at: usize| {
        call.floats(list).and_then(|all| all.get(at)).map(|own| f64::from(*own))
    };
    let all = names.iter().enumerate().map(|(at, name)| {
        Activation::from_name(name, number("activation_alpha", at), number("activation_beta", at))
    });
    let all: Vec<Activation> = all.collect::<Result<_, _>>()?;
    let layer = Layer {
        cell,
        size: size.ok_or("attribute `hidden_size` is missing")?,
        activations: all.chunks(usual.len()).map(<[Activation]>::to_vec).collect(),
        directions,
        clip: call.float("clip"),
        batch_first: call.int("layout") == Some(1),
        before_reset: call.flag("linear_before_reset"),
        coupled: call.flag("input_forget"),
    };
    Ok(Box::new(move |inputs| layer.run(inputs)))
}

impl Layer {
    /// Returns Y `[steps, directions, batch, size]`, the last hidden states, and the last cell
    /// states of an LSTM.
    fn run(&self, inputs: &Inputs<'_>) -> Result<Vec<Array>, String> {
        let mut x = inputs.get(0)?;
        if self.batch_first {
            x = x.permute(&[1, 0, 2]);
        }
        let dtype = x.dtype();
        let [steps, batch, width] = x.shape()[..] else {
            return Err(format!("expected x of rank 3, got shape {:?}", x.shape()));
        };
        let lengths = inputs.maybe(4).map(|own| own.lengths()).transpose()?;
        let lengths = lengths.unwrap_or_else(|| vec![steps; batch]);
        let (mut lines, mut states, mut cells) = (Vec::new(), Vec::new(), Vec::new());
        for (direction, reversed) in self.directions.iter().enumerate() {
            let part = |at: usize| {
                inputs.maybe(at).map(|own| {
                    let mut shape = own.shape();
                    shape.remove(0);
                    own.narrow(0, direction, direction + 1).reshape(&shape)
                })
            };
            let (w, r) =
                (part(1).ok_or("input W is missing")?, part(2).ok_or("input R is missing")?);
            let start = |at: usize| match inputs.maybe(at) {
                None => {
                    let zero = scalar_of(0.0, dtype);
                    Array::full(&[batch, self.size], zero, dtype, &x.device())
                }
                Some(own) => {
                    let along = usize::from(self.batch_first);
                    own.narrow(along, direction, direction + 1).reshape(&[batch, self.size])
                }
            };
            let mut state = start(5);
            let mut cell = (self.cell == Cell::Lstm).then(|| start(6));
            let weights = Weights { w, r, bias: part(3), peepholes: part(7) };
            let mut made = vec![None; steps];
            for step in 0..steps {
                let at = if *reversed { steps - 1 - step } else { step };
                let input = x.clone().narrow(0, at, at + 1).reshape(&[batch, width]);
                let (next, next_cell) = self.step(
                    inputs.ctx,
                    input,
                    &state,
                    cell.as_ref(),
                    &weights,
                    &self.activations[direction],
                )?;
                // Sequences outside of their length keep their state.
                let lives: Vec<bool> = lengths.iter().map(|own| at < *own).collect();
                if lives.iter().all(|own| *own) {
                    made[at] = Some(next.clone());
                    (state, cell) = (next, next_cell);
                } else {
                    let data = burn::tensor::TensorData::new(lives, [batch, 1]);
                    let lives = Array::from_data(data, &x.device());
                    let zero = Array::full(&[], scalar_of(0.0, dtype), dtype, &x.device());
                    made[at] = Some(lives.clone().choose(next.clone(), zero)?);
                    state = lives.clone().choose(next, state)?;
                    cell = match (next_cell, cell) {
                        (Some(next), Some(cell)) => Some(lives.choose(next, cell)?),
                        _ => None,
                    };
                }
            }
            let shape = [1, 1, batch, self.size];
            let all = made.into_iter().flatten().map(|own| own.reshape(&shape)).collect();
            lines.push(match steps {
                0 => {
                    let zero = scalar_of(0.0, dtype);
                    Array::full(&[0, 1, batch, self.size], zero, dtype, &x.device())
                }
                _ => Array::concat(all, 0),
            });
            states.push(state.reshape(&[1, batch, self.size]));
            cells.extend(cell.map(|own| own.reshape(&[1, batch, self.size])));
        }
        let (y, state) = (Array::concat(lines, 1), Array::concat(states, 0));
        let batch_first = |own: Array| if self.batch_first { own.permute(&[1, 0, 2]) } else { own };
        let y = if self.batch_first { y.permute(&[2, 0, 1, 3]) } else { y };
        let mut out = vec![y, batch_first(state)];
        if !cells.is_empty() {
            out.push(batch_first(Array::concat(cells, 0)));
        }
        Ok(out)
    }

    fn clipped(&self, x: Array) -> Array {
        match self.clip {
            Some(most) => x.at_least(-most).at_most(most),
            None => x,
        }
    }

    /// Returns the next hidden state, and the next cell state of an LSTM.
    fn step(
        &self,
        ctx: &Ctx,
        x: Array,
        state: &Array,
        cell: Option<&Array>,
        weights: &Weights,
        activations: &[Activation],
    ) -> Result<(Array, Option<Array>), String> {
        let (gates, _) = self.cell.usual();
        let size = self.size;
        let gate = |own: &Array, at: usize| own.clone().narrow(1, at * size, (at + 1) * size);
        let bias = |of_state: bool, at: usize| {
            let from = (if of_state { gates } else { 0 } + at) * size;
            weights.bias.as_ref().map(|own| own.clone().narrow(0, from, from + size))
        };
        let with = |x: Array, bias: Option<Array>| match bias {
            Some(bias) => x.plus(bias),
            None => x,
        };
        let of_x = matmul(ctx, x, weights.w.clone().permute(&[1, 0]))?;
        let of_state = matmul(ctx, state.clone(), weights.r.clone().permute(&[1, 0]))?;
        let sum = |at: usize| {
            let own = with(gate(&of_x, at), bias(false, at));
            own.plus(with(gate(&of_state, at), bias(true, at)))
        };
        Ok(match (self.cell, cell) {
            (Cell::Rnn, _) => (activations[0].run(self.clipped(sum(0))), None),
            (Cell::Gru, _) => {
                let update = activations[0].run(self.clipped(sum(0)));
                let reset = activations[0].run(self.clipped(sum(1)));
                let own = with(gate(&of_x, 2), bias(false, 2));
                let hidden = match self.before_reset {
                    true => reset.times(with(gate(&of_state, 2), bias(true, 2))),
                    false => {
                        let r = weights.r.clone().narrow(0, 2 * size, 3 * size);
                        with(
                            matmul(ctx, reset.times(state.clone()), r.permute(&[1, 0]))?,
                            bias(true, 2),
                        )
                    }
                };
                let hidden = activations[1].run(self.clipped(own.plus(hidden)));
                let kept = update.clone().times(state.clone());
                let rest = update.times_number(-1.0).plus_number(1.0).times(hidden);
                (rest.plus(kept), None)
            }
            (Cell::Lstm, Some(cell)) => {
                let peep = |at: usize, cell: &Array| {
                    weights.peepholes.as_ref().map(|own| {
                        own.clone().narrow(0, at * size, (at + 1) * size).times(cell.clone())
                    })
                };
                // ONNX order of gates: input, output, forget, cell; of peepholes: input, output,
                // forget.
                let input = activations[0].run(self.clipped(with(sum(0), peep(0, cell))));
                let forget = match self.coupled {
                    true => input.clone().times_number(-1.0).plus_number(1.0),
                    false => activations[0].run(self.clipped(with(sum(2), peep(2, cell)))),
                };
                let new = activations[1].run(self.clipped(sum(3)));
                let next = forget.times(cell.clone()).plus(input.times(new));
                let output = activations[0].run(self.clipped(with(sum(1), peep(1, &next))));
                (output.times(activations[2].run(next.clone())), Some(next))
            }
            (Cell::Lstm, None) => return Err("the cell state of the LSTM is missing".to_owned()),
        })
    }
}

/// Weights of a direction.
struct Weights {
    w: Array,
    r: Array,
    bias: Option<Array>,
    peepholes: Option<Array>,
}
