#!/usr/bin/env python3
"""Benchmarks of ddp-run beside its peers, alternating in one run; prints Markdown. Standard library only.

    cargo build --release --workspace --bins --examples
    python3 tests/bench/run.py launch rendezvous budgets restart live collectives steps strategies layouts context experts stall --torch /path/to/venv/bin --mpi

Without --torch or --mpi the peers are left out; that of `experts` needs `transformers` too. Each figure is a median with its
smallest and largest value; compare within one table, not between runs.
"""
import argparse
import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import types

import budgets

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = pathlib.Path(os.environ.get("DDP_RUN", ROOT / "target/release/ddp-run"))
PEERS = ROOT / "tests/peers"
TEXT = ROOT / "examples/data/python-reference.txt"
# Layers, heads, channels, vocabulary, positions, micro-batch of a rank.
CONFIGS = {"A": (6, 6, 384, 256, 256, 8), "B": (12, 12, 768, 50257, 128, 1)}
DEADLINE_S = 300


def spread(values, unit="ms"):
    return f"{statistics.median(values):.1f} {unit} ({min(values):.1f} to {max(values):.1f})"


def timed(command, env=None):
    """Seconds and peak RSS in KiB of the largest process of a command."""
    started = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        sys.exit(f"{command} ended with status {status}")
    return time.perf_counter() - started, usage.ru_maxrss


def bench_launch(args):
    print("\n### Launch N × `true`\n\n| launcher | N | time | peak RSS of the launcher |\n|---|---|---|---|")
    for count in ("8", "128"):
        ours, theirs = [], []
        for turn in range(args.turns):
            ours += [timed([RUN, "--nproc-per-node", count, "--", "true"]) for _ in range(4)]
            if args.torch and turn < 3:
                command = [f"{args.torch}/torchrun", "--standalone", "--nproc-per-node", count, "--no-python", "true"]
                theirs.append(timed(command))
        for name, rows in (("ddp-run", ours), ("torchrun", theirs)):
            if rows:
                times, rss = [s * 1e3 for s, _ in rows], max(k for _, k in rows) / 1024
                print(f"| {name} | {count} | {spread(times)} | {rss:.0f} MiB |", flush=True)


def bench_rendezvous(args):
    print("\n### N nodes meet\n\n| N | ddp-run | with their connections | torchrun (c10d) |\n|---|---|---|---|")
    for nodes in ("16", "64", "128", "256", "1024"):
        ours = [ROOT / "target/release/examples/rendezvous", "--turns", str(args.turns), nodes]
        out = subprocess.run(ours, check=True, capture_output=True, text=True).stdout
        joined, connected = re.fullmatch(r".*nodes: (.*); with their connections (.*)\n", out).groups()
        theirs = "not measured"
        if args.torch and nodes != "1024":
            theirs = torch_rendezvous(args, nodes)
        print(f"| {nodes} | {joined} | {connected} | {theirs} |", flush=True)


def torch_rendezvous(args, nodes):
    # Otherwise all clients of a process share one connection.
    env = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    command = [f"{args.torch}/python", PEERS / "rendezvous.py", nodes]
    times = []
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S)
        if done.returncode:
            return done.stdout.strip()
        times.append(float(done.stdout) * 1e3)
    return spread(times)


def launchers(args):
    """ddp-run, and torchrun with the setting without which half of its restarts fail."""
    ours = types.SimpleNamespace(name="ddp-run", program=RUN, flags=[], env={})
    theirs = types.SimpleNamespace(name="torchrun", program=f"{args.torch}/torchrun", flags=["--monitor-interval", "0.1"])
    theirs.env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [ours, theirs] if args.torch else [ours]


def budget_row(what, budget, name, results):
    came = [r for r in results if r is not None]
    late = f"{len(results) - len(came)} of {len(results)} not within {budgets.PATIENCE_S} s"
    words = "; ".join(([spread(came)] if came else []) + ([late] if len(came) < len(results) else []))
    print(f"| {what} | {budget} | {name} | {words} |", flush=True)


