"""Ranks in lock-step. The last one takes a fifth longer, where an argument says so."""
import sys
import time

import ddp_run
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
is_slow = sys.argv[1] == "slow" and dist.get_rank() == dist.get_world_size() - 1
for step in range(1, int(sys.argv[2]) + 1):
    end = time.perf_counter() + (0.6 if is_slow else 0.5)
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)
    began = time.perf_counter()
    dist.all_reduce(x)
    ddp_run.heartbeat(step, waited_s=time.perf_counter() - began)
print(f"finished {step} steps", flush=True)
dist.destroy_process_group()
