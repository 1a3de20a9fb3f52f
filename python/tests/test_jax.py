"""Arrays of jax: the forward pass, through DLPack both ways."""

import numpy as np
import pytest

import furious

jax = pytest.importorskip("jax", reason="jax is not installed")


def test_forward():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, 20, 2, 16)).astype(np.float32) for _ in range(3))
    a = -rng.random((2, 20, 2)).astype(np.float32)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = [jax.numpy.array(x) for x in (q, k, v, a)]
        out, state = furious.mixer(*arrays, output_final_state=True)
        wanted, wanted_state = furious.mixer(q, k, v, a, output_final_state=True)
        assert isinstance(out, jax.Array) and np.array_equal(np.asarray(out), wanted)
        assert isinstance(state, jax.Array) and np.array_equal(np.asarray(state), wanted_state)
        halves = [x.astype(jax.numpy.bfloat16) for x in arrays[:3]]
        half, _ = furious.mixer(*halves, arrays[3])
        assert half.dtype == jax.numpy.bfloat16 and np.abs(np.asarray(half, np.float32) - wanted).max() < 0.1
        with pytest.raises(furious.Error, match='"k"'):
            furious.mixer(arrays[0], arrays[1].astype(jax.numpy.bfloat16), *arrays[2:])