def bench_budgets(args):
    print("\n### From a death to what follows\n\n| from … to … | budget | launcher | time |\n|---|---|---|---|")
    for launcher in launchers(args):
        turns = args.turns * 2 if launcher.program == RUN else min(args.turns, 3)
        one = budgets.several(turns, lambda: budgets.after_a_death(launcher, 1, 8))
        two = budgets.several(turns, lambda: budgets.after_a_death(launcher, 2, 4))
        rows = lambda results, key: [result and result[key] for result in results]
        row = lambda what, budget, results: budget_row(what, budget, launcher.name, results)
        row("worker killed: 7 others of its node signalled", "50 ms", rows(one, "local"))
        row("… all workers of 2 nodes signalled", "1 s", rows(two, "everywhere"))
        row("… 8 workers of the next generation run, 1 node", "200 ms", rows(one, "again"))
        row("… of 2 nodes", "", rows(two, "again"))
        for how, words in ((signal.SIGKILL, "killed"), (signal.SIGSTOP, "frozen: no connection breaks")):
            lost = budgets.several(min(turns, 3 if launcher.program == RUN else 1), lambda: budgets.after_a_lost_node(launcher, how))
            row(f"launcher of a node {words}: workers of the other signalled", "10 s", lost)


def wait_for(condition, what, every_s=0.001):
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        value = condition()
        if value is not None:
            return value
        time.sleep(every_s)
    sys.exit(f"waited {DEADLINE_S} s for {what}")


def lines_of(path):
    try:
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    except FileNotFoundError:
        return []


# Parameters: layers, heads, channels, vocabulary; and the steps between two checkpoints.
LIVE = {
    "1 M": (4, 4, 128, 1024, 20),
    "10 M": (5, 6, 384, 2048, 20),
    "124 M": (12, 12, 768, 50257, 5),
}


