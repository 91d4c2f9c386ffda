#!/usr/bin/env python3
"""Training scripts of PyTorch's frameworks under ddp-run, written as their users write them for torchrun.

    tests/frameworks/run.py --programs target/debug                       all cases: about ten minutes
    tests/frameworks/run.py --programs target/debug --only 'lightning|ddp' those whose name matches
    tests/frameworks/run.py --launcher torchrun                           the same under torchrun, to compare

A case goes through one life on one node with two ranks, and through another on two nodes with one rank each. In each
life a rank is killed with SIGKILL, the restarted ranks resume from the framework's own checkpoint, and SIGTERM ends the
job with a save. The second life begins at the save of the first, and torchrun continues from the save of the second.

The packages of `requirements.txt` are installed in a virtual environment, `--environment`. If the Python that runs this
has PyTorch in the wanted version, the environment borrows it. Exit code 77: nothing was tested, as something is missing.
Exit code 1: a case failed. Nothing but environment and logs is left behind, also after `kill -9`.
"""
import argparse
import contextlib
import dataclasses
import importlib.metadata
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/frameworks"
SCRIPTS = HERE / "scripts"
PATIENCE_S = 240  # for each wait; a busy machine needs half a minute for some of the imports
INSTALL_S = 3000
MARK = f"FRAMEWORKS_RUN={uuid.uuid4().hex}"
# Unbuffered Python writes the end of a line apart: another line may follow at once, also one that begins with a date.
NUMBER = r"(\d+?)(?=20\d\d-|\D|$)"
STARTS = rf"rank (\d+) starts at step {NUMBER}"
STEP = r"step (\d+) loss "
SAVED = rf"saved step {NUMBER}"
# PyTorch 2.15 aborts now and then when Python ends while a thread of gloo's frees a tensor of the last collective.
ABORT = "terminate called without an active exception"


class Failed(Exception):
    """What did not happen, or happened otherwise."""


class Missing(Exception):
    """What is missing for a test."""


