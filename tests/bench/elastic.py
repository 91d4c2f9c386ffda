#!/usr/bin/env python3
"""An elastic job of 2 to 4 nodes under kills, freezes, cuts, polite leaves and joins: what each costs, that no step is
lost, and that no rank ever has two workers.

    cargo build --release --workspace --bins
    python3 tests/bench/elastic.py --seconds 300

The nodes are launchers on this machine, each with one native rank; `ddp-rendezvous` runs beside them. A node is killed with
its whole process group (as a machine that is reset), frozen (SIGSTOP to its launcher, whose workers run on), cut off from
the daemon (a relay that holds its bytes back), stopped with SIGTERM, or started. The lost time is counted on a node that
stays: from the signal to the assignment of the next generation. /proc tells every 10 ms which worker holds which rank. At
the end the losses of all steps are held against those of a run of 4 ranks that nothing disturbed, and their difference
against that of two such runs, of 2 and of 4 ranks. Standard library only.
"""
import argparse
import json
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = ROOT / "examples/data/python-reference.txt"
# Within this time every change of the job's nodes has led to the next generation.
PATIENCE_S = 60
# Longer than `takeover_timeout`, so that another generation begins without the node.
AWAY_S = 20
# Between worlds of several sizes only the order of additions differs, and what follows from that grows with the steps:
# undisturbed runs of 1 and of 4 ranks differed by 3e-7 after 1,000 steps, by 2e-5 after 8,000. After the same number of
# steps, measured differences vary by less than this factor. Losses of steps that follow each other, of different batches,
# differ by percents.
SPREAD = 10
MIN_NODES, MAX_NODES = 2, 4

CONFIG = """
run: {{ name: elastic, seed: 1337 }}
model: {{ kind: gpt2, n_layer: 2, n_head: 2, n_embd: 64, block_size: 64 }}
data: {{ train: "{text}", tokenizer: bytes }}
train:
  steps: {steps}
  micro_batch: 2
  grad_accumulation: {accumulation}
  rescale: keep_global_batch
  optimizer: {{ kind: adamw, lr: 1.0e-3, betas: [0.9, 0.95], weight_decay: 0.1 }}
  schedule: {{ kind: constant, warmup_steps: 20 }}
  checkpoint_every: 20
  threads: 1
"""


class Relay:
    """The way from one node to the daemon; while it is cut, it holds all bytes back."""

    def __init__(self, endpoint):
        host, port = endpoint.rsplit(":", 1)
        self.target, self.is_open = (host, int(port)), threading.Event()
        self.is_open.set()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = "127.0.0.1:%d" % self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near = self.listener.accept()[0]
            self.is_open.wait()
            try:
                far = socket.create_connection(self.target)
            except OSError:
                return near.close()
            for ends in ((near, far), (far, near)):
                threading.Thread(target=self.copy, args=ends, daemon=True).start()

    def copy(self, source, target):
        try:
            while data := source.recv(1 << 16):
                self.is_open.wait()
                target.sendall(data)
        except OSError:
            pass
        self.is_open.wait()
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Holders(threading.Thread):
    """Looks every 10 ms which living worker of this test holds which rank."""

    def __init__(self, out):
        super().__init__(daemon=True)
        self.marker, self.looks, self.twice, self.known = str(out), 0, [], {}

    def holder(self, pid):
        """(rank, generation) of a worker of this job; none of another process."""
        if pid not in self.known:
            command = (pathlib.Path("/proc") / pid / "cmdline").read_bytes()
            environment = (pathlib.Path("/proc") / pid / "environ").read_bytes().decode(errors="replace").split("\0")
            values = dict(entry.split("=", 1) for entry in environment if "=" in entry)
            is_worker = b"__worker" in command.split(b"\0") and self.marker.encode() in command
            self.known[pid] = (values["RANK"], values["DDP_GENERATION"]) if is_worker else None
        return self.known[pid]

    def living(self):
        holders = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                state = (pathlib.Path("/proc") / pid / "stat").read_text().rpartition(")")[2].split()[0]
                found = self.holder(pid) if state not in "ZX" else None
            except (OSError, KeyError):
                continue
            if found:
                holders.setdefault(found[0], set()).add(found[1])
        return holders

    def run(self):
        while True:
            self.looks += 1
            for rank, generations in self.living().items():
                if len(generations) > 1:
                    self.twice.append(f"{time.time():.3f}: rank {rank} in generations {sorted(generations)}")
            time.sleep(0.01)


