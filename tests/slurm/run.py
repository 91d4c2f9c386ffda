#!/usr/bin/env python3
"""Runs deploy/slurm/train.sbatch on a real Slurm: slurmctld and three slurmd, on this machine.

    tests/slurm/run.py --programs target/debug                    all cases, under both ways to track processes
    tests/slurm/run.py --programs target/debug --only preemption  those whose name matches

Each slurmd has network, UTS, mount, process and control group namespaces of its own: a machine as far as Slurm and
`ddp-run` can see. A node fails when the first process of its namespace is killed, which ends all others. Links are
limited to 20 Mbit/s, which sets the pace of the training. The user `nobody` submits the jobs.

Needs root and Debian's `slurm-wlm` and `munge`, which it installs if they are missing. The installed configuration is
neither used nor changed. Exit code 77: something is missing, nothing was tested. Exit code 1: a case failed. Nothing
but the packages is left behind, also after `kill -9`: a second process waits for the end of this one, and cleans up.
"""
import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PREFIX = "ddp-slurm-"
CONTROLLER, NODES = "ctl", ["n1", "n2", "n3"]
ADDRESSES = {host: f"10.78.0.{at}" for at, host in enumerate([CONTROLLER, *NODES], 1)}
RATE = ["tbf", "rate", "20mbit", "burst", "32kb", "latency", "100ms"]
CONTROL_GROUPS = ["freezer", "cpuset", "cpu", "cpuacct", "memory", "devices", "pids"]
STEPS = 80  # about 0.3 s each
CHECKPOINT_EVERY = 25
BEGIN_AT = 30  # steps done when something happens to the job
DEADLINE = 240  # seconds for each wait
# A requeued job starts after `cred_expire`. Without a slurmd for `SlurmdTimeout`, a node is down.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=ctl({controller})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/munge.socket,cred_expire=10
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/spool-%n
SlurmctldPidFile={dir}/slurmctld.pid
SlurmdPidFile={dir}/slurmd-%n.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/{task}
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
InactiveLimit=0
JobRequeue=1
JobCompType=jobcomp/filetxt
JobCompLoc={dir}/completed.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/linear
SlurmdParameters=config_overrides
{nodes}
PartitionName=grace Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=UNLIMITED
PartitionName=nograce Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=UNLIMITED
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF MaxTime=UNLIMITED
"""
CGROUP = "CgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\nConstrainCores=yes\n"
# Joins control groups that become the root of those that the node sees.
BOOT = """
set -e
for group in {groups}; do
    mkdir -p /sys/fs/cgroup/$group/{prefix}$1
    if [[ $group == cpuset ]]; then
        for file in cpuset.cpus cpuset.mems; do
            cat /sys/fs/cgroup/cpuset/$file >/sys/fs/cgroup/cpuset/{prefix}$1/$file
        done
    fi
    echo $$ >/sys/fs/cgroup/$group/{prefix}$1/cgroup.procs
done
exec unshare --cgroup --uts --mount --pid --fork --kill-child bash {dir}/inside.sh "$1"
"""
# This shell stays, as the first process of the node: it reaps those that lose their parent.
INSIDE = """
set -e
hostname "$1"
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind {dir}/hosts /etc/hosts
mount -t tmpfs tmpfs /sys/fs/cgroup
for group in {groups}; do
    mkdir /sys/fs/cgroup/$group
    mount -t cgroup -o $group none /sys/fs/cgroup/$group
done
slurmd -D &
wait
"""
YAML = """
run: {{name: slurm, seed: 1337}}
model: {{kind: gpt2, n_layer: 2, n_head: 2, n_embd: 64, block_size: 32}}
data: {{train: {dir}/python-reference.txt, tokenizer: bytes}}
train:
  steps: {steps}
  micro_batch: 2
  threads: 1
  checkpoint_every: {every}
  optimizer: {{kind: adamw, lr: 2.0e-3}}
