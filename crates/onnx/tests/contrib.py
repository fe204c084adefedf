"""Writes cases of the domain com.microsoft for contrib.rs, with the results of ONNX Runtime's CPU provider.

    pip install numpy onnx==1.23.2 onnxruntime==1.32.0 safetensors
    python contrib.py contrib.safetensors

Operators that ONNX Runtime supports only on GPUs are compared with an equivalent operator that its CPU provider supports.
"""
import sys

import numpy as np
import onnxruntime as ort
from onnx import helper as h
from onnx import numpy_helper as nh
from safetensors.numpy import save_file

rng = np.random.default_rng(7)
made = {}


def f(*shape):
    # Few digits: such files pack well.
    return (np.round(rng.standard_normal(shape) * 16) / 16).astype(np.float32)


def case(name, op, inputs, outputs=1, domain="com.microsoft", const=(), res=None, **attrs):
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    outs = [f"y{i}" if keep else "" for i, keep in enumerate(outputs if isinstance(outputs, (list, tuple)) else [1] * outputs)]
    node = h.make_node(op, names, outs, domain=domain, **attrs)
    vi = lambda n, x: h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    given = [(n, x) for i, (n, x) in enumerate(zip(names, inputs)) if x is not None and i not in const]
    init = [nh.from_array(inputs[i], names[i]) for i in const]
    graph = h.make_graph([node], "g", [vi(n, x) for n, x in given], [h.make_empty_tensor_value_info(o) for o in outs if o], init)
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)], ir_version=9)
    if res is None:
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        res = session.run([o for o in outs if o], dict(given))
    # The results tell the types of the outputs.
    del graph.output[:]
    graph.output.extend(vi(o, r) for o, r in zip([o for o in outs if o], res))
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)], ir_version=9)
    made[f"{name} model"] = np.frombuffer(model.SerializeToString(), np.uint8)
    made.update({f"{name} input {i}": np.asarray(x, order="C") for i, (_, x) in enumerate(given)})
    made.update({f"{name} output {i}": np.asarray(r, order="C") for i, r in enumerate(res)})


i32 = lambda x: np.array(x, np.int32)
B, S, N, H = 2, 5, 4, 8
W = N * H
# norms and activations
x = f(B, S, 32)
case("skip_ln", "SkipLayerNormalization", [x, f(B, S, 32), f(32), f(32), f(32)], [1, 0, 0, 1], epsilon=1e-5)
case("skip_ln_plain", "SkipLayerNormalization", [x, f(B, S, 32), f(32)], epsilon=1e-5)
case("skip_sln", "SkipSimplifiedLayerNormalization", [x, f(B, S, 32), f(32), f(32)], [1, 0, 0, 1], epsilon=1e-5)
case("skip_sln_flat", "SkipSimplifiedLayerNormalization", [x, f(S, 32), f(32)], epsilon=1e-5)
case("sln", "SimplifiedLayerNormalization", [x, f(32)], domain="", epsilon=1e-5, axis=-1, stash_type=1)
case("bias_gelu", "BiasGelu", [x, f(32)])
case("gelu", "Gelu", [x])
case("fast_gelu", "FastGelu", [x, f(32)])
case("fast_gelu_plain", "FastGelu", [x])
case("quick_gelu", "QuickGelu", [x], alpha=1.702)
case("quick_gelu_half", "QuickGelu", [x], alpha=0.5)
for ta in (0, 1):
    for tb in (0, 1):
        a, b = (f(2, 7, 5) if ta else f(2, 5, 7)), (f(2, 6, 7) if tb else f(2, 7, 6))
        case(f"fused_matmul_{ta}{tb}", "FusedMatMul", [a, b], transA=ta, transB=tb, alpha=0.5)
case("fused_matmul_batch", "FusedMatMul", [f(5, 2, 7), f(2, 7, 6)], transBatchA=1, alpha=2.0)
case("fused_matmul_batch_t", "FusedMatMul", [f(7, 2, 5), f(6, 2, 7)], transBatchA=1, transA=1, transBatchB=1, transB=1)
for act in ("Relu", "LeakyRelu", "Sigmoid", "Tanh"):
    case(f"fused_gemm_{act.lower()}", "FusedGemm", [f(5, 7), f(7, 6), f(6)], activation=act, alpha=0.7, beta=0.3, activation_alpha=0.2)
