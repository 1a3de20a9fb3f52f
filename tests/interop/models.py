"""Exported models in Hugging Face's library, beside the engine. `make test-interop` runs these.

FURIOUS: the binary. FURIOUS_FIXTURES: checkpoints of other programs (tests/model/fixtures_test.cpp); without it their
tests are skipped.
"""

import importlib.util
import json
import os
import pathlib
import subprocess

import numpy as np
import torch

import furious

os.environ["HF_HUB_OFFLINE"] = "1"
# The AMX kernels of torch (oneDNN) end in an illegal instruction on systems that do not allow AMX; bf16 uses them.
os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE_BF16")

REPOSITORY = pathlib.Path(__file__).parents[2]
BINARY = os.environ.get("FURIOUS", str(REPOSITORY / "build/release/furious"))
FIXTURES = pathlib.Path(os.environ.get("FURIOUS_FIXTURES", "/nonexistent"))


def run(*arguments, code=0):
    """The output of the binary."""
    done = subprocess.run([BINARY, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == code, done.stdout
    return done.stdout


def _modeling():
    """modeling_furious.py as a module: it also says which tensors a configuration has."""
    file = REPOSITORY / "src/model/formats/modeling_furious.py"
    spec = importlib.util.spec_from_file_location("modeling_furious", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


modeling = _modeling()


def write_model(directory, config, seed=1, weight=0.25):
    """A model of furious' own format with random weights, and the tokenizer of bytes."""
    import safetensors.torch

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    module = modeling.FuriousForCausalLM(modeling.FuriousConfig(**config))
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, value in module.state_dict().items():
        around = 1.0 if name.endswith("norm.weight") or name.endswith(".D") else 0.0
        tensors[name] = around + weight * torch.randn(value.shape, generator=random)
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def close(mine, theirs, tolerance=1e-4):
    """Logits [length, vocabulary], compared row by row."""
    mine, theirs = np.asarray(mine, np.float64), np.asarray(theirs, np.float64)
    assert mine.shape == theirs.shape and np.isfinite(mine).all()
    for row, (a, b) in enumerate(zip(mine, theirs)):
        error = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
        assert error <= tolerance, f"row {row}: {error}"


def ids_of(length, vocabulary, seed=3):
    return np.random.default_rng(seed).integers(0, vocabulary, length)


def auto_model(directory, **options):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, **options)
    return model.eval()


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.as_tensor(np.asarray(ids))[None]).logits[0].float().numpy()


def engine(directory, **options):
    return furious.Model.load(directory, device="cpu", **options)
