"""furious.mixer against a naive implementation in double precision: results, gradients, states, packed sequences."""

import gc
import random

import numpy as np
import pytest

import furious

torch = pytest.importorskip("torch", reason="torch is not installed")
import naive  # noqa: E402

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
# A row of results may differ by so much of its largest number: rounding of the inputs, products and the result.
TOLERANCE = {"f32": 2e-5, "bf16": 2e-2, "f16": 3e-3}
# Under the sum norm gradients are differences with the result. A GPU reads it as it was stored, rounded to the dtype,
# and the derivative of a score near 0 (2/s of its weight, for s²) magnifies the difference.
GRADIENT_TOLERANCE = {"cpu": {"f32": 2e-4, "bf16": 1e-1, "f16": 1.5e-2},
                      "cuda": {"f32": 1e-3, "bf16": 3e-1, "f16": 4e-2}}
SPECS = [
    dict(score="squared", norm="sum"), dict(score="squared", norm="none"), dict(score="linear", norm="none"),
    dict(score="linear", norm="sum"), dict(score="exponential", norm="sum"), dict(score="exponential", norm="none"),
    dict(score="power", degree=4, norm="sum"), dict(score="power", degree=3, norm="none"),
    dict(score="series", degree=2, norm="sum"),
]
WITH_STATES = [spec for spec in SPECS if spec["score"] != "exponential"]


def strided(x, rng):
    """The same numbers with other strides; the last stays 1."""
    choice = rng.choice(["dense", "transposed", "sliced"])
    if choice == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if choice == "sliced":
        wide = torch.empty(*x.shape[:-1], x.shape[-1] + 8, dtype=x.dtype, device=x.device)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]
    return x


def make(rng, spec, dtype="f32", device="cpu", length=None, batch=None, decay=True, dims=None, heads=None):
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    length = length or rng.choice([1, 7, 64, 130])
    batch = batch or rng.choice([1, 2])
    q_heads, v_heads = heads or rng.choice([(1, 1), (2, 2), (1, 4), (4, 2)])
    qk_dim, v_dim = dims or rng.choice([(8, 8), (16, 32), (64, 64), (24, 40)])
    if spec["score"] == "power" or spec.get("degree", 0) > 2:
        qk_dim = min(qk_dim, 16)
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    q, k, v = normal(batch, length, q_heads, qk_dim), normal(batch, length, q_heads, qk_dim), normal(
        batch, length, v_heads, v_dim)
    if spec["score"] == "linear" and spec["norm"] == "sum":  # sums of features that are not negative
        q, k = q.abs() + 0.1, k.abs() + 0.1
    log_decay = -torch.nn.functional.softplus(normal(batch, length, max(q_heads, v_heads))) if decay else None
    if log_decay is not None:
        log_decay = log_decay.to(device)
    return [strided(x.to(device, DTYPES[dtype]), rng) for x in (q, k, v)] + [log_decay]


def assert_rows_close(got, wanted, tolerance, what="", least=0.05):
    """Each row is compared with the largest number of its own, or with `least` where all of it is small: numbers are
    around 1, and the gradients of a first token are exactly 0."""
    got, wanted = got.double().cpu(), wanted.double().cpu()
    assert got.shape == wanted.shape, what
    assert torch.isfinite(got).all(), what
    size = wanted.abs().amax(-1, keepdim=True).clamp_min(least * max(1.0, wanted.abs().max().item()))
    error = ((got - wanted).abs() / size).max().item() if got.numel() else 0.0
    assert error <= tolerance, f"{what}: {error:.2e} > {tolerance:.0e}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s['score']}{s.get('degree', '')}-{s['norm']}")
def test_forward_and_backward(spec, device):
    rng = random.Random(str(spec))
    dtypes = ["f32", "bf16", "f16"]
    forms = ["auto", "parallel"] + ([] if spec["score"] == "exponential" else ["chunked"])
    for case in range(8):
        dtype = dtypes[case % len(dtypes)]
        form = forms[case % len(forms)]
        inputs = make(rng, spec, dtype, device, decay=case % 3 != 2)
        leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
        doubles = [None if x is None else x.detach().double().cpu().requires_grad_() for x in inputs]
        out, state = furious.mixer(*leaves, form=form, **spec)
        wanted = naive.mixer(*doubles, **spec)
        assert state is None and out.dtype == inputs[2].dtype and out.device == inputs[2].device
        what = f"case {case}: {dtype} {form} {[tuple(x.shape) for x in inputs[:3]]}"
        # On a GPU products of f32 are those of three TF32 products.
        assert_rows_close(out, wanted, TOLERANCE[dtype] * (5 if device == "cuda" else 1), what)
        gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(case), dtype=torch.float64)
        out.backward(gradient.to(out.device, out.dtype))
        wanted.backward(gradient.to(out.dtype).double())
        for name, x, y in zip(("q", "k", "v", "log_decay"), leaves, doubles):
            if x is not None:
                assert x.grad.dtype == x.dtype
                # The gradient of a decay is a sum over the tokens after it: a row is one head at all times.
                rows = [g.transpose(1, 2) if name == "log_decay" else g for g in (x.grad, y.grad)]
                assert_rows_close(*rows, GRADIENT_TOLERANCE[device][dtype], f"{what}: gradient of {name}",
                                  0.2 if device == "cuda" else 0.05)


