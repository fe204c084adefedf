//! Generates Rust code from an ONNX graph at build time, with burn-onnx (formerly burn-import).
//! Convolutions, matmuls, attention and norms call
//! [`flashover::onnx::layers`](https://docs.rs/flashover), which runs Flashover's kernels.
//!
//! ```no_run
//! // build.rs
//! onnx_build::generator().input("model.onnx").out_dir("model/").run_from_script();
//! ```
//!
//! ```ignore
//! mod model {
//!     include!(concat!(env!("OUT_DIR"), "/model/model.rs"));
//! }
//! ```
//!
//! Filters of convolutions are stored channels-last, as the kernels read them.

use burn_onnx::ModelGen;
use burn_onnx::ext::proc_macro2::{Ident, Span, TokenStream};
use burn_onnx::ext::quote::quote;
use burn_onnx::ext::{
    ArgType, Argument, CodegenContext, Field, Imports, Node, NodeType, OpOverride, PackTensor,
    ProcessError, TensorData, arg_to_ident, bridge, create_deferred_tensor,
};
use onnx_ir::attention::AttentionNode;
use onnx_ir::node::padding::{AutoPad, PaddingConfig1d, PaddingConfig2d};

/// Operators whose generated code calls our kernels.
const OURS: [NodeType; 9] = [
    NodeType::Conv1d,
    NodeType::Conv2d,
    NodeType::Linear,
    NodeType::MatMul,
    NodeType::Gemm,
    NodeType::Attention,
    NodeType::LayerNormalization,
    NodeType::GroupNormalization,
    NodeType::InstanceNormalization,
];

/// Returns burn-onnx's generator, with our code for operators that have kernels of ours.
pub fn generator() -> ModelGen {
    let mut generator = ModelGen::new();
    for op in OURS {
        generator.register_op_override(Ours(op));
    }
    generator
}

struct Ours(NodeType);

/// Weights of a node, which become a field of the generated model.
struct Weighted<'a> {
    name: &'a str,
    /// Weight, then optionally a bias.
    inputs: &'a [Argument],
    /// True for filters of a convolution, which are stored channels-last.
    filters: bool,
}

impl<'a> Weighted<'a> {
    /// Returns the weights of a node; None for an operator without weights.
    fn from_node(node: &'a Node) -> Option<Self> {
        let (name, inputs, filters): (_, &[Argument], _) = match node {
            Node::Conv1d(own) => (&own.name, &own.inputs, true),
            Node::Conv2d(own) => (&own.name, &own.inputs, true),
            Node::Linear(own) => (&own.name, &own.inputs, false),
            Node::LayerNormalization(own) => (&own.name, &own.inputs, false),
            Node::GroupNormalization(own) => (&own.name, &own.inputs, false),
            Node::InstanceNormalization(own) => (&own.name, &own.inputs, false),
            _ => return None,
        };
        Some(Self { name, inputs: &inputs[1..], filters })
    }

