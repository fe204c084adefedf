"""Times torch on the cases in JSON lines from standard input, and prints one line per case."""

import functools
import itertools
import json
import sys
import time


def say(**fields):
    print(json.dumps(fields), flush=True)


try:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention
    from triton.testing import do_bench, do_bench_cudagraph

    say(version=torch.__version__, device=torch.cuda.get_device_name())
except Exception as why:  # the caller reports the missing module
    say(error=f"{type(why).__name__}: {why}")
    sys.exit(0)

DTYPES = {
    "f32": torch.float32,
    "tf32": torch.float32,
    "f16": torch.float16,
    "f16acc16": torch.float16,
    "bf16": torch.bfloat16,
}


def operand(batch, rows, cols, layout, dtype):
    shape = (batch, rows, cols) if layout == "row" else (batch, cols, rows)
    made = torch.randn(shape, device="cuda", dtype=dtype)
    made = made if layout == "row" else made.transpose(1, 2)
    return made[0] if batch == 1 else made


def matmul(case, dtype):
    """Returns a matmul that uses the next operand set at each call."""
    torch.backends.cuda.matmul.allow_tf32 = case["dtype"] == "tf32"
    torch.backends.cuda.matmul.allow_fp16_accumulation = case["dtype"] == "f16acc16"
    m, n, k, batch = case["m"], case["n"], case["k"], case["batch"]
    if case["rows"]:
        return grouped(case, dtype)
    # The number of operand sets equals ours, so that neither side reads them from the last-level cache.
    turns = itertools.cycle(
        [
            (
                operand(batch, m, k, case["lhs"], dtype),
                operand(batch, k, n, case["rhs"], dtype),
                operand(batch, m, n, "row", dtype),
            )
            for _ in range(case["sets"])
        ]
    )

    def run():
        lhs, rhs, out = next(turns)
        torch.matmul(lhs, rhs, out=out)

    return run


def grouped(case, dtype):
    """Returns a grouped matmul that uses the next operand set at each call."""
    m, n, k, groups = case["m"], case["n"], case["k"], case["batch"]
    ends = torch.tensor(case["rows"][1:], device="cuda", dtype=torch.int32)
    turns = itertools.cycle(
        [
            (operand(1, m, k, "row", dtype), operand(groups, k, n, case["rhs"], dtype))
            for _ in range(case["sets"])
        ]
    )

    def run():
        lhs, rhs = next(turns)
        torch.nn.functional.grouped_mm(lhs, rhs, offs=ends)

    return run


def attention(case, dtype):
    """Returns an attention by FlashAttention-2 that uses the next operand set at each call."""

    def heads(count, seq):
        shape = (case["batch"], count, seq, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=dtype)

    turns = itertools.cycle(
        [
            (
                heads(case["heads"], case["seq_q"]),
                heads(case["kv_heads"], case["seq_kv"]),
                heads(case["kv_heads"], case["seq_kv"]),
            )
            for _ in range(case["sets"])
        ]
    )
    grouped = case["heads"] != case["kv_heads"]

    def run():
        q, k, v = next(turns)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(q, k, v, is_causal=case["causal"], enable_gqa=grouped)

    return run


def attention_backward(case, dtype):
    """Returns the backward pass of that attention; it uses the next operand set at each call."""

    def heads(count, seq):
        shape = (case["batch"], count, seq, case["head_dim"])
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True)

    grouped = case["heads"] != case["kv_heads"]
    sets = []
    for _ in range(case["sets"]):
        q = heads(case["heads"], case["seq_q"])
        k, v = (heads(case["kv_heads"], case["seq_kv"]) for _ in range(2))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(
                q, k, v, is_causal=case["causal"], enable_gqa=grouped
            )
        sets.append((out, (q, k, v), torch.randn_like(out)))
    turns = itertools.cycle(sets)

    def run():
        out, inputs, dout = next(turns)
        torch.autograd.grad(out, inputs, dout, retain_graph=True)

    return run


def weights(case, dtype):
    """Returns NF4 weights, one per operand set."""
    from bitsandbytes.functional import quantize_4bit

    def weight():
        made = torch.randn((case["n"], case["k"]), device="cuda", dtype=dtype) / 50
        return quantize_4bit(
            made,
            blocksize=case["block_size"],
            quant_type="nf4",
            compress_statistics=case["nested"],
        )

    return [weight() for _ in range(case["sets"])]


