"""Compares attention and its gradients with torch's on a CUDA card.

    python3 gradients_against_torch.py FLASHOVER > rows.jsonl

Both run on the same inputs. The reference is plain attention by torch in f64 on the stored values. An error is the
largest difference divided by the largest value. A case passes if our error is at most twice torch's error plus one
rounding unit; the unit in f32 is 2^-18, the loss of a sum of 2048 terms. The exit code is 1 if a case fails.
"""

import itertools
import json
import math
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {dtype: name for name, dtype in TYPES.items()}
UNIT = {torch.float32: 2**-18, torch.float16: 2**-10, torch.bfloat16: 2**-7}
PARTS = ("out", "dq", "dk", "dv")


def write(path, tensors):
    """Writes a safetensors file: the length of the JSON header, the header, the bytes."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            start, end = about["data_offsets"]
            flat = torch.frombuffer(bytearray(data[start:end]), dtype=TYPES[about["dtype"]])
            tensors[name] = flat.reshape(about["shape"]).cuda()
    return tensors


def hidden(seq_q, seq_kv, causal, window):
    """Returns True where a query sees a key. Causal order is bottom-right aligned."""
    distance = torch.arange(seq_q, device="cuda")[:, None] + seq_kv - seq_q - torch.arange(seq_kv, device="cuda")
    seen = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance.abs() < window
    return seen


def plain(q, k, v, seen):
    """Returns plain attention in f64. A query that sees no keys gives 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3)) / math.sqrt(q.shape[3])
    weights = scores.masked_fill(~seen, -math.inf).softmax(3).nan_to_num(0.0)
    return weights @ v


def differentiated(of, q, k, v, dout):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    out = of(q, k, v)
    out.backward(dout)
    return dict(zip(PARTS, (out.detach(), q.grad, k.grad, v.grad)))


def torchs(seen, whole):
    """Returns torch's attention. It passes a mask only if a key is hidden, because flash attention supports no mask."""
    mask = None if whole else seen
    return lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def ours(program, folder, tensors, settings):
    folder.mkdir()
    write(folder / "in.safetensors", tensors)
    command = [program, "op", "attention", "--backend", "cuda"]
    command += ["--input", folder / "in.safetensors", "--output", folder / "out.safetensors"]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return read(folder / "out.safetensors")


def judged(case, mine, about):
    dtype, size, causal, window, tensors, _ = case
    seq_q, seq_kv = size[3:5]
    seen = hidden(seq_q, seq_kv, causal, window)
    exact = differentiated(lambda q, k, v: plain(q, k, v, seen), *(t.double() for t in tensors.values()))
    theirs = differentiated(torchs(seen, bool(seen.all())), *tensors.values())
    row = dict(zip(("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"), size))
    row |= {"dtype": NAMES[dtype].lower(), "causal": causal, "window": window}
    good = True
    for part in PARTS:
        error = lambda got: ((got.double() - exact[part]).abs().max() / exact[part].abs().max()).item()
        own, peer = error(mine[part]), error(theirs[part])
        # Written so that NaN fails.
        good &= own <= 2 * peer + UNIT[dtype]
        row |= {f"{part}_error": own, f"{part}_torch_error": peer}
    print(json.dumps(row | {"passed": good} | about), flush=True)
    return good


def main(program):
    torch.manual_seed(7)
    folder = Path(tempfile.mkdtemp())
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout
    about = {"version": version.strip(), "card": torch.cuda.get_device_name(), "torch": torch.__version__}
    rules = [(False, None), (True, None), (True, 100)]
    sizes = [(2, 8, 2, 512, 512, 128), (1, 4, 4, 333, 501, 64), (1, 6, 2, 257, 257, 80), (1, 4, 1, 300, 300, 256)]
    cases = []
    for dtype, size, (causal, window) in itertools.product(TYPES.values(), sizes, rules):
        batch, heads, kv_heads, seq_q, seq_kv, head_dim = size
        make = lambda heads, seq: torch.randn(batch, heads, seq, head_dim, device="cuda").to(dtype)
        q, k, v, dout = make(heads, seq_q), make(kv_heads, seq_kv), make(kv_heads, seq_kv), make(heads, seq_q)
        settings = [f"causal={str(causal).lower()}"] + ([f"window={window}"] if window else [])
        cases.append((dtype, size, causal, window, {"q": q, "k": k, "v": v, "dout": dout}, settings))
    # Each case is a process, which compiles for seconds.
    with ThreadPoolExecutor(12) as pool:
        own = [pool.submit(ours, program, folder / str(i), case[4], case[5]) for i, case in enumerate(cases)]
        passed = all([judged(case, mine.result(), about) for case, mine in zip(cases, own)])
    return 0 if passed else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