    fn bias(&self) -> Option<&'a Argument> {
        self.inputs.get(1).filter(|own| !own.is_optional())
    }

    /// Returns true if the weights are constants.
    fn is_known(&self) -> bool {
        self.inputs[0].is_static() && self.bias().is_none_or(Argument::is_static)
    }

    fn shape(&self) -> Result<Vec<usize>, ProcessError> {
        let shape = self.inputs[0].ty.static_shape_known();
        let mut shape =
            shape.ok_or_else(|| refused(self.name, "the shape of its weight is unknown"))?;
        if self.filters {
            shape[1..].rotate_left(1);
        }
        Ok(shape)
    }

    fn field(&self) -> Result<Option<Field>, ProcessError> {
        if !self.is_known() {
            return Ok(None);
        }
        let (name, shape) = (ident(self.name), self.shape()?);
        let rank = shape.len();
        let bias = match self.bias().and_then(|own| own.ty.static_shape_known()) {
            Some(own) => {
                let count: usize = own.iter().product();
                quote! { Some(#count) }
            }
            None => quote! { None },
        };
        let ty = quote! { layers::Weights<#rank> };
        let init = quote! { let #name = layers::Weights::new([#(#shape),*], #bias, device); };
        Ok(Some(Field::new(self.name, ty, init)))
    }

    fn tensors(&self, field: &str) -> Result<Vec<PackTensor>, ProcessError> {
        if !self.is_known() {
            return Ok(Vec::new());
        }
        let own = create_deferred_tensor(&self.inputs[0], &format!("{field}.weight"));
        let mut own = own.ok_or_else(|| refused(self.name, "its weight is missing"))?;
        if self.filters {
            let (name, dtype) = (own.name.clone(), own.dtype);
            own = bridge::map_data(own, name, dtype, self.shape()?.into(), channels_last);
        }
        let bias = self.bias();
        let bias = bias.and_then(|own| create_deferred_tensor(own, &format!("{field}.bias")));
        Ok([own].into_iter().chain(bias).collect())
    }

    /// Returns the weights as an expression.
    fn tokens(&self, ctx: &mut CodegenContext<'_, '_>) -> TokenStream {
        if self.is_known() {
            let name = ident(self.name);
            return quote! { &self.#name };
        }
        let weight = ctx.arg(&self.inputs[0]);
        let bias = match self.bias() {
            Some(own) => {
                let own = ctx.arg(own);
                quote! { Some(#own) }
            }
            None => quote! { None },
        };
        match self.filters {
            true => quote! { &layers::Weights::from_filters(#weight, #bias) },
            false => quote! { &layers::Weights::from_tensors(#weight, #bias) },
        }
    }
}

impl OpOverride for Ours {
    fn target(&self) -> NodeType {
        self.0.clone()
    }

    fn register_imports(&self, imports: &mut Imports<'_>) {
        imports.register("flashover::onnx::layers");
    }

    fn field(&self, node: &Node) -> Result<Option<Field>, ProcessError> {
        Weighted::from_node(node).map_or(Ok(None), |own| own.field())
    }

    fn collect_tensors(&self, node: &Node, field: &str) -> Result<Vec<PackTensor>, ProcessError> {
        Weighted::from_node(node).map_or(Ok(Vec::new()), |own| own.tensors(field))
    }

    fn forward(
        &self,
        node: &Node,
        ctx: &mut CodegenContext<'_, '_>,
    ) -> Result<TokenStream, ProcessError> {
        if let Node::Attention(own) = node {
            return attention(own, ctx);
        }
        let (name, inputs, outputs) = (node.name(), node.inputs(), node.outputs());
        let (x, out) = (ctx.arg(&inputs[0]), arg_to_ident(&outputs[0]));
        let weights = Weighted::from_node(node).map(|own| own.tokens(ctx));
        let value = match node {
            Node::Conv1d(own) => {
                let pads = match &own.config.padding {
                    PaddingConfig1d::Valid => [0, 0],
                    PaddingConfig1d::Explicit(before, after) => [*before, *after],
                };
                let padding = padding(&own.config.auto_pad, &pads);
                let (stride, dilation) = (own.config.stride, own.config.dilation);
                filters(&x, &weights, &[stride], &padding, &[dilation], own.config.groups)
            }
            Node::Conv2d(own) => {
                let pads = match &own.config.padding {
                    PaddingConfig2d::Valid => [0; 4],
                    PaddingConfig2d::Explicit(top, left, bottom, right) => {
                        [*top, *left, *bottom, *right]
                    }
                };
                let padding = padding(&own.config.auto_pad, &pads);
                let (stride, dilation) = (&own.config.stride, &own.config.dilation);
                filters(&x, &weights, stride, &padding, dilation, own.config.groups)
            }
            Node::Linear(own) => {
                let transposed = own.config.transpose_weight;
                quote! { layers::linear(#x, #weights, #transposed) }
            }
            Node::MatMul(_) => {
                let b = ctx.arg(&inputs[1]);
                let ranks = [&inputs[0], &inputs[1], &outputs[0]].map(|own| own.ty.rank());
                quote! { layers::matmul::<#(#ranks),*>(#x, #b) }
            }
            Node::Gemm(own) => {
                let b = ctx.arg(&inputs[1]);
                let transposed = |own: TokenStream, is: i64| match is {
                    0 => own,
                    _ => quote! { #own.transpose() },
                };
                let (a, b) = (transposed(x, own.config.trans_a), transposed(b, own.config.trans_b));
                let c = inputs.get(2).filter(|own| !own.is_optional());
                let is_tensor = |own: &&Argument| matches!(own.ty, ArgType::Tensor(_));
                let addend = match c.filter(is_tensor) {
                    Some(own) => {
                        let own = ctx.arg(own);
                        quote! { Some(#own) }
                    }
                    None => quote! { None::<Tensor<1>> },
                };
                let (alpha, beta) = (f64::from(own.config.alpha), f64::from(own.config.beta));
                let product = quote! { layers::gemm(#a, #b, #addend, [#alpha, #beta]) };
                match c.filter(|own| !is_tensor(own)) {
                    Some(number) => {
                        let (number, beta) = (ctx.arg(number), own.config.beta);
                        quote! { #product + #number * #beta }
                    }
                    None => product,
                }
            }
            Node::LayerNormalization(own) => {
                if outputs.iter().skip(1).any(|own| !own.is_optional()) {
                    return Err(refused(name, "outputs Mean and InvStdDev are not supported"));
                }
                let (rank, epsilon) = (inputs[0].ty.rank(), own.config.epsilon);
                let first = own.config.axis.rem_euclid(rank as i64) as usize;
                quote! { layers::norm(#x, #weights, #first, #epsilon, true) }
            }
            Node::GroupNormalization(own) => {
                let (groups, epsilon) = (own.config.num_groups, own.config.epsilon);
                quote! { layers::group_norm(#x, #weights, #groups, #epsilon) }
            }
            Node::InstanceNormalization(own) => {
                let epsilon = own.config.epsilon;
                quote! { layers::instance_norm(#x, #weights, #epsilon) }
            }
            _ => return Err(refused(name, "expected an operator with kernels of ours")),
        };
        Ok(quote! { let #out = #value; })
    }
}

fn filters(
    x: &TokenStream,
    weights: &Option<TokenStream>,
    strides: &[usize],
    padding: &TokenStream,
    dilations: &[usize],
    groups: usize,
) -> TokenStream {
    quote! {
        layers::conv(
            #x,
            #weights,
            layers::Filters {
                strides: &[#(#strides),*],
                padding: #padding,
                dilations: &[#(#dilations),*],
                groups: #groups,
            },
        )
    }
}

fn padding(auto: &AutoPad, pads: &[usize]) -> TokenStream {
    let zeros = vec![0usize; pads.len()];
    match auto {
        AutoPad::NotSet => quote! { layers::Padding::Pads(&[#(#pads),*]) },
        AutoPad::Valid => quote! { layers::Padding::Pads(&[#(#zeros),*]) },
        AutoPad::SameUpper => quote! { layers::Padding::SameUpper },
        AutoPad::SameLower => quote! { layers::Padding::SameLower },
    }
}

fn attention(
    node: &AttentionNode,
    ctx: &mut CodegenContext<'_, '_>,
) -> Result<TokenStream, ProcessError> {
    let config = &node.config;
    let given = |at: usize| node.inputs.get(at).filter(|own| !own.is_optional());
    let made = |at: usize| node.outputs.get(at).filter(|own| !own.is_optional()).map(arg_to_ident);
    if made(3).is_some() || given(6).is_some() {
        return Err(refused(
            &node.name,
            "output qk_matmul_output and input nonpad_kv_seqlen are not supported",
        ));
    }
    let [q, k, v] = [0, 1, 2].map(|at| ctx.arg(&node.inputs[at]));
    let mask = match given(3) {
        Some(own) => {
            let own = ctx.arg(own);
            quote! { Some(#own.into()) }
        }
        None => quote! { None },
    };
    let past = match (given(4), given(5)) {
        (Some(k), Some(v)) => {
            let (k, v) = (ctx.arg(k), ctx.arg(v));
            quote! { Some([#k, #v]) }
        }
        _ => quote! { None },
    };
    let scale = match config.scale {
        Some(own) => quote! { Some(#own) },
        None => quote! { None },
    };
    let (causal, softcap) = (config.is_causal, config.softcap);
    let heads = [config.q_num_heads, config.kv_num_heads].map(|own| own.unwrap_or(0));
    let names = [0, 1, 2].map(|at| made(at).map_or_else(|| quote! { _ }, |own| quote! { #own }));
    let [out, keys, values] = names;
    Ok(quote! {
        let (#out, [#keys, #values]) = layers::attention(
            [#q, #k, #v],
            #mask,
            #past,
            layers::AttentionOptions {
                causal: #causal,
                scale: #scale,
                softcap: #softcap,
                heads: [#(#heads),*],
            },
        );
    })
}

/// Moves the second dimension of filters to the end.
fn channels_last(data: TensorData) -> TensorData {
    let shape = data.shape().to_vec();
    let (size, bytes) = (data.dtype().size(), data.as_bytes());
    let (channels, taps) = (shape[1], shape[2..].iter().product::<usize>());
    let mut out = Vec::with_capacity(bytes.len());
    for filter in 0..shape[0] {
        for tap in 0..taps {
            for channel in 0..channels {
                let from = ((filter * channels + channel) * taps + tap) * size;
                out.extend_from_slice(&bytes[from..from + size]);
            }
        }
    }
    let mut to = shape;
    to[1..].rotate_left(1);
    TensorData::from_bytes_vec(out, to, data.dtype())
}

fn ident(name: &str) -> Ident {
    Ident::new(name, Span::call_site())
}

fn refused(name: &str, why: &str) -> ProcessError {
    ProcessError::Custom(format!("{name}: {why}"))
}
