"""AutoTokenizer on runs and exported directories: the ids of furious, also of texts that tokenizers get wrong."""

import json
import os

import pytest
import transformers
from models import FIXTURES, engine, run
from runs import train
from torture import lines

import furious

COUNT = int(os.environ.get("FURIOUS_TORTURE_LINES", 2000))
OWN = ["byte", "own"]
WITH_CODE = ["unigram", "unigram-plain", "nfkc", "no-bytes"]  # SentencePiece models that no tokenizer.json represents
PUBLISHED = ["tok-gpt2", "tok-llama2", "tok-llama2-metaspace", "tok-llama3", "tok-neox", "tok-qwen2", "tok-starcoder2"]


def check(directory, model, bos, **options):
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
    assert tokenizer.eos_token_id == (model.eos if model.eos >= 0 else None)
    different = []
    for line in lines(COUNT):
        ids = model.encode(line)
        theirs = tokenizer(line, add_special_tokens=False)["input_ids"]
        if ids != theirs:
            different.append((line, ids, theirs))
    assert not different, f"{len(different)} of {COUNT} lines differ, such as {different[0]}"
    if bos is not None:
        assert tokenizer("a b")["input_ids"] == [model.bos] * bos + model.encode("a b")
    for line in ("Hello, world! 12 foxes\n\tstraße", "日本語 😀"):
        ids = model.encode(line)
        assert tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) == model.decode(ids)
    return tokenizer


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", OWN + WITH_CODE)
def test_own_runs(kind, bos, tmp_path):
    folder = train(kind, tmp_path, *(["--packing", "rows", "--bos"] if bos else []))
    code = {"trust_remote_code": True} if kind in WITH_CODE else {}
    model = engine(folder)
    check(folder / "latest", model, bos, **code)
    run("export", folder, "--to", "hf", "--out", tmp_path / "hf")
    tokenizer = check(tmp_path / "hf", model, bos, **code)
    if code:  # asked before, not other ids
        with pytest.raises(ValueError, match="trust_remote_code|custom code"):
            transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", trust_remote_code=False)
    tokenizer.save_pretrained(tmp_path / "saved")
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved", **code)
    assert again("a <s> b")["input_ids"] == tokenizer("a <s> b")["input_ids"]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_runs_with_published_tokenizers(kind, tmp_path):
    if not (FIXTURES / kind).is_dir():
        pytest.skip(f"{FIXTURES / kind} is not there")
    folder = train(kind, tmp_path)
    model = engine(folder)
    check(folder / "latest", model, None)
    run("export", folder, "--to", "hf", "--out", tmp_path / "hf")
    check(tmp_path / "hf", model, None)


def test_a_run_is_a_model(tmp_path):
    """furious.hf.from_pretrained takes the folder of a run, as furious.Model.load does."""
    folder = train("byte", tmp_path)
    ids = list(b"The quick brown fox")
    import torch

    model = furious.hf.from_pretrained(folder)
    logits = model(torch.tensor([ids])).logits[0].detach().numpy()
    assert abs(logits - engine(folder).logits(ids)).max() < 1e-4
    assert json.loads((folder / "latest/config.json").read_text())["model_type"] == model.config.model_type
