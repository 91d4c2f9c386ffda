"""Rank 1 stops in the middle of the first generation, as in a dead lock; rank 0 waits for it in an all-reduce."""
import faulthandler
import os
import threading

import ddp_run
import torch
import torch.distributed as dist

faulthandler.enable()
dist.init_process_group("gloo")
x = torch.ones(4)


def a_lock_that_nobody_releases():
    threading.Event().wait()


for step in range(8):
    if dist.get_rank() == 1 and step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        a_lock_that_nobody_releases()
    ddp_run.heartbeat(step)
    dist.all_reduce(x)
print(f"finished after {step + 1} steps in attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
dist.destroy_process_group()