@pytest.mark.parametrize("spec", WITH_STATES, ids=lambda s: f"{s['score']}{s.get('degree', '')}-{s['norm']}")
def test_states_continue_a_sequence(spec, device):
    """Two calls with a state between them are one call; gradients pass through the state."""
    rng = random.Random("state" + str(spec))
    q, k, v, log_decay = make(rng, spec, "f32", device, length=50, batch=2, heads=(2, 2), dims=(16, 16))
    leaves = [x.detach().requires_grad_() for x in (q, k, v, log_decay)]
    doubles = [x.detach().double().cpu().requires_grad_() for x in (q, k, v, log_decay)]
    first, state = furious.mixer(*(x[:, :20] for x in leaves), output_final_state=True, **spec)
    rows, columns = furious.state_shape(16, 16, spec["score"], spec["norm"], degree=spec.get("degree", 0))
    assert state.shape == (2, 2, rows, columns) and state.dtype == torch.float32
    second, end = furious.mixer(*(x[:, 20:] for x in leaves), initial_state=state, output_final_state=True, **spec)
    wanted = naive.mixer(*doubles, **spec)
    out = torch.cat([first, second], 1)
    assert_rows_close(out, wanted, 1e-4)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (out * gradient.to(out.device, out.dtype)).sum().backward()
    (wanted * gradient).sum().backward()
    for name, x, y in zip(("q", "k", "v", "log_decay"), leaves, doubles):
        assert_rows_close(x.grad, y.grad, 1e-3, f"gradient of {name}")
    whole, whole_state = furious.mixer(q, k, v, log_decay, output_final_state=True, **spec)
    assert_rows_close(end.detach().flatten(2), whole_state.flatten(2), 1e-3, "final state")


def test_packed_sequences(device):
    rng = random.Random(3)
    for spec in SPECS:
        starts = [0, 5, 6, 70, 100]
        inputs = make(rng, spec, "f32", device, length=100, batch=1, heads=(2, 2), dims=(16, 16))
        for given in (starts, torch.tensor(starts), torch.tensor(starts, dtype=torch.int32), np.array(starts)):
            out, _ = furious.mixer(*inputs, cu_seqlens=given, **spec)
            assert_rows_close(out, naive.mixer(*inputs, cu_seqlens=starts, **spec), 1e-4, str(spec))
        if spec["score"] == "exponential":
            continue
        out, states = furious.mixer(*inputs, cu_seqlens=starts, output_final_state=True, **spec)
        for n, (i, j) in enumerate(zip(starts, starts[1:])):
            _, state = furious.mixer(*(x[:, i:j] for x in inputs), output_final_state=True, **spec)
            assert_rows_close(states[n].flatten(1), state[0].flatten(1), 1e-4)
        again, _ = furious.mixer(*inputs, cu_seqlens=starts, initial_state=torch.zeros_like(states), **spec)
        assert_rows_close(again, out, 1e-4)


def test_step_is_the_forward_pass(device):
    rng = random.Random(4)
    for spec in WITH_STATES:
        q, k, v, log_decay = make(rng, spec, "f32", device, length=12, batch=2, heads=(2, 2), dims=(16, 24))
        out, end = furious.mixer(q, k, v, log_decay, output_final_state=True, **spec)
        state = torch.zeros_like(end)
        for t in range(12):
            token = furious.mixer_step(q[:, t], k[:, t], v[:, t], log_decay[:, t], state, **spec)
            assert_rows_close(token, out[:, t], 2e-4, f"{spec} token {t}")
        assert_rows_close(state.flatten(2), end.flatten(2), 1e-4)


