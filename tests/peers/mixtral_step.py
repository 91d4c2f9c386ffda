"""Step time of a Mixtral of `transformers` on CPU: single process, or DDP over gloo. Every rank has all experts: transformers
has no expert parallelism for training on CPUs. `--experts` is how transformers computes them (`experts_implementation`)."""
import argparse, resource, statistics, time
import torch, torch.distributed as dist
from transformers import MixtralConfig, MixtralForCausalLM

ap = argparse.ArgumentParser()
ap.add_argument("--mode", choices=["single", "ddp"], default="single")
ap.add_argument("--experts", choices=["eager", "grouped_mm", "batched_mm"], default="grouped_mm")
ap.add_argument("--layers", type=int, default=2)
ap.add_argument("--count", type=int, default=8)
ap.add_argument("--steps", type=int, default=10)
a = ap.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)
HEADS, WIDTH, INNER, VOCAB, SEQ, BATCH = 6, 384, 1024, 256, 256, 8
rank, world = 0, 1
if a.mode != "single":
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
config = MixtralConfig(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=a.layers, num_attention_heads=HEADS,
    num_key_value_heads=HEADS, num_local_experts=a.count, num_experts_per_tok=2, max_position_embeddings=SEQ, use_cache=False,
    output_router_logits=True, router_aux_loss_coef=0.02, tie_word_embeddings=False,
)
model = MixtralForCausalLM._from_config(config, attn_implementation="sdpa", experts_implementation=a.experts)
parameters = sum(p.numel() for p in model.parameters())
if a.mode == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
data = torch.randint(0, VOCAB, (16, BATCH, SEQ), generator=torch.Generator().manual_seed(1 + rank))
times = []
for i in range(a.steps + 3):
    if world > 1:
        dist.barrier()
    x = data[i % 16]
    start = time.perf_counter()
    loss = model(x, labels=x).loss
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    times.append((time.perf_counter() - start) * 1e3)
times = times[3:]
if rank == 0:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{a.mode} {a.experts} world {world}, {parameters:,} parameters: step {statistics.median(times):.1f} ms "
          f"(min {min(times):.1f}, max {max(times):.1f}), peak RSS {peak:.0f} MiB, loss {loss.item():.4f}")
if world > 1:
    dist.destroy_process_group()
