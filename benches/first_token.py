"""Measures the seconds of a `flashover generate` run of one token, with a cold and a warm kernel cache.

    python3 benches/first_token.py --program target/release/flashover --model DIR --cores 16 -- --backend cuda

Options after `--` are passed to `flashover generate`. A cold run has an empty home folder, so neither the kernel cache
nor the driver's cache has entries. A warm run follows in the same home folder. Each line of the output is one run, as
JSON. A first run, which is not reported, brings the files of the model into the page cache of the host.
"""

import argparse
import datetime
import json
import os
import subprocess
import tempfile
import time

PROMPT = ",".join(str(token) for token in range(100, 132))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--program", default="flashover")
    parser.add_argument("--model", required=True)
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="number of cores that the program may use")
    parser.add_argument("--runs", type=int, default=3, help="number of cold runs")
    parser.add_argument("options", nargs="*", help="more options of `flashover generate`")
    args = parser.parse_args()

    command = [args.program, "generate", "--model", args.model, *args.options]
    command += ["--tokens", PROMPT, "--max-new-tokens", "1"]
    version = subprocess.run([args.program, "--version"], capture_output=True, text=True, check=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()

    def seconds(home):
        begin = time.monotonic()
        environment = {**os.environ, "HOME": home, "CUDA_CACHE_PATH": home + "/driver"}
        environment.pop("XDG_CACHE_HOME", None)
        subprocess.run(
            command,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, range(args.cores)),
        )
        return time.monotonic() - begin

    def run(home, kept):
        record = {
            "model": os.path.basename(args.model.rstrip("/")),
            "options": " ".join(args.options),
            "cores": args.cores,
            "kept_kernels": kept,
            "first_token_s": round(seconds(home), 2),
            "gpu": gpu,
            "program": version.stdout.strip(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        print(json.dumps(record), flush=True)

    with tempfile.TemporaryDirectory() as home:
        seconds(home)
    for _ in range(args.runs):
        with tempfile.TemporaryDirectory() as home:
            run(home, kept=False)
            run(home, kept=True)


if __name__ == "__main__":
    main()
