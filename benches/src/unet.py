"""Times U-Nets of diffusers with random weights: eager, and compiled by torch.compile with max-autotune, channels last.

    python3 -P unet.py SHAPE[,SHAPE] BATCH[,BATCH] [DTYPE] [eager] [compile]

Without -P, Python imports the script torch.py of this folder in place of torch. Shapes are those of `flashover unet`.
Prints one JSON object per measurement: median milliseconds of a frame, and the bytes that torch reserved.
"""

import json
import statistics
import sys
import time

import torch
from diffusers import UNet2DConditionModel, UNet2DModel

BASES = {"unet-38m": 40, "unet-97m": 64, "unet-390m": 128, "unet-880m": 192, "unet-1b": 208}


def model(shape):
    if shape == "sd15":
        return UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    base = BASES[shape]
    return UNet2DModel(
        sample_size=64,
        block_out_channels=(base, 2 * base, 4 * base, 8 * base),
        layers_per_block=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
        attention_head_dim=8,
    )


def median_ms(run, count=30):
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times)


def main(shapes, batches, dtype="f16", *modes):
    torch.backends.cudnn.benchmark = True
    dtypes = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
    last = dict(device="cuda", dtype=dtypes[dtype])
    for shape in shapes.split(","):
        net = model(shape).to(**last).to(memory_format=torch.channels_last).eval()
        for batch in map(int, batches.split(",")):
            sample = torch.randn(batch, net.config.in_channels, 64, 64, **last).to(memory_format=torch.channels_last)
            args = [sample, torch.tensor(500, device="cuda")]
            if shape == "sd15":
                args.append(torch.randn(batch, 77, 768, **last))
            for mode in modes or ("eager", "compile"):
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                run = net
                if mode == "compile":
                    torch._dynamo.reset()
                    run = torch.compile(net, mode="max-autotune", fullgraph=True, dynamic=False)
                try:
                    with torch.inference_mode():
                        ms = median_ms(lambda: run(*args, return_dict=False))
                except Exception as why:
                    print(json.dumps(dict(shape=shape, batch=batch, mode=mode, error=str(why)[:300])), flush=True)
                    continue
                reserved = torch.cuda.max_memory_reserved()
                print(json.dumps(dict(shape=shape, batch=batch, dtype=dtype, mode=mode, ms=ms, reserved=reserved)), flush=True)


main(*sys.argv[1:])
