"""Scripts whose ranks outlive the death of others. Started by `tests/torch/run.sh`."""
import os
import pathlib
import signal
import tempfile
import unittest

import torch
from launched import ROOT, reserved_port
from test_torch import SCRIPTS, PyTorch

EXAMPLES = ROOT / "examples/pytorch-live"
CHECKPOINTS = {"ddp.py": "checkpoint.pt", "fsdp.py": ""}


class Live(PyTorch):
    def train(self, script, ranks, deaths="", flags=(), step_s=0):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        words = ["--nproc-per-node", ranks, "--max-restarts", 9, *flags, SCRIPTS / "dies.py", deaths, EXAMPLES / script]
        env = {"OMP_NUM_THREADS": "1", "STEP_S": str(step_s)}
        launched = self.launch(*words, pathlib.Path(folder.name, CHECKPOINTS[script]), env=env)
        launched.folder = pathlib.Path(folder.name)
        return launched

    def weights(self, launched):
        """By rank, after the run has ended well."""
        self.expect(launched)
        self.assertEqual(launched.matches("still refers"), [], launched.transcript())
        return dict(match.groups() for match in self.expect_line(launched, r"^\[(\d)\] weights (.*)$"))

    def starts(self, launched):
        """Of each generation: the processes of its ranks, and the step from which it trains."""
        generations = [{}]
        for match in self.expect_line(launched, r"^\[(\d)\] pid (\d+) trains from step (\d+)$"):
            rank, pid, step = map(int, match.groups())
            if rank in generations[-1]:
                generations.append({})
            generations[-1][rank] = pid, step
        return generations

    def expect_survivors(self, script, ranks, deaths):
        """Ranks die one after the other; the others keep their processes, and no step is lost or made twice."""
        undisturbed = self.weights(self.train(script, ranks))
        plan = [(*map(int, death.split(":")[:3]), death.split(":")[3]) for death in deaths.split(",")]
        launched = self.train(script, ranks, deaths)
        self.assertEqual(self.weights(launched), undisturbed, launched.transcript())
        generations = self.starts(launched)
        self.assertEqual(len(generations), 1 + len(plan), launched.transcript())
        for before, after, (_, victim, step, place) in zip(generations, generations[1:], plan):
            new = {rank for rank in range(ranks) if before[rank][0] != after[rank][0]}
            self.assertEqual(new, {victim}, launched.transcript())
            # Others may have made the update that the victim was about to make.
            possible = {"gradients": {step - 1}, "updated": {step}}.get(place, {step - 1, step})
            (reached,) = {reached for _, reached in after.values()}
            self.assertIn(reached, possible, launched.transcript())

    def test_survivors_of_ddp_keep_their_processes_and_all_bits(self):
        self.expect_survivors("ddp.py", 3, "1:1:30:gradients,2:2:60:all,3:0:70:update,4:1:80:updated")

    def test_survivors_of_fsdp_with_replicas_keep_their_processes_and_all_bits(self):
        self.expect_survivors("fsdp.py", 4, "1:1:30:gradients,2:2:60:all,3:0:70:update,4:3:80:updated")

    def test_the_last_step_is_saved_though_a_rank_dies_before_its_save(self):
        for script, ranks, last in (("ddp.py", 2, 400), ("fsdp.py", 4, 200)):
            with self.subTest(script):
                launched = self.train(script, ranks, f"1:0:{last}:updated")
                self.weights(launched)
                self.assertEqual({step for _, step in self.starts(launched)[1].values()}, {last}, launched.transcript())
                if script == "ddp.py":
                    self.assertEqual(torch.load(launched.folder / "checkpoint.pt")["finished"], last)
                else:
                    saved = {file.name for file in launched.folder.glob(f"shard_*_step_{last}.pt")}
                    self.assertEqual(len(saved), 2, launched.transcript())

    def test_two_ranks_that_die_at_once_are_both_replaced(self):
        undisturbed = self.weights(self.train("ddp.py", 3))
        launched = self.train("ddp.py", 3, "1:1:30:gradients,1:0:30:gradients")
        self.assertEqual(self.weights(launched), undisturbed, launched.transcript())

    def test_a_shard_that_died_with_all_its_replicas_is_read_from_the_checkpoint(self):
        undisturbed = self.weights(self.train("fsdp.py", 4))
        launched = self.train("fsdp.py", 4, "1:1:130:gradients,1:3:130:gradients")
        self.assertEqual(self.weights(launched), undisturbed, launched.transcript())
        self.expect_line(launched, r"StateLost: none of ranks \[1, 3\] has the state of step 129")
        steps = [{step for _, step in ranks.values()} for ranks in self.starts(launched)]
        self.assertEqual(steps, [{0}, {100}], launched.transcript())

    def test_a_kill_from_outside_at_any_moment(self):
        launched = self.train("ddp.py", 2, step_s=0.02)
        pids = dict(launched.wait_for(r"^\[(\d)\] pid (\d+) trains from step 0$").groups() for _ in range(2))
        launched.wait_for("step 100 loss")
        os.kill(int(pids["1"]), signal.SIGKILL)
        self.weights(launched)
        first, second = self.starts(launched)
        self.assertEqual((first[0][0], first[1][0] == second[1][0]), (second[0][0], False), launched.transcript())
        self.assertGreaterEqual(second[0][1], 100)

    def test_a_node_that_joins_leaves_the_others_their_processes(self):
        holder, port = reserved_port()
        self.addCleanup(holder.close)
        flags = ["--nnodes", "1:2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "grows", "--insecure"]
        flags += ["--rdzv-conf", "last_call_timeout=0.5"]
        start = r"pid (\d+) trains from step (\d+)$"
        first = self.train("ddp.py", 2, flags=flags, step_s=0.5)
        pids = {first.wait_for(start)[1] for _ in range(2)}
        second = self.train("ddp.py", 1, flags=flags, step_s=0.5)
        kept = [first.wait_for(start).groups() for _ in range(2)]
        self.assertEqual({pid for pid, _ in kept}, pids, first.transcript())
        steps = {step for _, step in kept} | {second.wait_for(start)[2]}
        self.assertEqual((len(steps), "0" in steps), (1, False), first.transcript() + second.transcript())


if __name__ == "__main__":
    unittest.main()
