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
    own = TrainOptions() if options is None else options
    for name, value in changes.items():
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, 1)
            raise Error(f'train: unknown option "{name}"; ' + (f'use "{near[0]}"' if near else "see TrainOptions"))
        try:
            setattr(own, name, os.fspath(value) if isinstance(value, os.PathLike) else value)
        except TypeError:
            raise Error(f'train: option "{name}" is {value!r}, expected a {type(getattr(own, name)).__name__}') from None
    return _furious.train(own, callback, message)


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
