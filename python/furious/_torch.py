"""The mixer in torch: autograd, the current stream, and an operator that torch.compile and torch.export know.

Eager calls go through an autograd.Function; traced ones through the operators furious::mixer and
furious::mixer_backward, which torch 2.4 and later can register with a fake implementation.
"""

from __future__ import annotations

import ast
import functools
from typing import Any, Callable

import torch
from torch.autograd.function import once_differentiable
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import _furious
from ._furious import Error
from ._mixer import call_of, shape_of_state, starts_of

Tensor = torch.Tensor
_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
HAS_OPERATOR = hasattr(torch.library, "register_autograd") and hasattr(torch.library, "register_fake")


_is_tracing: Callable[[], bool] = getattr(torch, "compiler").is_compiling if HAS_OPERATOR else (lambda: False)


def stream_of(x: Tensor) -> int | None:
    """The current stream of the device as an address; None on the CPU."""
    if not x.is_cuda:
        return None
    if _raw_stream is not None:
        return _raw_stream(x.device.index)
    return torch.cuda.current_stream(x.device).cuda_stream


def _pack(x: Tensor | None) -> Any:
    return None if x is None else to_dlpack(x)


def _check(name: str, x: Any, optional: bool = False) -> None:
    if x is None and optional:
        return
    if type(x) in _PLAIN and x.dtype in _DTYPES and x.layout is torch.strided and (x.is_cuda or x.device.type == "cpu"):
        return
    if not isinstance(x, torch.Tensor):
        raise TypeError(f'mixer: argument "{name}" is a {type(x).__name__}, expected a tensor of torch like "q"')
    if x.layout is not torch.strided:
        raise Error(f'mixer: argument "{name}" has the layout {x.layout}; convert it with to_dense()')
    if x.dtype not in _DTYPES:
        raise Error(f'mixer: argument "{name}" has dtype {str(x.dtype)[6:]}; convert to float32, bfloat16 or float16')
    if not x.is_cuda and x.device.type != "cpu":
        raise Error(f'mixer: argument "{name}" is on {x.device}; move it to the CPU or a CUDA device')


def _check_all(q: Any, k: Any, v: Any, log_decay: Any, initial_state: Any) -> None:
    _check("q", q)
    _check("k", k)
    _check("v", v)
    _check("log_decay", log_decay, True)
    _check("initial_state", initial_state, True)


