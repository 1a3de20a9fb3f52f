"""furious: the 2Mamba family of language models.

    o, state = furious.mixer(q, k, v, log_decay)       the operator, for torch, numpy and jax
    furious.nn                                          modules of torch built on it (imported on demand)
    model = furious.Model.load("runs/stories")          models and sessions of the library
    furious.train(arch="2mamba", data="shards/", out="run/")
    furious.hf.register()                               Hugging Face's Auto classes

Only numpy is needed to import it. Errors of the library are furious.Error.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._furious import Error, Text, TrainOptions, TrainResult, TrainStep, cuda_devices, mixer_names, synchronize
from ._furious import version as _version
from ._mixer import mixer, mixer_step, state_shape
from ._model import Model, SequenceBatch, SequenceState, Session
from ._presets import config_of_preset, normal_config, presets
from ._train import Trainer, options_of_run, read_log, train

if TYPE_CHECKING:
    from . import hf, nn

__version__ = _version()
__all__ = [
    "Error", "Model", "SequenceBatch", "SequenceState", "Session", "Text", "TrainOptions", "TrainResult", "TrainStep",
    "Trainer", "config_of_preset", "cuda_devices", "hf", "mixer", "mixer_names", "mixer_step", "nn", "normal_config",
    "options_of_run", "presets", "read_log", "state_shape", "synchronize", "train",
]


def __getattr__(name: str) -> Any:
    # torch and transformers are imported only where they are used.
    if name in ("nn", "hf"):
        return importlib.import_module("." + name, __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "nn", "hf"])
