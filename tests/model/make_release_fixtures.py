#!/usr/bin/env python3
"""Tiny checkpoints in the layout of the authors' trainer, one for each attention_type of their runs, with logits.

    make_release_fixtures.py write FOLDER     one folder per attention_type, with random weights
    make_release_fixtures.py check FOLDER...  computes the logits of such folders anew and compares

The forward pass is written down here once more, in double precision with numpy alone, from the formulas of the block;
`check` on folders that the authors' own code has written (tests/data/release/2mamba-*) shows that it is theirs.
"""

import json
import struct
import sys
from pathlib import Path

import numpy as np

LINEAR = "linear__output_norm"
SOFTPLUS = "A_mask_type_neg_softplus__in_conv_k_2"
ATTENTION_TYPES = [
    "softmax",
    "mamba",
    "linear",
    LINEAR,
    f"{LINEAR}__ReLU",
    *[f"{LINEAR}__in_conv_k_{k}" for k in (2, 3, 4)],
    *[f"{LINEAR}__in_conv_k_{k}__silu" for k in (2, 3, 4)],
    f"{LINEAR}__D_res",
    f"{LINEAR}__Z_out_gate",
    f"{LINEAR}__dt_on_values",
    f"{LINEAR}__A_mask_type_discretize",
    f"{LINEAR}__A_mask_type_neg_softplus",
    f"{LINEAR}__A_mask_type_discretize__in_conv_k_2",
    f"{LINEAR}__{SOFTPLUS}",
    f"{LINEAR}__{SOFTPLUS}__dt_on_values",
    f"{LINEAR}__{SOFTPLUS}__dt_on_values__silu",
    f"{LINEAR}__{SOFTPLUS}__dt_on_values__D_res",
    f"{LINEAR}__{SOFTPLUS}__dt_on_values__Z_out_gate",
    f"squared__output_norm__{SOFTPLUS}__dt_on_values",
    f"squared__sm_norm__{SOFTPLUS}__dt_on_values",
    f"squared__sm_norm__{SOFTPLUS}",
    f"linear__out_norm__{SOFTPLUS}",
    f"exp__sm_norm__{SOFTPLUS}__dt_on_values",
    f"exp__sm_norm__{SOFTPLUS}",
]

VOCABULARY, HIDDEN, INTERMEDIATE, HEADS, LAYERS, POSITIONS, TOKENS = 64, 32, 32, 2, 2, 24, 24
STATE, WINDOW = 128, 2  # of mamba


# --- safetensors -----------------------------------------------------------------------------------------------------

DTYPES = {"F32": np.float32, "F16": np.float16, "BOOL": np.bool_}


def write_safetensors(path, tensors):
    header, data = {"__metadata__": {"format": "pt"}}, b""
    names = {np.dtype(kind): name for name, kind in DTYPES.items()}
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):  # wide ones first
        raw = tensor.tobytes()
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def read_safetensors(path):
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


# --- the forward pass ------------------------------------------------------------------------------------------------


def softplus(x):
    return np.logaddexp(0, x)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def causal_conv(x, weight, bias=0.0):
    """x [time, channels], weight [channels, 1, window]; the last tap is the present."""
    window = weight.shape[2]
    padded = np.concatenate([np.zeros((window - 1, x.shape[1])), x])
    return sum(padded[i : i + len(x)] * weight[:, 0, i] for i in range(window)) + bias


def rotated(x):
    """Interleaved rotary positions: dimensions 2i and 2i + 1 turn together."""
    time, dim = x.shape
    angles = np.arange(time)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    even, odd = x[:, 0::2], x[:, 1::2]
    out = np.empty_like(x)
    out[:, 0::2] = even * np.cos(angles) - odd * np.sin(angles)
    out[:, 1::2] = odd * np.cos(angles) + even * np.sin(angles)
    return out


def head_output(q, k, v, log_decay, score, normalized):
    """One head, row by row."""
    out = np.zeros_like(v)
    for i in range(len(q)):
        s = k[: i + 1] @ q[i] / np.sqrt(q.shape[1])
        w = {"linear": s, "squared": s**2, "exp": np.exp(s)}[score]
        w = w * np.exp([log_decay[j + 1 : i + 1].sum() for j in range(i + 1)])
        if normalized:
            assert w.sum() > 0
            w = w / w.sum()
        out[i] = w @ v[: i + 1]
    return out


