#!/usr/bin/env python3
"""Cuts real links and stops real processes under a training job of two nodes, and prints what followed.

    tests/cuts/run.py --programs target/debug                     all cases: an hour or so
    tests/cuts/run.py --programs target/debug --quick             the shorter ones
    tests/cuts/run.py --programs target/debug --only 'daemon.*20' those whose name matches
    tests/cuts/run.py --list                                      their names

Node A, node B and the machine of `ddp-rendezvous` are network namespaces. Each has one link, limited to 20 Mbit/s, to
a fourth namespace that forwards between them. A cut is a rule there that drops packets silently, as a broken network
does: no side sees its link go down. Cases run three at a time, each in namespaces of its own.

Needs root, `ip`, `tc`, `iptables`, `nsenter`, `unshare`. Exit code 77: something is missing, nothing was tested. Exit
code 1: a case did not end as it should. Nothing is left behind, also after `kill -9`: a second process waits for the
end of this one, and removes processes, namespaces and files.
"""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOLS = ["ip", "tc", "iptables", "nsenter", "unshare"]
PREFIX = "ddp-cuts-"
RATE = ["tbf", "rate", "20mbit", "burst", "32kb", "latency", "100ms"]
HOSTS = {"a": "10.77.1.2", "b": "10.77.2.2", "daemon": "10.77.3.2"}
DAEMON = HOSTS["daemon"] + ":29400"
# The network sets the pace, about 0.3 s a step, so cases that run side by side do not slow each other down.
SHORT, LONG = 160, 460  # steps of the job: for cuts of up to 20 s, and for longer ones
BEGIN_AT = 15  # steps done when the cut begins
JOIN_TIMEOUT = 120
DEADLINE = JOIN_TIMEOUT + 150  # seconds that a case may take beyond an undisturbed run and its cut
DOCUMENTED = {0, 69, 75}  # exit codes after the loss of a node or of the rendezvous
YAML = """
run: {{name: cuts, seed: 1337, out_dir: {out}}}
model: {{kind: gpt2, n_layer: 2, n_head: 2, n_embd: 64, block_size: 32}}
data: {{train: {root}/examples/data/python-reference.txt, tokenizer: bytes}}
train:
  steps: {steps}
  micro_batch: 2
  threads: 1
  checkpoint_every: 10
  optimizer: {{kind: adamw, lr: 2.0e-3}}
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """What happens to the job: `what` is a link or a process of node B, or nothing."""
    what: str
    way: str
    seconds: int

    @property
    def name(self):
        return f"{self.what}, {self.way}, {self.seconds} s"

    @property
    def steps(self):
        return SHORT if self.seconds <= 20 else LONG

    def wanted(self):
        """What the documents promise: no restart, a job that ends with success, or any end that they name."""
        if self.what == "whole node":
            return "no restart" if self.seconds <= 3 else "success" if self.seconds <= 20 else "documented"
        # As long as training advances, neither side of a cut link to the daemon gives up.
        return "no restart"

    def pairs(self):
        """The directions (from, to) in which packets are dropped."""
        if self.what == "daemon's network":
            nodes = ["a", "b"]
            return [("daemon", node) for node in nodes] + [(node, "daemon") for node in nodes]
        others = {"daemon's link": ["daemon"], "workers' link": ["a"], "whole node": ["daemon", "a"]}[self.what]
        out, back = [("b", host) for host in others], [(host, "b") for host in others]
        return {"both ways": out + back, "from B": out, "to B": back}[self.way]


LINKS = ["daemon's link", "workers' link", "whole node"]


def all_cases(quick):
    ways, cuts, stops = ["both ways", "from B", "to B"], [3, 8, 20, 90], [5, 15, 60]
    if quick:
        ways, cuts, stops = ways[:2], [3, 20], [15]
    cases = [Case(link, way, seconds) for link in LINKS for seconds in cuts for way in ways]
    cases += [Case("daemon's network", "both ways", seconds) for seconds in cuts]
    return cases + [Case(process, "SIGSTOP", seconds) for process in ("daemon", "agent", "worker") for seconds in stops]


def sh(*words, check=True):
    done = subprocess.run(words, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def namespaces():
    return [line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]


def kill_processes(names):
    for name in names:
        for pid in sh("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def remove_namespaces(prefix):
    """Kills the processes in them, too, also stopped ones."""
    names = [name for name in namespaces() if name.startswith(prefix)]
    kill_processes(names)
    for name in names:
        sh("ip", "netns", "delete", name)


def clean_up_at_the_end(directory):
    """In a process that outlives this one. It inherits the lock, so no other run begins before it is done."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(read)
        return child, write
    os.setsid()
    os.close(write)
    os.read(read, 1)
    remove_namespaces(PREFIX)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


