#!/usr/bin/env python3
"""Measures training steps of torch, as a peer of `flashover bench --train full`. Needs CUDA, torch and transformers.

    python torch_train.py eager|compile|mma [--batch 32] [--context 1024] [--steps 12]

The model is transformers' GPT-2 124M with new weights and no dropout: weights and AdamW in f32, matmuls in bf16 by autocast,
attention by scaled_dot_product_attention, gradients clipped to norm 1.

    eager    torch's own kernels, with the loss in f32
    compile  torch.compile
    mma      torch.compile with matmuls from Triton alone, held to mma.sync: the instructions of GeForce cards

Prints one line of JSON: milliseconds and tokens per second of the median step, and the peak of allocated bytes. `mma` also
prints how many programs contain wgmma, which must be 0.
"""

import argparse
import glob
import json
import os
import statistics
import tempfile
import time

WARM = 5


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=["eager", "compile", "mma"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=12)
    return parser.parse_args()


def hold_to_mma(folder):
    """Makes Triton compile for mma.sync, into caches of its own. Must run before torch is imported."""
    os.environ.update(
        DISABLE_MMA_V3="1",
        TORCHINDUCTOR_MAX_AUTOTUNE_GEMM_BACKENDS="TRITON",
        TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor",
        TRITON_CACHE_DIR=f"{folder}/triton",
    )


def run(args, folder):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    if args.mode == "mma":
        import torch._inductor.config as inductor

        inductor.max_autotune_gemm = True
        inductor.max_autotune_gemm_backends = "TRITON"
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.set_float32_matmul_precision("high")
    config = GPT2Config(vocab_size=50304, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0)
    model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    forward = model if args.mode == "eager" else torch.compile(model)
    ids = torch.randint(0, 50257, (args.batch, args.context), device="cuda")

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            logits = forward(input_ids=ids).logits[:, :-1]
            logits = logits.reshape(-1, logits.size(-1))
            if args.mode == "eager":
                logits = logits.float()
            loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    median = statistics.median(times[WARM:])
    programs = [open(path).read() for path in glob.glob(f"{folder}/**/*.ptx", recursive=True)]
    print(
        json.dumps(
            {
                "mode": args.mode,
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "batch": args.batch,
                "context": args.context,
                "ms": round(1e3 * median, 2),
                "tokens_per_second": round(args.batch * args.context / median),
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "programs": len(programs),
                "programs_with_wgmma": sum("wgmma" in program for program in programs),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    given = arguments()
    with tempfile.TemporaryDirectory() as caches:
        if given.mode == "mma":
            hold_to_mma(caches)
        run(given, caches)
