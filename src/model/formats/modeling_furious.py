"""A language model of furious in plain PyTorch, for transformers with ``trust_remote_code=True``.

    model = AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

A layer is x += W_out block(norm(x)), x += MLP(norm(x)). The block, with the switches of config.json:

    [q, k, v] = conv(W_qkv h); q and k with an activation, an RMSNorm of each head or rotary positions
    dt = softplus(W_dt h + bias), within its limits;  a: the log-decay of each head, A its sum over the tokens
    o_i = sum_j f(scale q_i k_j) exp(A_i - A_j) v'_j  [/ the sum of the weights]  + D v_i
    out = W_out [silu(W_u h) * (W_m h), RMSNorm(o * silu(W_z h))]

It is computed as written, pair by pair of tokens, in float32: time grows with the square of the length, and
``generate()`` keeps keys, values and summed decays of all tokens. furious itself decodes with a state of constant size.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

QUERIES = 256  # rows of the matrix of weights that are in memory at a time
LARGEST_EXPONENT = 60.0  # of a decay, some of which may be positive

ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "silu": F.silu, "sigmoid": torch.sigmoid, "softplus": F.softplus,
               "softplus2": lambda x: x * F.softplus(x)}


class FuriousConfig(PretrainedConfig):
    model_type = "furious"

    # Keys that config.json leaves out where they are as usual.
    usual = {"score_degree": 0, "decay_bias": False, "square_mask": False, "qkv_bias": False, "out_bias": False,
             "conv_bias": True, "qk_norm": False, "qk_norm_per_head": False, "qk_norm_eps": 0.0, "dt_limit": 0.0,
             "dt_least": 0.0, "z_gate_bias": True, "z_gate_sigmoid": False, "out_norm_groups": 1,
             "out_norm_eps": 1.1920929e-07, "scale": 0.0, "rope_factor": 1.0, "rope_low_turns": 0.0,
             "rope_high_turns": 0.0, "rope_original_length": 0.0, "mlp": "swiglu", "mlp_bias": False,
             "layer_norm": False, "branch": 0, "decay_heads": 0, "sliding_window": 0}

    def __init__(self, **keys):
        for name, value in self.usual.items():
            keys.setdefault(name, value)
        if "head_dim" in keys:
            keys.setdefault("qk_dim", keys["head_dim"])
        super().__init__(**keys)

    def to_diff_dict(self):
        """What is saved: also the key that furious asks for where it is as usual."""
        return {**super().to_diff_dict(), "tie_word_embeddings": self.tie_word_embeddings}

    @property
    def heads(self):
        return max(self.q_heads, self.k_heads, self.v_heads)


def rms_norm(x, weight, eps):
    """Over the last dimension, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


class Weight(nn.Module):
    """Parameters without a function of their own."""

    def __init__(self, *shape, bias=0):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(*shape))
        self.bias = nn.Parameter(torch.zeros(bias)) if bias else None


class TokenNorm(Weight):
    """The RMSNorm or layer norm before block and MLP and at the end."""

    def __init__(self, config):
        super().__init__(config.hidden_size, bias=config.hidden_size if config.layer_norm else 0)
        self.eps = config.rms_norm_eps

    def forward(self, x):
        wide = x.float()
        if self.bias is None:
            return rms_norm(wide, self.weight, self.eps).to(x.dtype)
        return F.layer_norm(wide, wide.shape[-1:], self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


def angles(config, positions):
    """Of rotary positions: positions [B, T] to [B, T, 1, qk_dim / 2]."""
    dim = config.qk_dim
    speed = config.rope_theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim)
    kept = 0.0
    if config.rope_original_length > 0:  # speeds of many turns within that length are kept
        turns = config.rope_original_length * speed / (2 * math.pi)
        kept = ((turns - config.rope_low_turns) / (config.rope_high_turns - config.rope_low_turns)).clamp(0, 1)
    speed = speed * (kept + (1 - kept) / config.rope_factor)
    return (positions.double()[..., None] * speed)[:, :, None]


