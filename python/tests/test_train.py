"""Training through the package, its callbacks and its log."""

import os
import signal

import numpy as np
import pytest

import furious

SMALL = dict(arch="2mamba", data="synthetic:recall", hidden=32, heads=2, layers=1, intermediate=32, batch=2, length=32,
             device="cpu", eval_every=0, sample_every=0)


def test_train(tmp_path):
    run = tmp_path / "run"
    steps, messages = [], []
    result = furious.train(**SMALL, out=run, steps=6, callback=steps.append, message=messages.append)
    assert result.steps == 6 and not result.stopped and [s.step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert messages and result.last.loss == steps[-1].loss and os.path.isdir(result.checkpoint)
    log = furious.read_log(run)
    assert log["step"].tolist() == [1, 2, 3, 4, 5, 6] and np.allclose(log["loss"], [s.loss for s in steps], rtol=1e-5)
    # Goes on where it was.
    options = furious.options_of_run(run)
    assert options.resume and options.hidden == 32
    more = furious.train(options, steps=8)
    assert more.steps == 8 and len(furious.read_log(run)["step"]) == 8


def test_stop(tmp_path):
    result = furious.train(**SMALL, out=tmp_path / "run", steps=50, callback=lambda step: step.step < 3)
    assert result.stopped and result.steps == 3


def test_exceptions_of_callbacks(tmp_path):
    def fail(step):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        furious.train(**SMALL, out=tmp_path / "a", steps=5, callback=fail)
    with pytest.raises(KeyboardInterrupt):
        furious.train(**SMALL, out=tmp_path / "b", steps=500,
                      callback=lambda step: os.kill(os.getpid(), signal.SIGINT))


def test_bad_input(tmp_path):
    with pytest.raises(furious.Error, match='"steps"'):
        furious.train(**SMALL, out=tmp_path, stps=3)
    with pytest.raises(furious.Error, match="batch"):
        furious.train(**{**SMALL, "batch": "many"}, out=tmp_path)
    with pytest.raises(furious.Error, match="2mamba"):
        furious.train(**{**SMALL, "arch": "2mambo"}, out=tmp_path / "run", steps=1)
    with pytest.raises(furious.Error, match="log.jsonl"):
        furious.read_log(tmp_path / "none")
    assert furious.options_of_run(tmp_path / "none") is None


def test_a_run_loads_as_a_module(tmp_path):
    """Names and shapes of the trainer's checkpoint are those of the module; test_nn.py compares what they compute."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    furious.train(**SMALL, out=tmp_path / "run", steps=2)
    module = furious.nn.LanguageModel.load(tmp_path / "run")
    assert module.config["hidden_size"] == 32 and torch.isfinite(module(torch.arange(8)[None])).all()
