"""Training as the command line does it, and its log."""

from __future__ import annotations

import difflib
import json
import os
from typing import Any, Callable

import numpy as np

from . import _furious
from ._furious import Error, TrainOptions, TrainResult, TrainStep

_OPTIONS = [name for name in dir(TrainOptions) if not name.startswith("_")]


def _options(options: TrainOptions | None, changes: dict[str, Any]) -> TrainOptions:
    own = TrainOptions() if options is None else options
    for name, value in changes.items():
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, 1)
            raise Error(f'train: unknown option "{name}"; ' + (f'use "{near[0]}"' if near else "see TrainOptions"))
        try:
            setattr(own, name, os.fspath(value) if isinstance(value, os.PathLike) else value)
        except TypeError:
            kind = type(getattr(own, name)).__name__
            raise Error(f'train: option "{name}" is {value!r}, expected a {kind}') from None
    return own


def train(options: TrainOptions | None = None, *, callback: Callable[[TrainStep], bool | None] | None = None,
          message: Callable[[str], None] | None = None, **changes: Any) -> TrainResult:
    """Trains a model; the run is a folder with checkpoints and a log.

    ``furious.train(arch="2mamba", data="shards/", out="run/", steps=1000)``

    Args:
        options: to start from, for example ``options_of_run(run)``; ``changes`` are options of `furious train` by name.
        callback: called after each step; False: save and return.
        message: called with lines about the run.

    Control-C raises KeyboardInterrupt after the step; the run can be resumed from its last checkpoint.
    """
    return _furious.train(_options(options, changes), callback, message)


def options_of_run(run: str | os.PathLike[str], previous: bool = False) -> TrainOptions | None:
    """The options to resume a run with; None if it has no checkpoint."""
    return _furious.options_of_run(os.fspath(run), previous)


def read_log(run: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """The log of a run as arrays, one entry for each step: step, loss, lr, …; NaN where a step lacks a number."""
    file = os.path.join(os.fspath(run), "log.jsonl")
    if not os.path.exists(file):
        raise Error(f"{file}: there is no such file; give the folder of a run")
    rows = []
    with open(file, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:  # of a process that was killed
                continue
            if isinstance(row, dict) and "loss" in row:
                rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    log = {}
    for name in names:
        column = [row.get(name) for row in rows]
        if all(value is None or isinstance(value, (int, float)) for value in column):
            whole = all(isinstance(value, int) for value in column)
            log[name] = np.array(column, np.int64) if whole else np.array(
                [np.nan if value is None else value for value in column], np.float64)
    return log


def _matrix(x: Any, what: str, dtype: Any) -> np.ndarray | None:
    if x is None:
        return None
    if hasattr(x, "detach"):  # torch
        x = x.detach().cpu()
    array = np.asarray(x)
    if array.ndim != 2 or (dtype == np.int32 and array.dtype.kind not in "iu"):
        raise Error(f"{what}: got {array.dtype} of shape {list(array.shape)}, expected [rows, length]")
    if dtype == np.int32 and array.size and (array.min() < -1 or array.max() > 2**31 - 1):
        raise Error(f"{what}: {array.min() if array.min() < -1 else array.max()} is no token id")
    return np.ascontiguousarray(array, dtype)


class Trainer:
    """A model in training, step by step, with batches of your own or those of the data of a run.

    Options are those of `furious train` by name; a Trainer is used by one thread at a time.

        trainer = furious.Trainer(arch="2mamba", hidden=64, heads=4, layers=2, vocabulary=258)
        for ids in batches:                            int [rows, length]
            print(trainer.step(ids).loss)
        trainer.save("checkpoint")
    """

    def __init__(self, options: TrainOptions | None = None, *, vocabulary: int = 0, tokenizer: str = "",
                 _trainer: _furious.Trainer | None = None, **changes: Any):
        self._trainer = _trainer or _furious.Trainer(_options(options, changes), vocabulary, tokenizer)

    @staticmethod
    def resume(checkpoint: str | os.PathLike[str], options: TrainOptions | None = None) -> Trainer:
        """Goes on from a checkpoint, or the newest of a run, to the bit."""
        return Trainer(_trainer=_furious.Trainer.resume(os.fspath(checkpoint), options))

    @staticmethod
    def _batch(ids: Any, targets: Any, weights: Any, documents: Any) -> tuple[Any, ...]:
        return (_matrix(ids, "ids", np.int32), _matrix(targets, "targets", np.int32),
                _matrix(weights, "weights", np.float32), [int(start) for start in documents])

    def step(self, ids: Any, targets: Any = None, weights: Any = None, documents: Any = ()) -> TrainStep:
        """One step of AdamW.

        Args:
            ids: ``[rows, length]``, of numpy or torch.
            targets: ``[rows, length]``, -1: none; ``None``: after each token the next.
            weights: ``[rows, length]`` factors of the losses; ``None``: 1.
            documents: positions in ids at which a document starts.
        """
        return self._trainer.step(*self._batch(ids, targets, weights, documents))

    def backward(self, ids: Any, targets: Any = None, weights: Any = None, documents: Any = ()) -> TrainStep:
        """The same without the update: loss and gradients."""
        return self._trainer.backward(*self._batch(ids, targets, weights, documents))

    def evaluate(self, ids: Any, targets: Any = None, weights: Any = None, documents: Any = ()) -> float:
        """The loss alone."""
        return self._trainer.evaluate(*self._batch(ids, targets, weights, documents))

    def data_batch(self, step: int) -> dict[str, Any]:
        """The batch with which a run on the options' data would do a step (1, 2, …): arguments of step()."""
        return self._trainer.data_batch(step)

    def test_loss(self) -> float | None:
        return self._trainer.test_loss()

    def set_learning_rate(self, rate: float | None) -> None:
        """Overrides the schedule; None: the schedule again."""
        self._trainer.set_learning_rate(rate)

    def parameter_names(self) -> list[str]:
        return self._trainer.parameter_names()

    def parameter(self, name: str) -> np.ndarray:
        """A copy, float32."""
        return self._trainer.parameter(name)

    def set_parameter(self, name: str, values: Any) -> None:
        values = values.detach().cpu() if hasattr(values, "detach") else values
        array = np.ascontiguousarray(values, np.float32)
        if list(array.shape) != list(self.parameter(name).shape):
            raise Error(f"{name}: shape {list(array.shape)}, expected {list(self.parameter(name).shape)}")
        self._trainer.set_parameter(name, array)

    def gradient(self, name: str) -> np.ndarray:
        """Of the last step() or backward(), before clipping; a copy, float32."""
        return self._trainer.gradient(name)

    def save(self, folder: str | os.PathLike[str]) -> None:
        self._trainer.save(os.fspath(folder))

    @property
    def steps_done(self) -> int:
        return self._trainer.steps_done()

    @property
    def vocabulary(self) -> int:
        return self._trainer.vocabulary()

    @property
    def options(self) -> TrainOptions:
        return self._trainer.options()

    def close(self) -> None:
        """Frees the memory; every later call is an Error."""
        self._trainer.close()
