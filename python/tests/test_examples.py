"""The scripts of examples/python run, and do what they say: small, with random weights."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

import furious
from test_model import make_checkpoint

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples are not beside the tests")


def run(script, *arguments):
    done = subprocess.run([sys.executable, str(EXAMPLES / script), *map(str, arguments)], capture_output=True,
                          env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "passive"})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def losses(text):
    return [float(x) for x in re.findall(r"loss (\d+\.\d+)", text)]


def test_gpt(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    text = tmp_path / "text"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    found = losses(run("gpt.py", "--text", text, "--steps", 21, "--length", 64, "--width", 64))
    assert found[-1] < found[0] - 1


def test_recall():
    pytest.importorskip("torch", reason="torch is not installed")
    found = losses(run("recall.py", "--mixers", "2mamba", "--steps", 20, "--pairs", 3, "--symbols", 8, "--batch", 4))
    assert found[-1] < found[0]


def test_book(tmp_path):
    make_checkpoint(tmp_path / "model")
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 30)
    common = ["--model", tmp_path / "model", "--tokenizer", "byte", "--state", tmp_path / "book.state"]
    assert "the state has" in run("book.py", *common, "--book", tmp_path / "book.txt")
    answer = run("book.py", *common, "--ask", "The rain", "--tokens", 10)
    model = furious.Model.load(tmp_path / "model", tokenizer="byte")
    session = model.session()
    session.prefill((tmp_path / "book.txt").read_text())
    session.prefill("The rain")
    assert answer == "The rain" + session.generate(10).text + "\n"
