"""Heartbeats for `ddp-run --hang-timeout`: call `Heartbeat().beat(step)` once a step. Copy it; it needs nothing but Python.

Under another launcher, or without one, it does nothing.
"""
import json
import os
import socket


class Heartbeat:
    def __init__(self):
        self.socket = None
        if address := os.environ.get("DDP_CONTROL"):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address.replace("@", "\0", 1))
            local_rank = int(os.environ.get("DDP_LOCAL_RANK") or os.environ["LOCAL_RANK"])
            generation = int(os.environ["DDP_GENERATION"])
            self.say(type="hello", protocol=1, local_rank=local_rank, generation=generation, pid=os.getpid())

    def beat(self, step, phase="training"):  # or starting, validating, saving, finishing
        self.say(type="heartbeat", step=step, phase=phase)

    def say(self, **message):
        try:
            self.socket and self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # the launcher is gone, and stops this process by other means
            self.socket = None
