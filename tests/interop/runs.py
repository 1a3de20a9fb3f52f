"""Short training runs with each kind of tokenizer."""

import json
import random

from models import FIXTURES, run

_TEXT = ("The quick brown fox jumps over the lazy dog. It doesn't matter: 12345 foxes, 3.14 dogs. "
         "Ünïcödé and straße, привет мир, 日本語のテキスト, for (int i = 0; i < n; ++i) return;\n")


def corpus(directory):
    """A little text, with new words in every line."""
    rng = random.Random(5)
    words = _TEXT.split()
    made = ["".join(rng.choice("abcdefghijklmnoprstuvwy") for _ in range(rng.randint(2, 9))) for _ in range(400)]
    file = directory / "text.txt"
    file.write_text("\n".join(_TEXT + " ".join(rng.choice(words + made) for _ in range(30)) for _ in range(1200)))
    return file


def tokenizer_of(kind, directory, text):
    """The argument of --tokenizer."""
    if kind == "byte":
        return "byte"
    if kind == "own":
        run("tokenizer", "train", text, "--vocab", 600, "--out", directory / "own.model")
        return directory / "own.model"
    if (FIXTURES / kind).is_dir():
        return FIXTURES / kind
    import sentencepiece

    options = {"unigram": dict(model_type="unigram"), "nfkc": dict(model_type="bpe", byte_fallback=True),
               "unigram-plain": dict(model_type="unigram", normalization_rule_name="identity", byte_fallback=True,
                                     remove_extra_whitespaces=False),
               "no-bytes": dict(model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False)}
    sentencepiece.SentencePieceTrainer.train(input=str(text), model_prefix=str(directory / kind), vocab_size=500,
                                             minloglevel=2, **options[kind])
    return directory / f"{kind}.model"


def train(kind, directory, *flags):
    """The folder of the run."""
    text = corpus(directory)
    tokenizer = tokenizer_of(kind, directory, text)
    run("tokenize", text, "--tokenizer", tokenizer, "--out", directory / "data", "--test-fraction", 0,
        *(["--bos"] if "--bos" in flags else []))
    run("train", "--data", directory / "data", "--out", directory / "run", "--hidden", 32, "--heads", 4, "--layers", 1,
        "--intermediate", 32, "--steps", 2, "--batch", 2, "--length", 32, "--eval-every", 0, "--sample-every", 0,
        *flags)
    assert json.loads((directory / "run/latest/config.json").read_text())["model_type"] == "furious"
    return directory / "run"