def attention(h, p, attention_type, heads):
    """p(name): a parameter of the layer's self_attn; None where there is none."""
    tokens = attention_type.split("__")
    q, k, v = np.split(h @ p("qkv_proj.weight").T, 3, axis=1)
    if p("conv1d.weight") is not None:
        qkv = causal_conv(np.concatenate([q, k, v], axis=1), p("conv1d.weight"), p("conv1d.bias"))
        q, k, v = np.split(qkv, 3, axis=1)
    if "ReLU" in tokens or attention_type == "linear":
        q, k = np.maximum(q, 0), np.maximum(k, 0)
    if "silu" in tokens:
        q, k = silu(q), silu(k)
    dim = q.shape[1] // heads
    dt, log_decay = None, np.zeros((len(h), heads))
    if p("dt_proj.weight") is not None:
        dt = softplus(h @ p("dt_proj.weight").T)
    if "A_mask_type_discretize" in tokens:
        log_decay = -np.exp(p("A_log")) * dt
    if "A_mask_type_neg_softplus" in tokens:
        log_decay = -softplus(h @ p("A_mask_proj.weight").T)
    score = "exp" if attention_type == "softmax" else tokens[0]
    normalized = attention_type in ("softmax", "linear") or "sm_norm" in tokens
    out = np.zeros_like(v)
    for head in range(heads):
        own = slice(head * dim, (head + 1) * dim)
        qh, kh, vh = q[:, own], k[:, own], v[:, own]
        if attention_type == "softmax":
            qh, kh = rotated(qh), rotated(kh)
        values = vh * dt[:, head : head + 1] if "dt_on_values" in tokens else vh
        out[:, own] = head_output(qh, kh, values, log_decay[:, head], score, normalized)
        if "D_res" in tokens:
            out[:, own] += vh * p("D")[head]
    if "Z_out_gate" in tokens:
        out = out * silu(h @ p("z_gate_proj.weight").T + p("z_gate_proj.bias"))
    if not normalized:
        out = rms_norm(out, p("out_norm.weight"), np.finfo(np.float32).eps)
    return out @ p("o_proj.weight").T


def mamba(h, p):
    """mamba_ssm's Mamba2 with one head of d_ssm dimensions, as a recurrence."""
    inner = len(p("mamba_layer.norm.weight"))
    branch = p("mamba_layer.out_proj.weight").shape[1] - inner
    state = (p("mamba_layer.conv1d.weight").shape[0] - inner) // 2
    sizes = [branch, branch, inner, inner + 2 * state]
    u, m, z, xbc, dt = np.split(h @ p("mamba_layer.in_proj.weight").T, np.cumsum(sizes), axis=1)
    x, b, c = np.split(silu(causal_conv(xbc, p("mamba_layer.conv1d.weight"))), [inner, inner + state], axis=1)
    dt = softplus(dt + p("mamba_layer.dt_bias"))
    a = -np.exp(p("mamba_layer.A_log"))
    memory, y = np.zeros((state, inner)), np.zeros_like(x)
    for t in range(len(h)):
        memory = np.exp(dt[t] * a) * memory + dt[t] * np.outer(b[t], x[t])
        y[t] = c[t] @ memory + p("mamba_layer.D") * x[t]
    y = rms_norm(y * silu(z), p("mamba_layer.norm.weight"), 1e-5)
    return np.concatenate([silu(u) * m, y], axis=1) @ p("mamba_layer.out_proj.weight").T