xi, w = f(1, 8, 9, 7), f(6, 8, 3, 3)
for act, par in (("Relu", None), ("LeakyRelu", [0.2]), ("Clip", [-0.5, 0.5]), ("HardSigmoid", [0.3, 0.4]), ("Tanh", None), ("Sigmoid", None)):
    kw = {"activation_params": par} if par else {}
    case(f"fused_conv_{act.lower()}", "FusedConv", [xi, w, f(6)], activation=act, pads=[1, 1, 1, 1], kernel_shape=[3, 3], **kw)
case("fused_conv_add", "FusedConv", [xi, w, f(6), f(1, 6, 9, 7)], activation="Relu", pads=[1, 1, 1, 1], kernel_shape=[3, 3])
case("fused_conv_group", "FusedConv", [xi, f(8, 2, 3, 3), f(8)], activation="Relu", pads=[1, 1, 1, 1], strides=[2, 2], group=4)
to = lambda x: np.ascontiguousarray(np.moveaxis(x, 1, -1))
def ref(op, inputs, domain="com.microsoft", outs=1, **attrs):
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]
    vi = lambda n, x: h.make_tensor_value_info(n, h.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    g = h.make_graph([h.make_node(op, names, [f"y{i}" for i in range(outs)], domain=domain, **attrs)], "g", [vi(n, x) for n, x in zip(names, inputs) if x is not None], [h.make_empty_tensor_value_info(f"y{i}") for i in range(outs)])
    m = h.make_model(g, opset_imports=[h.make_opsetid("", 21), h.make_opsetid("com.microsoft", 1)], ir_version=9)
    return ort.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {n: x for n, x in zip(names, inputs) if x is not None})
