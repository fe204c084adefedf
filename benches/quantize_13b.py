"""Measures the time and memory of quantising a checkpoint with the shape of LLaMA-2 13B.

    python3 quantize_13b.py FLASHOVER FOLDER [OPTIONS]

Writes 26 GB of random bf16 weights to FOLDER/llama if that folder does not exist, in shards as on the Hub. Runs
`FLASHOVER quantize` from there to FOLDER/quantised with OPTIONS (such as `--backend cuda --quant nf4`). Prints one line
of JSON: seconds, bytes, the peak memory of host and device that the command reports, and the size of the largest tensor.
"""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

HIDDEN, FFN, LAYERS, HEADS, VOCAB = 5120, 13824, 40, 40, 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
SHARD = 5 << 30


def tensors():
    yield "model.embed_tokens.weight", [VOCAB, HIDDEN]
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"{at}self_attn.{part}.weight", [HIDDEN, HIDDEN]
        for part in ("gate_proj", "up_proj"):
            yield f"{at}mlp.{part}.weight", [FFN, HIDDEN]
        yield f"{at}mlp.down_proj.weight", [HIDDEN, FFN]
        for part in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{part}.weight", [HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [VOCAB, HIDDEN]


def size(shape):
    count = 2
    for axis in shape:
        count *= axis
    return count


def noise():
    """Returns 64 MiB of random bf16 with magnitudes from 2^-7 to 2^-5 and both signs."""
    half = 32 << 20
    block = bytearray(2 * half)
    block[0::2] = os.urandom(half)
    block[1::2] = os.urandom(half).translate(bytes(0x3C | byte & 0x80 for byte in range(256)))
    return memoryview(block)


def write(folder):
    folder.mkdir(parents=True)
    block = noise()
    shards, room = [[]], SHARD
    for name, shape in tensors():
        if size(shape) > room:
            shards.append([])
            room = SHARD
        shards[-1].append((name, shape))
        room -= size(shape)
    where = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        header, end = {}, 0
        for name, shape in shard:
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size(shape)]}
            end += size(shape)
            where[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, shape in shard:
                left = size(shape)
                while left:
                    left -= out.write(block[: min(left, len(block))])
    total = sum(size(shape) for _, shape in tensors())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def main(program, folder, options):
    model, output = folder / "llama", folder / "quantised"
    if not model.exists():
        write(model)
    shutil.rmtree(output, ignore_errors=True)
    command = [program, "quantize", "--model", model, "--output", output, *options]
    start = time.monotonic()
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds = time.monotonic() - start
    said = run.stdout + run.stderr
    peaks = re.search(r"peak memory: host ([\d.]+) MiB, ([\d.]+) MiB before the first tensor(?:; device ([\d.]+) MiB)?", said)
    if not peaks:
        sys.exit(f"the command reported no peak memory:\n{said}")
    host, before, device = (peak and float(peak) for peak in peaks.groups())
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    row = {
        "options": options,
        "device": said.splitlines()[0].partition(" on ")[2],
        "seconds": round(seconds, 1),
        "bytes": sum(size(shape) for _, shape in tensors()),
        "quantised_bytes": sum(file.stat().st_size for file in output.glob("*.safetensors")),
        "largest_tensor_mib": max(size(shape) for _, shape in tensors()) / (1 << 20),
        "peak_host_mib": host,
        "host_before_mib": before,
        "peak_device_mib": device,
        "version": version,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
