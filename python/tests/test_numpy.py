"""The package without torch: in a process where it cannot be imported."""

import subprocess
import sys
import textwrap

PROGRAM = """
    import sys
    sys.modules["torch"] = None  # import torch fails
    import numpy as np
    import furious
    rng = np.random.default_rng(1)
    B, T, H, K, V = 2, 40, 2, 16, 24
    q, k = rng.standard_normal((2, B, T, H, K)).astype(np.float32)
    v = rng.standard_normal((B, T, H, V)).astype(np.float32)
    a = -rng.random((B, T, H)).astype(np.float32)

    def naive(q, k, v, a):
        A = np.cumsum(a.astype(np.float64), 1).transpose(0, 2, 1)
        s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k) / np.sqrt(K)
        w = np.tril(s**2 * np.exp(np.minimum(0, A[..., :, None] - A[..., None, :])))
        return np.einsum("bhij,bjhd->bihd", w / w.sum(-1, keepdims=True), v)

    wanted = naive(q, k, v, a)
    out, state = furious.mixer(q, k, v, a)
    assert state is None and out.dtype == np.float32 and np.abs(out - wanted).max() < 2e-5, np.abs(out - wanted).max()
    first, state = furious.mixer(q[:, :25], k[:, :25], v[:, :25], a[:, :25], output_final_state=True)
    second, _ = furious.mixer(q[:, 25:], k[:, 25:], v[:, 25:], a[:, 25:], initial_state=state)
    assert np.abs(np.concatenate([first, second], 1) - wanted).max() < 1e-4
    assert np.abs(furious.mixer_step(q[:, 25], k[:, 25], v[:, 25], a[:, 25], state) - wanted[:, 25]).max() < 1e-4
    half, _ = furious.mixer(q.astype(np.float16), k.astype(np.float16), v.astype(np.float16), a)
    assert half.dtype == np.float16 and np.abs(half - wanted).max() < 3e-2
    strided, _ = furious.mixer(np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2), k, v, a)
    assert np.array_equal(strided, out)
    exact, _ = furious.mixer(*(x.astype(np.float64) for x in (q, k, v, a)), form="reference")
    assert np.abs(exact - wanted).max() < 1e-12
    assert furious.presets()["2mamba"] and furious.config_of_preset("2mamba", "tiny", 256)["score"] == "squared"
    try:
        furious.nn
    except ImportError as error:
        assert "torch" in str(error)
    else:
        raise AssertionError("furious.nn without torch")
    print("done")
"""


def test_without_torch():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_import_is_light():
    program = "import sys, furious; print(sorted(m for m in ('torch', 'transformers', 'jax') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
