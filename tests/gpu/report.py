#!/usr/bin/env python3
"""What tests/gpu/run.sh reads from its logs. Standard library only.

    report.py agree PRECISION CPU.jsonl GPU.jsonl   losses of two runs, step by step
    report.py kill9 DDP-RUN CONFIG OUT_DIR          a rank is killed in the middle of a run, which comes to its end
    report.py table LOGS                            tokens/s, share of the ceilings, memory
"""
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import time

# Largest relative difference of a step's loss from the processor's f32. Sums run in another order; tf32 rounds what
# it multiplies to 10 bits, bf16 to 7, and stores so.
TOLERANCES = {"f32": 1e-4, "tf32": 5e-3, "bf16": 2e-2}
# Dense bf16 products of an H100 or H200, as published.
PEAK_FLOPS = 989e12
SIZES = {"124m": (12, 768), "350m": (24, 1024)}
SEQUENCE = 1024
# Steps that compile, allocate and measure.
WARM_UP = 10


def steps(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def agree(precision, reference, found):
    want, have = steps(reference), steps(found)
    if len(want) != len(have):
        sys.exit(f"{len(have)} steps, expected {len(want)}")
    worst = max((abs(h["loss"] - w["loss"]) / w["loss"], w["step"]) for w, h in zip(want, have))
    print(f"largest relative difference {worst[0]:.2e} in step {worst[1]} of {len(want)}; loss {want[0]['loss']:.4f} -> "
          f"{want[-1]['loss']:.4f} and {have[-1]['loss']:.4f}")
    if not worst[0] <= TOLERANCES[precision]:
        sys.exit(f"more than {TOLERANCES[precision]}")
    # The last step's line comes after the validation.
    peaks = {line["memory"]["device_peak"] for line in have[2:-1]}
    if len(peaks) != 1:
        sys.exit(f"memory was allocated in a step: {sorted(peaks)}")


def kill9(program, config, out):
    """Rank 1 is killed once step 10 is in the metrics; the end must come with a restart, and soon."""
    mark = f"gpu-kill9-{os.getpid()}"
    command = [program, "--nproc-per-node", "2", "--set", f"run.out_dir={out}", "--set", "train.micro_batch=4",
               "--set", "train.steps=60", "--set", "train.checkpoint_every=5", config]
    job = subprocess.Popen(command, env={**os.environ, "DDP_KILL9_MARK": mark})
    metrics = pathlib.Path(out) / "metrics.jsonl"
    deadline = time.monotonic() + 100
    while not (metrics.exists() and metrics.read_text().count("\n") >= 10):
        if job.poll() is not None or time.monotonic() > deadline:
            job.kill()
            sys.exit("the run did not come to step 10")
        time.sleep(0.01)
    victim = None
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"DDP_KILL9_MARK={mark}".encode() in variables and b"RANK=1" in variables:
                victim = int(folder.name)
    if victim is None:
        job.kill()
        sys.exit("rank 1 is not there")
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    try:
        status = job.wait(timeout=90)
    except subprocess.TimeoutExpired:
        job.kill()
        sys.exit("the run did not end within 90 s of the kill")
    lines = steps(metrics)
    generations = sorted({line["generation"] for line in lines})
    print(f"ended with status {status}, {time.monotonic() - killed:.1f} s after the kill, generations {generations}, "
          f"last step {lines[-1]['step']}")
    if status != 0 or lines[-1]["step"] != 60 or len(generations) < 2:
        sys.exit("no restart, or not to the end")


def parameters(layers, width, vocabulary):
    """Of GPT-2 with a tied head."""
    return vocabulary * width + SEQUENCE * width + layers * (12 * width * width + 13 * width) + 2 * width


def table(logs):
    logs = pathlib.Path(logs)
    peers = {}
    if (logs / "peers.json").exists():
        peers = json.loads((logs / "peers.json").read_text())
    ceiling = None
    if (logs / "gpu_kernels.log").exists():
        found = re.search(r"^matmul ceiling\D*([\d.]+) TFLOP/s", (logs / "gpu_kernels.log").read_text(), re.M)
        ceiling = float(found.group(1)) * 1e12 if found else None
    print(f"{'model':10} {'tokens/s':>10} {'ms/step':>8} {'MFU':>6} {'of ceiling':>10} {'GPU GiB':>8} "
          f"{'eager':>10} {'compiled':>10} {'ratio':>6}")
    for size, (layers, width) in SIZES.items():
        path = logs / f"speed-{size}" / "metrics.jsonl"
        if not path.exists():
            continue
        lines = steps(path)[WARM_UP:]
        if not lines:
            continue
        rate = statistics.median(line["tokens_per_s"] for line in lines)
        flops = rate * (6 * parameters(layers, width, 50304) + 12 * layers * width * SEQUENCE)
        eager, compiled = (peers.get(size, {}).get(kind) for kind in ("eager", "compiled"))
        shown = lambda value: f"{value:10.0f}" if value else f"{'-':>10}"
        best = max(filter(None, (eager, compiled)), default=None)
        print(f"{size:10} {rate:10.0f} {statistics.median(l['step_ms'] for l in lines):8.1f} {flops / PEAK_FLOPS:6.1%} "
              + (f"{flops / ceiling:10.1%}" if ceiling else f"{'-':>10}")
              + f" {lines[-1]['memory']['device_peak'] / 2**30:8.1f} {shown(eager)} {shown(compiled)} "
              + (f"{rate / best:6.2f}" if best else f"{'-':>6}"))


if __name__ == "__main__":
    commands = {"agree": agree, "kill9": kill9, "table": table}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