class Node:
    def __init__(self, job, number):
        self.relay = Relay(job.endpoint)
        self.log = job.folder / f"events-{number}.jsonl"
        self.console = (job.folder / f"console-{number}").open("w")
        command = [job.programs / "ddp-run", "--nnodes", f"{MIN_NODES}:{MAX_NODES}", "--nproc-per-node", "1"]
        command += ["--rdzv-endpoint", self.relay.endpoint, "--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=1"]
        command += ["--event-log-handler", self.log, "--max-restarts", "0", "--set", f"run.out_dir={job.out}", job.config]
        self.process = subprocess.Popen(command, stdout=self.console, stderr=subprocess.STDOUT, start_new_session=True)

    def events(self, since=0):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["unix_time_ns"] > since]


class Job:
    def __init__(self, programs, folder):
        self.programs, self.folder, self.out = programs, folder, folder / "run"
        self.config = folder / "train.yaml"
        # Four ranks accumulate 3, three 4, two 6.
        self.config.write_text(CONFIG.format(text=TEXT, steps=10_000_000, accumulation=3))
        log = (folder / "daemon").open("w")
        serve = [programs / "ddp-rendezvous", "serve", "--listen", "127.0.0.1:0"]
        self.daemon = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True)
        # It prints where it listens. A node that comes before would host the rendezvous itself.
        self.endpoint = self.daemon.stdout.readline().strip()
        self.nodes, self.started = [], 0

    def start_node(self):
        self.nodes.append(Node(self, self.started))
        self.started += 1

    def metrics(self):
        path = self.out / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait_for(self, what, condition):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            dead = [node for node in self.nodes if node.process.poll() is not None]
            if dead:
                self.fail(f"a node ended with {dead[0].process.returncode}", dead[0])
            time.sleep(0.005)
        self.fail(f"after {PATIENCE_S} s: {what}", self.nodes[0])

    def fail(self, what, node):
        for name in (node.console.name, self.folder / "daemon"):
            print(f"--- {name}\n{pathlib.Path(name).read_text()[-3000:]}", file=sys.stderr)
        sys.exit(f"error: {what}")

    def wait_for_steps(self, nodes):
        """Until a step was done by so many ranks, and a few more."""
        done = lambda: [row["world_size"] for row in self.metrics()[-4:]]
        self.wait_for(f"no steps of {nodes} ranks", lambda: done() == [nodes] * 4)

    def lost_time(self, since, nodes):
        """Seconds from `since` until a node that stays is assigned to a generation of so many nodes, and until it is told
        that the last one is over."""
        def assigned():
            events = self.nodes[0].events(since)
            found = [e for e in events if e["event"] == "assigned" and e["nodes"] == nodes]
            over = [e for e in events if e["event"] == "generation_over"]
            return found and over and (found[0]["unix_time_ns"], over[0]["unix_time_ns"])
        at, over = self.wait_for(f"no generation of {nodes} nodes", assigned)
        return (at - since) / 1e9, (over - since) / 1e9

    def end(self):
        for node in self.nodes:
            node.process.send_signal(signal.SIGTERM)
        for node in self.nodes:
            node.process.wait(timeout=PATIENCE_S)
        self.daemon.terminate()
        self.daemon.wait(timeout=PATIENCE_S)


