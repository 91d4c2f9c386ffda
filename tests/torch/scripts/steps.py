"""Takes steps with one all-reduce each. Says which, so that the test can kill a rank in any of them; a rank that was not
killed ends as its peer's loss makes it end. The first generation never ends by itself."""
import os
import sys

import torch
import torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {attempt} pid {os.getpid()}", flush=True)
dist.init_process_group("gloo")
x = torch.ones(1024)
step = 0
while attempt == 0 or step < 20:
    dist.all_reduce(x)
    x /= dist.get_world_size()
    if dist.get_rank() == 0 and step < 100:
        print(f"step {step}", flush=True)
    step += 1
if x.ne(1).any():
    sys.exit("the sum is wrong")
print(f"finished in attempt {attempt}", flush=True)
dist.destroy_process_group()