def _empty_results(call: _furious.MixerCall, q: Tensor, k: Tensor, v: Tensor, sequences: int | None) -> tuple[Any, ...]:
    """Memory for out, normalizer, maximum and final state, or None where there is none."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return None, None, None, None  # the library says what is wrong
    batch, length, heads, v_dim = v.shape
    heads = max(q.shape[2], k.shape[2], heads)
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = v.new_empty((batch, length, heads, v_dim))
    normalizer = maximum = final_state = None
    if call.has_normalizer:
        normalizer = v.new_empty((batch, heads, length), dtype=accumulator)
    if call.has_maximum:
        maximum = v.new_empty((batch, heads, length), dtype=accumulator)
    if call.final_state:
        rows, columns = shape_of_state(call, q.shape[3], v_dim)
        final_state = v.new_empty((batch if sequences is None else sequences, heads, rows, columns), dtype=accumulator)
    return out, normalizer, maximum, final_state


def _forward(call: _furious.MixerCall, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
             initial_state: Tensor | None, starts: list[int]) -> tuple[Any, ...]:
    results = _empty_results(call, q, k, v, len(starts) - 1 if starts else None)
    out, normalizer, maximum, final_state = results
    ran = _furious.mixer_forward(call, to_dlpack(q), to_dlpack(k), to_dlpack(v), _pack(log_decay), _pack(initial_state),
                                 starts, _pack(out), _pack(normalizer), _pack(maximum), _pack(final_state),
                                 stream_of(q))
    return (ran, *results)


def _backward(call: _furious.MixerCall, form: int, chunk: int, states: Tensor | None, inputs: tuple[Any, ...],
              starts: list[int], results: tuple[Any, ...], d_out: Tensor | None,
              d_state: Tensor | None) -> tuple[Any, ...]:
    q = inputs[0]
    gradients = tuple(None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    d_out = torch.zeros_like(results[0]) if d_out is None else d_out
    if d_out.stride(-1) != 1:
        d_out = d_out.contiguous()
    arguments: list[Any] = [*map(_pack, inputs), starts, *map(_pack, results), to_dlpack(d_out), _pack(d_state),
                            *map(_pack, gradients), stream_of(q)]
    _furious.mixer_backward(call, form, chunk, _pack(states), *arguments)
    return gradients


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, starts: Any, q: Any, k: Any, v: Any, log_decay: Any, initial_state: Any) -> Any:
        ran, out, normalizer, maximum, final_state = _forward(call, q, k, v, log_decay, initial_state, starts)
        ctx.set_materialize_grads(False)
        # Saved as tensors, so that activation checkpointing can drop them.
        states = ran.states()
        ctx.save_for_backward(q, k, v, log_decay, initial_state, out, normalizer, maximum, final_state,
                              None if states is None else from_dlpack(states))
        ctx.call, ctx.starts, ctx.form, ctx.chunk = call, starts, ran.form_index, ran.chunk
        return out, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Any, d_state: Any) -> Any:
        saved = ctx.saved_tensors
        if d_out is None and d_state is None:
            return (None,) * 7
        gradients = _backward(ctx.call, ctx.form, ctx.chunk, saved[9], saved[:5], ctx.starts, saved[5:9], d_out,
                              d_state)
        return (None, None, *gradients)


def mixer(options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
          initial_state: Tensor | None, cu_seqlens: Any) -> tuple[Tensor, Tensor | None]:
    if HAS_OPERATOR and (_is_tracing() or type(q) not in _PLAIN):
        if cu_seqlens is not None and not isinstance(cu_seqlens, torch.Tensor):
            cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int64)
        out, _, _, final_state, _ = torch.ops.furious.mixer(q, k, v, log_decay, initial_state, cu_seqlens,
                                                            repr(options))
        return out, final_state if options[8] else None
    call = call_of(*options)
    _check_all(q, k, v, log_decay, initial_state)
    starts = starts_of(cu_seqlens)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or
                                    (log_decay is not None and log_decay.requires_grad) or
                                    (initial_state is not None and initial_state.requires_grad)):
        return _Mixer.apply(call, starts, q, k, v, log_decay, initial_state)
    results = _forward(call, q, k, v, log_decay, initial_state, starts)
    return results[1], results[4]


def mixer_step(call: _furious.MixerCall, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None,
               state: Tensor) -> Tensor:
    for name, x in (("q", q), ("k", k), ("v", v), ("log_decay", log_decay), ("state", state)):
        _check(name, x, name == "log_decay")
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            raise Error(f'mixer_step: argument "{name}" requires a gradient, but a step has none; use torch.no_grad(), '
                        "or mixer() with initial_state")
    heads = max(x.shape[1] if x.dim() == 3 else 1 for x in (q, k, v))
    out: Any = torch.empty((v.shape[0], heads, v.shape[2]), dtype=v.dtype, device=v.device) if v.dim() == 3 else None
    _furious.mixer_step(call, to_dlpack(q), to_dlpack(k), to_dlpack(v), _pack(log_decay), to_dlpack(state), _pack(out),
                        stream_of(q))
    return out


# The operators. Options travel as the text of a tuple, since the schema of an operator knows no other objects. Every
# result is a tensor: those that a call does not have are empty. `ran` holds the form and the chunk of the forward pass.

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? log_decay, Tensor? initial_state, Tensor? cu_seqlens"


@functools.lru_cache(maxsize=1024)
def _call_of_text(text: str) -> _furious.MixerCall:
    return call_of(*ast.literal_eval(text))


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return torch.empty((0,), dtype=torch.float32, device=like.device) if x is None else x


def _or_none(x: Tensor, present: bool) -> Tensor | None:
    return x if present else None


def _operator(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor | None,
              cu_seqlens: Tensor | None, options: str) -> tuple[Tensor, ...]:
    _check_all(q, k, v, log_decay, initial_state)
    ran, *results = _forward(_call_of_text(options), q, k, v, log_decay, initial_state, starts_of(cu_seqlens))
    return (*(_or_empty(x, q) for x in results), torch.tensor([ran.form_index, ran.chunk]))


def _fake_operator(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor | None,
                   cu_seqlens: Tensor | None, options: str) -> tuple[Tensor, ...]:
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    results = _empty_results(_call_of_text(options), q, k, v, sequences)
    return (*(_or_empty(x, q) for x in results), torch.empty((2,), dtype=torch.int64, device="cpu"))


def _operator_backward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor | None,
                       cu_seqlens: Tensor | None, out: Tensor, normalizer: Tensor, maximum: Tensor, final_state: Tensor,
                       ran: Tensor, d_out: Tensor | None, d_state: Tensor | None, options: str) -> tuple[Tensor, ...]:
    call = _call_of_text(options)
    form, chunk = ran.tolist()
    results = (out, _or_none(normalizer, call.has_normalizer), _or_none(maximum, call.has_maximum),
               _or_none(final_state, call.final_state))
    gradients = _backward(call, form, chunk, None, (q, k, v, log_decay, initial_state), starts_of(cu_seqlens), results,
                          d_out, d_state)
    return tuple(_or_empty(x, q) for x in gradients)


def _fake_operator_backward(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial_state: Tensor | None,
                            *_: Any) -> tuple[Tensor, ...]:
    return tuple(_or_empty(None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device), q)
                 for x in (q, k, v, log_decay, initial_state))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], *output)
    ctx.options = inputs[6]


def _traced_backward(ctx: Any, d_out: Any, d_normalizer: Any, d_maximum: Any, d_state: Any, d_ran: Any) -> Any:
    saved = ctx.saved_tensors
    gradients = torch.ops.furious.mixer_backward(*saved, d_out, d_state, ctx.options)
    present = [x is not None for x in saved[:5]]
    return (*(_or_none(x, here) for x, here in zip(gradients, present)), None, None)


if HAS_OPERATOR:
    _library = torch.library.Library("furious", "DEF")  # kept: the operators live as long as it does
    _library.define(f"mixer({_INPUTS}, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
    _library.define(
        f"mixer_backward({_INPUTS}, Tensor out, Tensor normalizer, Tensor maximum, Tensor final_state, Tensor ran, "
        "Tensor? d_out, Tensor? d_state, str options) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
    for _device in ("CPU", "CUDA"):
        _library.impl("mixer", _operator, _device)
        _library.impl("mixer_backward", _operator_backward, _device)
    _of_library: Any = torch.library  # of any version
    _of_library.register_fake("furious::mixer", _fake_operator, lib=_library)
    _of_library.register_fake("furious::mixer_backward", _fake_operator_backward, lib=_library)
    _of_library.register_autograd("furious::mixer", _traced_backward, setup_context=_setup_context, lib=_library)