class Network:
    """Three hosts and the router between them."""

    def __init__(self, slot):
        self.prefix = f"{PREFIX}{slot}-"
        remove_namespaces(self.prefix)
        router = self.namespace("router")
        for host in ("router", *HOSTS):
            sh("ip", "netns", "add", self.namespace(host))
            sh("ip", "-n", self.namespace(host), "link", "set", "dev", "lo", "up")
        self.inside("router", "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        for host, address in HOSTS.items():
            own, gateway = self.namespace(host), address[:-1] + "1"
            sh("ip", "-n", router, "link", "add", "name", host, "type", "veth", "peer", "name", "eth0", "netns", own)
            for place, link, local in ((router, host, gateway), (own, "eth0", address)):
                sh("ip", "-n", place, "address", "add", local + "/24", "dev", link)
                sh("ip", "-n", place, "link", "set", "dev", link, "up")
                sh("tc", "-n", place, "qdisc", "add", "dev", link, "root", *RATE)
            sh("ip", "-n", own, "route", "add", "default", "via", gateway)

    def namespace(self, host):
        return self.prefix + host

    def enter(self, host):
        return ["nsenter", f"--net=/run/netns/{self.namespace(host)}"]

    def inside(self, host, *words):
        return sh(*self.enter(host), *words)

    def drop(self, pairs, action):
        for source, target in pairs:
            self.inside("router", "iptables", action, "FORWARD", "-s", HOSTS[source], "-d", HOSTS[target], "-j", "DROP")


class Job:
    """The daemon and two launchers, with every line that they print and when."""

    def __init__(self, network, case, directory, programs):
        self.network, self.directory, self.lines = network, directory, queue.SimpleQueue()
        self.out = directory / "run"
        yaml = directory / "train.yaml"
        yaml.write_text(YAML.format(out=self.out, root=ROOT, steps=case.steps))
        self.daemon = self.start("daemon", programs / "ddp-rendezvous", "serve", "--listen", DAEMON)
        self.nodes = {node: self.start(
            node, programs / "ddp-run", "--nnodes", 2, "--rdzv-endpoint", DAEMON, "--rdzv-id", "cuts",
            "--node-rank", rank, "--rdzv-conf", f"join_timeout={JOIN_TIMEOUT}", yaml) for rank, node in enumerate("ab")}

    def start(self, host, *words):
        own_name = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"node-{host}"]
        process = subprocess.Popen(self.network.enter(host) + own_name + [str(word) for word in words],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        threading.Thread(target=self.read, args=(host, process.stdout), daemon=True).start()
        return process

    def read(self, host, pipe):
        with open(self.directory / f"{host}.log", "w") as log:
            for line in pipe:
                now, text = time.monotonic(), line.decode(errors="replace").rstrip()
                print(f"{now:.1f} {text}", file=log, flush=True)
                self.lines.put((now, host, text))

    def steps(self):
        with contextlib.suppress(FileNotFoundError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def ended(self):
        return all(node.poll() is not None for node in self.nodes.values())

    def wait(self, until, seconds):
        deadline = time.monotonic() + seconds
        while not until() and time.monotonic() < deadline:
            time.sleep(0.05)
        return until()

    def pid(self, process):
        if process in ("daemon", "agent"):
            return self.daemon.pid if process == "daemon" else self.nodes["b"].pid
        for pid in self.network.inside("b", "ip", "netns", "pids", self.network.namespace("b")).split():
            if b"\0LOCAL_RANK=0\0" in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                return int(pid)
        raise RuntimeError("node B has no worker")

    def result(self):
        """What must be the same as in an undisturbed run: the last step's loss, and every tensor."""
        summary = json.loads((self.out / "summary.json").read_text())
        files = sorted((self.out / "checkpoints" / summary["checkpoint"]).glob("*.safetensors"))
        tensors = [(file.name, hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
        return [summary["steps"], summary["loss"], summary["val_loss"], *tensors]


@contextlib.contextmanager
def disturbed(job, case):
    if case.way == "SIGSTOP":
        pid = job.pid(case.what)
        os.kill(pid, signal.SIGSTOP)
        yield
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    else:
        job.network.drop(case.pairs(), "-I")
        yield
        job.network.drop(case.pairs(), "-D")


@dataclasses.dataclass
class Outcome:
    case: Case
    codes: list
    verdict: str
    restarts: int
    message: str
    took: float  # seconds from the beginning of the cut to the end of the last node
    result: list

    def problem(self, undisturbed):
        wanted = self.case.wanted()
        if None in self.codes:
            return "not over by the deadline"
        if self.codes == [0, 0] and self.result != undisturbed.result:
            return "not bit-equal"
        if wanted == "documented":
            return None if set(self.codes) <= DOCUMENTED else "undocumented exit code"
        if self.codes != [0, 0]:
            return "did not end with 0"
        return "a restart was spent" if wanted == "no restart" and self.restarts else None

    def row(self, undisturbed):
        same = "yes" if self.result == undisturbed.result else "no" if self.result else "–"
        codes = ", ".join("none" if code is None else str(code) for code in self.codes)
        problem = self.problem(undisturbed)
        return [self.case.what, self.case.way, f"{self.case.seconds} s", self.verdict, codes, str(self.restarts),
                self.message, f"{self.took:.0f} s", same, f"FAIL: {problem}" if problem else "PASS"]


HEAD = ["what", "how", "for", "verdict of the daemon", "exit codes A, B", "restarts", "first message after",
        "then took", "bit-equal", ""]


def run(case, network, directory, programs):
    directory.mkdir()
    job = Job(network, case, directory, programs)
    if not job.wait(lambda: job.steps() >= BEGIN_AT or job.ended(), 120) or job.ended():
        raise RuntimeError(f"{case.name}: the job did not start, see {directory}")
    begin = time.monotonic()
    if case.what != "nothing":
        with disturbed(job, case):
            job.wait(job.ended, case.seconds)
    job.wait(job.ended, case.steps + DEADLINE)
    took = time.monotonic() - begin
    # Each process has its exit code; what they printed last may still be in the pipes.
    time.sleep(0.5)
    codes = [node.poll() for node in job.nodes.values()]
    kill_processes(network.namespace(host) for host in HOSTS)
    result = job.result() if codes == [0, 0] else []
    return Outcome(case, codes, *told(job, begin), took, result)


def told(job, begin):
    """The daemon's verdict, restarts that were spent, and the first message that is not about the training."""
    verdict, first, restarts = "–", "–", 0
    while not job.lines.empty():
        when, host, text = job.lines.get()
        text = re.sub(r"^\S+Z +\w+ |\x1b\[[0-9;]*m", "", text)
        about_training = re.match(r"\[\d+\]", text)
        if host == "daemon" and (ended := re.search(r"^job `cuts` ended: (.*)", text)):
            verdict = ended[1]
        elif host == "daemon" and (spent := re.search(r"restarting now \((\d+)/", text)):
            restarts = int(spent[1])
        elif when > begin and not about_training and first == "–":
            first = f"{when - begin:.1f} s, {'daemon' if host == 'daemon' else host.upper()}: {text}"
    return verdict, restarts, first


def table(rows):
    cells = [[cell.replace("|", "\\|") for cell in row] for row in [HEAD, ["---"] * len(HEAD), *rows]]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def run_all(cases, options, directory):
    """Pairs of the undisturbed run and the outcome, in the order in which they end. The longest begin first."""
    slots = queue.SimpleQueue()
    for slot in range(options.jobs):
        slots.put(slot)

    def in_a_slot(name, case):
        slot = slots.get()
        try:
            return run(case, Network(slot), directory / name, options.programs)
        finally:
            slots.put(slot)

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        calm = {steps: pool.submit(in_a_slot, f"undisturbed-{steps}", Case("nothing", "–", seconds))
                for steps, seconds in {case.steps: case.seconds for case in cases}.items()}
        running = [pool.submit(in_a_slot, re.sub(r"\W+", "-", case.name), case)
                   for case in sorted(cases, key=lambda case: -case.seconds)]
        try:
            for done in concurrent.futures.as_completed(running):
                yield calm[done.result().case.steps].result(), done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def missing():
    if os.geteuid() != 0:
        return "this test needs root: it makes network namespaces"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"missing: {', '.join(absent)} (Debian: apt-get install iproute2 iptables util-linux)" if absent else None


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/debug", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="the shorter cases")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="those that match")
    parser.add_argument("--jobs", type=int, default=3, metavar="N", help="cases at a time [3]")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--logs", type=pathlib.Path, metavar="DIR", help="keep what the processes printed")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    options = parser.parse_args()
    options.programs = options.programs.resolve()
    return options, [case for case in all_cases(options.quick) if options.only.search(case.name)]


def main():
    options, cases = parse()
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    if reason := missing():
        print(f"SKIPPED, NOTHING WAS TESTED: {reason}", file=sys.stderr)
        return 77
    lock = open("/run/lock/ddp-cuts", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    directory = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
    # The other end of a pipe: it closes when this process ends, in whatever way.
    cleaner, end = clean_up_at_the_end(directory)
    remove_namespaces(PREFIX)
    rows = {}
    try:
        for undisturbed, outcome in run_all(cases, options, directory):
            row = rows[outcome.case] = outcome.row(undisturbed)
            print(f"{row[-1]:<40} {outcome.case.name}: {outcome.verdict}; {outcome.message}", flush=True)
    finally:
        if options.logs:
            shutil.copytree(directory, options.logs, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
        os.close(end)
        os.waitpid(cleaner, 0)
    text = table([rows[case] for case in cases])
    if options.out:
        options.out.write_text(text)
    print(text)
    return int("FAIL" in text)


if __name__ == "__main__":
    sys.exit(main())
