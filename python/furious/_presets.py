"""Architectures by name and configurations of models, as dictionaries with the keys of config.json."""

from __future__ import annotations

import json
from typing import Any

from . import _furious

# Keys that config.json leaves out where they have these values (docs/checkpoints.md).
DEFAULTS: dict[str, Any] = {
    "score_degree": 0, "decay_bias": False, "square_mask": False, "conv_bias": True, "qk_norm": False, "dt_limit": 0.0,
    "z_gate_bias": True, "out_norm_eps": 1.1920929e-7, "scale": 0.0, "branch": 0,
}


def presets() -> dict[str, str]:
    """The architectures of the paper: names and descriptions."""
    return dict(_furious.preset_list())


def _complete(text: str) -> dict[str, Any]:
    config = json.loads(text)
    for key, value in DEFAULTS.items():
        config.setdefault(key, value)
    config.setdefault("qk_dim", config["head_dim"])
    if isinstance(config["discretize"], bool):
        config["discretize"] = "dt" if config["discretize"] else "none"
    return config


def config_of_preset(arch: str = "2mamba", size: str = "tiny", vocabulary: int = 256, **changes: Any) -> dict[str, Any]:
    """The configuration of a model: every key of config.json.

    ``size`` is tiny, mini, small or medium. ``changes`` are keys of config.json to set, for example ``hidden_size=64``;
    with a new ``hidden_size`` or ``heads`` the dimensions of the heads follow.
    """
    config = _complete(_furious.preset_config(arch, size, vocabulary))
    heads = changes.pop("heads", None)
    if heads is not None or "hidden_size" in changes:
        hidden = changes.get("hidden_size", config["hidden_size"])
        count = config["hidden_size"] // config["head_dim"] if heads is None else heads
        if count < 1 or hidden % count != 0:
            raise _furious.Error(f"{hidden} channels in {count} heads; use a number of heads that divides them")
        dim = hidden // count
        if config["branch"] > 0:  # one head with a state of its own size, and a branch with the rest of the channels
            config.update(head_dim=dim, branch=hidden - dim)
        else:
            config.update(q_heads=count, k_heads=count, v_heads=count, head_dim=dim, qk_dim=dim)
    unknown = [key for key in changes if key not in config]
    if unknown:
        raise _furious.Error(f"unknown key {unknown[0]!r} of a configuration; docs/checkpoints.md lists them")
    config.update(changes)
    heads_now = max(config["q_heads"], config["k_heads"], config["v_heads"])
    config.update(num_attention_heads=heads_now, num_key_value_heads=config["k_heads"])
    return normal_config(config)


def normal_config(config: dict[str, Any] | str) -> dict[str, Any]:
    """A configuration that furious reads (of its own, of a Llama, of the authors' release), with every key of furious.

    What cannot work is an Error that says why.
    """
    text = config if isinstance(config, str) else json.dumps(config)
    return _complete(_furious.normal_config(text))


def check_modules(config: dict[str, Any]) -> None:
    """An Error where the modules of furious.nn do not compute what a configuration says."""
    other = sorted(set(config) - set(config_of_preset("2mamba", "tiny", 1)))
    if other:
        raise _furious.Error(f"furious.nn does not compute {other[0]!r} of this model; use furious.Model, or write a "
                             "directory for transformers with `furious export --to hf`")
