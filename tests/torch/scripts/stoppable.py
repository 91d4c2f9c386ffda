"""Takes steps until it is asked to stop, with an all-reduce in every step, or in every so many as the first argument says.
Ranks may be apart between these: rank 1 passes its first boundary when rank 0 has passed its third."""
import sys
import time

import ddp_run
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
x, step, every = torch.ones(4), 0, int((sys.argv + ["1"])[1])
try:
    with ddp_run.stoppable(lambda: print(f"saved at step {step}", flush=True)) as boundary:
        while True:
            if every > 3 and (rank, step) == (1, 0):
                store.wait(["three"])
            if (step + 1) % every == 0:
                dist.all_reduce(x)
                x /= dist.get_world_size()
            step += 1
            boundary(step)
            if (rank, step) == (0, 3):
                store.set("three", "")
            if step == 2 * every + 1:
                print("training", flush=True)
            time.sleep(0.01)
finally:
    # Without this, a thread of PyTorch's may free a tensor while Python ends, and abort.
    dist.destroy_process_group()
