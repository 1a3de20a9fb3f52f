"""The operator beside a PyTorch user's alternatives, in one run on a GPU.

    python python/bench/gpu.py                                all parts
    python python/bench/gpu.py mixer overhead model           some of them
    python python/bench/gpu.py curve --data shards/           loss curves of torch and of `furious train`

mixer     forward and backward of our operator, torch.compile of the naive form, and SDPA (softmax attention)
overhead  what a call costs beside the work: the host's time of a call, and GPU time against a bare call of the library
model     training steps of a Llama-shaped model with furious.nn.Mixer against the same with SDPA
curve     furious.nn.LanguageModel with torch's AdamW beside furious.Trainer: same first weights, same batches
"""

import argparse
import math
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from torch import nn

import furious

DEVICE = "cuda"


def gpu_ms(call, repeats=20):
    """Median of single calls by events, after a warm-up."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def naive(q, k, v, log_decay):
    """2Mamba as a user would write it: [B, T, H, K] in the dtype of the inputs, the decay in float32."""
    total = log_decay.cumsum(1).transpose(1, 2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k).float() / math.sqrt(q.shape[-1])
    causal = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, float("-inf")).exp()
    weights = scores.square() * decay
    weights = (weights / weights.sum(-1, keepdim=True)).to(v.dtype)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def make_inputs(batch, length, heads, dim, dtype=torch.bfloat16):
    torch.manual_seed(1)
    q, k, v = (torch.randn(batch, length, heads, dim, device=DEVICE, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v, (-F.softplus(torch.randn(batch, length, heads, device=DEVICE) - 3)).requires_grad_()


def timed_passes(call, inputs):
    leaves = [x for x in inputs if x is not None]
    with torch.no_grad():
        forward = gpu_ms(call)
    out = call()
    gradient = torch.randn_like(out)
    both = gpu_ms(lambda: torch.autograd.grad(call(), leaves, gradient, allow_unused=True))
    return forward, both


def bench_mixer():
    print(f"mixer: {torch.cuda.get_device_name()}, torch {torch.__version__}, bf16, ms (forward, forward + backward)")
    compiled = torch.compile(naive)
    for batch, length, heads, dim in [(8, 2048, 16, 64), (4, 4096, 16, 64), (2, 8192, 16, 64), (1, 32768, 16, 64),
                                      (4, 4096, 8, 128)]:
        inputs = make_inputs(batch, length, heads, dim)
        q, k, v, a = inputs
        rows = {"furious 2mamba": lambda: furious.mixer(q, k, v, a)[0],
                "furious softmax": lambda: furious.mixer(q, k, v, None, score="exponential")[0],
                "SDPA softmax": lambda: F.scaled_dot_product_attention(
                    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True).transpose(1, 2)}
        if batch * heads * length * length * 4 < 40e9:
            rows["torch.compile 2mamba"] = lambda: compiled(q, k, v, a)
            with torch.no_grad():
                exact, got = naive(q.float(), k.float(), v.float(), a), rows["furious 2mamba"]().float()
                error = ((got - exact).abs().amax(-1) / exact.abs().amax(-1).clamp_min(1e-3)).max().item()
                del exact
        else:
            error = float("nan")
        print(f"  batch {batch} length {length} heads {heads} dim {dim}: largest error of a row {error:.1e}")
        for name, call in rows.items():
            try:
                forward, both = timed_passes(call, inputs)
                print(f"    {name:22s} {forward:8.3f} {both:8.3f}", flush=True)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                print(f"    {name:22s} out of memory", flush=True)


def bench_overhead():
    """Host time until a call returns, with a GPU that is not waited for: tiny tensors, 2,000 calls."""
    from furious import _furious
    from furious._mixer import call_of
    from furious._torch import stream_of, to_dlpack

    q, k, v, a = (x.detach() for x in make_inputs(1, 16, 1, 64))
    call = call_of("squared", "sum", True, None, 0, False, "auto", 0, False, "auto")
    out, normalizer = torch.empty_like(v), torch.empty(1, 1, 16, device=DEVICE)

    def bare():
        # The library with views of the tensors; what it adds is allocation, checks in Python and autograd.
        _furious.mixer_forward(call, to_dlpack(q), to_dlpack(k), to_dlpack(v), to_dlpack(a), None, [], to_dlpack(out),
                               to_dlpack(normalizer), None, None, stream_of(q))

    def host_us(function, count=2000):
        for _ in range(50):
            function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            function()
            if i % 100 == 99:
                torch.cuda.synchronize()
        return (time.perf_counter() - start) / count * 1e6

    leaves = [x.clone().requires_grad_() for x in (q, k, v, a)]
    with torch.no_grad():
        ours = host_us(lambda: furious.mixer(q, k, v, a))
        print(f"overhead: library {host_us(bare):.1f} us a call; furious.mixer {ours:.1f} us", end="")
    print(f"; with autograd {host_us(lambda: furious.mixer(*leaves)):.1f} us; SDPA "
          f"{host_us(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)):.1f} us", flush=True)


class SdpaAttention(nn.Module):
    """Llama's attention with rotary positions, whose angles are computed once."""

    def __init__(self, width, heads, longest=8192):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        dim = width // heads
        angle = torch.arange(longest)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer("cos", angle.cos()[None, :, None])
        self.register_buffer("sin", angle.sin()[None, :, None])

    def turn(self, x):
        cos, sin = (y[:, : x.shape[1]].to(x.dtype) for y in (self.cos, self.sin))
        first, second = x.chunk(2, 3)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], 3)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (self.heads, -1)) for y in self.qkv(x).chunk(3, 2))
        q, k, v = (y.transpose(1, 2) for y in (self.turn(q), self.turn(k), v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class LlamaShaped(nn.Module):
    def __init__(self, mixer, width=1024, heads=16, layers=12, inner=2048, vocabulary=32000):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mixers = nn.ModuleList(
            SdpaAttention(width, heads) if mixer == "sdpa" else furious.nn.Mixer(width, heads, mixer)
            for _ in range(layers))
        self.mlps = nn.ModuleList(furious.nn._Mlp(width, inner) for _ in range(layers))
        self.norms = nn.ModuleList(furious.nn.RMSNorm(width, 1e-5) for _ in range(2 * layers + 1))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps)):
            x = x + mixer(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def bench_model():
    for batch, length in [(8, 2048), (2, 8192)]:
        for mixer in ("2mamba", "sdpa"):
            for compiled in (False, True):
                torch.manual_seed(1)
                torch._dynamo.reset()
                model = LlamaShaped(mixer).to(DEVICE)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
                run = torch.compile(model) if compiled else model
                ids = torch.randint(0, 32000, (batch, length + 1), device=DEVICE)

                def step():
                    with torch.autocast(DEVICE, torch.bfloat16):
                        logits = run(ids[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    optimizer.step()

                ms = gpu_ms(step, 10)
                print(f"model: {mixer:7s} batch {batch} length {length} {'compiled' if compiled else 'eager   '}"
                      f" {ms:8.1f} ms a step, {batch * length / ms * 1000:10,.0f} tokens/s", flush=True)
                del model, optimizer, run
                torch.cuda.empty_cache()


def bench_curve(options):
    """Both train from the same weights on the same batches; the losses must agree but for rounding."""
    settings = dict(arch=options.arch, size=options.size, data=options.data, batch=options.batch, length=options.length,
                    steps=options.steps, lr=options.lr, device=DEVICE)
    trainer = furious.Trainer(**settings)
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(folder)
        model = furious.nn.LanguageModel.load(folder).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
                                  fused=True)
    run = torch.compile(model) if options.compile else model
    ours, theirs, seconds = [], [], [0.0, 0.0]
    for step in range(1, options.steps + 1):
        batch = trainer.data_batch(step)
        start = time.perf_counter()
        done = trainer.step(**batch)
        seconds[0] += time.perf_counter() - start
        ours.append(done.loss)
        ids = torch.from_numpy(batch["ids"]).long().to(DEVICE)
        targets = batch["targets"]
        targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -1)], 1) if targets is None else (
            torch.from_numpy(targets).long().to(DEVICE))
        torch.cuda.synchronize()
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = done.lr
        with torch.autocast(DEVICE, torch.bfloat16):
            logits = run(ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
        seconds[1] += time.perf_counter() - start
        if step % max(1, options.steps // 20) == 0:
            print(f"curve: step {step:5d}  furious {ours[-1]:.4f}  torch {theirs[-1]:.4f}", flush=True)
    last = min(50, options.steps)
    tokens = options.batch * options.length * options.steps
    mean = lambda losses: statistics.mean(losses[-last:])
    print(f"curve: mean of the last {last}: furious {mean(ours):.4f}, torch {mean(theirs):.4f}; with the first steps "
          f"{tokens / seconds[0]:,.0f} and {tokens / seconds[1]:,.0f} tokens/s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["mixer", "overhead", "model"])
    parser.add_argument("--data", default="synthetic:recall", help="of the part curve: as `furious train` has it")
    parser.add_argument("--arch", default="2mamba")
    parser.add_argument("--size", default="mini")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available() or furious.cuda_devices() == 0:
        raise SystemExit("bench: no GPU that torch and furious can use")
    for part in options.parts:
        {"mixer": bench_mixer, "overhead": bench_overhead, "model": bench_model,
         "curve": lambda: bench_curve(options)}[part]()


if __name__ == "__main__":
    main()