def marked():
    """All processes of this run, with their environments."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (folder / "environ").read_bytes()
            if MARK.encode() in environment and (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found[int(folder.name)] = environment
    return found


def kill_marked():
    for _ in range(50):
        if not (pids := marked()):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def clean_up_at_the_end(folder):
    """In a process that outlives this one: it kills what is left and removes the folder."""
    ours, alive = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(alive)
        os.read(ours, 1)  # until the end of this run closes the pipe
        kill_marked()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)
    os.close(ours)


def environment(folder):
    """The virtual environment with the packages of `requirements.txt`."""
    wanted = (HERE / "requirements.txt").read_text()
    stamp, python = folder / "installed.txt", folder / "bin/python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    if folder.exists() and not stamp.exists():
        raise Missing(f"{folder} is another's: name a folder that does not exist")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stamp.touch()
    pins = dict(line.split("==") for line in wanted.splitlines() if "==" in line)

    def run(*words):
        variables = {**os.environ, **variables_of(folder)}
        done = subprocess.run([str(word) for word in words], env=variables, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=INSTALL_S)
        if done.returncode:
            raise Missing(f"`{' '.join(map(str, words))}` failed:\n{done.stdout[-2000:]}")
        return done.stdout

    print(f"installing {' '.join(pins)} in {folder}", flush=True)
    run(sys.executable, "-m", "venv", folder)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        if importlib.metadata.version("torch") == pins["torch"]:
            site = pathlib.Path(importlib.metadata.distribution("torch").locate_file("")).resolve()
            target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
            pathlib.Path(target, "borrowed.pth").write_text(f"{site}\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    late = ("deepspeed", "torchft")
    run(*pip, *(f"{name}=={version}" for name, version in pins.items() if name not in late))
    for name in late:
        try:
            run(*pip, "--no-build-isolation", f"{name}=={pins[name]}")
            if name == "deepspeed":
                # It compiles an extension at its first use. A rank that dies meanwhile would leave a lock for ever.
                run(python, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()")
        except Missing as why:
            print(f"{name}: {why}", flush=True)
            run(python, "-m", "pip", "uninstall", "--quiet", "--yes", name)
    if not (folder / "bin/torchrun").exists():
        (folder / "bin/torchrun").write_text(f"#!{python}\nfrom torch.distributed.run import main\n\nmain()\n")
        (folder / "bin/torchrun").chmod(0o755)
    stamp.write_text(wanted)
    return python


def variables_of(folder):
    name, value = MARK.split("=")
    return {
        name: value,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "MAX_JOBS": "2",
    }


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Job:
    """Processes of one job, such as its launchers, and all their lines in the order in which they came."""

    def __init__(self, log, commands, variables):
        self.log, self.lines, self.came, self.open = log, [], threading.Condition(), len(commands)
        unwanted = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE")
        inherited = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.processes = [
            subprocess.Popen([str(word) for word in command], env={**inherited, **variables, **extra},
                             stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             errors="replace", start_new_session=True, cwd=log.parent)
            for command, extra in commands
        ]
        self.started = time.monotonic()
        for at, process in enumerate(self.processes):
            threading.Thread(target=self._read, args=(at, process.stdout), daemon=True).start()

    def _read(self, at, stream):
        with self.log.open("a") as log:
            for line in stream:
                log.write(f"{time.monotonic() - self.started:7.2f} node {at} {line}")
                log.flush()
                with self.came:
                    self.lines.append(line.rstrip())
                    self.came.notify_all()
        with self.came:
            self.open -= 1
            self.came.notify_all()

    def wait_for(self, what, condition):
        """What `condition` says of the lines, once it says something."""
        deadline = time.monotonic() + PATIENCE_S
        with self.came:
            while not (value := condition()):
                if self.open == 0 or not self.came.wait(max(0.0, deadline - time.monotonic())):
                    ended = "its end" if self.open == 0 else f"{PATIENCE_S} s"
                    raise Failed(f"not until {ended}: {what}")
        return value

    def numbers(self, pattern, since=0):
        """The last group of each match."""
        return [int(match.groups()[-1]) for line in self.lines[since:] for match in re.finditer(pattern, line)]

    def wait_for_ranks(self, pattern, ranks, since=0):
        """The number that the lines of all ranks agree on."""
        found = set(self.wait_for(f"`{pattern}` of {ranks} ranks since line {since}",
                                  lambda: len(seen := self.numbers(pattern, since)) >= ranks and seen))
        if len(found) != 1:
            raise Failed(f"ranks disagree on `{pattern}`: {sorted(found)}")
        return found.pop()

    def wait_for_step(self, wanted, since=0, pattern=STEP):
        """The first step that `wanted` accepts."""
        return self.wait_for(f"a step since line {since}",
                             lambda: next((step for step in self.numbers(pattern, since) if wanted(step)), None))

    def rank(self, rank, **variables):
        """The process id of a rank: its parent has no such variable."""
        marks = [f"\0{name}={value}\0".encode() for name, value in {"RANK": rank, **variables}.items()]
        has = {pid: environment for pid, environment in marked().items()
               if all(mark in b"\0" + environment for mark in marks)}
        for pid in has:
            parent = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent not in has:
                return pid
        raise Failed(f"no process of rank {rank}")

    def signal(self, number):
        for process in self.processes:
            process.send_signal(number)

    def finish(self, code, excuse=None):
        """Waits for the end, with this code, or torchrun's for a failure if a line has `excuse`, and without processes that
        stay."""
        self.wait_for("the end of the output", lambda: self.open == 0)
        codes = [process.wait(PATIENCE_S) for process in self.processes]
        excused = {code, 1} if excuse and any(excuse in line for line in self.lines) else {code}
        if not set(codes) <= excused:
            raise Failed(f"exit codes {codes} instead of {code}")


@dataclasses.dataclass
class Case:
    name: str
    package: str
    script: str
    words: tuple = ()
    # How users start it: the launcher with a script, or by something that calls the launcher.
    style: str = "launcher"
    ranks_on_two_nodes: int = 2

    def shown(self, nodes):
        """Of how many ranks the output is seen."""
        if nodes == 2:
            return self.ranks_on_two_nodes
        return 1 if self.style == "run_train.sh" else 2


CASES = [
    Case("DDP", "torch", "train_ddp.py"),
    Case("FSDP2 and DCP", "torch", "train_fsdp2.py"),
    Case("DTensor, tensor parallel", "torch", "train_tensor_parallel.py"),
    Case("torchtitan's launch script", "torch", "train_titan.py", ("--tp", "2"), style="run_train.sh"),
    Case("accelerate", "accelerate", "train_accelerate.py"),
    Case("accelerate launch", "accelerate", "train_accelerate.py", style="accelerate launch"),
    Case("notebook_launcher", "accelerate", "notebook.py", style="notebook", ranks_on_two_nodes=4),
    Case("Lightning", "lightning", "train_lightning.py"),
    Case("transformers Trainer", "transformers", "train_transformers.py"),
    Case("DeepSpeed ZeRO-1", "deepspeed", "train_deepspeed.py"),
    Case("torchft", "torchft", "train_torchft.py", style="replica groups"),
]


class Run:
    def __init__(self, programs, python, launcher, folder, logs):
        self.ddp_run, self.python, self.torchrun = programs / "ddp-run", python, python.parent / "torchrun"
        self.launcher = self.torchrun if launcher == "torchrun" else self.ddp_run
        self.folder, self.logs = folder, logs
        self.variables = {**variables_of(python.parents[1]), "PYTHONPATH": f"{ROOT / 'python'}:{SCRIPTS}"}
        self.rows = []
        # As the wheel installs it.
        for pth in (ROOT / "python/data/purelib").glob("*.pth"):
            shutil.copy(pth, next(python.parents[1].glob("lib/python3*/site-packages")))

    def version(self, package):
        code = f"import importlib.metadata as m; print(m.version({package!r}))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
        if done.returncode:
            raise Missing(f"{package} is not installed")
        return done.stdout.strip()

    def commands(self, case, launcher, nodes, out, logs, extra):
        """One command for each node, with its variables."""
        port, script = free_port(), SCRIPTS / case.script
        restarts = 0 if extra else 3  # where torchrun continues, a restart would hide why
        words = ["--out", out, *case.words, *extra]
        for node in range(nodes):
            meet = ["--nnodes", nodes, "--node-rank", node, "--rdzv-backend", "c10d", "--rdzv-id", out.name,
                    "--rdzv-endpoint", f"127.0.0.1:{port}"] if nodes > 1 else []
            usual = ["--nproc-per-node", 2 // nodes, "--max-restarts", restarts, "--tee", 3,
                     "--log-dir", f"{logs}-{node}"]
            if case.style == "run_train.sh":
                endpoint = {"RDZV_ENDPOINT": f"127.0.0.1:{port}"} if nodes > 1 else {}
                yield [SCRIPTS / "run_train.sh", *words], {
                    "LAUNCHER": str(launcher), "NGPU": str(2 // nodes), "NNODES": str(nodes), "LOG_RANK": "0",
                    "LOG_DIR": f"{logs}-{node}", **endpoint}
            elif case.style == "accelerate launch":
                machines = ["--num_machines", nodes, "--machine_rank", node, "--main_process_ip", "127.0.0.1"]
                yield [self.python, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu",
                       "--num_processes", 2, *machines, "--main_process_port", port, "--max_restarts", restarts,
                       script, *words], self.replaced(launcher)
            elif case.style == "notebook":
                yield [self.python, script, *words, "--nodes", nodes, "--node", node, "--port", port], \
                    self.replaced(launcher)
            else:
                yield [launcher, *meet, *usual, script, *words], {}

    def replaced(self, launcher):
        """The variables by which what calls torchrun's Python gets `launcher`."""
        if launcher == self.torchrun:
            return {}
        if not (ROOT / "python/ddp_run/torchrun.py").exists():
            raise Missing("`ddp_run.torchrun` is not there")
        return {"DDP_REPLACE_TORCHRUN": "1", "PATH": f"{self.ddp_run.parent}:{self.variables['PATH']}"}

    def job(self, case, launcher, nodes, out, name, *extra):
        logs = self.logs / f"{re.sub('[^a-z0-9]+', '-', case.name.lower())}-{name}"
        for old in self.logs.glob(f"{logs.name}*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        return Job(logs.with_suffix(".log"), list(self.commands(case, launcher, nodes, out, logs, extra)),
                   self.variables), logs

    def life(self, case, nodes, out, first):
        """Start, kill, resume, stop. Returns what happened, and the step of the last save."""
        job, logs = self.job(case, self.launcher, nodes, out, f"{nodes}-nodes")
        seen = case.shown(nodes)
        if (begun := job.wait_for_ranks(STARTS, seen)) != first:
            raise Failed(f"it started at step {begun}, saved was {first}")
        if case.style in ("accelerate launch", "notebook") and self.launcher == self.ddp_run:
            if not any(os.path.realpath(f"/proc/{pid}/exe") == str(self.ddp_run) for pid in marked()):
                raise Failed("no process is ddp-run")
        saved = job.wait_for_step(lambda step: step > begun, pattern=SAVED)
        at = job.wait_for_step(lambda step: step > saved + 2)
        since, killed = len(job.lines), time.monotonic()
        os.kill(job.rank(1), signal.SIGKILL)
        resumed = job.wait_for_ranks(STARTS, seen, since)
        since, took = len(job.lines), time.monotonic() - killed
        if resumed not in job.numbers(SAVED) or resumed < saved:
            raise Failed(f"killed at step {at}, resumed at {resumed}, saved were {job.numbers(SAVED)}")
        # Not beside a regular save, so that the save at the end is seen to be one.
        stop = job.wait_for_step(lambda step: step > resumed + 2 and 3 <= step % 20 <= 10, since)
        since, asked = len(job.lines), time.monotonic()
        job.signal(signal.SIGTERM)
        # What calls torchrun's Python ends with the exception that it raises.
        direct = self.launcher == self.ddp_run and case.style in ("launcher", "run_train.sh")
        job.finish(128 + signal.SIGTERM if direct else 1)
        last = max(job.numbers(SAVED, since), default=0)
        if last < stop or any("(SIGKILL)" in line for line in job.lines[since:]):
            raise Failed(f"SIGTERM at step {stop}: the last save is {last}, or the ranks did not end")
        self.nothing_is_left()
        if direct:
            self.check_logs(logs, nodes)
        return f"killed at {at}, resumed at {resumed} in {took:.0f} s, SIGTERM saved {last} in " \
               f"{time.monotonic() - asked:.0f} s", last

    def check_logs(self, logs, nodes):
        for attempt, rank in ((0, 0), (1, 0), (0, 1), (1, 1)):
            # Launchers without `--node-rank` get their ranks in any order.
            files = [pathlib.Path(f"{logs}-{node}", f"attempt_{attempt}/{rank}/stdout.log") for node in range(nodes)]
            if not any(re.search(STARTS, file.read_text()) for file in files if file.exists()):
                raise Failed(f"`starts at step` is in none of {', '.join(map(str, files))}")

    def beside(self, case, out, first):
        """torchrun continues, and the script ends by itself."""
        job, _ = self.job(case, self.torchrun, 1, out, "torchrun", "--steps", first + 3)
        seen = case.shown(1)
        if (begun := job.wait_for_ranks(STARTS, seen)) != first:
            raise Failed(f"it started at step {begun}, saved was {first}")
        job.wait_for_ranks(rf"finished at step {NUMBER}", seen)
        job.finish(0, ABORT)
        self.nothing_is_left()
        return f"resumed at {first}, finished at {first + 3}"

    def nothing_is_left(self):
        deadline = time.monotonic() + 10
        while pids := marked():
            if time.monotonic() > deadline:
                names = [pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")[:80] for pid in pids]
                raise Failed(f"processes are left: {names}")
            time.sleep(0.1)

    def row(self, case, tried, work):
        """One row of the table. Returns what `work` returns beside its words."""
        start, version, rest = time.monotonic(), "", None
        try:
            version = self.version(case.package)
            result, rest = work()
            kind = "passed"
        except Missing as why:
            kind, result = "skipped", str(why)
        except (Failed, OSError, subprocess.TimeoutExpired) as why:
            kind, result = "FAILED", str(why)
        finally:
            kill_marked()
        row = case.name, version, tried, f"{kind}: {result}", f"{time.monotonic() - start:.0f} s"
        self.rows.append((kind, row))
        print(" | ".join(row), flush=True)
        return rest

    def case(self, case):
        out = self.folder / re.sub("[^a-z0-9]+", "-", case.name.lower())
        out.mkdir()
        if case.style == "replica groups":
            for nodes in (1, 2):
                self.row(case, f"2 groups of {nodes} node(s)", lambda: self.groups_that_heal(case, nodes, out))
            return
        saved = 0
        for nodes in (1, 2):
            saved = self.row(case, f"{nodes} node(s)", lambda: self.life(case, nodes, out, saved))
            if saved is None:
                return
        if self.launcher == self.ddp_run:
            self.row(case, "then torchrun", lambda: (self.beside(case, out, saved), None))

    def groups_that_heal(self, case, nodes, out):
        """torchft often fails the other group too; then neither has the state, and nothing is seen."""
        for attempt in range(4):
            try:
                return self.replica_groups(case, nodes, out / f"{nodes}-{attempt}")
            except Missing as why:
                last = why
                kill_marked()
        raise last

    def replica_groups(self, case, nodes, out):
        """Two replica groups, each a job of its own, with as many ranks as nodes. Returns what happened."""
        out.mkdir()
        port, name = free_port(), f"torchft-{nodes}"
        for old in self.logs.glob(f"{name}-*.log"):
            old.unlink()
        lighthouse = Job(self.logs / f"{name}-lighthouse.log", [(
            [self.python.parent / "torchft_lighthouse", "--min_replicas", 1, "--join_timeout_ms", 5000,
             "--bind", f"127.0.0.1:{port}"], {})], self.variables)
        variables = {**self.variables, "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "NUM_REPLICA_GROUPS": "2"}

        def start(group, life):
            meeting = free_port()
            commands = [([self.launcher, "--nnodes", nodes, "--node-rank", node, "--nproc-per-node", 1,
                          "--max-restarts", 3, "--rdzv-backend", "c10d", "--rdzv-id", f"group-{group}",
                          "--rdzv-endpoint", f"127.0.0.1:{meeting}", SCRIPTS / case.script, "--out", out], {})
                        for node in range(nodes)]
            return Job(self.logs / f"{name}-group-{group}-{life}.log", commands,
                       {**variables, "REPLICA_GROUP_ID": str(group)})

        both = r"of 2 step (\d+) loss"
        groups = [start(0, 1), start(1, 1)]
        at = max(group.wait_for_step(lambda step: step > 5, pattern=both) for group in groups)
        since, killed = len(groups[1].lines), time.monotonic()
        os.kill(groups[1].rank(nodes - 1, REPLICA_GROUP_ID=1), signal.SIGKILL)
        healed = groups[1].wait_for_ranks(rf"goes on at step {NUMBER}", nodes, since)
        took = time.monotonic() - killed
        if healed < at and any("assert fut._fut" in line for line in groups[0].lines):
            raise Missing("torchft failed in the other group too, so none had the state")
        if healed < at:
            raise Failed(f"killed at step {at}, went on at {healed}")
        groups[1].wait_for_step(lambda step: step > healed, since, both)
        # One group stops with a save; the other continues alone.
        code = 1 if self.launcher == self.torchrun else 128 + signal.SIGTERM
        groups[1].signal(signal.SIGTERM)
        groups[1].finish(code)
        saved = groups[1].wait_for_ranks(rf"stops, saved step {NUMBER}", nodes, since)
        groups[0].wait_for_step(lambda step: step > saved + 2, pattern=r"of 1 step (\d+) loss")
        groups[0].signal(signal.SIGTERM)
        groups[0].finish(code)
        last = groups[0].wait_for_ranks(rf"stops, saved step {NUMBER}", nodes)
        # From the file of the group that stopped last.
        again = start(0, 2)
        if (begun := again.wait_for_ranks(STARTS, nodes)) != last:
            raise Failed(f"it started at step {begun}, saved was {last}")
        again.wait_for_step(lambda step: step > last + 2)
        again.signal(signal.SIGTERM)
        again.finish(code)
        lighthouse.signal(signal.SIGKILL)
        self.nothing_is_left()
        return f"killed at {at}, went on at {healed} in {took:.0f} s, SIGTERM saved {last}, resumed there", None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/debug")
    parser.add_argument("--environment", type=pathlib.Path, default=ROOT / "target/frameworks")
    parser.add_argument("--only", default="", help="regular expression for names of cases")
    parser.add_argument("--launcher", choices=["ddp-run", "torchrun"], default="ddp-run")
    parser.add_argument("--logs", type=pathlib.Path, default=ROOT / "target/frameworks-logs")
    parser.add_argument("--out", type=pathlib.Path, help="file for the table, as Markdown")
    args = parser.parse_args()
    programs, logs = args.programs.resolve(), args.logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ddp-frameworks-"))
    clean_up_at_the_end(folder)
    try:
        if not (programs / "ddp-run").exists():
            raise Missing(f"{programs}/ddp-run is not built")
        python = environment(args.environment.absolute())
    except (Missing, subprocess.TimeoutExpired) as why:
        print(f"SKIPPED, NOTHING WAS TESTED: {why}", file=sys.stderr)
        return 77
    run = Run(programs, python, args.launcher, folder, logs)
    for case in CASES:
        if re.search(args.only, case.name, re.IGNORECASE):
            run.case(case)
    table = ["| framework | version | tried | result | time |", "|---|---|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for _, row in run.rows]
    if args.out:
        args.out.write_text("\n".join(table) + "\n")
    print("\n".join(table))
    kinds = [kind for kind, _ in run.rows]
    print(f"{kinds.count('passed')} passed, {kinds.count('FAILED')} failed, {kinds.count('skipped')} skipped")
    print(f"logs: {logs}")
    return 1 if "FAILED" in kinds else 0 if "passed" in kinds else 77


if __name__ == "__main__":
    sys.exit(main())
