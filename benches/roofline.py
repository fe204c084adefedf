#!/usr/bin/env python3
"""Predicts the speed of a training step on another card from a recorded one. This is no measurement.

    flashover profile --shape gpt2 --train full -b 32 -p 1024 --format json > step.json
    python3 roofline.py step.json --tokens 32768 --flops-per-token 797.8e6 [--tflops 148] [--gbps 920] [--peak 165.2]

Each operator takes max(operations / rate, bytes / bandwidth) of the card; by default those that matmuls and copies reach on an
RTX 4090. Kernels whose work is unknown take their recorded time, times the ratio of the bandwidths. Prints one line of JSON;
MFU is the model's operations over --peak, the data sheet's rate.
"""

import argparse
import json
from pathlib import Path


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("step", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--flops-per-token", type=float, required=True)
    parser.add_argument("--tflops", type=float, default=148.0)
    parser.add_argument("--gbps", type=float, default=920.0)
    parser.add_argument("--peak", type=float, default=165.2)
    args = parser.parse_args()
    step = json.loads(args.step.read_text())
    slower = step["ceilings"]["gbps"] / args.gbps
    parts = {}
    for operator in step["operators"]:
        known = operator["flops"] is not None and operator["bytes"] is not None
        if known:
            compute = operator["flops"] / (args.tflops * 1e12)
            seconds = max(compute, operator["bytes"] / (args.gbps * 1e9))
        else:
            seconds = operator["total_ns"] * 1e-9 * slower
        name = operator["name"].split()[0] if known else "unknown work"
        parts[name] = parts.get(name, 0.0) + seconds
    total = sum(parts.values())
    parts = dict(sorted(parts.items(), key=lambda part: -part[1]))
    print(
        json.dumps(
            {
                "what": "prediction by roofline, not measured",
                "ms": total * 1e3,
                "tokens_per_second": args.tokens / total,
                "mfu": args.tokens * args.flops_per_token / total / (args.peak * 1e12),
                "ms_by_part": {name: seconds * 1e3 for name, seconds in parts.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
