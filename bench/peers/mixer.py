#!/usr/bin/env python3
"""Mixers in PyTorch at the shapes of `furious bench mixer --device cuda`: its peers, on one GPU.

    bench/peers/mixer.py --lengths 2048,8192,65536

Softmax attention by the cuDNN and FlashAttention backends of scaled_dot_product_attention, and the parallel form of
2Mamba under torch.compile, which keeps all scores and so goes no further than --longest-2mamba. The batch is as large as
65,536 tokens allow. Prints milliseconds, the median of --repeats runs between events after a warm-up.
"""
import argparse
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def softmax(backend):
    def mix(q, k, v):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return mix


def squared(q, k, v, a):  # a: cumulative log-decay [batch, heads, length], f32
    length = q.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    decay = (a[..., :, None] - a[..., None, :]).masked_fill(future, float("-inf")).exp()
    s = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    w = s * s * decay.to(s.dtype)
    return (w @ v) / w.sum(-1, keepdim=True).clamp_min(1e-30)


def milliseconds(run, repeats):
    for _ in range(3):
        run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def measure(name, length, mix, inputs, repeats):
    gradient = torch.randn_like(inputs[2])

    def forward():
        with torch.no_grad():
            mix(*inputs)

    def both():
        for x in inputs:
            x.grad = None
        mix(*inputs).backward(gradient)

    try:
        print(f"| {name} | {length} | {milliseconds(forward, repeats):.2f} | {milliseconds(both, repeats):.2f} |",
              flush=True)
    except RuntimeError as error:  # a backend that does not take the shape, or no memory
        print(f"| {name} | {length} | – | {str(error).splitlines()[0]} |", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", default="2048,8192,65536")
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--longest-2mamba", type=int, default=2048, help="0: without it")
    args = parser.parse_args()
    torch.manual_seed(1)
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name()}, {args.tokens} tokens, {args.heads} heads of "
          f"{args.dim}, bf16")
    print("| mixer | length | forward ms | forward + backward ms |\n| --- | --- | --- | --- |")
    for length in map(int, args.lengths.split(",")):
        shape = (args.tokens // length, args.heads, length, args.dim)
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        measure("softmax, cuDNN", length, softmax(SDPBackend.CUDNN_ATTENTION), (q, k, v), args.repeats)
        measure("softmax, FlashAttention", length, softmax(SDPBackend.FLASH_ATTENTION), (q, k, v), args.repeats)
        if length <= args.longest_2mamba:
            a = (-0.001 * torch.rand(shape[:3], device="cuda")).cumsum(-1).requires_grad_()
            measure("2Mamba, torch.compile", length, torch.compile(squared), (q, k, v, a), args.repeats)


if __name__ == "__main__":
    main()
