"""Unmodified PyTorch scripts under ddp-run. Started by `tests/torch/run.sh`."""
import json
import os
import pathlib
import random
import signal
import tempfile
import unittest

from launched import ROOT, Launched, reserved_port

SCRIPTS = ROOT / "tests/torch/scripts"
RESTARTS = int(os.environ.get("DDP_RESTARTS", "20"))


def worker(launched, rank):
    """The process id of a rank."""
    children = pathlib.Path(f"/proc/{launched.process.pid}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    mark = f"\0RANK={rank}\0".encode()
    return next(pid for pid in pids if mark in pathlib.Path(f"/proc/{pid}/environ").read_bytes())


class PyTorch(unittest.TestCase):
    def launch(self, *words, env=None):
        search_path = os.pathsep.join([str(ROOT / "python"), str(SCRIPTS)])
        launched = Launched(*words, env={"PYTHONPATH": search_path, **(env or {})})
        self.addCleanup(launched.kill)
        return launched

    def expect(self, launched, code=0):
        self.assertEqual(launched.finish(), code, launched.transcript())
        return launched

    def expect_line(self, launched, pattern):
        found = launched.matches(pattern)
        self.assertTrue(found, f"no `{pattern}` in\n{launched.transcript()}")
        return found


class Launching(PyTorch):
    def test_one_node(self):
        launched = self.expect(self.launch("--nproc-per-node", 2, SCRIPTS / "all_reduce.py"))
        sums = self.expect_line(launched, r"^\[[01]\] sum 3 world 2 places \[\(0, 0, 0\), \(1, 1, 0\)\]$")
        self.assertEqual(len(sums), 2)

    def test_a_module(self):
        launched = self.expect(self.launch("--nproc-per-node", 2, "-m", "all_reduce"))
        self.assertEqual(len(self.expect_line(launched, "sum 3 world 2")), 2)

    def test_an_interpreter_in_front(self):
        words = ["--nproc-per-node", 2, "--no-python", os.environ["PYTHON"], "-u", SCRIPTS / "all_reduce.py"]
        launched = self.expect(self.launch(*words))
        self.assertEqual(len(self.expect_line(launched, "sum 3 world 2")), 2)

    def test_two_nodes(self):
        holder, port = reserved_port()
        self.addCleanup(holder.close)
        common = ["--nnodes", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"]
        nodes = [
            self.launch(*common, "--node-rank", rank, "--nproc-per-node", workers, SCRIPTS / "all_reduce.py")
            for rank, workers in ((0, 2), (1, 1))
        ]
        places = r"sum 6 world 3 places \[\(0, 0, 0\), \(1, 1, 0\), \(2, 0, 1\)\]"
        for node, workers in zip(nodes, (2, 1)):
            self.assertEqual(len(self.expect_line(self.expect(node), places)), workers)

    def test_the_port_is_held_for_rank_0_and_nobody_else(self):
        launched = self.expect(self.launch("--nproc-per-node", 3, SCRIPTS / "master_port.py"))
        self.assertEqual(len(self.expect_line(launched, r"met 3 at the launcher's port")), 3)


class Failing(PyTorch):
    def test_restart_after_kill_9_works_at_the_first_try(self):
        """Of torchrun's restarts, 2 of 10 did."""
        seed = int(os.environ.get("DDP_SEED", "0")) or random.randrange(1, 2**32)
        dice = random.Random(seed)
        for turn in range(RESTARTS):
            rank, step = dice.randrange(2), dice.randrange(40)
            with self.subTest(seed=seed, turn=turn, rank=rank, step=step):
                launched = self.launch("--nproc-per-node", 2, "--max-restarts", 3, SCRIPTS / "steps.py")
                pids = dict(launched.wait_for(r"^\[(\d)\] attempt 0 pid (\d+)$").groups() for _ in range(2))
                launched.wait_for(rf"^\[0\] step {step}$")
                os.kill(int(pids[str(rank)]), signal.SIGKILL)
                self.expect(launched)
                self.expect_line(launched, rf"rank {rank} \(node .*\) died of SIGKILL; restarting (now|in .* s) \(1/3\)")
                self.assertEqual(len(self.expect_line(launched, "finished in attempt 1$")), 2)

    def test_what_record_wrote_is_in_the_report(self):
        with tempfile.TemporaryDirectory() as folder:
            outer = pathlib.Path(folder) / "outer.json"
            env = {"TORCHELASTIC_ERROR_FILE": str(outer)}
            launched = self.expect(self.launch("--nproc-per-node", 2, SCRIPTS / "recorded.py", env=env), code=1)
            self.expect_line(launched, "first failure: rank 1 ")
            self.expect_line(launched, "message: ValueError: shard 7 of the data is missing$")
            self.assertIn("shard 7 of the data is missing", json.dumps(json.loads(outer.read_text())))

    def test_a_script_that_hangs_is_found_by_its_heartbeats(self):
        words = ["--nproc-per-node", 2, "--max-restarts", 1, "--hang-timeout", 20, SCRIPTS / "hangs.py"]
        launched = self.expect(self.launch(*words))
        self.expect_line(launched, r"rank 1 hung: no heartbeat for .* s \(phase training, step 4\)")
        wanted = r"all_reduce of Float\[4\] \(#6 of group `default_pg:0`\), in which rank 0 waits"
        self.expect_line(launched, rf"rank 1 has not joined {wanted}; rank 1 is at .*hangs.py:\d+ in a_lock_that_nobody_")
        # Where it was, in its own words.
        self.expect_line(launched, r"^\[1\] .*a_lock_that_nobody_releases")
        self.assertEqual(len(self.expect_line(launched, "finished after 8 steps in attempt 1$")), 2)

    def test_a_slow_rank_in_lock_step_is_named_within_twenty_steps(self):
        launched = self.expect(self.launch("--nproc-per-node", 2, SCRIPTS / "straggler.py", "slow", 20))
        self.expect_line(launched, r"rank 1 \(node .*\) holds the other ranks up: they wait \d+ ms longer in each step")


class Package(PyTorch):
    """What `ddp_run` does with the collectives of PyTorch."""

    def launch_stoppable(self):
        launched = self.launch("--nproc-per-node", 3, SCRIPTS / "stoppable.py")
        for _ in range(3):
            launched.wait_for(r"^\[\d\] training$")
        return launched

    def test_all_ranks_save_at_the_same_step_when_they_are_asked_to_stop(self):
        launched = self.launch_stoppable()
        launched.process.send_signal(signal.SIGTERM)
        self.expect(launched, code=128 + signal.SIGTERM)
        steps = [match[1] for match in self.expect_line(launched, r"^\[\d\] saved at step (\d+)$")]
        self.assertEqual((len(steps), len(set(steps))), (3, 1), steps)

    def stop_one_launcher(self, asked, every):
        """Two nodes with two ranks each; SIGTERM for one launcher alone. Its exit code, the other's, and the steps saved."""
        holder, port = reserved_port()
        self.addCleanup(holder.close)
        common = ["--nnodes", 2, "--nproc-per-node", 2, "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "stop"]
        nodes = [self.launch(*common, "--node-rank", node, SCRIPTS / "stoppable.py", every) for node in range(2)]
        for node in nodes * 2:
            node.wait_for(r"^\[\d\] training$")
        nodes[asked].process.send_signal(signal.SIGTERM)
        codes = [node.finish() for node in nodes]
        transcript = "\n".join(node.transcript() for node in nodes)
        steps = [int(match[1]) for node in nodes for match in node.matches(r"^\[\d\] saved at step (\d+)$")]
        self.assertEqual((len(steps), len(set(steps))), (4, 1), transcript)
        self.assertEqual(codes[asked], 128 + signal.SIGTERM, transcript)
        return codes[1 - asked], steps[0], transcript

    def test_a_signal_to_one_launcher_of_two_stops_all_ranks_at_the_same_step(self):
        for asked in range(2):
            with self.subTest(asked=asked):
                code, _, transcript = self.stop_one_launcher(asked, every=1)
                self.assertEqual(code, 128 + signal.SIGTERM, transcript)

    def test_ranks_that_are_apart_stop_at_the_same_step_too(self):
        """With gradient accumulation there is a collective only now and then, and none at a boundary."""
        for asked in range(2):
            with self.subTest(asked=asked):
                code, _, transcript = self.stop_one_launcher(asked, every=4)
                self.assertEqual(code, 128 + signal.SIGTERM, transcript)

    def test_a_rank_that_loses_a_peer_names_it(self):
        launched = self.launch_stoppable()
        os.kill(worker(launched, 1), signal.SIGKILL)
        self.expect(launched, code=128 + signal.SIGKILL)
        named = self.expect_line(launched, r"ddp_run.GenerationOver: rank 1 \(node .*\) died of SIGKILL( \(here: .*\))?$")
        self.assertEqual(len(named), 2)
        self.assertEqual(launched.matches("Traceback"), [], launched.transcript())


class Example(PyTorch):
    def test_the_example_trains_and_goes_on_after_a_death(self):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = pathlib.Path(folder) / "checkpoint.pt"
            words = ["--nproc-per-node", 2, "--max-restarts", 3, ROOT / "examples/pytorch/train.py", checkpoint]
            launched = self.launch(*words)
            launched.wait_for("epoch 3 loss")
            os.kill(worker(launched, 1), signal.SIGKILL)
            self.expect(launched)
            epochs = self.expect_line(launched, r"^\[0\] epoch (\d+) loss ([0-9.]+)$")
            losses = {int(match[1]): float(match[2]) for match in epochs}
            self.assertEqual(sorted(losses), list(range(10)), launched.transcript())
            # From the checkpoint, not from the beginning.
            self.assertEqual(len(launched.matches("epoch 0 loss")), 1)
            self.assertLess(losses[9], losses[0] / 3)


if __name__ == "__main__":
    unittest.main()