def rotate(config, x, angle):
    """x [B, T, heads, qk_dim]; pairs are neighbours, or the halves of a head."""
    cos, sin = angle.cos().float(), angle.sin().float()
    if config.rope_pairing == "interleaved":
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Mixing(nn.Module):
    """The token-mixing block."""

    def __init__(self, config):
        super().__init__()
        c = self.config = config
        heads, hidden, width = c.heads, c.hidden_size, c.heads * c.head_dim
        self.widths = [c.q_heads * c.qk_dim, c.k_heads * c.qk_dim, c.v_heads * c.head_dim]
        self.values = {True: "dt", False: "none"}.get(c.discretize, c.discretize)
        has_dt = self.values in ("dt", "sigmoid") or c.decay in ("original", "softplus_dt")
        self.qkv_proj = nn.Linear(hidden, sum(self.widths), bias=c.qkv_bias)
        if c.conv_window > 0:
            self.conv1d = Weight(sum(self.widths), 1, c.conv_window, bias=sum(self.widths) if c.conv_bias else 0)
        if has_dt:
            self.dt_proj = nn.Linear(hidden, heads, bias=c.dt_bias)
        if c.decay == "original":
            self.A_log = nn.Parameter(torch.zeros(heads))
        elif c.decay != "none":
            self.A_mask_proj = nn.Linear(hidden, c.decay_heads or heads, bias=c.decay_bias)
        if c.qk_norm:
            self.q_norm = Weight(*([c.q_heads] if c.qk_norm_per_head else []), c.qk_dim)
            self.k_norm = Weight(*([c.k_heads] if c.qk_norm_per_head else []), c.qk_dim)
        if c.d_residual:
            self.D = nn.Parameter(torch.ones(heads, c.head_dim))
        if c.z_gate:
            self.z_gate_proj = nn.Linear(hidden, width, bias=c.z_gate_bias)
        if c.norm == "none":
            groups = c.out_norm_groups
            self.out_norm = Weight(*([groups, width // groups] if groups > 1 else [width]))
        if c.branch > 0:
            self.branch_gate_proj = nn.Linear(hidden, c.branch, bias=False)
            self.branch_proj = nn.Linear(hidden, c.branch, bias=False)
        self.o_proj = nn.Linear(c.branch + width, hidden, bias=c.out_bias)

    def forward(self, h, angle, real, past):
        """h [B, T, hidden]; real [B, tokens so far]: no padding, or None; past: of this layer, brought up to date."""
        c = self.config
        qkv = self.qkv_proj(h).float()
        if real is not None:
            qkv = qkv * real[:, -h.shape[1]:, None]
        q, k, v = self.queries_keys_values(qkv, angle, past)
        dt = self.time_steps(h)
        values = v * dt[..., None] if self.values in ("dt", "sigmoid") else ACTIVATIONS[self.values](v)
        total = self.log_decay(h, dt)
        if past is not None:
            k, values = past.append("k", k), past.append("v", values)
        if total is not None:
            total = total.double().cumsum(1)
            if past is not None:
                total = past.append("total", total if past.total is None else total + past.total[:, -1:])
        o = self.mix(q, k, values, total, real)
        if c.d_residual:
            o = o + self.D.float() * v
        return self.o_proj(self.gated(h, o.flatten(2)).to(h.dtype))

    def queries_keys_values(self, qkv, angle, past):
        """[B, T, heads, dim] each."""
        c = self.config
        if c.conv_window > 0:
            before = None if past is None else past.conv
            if before is None:
                before = qkv.new_zeros(qkv.shape[0], c.conv_window - 1, qkv.shape[2])
            rows = torch.cat([before, qkv], 1)
            if past is not None:
                past.conv = rows[:, qkv.shape[1]:]
            bias = None if self.conv1d.bias is None else self.conv1d.bias.float()
            qkv = F.conv1d(rows.mT, self.conv1d.weight.float(), bias, groups=qkv.shape[2]).mT
            qkv = F.silu(qkv) if c.conv_silu else qkv
        q, k, v = (part.unflatten(2, (-1, dim)) for part, dim in
                   zip(qkv.split(self.widths, 2), (c.qk_dim, c.qk_dim, c.head_dim)))
        q, k = ACTIVATIONS[c.qk_activation](q), ACTIVATIONS[c.qk_activation](k)
        if c.qk_norm:
            eps = c.qk_norm_eps or c.rms_norm_eps
            q, k = rms_norm(q, self.q_norm.weight, eps), rms_norm(k, self.k_norm.weight, eps)
        if c.rope:
            q, k = rotate(c, q, angle), rotate(c, k, angle)
        return q, k, v

    def time_steps(self, h):
        """[B, T, heads], or None."""
        if not hasattr(self, "dt_proj"):
            return None
        dt = ACTIVATIONS["sigmoid" if self.values == "sigmoid" else "softplus"](self.dt_proj(h).float())
        return dt.clamp(self.config.dt_least, self.config.dt_limit or math.inf)

    def log_decay(self, h, dt):
        """[B, T, heads], or None."""
        kind, factor = self.config.decay, 2.0 if self.config.square_mask else 1.0
        if kind == "none":
            return None
        if kind == "original":
            return -factor * self.A_log.float().exp() * dt
        x = self.A_mask_proj(h).float()
        x = x.repeat_interleave(self.config.heads // x.shape[2], 2)
        if kind == "log_sigmoid":
            return factor * F.logsigmoid(x)
        a = -factor * ACTIVATIONS["softplus" if kind == "softplus_dt" else kind](x)
        return a * dt if kind == "softplus_dt" else a

    def mix(self, q, k, v, total, real):
        """q [B, T, heads, dim], k and v of all tokens so far; the result is [B, T, heads, head_dim]."""
        c = self.config
        q, k, v = (x.repeat_interleave(c.heads // x.shape[2], 2).transpose(1, 2) for x in (q, k, v))
        length, tokens = q.shape[2], k.shape[2]
        scale = c.scale or 1 / math.sqrt(c.qk_dim)
        outputs = []
        for begin in range(0, length, QUERIES):
            end = min(begin + QUERIES, length)
            at = torch.arange(begin, end, device=q.device) + tokens - length
            keys = torch.arange(tokens, device=q.device)
            seen = keys <= at[:, None]
            if c.sliding_window > 0:
                seen = seen & (keys > at[:, None] - c.sliding_window)
            if real is not None:
                seen = seen & real[:, None, None, :]
            scores = q[:, :, begin:end] @ k.mT * scale
            between = torch.zeros((), device=q.device)
            if total is not None:
                sums = total.transpose(1, 2)
                between = (sums[:, :, at, None] - sums[:, :, None, :]).clamp(max=LARGEST_EXPONENT).float()
            outputs.append(self.weighted(scores, between, seen) @ v)
        return torch.cat(outputs, 2).transpose(1, 2)

    def weighted(self, scores, between, seen):
        c = self.config
        if c.score == "exponential" and c.norm == "sum":  # the largest exponent cancels
            exponents = (scores + between).masked_fill(~seen, -math.inf)
            return torch.nan_to_num((exponents - exponents.amax(-1, keepdim=True).clamp(min=-1e30)).softmax(-1))
        if c.score == "exponential":
            scores = scores.exp()
        elif c.score == "squared":
            scores = scores * scores
        elif c.score == "power":
            scores = scores**c.score_degree
        elif c.score == "series":
            scores = sum(scores**n / math.factorial(n) for n in range(c.score_degree + 1))
        weights = (scores * between.exp()).masked_fill(~seen, 0.0)
        if c.norm == "none":
            return weights
        sums = weights.sum(-1, keepdim=True)
        return weights / torch.where(sums.abs() < 1e-30, torch.inf, sums)

    def gated(self, h, o):
        """Gate and norm after the mixer, and the branch beside it."""
        c = self.config
        if c.z_gate:
            z = self.z_gate_proj(h).float()
            o = o * (torch.sigmoid(z) if c.z_gate_sigmoid else F.silu(z))
        if c.norm == "none":
            weight = self.out_norm.weight
            o = rms_norm(o.unflatten(2, (-1, weight.shape[-1])), weight, c.out_norm_eps).flatten(2)
        if c.branch > 0:
            o = torch.cat([F.silu(self.branch_gate_proj(h)) * self.branch_proj(h), o.to(h.dtype)], 2)
        return o


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        if config.mlp == "swiglu":
            self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x):
        up = self.up_proj(x)
        if not hasattr(self, "gate_proj"):
            return self.down_proj(F.gelu(up, approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(x)) * up)


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = TokenNorm(config)
        self.self_attn = Mixing(config)
        if config.mlp != "none":
            self.post_attention_layernorm = TokenNorm(config)
            self.mlp = Mlp(config)

    def forward(self, x, angle, real, past):
        x = x + self.self_attn(self.input_layernorm(x), angle, real, past)
        return x + self.mlp(self.post_attention_layernorm(x)) if hasattr(self, "mlp") else x


class Trunk(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = TokenNorm(config)


class LayerPast:
    """What a layer keeps of the tokens so far."""

    def __init__(self):
        self.conv = self.k = self.v = self.total = None

    def append(self, name, rows):
        kept = getattr(self, name)
        setattr(self, name, rows if kept is None else torch.cat([kept, rows], 1))
        return getattr(self, name)


class FuriousCache:
    """What ``generate()`` hands from one token to the next."""

    def __init__(self, layers):
        self.layers = [LayerPast() for _ in range(layers)]
        self.tokens = 0

    def get_seq_length(self, *_):
        return self.tokens

    def reorder_cache(self, beams):
        for past in self.layers:
            for name, rows in vars(past).items():
                if rows is not None:
                    setattr(past, name, rows.index_select(0, beams.to(rows.device)))


class FuriousForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = FuriousConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _is_stateful = True  # its cache cannot be cut back

    def __init__(self, config):
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def _init_weights(self, module):
        pass  # for weights that are loaded; modules of torch draw their own

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, use_cache=None, **_):
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.tokens:]
        return {"input_ids": input_ids, "past_key_values": past_key_values, "attention_mask": attention_mask,
                "use_cache": use_cache is not False}

    def forward(self, input_ids, attention_mask=None, past_key_values=None, labels=None, use_cache=None, **_):
        """input_ids [B, T]; attention_mask [B, tokens so far]: 0 for padding, before or behind a text."""
        if past_key_values is None and use_cache:
            past_key_values = FuriousCache(len(self.model.layers))
        length = input_ids.shape[1]
        begin = 0 if past_key_values is None else past_key_values.tokens
        real = None
        positions = torch.arange(begin, begin + length, device=input_ids.device)[None]
        if attention_mask is not None and not bool((attention_mask != 0).all()):
            real = attention_mask != 0
            positions = (real.long().cumsum(1) - 1).clamp(min=0)[:, begin:]
        angle = angles(self.config, positions) if self.config.rope else None
        x = self.model.embed_tokens(input_ids)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, angle, real, None if past_key_values is None else past_key_values.layers[i])
        if past_key_values is not None:
            past_key_values.tokens += length
        logits = self.lm_head(self.model.norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
