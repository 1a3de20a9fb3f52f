"""Associative recall, the task that separates token mixers: pairs of a key and a value; when a key comes
again, its value is wanted.

    python recall.py --mixers 2mamba,softmax,linear --steps 300
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import furious


def batch(rows, slots, pairs, symbols, generator):
    """ids [rows, 2 · slots]: each row has a table of 2 to `pairs` keys with values, and shows pairs of it at random.
    Where a key comes again, its value is the target."""
    keys = torch.rand(rows, symbols, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(symbols, 2 * symbols, (rows, pairs), generator=generator)
    sizes = torch.randint(2, pairs + 1, (rows, 1), generator=generator)
    drawn = (torch.rand(rows, slots, generator=generator) * sizes).long()
    ids = torch.stack([keys.gather(1, drawn), values.gather(1, drawn)], 2).flatten(1)
    seen = (drawn[:, :, None] == drawn[:, None, :]).tril(-1).any(2)
    targets = torch.full_like(ids, -100)
    targets[:, 0::2] = torch.where(seen, values.gather(1, drawn), torch.tensor(-100))
    return ids, targets


def train(mixer, options):
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    config = furious.config_of_preset(mixer, "tiny", 2 * options.symbols, hidden_size=64, heads=1,
                                      intermediate_size=128, num_hidden_layers=2)
    model = furious.nn.LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / options.steps))
    for step in range(1, options.steps + 1):
        ids, targets = batch(options.batch, 64, options.pairs, options.symbols, generator)
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        if step % max(1, options.steps // 5) == 0:
            right = (logits.argmax(2) == targets)[targets >= 0].float().mean()
            print(f"{mixer}: step {step}  loss {loss.item():.3f}  recalled {100 * right:.0f} %", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="2mamba,softmax,linear")
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--symbols", type=int, default=32)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    for mixer in options.mixers.split(","):
        train(mixer, options)


if __name__ == "__main__":
    main()
