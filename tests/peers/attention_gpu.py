#!/usr/bin/env python3
"""PyTorch's causal attention in bf16 on one GPU, by back end, at shapes that gpu_kernels measures: time and TFLOP/s of both
passes, counted as there, and whether backward gives the same bits each time, as ours does. A back end may have no
deterministic backward; if it has none at all, the exit status is 1.

    attention_gpu.py
"""
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# Samples, heads of queries and of keys, positions, channels of a head.
SHAPES = {"GPT-2 124M": (16, 12, 12, 1024, 64), "Llama 3.2 1B": (4, 32, 8, 2048, 64), "Llama 3 8B": (2, 32, 8, 4096, 128)}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
WARM_UP, TIMES = 3, 20


def milliseconds(act):
    for _ in range(WARM_UP):
        act()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(TIMES):
        act()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / TIMES


def measure(shape):
    """Times of forward and backward, and whether the latter repeats its bits."""
    samples, heads, kv_heads, positions, channels = shape
    q, k, v = (torch.randn(samples, positions, number, channels, device="cuda", dtype=torch.bfloat16)
               .transpose(1, 2).requires_grad_() for number in (heads, kv_heads, kv_heads))
    forward = lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
    out = forward()
    dout = torch.randn_like(out)
    backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    first = backward()
    repeats = all(torch.equal(x, y) for _ in range(5) for x, y in zip(first, backward()))
    return milliseconds(forward), milliseconds(backward), repeats


def main():
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}\n"
          f"{'attention':14} {'back end':21} {'ms':>7} {'TFLOP/s':>8} {'backward':>9} {'TFLOP/s':>8}  same bits")
    refused = False
    for name, shape in SHAPES.items():
        samples, heads, _, positions, channels = shape
        # Half of the pairs of positions count: two products, five backward.
        flop = 2 * samples * heads * positions * positions * channels
        for backend, allowed in BACKENDS.items():
            for deterministic in (False, True):
                torch.use_deterministic_algorithms(deterministic, warn_only=True)
                torch.backends.cudnn.deterministic = deterministic
                label = f"{name:14} {backend + (', deterministic' if deterministic else ''):21}"
                try:
                    with sdpa_kernel(allowed):
                        forward, backward, repeats = measure(shape)
                except RuntimeError as e:
                    print(label, str(e).split("\n")[0], flush=True)
                    refused |= not deterministic
                    continue
                print(f"{label} {forward:7.3f} {flop / forward / 1e9:8.0f} {backward:9.3f} {2.5 * flop / backward / 1e9:8.0f}"
                      f"  {'yes' if repeats else 'no'}", flush=True)
    sys.exit(refused)


if __name__ == "__main__":
    main()
