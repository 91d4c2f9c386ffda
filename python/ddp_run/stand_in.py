"""The worker by which a torchrun takes part in a job of `ddp-run` (`handler`)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DDP_GENERATION")


def main(path: str) -> None:
    """Says where this node stands, and that the generation is over; ends when the handler says so, or is gone."""
    with socket.socket(socket.AF_UNIX) as connection:

        def over(_number: int, _frame: Any) -> None:
            with contextlib.suppress(OSError):  # the handler is gone, which ends this process too
                connection.sendall(b"over\n")

        connection.connect(path)
        connection.sendall(json.dumps({name: os.environ[name] for name in PLACE}).encode() + b"\n")
        for number in STOP_SIGNALS:
            signal.signal(number, over)
        answer = connection.recv(1)
    sys.exit(answer[0] if answer else 1)
