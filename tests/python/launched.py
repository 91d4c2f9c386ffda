"""A `ddp-run` that is watched line by line. Every wait ends at a deadline."""
import os
import pathlib
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The folder that has the package `ddp_run`; empty: the interpreter finds it.
PACKAGE_PATH = os.environ.get("PACKAGE_PATH", str(ROOT / "python"))
DDP_RUN = os.environ.get("DDP_RUN", str(ROOT / "target/debug/ddp-run"))
# For a machine that is busy with other things: `import torch` alone may take half a minute there.
PATIENCE_S = 240


class Launched:
    def __init__(self, *words, env=None):
        variables = {**os.environ, "PYTHON_EXEC": sys.executable, "PYTHONPATH": PACKAGE_PATH, **(env or {})}
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"):
            if name not in (env or {}):
                variables.pop(name, None)
        command = [DDP_RUN, *map(str, words)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(command, env=variables, text=True, errors="replace", **pipes)
        self.deadline = time.monotonic() + PATIENCE_S
        self.lines = []
        self._came = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self._came.put(line.rstrip("\n"))
        self._came.put(None)

    def _next(self):
        """The next line; none at the end of the output."""
        try:
            line = self._came.get(timeout=max(0.0, self.deadline - time.monotonic()))
        except queue.Empty:
            self.kill()
            raise AssertionError(f"still running after {PATIENCE_S} s\n{self.transcript()}") from None
        if line is not None:
            self.lines.append(line)
        return line

    def wait_for(self, pattern):
        """The match in the first line from now on that has one."""
        while (line := self._next()) is not None:
            if match := re.search(pattern, line):
                return match
        raise AssertionError(f"it ended without `{pattern}`\n{self.transcript()}")

    def finish(self):
        """The exit code, when the output is closed by all who held it."""
        while self._next() is not None:
            pass
        return self.process.wait(timeout=PATIENCE_S)

    def matches(self, pattern):
        return [match for line in self.lines if (match := re.search(pattern, line))]

    def kill(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._reader.join(timeout=PATIENCE_S)
        self.process.stdout.close()

    def transcript(self):
        return "\n".join(self.lines)


def reserved_port():
    """A socket that holds a free port (bound, not listening), and the port: a server with SO_REUSEADDR gets it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    return holder, holder.getsockname()[1]