"""


def sh(*words, check=True):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"`{' '.join(map(str, words))}` failed: {done.stderr.strip()}")
    return done.stdout


def wait_for(what, condition):
    deadline = time.monotonic() + DEADLINE
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {DEADLINE} s: {what}")
        time.sleep(0.2)
    return value


def remove_everything(directory):
    names = [line.split()[0] for line in sh("ip", "netns", "list").splitlines() if line.startswith(PREFIX)]
    for name in names:
        for pid in sh("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for name in names:
        sh("ip", "netns", "delete", name)
    for _ in range(50):
        for group in CONTROL_GROUPS:
            sh("find", f"/sys/fs/cgroup/{group}", "-depth", "-path", f"*/{PREFIX}*", "-type", "d",
               "-exec", "rmdir", "{}", "+", check=False)
        if not list(pathlib.Path("/sys/fs/cgroup").glob(f"*/{PREFIX}*")):
            break
        time.sleep(0.1)
    shutil.rmtree(directory, ignore_errors=True)


def clean_up_at_the_end(directory):
    """In a process that outlives this one. It inherits the lock, so no other run begins before it is done."""
    read, write = os.pipe()
    if child := os.fork():
        os.close(read)
        return child, write
    os.setsid()
    os.close(write)
    os.read(read, 1)
    remove_everything(directory)
    os._exit(0)


class Cluster:
    """slurmctld, its nodes, and the commands of a user."""

    def __init__(self, directory, proctrack, programs):
        self.dir, self.nodes = directory, {}
        # Users reach their own folder and the programs, whatever the rights of the checkout are.
        directory.chmod(0o755)
        self.home = directory / "home"
        for folder in (self.home, directory / "bin", directory / "state"):
            folder.mkdir()
        shutil.chown(self.home, "nobody")
        for file in (programs / "ddp-run", programs / "ddp-train", ROOT / "deploy/slurm/train.sbatch"):
            shutil.copy(file, directory / "bin")
        shutil.copy(ROOT / "examples/data/python-reference.txt", directory)
        self.write(proctrack)
        self.environment = dict(os.environ, SLURM_CONF=str(directory / "slurm.conf"),
                                PATH=f"{directory}/bin:{os.environ['PATH']}:/usr/sbin:/sbin", HOME=str(self.home))
        self.make_network()
        self.start(CONTROLLER, "munged", "--foreground", "--force", f"--socket={directory}/munge.socket",
                   f"--key-file={directory}/munge.key", f"--pid-file={directory}/munge.pid",
                   f"--seed-file={directory}/munge.seed", f"--log-file={directory}/munge.log")
        wait_for("munged", (directory / "munge.socket").exists)
        self.start(CONTROLLER, "unshare", "--uts", "sh", "-c", "hostname ctl; exec slurmctld -D")
        for node in NODES:
            self.boot(node)
        wait_for("all nodes are idle", self.free)

    def free(self):
        return self.command("sinfo", "-h", "-o", "%D %t").split()[:2] == [str(len(NODES)), "idle"]

    def write(self, proctrack):
        names = {"dir": self.dir, "prefix": PREFIX, "groups": " ".join(CONTROL_GROUPS)}
        nodes = "\n".join(f"NodeName={node} NodeAddr={ADDRESSES[node]} CPUs={os.cpu_count()}" for node in NODES)
        configuration = CONFIGURATION.format(
            dir=self.dir, proctrack=proctrack, task="cgroup" if proctrack == "cgroup" else "none", nodes=nodes,
            controller=ADDRESSES[CONTROLLER])
        files = {"slurm.conf": configuration, "cgroup.conf": CGROUP, "boot.sh": BOOT.format(**names),
                 "inside.sh": INSIDE.format(**names),
                 "train.yaml": YAML.format(dir=self.dir, steps=STEPS, every=CHECKPOINT_EVERY),
                 "hosts": "127.0.0.1 localhost\n" + "".join(f"{ip} {host}\n" for host, ip in ADDRESSES.items())}
        for name, text in files.items():
            (self.dir / name).write_text(text)
        (self.dir / "munge.key").write_bytes(os.urandom(128))
        (self.dir / "munge.key").chmod(0o400)

    def make_network(self):
        for host in ADDRESSES:
            sh("ip", "netns", "add", PREFIX + host)
            sh("ip", "-n", PREFIX + host, "link", "set", "dev", "lo", "up")
        hub = PREFIX + CONTROLLER
        sh("ip", "-n", hub, "link", "add", "name", "hub", "type", "bridge")
        sh("ip", "-n", hub, "address", "add", ADDRESSES[CONTROLLER] + "/24", "dev", "hub")
        sh("ip", "-n", hub, "link", "set", "dev", "hub", "up")
        for node in NODES:
            sh("ip", "-n", hub, "link", "add", "name", node, "type", "veth",
               "peer", "name", "eth0", "netns", PREFIX + node)
            sh("ip", "-n", hub, "link", "set", "dev", node, "master", "hub", "up")
            sh("ip", "-n", PREFIX + node, "address", "add", ADDRESSES[node] + "/24", "dev", "eth0")
            sh("ip", "-n", PREFIX + node, "link", "set", "dev", "eth0", "up")
            for place, link in ((hub, node), (PREFIX + node, "eth0")):
                sh("tc", "-n", place, "qdisc", "add", "dev", link, "root", *RATE)

    def start(self, host, *words):
        with open(self.dir / f"{host}.out", "a") as out:
            return subprocess.Popen(["nsenter", f"--net=/run/netns/{PREFIX}{host}", *words], env=self.environment,
                                    stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def boot(self, node):
        self.nodes[node] = self.start(node, "bash", self.dir / "boot.sh", node)

    def fail(self, node):
        """`--kill-child` kills the first process of its namespace, and so all others."""
        self.nodes.pop(node).kill()

    def command(self, *words):
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{PREFIX}{CONTROLLER}", "setpriv", "--reuid=nobody", "--regid=nogroup",
             "--clear-groups", *map(str, words)], env=self.environment, cwd=self.home, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"`{' '.join(map(str, words))}` failed: {done.stderr.strip()}")
        return done.stdout

    def submit(self, *options, target=None, script=None):
        target = target or [self.dir / "train.yaml", "--nproc-per-node", "1"]
        script = script or [self.dir / "bin/train.sbatch", *target]
        number = self.command("sbatch", "--parsable", "--gpus-per-node=0", "--output=%j.out", *options, *script).strip()
        return Batch(self, number)


class Batch:
    """A submitted job."""

    def __init__(self, cluster, number):
        self.cluster, self.number = cluster, number
        self.run = cluster.home / f"runs/slurm/slurm-{number}.0"

    def show(self):
        text = self.cluster.command("scontrol", "show", "job", self.number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def state(self):
        return self.show()["JobState"]

    def steps(self):
        with contextlib.suppress(FileNotFoundError):
            return (self.run / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def under_way(self):
        wait_for(f"job {self.number} has done {BEGIN_AT} steps", lambda: self.steps() >= BEGIN_AT)

    def ended(self):
        final = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY")
        wait_for(f"job {self.number} has ended", lambda: self.state() in final)
        return self

    def output(self):
        path = self.cluster.home / f"{self.number}.out"
        return path.read_text() if path.exists() else ""

    def resumed_at(self):
        return [int(step) for step in re.findall(r"resum\w+ .*?step[_ ]0*(\d+)", self.output())]

    def record(self):
        """What Slurm recorded, as far as it was expected to be different from case to case."""
        shown = self.show()
        return f"{shown['JobState']}, ExitCode {shown['ExitCode']}, Restarts {shown['Restarts']}"

    def loss(self):
        return json.loads((self.run / "summary.json").read_text())["loss"]


# Cases: each returns the job, what Slurm should have recorded, and what else is wrong, if anything.

def start(cluster):
    job = cluster.submit().ended()
    cluster.undisturbed = job.loss()
    return job, "COMPLETED, ExitCode 0:0, Restarts 0", None


def resumed(cluster, job, least):
    """It has gone on from a checkpoint of at least this step, and ended as the undisturbed run did."""
    steps = job.resumed_at()
    if not steps or steps[0] < least:
        return f"resumed at {steps or 'no step'}, not at {least} or later"
    return None if job.loss() == cluster.undisturbed else "another loss than the undisturbed run"


def worker_fails(cluster):
    job = cluster.submit(target=["--nproc-per-node", "1", "--no-python", "sh", "-c", "exit $((RANK == 1 ? 42 : 0))"])
    return job.ended(), "FAILED, ExitCode 42:0, Restarts 0", None


def preempt(cluster, partition, least):
    job = cluster.submit("--partition", partition)
    job.under_way()
    urgent = cluster.submit("--partition=urgent", "--nodes=3", "--job-name=urgent", script=["--wrap", "sleep 1"])
    urgent.ended()
    return job.ended(), "COMPLETED, ExitCode 0:0, Restarts 1", resumed(cluster, job, least)


def preemption_with_grace(cluster):
    return preempt(cluster, "grace", BEGIN_AT)


def preemption_without_grace(cluster):
    return preempt(cluster, "nograce", CHECKPOINT_EVERY)


def stop_by_hand(cluster):
    job = cluster.submit()
    job.under_way()
    cluster.command("scancel", "--signal=TERM", job.number)
    return job.ended(), "COMPLETED, ExitCode 0:0, Restarts 1", resumed(cluster, job, BEGIN_AT)


def no_requeue_left(cluster):
    job = cluster.submit("--export=ALL,MAX_REQUEUES=0")
    job.under_way()
    cluster.command("scancel", "--signal=TERM", job.number)
    return job.ended(), "FAILED, ExitCode 143:0, Restarts 0", None


def warned_of_the_time_limit(cluster, warning):
    """Slurm looks every 30 s, and may send the signal 60 s early. What the second run lacks may need a third one."""
    job = cluster.submit("--time=1", f"--signal={warning}@45").ended()
    restarts = max(1, int(job.show()["Restarts"]))
    return job, f"COMPLETED, ExitCode 0:0, Restarts {restarts}", resumed(cluster, job, 1)


def steps_are_warned(cluster):
    return warned_of_the_time_limit(cluster, "TERM")


def script_is_warned(cluster):
    return warned_of_the_time_limit(cluster, "B:USR1")


def saved(job):
    """Ranks get `KillWait` after SIGTERM. For Slurm, the job has ended before."""
    wait_for("all nodes are idle", job.cluster.free)
    summary = job.run / "summary.json"
    return None if summary.exists() and json.loads(summary.read_text())["stopped"] else "the ranks have not saved"


def time_limit(cluster):
    """Without a warning: SIGCONT, which does nothing, takes the place of that of the script."""
    job = cluster.submit("--time=1", "--signal=CONT@1", target=[
        cluster.dir / "train.yaml", "--nproc-per-node", "1", "--set", "train.steps=2000"]).ended()
    return job, "TIMEOUT, ExitCode 0:15, Restarts 0", saved(job)


def cancel(cluster):
    job = cluster.submit()
    job.under_way()
    cluster.command("scancel", job.number)
    job.ended()
    return job, "CANCELLED, ExitCode 0:15, Restarts 0", saved(job)


def node_fails(cluster):
    return fail(cluster, "n2")


def first_node_fails(cluster):
    """It runs the batch script and hosts the rendezvous."""
    return fail(cluster, "n1")


def fail(cluster, node):
    job = cluster.submit()
    job.under_way()
    cluster.fail(node)
    job.ended()
    cluster.boot(node)
    return job, "COMPLETED, ExitCode 0:0, Restarts 1", resumed(cluster, job, CHECKPOINT_EVERY)


CASES = {
    "start on two nodes": start,
    "a worker exits with 42": worker_fails,
    "preemption, GraceTime=60": preemption_with_grace,
    "preemption, GraceTime=0": preemption_without_grace,
    "scancel --signal=TERM": stop_by_hand,
    "scancel --signal=TERM, MAX_REQUEUES=0": no_requeue_left,
    "time limit, --signal=TERM@45": steps_are_warned,
    "time limit, --signal=B:USR1@45": script_is_warned,
    "time limit without --signal": time_limit,
    "scancel": cancel,
    "a node fails": node_fails,
    "the first node fails": first_node_fails,
}


def run_cases(cluster, proctrack, only):
    for name, case in CASES.items():
        if case is not start and not only.search(f"{name}, {proctrack}"):
            continue
        begin, number = time.monotonic(), "–"
        try:
            job, wanted, problem = case(cluster)
            number, recorded = job.number, job.record()
            passed = "PASS" if recorded == wanted and problem is None else f"FAIL: {problem or f'expected {wanted}'}"
        except RuntimeError as error:
            recorded, wanted, passed = "–", "–", f"FAIL: {error}"
        wait_for("all nodes are idle", cluster.free)
        yield [name, proctrack, recorded, f"{time.monotonic() - begin:.0f} s", passed]
        print(f"{passed:<6} {proctrack}: {name} (job {number}): {recorded}", flush=True)


def table(rows):
    head = ["what happens", "ProctrackType", "what Slurm recorded", "took", ""]
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


def install():
    """Why it cannot be tested here, if so."""
    if os.geteuid() != 0:
        return "this test needs root: it makes namespaces"
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    absent = [tool for tool in ("slurmctld", "slurmd", "sbatch", "munged", "ip", "tc") if shutil.which(tool) is None]
    if not absent:
        return None
    if shutil.which("apt-get") is None:
        return f"missing: {', '.join(absent)}"
    environment = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    for words in (["update"], ["install", "-y", "--no-install-recommends", "slurm-wlm", "munge", "iproute2"]):
        done = subprocess.run(["apt-get", "-q", *words], env=environment, stdout=subprocess.DEVNULL)
        if done.returncode:
            return f"`apt-get {' '.join(words)}` failed"
    return None


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/debug", metavar="DIR")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="cases that match")
    parser.add_argument("--proctrack", choices=["linuxproc", "cgroup"], help="only this plugin")
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write the table there, too")
    parser.add_argument("--logs", type=pathlib.Path, metavar="DIR", help="keep logs and the jobs' output")
    options = parser.parse_args()
    options.programs = options.programs.resolve()
    return options


def main():
    options = parse()
    if reason := install():
        print(f"SKIPPED, NOTHING WAS TESTED: {reason}", file=sys.stderr)
        return 77
    lock = open("/run/lock/ddp-slurm", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    rows = []
    for proctrack in [options.proctrack] if options.proctrack else ["linuxproc", "cgroup"]:
        directory = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX))
        # The other end of a pipe: it closes when this process ends, in whatever way.
        cleaner, end = clean_up_at_the_end(directory)
        try:
            rows.extend(run_cases(Cluster(directory, proctrack, options.programs), proctrack, options.only))
        finally:
            if options.logs:
                shutil.copytree(directory, options.logs / proctrack, dirs_exist_ok=True,
                                ignore=shutil.ignore_patterns("bin", "munge*", "runs", "state", "spool*", "*.txt"))
            os.close(end)
            os.waitpid(cleaner, 0)
    result = f"Slurm {sh('slurmd', '-V').split()[-1]}\n\n{table(rows)}"
    if options.out:
        options.out.write_text(result)
    print(result)
    return int(any("FAIL" in row[-1] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
