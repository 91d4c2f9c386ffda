"""Takes steps with one all-reduce each until it is asked to stop. Ranks learn of that at different steps."""
import ddp_run
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x, step = torch.ones(4), 0
with ddp_run.stoppable(lambda: print(f"saved at step {step}", flush=True)) as boundary:
    while True:
        dist.all_reduce(x)
        x /= dist.get_world_size()
        step += 1
        boundary(step)
        if step == 3:
            print("training", flush=True)
