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


@pytest.mark.parametrize("arch", ["2mamba", "mamba2", "softmax", "2mamba-dt", "linear"])
def test_gradients_of_the_module_are_the_trainers(arch, tmp_path):
    """The same weights and batch: loss and gradient of every parameter, in torch and in the engine."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    trainer = furious.Trainer(arch=arch, hidden=32, heads=2, layers=2, intermediate=32, device="cpu", vocabulary=40,
                              initialization="pytorch", warmup=0, lr=1e-2, steps=10)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 40, (2, 24))
    for _ in range(3):
        trainer.step(ids)
    trainer.save(tmp_path / "model")
    module = furious.nn.LanguageModel.load(tmp_path / "model")
    step = trainer.backward(ids)
    batch = torch.from_numpy(ids)
    loss = torch.nn.functional.cross_entropy(module(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    assert abs(loss.item() - step.loss) < 1e-5 and step.tokens == 46
    names = dict(module.named_parameters())
    assert set(names) == set(trainer.parameter_names())
    for name, weight in names.items():
        wanted = trainer.gradient(name).reshape(weight.shape)
        size = np.abs(wanted).max()
        assert np.abs(weight.grad.numpy() - wanted).max() <= 2e-3 * size + 1e-7, name


def test_trainer_is_the_run(tmp_path):
    options = dict(SMALL, steps=5, lr=1e-3, warmup=2)
    losses = []
    furious.train(**options, out=tmp_path / "run", callback=lambda step: losses.append(step.loss))
    trainer = furious.Trainer(**options)
    own = [trainer.step(**trainer.data_batch(step)).loss for step in range(1, 4)]
    trainer.save(tmp_path / "half")
    trainer.close()
    with pytest.raises(furious.Error, match="closed"):
        trainer.steps_done
    resumed = furious.Trainer.resume(tmp_path / "half")
    own += [resumed.step(**resumed.data_batch(step)).loss for step in range(4, 6)]
    assert own == losses and resumed.steps_done == 5


def test_trainer_bad_input():
    trainer = furious.Trainer(arch="2mamba", hidden=32, heads=2, layers=1, intermediate=32, device="cpu", vocabulary=40)
    for bad in ([1, 2, 3], [[1, 41]], [[-1, 2]], [[0.5, 1.0]], [[2**40, 1]], []):
        with pytest.raises(furious.Error):
            trainer.step(bad)
    with pytest.raises(furious.Error):
        trainer.step([[1, 2, 3]], targets=[[1, 2]])
    with pytest.raises(furious.Error, match="nowhere"):
        trainer.gradient("nowhere")
    with pytest.raises(furious.Error, match="shape"):
        trainer.set_parameter("model.norm.weight", np.zeros(3))
    trainer.set_parameter("model.norm.weight", np.full(32, 0.5))
    assert (trainer.parameter("model.norm.weight") == 0.5).all()
    with pytest.raises(furious.Error):
        furious.Trainer(hidden=32, heads=2)  # no vocabulary and no data


def test_torch_trains_like_the_trainer(tmp_path):
    """Module, operator and torch's AdamW against the engine: the same weights and batches give the same losses."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    trainer = furious.Trainer(arch="2mamba", hidden=32, heads=2, layers=2, intermediate=32, device="cpu", vocabulary=40,
                              warmup=3, lr=3e-3, steps=20)
    trainer.save(tmp_path / "start")
    module = furious.nn.LanguageModel.load(tmp_path / "start")
    optimizer = torch.optim.AdamW(module.parameters(), betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 40, (4, 32))
    losses = []
    for _ in range(15):
        step = trainer.step(ids)
        optimizer.param_groups[0]["lr"] = step.lr
        batch = torch.from_numpy(ids)
        loss = torch.nn.functional.cross_entropy(module(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((step.loss, loss.item()))
    assert losses[-1][0] < losses[0][0] - 0.1
    assert max(abs(a - b) for a, b in losses) < 2e-3, losses
