"""Models and sessions of the library: what they compute, what they keep, and what they refuse."""

import json
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import furious
from furious import _safetensors


def make_checkpoint(folder, arch="2mamba"):
    """Random weights with the tokenizer of bytes; without torch."""
    config = furious.config_of_preset(arch, "tiny", 258, hidden_size=32, heads=2, intermediate_size=32,
                                      num_hidden_layers=2)
    rng = np.random.default_rng(1)
    normal = lambda *shape: (0.4 * rng.standard_normal(shape)).astype(np.float32)
    weights = {"model.embed_tokens.weight": normal(258, 32), "lm_head.weight": normal(258, 32),
               "model.norm.weight": np.ones(32, np.float32)}
    for i in range(2):
        layer = f"model.layers.{i}."
        weights.update({
            layer + "input_layernorm.weight": np.ones(32, np.float32),
            layer + "post_attention_layernorm.weight": np.ones(32, np.float32),
            layer + "self_attn.qkv_proj.weight": normal(96, 32), layer + "self_attn.conv1d.weight": normal(96, 1, 2),
            layer + "self_attn.conv1d.bias": normal(96), layer + "self_attn.A_mask_proj.weight": normal(2, 32),
            layer + "self_attn.o_proj.weight": normal(32, 32), layer + "mlp.gate_proj.weight": normal(32, 32),
            layer + "mlp.up_proj.weight": normal(32, 32), layer + "mlp.down_proj.weight": normal(32, 32)})
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as stream:
        json.dump(config, stream)
    _safetensors.write(os.path.join(folder, "model.safetensors"), weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder)
    return furious.Model.load(folder, tokenizer="byte", device="cpu")


