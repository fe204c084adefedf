#!/usr/bin/env python3
"""Compares training of GPT-2 124M with torch's, from the same weights on the same tokens: the bytes of a text.

    python3 train_against_torch.py FLASHOVER TEXT [--device cuda] [--steps 200] [--batch 32] [--context 1024] [--dtype bf16]
        -- OPTIONS

OPTIONS go to `FLASHOVER train`, such as --backend cuda --profile rtx4090. Both take the sequences of the text in its order, and
begin again at its end. torch computes in bf16 by autocast with weights and AdamW in f32. Prints one JSON object per line:

    gradients  of a step on 2 sequences, relative to torch in f64: error |g - g64| / |g64| and cosine of each tensor, for
               Flashover and for torch's autocast. Flashover's are its first moments after one step, divided by 1 - beta1.
    losses     mean of the last 20 steps, for f32 masters and for bf16 alone with stochastic rounding
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import GPT2LMHeadModel

RATE, WARMUP, BETAS, DECAY = 3e-4, 20, (0.9, 0.95), 0.1


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("flashover")
    parser.add_argument("text", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--dtype", default="bf16", help="compute dtype of Flashover")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.options = sys.argv[at + 1 :]
    return args


def write_tokens(path, tokens):
    path.write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))


def train(args, output, *options):
    """Runs `train` and returns the loss of each step, before it."""
    log = Path(f"{output}.jsonl")
    command = [args.flashover, "train", "--full", *args.options, "--output", output, "--overwrite", "--log", log, *options]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["loss"] for line in lines if "step" in line]


def gradients_of(model, tokens, dtype):
    """Returns the mean loss's gradients; in f64, or by autocast to `dtype`."""
    x, y = tokens[:, :-1], tokens[:, 1:]
    with torch.autocast(tokens.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
        logits = model(x).logits
    wide = logits if dtype is None else logits.float()
    torch.nn.functional.cross_entropy(wide.flatten(0, 1), y.flatten()).backward()
    return {name: own.grad.double() for name, own in model.named_parameters()}


def moments(folder, model):
    """Returns the first moments of a run of GPT-2 under the names of transformers."""
    state = load_file(Path(folder) / "flashover_run.safetensors")

    def group(index):
        parts = [state[f"m.{index}.{part}"] for part in range(len(state)) if f"m.{index}.{part}" in state]
        return torch.cat(parts)

    shapes = {name: own.shape for name, own in model.named_parameters()}
    layer = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    matrices, vectors = [], []
    for at in range(model.config.n_layer):
        prefix = f"transformer.h.{at}."
        matrices += [f"{prefix}{part}.weight" for part in layer]
        for norm, parts in [("ln_1", layer[:2]), ("ln_2", layer[2:])]:
            vectors += [f"{prefix}{norm}.weight", f"{prefix}{norm}.bias"]
            vectors += [f"{prefix}{part}.bias" for part in parts]
    vectors += ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    tables = ["transformer.wte.weight", "transformer.wpe.weight"]
    found = {}
    for index, names in enumerate([matrices, tables, vectors]):
        values, at = group(index), 0
        for name in names:
            shape = list(shapes[name])
            rows = shape[0] if name != tables[0] else math.ceil(shape[0] / 128) * 128
            # Conv1D stores the transpose.
            stored = shape[::-1] if name in matrices else shape
            own = values[at : at + math.prod(shape)].reshape(stored)
            found[name] = own.T if name in matrices else own
            at += math.ceil(rows * math.prod(shape[1:]) / 256) * 256
    return found


def compare_gradients(args, init, folder, text):
    context = min(args.context, 256)
    tokens = [text[at * context : (at + 1) * context + 1] for at in range(2)]
    data = folder / "two.bin"
    write_tokens(data, text[: 2 * context + 1])
    flags = ["--model", init, "--dtype", args.dtype, "--data", data, "-b", "2", "-c", context, "--steps", "1", "--max-grad-norm", "0"]
    train(args, folder / "one", *flags, "--save-every", "1", "--learning-rate", "1e-30", "--beta1", BETAS[0])
    tokens = torch.tensor(tokens, device=args.device)
    model = GPT2LMHeadModel.from_pretrained(init, attn_implementation="eager").to(args.device)
    model.eval()
    ours = moments(folder / "one", model)
    plain = gradients_of(model, tokens, torch.bfloat16)
    model.zero_grad()
    exact = gradients_of(model.double(), tokens, None)
    rows = {}
    for name, want in exact.items():
        have = [ours[name].to(want) / (1 - BETAS[0]), plain[name].to(want)]
        errors = [((own - want).norm() / want.norm()).item() for own in have]
        cosine = torch.nn.functional.cosine_similarity(have[0].flatten(), want.flatten(), dim=0).item()
        rows[name] = (*errors, cosine)
    ratios = {name: own / max(torchs, 1e-12) for name, (own, torchs, _) in rows.items()}
    worst = max(ratios, key=ratios.get)
    return {
        "median_error": statistics.median(own for own, _, _ in rows.values()),
        "median_error_of_torch": statistics.median(torchs for _, torchs, _ in rows.values()),
        "median_ratio": statistics.median(ratios.values()),
        "worst_ratio": [worst, ratios[worst]],
        "least_cosine": min(cosine for _, _, cosine in rows.values()),
    }


def last(losses):
    return statistics.mean(losses[-20:])


def compare_losses(args, init, folder, text):
    data = folder / "all.bin"
    write_tokens(data, text)
    flags = ["--data", data, "--in-order", "-b", args.batch, "-c", args.context, "--steps", args.steps, "--warmup", WARMUP]
    flags += ["--model", init, "--dtype", args.dtype, "--learning-rate", RATE, "--beta1", BETAS[0], "--beta2", BETAS[1], "--weight-decay", DECAY]
    master = train(args, folder / "master", *flags)
    rounded = train(args, folder / "rounded", *flags, "--no-master")
    model = GPT2LMHeadModel.from_pretrained(init, attn_implementation="sdpa").to(args.device)
    model.eval()
    decays = [own for own in model.parameters() if own.dim() == 2]
    others = [own for own in model.parameters() if own.dim() != 2]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=1e-8)
    count, losses = (len(text) - 1) // args.context, []
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        starts = [(step * args.batch + at) % count * args.context for at in range(args.batch)]
        rows = [text[start : start + args.context + 1] for start in starts]
        tokens = torch.tensor(rows, device=args.device)
        with torch.autocast(args.device, torch.bfloat16):
            logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {
        "steps": args.steps,
        "first": [losses[0], master[0], rounded[0]],
        "torch": last(losses),
        "master": last(master),
        "stochastic": last(rounded),
        "master_over_torch": last(master) / last(losses),
        "stochastic_over_master": last(rounded) / last(master),
    }


def main():
    args = arguments()
    text = list(args.text.read_bytes())
    with tempfile.TemporaryDirectory() as folder:
        folder, init = Path(folder), Path(folder) / "init"
        few = folder / "few.bin"
        write_tokens(few, text[:9])
        # A step of next to nothing: the weights in f32 are the initial ones.
        start = ["--from-scratch", "--shape", "gpt2", "--dtype", "f32", "--data", few, "-b", "1", "-c", "8"]
        train(args, init, *start, "--steps", "1", "--learning-rate", "1e-30")
        device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
        for name, compare in [("gradients", compare_gradients), ("losses", compare_losses)]:
            row = {"what": name, "device": device, "torch": torch.__version__}
            print(json.dumps(row | compare(args, init, folder, text)), flush=True)


if __name__ == "__main__":
    main()