def nf4(case, dtype):
    """Returns a matmul with a 4-bit weight by bitsandbytes; it uses the next operand set at each call."""
    from bitsandbytes import matmul_4bit

    x = torch.randn((case["m"], case["k"]), device="cuda", dtype=dtype)
    if case["glu"]:
        half = dict(case, n=case["n"] // 2)
        pairs = itertools.cycle(list(zip(weights(half, dtype), weights(half, dtype))))

        def run():
            gate, up = (matmul_4bit(x, c.t(), quant_state=s) for c, s in next(pairs))
            torch.nn.functional.silu(gate) * up

        return run
    turns = itertools.cycle(weights(case, dtype))

    def run():
        codes, state = next(turns)
        matmul_4bit(x, codes.t(), quant_state=state)

    return run


def nf4_dequantize(case, dtype):
    """Returns a dequantisation of a 4-bit weight by bitsandbytes."""
    from bitsandbytes.functional import dequantize_4bit

    turns = itertools.cycle(weights(case, dtype))

    def run():
        codes, state = next(turns)
        dequantize_4bit(codes, state)

    return run


def nf4_quantize(case, dtype):
    """Returns a quantisation to 4 bits by bitsandbytes."""
    from bitsandbytes.functional import quantize_4bit

    shape = (case["n"], case["k"])
    sets = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(case["sets"])]
    turns = itertools.cycle(sets)

    def run():
        quantize_4bit(
            next(turns),
            blocksize=case["block_size"],
            quant_type="nf4",
            compress_statistics=case["nested"],
        )

    return run


def rows(case):
    """Returns int8 weights of bitsandbytes, quantised values and absmax, one per operand set."""
    from bitsandbytes.functional import int8_vectorwise_quant

    def weight():
        made = torch.randn((case["n"], case["k"]), device="cuda", dtype=torch.float16) / 50
        return int8_vectorwise_quant(made)[:2]

    return [weight() for _ in range(case["sets"])]


def int8(case, dtype):
    """Returns a matmul with an int8 weight by bitsandbytes, which always rounds x to int8 too."""
    from bitsandbytes import MatmulLtState, matmul as matmul_8bit

    x = torch.randn((case["m"], case["k"]), device="cuda", dtype=dtype)
    turns = []
    for codes, scb in rows(case):
        state = MatmulLtState()
        state.CB, state.SCB, state.has_fp16_weights = codes, scb, False
        state.is_training, state.threshold = False, case["threshold"]
        turns.append(state)
    turns = itertools.cycle(turns)

    def run():
        state = next(turns)
        matmul_8bit(x, state.CB, state=state, threshold=case["threshold"])

    # The host reads which columns are outlier columns, so the matmul cannot be captured in a graph.
    run.waits = case["threshold"] > 0
    return run


def int8_dequantize(case, dtype):
    """Returns a dequantisation of an int8 weight by bitsandbytes."""
    from bitsandbytes.functional import int8_vectorwise_dequant

    turns = itertools.cycle(rows(case))

    def run():
        codes, scb = next(turns)
        int8_vectorwise_dequant(codes, scb).to(dtype)

    return run


def int8_quantize(case, dtype):
    """Returns a quantisation to int8 by bitsandbytes, which needs f16 input."""
    from bitsandbytes.functional import int8_vectorwise_quant

    shape = (case["n"], case["k"])
    sets = [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(case["sets"])]
    turns = itertools.cycle(sets)

    def run():
        int8_vectorwise_quant(next(turns).to(torch.float16))

    return run


def cross_entropy(case, dtype):
    """Returns the loss of rows of logits, with the gradient if requested, fused by torch.compile."""

    def tokens():
        return torch.randint(case["vocab"], (case["rows"],), device="cuda")

    def rows():
        shape = (case["rows"], case["vocab"])
        return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=case["gradient"])

    sets = [(rows(), tokens()) for _ in range(case["sets"])]
    turns = itertools.cycle(sets)

    @torch.compile
    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")

    def run():
        logits, targets = next(turns)
        out = loss(logits, targets)
        if case["gradient"]:
            torch.autograd.grad(out, logits)

    return run


def adamw(case, dtype):
    """Returns a fused AdamW step of torch, or of bitsandbytes if the moments have 8 bits."""
    # bitsandbytes keeps the moments of smaller parameters in f32.
    weights = torch.nn.Parameter(torch.randn(case["elements"], device="cuda", dtype=dtype))
    weights.grad = torch.randn_like(weights)
    options = dict(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    if case["moments"] == "int8":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit([weights], **options).step
    return torch.optim.AdamW([weights], fused=True, **options).step


def norm_backward(case, dtype):
    """Returns the gradients of a norm, and the sum with the residual's gradient, fused by torch.compile."""
    shape, width = (case["rows"], case["width"]), case["width"]

    def made():
        x, dout, residual = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
        weight, bias = (torch.randn(width, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2))
        return x.requires_grad_(), weight, bias, dout, residual

    turns = itertools.cycle([made() for _ in range(case["sets"])])

    @torch.compile
    def out(x, weight, bias, residual):
        if case["kind"] == "layer":
            y = torch.nn.functional.layer_norm(x, (width,), weight, bias)
        else:
            y = torch.nn.functional.rms_norm(x, (width,), weight)
        # The gradient of the first result is added to that of x, as the residual stream does.
        return x + 0, y

    x, weight, bias, _, residual = next(turns)
    of = [x, weight, bias] if case["kind"] == "layer" else [x, weight]
    kept = out(x, weight, bias, residual)

    def run():
        _, _, _, dout, residual = next(turns)
        torch.autograd.grad(kept, of, (residual, dout), retain_graph=True)

    # A backward pass cannot be captured in a graph by itself.
    run.waits = True
    return run


ACTIVATIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}


