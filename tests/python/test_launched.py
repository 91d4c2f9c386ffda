"""The package `ddp_run` under the real `ddp-run`: `DDP_RUN=…` names the binary, else it is the debug build."""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import unittest

from launched import DDP_RUN, PACKAGE_PATH, PATIENCE_S, Launched, reserved_port

BEATS = """
import os, signal, ddp_run
for step in range(3):
    ddp_run.heartbeat(step)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
signal.pause()
"""

STOPS = """
import os, sys, ddp_run
rank, steps = os.environ["RANK"], 0
with ddp_run.stoppable(lambda: print("saved", flush=True)) as boundary:
    while True:
        steps += 1
        boundary(steps)
        if steps == 3:
            print("training", flush=True)
"""

ASKS = """
import ddp_run, sys
print("training", ddp_run.stop_requested(), flush=True)
while not ddp_run.stop_requested():
    ddp_run.heartbeat(1)
print("saved", flush=True)
"""

# Rank 1 fails as soon as rank 0 listens, which leaves because it is told so, not because of the signal that follows.
FAILS = """
import os, signal, sys, ddp_run
if ddp_run.generation() == 2:
    print("generation 2", ddp_run.stop_requested(), flush=True)
elif os.environ["RANK"] == "1":
    open(sys.argv[1]).read()
    sys.exit(3)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with ddp_run.stoppable(lambda: print("saved", flush=True)) as boundary:
        boundary(1)
        open(sys.argv[1], "w").close()
        while True:
            boundary(2)
"""

# Rank 1 dies once rank 0 has made steps, which rank 0 keeps. Then a signal to the launcher stops both.
LIVES = """
import os, signal, sys, ddp_run
rank = os.environ["RANK"]
def train(job):
    first = job.restore({})
    print("generation", ddp_run.generation(), "pid", os.getpid(), "step", first, flush=True)
    if ddp_run.generation() == 1 and rank == "1":
        open(sys.argv[1]).read()
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        job.step(lambda: None)
        if job.finished == 3 and ddp_run.generation() == 1:
            open(sys.argv[1], "w").close()
        if ddp_run.generation() == 2 and job.finished == max(first, 5) + 1:
            print("training", flush=True)
ddp_run.live(train, lambda job: print("saved", job.finished > 3, flush=True))
"""

HANGS = """
import ddp_run, threading
ddp_run.heartbeat(4)
def a_lock_that_nobody_releases():
    threading.Event().wait()
a_lock_that_nobody_releases()
"""

# Rank 0 is behind, and evaluates when it has trained; rank 1 hangs while it trains.
EVALUATES = """
import os, signal, ddp_run
rank = int(os.environ["RANK"])
with ddp_run.stoppable(lambda: None) as boundary:
    for step in range(2 + rank):
        boundary(step + 1)
    if rank == 1:
        print("hanging", flush=True)
        signal.pause()
print("evaluating", flush=True)
signal.pause()
"""


