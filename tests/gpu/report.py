#!/usr/bin/env python3
"""What tests/gpu/run.sh reads from its logs. Standard library only.

    report.py agree PRECISION CPU.jsonl GPU.jsonl   losses of two runs, step by step; the second may be shorter
    report.py table LOGS                            ceilings, kernels, tokens/s and memory, operations, overlap:
                                                    as far as there are logs
    report.py digest LOGS                           failures and ratios, in at most 25 lines
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
# Layers, width, positions of a sample, parameters: of Llama without the embedding, which is no matrix of its head.
SIZES = {"124m": (12, 768, 1024, 124_475_904), "350m": (24, 1024, 1024, 354_871_296),
         "llama8b": (4, 4096, 8192, 1_078_497_280)}
# What tests/peers/train_gpu.py measures PyTorch with: compiled or not, and the back end of its attention.
PEERS = [f"{kind}-{backend}" for kind in ("compiled", "eager") for backend in ("flash", "cudnn")]
# Runs of `overlap`.
OVERLAPS = {"alone": "one rank alone", "true": "as it trains", "false": "all after backward", "ctas": "NCCL_MAX_CTAS=8"}
# Lines of the digest, how many of them are ratios at most, and what is shown of each.
DIGEST_LINES, MOST_RATIOS, MOST_COLUMNS = 25, 12, 160
# Steps that compile, allocate and measure.
WARM_UP = 10
# Last steps, which have a timeline: nothing is in flight at its ends.
TIMED = 2


def steps(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def text_of(log):
    return log.read_text() if log.exists() else ""


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


def flops_a_token(layers, width, positions, parameters):
    return 6 * parameters + 12 * layers * width * positions


def kernels(logs):
    """What `gpu_kernels` wrote, and the rate of products among it: the ceiling, in FLOP/s."""
    text = text_of(logs / "gpu_kernels.log")
    found = re.search(r"^bf16 product of .*: ([\d.]+) TFLOP/s", text, re.M)
    return text, float(found.group(1)) * 1e12 if found else None


def runs(logs):
    """What `speed` trained, by the size that it starts with: each size, and what had one switch set beside it."""
    logged = {path.stem.removeprefix("speed-") for path in logs.glob("speed-*.log")}
    return {name: name.split("-")[0] for name in sorted({*SIZES, *logged})}


class Speed:
    """A run of `speed`, as far as it has metrics, beside PyTorch's rates of the same size."""

    def __init__(self, logs, run, size):
        path = logs / f"speed-{run}" / "metrics.jsonl"
        lines = steps(path)[WARM_UP:-TIMED] if path.exists() else []
        self.run, self.size = run, size
        self.rate = statistics.median(line["tokens_per_s"] for line in lines) if lines else None
        self.step_ms = statistics.median(line["step_ms"] for line in lines) if lines else None
        self.memory = lines[-1]["memory"]["device_peak"] if lines else None
        self.flops = self.rate * flops_a_token(*SIZES[size]) if lines else None
        self.peers = peers(logs).get(size, {})

    def best_peer(self):
        """The name of the fastest, `compiled-cudnn` for example."""
        return max(self.peers, key=self.peers.get, default=None)

    def to_best(self):
        best = self.best_peer()
        return self.rate / self.peers[best] if best and self.rate else None


def peers(logs):
    found = {}
    for path in logs.glob("peers*.json"):
        found.update(json.loads(path.read_text()))
    return found


def cell(value, form, width):
    return f"{'-' if value is None else format(value, form):>{width}}"


def speed(logs, ceiling):
    print(f"MFU: tokens/s x (6 parameters + 12 layers width sequence) FLOP, of {PEAK_FLOPS / 1e12:.0f} TFLOP/s as published; "
          + (f"beside it, of the {ceiling / 1e12:.0f} measured" if ceiling else "the ceiling was not measured"))
    print(f"{'trained':14} {'tokens/s':>10} {'ms/step':>8} {'MFU':>6} {'of ceiling':>10} {'GPU GiB':>8} "
          + " ".join(f"{peer:>14}" for peer in PEERS) + f" {'to best':>8}")
    share = lambda of, flops: flops / of if of and flops else None
    for run, size in runs(logs).items():
        row = Speed(logs, run, size)
        print(" ".join((
            f"{run:14}", cell(row.rate, ".0f", 10), cell(row.step_ms, ".1f", 8),
            cell(share(PEAK_FLOPS, row.flops), ".1%", 6), cell(share(ceiling, row.flops), ".1%", 10),
            cell(row.memory / 2**30 if row.memory else None, ".1f", 8),
            *(cell(row.peers.get(peer), ".0f", 14) for peer in PEERS), cell(row.to_best(), ".3f", 8))))


