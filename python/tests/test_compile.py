"""The registered operator: fake tensors, torch.compile and torch.export. Needs torch 2.4; compiling to code needs a
compiler at run time, so on the CPU the graphs run as they are ("aot_eager")."""

import pytest

import furious

torch = pytest.importorskip("torch", reason="torch is not installed")
from furious import _torch  # noqa: E402

pytestmark = pytest.mark.skipif(not _torch.HAS_OPERATOR, reason="torch before 2.4 registers no operators with fakes")


def inputs(device, length=48, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, length, 2, 16, generator=generator).to(device, dtype) for _ in range(3))
    return [q, k, v, -torch.rand(2, length, 2, generator=generator).to(device)]


def test_opcheck(device):
    q, k, v, a = inputs(device)
    rows, columns = furious.state_shape(16, 16)
    options = repr(("squared", "sum", True, None, 0, False, "auto", 0, True, "auto"))
    state = torch.rand(2, 2, rows, columns, device=device)
    leaves = [x.requires_grad_() for x in (q, k, v, a, state)]
    torch.library.opcheck(torch.ops.furious.mixer.default, (*leaves, None, options),
                          test_utils=("test_schema", "test_faketensor", "test_autograd_registration"))


@pytest.mark.parametrize("score", ["squared", "exponential"])
def test_compile(device, score):
    backend = "inductor" if device == "cuda" else "aot_eager"

    def block(q, k, v, a):
        out, _ = furious.mixer(q.sin(), k, v * 2, -torch.nn.functional.softplus(a), score=score)
        return (out * out).sum(-1)

    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    results = []
    for call in (block, compiled):
        leaves = [x.requires_grad_() for x in inputs(device)]
        out = call(*leaves)
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in leaves)])
    for one, other in zip(*results):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-4), (one - other).abs().max()


def test_compile_with_states_and_packed_sequences(device):
    def call(q, k, v, a, starts):
        return furious.mixer(q, k, v, a, cu_seqlens=starts, output_final_state=True)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    one = [x[:1] for x in inputs(device)]
    starts = torch.tensor([0, 20, 48])
    for got, wanted in zip(compiled(*one, starts), call(*one, starts)):
        assert torch.equal(got, wanted)


def test_dynamic_lengths(device):
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: furious.mixer(*x)[0], backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (16, 31, 48):
        assert torch.equal(compiled(*inputs(device, length)), furious.mixer(*inputs(device, length))[0])


def test_export(device):
    class Block(torch.nn.Module):
        def forward(self, q, k, v, a):
            return furious.mixer(q, k, v, a)[0]

    exported = torch.export.export(Block(), tuple(inputs(device)))
    assert any("furious" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(*inputs(device)), furious.mixer(*inputs(device))[0])


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 8, 2, 16) for _ in range(3))
        out, state = furious.mixer(q, k, v, torch.empty(2, 8, 2), output_final_state=True)
        assert out.shape == (2, 8, 2, 16) and state.shape == (2, 2, *furious.state_shape(16, 16))
