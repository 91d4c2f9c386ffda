"""The first attempt leaves a key in the store and fails; the second must not find it."""
import os
import sys

import torch.distributed as dist

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
left = store.check(["left behind"])
dist.barrier()
store.set("left behind", str(attempt))
print(f"attempt {attempt} port {os.environ['MASTER_PORT']} found {'something' if left else 'nothing'}", flush=True)
dist.barrier()
if attempt == 0 and dist.get_rank() == 0:
    sys.exit(7)
dist.barrier()
dist.destroy_process_group()
