"""Modules of torch built on furious.mixer, with the presets of the paper and the names of furious' checkpoints.

    mixer = furious.nn.Mixer(512, heads=8, arch="2mamba")     instead of attention: [B, T, 512] to [B, T, 512]
    block = furious.nn.TwoMambaBlock(512, heads=8)            a decoder layer: norms, mixer, gated MLP, residuals
    model = furious.nn.LanguageModel.load("runs/stories")     a whole model

For decoding, ``state = module.new_state(batch)``, then ``module(x, state)`` for a prompt and ``module.step(x, state)``
for one token. A state is a MixerState, or a list of them for a LanguageModel; both calls bring it up to date.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _safetensors
from ._furious import Error
from ._mixer import mixer, mixer_step, starts_of, state_shape
from ._presets import check_modules, config_of_preset, normal_config

__all__ = ["LanguageModel", "Mixer", "MixerState", "TwoMambaBlock"]


class MixerState:
    """What a Mixer remembers of the tokens that it has read."""

    def __init__(self, conv: Any, memory: Tensor | None):
        self.tokens = 0
        self.conv = conv  #: [B, window - 1, channels]: the last inputs of the convolution; None: there is none
        self.memory = memory  #: [B, H, D, V + 1] float32; None: keys and values are kept
        self.k: Any = None  #: [B, T, Hq, K] of a score without state
        self.v: Any = None
        self.log_decay: Any = None  #: [B, T, H], summed up

    def clone(self) -> MixerState:
        copy = MixerState(*(None if x is None else x.clone() for x in (self.conv, self.memory)))
        copy.tokens, copy.k, copy.v, copy.log_decay = self.tokens, self.k, self.v, self.log_decay
        return copy


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _rms_norm(x, self.weight, self.eps)


class _Bias(nn.Module):
    """A linear layer whose bias is added later, in float32."""

    def __init__(self, inputs: int, outputs: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        nn.init.normal_(self.weight, 0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight).float()
        return y if self.bias is None else y + self.bias.float()


class _Conv(nn.Module):
    """The causal convolution of every channel over the last tokens."""

    def __init__(self, channels: int, window: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, window))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        nn.init.uniform_(self.weight, -1 / math.sqrt(window), 1 / math.sqrt(window))

    def forward(self, x: Tensor, before: Tensor, positions: Tensor | None) -> Tensor:
        """x [B, T, C]; before [B, window - 1, C]; positions [T] in packed sequences."""
        window, length = self.weight.shape[2], x.shape[1]
        padded = torch.cat([before, x], 1)
        y: Any = None if self.bias is None else self.bias.to(x.dtype)
        for back in range(window):
            at = window - 1 - back
            tap = padded[:, at : at + length] * self.weight[:, 0, at].to(x.dtype)
            if positions is not None and back > 0:
                tap = tap * (positions >= back).to(x.dtype)[None, :, None]
            y = tap if y is None else y + tap
        return y


def _linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, 0, 0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def _rope(x: Tensor, positions: Tensor, base: float, interleaved: bool) -> Tensor:
    """x [B, T, H, K], positions [T]; angles in double precision, so that they hold at any position."""
    dim = x.shape[-1]
    speed = base ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = positions.double()[:, None] * speed
    cos, sin = angle.cos().float()[None, :, None], angle.sin().float()[None, :, None]
    wide = x.float()
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    else:
        first, second = wide[..., : dim // 2], wide[..., dim // 2 :]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)


_VALUES = {"silu": F.silu, "softplus": F.softplus, "softplus2": lambda x: x * F.softplus(x)}

_SCORES = {
    "linear": lambda x, degree: x, "squared": lambda x, degree: x * x, "power": lambda x, degree: x**degree,
    "series": lambda x, degree: sum(x**n / math.factorial(n) for n in range(degree + 1)),
}


class _OfConfig(nn.Module):
    """A module that is also made from a model's configuration, with every key (``furious.normal_config``)."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        check_modules(config)
        module = cls.__new__(cls)
        nn.Module.__init__(module)
        module._make(config)
        return module

    def _make(self, config: dict[str, Any]) -> None:
        raise NotImplementedError


