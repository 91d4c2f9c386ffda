"""Takes steps until it is asked to stop, with an all-reduce in every step, or in every so many as the first argument says.
Ranks are apart between these: rank 1 begins each time later than the others."""
import sys
import time

import ddp_run
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, x, step, every = dist.get_rank(), torch.ones(4), 0, int((sys.argv + ["1"])[1])
try:
    with ddp_run.stoppable(lambda: print(f"saved at step {step}", flush=True)) as boundary:
        while True:
            if every > 1 and rank == 1 and step % every == 0:
                time.sleep(0.1)
            if (step + 1) % every == 0:
                dist.all_reduce(x)
                x /= dist.get_world_size()
            step += 1
            boundary(step)
            if step == 2 * every + 1:
                print("training", flush=True)
            time.sleep(0.01)
finally:
    # Without this, a thread of PyTorch's may free a tensor while Python ends, and abort.
    dist.destroy_process_group()