class UnderDdpRun(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def launch(self, script, *flags, words=()):
        file = self.folder / "script.py"
        file.write_text(script)
        launched = Launched("--nproc-per-node", 2, *flags, file, *words)
        self.addCleanup(launched.kill)
        return launched

    def expect(self, launched, code):
        self.assertEqual(launched.finish(), code, launched.transcript())

    def expect_lines(self, launched, pattern, count):
        self.assertEqual(len(launched.matches(pattern)), count, f"`{pattern}` in\n{launched.transcript()}")

    def test_the_report_has_the_last_heartbeat(self):
        launched = self.launch(BEATS)
        self.expect(launched, 128 + signal.SIGKILL)
        self.expect_lines(launched, "last heartbeat: phase training, step 2", 1)

    def test_a_script_that_is_asked_to_stop_saves_and_leaves(self):
        for script in (STOPS, ASKS):
            with self.subTest(script=script):
                launched = self.launch(script)
                for _ in range(2):
                    launched.wait_for(r"^\[\d\] training")
                launched.process.send_signal(signal.SIGTERM)
                self.expect(launched, 128 + signal.SIGTERM)
                self.expect_lines(launched, r"^\[\d\] saved$", 2)

    def test_the_ranks_of_all_nodes_save_when_a_signal_stops_one_launcher(self):
        holder, port = reserved_port()
        self.addCleanup(holder.close)
        meeting = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "stops", "--insecure"]
        nodes = [self.launch(STOPS, *meeting, "--node-rank", rank) for rank in range(2)]
        for node in nodes:
            for _ in range(2):
                node.wait_for(r"^\[\d\] training")
        nodes[1].process.send_signal(signal.SIGTERM)
        for node in nodes:
            self.expect(node, 128 + signal.SIGTERM)
            self.expect_lines(node, r"^\[\d\] saved$", 2)
        self.expect_lines(nodes[0], r"^\[ddp-run\] node .* was stopped by SIGTERM$", 1)
        self.expect_lines(nodes[0], "GenerationOver", 0)

    def test_the_failure_of_a_rank_is_raised_in_the_others_which_are_started_again(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        launched = self.launch(FAILS, "--max-restarts", 1, words=[pipe])
        self.expect(launched, 0)
        self.expect_lines(launched, r"^\[0\] ddp_run.GenerationOver: rank 1 \(node .*\) exited with code 3$", 1)
        self.expect_lines(launched, "Traceback", 0)
        self.expect_lines(launched, r"^\[\d\] generation 2 False$", 2)
        self.expect_lines(launched, "saved", 0)

    def test_a_survivor_goes_on_in_its_process_until_it_is_asked_to_stop(self):
        pipe = self.folder / "pipe"
        os.mkfifo(pipe)
        launched = self.launch(LIVES, "--max-restarts", 1, words=[pipe])
        for _ in range(2):
            launched.wait_for(r"^\[\d\] training")
        launched.process.send_signal(signal.SIGTERM)
        self.expect(launched, 128 + signal.SIGTERM)
        self.expect_lines(launched, r"^\[\d\] saved True$", 2)
        found = launched.matches(r"^\[(\d)\] generation (\d) pid (\d+) step (\d+)$")
        starts = {match.group(1, 2): (match[3], int(match[4])) for match in found}
        self.assertEqual(starts["0", "1"][0], starts["0", "2"][0])
        self.assertNotEqual(starts["1", "1"][0], starts["1", "2"][0])
        self.assertGreaterEqual(starts["0", "2"][1], 3)
        self.expect_lines(launched, "Traceback", 0)

    def test_a_script_that_hangs_says_where(self):
        logs = self.folder / "logs"
        launched = self.launch(HANGS, "--hang-timeout", 3, "--log-dir", logs)
        self.expect(launched, 128 + signal.SIGABRT)
        # Both wait in the same place, so none of them is the cause. All are asked.
        self.assertTrue(launched.matches("the job hung, and no rank could be named"), launched.transcript())
        stacks = (logs / "attempt_0/0/hang.txt").read_text()
        self.assertRegex(stacks, r"thread MainThread\n(  .*\n)+  a_lock_that_nobody_releases at .*script.py:5: .*\n")

    def test_a_script_that_has_trained_is_not_watched(self):
        launched = self.launch(EVALUATES, "--hang-timeout", 1)
        self.expect(launched, 128 + signal.SIGABRT)
        self.assertTrue(launched.matches("rank 1 hung: .*phase training, step 3"), launched.transcript())
        self.expect_lines(launched, "rank 0 hung", 0)

    def test_a_script_that_has_trained_gets_signals_at_once(self):
        launched = self.launch(EVALUATES.replace("rank == 1", "False"), "--shutdown-timeout", 3600)
        for _ in range(2):
            launched.wait_for("evaluating")
        launched.process.send_signal(signal.SIGTERM)
        self.expect(launched, 128 + signal.SIGTERM)


class AsAModule(unittest.TestCase):
    def test_a_script_runs_under_the_python_that_was_asked(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder) / "train.py"
            script.write_text("import sys\nprint(sys.executable, *sys.argv[1:])\n")
            env = {**os.environ, "PYTHONPATH": PACKAGE_PATH, "PATH": str(pathlib.Path(DDP_RUN).parent)}
            env.pop("PYTHON_EXEC", None)
            command = [sys.executable, "-m", "ddp_run", "--nproc-per-node", "1", script, "--lr", "1"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S)
            self.assertEqual((done.stdout, done.returncode), (f"[0] {sys.executable} --lr 1\n", 0), done.stderr)


if __name__ == "__main__":
    unittest.main()
