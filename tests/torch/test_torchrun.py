"""What starts torchrun's Python starts `ddp-run` with `ddp_run.torchrun`; and torchrun meets at our rendezvous."""
import dataclasses
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

from launched import DDP_RUN, PATIENCE_S, ROOT, reserved_port

SCRIPTS = pathlib.Path(__file__).parent / "scripts"
PYTHON = os.environ["PYTHON"]
# As the `.pth` of the wheel does.
REPLACED = "import ddp_run.torchrun, sys; from torch.distributed.run import main; main(sys.argv[1:])"

NOTEBOOK = """
import os
import accelerate, ddp_run.torchrun

def cell():
    def train(start):
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        total = accelerator.reduce(torch.tensor(float(start))).item()
        print("rank", accelerator.process_index, "sum", total, "generation", os.environ["DDP_GENERATION"], flush=True)
    accelerate.notebook_launcher(train, args=(3,), num_processes=2, use_port="0")

cell()
"""


class Installed(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.env = {name: value for name, value in os.environ.items() if not name.startswith(("DDP_", "PET_"))}
        # As an installed wheel: the package, its entry point, and the programs.
        info = self.folder / "ddp_run-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ddp-run\nVersion: 0\n")
        project = (ROOT / "pyproject.toml").read_text()
        group, entry = re.search(r'entry-points\."(.+)"\]\n(ddp = ".+")', project).groups()
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry}\n".replace('"', ""))
        self.env["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(ROOT / "python")])
        self.env["PATH"] = os.pathsep.join([os.path.dirname(DDP_RUN), self.env["PATH"]])

    def start(self, *words):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        process = subprocess.Popen([*map(str, words)], env=self.env, cwd=self.folder, text=True, **pipes)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def script(self, text):
        file = self.folder / "script.py"
        file.write_text(text)
        return file

class Replaced(Installed):
    def run_replaced(self, *words):
        process = self.start(PYTHON, "-c", REPLACED, *words)
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def test_ddp_run_is_underneath_and_restarts(self):
        script = self.script(
            "import os, signal\n"
            "if os.environ['RANK'] == '1' and os.environ['DDP_GENERATION'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
            "print('rank', os.environ['RANK'], 'generation', os.environ['DDP_GENERATION'], flush=True)\n"
            "if os.environ['DDP_GENERATION'] == '1': signal.pause()\n"
        )
        code, output = self.run_replaced("--nproc-per-node", 2, "--max-restarts", 1, script)
        self.assertEqual(code, 0, output)
        for rank in (0, 1):
            self.assertIn(f"rank {rank} generation 2", output)

    def test_a_failure_is_pytorchs_exception(self):
        script = self.script("import os, sys, signal\nsys.exit(7) if os.environ['RANK'] == '1' else signal.pause()\n")
        code, output = self.run_replaced("--nproc-per-node", 2, script)
        self.assertEqual(code, 1, output)
        self.assertIn("ChildFailedError", output)
        self.assertRegex(output, r"rank +: 1 \(local_rank: 1\)\n +exitcode +: 7 \(pid: \d+\)")

    def test_what_cannot_be_carried_over_is_refused(self):
        code, output = self.run_replaced("--rdzv-backend", "etcd", "--rdzv-endpoint", "a:1", "x.py")
        self.assertNotEqual(code, 0)
        self.assertIn("`rdzv_backend` `etcd` has no counterpart in ddp-run", output)

    def test_the_configuration_has_pytorchs_fields(self):
        from torch.distributed.launcher.api import LaunchConfig

        sys.path.insert(0, str(ROOT / "python"))
        self.addCleanup(sys.path.remove, str(ROOT / "python"))
        import ddp_run

        names = [{field.name for field in dataclasses.fields(config)} for config in (LaunchConfig, ddp_run.LaunchConfig)]
        self.assertEqual(*names)

    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "without accelerate")
    def test_accelerate(self):
        self.env["DDP_REPLACE_TORCHRUN"] = "1"
        start = "import ddp_run.torchrun, sys; from accelerate.commands.accelerate_cli import main; main()"
        script = self.script(
            "import os, torch\nfrom accelerate import Accelerator\na = Accelerator(cpu=True)\n"
            "total = a.reduce(torch.tensor(float(a.process_index + 1))).item()\n"
            "print('rank', a.process_index, 'sum', total, 'generation', os.environ['DDP_GENERATION'], flush=True)\n"
        )
        words = ["launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 0, script]
        for name, command in {"launch": ["-c", start, *words], "notebook": ["-c", NOTEBOOK]}.items():
            with self.subTest(name):
                process = self.start(PYTHON, *command)
                output, _ = process.communicate(timeout=PATIENCE_S)
                self.assertEqual(process.returncode, 0, output)
                total = 3.0 if name == "launch" else 6.0
                for rank in (0, 1):
                    self.assertIn(f"rank {rank} sum {total} generation 1", output)


class Rendezvous(Installed):
    """`torchrun --rdzv-backend ddp` on three nodes, against a daemon."""

    def lines_with(self, pattern, count):
        """Waits until so many lines of the nodes' files match."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = [line for file in self.folder.glob("place-*") for line in re.findall(pattern, file.read_text())]
            if len(found) >= count:
                return found
            ended = [node.communicate()[0] for node in self.nodes if node.poll() not in (None, -9)]
            if ended or time.monotonic() > deadline:
                self.fail(f"{len(found)} of {count} lines with `{pattern}`\n{ended}")
            time.sleep(0.05)

    def test_three_launchers_of_which_one_is_killed(self):
        holder, port = reserved_port()
        self.addCleanup(holder.close)
        daemon = self.start(os.path.join(os.path.dirname(DDP_RUN), "ddp-rendezvous"), "serve", "--insecure", "--listen", f"127.0.0.1:{port}")
        daemon.stdout.readline()
        conf = "insecure=1,is_host=0,last_call_timeout=60"
        words = ["--nnodes", "2:3", "--rdzv-backend", "ddp", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "three"]
        # A worker that loses a peer may fail before its torchrun hears of the other's end, which then counts a restart.
        words += ["--rdzv-conf", conf, "--max-restarts", 4, SCRIPTS / "place.py", self.folder]
        self.nodes = [self.start(PYTHON, "-m", "torch.distributed.run", *words) for _ in range(3)]
        self.assertEqual(sorted(self.lines_with(r"rank \d of 3", 3)), [f"rank {rank} of 3" for rank in range(3)])
        self.nodes[1].kill()
        self.assertEqual(sorted(self.lines_with(r"rank \d of 2", 2)), ["rank 0 of 2", "rank 1 of 2"])
        # A worker fails: its torchrun restarts it, and the others follow.
        (self.folder / "fail").touch()
        self.lines_with(r"rank \d of 2", 4)
        (self.folder / "stop").touch()
        for node in (self.nodes[0], self.nodes[2]):
            output, _ = node.communicate(timeout=PATIENCE_S)
            self.assertEqual(node.returncode, 0, output)


if __name__ == "__main__":
    unittest.main()