def test_gradcheck():
    """The backward pass in double precision, all of it: also through the states."""
    generator = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    for spec in (dict(score="squared", norm="sum"), dict(score="linear", norm="none"),
                 dict(score="exponential", norm="sum"), dict(score="series", degree=2, norm="sum")):
        q, k, v, log_decay = normal(1, 5, 2, 8), normal(1, 5, 2, 8), normal(1, 5, 2, 8), -normal(1, 5, 2).abs() - 0.1
        leaves = [x.requires_grad_() for x in (q, k, v, log_decay)]
        call = lambda *x: furious.mixer(*x, form="reference", **spec)[0]
        assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-5)
        if spec["score"] == "exponential":
            continue
        rows, columns = furious.state_shape(8, 8, spec["score"], spec["norm"], degree=spec.get("degree", 0))
        # A state that tokens can make: the sums of a norm are positive.
        with torch.no_grad():
            state = furious.mixer(*(x.float().double() for x in leaves), output_final_state=True, form="reference",
                                  **spec)[1]
        assert state.shape == (1, 2, rows, columns)
        state.requires_grad_()
        both = lambda q, k, v, a, s: furious.mixer(q, k, v, a, initial_state=s, output_final_state=True,
                                                   form="reference", **spec)
        projection = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        scalar = lambda *x: (lambda o, s: (o.sin().sum() + (s * projection).sum()))(*both(*x))
        short = [x.detach()[:, :2].clone().requires_grad_() for x in leaves]
        assert torch.autograd.gradcheck(scalar, [*short, state], eps=1e-6, atol=1e-5)


def test_gradients_only_where_they_are_needed(device):
    inputs = make(random.Random(6), SPECS[0], "f32", device, length=20, heads=(2, 2), dims=(16, 16))
    for i in range(4):
        leaves = [x.detach().clone().requires_grad_(j == i) for j, x in enumerate(inputs)]
        furious.mixer(*leaves)[0].square().sum().backward()
        assert [x.grad is not None for x in leaves] == [j == i for j in range(4)]
    out, state = furious.mixer(*inputs)
    assert not out.requires_grad and state is None
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.no_grad():
        assert not furious.mixer(*leaves)[0].requires_grad
    # Only the state is used.
    _, state = furious.mixer(*leaves, output_final_state=True)
    state.sum().backward()
    assert leaves[1].grad.abs().sum() > 0 and leaves[0].grad.abs().sum() == 0


def test_expanded_gradients_and_empty_batches():
    q, k, v, a = (x.requires_grad_() for x in make(random.Random(7), SPECS[0], length=9))
    furious.mixer(q, k, v, a)[0].sum().backward()  # its gradient has strides of 0
    assert q.grad is not None


def test_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    inputs = make(random.Random(8), SPECS[0], length=40)
    grads = []
    for wrap in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        wrap(lambda *x: furious.mixer(*x)[0], *leaves).square().sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_threads_of_torch_stay():
    before = torch.get_num_threads()
    furious.mixer(*make(random.Random(9), SPECS[0], length=130, dims=(64, 64)))
    assert torch.get_num_threads() == before


def test_same_call_same_bits(device):
    inputs = make(random.Random(10), SPECS[0], "bf16", device, length=130, heads=(2, 2), dims=(64, 64))
    first, second = furious.mixer(*inputs)[0], furious.mixer(*inputs)[0]
    assert torch.equal(first, second)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_no_leak_over_1000_calls(device):
    """Forward, backward and refused calls leave no memory behind: tensors of 1 MB each."""
    inputs = [x.detach().requires_grad_() for x in make(random.Random(11), SPECS[0], "f32", device, length=512, batch=1,
                                                       heads=(8, 8), dims=(16, 64))]

    def once():
        out, state = furious.mixer(*inputs, output_final_state=True)
        torch.autograd.grad(out.sum() + state.sum(), inputs)
        with pytest.raises(furious.Error):
            furious.mixer(inputs[0], inputs[1], inputs[2][:, :5], inputs[3])

    for _ in range(20):
        once()
    gc.collect()
    before, before_gpu = resident_bytes(), torch.cuda.memory_allocated() if device == "cuda" else 0
    for _ in range(250):
        once()
    small = make(random.Random(12), SPECS[0], "f32", device, length=4, heads=(1, 1), dims=(8, 8))
    objects = len(gc.get_objects())
    for _ in range(1000):
        furious.mixer(*small)
    gc.collect()
    assert len(gc.get_objects()) - objects < 50
    assert resident_bytes() - before < 24 << 20
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before_gpu < 8 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_streams():
    """Work goes to the current stream: a result is used on another stream after an event, without the host waiting."""
    inputs = make(random.Random(13), SPECS[0], "bf16", "cuda", length=2048, batch=2, heads=(8, 8), dims=(64, 64))
    wanted = furious.mixer(*inputs)[0].float() * 2
    torch.cuda.synchronize()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        q = inputs[0].clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # the call below must wait for this stream
            late = torch.zeros_like(q)
            late.copy_(q)
            out = furious.mixer(late, *inputs[1:])[0]
            done = torch.cuda.Event()
            done.record()
        with torch.cuda.stream(other):
            other.wait_event(done)
            out.record_stream(other)
            doubled = out.float() * 2
        torch.cuda.synchronize()
        assert torch.equal(doubled, wanted)
