"""Whatever is wrong with the arguments is an exception with the words of the library, and nothing is written."""

import numpy as np
import pytest

import furious

torch = pytest.importorskip("torch", reason="torch is not installed")


def inputs(device="cpu", dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 6, 2, 16, generator=generator).to(device, dtype) for _ in range(3))
    return [q, k, v, -torch.rand(1, 6, 2, generator=generator).to(device)]


def refused(words, *args, **options):
    with pytest.raises((furious.Error, TypeError)) as caught:
        furious.mixer(*args, **options)
    assert words in str(caught.value), str(caught.value)


def test_dtype():
    q, k, v, a = inputs()
    refused('"k"', q, k.bfloat16(), v, a)
    refused("int64", q.long(), k, v, a)
    refused("f64", q.double(), k.double(), v.double(), a.double())  # only form="reference"
    refused('"log_decay"', q.bfloat16(), k.bfloat16(), v.bfloat16(), a.bfloat16())
    refused("complex64", torch.complex(q, q), k, v, a)
    refused("bool", q > 0, k, v, a)


def test_rank_and_shape():
    q, k, v, a = inputs()
    refused('"q"', q[0], k, v, a)
    refused('"v"', q, k, v[0], a)
    refused('"log_decay"', q, k, v, a[0])
    refused('"v"', q, k, v[:, :3], a)
    refused("heads", torch.zeros(1, 6, 3, 16), torch.zeros(1, 6, 3, 16), v, a)
    refused("8", q[..., :4].contiguous(), k[..., :4].contiguous(), v, a)
    rows, columns = furious.state_shape(16, 16)
    refused('"initial_state"', q, k, v, a, initial_state=torch.zeros(1, 2, rows, columns - 1))
    refused('"initial_state"', q, k, v, a, initial_state=torch.zeros(2, 2, rows, columns))
    refused('"initial_state"', q, k, v, a, initial_state=torch.zeros(1, 2, rows, columns, dtype=torch.float64))


def test_stride():
    q, k, v, a = inputs()
    refused("stride", q.transpose(2, 3).contiguous().transpose(2, 3), k, v, a)
    refused("stride", q[..., ::2].contiguous(), k[..., ::2], v, a)


def test_values():
    q, k, v, a = inputs()
    refused('"log_decay"', q, k, v, -a)  # positive
    refused("nan", q, k, v, torch.full_like(a, float("nan")))


def test_options():
    q, k, v, a = inputs()
    refused("squared", q, k, v, a, score="sqared")
    refused("sum", q, k, v, a, norm="som")
    refused("chunked", q, k, v, a, form="chunkd")
    refused("scale", q, k, v, a, scale=0.0)
    refused("scale", q, k, v, a, scale=float("nan"))
    refused("degree", q, k, v, a, score="power", degree=9)
    refused("state", q, k, v, a, score="exponential", output_final_state=True)
    refused("state", q, k, v, a, score="exponential", form="chunked")
    refused("chunk", q, k, v, a, chunk=-1)


def test_cu_seqlens():
    q, k, v, a = inputs()
    for bad in ([0, 5], [1, 6], [0, 4, 3, 6], [0, 3, 3, 6], [0], [], torch.tensor([0.0, 6.0]),
                torch.zeros(2, 2).long()):
        refused("cu_seqlens", q, k, v, a, cu_seqlens=bad)
    refused("cu_seqlens", *(torch.cat([x, x]) for x in (q, k, v, a)), cu_seqlens=[0, 6])


def test_not_tensors():
    q, k, v, a = inputs()
    refused("list", [1.0], k, v, a)
    refused("expected a tensor", q, k.tolist(), v, a)
    refused("expected a tensor", q, k.numpy(), v, a)
    refused("expected a tensor", q, k, None, a)
    refused("layout", q.to_sparse(), k, v, a)
    refused("meta", q, k.to("meta"), v, a)


def test_step():
    q, k, v, a = (x[:, 0] for x in inputs())
    rows, columns = furious.state_shape(16, 16)
    state = torch.zeros(1, 2, rows, columns)
    for name, args in (("state", (q, k, v, a, state[:, :1])), ("q", (q[0], k, v, a, state)),
                       ("v", (q, k, v[0], a, state)), ("gradient", (q.clone().requires_grad_(), k, v, a, state)),
                       ("gradient", (q, k, v, a, state.clone().requires_grad_())), ("state", (q, k, v, a, None))):
        with pytest.raises((furious.Error, TypeError)) as caught:
            furious.mixer_step(*args)
        assert name in str(caught.value), str(caught.value)
    assert state.abs().sum() == 0


def test_no_second_derivative():
    q, k, v, a = (x.requires_grad_() for x in inputs())
    (gradient,) = torch.autograd.grad(furious.mixer(q, k, v, a)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_numpy():
    q, k, v, a = (x.numpy() for x in inputs())
    refused("int64", q.astype(np.int64), k, v, a)
    refused('"k"', q, k.astype(np.float16), v, a)
    refused(">f4", q.astype(">f4"), k, v, a)
    refused("stride", np.asfortranarray(q), k, v, a)
    refused('"q"', q[0], k, v, a)
    refused("object", q.astype(object), k, v, a)
    read_only = q.copy()
    read_only.flags.writeable = False
    assert np.array_equal(furious.mixer(read_only, k, v, a)[0], furious.mixer(q, k, v, a)[0])
    rows, columns = furious.state_shape(16, 16)
    state = np.zeros((1, 2, rows, columns), np.float32)
    state.flags.writeable = False
    with pytest.raises(furious.Error, match="written"):
        furious.mixer_step(q[:, 0], k[:, 0], v[:, 0], a[:, 0], state)


@pytest.mark.skipif(not (torch.cuda.is_available() and furious.cuda_devices() > 0), reason="no GPU")
def test_devices():
    q, k, v, a = inputs("cuda")
    refused("cpu", q, k.cpu(), v, a)
    refused("cpu", q, k, v, a.cpu())
    refused("reference", q, k, v, a, form="reference")
    if torch.cuda.device_count() > 1:
        refused("cuda:1", q, k.to("cuda:1"), v, a)


@pytest.mark.skipif(not torch.cuda.is_available() or furious.cuda_devices() > 0,
                    reason="no GPU, or one that the library can use")
def test_build_without_cuda():
    refused("cuda", *inputs("cuda"))
