#!/usr/bin/env python3
"""The bubble of a pipeline of two ranks, measured and as the simulator has it with the durations that were measured; Markdown.

    cargo build --release --workspace --bins
    python3 tests/bench/bubble.py

Each rank has its own core (`--numa-binding exclusive`), so two physical cores are needed and nothing else may run. Of each
schedule and number of micro-batches one run, whose first steps warm up and whose last ones are measured (`run.timeline`);
`ddp-train schedule --measured` reads the result. A row is within the bound if both bubbles differ by at most 15 % of the
simulated one. Exit code 1 if a row is not.
"""
import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("DDP_BIN", ROOT / "target/release"))
TEXT = ROOT / "examples/data/python-reference.txt"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "greedy")
MICRO_BATCHES = (4, 8, 16)
BOUND = 0.15
DEADLINE_S = 900
CONFIG = """\
run: {{ name: bubble, out_dir: {out}, seed: 1, timeline: {first}-{last} }}
model: {{ kind: gpt2, n_layer: {layers}, n_head: 6, n_embd: {channels}, block_size: 256 }}
data: {{ train: {text} }}
train:
  steps: {last}
  micro_batch: {samples}
  grad_accumulation: {micro_batches}
  checkpoint_every: 0
  eval_every: 0
  threads: 1
parallel:
  pipeline: {{ stages: 2, schedule: {schedule} }}
"""


def measure(args, folder, schedule, micro_batches):
    """Bubbles in percent: measured and simulated."""
    out, config = folder / f"{schedule}-{micro_batches}", folder / "train.yaml"
    sizes = {"layers": args.layers, "channels": args.channels, "samples": args.samples}
    span = {"first": args.warm_up + 1, "last": args.warm_up + args.steps}
    names = {"out": out, "text": TEXT, "schedule": schedule, "micro_batches": micro_batches}
    config.write_text(CONFIG.format(**sizes, **span, **names))
    command = [BIN / "ddp-run", "--nproc-per-node", "2", "--numa-binding", "exclusive", config]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        sys.exit(f"{command} ended with code {done.returncode}:\n{done.stderr}")
    show = [BIN / "ddp-train", "schedule", "--measured", out]
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
        show += ["--output", args.pictures / f"measured-{schedule}-{micro_batches}.svg"]
    words = subprocess.run(show, capture_output=True, text=True, check=True).stdout
    found = re.search(r"bubble of steps? .*: measured ([\d.]+) %, simulated ([\d.]+) %", words)
    return [float(number) for number in found.groups()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES)
    parser.add_argument("--micro-batches", nargs="+", type=int, default=MICRO_BATCHES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--channels", type=int, default=384)
    parser.add_argument("--samples", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=5, help="that are measured")
    parser.add_argument("--pictures", type=pathlib.Path, help="a folder for a picture of each row")
    args = parser.parse_args()
    print("| schedule | micro-batches | bubble measured | simulated | apart |\n|---|---|---|---|---|", flush=True)
    is_within = True
    with tempfile.TemporaryDirectory() as folder:
        for schedule in args.schedules:
            for micro_batches in args.micro_batches:
                measured, simulated = measure(args, pathlib.Path(folder), schedule, micro_batches)
                apart = abs(measured - simulated) / max(simulated, 1e-9)
                is_within &= apart <= BOUND
                mark = "" if apart <= BOUND else " (!)"
                numbers = f"{measured:.2f} % | {simulated:.2f} % | {apart:.1%}{mark}"
                print(f"| {schedule} | {micro_batches} | {numbers} |", flush=True)
    sys.exit(0 if is_within else 1)


if __name__ == "__main__":
    main()
