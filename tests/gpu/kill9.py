#!/usr/bin/env python3
"""Kills a rank of a training run with SIGKILL and looks at what comes of it. Standard library only.

    kill9.py named OUT_DIR SECONDS COMMAND...     the job ends with the name of that rank, and so does every other rank
    kill9.py restart OUT_DIR SECONDS COMMAND...   a restart goes on from the checkpoint and comes to the end

COMMAND starts a ddp-run that trains into OUT_DIR; its logs are in OUT_DIR-logs. All of it may take SECONDS.
"""
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

# The rank that is killed; rank 0 writes the metrics.
VICTIM = 1
# Longest time from the kill to the end of each survivor, in seconds.
SURVIVORS = float(os.environ.get("GPU_SURVIVORS_S", "5"))
# What processes of this job have in their environment.
MARK = f"gpu-kill9-{os.getpid()}"


def steps(out):
    """Of all lines but one that is being written."""
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def process_of(rank):
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"DDP_KILL9_MARK={MARK}".encode() in variables and f"RANK={rank}".encode() in variables:
                return int(folder.name)
    return None


class Job:
    def __init__(self, out, seconds, command):
        self.seconds, self.deadline = seconds, time.monotonic() + seconds
        self.logs = pathlib.Path(f"{out}-logs")
        environment = {**os.environ, "DDP_KILL9_MARK": MARK, "PET_LOG_DIR": str(self.logs)}
        self.process = subprocess.Popen(command, env=environment)

    def fail(self, problem):
        self.process.kill()
        sys.exit(problem)

    def wait_for(self, what, holds):
        while not holds():
            if self.process.poll() is not None:
                self.fail(f"the job ended with status {self.process.returncode} before {what}")
            if time.monotonic() > self.deadline:
                self.fail(f"{self.seconds} s went by without {what}")
            time.sleep(0.002)

    def kill_victim(self):
        """The time of it, in nanoseconds since 1970, as the launcher has those of its workers' ends."""
        victim = process_of(VICTIM)
        if victim is None:
            self.fail(f"rank {VICTIM} is not there")
        killed = time.time_ns()
        os.kill(victim, signal.SIGKILL)
        return killed

    def end(self):
        try:
            return self.process.wait(timeout=max(0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.fail(f"the job did not end within {self.seconds} s, though rank {VICTIM} was killed")


def named(out, job):
    job.wait_for("a first step", lambda: steps(out))
    ranks = steps(out)[0]["world_size"]
    killed = job.kill_victim()
    status = job.end()
    told = json.loads((job.logs / "error.json").read_text())
    first = told["first_failure"]
    print(f"status {status}; first failure: rank {first['rank']}, signal {first['signal']}")
    if (status, first["rank"], first["signal"]) != (128 + signal.SIGKILL, VICTIM, signal.SIGKILL):
        sys.exit(f"the job did not end because rank {VICTIM} was killed")
    survivors = [failure for failure in told["failures"] if failure["rank"] != VICTIM]
    if sorted(survivor["rank"] for survivor in survivors) != [rank for rank in range(ranks) if rank != VICTIM]:
        sys.exit(f"of {ranks} ranks only these have told their end: {survivors}")
    for survivor in survivors:
        seconds = (survivor["unix_time_ns"] - killed) / 1e9
        # It waited for a next generation: what it says is in its log.
        log = job.logs / "attempt_0" / str(survivor["rank"]) / "stderr.log"
        message = survivor["message"] or log.read_text().strip().split("\n")[-1]
        print(f"rank {survivor['rank']}, {seconds:.2f} s after the kill: {message}")
        if f"rank {VICTIM} " not in message or not survivor["consequence"]:
            sys.exit(f"rank {survivor['rank']} does not name rank {VICTIM}")
        if not 0 <= seconds <= SURVIVORS:
            sys.exit(f"rank {survivor['rank']} did not end within {SURVIVORS} s")


def restart(out, job):
    job.wait_for("a checkpoint", lambda: (out / "checkpoints" / "latest").exists() and steps(out))
    before = steps(out)[0]["generation"]
    job.kill_victim()
    killed = time.monotonic()
    status = job.end()
    lines = steps(out)
    resumed = next((line["step"] for line in lines if line["generation"] > before), None)
    print(f"killed in generation {before}; ended with status {status} {time.monotonic() - killed:.1f} s later; step {resumed} was "
          f"the first of the next generation, {lines[-1]['step']} the last")
    if status != 0 or resumed is None or resumed == 1:
        sys.exit("no restart from the checkpoint")


if __name__ == "__main__":
    scenes = {"named": named, "restart": restart}
    if len(sys.argv) < 5 or sys.argv[1] not in scenes:
        sys.exit(__doc__)
    scene, out, seconds, *command = sys.argv[1:]
    scenes[scene](pathlib.Path(out), Job(out, int(seconds), command))
