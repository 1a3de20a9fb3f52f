"""Compares the ids of furious with those of the tokenizers package on many lines, and measures both on one core.

    python tests/interop/check_tokenizers.py DIRECTORY... [--lines 100000] [--seed 1]

DIRECTORY holds a tokenizer.json. The exit code is 1 where ids differ.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import tokenizers  # noqa: E402
from models import run, write_model  # noqa: E402
from runs import corpus  # noqa: E402
from torture import lines  # noqa: E402

import furious  # noqa: E402


def megabytes_per_second(text, work):
    """By the time of the processor, which other programs do not change."""
    begin = sum(os.times()[:4])  # also of processes that have ended
    work()
    return len(text.encode()) / 1e6 / (sum(os.times()[:4]) - begin)


def check(directory, count, seed):
    theirs = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = furious.config_of_preset("2mamba", "tiny", theirs.get_vocab_size(), hidden_size=32, heads=4)
        model = furious.Model.load(write_model(folder / "model", config), tokenizer=str(directory), device="cpu")
        texts = list(lines(count, seed))
        different = [(text, mine, ids) for text in texts
                     if (mine := model.encode(text)) != (ids := theirs.encode(text, add_special_tokens=False).ids)]
        speeds = []
        for i, text in enumerate((corpus(folder).read_text() * 32, "\n".join(texts))):
            file = folder / f"{i}.txt"
            file.write_text(text)
            command = ("tokenize", file, "--tokenizer", directory, "--test-fraction", 0, "--threads", 1)
            speeds.append(megabytes_per_second(text, lambda: run(*command, "--out", folder / str(i))))
            speeds.append(megabytes_per_second(text, lambda: theirs.encode_batch(text.split("\n"))))
    print(f"{directory.name}: {len(different)} of {count} lines differ; plain text {speeds[0]:.1f} MB/s "
          f"(tokenizers {speeds[1]:.1f}), torture {speeds[2]:.1f} MB/s (tokenizers {speeds[3]:.1f})")
    for text, mine, ids in different[:5]:
        print(f"  {text!r}\n    furious    {mine}\n    tokenizers {ids}")
    return bool(different)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--lines", type=int, default=100000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    return int(any([check(directory, options.lines, options.seed) for directory in options.directories]))


if __name__ == "__main__":
    sys.exit(main())
