"""`furious eval --task` and lm-evaluation-harness score the same model on the same task. `make test-eval` runs this.

    python check_lm_eval.py FURIOUS
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

binary = sys.argv[1]
WORDS = ["the", "sky", "is", "blue", "straße", "naïve", "café", "日本語", "Ωμέγα", "river", "stone", "don't", "42", "🙂",
         "and", "of", "old", "house", "runs", "über"]


def text(rng, words):
    return " ".join(rng.choice(WORDS) for _ in range(words))


def make_model(folder):
    rng = random.Random(1)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [text(rng, 20) for _ in range(300)],
        trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128,
                         num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512, bos_token_id=0,
                         eos_token_id=1, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)


def make_tasks():
    rng = random.Random(2)
    choice, single = [], []
    for i in range(20):
        choices = [("" if i % 3 else " ") + text(rng, rng.randint(1, 5)) for _ in range(rng.randint(2, 5))]
        choice.append({"context": text(rng, rng.randint(1, 12)) + ["", " ", ":", "\n"][i % 4], "choices": choices,
                       "answer": rng.randrange(len(choices))})
        if i < 10:
            single.append({"context": text(rng, 8), "choices": [text(rng, 1)]})
    return {"choice": choice, "single": single}


def pairs_of(example):
    """As lm-evaluation-harness builds them, with target_delimiter " " where neither side has white space."""
    for choice in example["choices"]:
        spaced = example["context"][-1].isspace() or choice[0].isspace()
        yield example["context"], choice if spaced else " " + choice


def best(scores):
    return max(range(len(scores)), key=lambda i: scores[i])


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    make_model(folder / "model")
    theirs = HFLM(pretrained=str(folder / "model"), device="cpu", dtype="float32", batch_size=1)
    worst = 0.0
    for task, examples in make_tasks().items():
        file = folder / f"{task}.jsonl"
        file.write_text("".join(json.dumps(example, ensure_ascii=False) + "\n" for example in examples))
        subprocess.run([binary, "eval", str(folder / "model"), "--task", str(file), "--out", str(folder / "out.jsonl"),
                        "--json", str(folder / "out.json"), "--device", "cpu"], check=True, stdout=subprocess.DEVNULL)
        ours = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
        report = json.loads((folder / "out.json").read_text())["tasks"][0]
        right, right_norm = 0, 0
        for example, own in zip(examples, ours, strict=True):
            expected = theirs.loglikelihood(
                [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs_of(example))], disable_tqdm=True)
            for (score, greedy), choice in zip(expected, own["choices"], strict=True):
                difference = abs(score - choice["log_likelihood"])
                worst = max(worst, difference)
                assert difference < 1e-3 * max(1, abs(score)), (example, score, choice)
            scores = [score for score, _ in expected]
            if task == "single":
                assert own["greedy"] == expected[0][1], example
                right += expected[0][1]
            else:
                normal = [s / len(c.encode()) for s, c in zip(scores, example["choices"])]
                assert own["best"] == best(scores) and own["best_per_byte"] == best(normal), example
                right += best(scores) == example["answer"]
                right_norm += best(normal) == example["answer"]
        assert abs(report["acc"]["value"] - right / len(examples)) < 1e-9, report
        if task == "choice":
            assert abs(report["acc_norm"]["value"] - right_norm / len(examples)) < 1e-9, report
print(f"lm-evaluation-harness scores the same; largest difference of a log-likelihood {worst:.2g}")
