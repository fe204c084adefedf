"""Compares quantised weights with bitsandbytes, bit by bit, at the sizes of a layer of Llama 3 8B.

    python3 quantized_against_bitsandbytes.py FLASHOVER FOLDER TORCH_DEVICE [OPTIONS]

Writes one layer of random bf16 weights to FOLDER/llama. Runs `FLASHOVER quantize` from there to FOLDER/quantised with
OPTIONS (such as `--backend cuda --quant nf4`). Quantises the same weights with bitsandbytes on TORCH_DEVICE. Prints one
line of JSON per matrix: the number of values, and of different values, in its quantised values, absmax and nested parts.
"""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import bitsandbytes
import quantize_13b
import torch
from bitsandbytes.functional import int8_vectorwise_quant, quantize_4bit
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, FFN, HEADS, KV_HEADS, VOCAB = 4096, 14336, 32, 8, 256
CONFIG = quantize_13b.CONFIG | {
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
}
LAYER = "model.layers.0."
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
}


def write(folder):
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: (torch.randn(*shape, generator=generator) / 50).to(torch.bfloat16)
    tensors = {f"{LAYER}{name}.weight": normal(*shape) for name, shape in MATRICES.items()}
    tensors |= {name: normal(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    norms = ("model.norm", f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(HIDDEN, dtype=torch.bfloat16) for name in norms}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))


def four_bit(weight, state):
    """Returns the parts of a weight as in a file of bitsandbytes."""
    block_size, nested = state["blocksize"], "nested_blocksize" in state
    codes, made = quantize_4bit(
        weight, blocksize=block_size, compress_statistics=nested, quant_type=state["quant_type"]
    )
    parts = {"": codes, "absmax": made.absmax, "quant_map": made.code}
    if nested:
        parts |= {"nested_absmax": made.state2.absmax, "nested_quant_map": made.state2.code}
        parts["offset"] = made.offset.reshape(1)
    return parts


def differ(ours, theirs):
    ours, theirs = ours.flatten(), theirs.cpu().flatten()
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        sys.exit(f"{ours.dtype} {tuple(ours.shape)}, expected {theirs.dtype} {tuple(theirs.shape)}")
    return {"values": ours.numel(), "differ": int((ours != theirs).sum())}


def main(program, folder, device, options):
    model, output = folder / "llama", folder / "quantised"
    write(model)
    shutil.rmtree(output, ignore_errors=True)
    command = [program, "quantize", "--model", model, "--output", output, *options]
    subprocess.run(command, check=True, capture_output=True)
    version = subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    dense = safe_open(model / "model.safetensors", "pt")
    made = {}
    for file in output.glob("*.safetensors"):
        held = safe_open(file, "pt")
        made |= {name: held.get_tensor(name) for name in held.keys()}
    for name in MATRICES:
        weight = f"{LAYER}{name}.weight"
        theirs = dense.get_tensor(weight).to(device)
        states = [key for key in made if key.startswith(f"{weight}.quant_state.")]
        if states:
            state = json.loads(bytes(made[states[0]].tolist()))
            ours = {"": made[weight]}
            ours |= {part: made[f"{weight}.{part}"] for part in ("absmax", "quant_map")}
            if "nested_offset" in state:
                ours |= {part: made[f"{weight}.{part}"] for part in ("nested_absmax", "nested_quant_map")}
                ours["offset"] = torch.tensor([state["nested_offset"]])
            parts = four_bit(theirs, state)
        else:
            ours = {"": made[weight], "SCB": made[f"{LAYER}{name}.SCB"]}
            codes, scales, _ = int8_vectorwise_quant(theirs.to(torch.float16))
            parts = {"": codes, "SCB": scales}
        row = {
            "weight": name,
            "shape": MATRICES[name],
            "options": options,
            "parts": {part or "codes": differ(ours[part], parts[part]) for part in parts},
            "bitsandbytes": f"{bitsandbytes.__version__} on {device}, torch {torch.__version__}",
            "version": version,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