def operations(logs):
    """What each operation took on the device within the last step of a run, by its timeline."""
    for run in runs(logs):
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
        print(f"\n{run}, one step of {step['dur'] / 1e3:.1f} ms with a timeline: operations, times, ms")
        for name, (times, ms) in sorted(took.items(), key=lambda item: -item[1][1]):
            print(f"  {name:28} {times:5} {ms:9.2f} {ms / (step['dur'] / 1e3):7.1%}")


def overlaps(logs):
    """Medians of the runs of `overlap`, by name: the same work on one GPU, and with several ranks."""
    found = {}
    for name, words in OVERLAPS.items():
        path = logs / f"overlap-{name}" / "metrics.jsonl"
        lines = steps(path)[4:-TIMED] if path.exists() else []
        if lines:
            keys = ("step_ms", "comm_ms", "comm_exposed_ms")
            medians = {key: statistics.median(line[key] for line in lines) for key in keys}
            found[name] = {"words": words, "ranks": lines[0]["world_size"], **medians}
    return found


def where(logs, ranks):
    """The ranks and their cards in words."""
    cards = len(re.findall(r"^  device \d", text_of(logs / "doctor.log"), re.M)) or 1
    return f"{ranks} ranks on {'one card' if cards < 2 else f'{ranks} cards'}"


def overlap(logs):
    """Of runs with the same samples a rank: the step against that of one rank alone, since what communicates takes
    multiprocessors from what computes, which no time of waiting shows; communication by the events of its stream; and
    how long the computing one stood still for it."""
    found = overlaps(logs)
    alone = found.get("alone", {}).get("step_ms")
    if found:
        ranks = max(row["ranks"] for row in found.values())
        print(f"{where(logs, ranks):20} {'ms/step':>8} {'to one GPU':>10} {'comm. ms':>10} {'exposed ms':>10} {'hidden':>8}")
    for row in found.values():
        step, comm, exposed = row["step_ms"], row["comm_ms"], row["comm_exposed_ms"]
        hidden = max(0, 1 - exposed / comm) if comm and row["ranks"] > 1 else None
        print(f"{row['words']:20} {step:8.1f} {cell(step / alone if alone else None, '.3f', 10)} {comm:10.1f} "
              f"{exposed:10.1f} {cell(hidden, '.0%', 8)}")
    trace = re.findall(r"^overlap \| (.*)$", text_of(logs / "gpu_nccl-overlap.log"), re.M)
    if trace:
        print("\nbuckets of rank 0 on the two streams (gpu_nccl-overlap), ms since the first kernel")
        print("\n".join(trace))


def ratios(logs):
    """A line each: what was measured, against what it is measured by."""
    logs = pathlib.Path(logs)
    ceiling = kernels(logs)[1]
    rows = {run: Speed(logs, run, size) for run, size in runs(logs).items()}
    for run, row in rows.items():
        if row.rate is None:
            continue
        words = [f"{row.rate:.0f} tokens/s"]
        if ceiling:
            words.append(f"{row.flops / ceiling:.1%} of the measured product ceiling")
        if row.to_best():
            words.append(f"{row.to_best():.3f} x PyTorch {row.best_peer()}")
        plain = rows[row.size].rate
        if run != row.size and plain:
            words.append(f"{row.rate / plain:.3f} x {row.size} without the switch")
        yield f"{run}: {', '.join(words)}"
    found = overlaps(logs)
    if "alone" in found and "true" in found:
        alone, several = found["alone"]["step_ms"], found["true"]
        yield (f"{where(logs, several['ranks'])}: {several['step_ms'] / alone:.3f} x the step of one GPU, "
               f"{several['comm_exposed_ms']:.1f} ms of it exposed communication")


def digest(logs):
    """What a reader must know who sees the end of the output only: failures first, then ratios."""
    path = pathlib.Path(logs) / "results.txt"
    results = path.read_text().splitlines() if path.exists() else []
    failed = [line for line in results if "FAILED" in line or "NOT RUN" in line]
    measured = list(ratios(logs))
    if len(measured) > MOST_RATIOS:
        measured[MOST_RATIOS - 1:] = [f"and {len(measured) - MOST_RATIOS + 1} more, in {logs}/table.txt"]
    print(f"DIGEST: {len(results) - len(failed)} checks ok, {len(failed)} not")
    room = DIGEST_LINES - 1 - len(measured)
    if len(failed) > room:
        failed[room - 1:] = [f"and {len(failed) - room + 1} more, in {path}"]
    for line in failed + measured:
        print(line[:MOST_COLUMNS])


def table(logs):
    logs = pathlib.Path(logs)
    text, ceiling = kernels(logs)
    for text in (text, text_of(logs / "attention.log")):
        if text:
            print(text)
    speed(logs, ceiling)
    operations(logs)
    print()
    overlap(logs)


if __name__ == "__main__":
    commands = {"agree": agree, "table": table, "digest": digest}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
