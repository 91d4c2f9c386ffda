"""The launcher's promises in time: how soon the others are told of a death, and how soon the next generation runs.

Times are from the kill to the first line of a worker, or of its signal handler, on one clock for all processes.
"""
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOLD = ROOT / "tests/bench/told.py"
# A peer that takes longer is reported as such, and not waited for.
PATIENCE_S = 60


class TooLate(Exception):
    pass


class Trial:
    """A job of `nodes` launchers with `workers` each, which is left to itself when the block ends."""

    def __init__(self, launcher, nodes, workers, elastic=False):
        self.nodes, self.workers = nodes, workers
        self.folder = tempfile.TemporaryDirectory()
        self.log = pathlib.Path(self.folder.name) / "told"
        self.log.touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        worker = [sys.executable, "-S", "-E", TOLD, self.log]
        self.launchers = []
        for rank in range(nodes):
            flags = ["--nproc-per-node", str(workers), "--max-restarts", "3", *launcher.flags]
            if nodes > 1:
                count = f"1:{nodes}" if elastic else str(nodes)
                flags += ["--nnodes", count, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"budget-{port}"]
                flags += ["--rdzv-backend", "c10d", "--node-rank", str(rank), "--rdzv-conf", f"is_host={int(rank == 0)}"]
            else:
                flags += ["--standalone"]
            command = [launcher.program, *flags, "--no-python", *worker]
            env = dict(os.environ, **launcher.env)
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
            self.launchers.append(subprocess.Popen(command, env=env, **quiet))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self.launchers:
            job.send_signal(signal.SIGCONT)
            job.send_signal(signal.SIGTERM)
        for job in self.launchers:
            try:
                job.wait(timeout=30)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
        # Workers that a launcher left behind.
        for line in self.lines():
            if line["what"] == "start" and b"told.py" in self.command_of(line["pid"]):
                os.kill(line["pid"], signal.SIGKILL)
        self.folder.cleanup()

    @staticmethod
    def command_of(pid):
        try:
            return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            return b""

    def lines(self):
        rows = [line.split() for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        names = ("what", "rank", "node", "pid", "at")
        return [dict(zip(names, [row[0], *map(int, row[1:])])) for row in rows]

    def wait(self, count, since=0, **wanted):
        """The first `count` lines with these values after the time `since`, in order of time."""
        deadline = time.monotonic() + PATIENCE_S
        fits = lambda line: line["at"] > since and all(line[name] == value for name, value in wanted.items())
        while time.monotonic() < deadline:
            found = [line for line in self.lines() if fits(line)]
            if len(found) >= count:
                return sorted(found, key=lambda line: line["at"])[:count]
            time.sleep(0.001)
        raise TooLate

    def started(self):
        """The first lines of all workers. Without them there is nothing to measure."""
        try:
            return self.wait(self.nodes * self.workers, what="start")
        except TooLate:
            sys.exit(f"not all workers started within {PATIENCE_S} s: {self.launchers[0].args}")


def milliseconds(since, lines):
    return (lines[-1]["at"] - since) / 1e6


def after_a_death(launcher, nodes, workers):
    """SIGKILL of one worker: milliseconds until all others are told to stop, and until all of the next generation run."""
    with Trial(launcher, nodes, workers) as trial:
        victim = next(line for line in trial.started() if line["node"] == 0)
        killed = time.monotonic_ns()
        os.kill(victim["pid"], signal.SIGKILL)
        local = trial.wait(workers - 1, killed, what="stop", node=0)
        everywhere = trial.wait(nodes * workers - 1, killed, what="stop")
        again = trial.wait(nodes * workers, killed, what="start")
        return {
            "local": milliseconds(killed, local),
            "everywhere": milliseconds(killed, everywhere),
            "again": milliseconds(killed, again),
        }


def after_a_lost_node(launcher, how):
    """SIGKILL or SIGSTOP of the second node's launcher: milliseconds until the first node's workers are told to stop."""
    with Trial(launcher, nodes=2, workers=2, elastic=True) as trial:
        # The launcher that does not host the rendezvous.
        lost = trial.launchers[1]
        lost_node = next(line["node"] for line in trial.started() if descends_from(line["pid"], lost.pid))
        killed = time.monotonic_ns()
        lost.send_signal(how)
        return milliseconds(killed, trial.wait(2, killed, what="stop", node=1 - lost_node))


def descends_from(pid, launcher):
    """True if `launcher` is among the ancestors of `pid`."""
    while pid > 1:
        if pid == launcher:
            return True
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def several(times, measure):
    """Results of `times` trials; those that came too late are None."""
    results = []
    for _ in range(times):
        try:
            results.append(measure())
        except TooLate:
            results.append(None)
    return results