def test_model(model):
    assert model.arch == "2mamba" and model.vocabulary == 258 and model.config["score"] == "squared"
    ids = model.encode("Grüße")
    assert model.decode(ids) == "Grüße" and model.decode(np.array(ids)) == "Grüße"
    logits = model.logits(ids)
    assert logits.shape == (len(ids), 258) and logits.dtype == np.float32
    scores = model.score(ids)
    wanted = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    assert np.allclose(scores, [wanted[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-5)
    texts = model.score("Grüße")
    assert [id for id, _ in texts] == ids[-len(texts):]
    assert len(model.fingerprint) > 8


def test_logits_of_torch_ids(model):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    logits = model.logits(torch.tensor([1, 2, 3]))
    assert isinstance(logits, torch.Tensor) and np.array_equal(logits.numpy(), model.logits([1, 2, 3]))


def test_generate_and_stream(model):
    text = model.generate("Once", tokens=20, seed=5)
    assert isinstance(text, str) and text == "".join(model.stream("Once", tokens=20, seed=5))
    assert model.generate("Once", tokens=20, temperature=0) == model.generate("Once", tokens=20, temperature=0, seed=9)
    session = model.session()
    session.prefill("Once")
    written = session.generate(6, temperature=0, log_probabilities=2)
    assert written.tokens == len(written.ids) and written.ending in ("tokens", "eos")
    id, log_probability, most = written.log_probabilities[0]
    assert id == written.ids[0] and most[0][0] == id and most[0][1] == log_probability and len(most) == 2
    # The loop is left early: the writing ends, and the session can go on.
    session = model.session()
    session.prefill("Once")
    for piece in session.stream(1000, seed=2):
        break
    assert session.tokens < 1000
    session.generate(3)


def test_sessions(model, tmp_path):
    ids = model.prompt("The quick brown fox")
    session = model.session()
    seen = []
    assert session.prefill(ids, progress=lambda read, all: seen.append((read, all)))
    assert seen[-1] == (len(ids), len(ids)) and session.tokens == len(ids) and session.nbytes > 0
    assert np.abs(session.logits() - model.logits(ids)[-1]).max() < 1e-3
    fork = session.fork()
    session.save(tmp_path / "a.state")
    bytes_, states = session.save_bytes(), session.states()
    after = session.step(65)
    others = [fork]
    for _ in range(3):
        others.append(model.session())
    others[1].load(tmp_path / "a.state")
    others[2].load_bytes(bytes_)
    others[3].set_states(states)
    for other in others:
        assert np.array_equal(other.step(65), after)
    state = states[0]
    assert state.tokens == len(ids) and state.recent.tolist() == ids and state.recent.dtype == np.int32
    assert state.model == model.fingerprint and all(a.dtype == np.float32 for a in state.arrays.values())
    # Arrays can be changed: other memories, other answers.
    for array in state.arrays.values():
        array *= 0.5
    changed = model.session()
    changed.set_states([state])
    assert not np.array_equal(changed.step(65), after)


def test_several_sequences(model):
    session = model.session(2)
    session.prefill(["One", "Another text"])
    single = model.session()
    single.prefill("Another text")
    assert np.abs(session.logits(1) - single.logits()).max() < 1e-4
    texts = session.write(5, temperature=0)
    assert len(texts) == 2 and texts[1].ids == single.generate(5, temperature=0).ids
    session.prefill([[1, 2], np.array([3])])
    pieces = []
    session.write(4, show=lambda piece, sequence: pieces.append(sequence))


def test_sequence_batch(model, tmp_path, device):
    if device != "cpu":
        make_checkpoint(tmp_path)
        model = furious.Model.load(tmp_path, tokenizer="byte", device=device, dtype="f32")

    def alone(text, count):
        session = model.session()
        session.prefill(text)
        ids = []
        for _ in range(count):
            ids.append(int(np.argmax(session.logits())))
            session.step(ids[-1])
        return ids

    batch = furious.SequenceBatch(model, 3)
    a, b = batch.add(temperature=0), batch.add(temperature=0, log_probabilities=2)
    seen = []
    assert batch.prefill({a: "One", b: model.prompt("Another text")}, progress=lambda *n: seen.append(n))
    assert seen[-1][0] == seen[-1][1] and batch.tokens(a) == len(model.prompt("One"))
    first, second = [], []
    for _ in range(3):
        (id, log_probability, most), other = batch.step([a, b])
        assert log_probability == 0 and most == []
        assert other[1] < 0 and len(other[2]) == 2 and other[2][0][0] == other[0]
        first.append(id)
        second.append(other[0])
    # One leaves for a while, and others take its place.
    state = batch.state(a)
    batch.remove(a)
    c, d = batch.add(seed=9), batch.fork(b, temperature=0)
    assert batch.sequences == sorted([b, c, d]) and np.array_equal(batch.logits(b), batch.logits(d))
    with pytest.raises(furious.Error, match="3"):
        batch.add()
    batch.prefill({c: "A third"})
    chosen = {sequence: token[0] for sequence, token in zip(batch.sequences, batch.step())}
    assert chosen[b] == chosen[d]
    second.append(chosen[b])
    assert batch.step([c], ids=[65]) is None and batch.state(c).recent[-1] == 65
    batch.remove(c)
    batch.remove(d)
    a = batch.add(state, temperature=0)
    for _ in range(4):
        first.append(batch.step([a])[0][0])
    assert first == alone("One", 7) and second == alone("Another text", 4)
    assert batch.nbytes > 0
    refused("temperature", lambda: batch.add(temperature=-1))
    refused("sequence", lambda: batch.step([a, 7]))
    refused("Model", lambda: furious.SequenceBatch("runs/stories", 2))
    assert batch.sequences == sorted([a, b])
    with batch:
        pass
    refused("closed", lambda: batch.step())


def refused(words, call):
    with pytest.raises((furious.Error, TypeError)) as caught:
        call()
    assert words in str(caught.value), str(caught.value)


def test_bad_input(model, tmp_path):
    refused("nowhere", lambda: furious.Model.load(tmp_path / "nowhere"))
    refused("device", lambda: furious.Model.load(tmp_path, device="gpu7"))
    refused("300", lambda: model.logits([1, 300]))
    refused("token id", lambda: model.logits([1, -2]))
    refused("token id", lambda: model.logits([1, 2**40]))
    refused("token ids", lambda: model.logits([[1, 2]]))
    refused("token ids", lambda: model.logits([0.5]))
    session = model.session()
    refused("read", lambda: session.logits())
    refused("temperature", lambda: (session.prefill("a"), session.generate(3, temperature=-1)))
    refused("temprature", lambda: session.generate(3, temprature=1))
    refused("sequence", lambda: session.logits(3))
    refused("Model", lambda: furious.Session("runs/stories"))
    (tmp_path / "bad.state").write_bytes(b"nothing")
    refused("bad.state", lambda: session.load(tmp_path / "bad.state"))
    state = session.states()[0]
    state.arrays.popitem()
    refused("", lambda: session.set_states([state]))
    refused("", lambda: model.session(0))
    assert session.tokens > 0  # still whole


def test_closed_sessions(model):
    with model.session() as session:
        session.prefill("Once")
        state = session.states()
    for call in (session.logits, session.save_bytes, session.fork, session.states, lambda: session.step(1),
                 lambda: session.tokens, lambda: session.prefill("a"), lambda: session.generate(2),
                 lambda: session.set_states(state)):
        with pytest.raises(furious.Error, match="closed"):
            call()
    session.close()  # may be repeated


def test_one_thread_at_a_time(model):
    session = model.session()
    session.prefill("Once")
    problems = []

    def show(piece, sequence):
        try:
            session.tokens
        except furious.Error as error:
            problems.append(str(error))
        return False

    session.write(5, show=show)
    assert problems and "thread" in problems[0]


def test_callbacks_raise(model):
    session = model.session()

    class Stop(Exception):
        pass

    def fail(*_):
        raise Stop("now")

    with pytest.raises(Stop, match="now"):
        session.prefill("Once", progress=fail)
    session = model.session()
    session.prefill("Once")
    with pytest.raises(Stop, match="now"):
        session.write(5, show=fail)
    session = model.session()
    session.prefill("Once")
    with pytest.raises(KeyboardInterrupt):
        session.write(500, show=lambda *_: os.kill(os.getpid(), signal.SIGINT))


def test_gil_is_released(model):
    """Another thread counts while a prompt is read. The interpreter would switch threads by itself after 100 s only, so
    it counts where the call gives the lock away and nowhere else."""
    counted, done = [0], threading.Event()

    def count():
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        end = time.monotonic() + 60
        advanced = False
        while not advanced and time.monotonic() < end:
            before = counted[0]
            model.logits([1] * 2000)
            advanced = counted[0] > before
    finally:
        done.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert advanced


def test_threads_share_a_model(model):
    wanted = model.generate("Once", tokens=20, seed=5)
    results = []
    threads = [threading.Thread(target=lambda: results.append(model.generate("Once", tokens=20, seed=5)))
               for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert results == [wanted] * 4


def test_no_leak(model):
    def resident():
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    session = model.session()
    session.prefill("Once upon a time")

    def once():
        fork = session.fork()
        fork.set_states(fork.states())
        fork.load_bytes(fork.save_bytes())
        fork.step(65)
        model.logits([1, 2, 3] * 20)

    for _ in range(50):
        once()
    before = resident()
    for _ in range(1000):
        once()
    assert resident() - before < 16 << 20
