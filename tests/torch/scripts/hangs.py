"""Rank 1 stops in the middle of the first generation, as in a dead lock; rank 0 waits for it in an all-reduce."""
import faulthandler
import os
import pathlib
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "examples/pytorch"))

import torch
import torch.distributed as dist
from heartbeat import Heartbeat

faulthandler.enable()
heartbeat = Heartbeat()
dist.init_process_group("gloo")
x = torch.ones(4)


def a_lock_that_nobody_releases():
    threading.Event().wait()


for step in range(8):
    if dist.get_rank() == 1 and step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        a_lock_that_nobody_releases()
    heartbeat.beat(step)
    dist.all_reduce(x)
print(f"finished after {step + 1} steps in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
dist.destroy_process_group()