def logits(config, weights, ids):
    weights = {name: w.astype(np.float64) for name, w in weights.items()}
    eps = config["rms_norm_eps"]
    x = weights["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = rms_norm(x, weights[layer + "input_layernorm.weight"], eps)
        p = lambda name: weights.get(layer + "self_attn." + name)
        kind = config["attention_type"]
        x = x + (mamba(h, p) if kind == "mamba" else attention(h, p, kind, config["num_attention_heads"]))
        h = rms_norm(x, weights[layer + "post_attention_layernorm.weight"], eps)
        gate, up, down = (weights[layer + f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
    return rms_norm(x, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


# --- random folders --------------------------------------------------------------------------------------------------


def random_weights(attention_type, random):
    tokens = attention_type.split("__")
    dim = HIDDEN // HEADS
    linear = lambda rows, columns, gain=1.0: random.normal(size=(rows, columns)) * gain / np.sqrt(columns)
    scale = lambda size: 1 + 0.2 * random.normal(size=size)
    weights = {
        "model.embed_tokens.weight": random.normal(size=(VOCABULARY, HIDDEN)),
        "lm_head.weight": linear(VOCABULARY, HIDDEN, 2),
        "model.norm.weight": scale(HIDDEN),
    }
    buffers = {}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        weights[layer + "input_layernorm.weight"] = scale(HIDDEN)
        weights[layer + "post_attention_layernorm.weight"] = scale(HIDDEN)
        weights[layer + "mlp.gate_proj.weight"] = linear(INTERMEDIATE, HIDDEN)
        weights[layer + "mlp.up_proj.weight"] = linear(INTERMEDIATE, HIDDEN)
        weights[layer + "mlp.down_proj.weight"] = linear(HIDDEN, INTERMEDIATE)
        own = layer + "self_attn."
        if attention_type == "mamba":
            own += "mamba_layer."
            weights[own + "in_proj.weight"] = linear(2 * HIDDEN + 2 * STATE + 1, HIDDEN)
            weights[own + "conv1d.weight"] = random.uniform(-0.7, 0.7, (dim + 2 * STATE, 1, WINDOW))
            weights[own + "dt_bias"] = random.uniform(-4, 0, 1)
            weights[own + "A_log"] = np.log(random.uniform(1, 16, 1))
            weights[own + "D"] = scale(dim)
            weights[own + "norm.weight"] = scale(dim)
            weights[own + "out_proj.weight"] = linear(HIDDEN, HIDDEN)
            continue
        weights[own + "qkv_proj.weight"] = linear(3 * HIDDEN, HIDDEN, 1.5)
        weights[own + "o_proj.weight"] = linear(HIDDEN, HIDDEN)
        if attention_type == "softmax":
            buffers[own + "rotary_emb.freqs"] = 10000.0 ** (-np.arange(0, dim, 2) / dim)
            continue
        buffers[own + "attn_mask"] = ~np.tril(np.ones((1, 1, POSITIONS, POSITIONS), dtype=bool))
        for token in tokens:
            if token.startswith("in_conv_k_"):
                window = int(token[-1])
                weights[own + "conv1d.weight"] = random.uniform(-0.7, 0.7, (3 * HIDDEN, 1, window))
                weights[own + "conv1d.bias"] = random.uniform(-0.5, 0.5, 3 * HIDDEN)
        if "dt_on_values" in tokens or "A_mask_type_discretize" in tokens:
            weights[own + "dt_proj.weight"] = linear(HEADS, HIDDEN)
        if "A_mask_type_discretize" in tokens:
            weights[own + "A_log"] = np.log(random.uniform(0.2, 2, HEADS))
        if "A_mask_type_neg_softplus" in tokens:
            weights[own + "A_mask_proj.weight"] = linear(HEADS, HIDDEN)
        if "D_res" in tokens:
            weights[own + "D"] = scale((HEADS, dim))
        if "Z_out_gate" in tokens:
            weights[own + "z_gate_proj.weight"] = linear(HIDDEN, HIDDEN)
            weights[own + "z_gate_proj.bias"] = random.uniform(-0.5, 0.5, HIDDEN)
        if "output_norm" in tokens or "out_norm" in tokens:
            weights[own + "out_norm.weight"] = scale(HIDDEN)
    halves = {name: w.astype(np.float16) for name, w in weights.items()}  # small files; the logits are those of these
    floats = {name: b.astype(np.float32) if b.dtype != bool else b for name, b in buffers.items()}
    return halves | floats


def config_of(attention_type):
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_type": attention_type,
        "bos_token_id": 1,
        "dtype": "float32",
        "eos_token_id": 2,
        "head_dim": HIDDEN // HEADS,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": VOCABULARY,
    }


def write(folder):
    for seed, attention_type in enumerate(ATTENTION_TYPES):
        random = np.random.default_rng(seed)
        config, weights = config_of(attention_type), random_weights(attention_type, random)
        ids = [1] + random.integers(3, VOCABULARY, TOKENS - 1).tolist()
        out = logits(config, weights, ids)
        path = folder / attention_type
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (path / "ids.json").write_text(json.dumps({"sequences": [ids]}) + "\n")
        write_safetensors(path / "model.safetensors", weights)
        write_safetensors(path / "logits.safetensors", {"logits.0": out.astype(np.float32)})
        print(f"{attention_type}: logits of rms {np.sqrt((out**2).mean()):.2f}")


def check(folder):
    config = json.loads((folder / "config.json").read_text())
    weights = read_safetensors(folder / "model.safetensors")
    stored = read_safetensors(folder / "logits.safetensors")
    worst = 0.0
    for i, ids in enumerate(json.loads((folder / "ids.json").read_text())["sequences"]):
        worst = max(worst, np.abs(logits(config, weights, ids) - stored[f"logits.{i}"]).max())
    print(f"{folder.name}: largest difference {worst:.1e}")
    return worst <= 3e-5


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "write":
        write(Path(sys.argv[2]))
    elif len(sys.argv) > 2 and sys.argv[1] == "check":
        sys.exit(0 if all([check(Path(folder)) for folder in sys.argv[2:]]) else 1)
    else:
        sys.exit(__doc__)