class Mixer(_OfConfig):
    """The token-mixing block of the paper, a drop-in for attention.

    Args:
        hidden: channels of input and output.
        heads: of q, k and v; ``hidden // heads`` dimensions each.
        arch: a preset: "2mamba", "mamba2", "softmax", … (``furious.presets()``).
        switches: keys of config.json to change: ``conv_window=3``, ``norm="none"``, ``k_heads=2``, …

    Shapes: x ``[B, T, hidden]``, out ``[B, T, hidden]``.
    """

    def __init__(self, hidden: int, heads: int, arch: str = "2mamba", **switches: Any):
        super().__init__()
        self._make(config_of_preset(arch, "tiny", 256, hidden_size=hidden, heads=heads, **switches))

    def _make(self, config: dict[str, Any]) -> None:
        self.config = c = config
        hidden, self.head_dim, self.qk_dim = c["hidden_size"], c["head_dim"], c["qk_dim"]
        self.heads = heads = max(c["q_heads"], c["k_heads"], c["v_heads"])
        self.widths = [c["q_heads"] * self.qk_dim, c["k_heads"] * self.qk_dim, c["v_heads"] * self.head_dim]
        width, decay, values = heads * self.head_dim, c["decay"], c["discretize"]
        has_dt = values in ("dt", "sigmoid") or decay in ("original", "softplus_dt")
        self.qkv_proj = _linear(hidden, sum(self.widths))
        self.conv1d = _Conv(sum(self.widths), c["conv_window"], c["conv_bias"]) if c["conv_window"] > 0 else None
        # Modules and parameters that the switches leave out are None.
        self.dt_proj: Any = _Bias(hidden, heads, c["dt_bias"]) if has_dt else None
        self.A_mask_proj: Any = _Bias(hidden, heads, c["decay_bias"]) if decay not in ("none", "original") else None
        if self.dt_proj is not None and c["dt_bias"]:
            steps = torch.empty(heads).uniform_(math.log(0.001), math.log(0.1)).exp()
            bias: Any = self.dt_proj.bias
            with torch.no_grad():
                bias.copy_(steps + torch.log(-torch.expm1(-steps)))
        self.A_log: Any = nn.Parameter(torch.empty(heads).uniform_(1, 16).log()) if decay == "original" else None
        self.D = nn.Parameter(torch.ones(heads, self.head_dim)) if c["d_residual"] else None
        self.q_norm = RMSNorm(self.qk_dim, c["rms_norm_eps"]) if c["qk_norm"] else None
        self.k_norm: Any = RMSNorm(self.qk_dim, c["rms_norm_eps"]) if c["qk_norm"] else None
        self.z_gate_proj = _linear(hidden, width, c["z_gate_bias"]) if c["z_gate"] else None
        self.out_norm = RMSNorm(width, c["out_norm_eps"]) if c["norm"] == "none" else None
        branch = c["branch"]
        self.branch_gate_proj: Any = _linear(hidden, branch) if branch > 0 else None
        self.branch_proj = _linear(hidden, branch) if branch > 0 else None
        self.o_proj = _linear(branch + width, hidden)
        self.options = dict(score=c["score"], norm=c["norm"], scale=c["scale"] or None, degree=c["score_degree"],
                            signed_decay=decay in ("softplus2", "silu"))

    def new_state(self, batch: int = 1) -> MixerState:
        """Of sequences that have read nothing."""
        weight = self.qkv_proj.weight
        conv = memory = None
        if self.conv1d is not None:
            conv = weight.new_zeros(batch, self.config["conv_window"] - 1, sum(self.widths))
        rows, columns = state_shape(self.qk_dim, self.head_dim, self.options["score"], self.options["norm"],
                                    degree=self.options["degree"], signed_decay=self.options["signed_decay"])
        if rows > 0:
            memory = torch.zeros(batch, self.heads, rows, columns, device=weight.device)
        return MixerState(conv, memory)

    def forward(self, x: Tensor, state: MixerState | None = None,
                cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        """x ``[B, T, hidden]``. ``state``: goes on after what it has read. ``cu_seqlens``: packed sequences, B is 1."""
        if state is not None and cu_seqlens is not None:
            raise Error("Mixer: a state and packed sequences in one call; give one of them")
        positions = None if cu_seqlens is None else _packed_positions(cu_seqlens, x)
        q, k, v, dt = self._queries_keys_values(x, state, positions)
        log_decay = self._log_decay(x, dt)
        scaled = self._scaled_values(v, dt)
        if state is None:
            o, _ = mixer(q, k, scaled, log_decay, cu_seqlens=cu_seqlens, **self.options)
        elif state.memory is not None:
            o, state.memory = mixer(q, k, scaled, log_decay, initial_state=state.memory, output_final_state=True,
                                    **self.options)
        else:
            o = self._attend(q, k, scaled, log_decay, state)
        if state is not None:
            state.tokens += x.shape[1]
        return self._out(x, o, v)

    @torch.no_grad()
    def step(self, x: Tensor, state: MixerState) -> Tensor:
        """One token of every sequence: x ``[B, hidden]``, out ``[B, hidden]``. Without gradients."""
        x = x[:, None]
        q, k, v, dt = self._queries_keys_values(x, state, None)
        log_decay, scaled = self._log_decay(x, dt), self._scaled_values(v, dt)
        if state.memory is None:
            o = self._attend(q, k, scaled, log_decay, state)
        else:
            o = mixer_step(q[:, 0], k[:, 0], scaled[:, 0], None if log_decay is None else log_decay[:, 0], state.memory,
                           **self.options)[:, None]
        state.tokens += 1
        return self._out(x, o, v)[:, 0]

    def _queries_keys_values(self, x: Tensor, state: MixerState | None,
                             positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        c = self.config
        qkv = self.qkv_proj(x)
        if self.conv1d is not None:
            window = c["conv_window"]
            if state is None:
                before = qkv.new_zeros(qkv.shape[0], window - 1, qkv.shape[2])
            else:
                before = state.conv.to(qkv.dtype)
                state.conv = torch.cat([before, qkv], 1)[:, qkv.shape[1] :]
            qkv = self.conv1d(qkv, before, positions)
            qkv = F.silu(qkv) if c["conv_silu"] else qkv
        q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in
                   zip(qkv.split(self.widths, 2), (self.qk_dim, self.qk_dim, self.head_dim)))
        if c["qk_activation"] != "none":
            act = {"relu": F.relu, "silu": F.silu}[c["qk_activation"]]
            q, k = act(q), act(k)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if c["rope"]:
            start = 0 if state is None else state.tokens
            if positions is None:
                positions = torch.arange(start, start + x.shape[1], device=x.device)
            q, k = (_rope(y, positions, c["rope_theta"], c["rope_pairing"] == "interleaved") for y in (q, k))
        dt = None
        if self.dt_proj is not None:
            raw = self.dt_proj(x)
            dt = torch.sigmoid(raw) if c["discretize"] == "sigmoid" else F.softplus(raw)
            dt = dt.clamp_max(c["dt_limit"]) if c["dt_limit"] > 0 else dt
        return q, k, v, dt

    def _log_decay(self, x: Tensor, dt: Tensor | None) -> Tensor | None:
        """[B, T, H] float32, or None."""
        kind, factor = self.config["decay"], 2.0 if self.config["square_mask"] else 1.0
        if kind == "none":
            return None
        if kind == "original":
            return -factor * self.A_log.float().exp() * dt
        raw = self.A_mask_proj(x)
        if kind == "softplus":
            return -factor * F.softplus(raw)
        if kind == "softplus_dt":
            return -factor * F.softplus(raw) * dt
        if kind == "softplus2":
            return -factor * raw * F.softplus(raw)
        return -factor * F.silu(raw) if kind == "silu" else factor * F.logsigmoid(raw)

    def _scaled_values(self, v: Tensor, dt: Any) -> Tensor:
        kind = self.config["discretize"]
        if kind in ("dt", "sigmoid"):
            return (v * dt[..., None]).to(v.dtype)
        return v if kind == "none" else _VALUES[kind](v)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: MixerState) -> Tensor:
        """Without a state of constant size: all keys and values are kept."""
        first = state.tokens
        if first > 0:
            k, v = torch.cat([state.k, k], 1), torch.cat([state.v, v], 1)
        state.k, state.v = k, v
        total = None
        if log_decay is not None:
            total = log_decay.cumsum(1)
            if first > 0:
                total = torch.cat([state.log_decay, state.log_decay[:, -1:] + total], 1)
            state.log_decay = total
        wide = [y.float().repeat_interleave(self.heads // y.shape[2], 2).transpose(1, 2) for y in (q, k, v)]
        scores = wide[0] @ wide[1].transpose(2, 3) * (self.options["scale"] or 1 / math.sqrt(self.qk_dim))
        between: Any = 0.0
        if total is not None:
            total = total.transpose(1, 2)
            between = total[:, :, first:, None] - total[:, :, None, :]
        here = torch.arange(first, first + q.shape[1], device=q.device)
        later = torch.arange(k.shape[1], device=q.device)[None, :] > here[:, None]
        if self.options["score"] == "exponential":
            exponents = (scores + between).masked_fill(later, float("-inf"))
            weights = exponents.softmax(-1) if self.options["norm"] == "sum" else exponents.exp()
        else:
            weights = _SCORES[self.options["score"]](scores, self.options["degree"])
            weights = (weights * torch.as_tensor(between).exp()).masked_fill(later, 0.0)
            weights = weights / weights.sum(-1, keepdim=True) if self.options["norm"] == "sum" else weights
        return (weights @ wide[2]).transpose(1, 2).to(v.dtype)

    def _out(self, x: Tensor, o: Tensor, v: Tensor) -> Tensor:
        if self.D is not None:
            o = o + self.D.to(o.dtype) * v
        o = o.flatten(2)
        if self.z_gate_proj is not None:
            o = o * F.silu(self.z_gate_proj(x))
        if self.out_norm is not None:
            o = self.out_norm(o)
        if self.branch_proj is not None:
            o = torch.cat([F.silu(self.branch_gate_proj(x)) * self.branch_proj(x), o], 2)
        return self.o_proj(o)


def _packed_positions(cu_seqlens: Any, x: Tensor) -> Tensor:
    """Of every token in its own sequence: [T]."""
    starts = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.tensor(starts_of(cu_seqlens))
    starts = starts.to(x.device)
    here = torch.arange(x.shape[1], device=x.device)
    return here - starts[torch.searchsorted(starts, here, right=True) - 1]


class _Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, inner), _linear(hidden, inner)
        self.down_proj = _linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class TwoMambaBlock(_OfConfig):
    """A decoder layer: x + Mixer(RMSNorm(x)), then x + MLP(RMSNorm(x)). Shapes and arguments as Mixer.

    ``intermediate``: of the MLP; 0: twice ``hidden``.
    """

    def __init__(self, hidden: int, heads: int, arch: str = "2mamba", intermediate: int = 0, **switches: Any):
        super().__init__()
        self._make(config_of_preset(arch, "tiny", 256, hidden_size=hidden, heads=heads,
                                    intermediate_size=intermediate or 2 * hidden, **switches))

    def _make(self, config: dict[str, Any]) -> None:
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Mixer.from_config(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = _Mlp(config["hidden_size"], config["intermediate_size"])

    def new_state(self, batch: int = 1) -> MixerState:
        return self.self_attn.new_state(batch)

    def forward(self, x: Tensor, state: MixerState | None = None,
                cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), state, cu_seqlens)
        return x + self.mlp(self.post_attention_layernorm(x))

    @torch.no_grad()
    def step(self, x: Tensor, state: MixerState) -> Tensor:
        x = x + self.self_attn.step(self.input_layernorm(x), state)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Trunk(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        check_modules(config)
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        nn.init.normal_(self.embed_tokens.weight, 0, 0.02)
        self.layers = nn.ModuleList(TwoMambaBlock.from_config(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class LanguageModel(nn.Module):
    """A model of furious as a module: the same parameters under the same names, the same numbers.

    Args:
        config: keys of config.json, for example of ``furious.config_of_preset("2mamba", "tiny", vocabulary)``.

    Shapes: ids ``[B, T]`` to logits ``[B, T, vocabulary]``.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = normal_config(config)
        self.model = _Trunk(self.config)
        self.lm_head = nn.Linear(self.config["hidden_size"], self.config["vocab_size"], bias=False)
        nn.init.normal_(self.lm_head.weight, 0, 0.02)
        if self.config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    def new_state(self, batch: int = 1) -> list[MixerState]:
        return [layer.new_state(batch) for layer in self.model.layers]

    def forward(self, ids: Tensor, state: list[MixerState] | None = None,
                cu_seqlens: Tensor | Sequence[int] | None = None) -> Tensor:
        x = self.model.embed_tokens(ids)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, None if state is None else state[i], cu_seqlens)
        return self.lm_head(self.model.norm(x))

    @torch.no_grad()
    def step(self, ids: Tensor, state: list[MixerState]) -> Tensor:
        """One token of every sequence: ids ``[B]`` to logits ``[B, vocabulary]``."""
        x = self.model.embed_tokens(ids)
        for layer, own in zip(self.model.layers, state):
            x = layer.step(x, own)
        return self.lm_head(self.model.norm(x))

    @staticmethod
    def load(path: str | os.PathLike[str]) -> LanguageModel:
        """Of a checkpoint of furious, or the newest of a run, in float32."""
        folder = checkpoint_of(path)
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as stream:
            config = json.load(stream)
        if config.get("model_type") != "furious":
            raise Error(f"{folder}: a model of type {config.get('model_type')!r}; load it with furious.Model, which "
                        "reads other formats")
        module = LanguageModel(config)
        weights = {name: torch.from_numpy(np.array(array)) for name, array in _safetensors.read_folder(folder).items()}
        if module.config["tie_word_embeddings"]:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        module.load_state_dict(weights)
        return module

    def save(self, folder: str | os.PathLike[str]) -> None:
        """A checkpoint that furious and Hugging Face read: config.json and model.safetensors, in float32."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as stream:
            json.dump(self.config, stream, indent=2)
        weights = {name: x.detach().float().cpu().numpy() for name, x in self.state_dict().items()
                   if not (self.config["tie_word_embeddings"] and name == "lm_head.weight")}
        _safetensors.write(os.path.join(folder, "model.safetensors"), weights)


def checkpoint_of(path: str | os.PathLike[str]) -> str:
    """The folder of a checkpoint: the path itself, or the newest checkpoint of a run."""
    latest = os.path.join(os.fspath(path), "latest")
    folder = latest if os.path.isdir(latest) else os.fspath(path)
    if not os.path.exists(os.path.join(folder, "config.json")):
        raise Error(f"{os.fspath(path)}: there is no config.json; give a checkpoint of furious or a run")
    return folder
