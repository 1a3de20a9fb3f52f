"""The mixer in double precision, straight from its formula: the oracle of the tests. States are made from the tokens of
a prefix, so that the oracle needs no feature map: it computes prefix and rest as one sequence."""

import math

import torch


def score_of(x, score, degree):
    if score == "linear":
        return x
    if score == "squared":
        return x * x
    if score == "exponential":
        return x.exp()
    if score == "power":
        return x**degree
    return sum(x**n / math.factorial(n) for n in range(degree + 1))


def one_sequence(q, k, v, log_decay, score, norm, scale, degree):
    """q, k [T, H, K], v [T, H, V], log_decay [T, H] or None; all double, heads repeated already."""
    length = q.shape[0]
    s = torch.einsum("ihd,jhd->hij", q, k) * scale
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    w = score_of(s, score, degree)
    if log_decay is not None:
        total = log_decay.cumsum(0).t()
        between = total[:, :, None] - total[:, None, :]
        w = w * torch.where(causal, between, torch.zeros_like(between)).exp()
    w = torch.where(causal, w, torch.zeros_like(w))
    out = torch.einsum("hij,jhd->ihd", w, v)
    return out / w.sum(-1).t()[..., None] if norm == "sum" else out


def mixer(q, k, v, log_decay=None, score="squared", norm="sum", scale=None, degree=0, cu_seqlens=None):
    """q, k [B, T, Hq, K], v [B, T, Hv, V], log_decay [B, T, H]: o [B, T, H, V] in double precision."""
    heads = max(q.shape[2], k.shape[2], v.shape[2])
    q, k, v = (x.double().repeat_interleave(heads // x.shape[2], 2) for x in (q, k, v))
    log_decay = None if log_decay is None else log_decay.double()
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    rows = []
    for b in range(q.shape[0]):
        starts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens
        rows.append(torch.cat([
            one_sequence(q[b, i:j], k[b, i:j], v[b, i:j], None if log_decay is None else log_decay[b, i:j], score, norm,
                         scale, degree) for i, j in zip(starts, starts[1:])]))
    return torch.stack(rows)