wl = f(6, 8, 3, 3); bl = f(6); zl = f(1, 6, 9, 7); xl = f(1, 8, 9, 7)
case("nhwc_fused_conv", "NhwcFusedConv", [to(xl), wl, bl, to(zl)], res=[to(ref("FusedConv", [xl, wl, bl, zl], activation="Relu", pads=[1, 1, 1, 1], kernel_shape=[3, 3])[0])], activation="Relu", pads=[1, 1, 1, 1], kernel_shape=[3, 3])
case("nhwc_conv", "NhwcConv", [to(xl), to(wl), bl], res=[to(ref("Conv", [xl, wl, bl], domain="", pads=[1, 1, 1, 1], kernel_shape=[3, 3])[0])], pads=[1, 1, 1, 1], kernel_shape=[3, 3])
gx, gg, gb, gs = f(2, 16, 6, 5), f(16), f(16), f(2, 16, 6, 5)
gn = lambda x: ref("GroupNormalization", [x, gg, gb], domain="", num_groups=4, epsilon=1e-5)[0]
silu = lambda x: (x / (1 + np.exp(-x))).astype(np.float32)
case("group_norm", "GroupNorm", [to(gx), gg, gb], res=[to(gn(gx))], groups=4, activation=0, epsilon=1e-5, channels_last=1)
case("group_norm_first", "GroupNorm", [gx, gg, gb], res=[gn(gx)], groups=4, activation=0, epsilon=1e-5, channels_last=0)
case("group_norm_silu", "GroupNorm", [to(gx), gg, gb], res=[to(silu(gn(gx)))], groups=4, activation=1, epsilon=1e-5, channels_last=1)
sum_ = gx + gs + gb[None, :, None, None]
case("skip_group_norm", "SkipGroupNorm", [to(gx), gg, gb, to(gs), gb], 2, res=[to(silu(gn(sum_))), to(sum_)], groups=4, activation=1, epsilon=1e-5, channels_last=1)
for bits in (2, 4, 8):
    for zp in (0, 1):
        K, Nn, blk = 64, 12, 32
        q = rng.integers(0, 256, (Nn, K // blk, blk * bits // 8), np.uint8)
        sc = (f(Nn * (K // blk)) * 0.1).astype(np.float32)
        z = [rng.integers(0, 256, (Nn * ((K // blk * bits + 7) // 8),), np.uint8)] if zp else []
        case(f"matmul_{bits}bits_{zp}", "MatMulNBits", [f(2, 5, K), q, sc] + z, const=tuple(range(1, 3 + zp)), K=K, N=Nn, bits=bits, block_size=blk)
K, Nn, blk = 80, 10, 32
q = rng.integers(0, 256, (Nn, 3, 16), np.uint8)
case("matmul_4bits_tail", "MatMulNBits", [f(5, K), q, f(Nn * 3) * 0.1], const=(1, 2), K=K, N=Nn, bits=4, block_size=blk)
case("matmul_4bits_bias", "MatMulNBits", [f(5, K), q, f(Nn * 3) * 0.1, None, None, f(Nn)], const=(1, 2), K=K, N=Nn, bits=4, block_size=blk)
# rotary
cos, sin = np.cos(f(16, H // 2)), np.sin(f(16, H // 2))
pos = np.tile(np.arange(S), (B, 1)).astype(np.int64); pos[1] += 3
for il in (0, 1):
    case(f"rotary_{il}", "RotaryEmbedding", [f(B, S, W), pos, cos, sin], interleaved=il)
    case(f"rotary_offset_{il}", "RotaryEmbedding", [f(B, S, W), np.array([2], np.int64), cos, sin], interleaved=il)
    case(f"rotary_4d_{il}", "RotaryEmbedding", [f(B, N, S, H), pos, cos, sin], interleaved=il)
case("rotary_part", "RotaryEmbedding", [f(B, S, W), pos, np.cos(f(16, 2)), np.sin(f(16, 2))], num_heads=N, rotary_embedding_dim=4)
# Attention
wq, bq = f(24, 3 * W), f(3 * W)
xa = f(B, S, 24)
case("attention", "Attention", [xa, wq, bq], num_heads=N)
case("attention_no_bias", "Attention", [xa, wq], num_heads=N)
case("attention_causal", "Attention", [xa, wq, bq], num_heads=N, unidirectional=1)
case("attention_scale", "Attention", [xa, wq, bq], num_heads=N, scale=0.2)
m2 = np.ones((B, S), np.int32); m2[0, 3:] = 0
case("attention_mask2", "Attention", [xa, wq, bq, m2], num_heads=N)
case("attention_mask1", "Attention", [xa, wq, bq, i32([3, 5])], num_heads=N)
case("attention_mask1_ends", "Attention", [xa, wq, bq, i32([4, 5, 1, 2])], num_heads=N)
m3 = rng.integers(0, 2, (B, S, S)).astype(np.int32); m3[:, :, 0] = 1
case("attention_mask3", "Attention", [xa, wq, bq, m3], num_heads=N)
case("attention_mask_none", "Attention", [xa, wq, bq, np.zeros((B, S), np.int32)], num_heads=N)
case("attention_filter", "Attention", [xa, wq, bq, m2], num_heads=N, mask_filter_value=-1.0)
case("attention_past", "Attention", [xa, wq, bq, None, f(2, B, N, 3, H)], 2, num_heads=N, unidirectional=1)
case("attention_past_mask", "Attention", [xa, wq, bq, np.concatenate([np.ones((B, 3), np.int32), m2], 1), f(2, B, N, 3, H)], 2, num_heads=N)
case("attention_bias", "Attention", [xa, wq, bq, None, None, f(B, N, S, S)], num_heads=N)
case("attention_bias_one", "Attention", [xa, wq, bq, m2, None, f(1, N, S, S)], num_heads=N)
case("attention_sizes", "Attention", [xa, f(24, 32 + 32 + 48), f(112)], num_heads=N, qkv_hidden_sizes=[32, 32, 48])
# MHA
q, k, v = f(B, S, W), f(B, 7, W), f(B, 7, W)
case("mha", "MultiHeadAttention", [q, k, v], num_heads=N)
case("mha_bias", "MultiHeadAttention", [q, k, v, f(3 * W)], num_heads=N)
case("mha_causal", "MultiHeadAttention", [q, f(B, S, W), f(B, S, W)], num_heads=N, unidirectional=1)
case("mha_v", "MultiHeadAttention", [q, k, f(B, 7, 48), f(2 * W + 48)], num_heads=N)
mk = np.ones((B, 7), np.int32); mk[1, 4:] = 0
case("mha_mask2", "MultiHeadAttention", [q, k, v, None, mk], num_heads=N)
case("mha_mask1", "MultiHeadAttention", [q, k, v, None, i32([6, 3])], num_heads=N)
mk3 = rng.integers(0, 2, (B, S, 7)).astype(np.int32); mk3[:, :, 0] = 1
case("mha_mask3", "MultiHeadAttention", [q, k, v, None, mk3], num_heads=N)
case("mha_bias4", "MultiHeadAttention", [q, k, v, None, None, f(1, 1, S, 7)], num_heads=N)
case("mha_kv4", "MultiHeadAttention", [q, f(B, N, 7, H), f(B, N, 7, H)], num_heads=N)
case("mha_kv4_bias", "MultiHeadAttention", [q, f(B, N, 7, H), f(B, N, 7, H), f(3 * W)], num_heads=N)
pk = f(B, S, N, 3, H); parts = [np.ascontiguousarray(pk[:, :, :, i]).reshape(B, S, W) for i in range(3)]
case("mha_packed", "MultiHeadAttention", [pk], res=ref("MultiHeadAttention", parts, num_heads=N), num_heads=N)
pk = f(B, 7, N, 2, H); parts = [np.ascontiguousarray(pk[:, :, :, i]).reshape(B, 7, W) for i in range(2)]
case("mha_packed_kv", "MultiHeadAttention", [q, pk], res=ref("MultiHeadAttention", [q] + parts, num_heads=N), num_heads=N)
case("mha_past", "MultiHeadAttention", [q, f(B, S, W), f(B, S, W), None, None, None, f(B, N, 3, H), f(B, N, 3, H)], 3, num_heads=N)
case("mha_past_causal", "MultiHeadAttention", [q, f(B, S, W), f(B, S, W), f(3 * W), None, None, f(B, N, 3, H), f(B, N, 3, H)], 3, num_heads=N, unidirectional=1)
# GQA
KV, H = 2, 16; W = N * H
cos, sin = np.cos(f(16, H // 2)), np.sin(f(16, H // 2))
kv = lambda s: f(B, s, KV * H)
empty = np.zeros((B, KV, 0, H), np.float32)
tot = lambda t: i32(t)
for rot in (0, 1):
    rc = [cos, sin] if rot else [None, None]
    kw = dict(num_heads=N, kv_num_heads=KV, do_rotary=rot)
    case(f"gqa_prompt_{rot}", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S)] + rc, 3, **kw)
    case(f"gqa_prompt_ragged_{rot}", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1, 2]), tot(S)] + rc, 3, **kw)
    case(f"gqa_decode_{rot}", "GroupQueryAttention", [f(B, 1, W), kv(1), kv(1), f(B, KV, 6, H), f(B, KV, 6, H), i32([6, 6]), tot(7)] + rc, 3, **kw)
    case(f"gqa_decode_ragged_{rot}", "GroupQueryAttention", [f(B, 1, W), kv(1), kv(1), f(B, KV, 6, H), f(B, KV, 6, H), i32([6, 3]), tot(7)] + rc, [1, 0, 0] if 0 else 3, **kw)
    case(f"gqa_decode_shared_{rot}", "GroupQueryAttention", [f(B, 1, W), kv(1), kv(1), f(B, KV, 12, H), f(B, KV, 12, H), i32([6, 6]), tot(7)] + rc, 3, **kw)
    case(f"gqa_packed_{rot}", "GroupQueryAttention", [f(B, S, W + 2 * KV * H), None, None, empty, empty, i32([S - 1] * B), tot(S)] + rc, 3, **kw)
one = lambda *s: f(1, *s)
case("gqa_chunk", "GroupQueryAttention", [one(3, W), one(3, KV * H), one(3, KV * H), one(KV, 6, H), one(KV, 6, H), i32([8]), tot(9), cos, sin], 3, num_heads=N, kv_num_heads=KV, do_rotary=1)
case("gqa_window", "GroupQueryAttention", [f(B, 9, W), kv(9), kv(9), empty, empty, i32([8, 8]), tot(9), None, None], 3, num_heads=N, kv_num_heads=KV, local_window_size=3)
case("gqa_window_decode", "GroupQueryAttention", [f(B, 1, W), kv(1), kv(1), f(B, KV, 6, H), f(B, KV, 6, H), i32([6, 6]), tot(7), None, None], 3, num_heads=N, kv_num_heads=KV, local_window_size=3)
case("gqa_softcap", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S), None, None], 3, num_heads=N, kv_num_heads=KV, softcap=2.0)
case("gqa_smooth", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S), None, None], 3, num_heads=N, kv_num_heads=KV, smooth_softmax=1)
case("gqa_sink", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S), None, None, None, None, f(N)], 3, num_heads=N, kv_num_heads=KV)
case("gqa_bias", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S), None, None, None, f(1, N, S, S)], 3, num_heads=N, kv_num_heads=KV)
case("gqa_positions", "GroupQueryAttention", [f(B, 1, W), kv(1), kv(1), f(B, KV, 6, H), f(B, KV, 6, H), i32([6, 6]), tot(7), cos, sin, np.array([[9], [4]], np.int64)], 3, num_heads=N, kv_num_heads=KV, do_rotary=1)
case("gqa_interleaved", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S), cos, sin], 3, num_heads=N, kv_num_heads=KV, do_rotary=1, rotary_interleaved=1)
case("gqa_bidirectional", "GroupQueryAttention", [f(B, S, W), kv(S), kv(S), empty, empty, i32([S - 1] * B), tot(S), None, None], 3, num_heads=N, kv_num_heads=KV, causal=0)
save_file(made, sys.argv[1])