def activate(case, dtype):
    """Returns an activation with or without a gate, fused by torch.compile."""
    act = ACTIVATIONS[case["activation"]]
    made = [
        [torch.randn(case["rows"], case["width"], device="cuda", dtype=dtype) for _ in range(2 if case["gated"] else 1)]
        for _ in range(case["sets"])
    ]
    turns = itertools.cycle(made)

    @torch.compile
    def out(z, up=None):
        return act(z) if up is None else act(z) * up

    def run():
        out(*next(turns))

    return run


def activation_backward(case, dtype):
    """Returns the gradients of an activation with or without a gate, fused by torch.compile."""
    shape = (case["rows"], case["width"])
    act = ACTIVATIONS[case["activation"]]
    of = [torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(2 if case["gated"] else 1)]
    douts = itertools.cycle([torch.randn(shape, device="cuda", dtype=dtype) for _ in range(case["sets"])])

    @torch.compile
    def out(z, up=None):
        return act(z) if up is None else act(z) * up

    kept = out(*of)

    def run():
        torch.autograd.grad(kept, of, next(douts), retain_graph=True)

    # A backward pass cannot be captured in a graph by itself.
    run.waits = True
    return run


def conv(case, dtype):
    """Returns a convolution with channels last, by the fastest algorithm of cuDNN."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = case["dtype"] == "tf32"
    (top, bottom), (left, right) = case["padding"]
    if top != bottom or left != right or top < 0 or left < 0:
        raise ValueError("cuDNN pads both sides alike")
    last = dict(device="cuda", dtype=dtype, memory_format=torch.channels_last)
    shape = (case["batch"], case["channels"], *case["image"])
    weight = (case["filters"], case["channels"] // case["groups"], *case["taps"])
    made = [(torch.empty(shape, **last).normal_(), torch.empty(weight, **last).normal_()) for _ in range(case["sets"])]
    turns = itertools.cycle(made)

    def run():
        x, w = next(turns)
        torch.nn.functional.conv2d(x, w, None, case["stride"], (top, left), case["dilation"], case["groups"])

    return run


def group_norm(case, dtype):
    """Returns a group norm with SiLU and channels last, fused by torch.compile."""
    size = int(case["pixels"] ** 0.5)
    shape = (case["batch"], case["channels"], size, case["pixels"] // size)
    last = dict(device="cuda", dtype=dtype, memory_format=torch.channels_last)
    made = [torch.empty(shape, **last).normal_() for _ in range(case["sets"])]
    weight, bias = (torch.randn(case["channels"], device="cuda", dtype=dtype) for _ in range(2))
    turns = itertools.cycle(made)

    @torch.compile
    def out(x):
        return torch.nn.functional.silu(torch.nn.functional.group_norm(x, case["groups"], weight, bias, 1e-5))

    def run():
        out(next(turns))

    return run


def embed_backward(case, dtype):
    """Returns the gradient of an embedding table."""
    rows, hidden, vocab = case["rows"], case["hidden"], case["vocab"]
    # Half of the rows belong to a few frequent tokens.
    share = torch.rand(rows, device="cuda") ** 2
    tokens = (share * case["segments"]).long() * (vocab // case["segments"])
    douts = itertools.cycle([torch.randn(rows, hidden, device="cuda", dtype=dtype) for _ in range(case["sets"])])

    def run():
        torch.ops.aten.embedding_dense_backward(next(douts), tokens, vocab, -1, False)

    # It sorts the tokens, which waits for the host.
    run.waits = True
    return run


OPS = {
    "activate": activate,
    "conv": conv,
    "group_norm": group_norm,
    "activation_backward": activation_backward,
    "embed_backward": embed_backward,
    "norm_backward": norm_backward,
    "adamw": adamw,
    "cross_entropy": cross_entropy,
    "matmul": matmul,
    "attention": attention,
    "attention_backward": attention_backward,
    "nf4": nf4,
    "nf4_dequantize": nf4_dequantize,
    "nf4_quantize": nf4_quantize,
    "int8": int8,
    "int8_dequantize": int8_dequantize,
    "int8_quantize": int8_quantize,
}

for line in sys.stdin:
    case = json.loads(line)
    try:
        run = OPS[case["op"]](case, DTYPES[case["dtype"]])
        torch.cuda.synchronize()
        time.sleep(0.3)  # our measurements begin with the same pause
        ms = do_bench(run, return_mode="median")
        # Short launches are timed in a graph of many calls, each with the next operand set, as in our timing. A
        # single short launch would include the launch latency and the write-back of do_bench's cache flush.
        if ms < 0.25 and not getattr(run, "waits", False):
            ms = min(ms, do_bench_cudagraph(run, return_mode="median"))
        say(ns=ms * 1e6)
    except Exception as why:
        say(error=f"{type(why).__name__}: {why}")
    run = None
    torch.cuda.empty_cache()