def disturb(job, dice, seconds):
    """Kills, stops and starts nodes; returns the lost times of each kind."""
    lost = {"kill": [], "leave": [], "join": [], "freeze": [], "cut": []}
    for _ in range(MAX_NODES):
        job.start_node()
    # Before the first checkpoint a restart would be a new run, of another global batch.
    job.wait_for("no checkpoint", lambda: list(job.out.glob("checkpoints/step_*")))
    job.wait_for_steps(MAX_NODES)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        count = len(job.nodes)
        kinds = ["kill", "leave", "freeze", "cut"] * (count > MIN_NODES) + ["join"] * (count < MAX_NODES)
        kind = dice.choice(kinds)
        time.sleep(dice.uniform(0.5, 2.5))
        since = time.time_ns()
        if kind == "join":
            job.start_node()
        else:
            victim = job.nodes.pop(dice.randrange(count))
            if kind == "kill":
                os.killpg(victim.process.pid, signal.SIGKILL)
            elif kind == "leave":
                victim.process.send_signal(signal.SIGTERM)
            elif kind == "freeze":
                victim.process.send_signal(signal.SIGSTOP)
            else:
                victim.relay.is_open.clear()
        print(f"{time.time():.3f} {kind}: {len(job.nodes)} nodes are left", file=sys.stderr, flush=True)
        lost[kind].append(job.lost_time(since, len(job.nodes)))
        if kind in ("kill", "leave"):
            victim.process.wait(timeout=PATIENCE_S)
        job.wait_for_steps(len(job.nodes))
        if kind in ("freeze", "cut"):
            time.sleep(max(0, AWAY_S - (time.time_ns() - since) / 1e9))
            victim.process.send_signal(signal.SIGCONT)
            victim.relay.is_open.set()
            job.nodes.append(victim)
            job.wait_for_steps(len(job.nodes))
    return lost


def undisturbed(job, ranks, steps):
    """The losses of a run with this number of ranks on one node."""
    config, out = job.folder / f"undisturbed-{ranks}.yaml", job.folder / f"undisturbed-{ranks}"
    config.write_text(CONFIG.format(text=TEXT, steps=steps, accumulation=12 // ranks))
    command = [job.programs / "ddp-run", "--nproc-per-node", str(ranks), "--set", f"run.out_dir={out}", config]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def difference(losses, expected):
    """The largest relative difference of a step's loss."""
    return max(abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True))


def compare(job):
    """The number of steps, each trained once; how far the losses are from an undisturbed run; how far two of those are apart."""
    rows = job.metrics()
    steps = [row["step"] for row in rows]
    if steps != list(range(steps[0], steps[0] + len(steps))):
        sys.exit(f"steps are missing or doubled in {job.out / 'metrics.jsonl'}")
    four, two = (undisturbed(job, ranks, steps[-1]) for ranks in (4, 2))
    return len(rows), difference([row["loss"] for row in rows], four), difference(two, four)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/release")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(args.programs.resolve(), pathlib.Path(folder))
        holders = Holders(job.folder)
        holders.start()
        try:
            lost = disturb(job, random.Random(args.seed), args.seconds)
            job.end()
            steps, disturbed, alone = compare(job)
        finally:
            for process in [*(node.process for node in job.nodes), job.daemon]:
                process.kill()
    print(f"seed {args.seed}: {steps} steps, each once; losses differ by at most {disturbed:.1e} from an undisturbed run of 4 "
          f"ranks, which differs by {alone:.1e} from one of 2")
    workers = sum(holder is not None for holder in holders.known.values())
    print(f"{holders.looks} looks at {workers} workers, {len(holders.twice)} with two of one rank\n")
    print("| event | times | until the others are told, s | until the next generation, s |\n|---|---|---|---|")
    for kind, times in lost.items():
        if times:
            (again, told) = zip(*times)
            spread = lambda values: f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"
            print(f"| {kind} | {len(times)} | {spread(told)} | {spread(again)} |")
    if holders.twice:
        sys.exit("error: two workers of one rank\n" + "\n".join(holders.twice[:10]))
    if disturbed > SPREAD * alone:
        sys.exit(f"error: losses differ by {disturbed:.1e}, more than {SPREAD} times as much as those of undisturbed runs")


if __name__ == "__main__":
    main()
