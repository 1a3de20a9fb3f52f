"""A small GPT in plain PyTorch whose attention is furious.nn.Mixer, or PyTorch's own for comparison.

    python gpt.py --text book.txt --mixer 2mamba --steps 300
    python gpt.py --text book.txt --mixer sdpa --steps 300          the same model with softmax attention
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn

import furious


class Attention(nn.Module):
    """What furious.nn.Mixer replaces."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads, mixer):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = Attention(width, heads) if mixer == "sdpa" else furious.nn.Mixer(width, heads, mixer)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary, length, width, heads, layers, mixer):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, mixer) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True)
    parser.add_argument("--mixer", default="2mamba", help="sdpa, or a preset: " + ", ".join(furious.presets()))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and furious.cuda_devices() > 0 else "cpu"
    torch.manual_seed(1)
    with open(options.text, "rb") as file:
        data = torch.tensor(list(file.read()))  # bytes as tokens
    model = Gpt(256, options.length, options.width, 4, 3, options.mixer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = time.time()
    for step in range(1, options.steps + 1):
        at = torch.randint(0, len(data) - options.length - 1, (options.batch,))
        rows = torch.stack([data[i : i + options.length + 1] for i in at]).to(device)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 1 or step == options.steps:
            rate = step * options.batch * options.length / (time.time() - start)
            print(f"step {step}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
