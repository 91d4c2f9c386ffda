"""DeepSpeed's engine, ZeRO stage 1, with its own checkpoints."""
import argparse
import pathlib
import signal
import time

import deepspeed
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path, required=True)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
deepspeed.init_distributed("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    config={
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
    },
)


def any_rank_is_asked():
    flag = torch.tensor(float(len(asked)))
    dist.all_reduce(flag)
    return flag.item() > 0


# The file `latest` names the last complete checkpoint.
if (args.out / "latest").exists():
    engine.load_checkpoint(str(args.out))
first = engine.global_steps
print(f"rank {rank} starts at step {first}", flush=True)

for step in range(first + 1, args.steps + 1):
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    loss = (engine(x) - x.flip(1)).square().mean()
    engine.backward(loss)
    engine.step()
    time.sleep(0.05)
    if rank == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if any_rank_is_asked():
        engine.save_checkpoint(str(args.out))
        print(f"rank {rank} stops, saved step {step}", flush=True)
        break
    if step % 20 == 0:
        engine.save_checkpoint(str(args.out))
        if rank == 0:
            print(f"saved step {step}", flush=True)
else:
    print(f"rank {rank} finished at step {args.steps}", flush=True)
dist.destroy_process_group()
