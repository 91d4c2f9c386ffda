#!/usr/bin/env python3
"""What tests/gpu/run.sh reads from its logs. Standard library only.

    report.py agree PRECISION CPU.jsonl GPU.jsonl   losses of two runs, step by step; the second may be shorter
    report.py table LOGS                            ceilings, kernels, tokens/s and memory, operations, overlap:
                                                    as far as there are logs
"""
import collections
import json
import pathlib
import re
import statistics
import sys

# Largest relative difference of a step's loss from the processor's f32. Sums run in another order; tf32 rounds what
# it multiplies to 10 bits, bf16 to 7, and stores so.
TOLERANCES = {"f32": 1e-4, "tf32": 5e-3, "bf16": 2e-2}
# Dense bf16 products of an H100 or H200, as published.
PEAK_FLOPS = 989e12
SIZES = {"124m": (12, 768), "350m": (24, 1024)}
# Rows of the table: a run of `speed`, and the size that it trains.
SPEEDS = {"124m": "124m", "124m-fused": "124m", "350m": "350m"}
SEQUENCE, VOCABULARY = 1024, 50304
# Steps that compile, allocate and measure.
WARM_UP = 10
# Last steps, which have a timeline: nothing is in flight at its ends.
TIMED = 2


def steps(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def agree(precision, reference, found):
    want, have = steps(reference), steps(found)
    numbers = [line["step"] for line in have]
    if not 2 <= len(have) <= len(want) or numbers != list(range(1, len(have) + 1)):
        sys.exit(f"steps {numbers}, expected each once, and of the reference's {len(want)}")
    want = want[:len(have)]
    worst = max((abs(h["loss"] - w["loss"]) / w["loss"], w["step"]) for w, h in zip(want, have))
    print(f"largest relative difference {worst[0]:.2e} in step {worst[1]} of {len(want)}; loss {want[0]['loss']:.4f} -> "
          f"{want[-1]['loss']:.4f} and {have[-1]['loss']:.4f}")
    if not worst[0] <= TOLERANCES[precision]:
        sys.exit(f"more than {TOLERANCES[precision]}")
    # Of the last generation; its first steps take scratch memory, and the last one's line comes after the validation.
    last = [line for line in have if line["generation"] == have[-1]["generation"]]
    peaks = {line["memory"]["device_peak"] for line in last[2:-1]}
    if len(peaks) > 1:
        sys.exit(f"memory was allocated in a step: {sorted(peaks)}")


def parameters(layers, width, vocabulary):
    """Of GPT-2 with a tied head."""
    return vocabulary * width + SEQUENCE * width + layers * (12 * width * width + 13 * width) + 2 * width


def flops_a_token(layers, width):
    return 6 * parameters(layers, width, VOCABULARY) + 12 * layers * width * SEQUENCE


def kernels(logs):
    """What `gpu_kernels` wrote, and the rate of products among it: the ceiling, in FLOP/s."""
    log = logs / "gpu_kernels.log"
    text = log.read_text() if log.exists() else ""
    found = re.search(r"^bf16 product of .*: ([\d.]+) TFLOP/s", text, re.M)
    return text, float(found.group(1)) * 1e12 if found else None


def speed(logs, ceiling):
    peers = json.loads((logs / "peers.json").read_text()) if (logs / "peers.json").exists() else {}
    print(f"MFU: tokens/s x (6 parameters + 12 layers width sequence) FLOP, of {PEAK_FLOPS / 1e12:.0f} TFLOP/s as published; "
          + (f"beside it, of the {ceiling / 1e12:.0f} measured" if ceiling else "the ceiling was not measured"))
    print(f"{'GPT-2':10} {'tokens/s':>10} {'ms/step':>8} {'MFU':>6} {'of ceiling':>10} {'GPU GiB':>8} "
          f"{'eager':>10} {'compiled':>10} {'to faster':>9}")
    shown = lambda value: f"{value:10.0f}" if value else f"{'-':>10}"
    for run, size in SPEEDS.items():
        layers, width = SIZES[size]
        path = logs / f"speed-{run}" / "metrics.jsonl"
        lines = steps(path)[WARM_UP:-TIMED] if path.exists() else []
        eager, compiled = (peers.get(size, {}).get(kind) for kind in ("eager", "compiled"))
        best = max(filter(None, (eager, compiled)), default=None)
        if not lines:
            print(f"{run:10} {'-':>10} {'-':>8} {'-':>6} {'-':>10} {'-':>8} {shown(eager)} {shown(compiled)} {'-':>9}")
            continue
        rate = statistics.median(line["tokens_per_s"] for line in lines)
        flops = rate * flops_a_token(layers, width)
        print(f"{run:10} {rate:10.0f} {statistics.median(l['step_ms'] for l in lines):8.1f} {flops / PEAK_FLOPS:6.1%} "
              + (f"{flops / ceiling:10.1%}" if ceiling else f"{'-':>10}")
              + f" {lines[-1]['memory']['device_peak'] / 2**30:8.1f} {shown(eager)} {shown(compiled)} "
              + (f"{rate / best:9.2f}" if best else f"{'-':>9}"))


def operations(logs):
    """What each operation took on the device within the last step of a run, by its timeline."""
    for run in SPEEDS:
        path = logs / f"speed-{run}" / "timeline" / "timeline.json"
        if not path.exists():
            continue
        spans = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        step = max((span for span in spans if span["cat"] == "step"), key=lambda span: span["ts"])
        end = step["ts"] + step["dur"]
        inside = [span for span in spans if span["pid"] == step["pid"] and span["cat"] == "operation"
                  and step["ts"] <= span["ts"] < end]
        took = collections.defaultdict(lambda: [0, 0.0])
        for span in inside:
            took[span["name"]][0] += 1
            took[span["name"]][1] += span["dur"] / 1e3
        print(f"\nGPT-2 {run}, one step of {step['dur'] / 1e3:.1f} ms with a timeline: operations, times, ms")
        for name, (times, ms) in sorted(took.items(), key=lambda item: -item[1][1]):
            print(f"  {name:28} {times:5} {ms:9.2f} {ms / (step['dur'] / 1e3):7.1%}")


def overlap(logs):
    """Of two runs with the same ranks: communication by the events of its stream, and how long the computing one
    stood still for it."""
    rows = []
    for name, words in (("overlap-true", "as it trains"), ("overlap-false", "all after backward")):
        path = logs / name / "metrics.jsonl"
        lines = steps(path)[4:-TIMED] if path.exists() else []
        if lines:
            step, comm, exposed = (statistics.median(line[key] for line in lines)
                                   for key in ("step_ms", "comm_ms", "comm_exposed_ms"))
            rows.append(f"{words:20} {step:8.1f} {comm:10.1f} {exposed:10.1f} {max(0, 1 - exposed / comm) if comm else 0:8.0%}")
    if rows:
        print(f"{'2 ranks on one card':20} {'ms/step':>8} {'comm. ms':>10} {'exposed ms':>10} {'hidden':>8}")
        print("\n".join(rows))
    log = logs / "gpu_nccl-overlap.log"
    trace = re.findall(r"^overlap \| (.*)$", log.read_text(), re.M) if log.exists() else []
    if trace:
        print("\nbuckets of rank 0 on the two streams (gpu_nccl-overlap), ms since the first kernel")
        print("\n".join(trace))


def table(logs):
    logs = pathlib.Path(logs)
    text, ceiling = kernels(logs)
    if text:
        print(text)
    speed(logs, ceiling)
    operations(logs)
    print()
    overlap(logs)


if __name__ == "__main__":
    commands = {"agree": agree, "table": table}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
