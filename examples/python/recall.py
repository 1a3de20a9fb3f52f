"""Associative recall, the task that separates token mixers: pairs of a key and a value, then keys whose value is wanted.

    python recall.py --mixers 2mamba,linear,softmax --steps 400
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import furious


def batch(rows, pairs, symbols, generator):
    """ids [rows, 4 · pairs]: k v k v …, then the keys in another order, each followed by its value; targets are the
    values of the second half."""
    keys = torch.stack([torch.randperm(symbols, generator=generator)[:pairs] for _ in range(rows)])
    values = torch.randint(symbols, 2 * symbols, (rows, pairs), generator=generator)
    order = torch.stack([torch.randperm(pairs, generator=generator) for _ in range(rows)])
    shown = torch.stack([keys, values], 2).flatten(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], 2).flatten(1)
    ids = torch.cat([shown, asked], 1)
    targets = torch.full_like(ids, -100)
    targets[:, 2 * pairs :: 2] = values.gather(1, order)
    return ids, targets


def train(mixer, options):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    model = nn.Sequential(nn.Embedding(2 * options.symbols, 64),
                          *(furious.nn.TwoMambaBlock(64, heads=2, arch=mixer) for _ in range(2)),
                          nn.LayerNorm(64), nn.Linear(64, 2 * options.symbols))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        ids, targets = batch(32, options.pairs, options.symbols, generator)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, options.steps // 5) == 0:
            right = (logits.argmax(2) == targets)[targets >= 0].float().mean()
            print(f"{mixer}: step {step}  loss {loss.item():.3f}  recalled {100 * right:.0f} %", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="2mamba,linear,softmax")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--symbols", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    for mixer in options.mixers.split(","):
        train(mixer, options)


if __name__ == "__main__":
    main()