def restart_once(folder, program=RUN, ranks=2, sets=(), every=20, is_new=False):
    """Milliseconds from SIGKILL of a worker, a few steps behind a checkpoint, to the first finished step of the next
    generation; with `is_new` to the first one that was not finished before."""
    out = pathlib.Path(folder) / "run"
    command = [program, "--nproc-per-node", str(ranks), "--set", f"run.out_dir={out}", "--set", "train.steps=100000"]
    command += [word for value in sets for word in ("--set", value)]
    command += ["--set", f"train.checkpoint_every={every}", ROOT / "examples/single-node/train.yaml"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        metrics = out / "metrics.jsonl"
        behind = every + every // 4
        first = wait_for(lambda: next((m for m in lines_of(metrics) if m["step"] > behind), None), f"step {behind}")
        worker = int(workers_of(job)[-1].name)
        killed = time.perf_counter()
        os.kill(worker, signal.SIGKILL)
        last = lines_of(metrics)[-1]["step"] if is_new else 0
        is_newer = lambda line: line["generation"] > first["generation"] and line["step"] > last
        newer = lambda: next(filter(is_newer, lines_of(metrics)), None)
        wait_for(newer, "a step of the next generation")
        return (time.perf_counter() - killed) * 1e3
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()


def torch_restart(torch, ranks=2):
    """The same of torchrun: from SIGKILL to the first all-reduce, as the script itself prints it."""
    env = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    command = [f"{torch}/torchrun", "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "3", PEERS / "restart.py"]
    out = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S).stdout
    return float(re.search(r"first all_reduce ([0-9.]+) s", out).group(1)) * 1e3


def bench_restart(args):
    print("\n### From `kill -9` of a worker to the next generation at work\n\n| | time |\n|---|---|")
    ours, theirs = [], []
    for turn in range(args.turns):
        with tempfile.TemporaryDirectory() as folder:
            ours.append(restart_once(folder))
        if args.torch and turn < 5:
            theirs.append(torch_restart(args.torch))
    print(f"| ddp-run: first finished training step, resumed from the checkpoint | {spread(ours)} |")
    if theirs:
        print(f"| torchrun: first all-reduce of an empty script | {spread(theirs)} |")


def bench_live(args):
    print("\n### From `kill -9` of a rank to the end of a step that was not finished before, 1 thread a rank\n")
    print("| parameters | ranks | live | restart of all | torchrun |\n|---|---|---|---|---|")
    for name, (layers, heads, width, vocab, every) in LIVE.items():
        sets = [f"model.n_layer={layers}", f"model.n_head={heads}", f"model.n_embd={width}", f"model.vocab_size={vocab}"]
        sets += ["model.block_size=64", "train.micro_batch=1", "train.threads=1", "train.eval_every=0"]
        for ranks in (2, 4, 8):
            live, old, theirs = [], [], []
            for turn in range(args.turns):
                for times, program in ((live, RUN), (old, args.old)):
                    if program:
                        with tempfile.TemporaryDirectory() as folder:
                            times.append(restart_once(folder, program, ranks, sets, every, is_new=True))
                if args.torch and name == "1 M" and turn < 3:
                    theirs.append(torch_restart(args.torch, ranks))
            words = [spread(times) if times else "not measured" for times in (live, old, theirs)]
            print(f"| {name} | {ranks} | {' | '.join(words)} |", flush=True)
    print("\ntorchrun: an empty script, until its first all-reduce.")
    print("\n### A node of 2 ranks joins another one, and is killed, 1 M parameters\n")
    print("| from the start of its launcher to a step of 4 ranks | … restart of all | from its `kill -9` to a step of 2 ranks | … restart of all |")
    print("|---|---|---|---|")
    live, old = [], []
    for _ in range(args.turns):
        for times, program in ((live, RUN), (old, args.old)):
            if program:
                with tempfile.TemporaryDirectory() as folder:
                    times.append(grow_and_shrink(folder, program))
    column = lambda times, i: spread([pair[i] for pair in times]) if times else "not measured"
    print(f"| {column(live, 0)} | {column(old, 0)} | {column(live, 1)} | {column(old, 1)} |")


def grow_and_shrink(folder, program):
    """Milliseconds from the start of a second node to the first step that both make, and from SIGKILL of its launcher to
    the next step that the first one makes alone."""
    out = pathlib.Path(folder) / "run"
    layers, heads, width, vocab, every = LIVE["1 M"]
    sets = {"run.out_dir": out, "train.steps": 100000, "train.checkpoint_every": every, "model.n_layer": layers, "train.threads": 1}
    sets |= {"model.n_head": heads, "model.n_embd": width, "model.vocab_size": vocab, "model.block_size": 64, "train.eval_every": 0}
    sets |= {"train.micro_batch": 1, "train.grad_accumulation": 2}
    words = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "bench", "--nproc-per-node", "2"]
    words += ["--rdzv-conf", "last_call_timeout=0.3", *(f"--set={key}={value}" for key, value in sets.items())]
    start = lambda rank: subprocess.Popen(
        [program, *words, "--node-rank", str(rank), ROOT / "examples/single-node/train.yaml"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    last = lambda: (lines_of(out / "metrics.jsonl") or [{"step": 0, "world_size": 0}])[-1]
    beyond = lambda step, ranks: wait_for(
        lambda: True if last()["step"] > step and last()["world_size"] == ranks else None, f"a step of {ranks} ranks"
    )
    jobs = [start(0)]
    try:
        beyond(every, 2)
        began = time.perf_counter()
        jobs.append(start(1))
        beyond(0, 4)
        grown = time.perf_counter() - began
        beyond(last()["step"] + every + every // 4, 4)
        killed, at = time.perf_counter(), last()["step"]
        jobs[1].kill()
        beyond(at, 2)
        return grown * 1e3, (time.perf_counter() - killed) * 1e3
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def bench_collectives(args):
    for ranks, nodes in ((2, 1), (4, 2)):
        print(f"\n### All-reduce, f32, {ranks} ranks, ours on {nodes} node{'s' if nodes > 1 else ''}\n\n```")
        for turn in range(args.turns // 2):
            ours = [ROOT / "target/release/examples/collectives", "--ranks", str(ranks), "--nodes", str(nodes)]
            subprocess.run(ours, check=True)
            if turn < 2 and args.mpi:
                with tempfile.TemporaryDirectory() as folder:
                    subprocess.run(["mpicc", "-O3", PEERS / "collectives_mpi.c", "-o", f"{folder}/cmpi"], check=True)
                    subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(ranks), f"{folder}/cmpi"],
                                   check=True)
            if turn < 2 and args.torch:
                command = [f"{args.torch}/torchrun", "--standalone", "--nproc-per-node", str(ranks), PEERS / "collectives.py"]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        print("```")
    print("\n### Small all-reduces between nodes, 4 KiB\n\n| nodes × ranks | direct | tree | tree / direct |\n|---|---|---|---|")
    for nodes, local in ((2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2)):
        direct, tree = [], []
        for _ in range(args.turns):
            for times, word in ((direct, "false"), (tree, "true")):
                command = [ROOT / "target/release/examples/collectives", "--ranks", str(nodes * local), "--nodes", str(nodes),
                           "--sizes", "4096", "--other", "--tree", word]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                times.append(float(out.splitlines()[-1].split()[1]))
        ratios = [100 * t / d for t, d in zip(tree, direct)]
        print(f"| {nodes} × {local} | {spread(direct, 'µs')} | {spread(tree, 'µs')} | {spread(ratios, '%')} |", flush=True)


def workers_of(job):
    """Process ids of the ranks that a launcher started."""
    out = subprocess.run(["pgrep", "-P", str(job.pid), "-f", "__worker"], capture_output=True, text=True).stdout
    return [pathlib.Path("/proc") / pid for pid in out.split()]


def peak_rss(rank):
    """MiB that a process has used at most so far."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", (rank / "status").read_text()).group(1)) / 1024


def our_steps(name, steps, folder, strategy="ddp", precision="f32", ranks=2, more=()):
    """Lines of `steps` steps after 3, and the peak RSS of the largest rank in MiB. `more` are settings as pairs. The job is
    killed then: validation and the last checkpoint are not of interest."""
    layers, heads, width, vocab, positions, batch = CONFIGS[name]
    out = pathlib.Path(folder) / "run"
    yaml = pathlib.Path(folder) / "bench.yaml"
    yaml.write_text(
        f"run: {{out_dir: {out}}}\n"
        f"model: {{kind: gpt2, n_layer: {layers}, n_head: {heads}, n_embd: {width}, block_size: {positions}, vocab_size: {vocab}}}\n"
        f"data: {{train: {TEXT}}}\n"
        f"train: {{steps: 100000, micro_batch: {batch}, threads: 1, precision: {precision}}}\n"
        f"parallel: {{strategy: {strategy}}}\n"
    )
    sets = [f"--set={key}={value}" for key, value in more]
    command = [RUN, "--nproc-per-node", str(ranks), *sets, yaml]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    workers = []
    try:
        seen = lambda: lines_of(out / "metrics.jsonl")
        enough = lambda: seen() if len(seen()) >= steps + 3 else sys.exit("ddp-run ended early") if job.poll() is not None else None
        rows = wait_for(enough, f"{steps + 3} steps", every_s=0.1)
        workers = workers_of(job)
        rss = max(map(peak_rss, workers))
    finally:
        job.kill()
        job.wait()
    # Their memory and their cores are the next one's.
    wait_for(lambda: True if not any(worker.exists() for worker in workers) else None, "the ranks to end")
    return rows[3 : steps + 3], rss


def peer_output(args, ranks, script, *words):
    """What a script of PyTorch prints."""
    launch = [f"{args.torch}/torchrun", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*(launch if ranks > 1 else [f"{args.torch}/python"]), PEERS / script, *words]
    # Pipelining over gloo has hung before (pytorch 132644), and ranks have crashed, also at their end.
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEADLINE_S)
        if done.returncode == 0:
            return done.stdout
        print(f"PyTorch failed, once more: {words}: {done.stderr[-2000:]}", file=sys.stderr)
    sys.exit(f"PyTorch failed five times: {words}")


def peer_steps(args, ranks, script, *words):
    """Median, smallest and largest milliseconds of a step of a script of PyTorch, and its peak RSS in MiB."""
    out = peer_output(args, ranks, script, *words)
    found = re.search(r"step ([0-9.]+) ms \(min ([0-9.]+), max ([0-9.]+)\).*peak RSS ([0-9]+) MiB", out)
    return [float(x) for x in found.groups()]


def torch_steps(args, name, steps, mode="ddp"):
    ranks = 1 if mode == "single" else 2
    return peer_steps(args, ranks, "ddp_step.py", "--config", name, "--mode", mode, "--steps", str(steps), "--fused")


# (configuration, ranks, mode of ddp_step.py)
STEP_ROWS = [("A", 2, "ddp"), ("B", 2, "ddp"), ("A", 1, "single"), ("B", 1, "single")]


def bench_steps(args):
    print("\n### Training step, f32, 1 thread a rank\n")
    print("| configuration | ranks | turn | ddp-run | exposed communication | peak RSS of a rank | PyTorch (gloo, fused AdamW) | its peak RSS | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, ranks, mode in STEP_ROWS:
        for turn in range(2):
            with tempfile.TemporaryDirectory() as folder:
                rows, rss = our_steps(name, 10, folder, ranks=ranks)
            times = [r["step_ms"] for r in rows]
            exposed = spread([r["comm_exposed_ms"] for r in rows])
            peer = "| | |"
            if args.torch:
                median, low, high, peak = torch_steps(args, name, 10, mode)
                ratio = statistics.median(times) / median
                peer = f"{median:.1f} ms ({low:.1f} to {high:.1f}) | {peak:.0f} MiB | {ratio:.2f} |"
            print(f"| {name} | {ranks} | {turn + 1} | {spread(times)} | {exposed} | {rss:.0f} MiB | {peer}", flush=True)


# Ours, and what PyTorch has of the kind.
STRATEGIES = {"ddp": "ddp", "zero1": "zero1", "zero2": None, "zero3": "fsdp2"}
# Timed steps by configuration and mode: fully_shard takes several seconds a step of B.
STEPS = {"A": 10, "B": 8, ("B", "fsdp2"): 4}


def bench_strategies(args):
    print("\n### Strategies, 2 ranks × 1 thread\n")
    print("| configuration | ddp-run | step | PSS, peak RSS of a rank | PyTorch (gloo, f32, fused AdamW) | step | peak RSS |\n|---|---|---|---|---|---|---|")
    for name in CONFIGS:
        for precision in ("f32", "bf16"):
            for strategy, mode in STRATEGIES.items():
                with tempfile.TemporaryDirectory() as folder:
                    rows, rss = our_steps(name, STEPS[name], folder, strategy, precision)
                pss = max(r["memory"]["pss"] for r in rows) / 2**20
                peer = "| | | |"
                if args.torch and mode and precision == "f32":
                    median, low, high, peak = torch_steps(args, name, STEPS.get((name, mode), STEPS[name]), mode)
                    peer = f"| {mode} | {median:.1f} ms ({low:.1f} to {high:.1f}) | {peak:.0f} MiB |"
                times = spread([r["step_ms"] for r in rows])
                print(f"| {name} | {strategy}, {precision} | {times} | {pss:.0f}, {rss:.0f} MiB {peer}", flush=True)


PIPELINE = {"parallel.pipeline.stages": 2, "train.grad_accumulation": 8}
# Ranks, our settings, and the words of `nd_step.py`. Its model is not tied.
LAYOUTS = {
    "tp 2": (2, {"parallel.tensor": 2}, "--mode tp"),
    "tp 2, sequence parallel": (2, {"parallel.tensor": 2, "parallel.sequence": "true"}, "--mode tp_sp"),
    "pp 2, 1F1B": (2, {**PIPELINE, "parallel.pipeline.schedule": "1f1b"}, "--mode pp --schedule 1F1B --micro 8"),
    "pp 2, ZBV": (
        2,
        {**PIPELINE, "parallel.pipeline.schedule": "zbv"},
        "--mode pp --schedule ZBVZeroBubble --chunks 2 --micro 8",
    ),
    "fsdp 2 × tp 2, sequence parallel": (
        4,
        {"parallel.strategy": "zero3", "parallel.tensor": 2, "parallel.sequence": "true"},
        "--mode fsdp2_tp --tp 2",
    ),
}


def torch_layout(args, ranks, words):
    """Median and least milliseconds of a step, and the peak RSS of the largest rank in MiB."""
    out = peer_output(args, ranks, "nd_step.py", "--config", "A", "--steps", "10", *words.split())
    found = re.search(r"step ([0-9.]+) ms \(min ([0-9.]+)\).*peak RSS max ([0-9]+) MiB", out)
    return [float(x) for x in found.groups()]


def bench_layouts(args):
    print("\n### Layouts, configuration A, untied, f32, 1 thread a rank; pp with 8 micro-batches a step\n")
    print("| layout | ranks | turn | ddp-run | exposed communication | peak RSS of a rank | PyTorch (gloo): median, least | its peak RSS |")
    print("|---|---|---|---|---|---|---|---|")
    for turn in range(2):
        for layout, (ranks, settings, words) in LAYOUTS.items():
            more = {"model.tied": "false", **settings}.items()
            with tempfile.TemporaryDirectory() as folder:
                rows, rss = our_steps("A", 10, folder, ranks=ranks, more=more)
            ours, exposed = (spread([r[key] for r in rows]) for key in ("step_ms", "comm_exposed_ms"))
            peer = "| |"
            if args.torch:
                median, least, peak = torch_layout(args, ranks, words)
                peer = f"{median:.1f} ms, {least:.1f} | {peak:.0f} MiB |"
            print(f"| {layout} | {ranks} | {turn + 1} | {ours} | {exposed} | {rss:.0f} MiB | {peer}", flush=True)


def side_by_side(args, rows, script):
    """Rounds of ours and PyTorch's in turn. `rows` have ranks, our settings, and the words of PyTorch's script."""
    print("| layout | ranks | ddp-run | exposed communication | peak RSS of a rank | PyTorch (gloo, fused AdamW) | its peak RSS | ratio of each round |")
    print("|---|---|---|---|---|---|---|---|")
    rounds = {layout: [] for layout in rows}
    for _ in range(max(1, args.turns // 2)):
        for layout, (ranks, more, words) in rows.items():
            with tempfile.TemporaryDirectory() as folder:
                steps, rss = our_steps("A", 5, folder, ranks=ranks, more=more.items())
            peer = peer_steps(args, ranks, script, "--steps", "5", *words.split()) if args.torch else None
            rounds[layout].append((steps, rss, peer))
    for layout, found in rounds.items():
        ours, exposed = (spread([step[key] for steps, _, _ in found for step in steps]) for key in ("step_ms", "comm_exposed_ms"))
        line = f"| {layout} | {rows[layout][0]} | {ours} | {exposed} | {max(rss for _, rss, _ in found):.0f} MiB "
        if args.torch:
            medians, least, most, peaks = zip(*(peer for _, _, peer in found))
            ratios = ", ".join(f"{peer[0] / statistics.median(step['step_ms'] for step in steps):.2f}" for steps, _, peer in found)
            line += f"| {statistics.median(medians):.1f} ms ({min(least):.1f} to {max(most):.1f}) | {max(peaks):.0f} MiB | {ratios} "
        print(f"{line}|", flush=True)


LONG = {"model.block_size": 4096, "train.micro_batch": 1}
RING = {"parallel.context": 2, "parallel.context_algorithm": "ring"}
# Ranks, our settings, and the words of `ddp_step.py`.
CONTEXT = {
    "whole samples": (1, LONG, "--mode single --fused --positions 4096 --batch 1"),
    "cp 2, keys and values gathered": (2, {**LONG, "parallel.context": 2}, "--mode cp --fused --positions 4096 --batch 1"),
    "cp 2, ring": (2, {**LONG, **RING}, "--mode cp --rotate alltoall --fused --positions 4096 --batch 1"),
}


def bench_context(args):
    print("\n### Context parallelism, configuration A with 1 sample of 4,096 positions, f32, 1 thread a rank\n")
    side_by_side(args, CONTEXT, "ddp_step.py")


# The model of `mixtral_step.py`.
MIXTRAL = {"model.kind": "mixtral", "model.n_layer": 2, "model.n_inner": 1024}
MIXTRAL.update({"model.experts.count": 8, "model.experts.top_k": 2, "model.experts.aux_loss": 0.02})
# PyTorch has no expert parallelism of it: each of its ranks computes all experts.
EXPERTS = {
    "all experts on the rank": (1, MIXTRAL, "--mode single"),
    "all experts on each rank": (2, MIXTRAL, "--mode ddp"),
    "ep 2; PyTorch as above": (2, {**MIXTRAL, "parallel.expert": 2}, "--mode ddp"),
}


def bench_experts(args):
    print("\n### 2 Mixtral layers × 384, 8 experts × 1,024, top 2, 8 samples of 256 positions a rank, f32, 1 thread a rank\n")
    with tempfile.TemporaryDirectory() as folder:
        # As PyTorch's: bytes that any expert is as likely to get. A text's tokens are not.
        text = pathlib.Path(folder) / "random.txt"
        text.write_bytes(random.Random(1).randbytes(2**20))
        rows = {name: (ranks, {**more, "data.train": text}, words) for name, (ranks, more, words) in EXPERTS.items()}
        side_by_side(args, rows, "mixtral_step.py")


def bench_stall(_args):
    print("\n### What a save costs the training, configuration A, 2 ranks × 1 thread, every 5 steps", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / "target/release/examples/checkpoint_stall", "--folder", folder]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    # The start-up tables of its runs come before.
    print(out[out.index("\n| | ") :], flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["launch", "rendezvous", "budgets", "restart", "collectives", "steps", "strategies", "layouts"]
    known += ["context", "experts", "stall", "live"]
    parser.add_argument("what", nargs="+", choices=known)
    parser.add_argument("--torch", help="bin folder of a Python environment with PyTorch")
    parser.add_argument("--old", help="an older ddp-run, beside which `live` is measured")
    parser.add_argument("--mpi", action="store_true", help="compare with Open MPI")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--isa", choices=["baseline", "avx2"], help="a lower instruction set than the machine's best, for ours and PyTorch's; products of `baseline` are scalar code, PyTorch's use SSE4")
    args = parser.parse_args()
    if args.isa:
        peers = {"avx2": ("avx2", "AVX2", "AVX2"), "baseline": ("default", "SSE4_2", "SSE41")}[args.isa]
        names = ["ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA"]
        os.environ.update({"DDP_ISA": args.isa, **dict(zip(names, peers))})
        print(f"Instruction set of ours and of PyTorch: {args.isa}")
    for what in args.what:
        globals()[f"bench_{what}"](args)


if __name__ == "__main__":
    main()
