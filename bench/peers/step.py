#!/usr/bin/env python3
"""A training step of the same model in PyTorch, the peer of `furious bench step`.

    bench/peers/step.py --preset 2mamba --hidden 256 --intermediate 512 --heads 4 --layers 4 --length 512 --batch 4

Prints tokens/s, the median over the steps, of forward, backward and AdamW in eager mode (--compile: torch.compile).
"""
import argparse
import statistics
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x):  # interleaved pairs, base 10000
    length, dim = x.shape[-2:]
    angle = torch.outer(torch.arange(length, device=x.device),
                        10000.0 ** (-torch.arange(0, dim, 2, device=x.device) / dim))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class Block(nn.Module):
    def __init__(self, preset, hidden, heads):
        super().__init__()
        self.preset, self.heads = preset, heads
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        if preset == "2mamba":
            self.conv = nn.Conv1d(3 * hidden, 3 * hidden, 2, groups=3 * hidden, padding=1)
            self.decay = nn.Linear(hidden, heads, bias=False)

    def forward(self, h):
        batch, length, hidden = h.shape
        x = self.qkv(h)
        if self.preset == "2mamba":
            x = self.conv(x.transpose(1, 2))[..., :length].transpose(1, 2)
        q, k, v = x.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.preset == "softmax":
            q, k = rotate(q), rotate(k)
            if hasattr(F, "scaled_dot_product_attention"):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                future = torch.ones(length, length, dtype=torch.bool, device=h.device).triu(1)
                s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
                o = s.masked_fill(future, float("-inf")).softmax(-1) @ v
        else:
            a = -F.softplus(self.decay(h)).transpose(1, 2).float().cumsum(-1)
            future = torch.ones(length, length, dtype=torch.bool, device=h.device).triu(1)
            mask = (a[..., :, None] - a[..., None, :]).masked_fill(future, float("-inf")).exp()
            s = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
            w = s * s * mask.to(s.dtype)
            o = (w @ v) / w.sum(-1, keepdim=True).clamp_min(1e-30)
        return self.out(o.transpose(1, 2).reshape(batch, length, hidden))


class Layer(nn.Module):
    def __init__(self, preset, hidden, intermediate, heads):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(hidden), RMSNorm(hidden)
        self.block = Block(preset, hidden, heads)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        x = x + self.block(self.norm1(x))
        m = self.norm2(x)
        return x + self.down(F.silu(self.gate(m)) * self.up(m))


class Model(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embedding = nn.Embedding(args.vocab, args.hidden)
        self.layers = nn.ModuleList(
            Layer(args.preset, args.hidden, args.intermediate, args.heads) for _ in range(args.layers))
        self.norm = RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, args.vocab, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=["2mamba", "softmax"], default="2mamba")
    for name, value in [("hidden", 256), ("intermediate", 512), ("heads", 4), ("layers", 4), ("vocab", 32000),
                        ("length", 512), ("batch", 4), ("steps", 5), ("threads", 0)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="autocast of matrix products")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    model = Model(args).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    loss_of = torch.compile(model) if args.compile else model
    tokens = torch.randint(args.vocab, (args.batch, args.length + 1), device=args.device)
    seconds = []
    for _ in range(args.steps + (3 if args.compile else 1)):
        start = time.perf_counter()
        with torch.autocast(args.device, dtype=torch.bfloat16, enabled=args.bf16):
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.device != "cpu":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    median = statistics.median(seconds[-args.steps:])
    print(f"PyTorch {torch.__version__}, {args.preset}: {args.batch * args.length / median:.0f} tokens/s, "
          f"median of {args.steps} steps of {median * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
