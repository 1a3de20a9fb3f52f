"""The mixer as a function of arrays of any framework."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any, Sequence

import numpy as np

from . import _furious
from ._furious import Error

Array = Any  # torch.Tensor, numpy.ndarray, jax.Array


@functools.lru_cache(maxsize=1024)
def call_of(score: str, norm: str, decay: bool, scale: float | None, degree: int, signed_decay: bool, form: str,
            chunk: int, final_state: bool, precision: str) -> _furious.MixerCall:
    options = (score, norm, decay, scale, degree, signed_decay, form, chunk, final_state, precision)
    return _furious.mixer_call(repr(options), *options)


@functools.lru_cache(maxsize=1024)
def shape_of_state(call: _furious.MixerCall, qk_dim: int, v_dim: int) -> tuple[int, int]:
    return call.state_shape(qk_dim, v_dim)


def starts_of(cu_seqlens: Any) -> list[int]:
    """cu_seqlens as a list; empty: none were given."""
    if cu_seqlens is None:
        return []
    starts = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)
    if not starts or not all(isinstance(start, int) for start in starts):
        raise Error('mixer: argument "cu_seqlens" is not a list of integers; give the first token of every sequence, '
                    "and the number of all tokens")
    return starts


def mixer(q: Array, k: Array, v: Array, log_decay: Array | None = None, score: str = "squared", norm: str = "sum",
          scale: float | None = None, initial_state: Array | None = None, output_final_state: bool = False,
          cu_seqlens: Array | Sequence[int] | None = None, form: str = "auto", *, degree: int = 0,
          signed_decay: bool = False, chunk: int = 0, precision: str = "auto") -> tuple[Array, Array | None]:
    """Linear attention, Mamba-2, 2Mamba and softmax attention as one function.

    With S_ij = scale · q_i·k_j and A_t the sum of log_decay up to t::

        w_ij = f(S_ij) · exp(A_i - A_j)  for j <= i        o_i = Σ_j w_ij v_j  (norm "none"), over Σ_j w_ij ("sum")

    Args:
        q, k: ``[B, T, Hq, K]``, float32, bfloat16 or float16; 8 <= K, V <= 256. Any strides whose last is 1.
        v: ``[B, T, H, V]`` of the same dtype; Hq divides H, or H divides Hq.
        log_decay: ``[B, T, H]`` float32, none positive; ``None``: no decay.
        score: f: "linear" x, "squared" x², "exponential" eˣ, "power" x^degree, "series" of the exponential to degree.
        norm: "sum" or "none".
        scale: of q·k; ``None``: 1/√K.
        initial_state: ``[N, H, D, V + 1]`` float32 (V columns with norm "none"), N sequences; see ``state_shape``.
        output_final_state: whether the state after the last token is returned.
        cu_seqlens: packed sequences (B is 1): sequence n has tokens cu_seqlens[n] to cu_seqlens[n + 1]. On the CPU.
        form: "auto", "parallel" (quadratic time), "chunked" (linear time), "reference" (double precision, slow; CPU,
            also for float64).
        degree: of the scores power (3, 4) and series (1 to 4).
        signed_decay: log_decay may be positive.
        chunk: tokens in a chunk; 0: chosen.
        precision: of products on a GPU: "auto", "bf16", "tf32", "tf32x3" or "f32".

    Returns:
        ``o [B, T, H, V]`` in the dtype of v, and the final state ``[N, H, D, V + 1]`` or ``None``; memory of the
        framework of ``q``. For torch, gradients for q, k, v, log_decay and initial_state; work goes to the current
        stream.
    """
    options = (score, norm, log_decay is not None, scale, degree, signed_decay, form, chunk, bool(output_final_state),
               precision)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _torch

        return _torch.mixer(options, q, k, v, log_decay, initial_state, cu_seqlens)
    call = call_of(*options)
    starts = starts_of(cu_seqlens)
    if isinstance(q, np.ndarray):
        return _numpy_mixer(call, q, k, v, log_decay, initial_state, starts)
    if hasattr(q, "__dlpack__"):
        out, state = _furious.mixer_forward_new(call, q, k, v, log_decay, initial_state, starts)
        import_array = _import_function(type(q).__module__.split(".")[0])
        return import_array(out), None if state is None else import_array(state)
    raise TypeError(f'mixer: argument "q" is a {type(q).__name__}, expected a tensor of torch, an array of numpy, or '
                    "an object with __dlpack__")


def mixer_step(q: Array, k: Array, v: Array, log_decay: Array | None, state: Array, score: str = "squared",
               norm: str = "sum", scale: float | None = None, *, degree: int = 0, signed_decay: bool = False) -> Array:
    """One token of every sequence; ``state`` is brought up to date in place. Without gradients.

    Args:
        q, k: ``[B, Hq, K]``. v: ``[B, H, V]``. log_decay: ``[B, H]`` float32, or ``None``.
        state: ``[B, H, D, V + 1]`` float32: zeros, or the final state of ``mixer``.

    Returns:
        ``o [B, H, V]`` in the dtype of v.
    """
    call = call_of(score, norm, log_decay is not None, scale, degree, signed_decay, "auto", 0, False, "auto")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(q, torch.Tensor):
        from . import _torch

        return _torch.mixer_step(call, q, k, v, log_decay, state)
    out = np.empty(_step_shape(q, k, v), v.dtype) if isinstance(v, np.ndarray) else None
    _furious.mixer_step(call, q, k, v, log_decay, state, out, None)
    return out


def state_shape(qk_dim: int, v_dim: int, score: str = "squared", norm: str = "sum", *, degree: int = 0,
                signed_decay: bool = False) -> tuple[int, int]:
    """Rows D and columns of the state of a head; D is 0 where there is no state of constant size."""
    call = call_of(score, norm, signed_decay, None, degree, signed_decay, "auto", 0, False, "auto")
    return shape_of_state(call, qk_dim, v_dim)


def _step_shape(q: Any, k: Any, v: Any) -> tuple[int, ...]:
    if not len(q.shape) == len(k.shape) == len(v.shape) == 3:
        return tuple(v.shape)  # the library says what is wrong
    return (v.shape[0], max(q.shape[1], k.shape[1], v.shape[1]), v.shape[2])


def _numpy_mixer(call: _furious.MixerCall, q: Any, k: Any, v: Any, log_decay: Any, initial_state: Any,
                 starts: list[int]) -> tuple[np.ndarray, np.ndarray | None]:
    out: Any = None
    normalizer = maximum = final_state = None
    # Where a shape cannot be right, the library gets no memory and says what is wrong.
    if all(isinstance(x, np.ndarray) and x.ndim == 4 for x in (q, k, v)):
        batch, length, _, v_dim = v.shape
        heads = max(q.shape[2], k.shape[2], v.shape[2])
        accumulator = np.float64 if q.dtype == np.float64 else np.float32
        out = np.empty((batch, length, heads, v_dim), v.dtype)
        if call.has_normalizer:
            normalizer = np.empty((batch, heads, length), accumulator)
        if call.has_maximum:
            maximum = np.empty((batch, heads, length), accumulator)
        if call.final_state:
            rows, columns = shape_of_state(call, q.shape[3], v_dim)
            final_state = np.empty((len(starts) - 1 if starts else batch, heads, rows, columns), accumulator)
    _furious.mixer_forward(call, q, k, v, log_decay, initial_state, starts, out, normalizer, maximum, final_state, None)
    return out, final_state


@functools.lru_cache(maxsize=None)
def _import_function(framework: str) -> Any:
    framework = {"jaxlib": "jax"}.get(framework, framework)
    for name in (framework, framework + ".dlpack", framework + ".numpy"):
        try:
            found = getattr(importlib.import_module(name), "from_dlpack", None)
        except ImportError:
            continue
        if found is not None:
            return found
    raise Error(f"mixer: arrays of {framework} cannot be made from DLPack; give arrays of torch, numpy or jax")
